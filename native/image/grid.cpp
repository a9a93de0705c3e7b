#include "grid.h"

#include <algorithm>
#include <cstring>

#include "../clones.h"

namespace feedline {
namespace {

using std::int64_t;
using std::size_t;
using std::uint16_t;
using std::uint8_t;
using Bytes = std::vector<uint8_t>;

enum Marker : uint8_t { SOF0 = 0xC0, SOF1 = 0xC1, DHT = 0xC4, RST0 = 0xD0, EOI = 0xD9, SOS = 0xDA, DQT = 0xDB,
                        DRI = 0xDD, APP0 = 0xE0, APP14 = 0xEE, FILL = 0xFF };

constexpr int64_t kMarker = 2;  // bytes of a marker that has no contents

// The window must leave out at least 1/8 of what a decoder would read; otherwise the copy saves no time.
constexpr int64_t kOf = 8, kAtMost = 7;

inline unsigned big16(const uint8_t* at) { return static_cast<unsigned>(at[0]) << 8 | at[1]; }

inline void put16(uint8_t* at, int64_t value) {
    at[0] = static_cast<uint8_t>(value >> 8);
    at[1] = static_cast<uint8_t>(value);
}

inline void append(Bytes& out, const uint8_t* from, size_t nbytes) { out.insert(out.end(), from, from + nbytes); }

// A half-open range of columns, rows, MCUs or intervals.
struct Range {
    int64_t start, stop;
    int64_t size() const { return stop - start; }
};

// Fields of a baseline JPEG's header that the grid needs.
struct Frame {
    int64_t width = 0, height = 0;
    int64_t unit_width = 0, unit_height = 0;  // pixels of an MCU
    int64_t most_wide = 1;                    // horizontal sampling factor of the finest component
    int components = 0;
    int64_t interval = 0;                     // MCUs between restarts
    size_t frame_at = 0;                      // offset of the SOF segment in the header that is written
    size_t scan = 0;                          // offset of the entropy-coded data in the file

    int64_t columns() const { return (width + unit_width - 1) / unit_width / interval; }  // intervals of a row
    int64_t rows() const { return (height + unit_height - 1) / unit_height; }
};

// Reads the header and writes the segments that a decoder of the part needs: tables, frame, scan, and those that decide
// the color space. Every read is checked against the end of the file.
class HeaderReader {
public:
    HeaderReader(const uint8_t* jpeg, size_t nbytes, Bytes& out) : jpeg_(jpeg), nbytes_(nbytes), out_(out) {}

    bool read(Frame& frame) {
        if (nbytes_ < 4 || jpeg_[0] != 0xFF || jpeg_[1] != 0xD8) return false;
        append(out_, jpeg_, 2);
        for (size_t at = 2; at + 4 <= nbytes_ && jpeg_[at] == 0xFF;) {
            const uint8_t marker = jpeg_[at + 1];
            const size_t length = big16(jpeg_ + at + 2);  // counts itself, not the marker
            if (length < 2 || at + 2 + length > nbytes_) return false;
            if (!segment(frame, marker, jpeg_ + at, length + 2)) return false;
            at += 2 + length;
            if (marker == SOS) {
                frame.scan = at;
                return whole_image(frame);
            }
        }
        return false;
    }

private:
    bool segment(Frame& frame, uint8_t marker, const uint8_t* at, size_t nbytes) {
        switch (marker) {
            case SOF0: case SOF1: return start_of_frame(frame, at, nbytes);
            case SOS: return nbytes > 4 && at[4] == frame.components && keep(at, nbytes);
            case DRI: frame.interval = nbytes >= 6 ? big16(at + 4) : 0; return keep(at, nbytes);
            case DHT: case DQT: return keep(at, nbytes);
            case APP0: return jfif(at, nbytes);
            case APP14: return nbytes < 16 || std::memcmp(at + 4, "Adobe", 5) != 0 || keep(at, nbytes);
        }
        return marker > APP0 && marker < FILL;  // other applications' markers and comments are left out
    }

    bool keep(const uint8_t* at, size_t nbytes) {
        append(out_, at, nbytes);
        return true;
    }

    bool jfif(const uint8_t* at, size_t nbytes) {
        if (nbytes < 18 || std::memcmp(at + 4, "JFIF", 5) != 0) return true;
        const size_t start = out_.size();
        append(out_, at, 18);
        put16(out_.data() + start + 2, 16);
        put16(out_.data() + start + 16, 0);  // the thumbnail is 0 × 0 now
        return true;
    }

    bool start_of_frame(Frame& frame, const uint8_t* at, size_t nbytes) {
        if (frame.components || nbytes < 10 || at[4] != 8) return false;
        frame.height = big16(at + 5);
        frame.width = big16(at + 7);
        frame.components = at[9];
        if (!frame.components || nbytes < 10 + size_t{3} * at[9] || !frame.width || !frame.height) return false;
        int64_t most_high = 1;
        for (int i = 0; i < frame.components; i++) {
            const int64_t wide = at[11 + 3 * i] >> 4, high = at[11 + 3 * i] & 15;
            if (wide < 1 || wide > 4 || high < 1 || high > 4) return false;
            frame.most_wide = std::max(frame.most_wide, wide);
            most_high = std::max(most_high, high);
        }
        const bool single = frame.components == 1;  // a single component has one block per MCU
        frame.unit_width = single ? 8 : 8 * frame.most_wide;
        frame.unit_height = single ? 8 : 8 * most_high;
        frame.frame_at = out_.size();
        return keep(at, nbytes);
    }

    static bool whole_image(const Frame& frame) {
        const int64_t units = frame.components ? (frame.width + frame.unit_width - 1) / frame.unit_width : 0;
        return frame.interval > 0 && units > 0 && units % frame.interval == 0;
    }

    const uint8_t* const jpeg_;
    const size_t nbytes_;
    Bytes& out_;
};

// Returns the intervals that hold the pixels [start, stop) and those that upsampling reads beyond them.
//
// A chroma sample covers at most two reduced pixels where libjpeg interpolates, so two on each side are enough. libjpeg
// upsamples parts hardly wider than a chroma sample in another way, so such parts include their neighbor, too.
Range touched(int64_t start, int64_t stop, int64_t whole, int64_t step, int64_t least, int64_t denominator) {
    const int64_t margin = 2 * denominator;
    start = std::max<int64_t>(0, start / denominator * denominator - margin);
    stop = std::min(whole, (stop + denominator - 1) / denominator * denominator + margin);
    Range found{start / step, (stop + step - 1) / step};
    const int64_t last = (whole + step - 1) / step;
    while (std::min(whole, found.stop * step) - found.start * step <= least && found.size() < last)
        found.start > 0 ? found.start-- : found.stop++;
    return found;
}

FEEDLINE_CLONES int64_t sum(const uint16_t* lengths, int64_t count) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) total += lengths[i];
    return total;
}

// Entropy-coded data of the part: a rectangle of intervals, with renumbered markers.
class Scan {
public:
    Scan(const uint8_t* data, const uint16_t* lengths, const Frame& frame)
        : data_(data), lengths_(lengths), wide_(frame.columns()), rows_(frame.rows()) {}

    // False if a marker is not where the lengths say; their sum has been checked before.
    bool append_part(Range columns, Range rows, Bytes& out) {
        int64_t at = sum(lengths_, rows.start * wide_);
        for (int64_t row = rows.start; row < rows.stop; row++) {
            const uint16_t* const line = lengths_ + row * wide_;
            at += sum(line, columns.start);
            const int64_t nbytes = sum(line + columns.start, columns.size());
            append(out, data_ + at, static_cast<size_t>(nbytes));  // neighbors in a row are contiguous
            if (!renumber(row * wide_ + columns.start, columns.size(), out.data() + out.size() - nbytes)) return false;
            at += nbytes + sum(line + columns.stop, wide_ - columns.stop);
        }
        if (rows.stop < rows_ || columns.stop < wide_) out.resize(out.size() - kMarker);  // EOI follows the last
        const uint8_t end[] = {0xFF, EOI};
        append(out, end, sizeof end);
        return true;
    }

private:
    bool renumber(int64_t first, int64_t count, uint8_t* at) {
        for (int64_t i = first; i < first + count; i++) {
            if (i == wide_ * rows_ - 1) break;  // the image's last interval has no marker
            if (lengths_[i] <= kMarker) return false;
            at += lengths_[i];
            if (at[-2] != 0xFF || at[-1] != (RST0 | (i & 7))) return false;
            at[-1] = static_cast<uint8_t>(RST0 | (written_++ & 7));
        }
        return true;
    }

    const uint8_t* const data_;
    const uint16_t* const lengths_;
    const int64_t wide_, rows_;
    int64_t written_ = 0;
};

// True if `at` is the marker after interval number `interval` of `total`: the next RSTn, or EOI after the last.
bool ends(const uint8_t* at, int64_t interval, int64_t total) {
    const int64_t restart = RST0 | (interval & 7);
    return at[1] == (interval == total - 1 ? int64_t{EOI} : restart);
}

bool lies_within(const Window& wanted, const Frame& frame) {
    return wanted.x >= 0 && wanted.y >= 0 && wanted.width > 0 && wanted.height > 0 &&
           int64_t{wanted.x} + wanted.width <= frame.width && int64_t{wanted.y} + wanted.height <= frame.height;
}

}  // namespace

bool measure(const uint8_t* jpeg, size_t nbytes, std::vector<uint16_t>& lengths) {
    lengths.clear();
    Bytes header;
    Frame frame;
    if (!HeaderReader(jpeg, nbytes, header).read(frame)) return false;
    const int64_t total = frame.columns() * frame.rows();
    const uint8_t *start = jpeg + frame.scan, *at = start, *const last = jpeg + nbytes - 1;
    while (at < last && (at = static_cast<const uint8_t*>(std::memchr(at, 0xFF, static_cast<size_t>(last - at))))) {
        if (at[1] == 0) {  // a stuffed byte: data, not a marker
            at += 2;
            continue;
        }
        const int64_t interval = static_cast<int64_t>(lengths.size());
        if (!ends(at, interval, total)) return false;
        const uint8_t* const stop = interval == total - 1 ? at : at + kMarker;
        if (stop - start > 0xFFFF) return false;
        lengths.push_back(static_cast<uint16_t>(stop - start));
        if (stop == at) return at + kMarker == jpeg + nbytes;
        start = at = stop;
    }
    return false;
}

bool assemble(const uint8_t* jpeg, size_t nbytes, const uint16_t* lengths, size_t count, Window wanted, Bytes& out,
              Window& got, int denominator) {
    out.clear();
    Frame frame;
    if (denominator < 1 || denominator > 8 || !HeaderReader(jpeg, nbytes, out).read(frame)) return false;
    const int64_t total = frame.columns() * frame.rows();
    if (static_cast<std::uint64_t>(total) != count || !lies_within(wanted, frame)) return false;

    const int64_t step = frame.interval * frame.unit_width;
    const int64_t least = 2 * frame.most_wide * denominator;
    const Range columns =
        touched(wanted.x, int64_t{wanted.x} + wanted.width, frame.width, step, least, denominator);
    const Range rows =
        touched(wanted.y, int64_t{wanted.y} + wanted.height, frame.height, frame.unit_height, 0, denominator);
    if (columns.size() * rows.size() * kOf > frame.columns() * rows.stop * kAtMost) return false;
    if (sum(lengths, total) + kMarker != static_cast<int64_t>(nbytes - frame.scan)) return false;

    got.x = static_cast<int>(columns.start * step);
    got.y = static_cast<int>(rows.start * frame.unit_height);
    got.width = static_cast<int>(std::min(frame.width, columns.stop * step)) - got.x;
    got.height = static_cast<int>(std::min(frame.height, rows.stop * frame.unit_height)) - got.y;
    put16(out.data() + frame.frame_at + 5, got.height);
    put16(out.data() + frame.frame_at + 7, got.width);
    return Scan(jpeg + frame.scan, lengths, frame).append_part(columns, rows, out);
}

}  // namespace feedline
