#include "scan.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace feedline {
namespace {

constexpr int kTiff = 0x002A, kOrientation = 0x0112, kShort = 3;

const char* const kCutShort = "it ends within its header";

// Integers of 2 and 4 bytes at any offset, in either byte order; 0 out of bounds.
class Integers {
public:
    Integers(Bytes bytes, bool little) : bytes_(bytes), little_(little) {}
    std::uint32_t two(std::size_t at) const { return number(at, 2); }
    std::uint32_t four(std::size_t at) const { return number(at, 4); }

private:
    std::uint32_t number(std::size_t at, std::size_t count) const {
        if (at > bytes_.size || bytes_.size - at < count) return 0;
        std::uint32_t value = 0;
        for (std::size_t i = 0; i < count; i++) value = value << 8 | bytes_.data[at + (little_ ? count - 1 - i : i)];
        return value;
    }

    Bytes bytes_;
    bool little_;
};

bool begins(Bytes bytes, const char* text, std::size_t length) {
    return bytes.size >= length && std::memcmp(bytes.data, text, length) == 0;
}

// Returns the orientation in the first directory of a TIFF structure; 0 if it has none.
int tiff_orientation(Bytes tiff) {
    if (tiff.size < 8) return 0;
    const Integers integers(tiff, tiff.data[0] == 'I');
    if (integers.two(2) != kTiff) return 0;
    const std::size_t directory = integers.four(4);
    const std::uint32_t entries = integers.two(directory);
    for (std::uint32_t i = 0; i < entries; i++) {
        const std::size_t entry = directory + 2 + std::size_t{12} * i;
        if (integers.two(entry) != kOrientation) continue;
        return integers.two(entry + 2) == kShort && integers.four(entry + 4) == 1
                   ? static_cast<int>(integers.two(entry + 8))
                   : 0;
    }
    return 0;
}

// Returns the digit after `tiff:Orientation="` or `tiff:Orientation>` in an XMP packet; 0 if there is none.
int xmp_orientation(Bytes packet) {
    static const char name[] = "tiff:Orientation";
    const char* const begin = reinterpret_cast<const char*>(packet.data);
    const char* const end = begin + packet.size;
    for (const char* at = begin;; at++) {
        at = std::search(at, end, name, name + sizeof(name) - 1);
        if (at == end) return 0;
        const char* after = at + sizeof(name) - 1;
        if (end - after >= 2 && after[0] == '=' && after[1] == '"') after += 2;
        else if (after != end && *after == '>') after += 1;
        else continue;
        if (after != end && *after >= '0' && *after <= '9') return *after - '0';
    }
}

// Orientations in the APP1 segments of one file.
struct Orientations {
    bool has_exif = false, has_xmp = false;
    int exif = 0, xmp = 0;

    void see(Bytes segment) {
        static const char xmp_name[] = "http://ns.adobe.com/xap/1.0/";
        if (!has_exif && begins(segment, "Exif\0\0", 6)) {
            has_exif = true;
            exif = tiff_orientation({segment.data + 6, segment.size - 6});
        } else if (!has_xmp && begins(segment, xmp_name, sizeof(xmp_name))) {
            has_xmp = true;
            xmp = xmp_orientation(segment);
        }
    }

    int value() const {
        const int found = exif ? exif : xmp;
        return found >= 2 && found <= 8 ? found : 1;
    }
};

Status refused(int marker) {
    if ((marker & 3) == 3 && marker <= 0xCB) return Status::bad("it is a lossless JPEG, which is not supported");
    return Status::bad("it is a hierarchical JPEG, which is not supported");
}

bool is_frame(int marker) {
    return marker >= 0xC0 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 && marker != 0xCC;
}

// SOFn segment.
Status frame(int marker, Bytes segment, Header& header) {
    const Integers integers(segment, false);
    if (segment.size < 6) return Status::bad(kCutShort);
    const int process = marker & 3;
    if (process == 3 || (marker >= 0xC5 && marker <= 0xC7) || marker >= 0xCD) return refused(marker);
    if (segment.data[0] != 8)
        return Status::bad("it is a JPEG of " + std::to_string(segment.data[0]) +
                           " bits per sample, of which only 8 are supported");
    header.height = static_cast<int>(integers.two(1));
    header.width = static_cast<int>(integers.two(3));
    header.components = segment.data[5];
    header.progressive = process == 2;
    if (header.width == 0 || header.height == 0) return Status::bad("its header says that it has no pixels");
    if (header.components == 4) return Status::foreign();
    if (header.components != 1 && header.components != 3)
        return Status::bad("it is a JPEG of " + std::to_string(header.components) +
                           " components, of which only 1, 3 and 4 are supported");
    return {};
}

}  // namespace

Status scan(Bytes jpeg, std::int64_t limit, Header& header) {
    if (jpeg.size == 0) return Status::bad("it is empty (0 bytes)");
    if (!begins(jpeg, "\xFF\xD8\xFF", 3)) return Status::foreign();
    header = {};
    Orientations orientations;
    const Integers integers(jpeg, false);
    for (std::size_t at = 2;;) {
        while (at < jpeg.size && jpeg.data[at] != 0xFF) at++;  // libjpeg also skips bytes between segments
        while (at < jpeg.size && jpeg.data[at] == 0xFF) at++;
        if (at >= jpeg.size) return Status::bad(kCutShort);
        const int marker = jpeg.data[at++];
        if (marker == 0 || marker == 0x01 || (marker >= 0xD0 && marker <= 0xD7)) continue;  // without a length
        if (marker == 0xD9) return Status::bad("it ends before its picture begins");
        const std::size_t length = integers.two(at);
        if (marker == 0xDA && header.components) break;
        if (length < 2 || jpeg.size - at < length) return Status::bad(kCutShort);
        const Bytes segment{jpeg.data + at + 2, length - 2};
        if (marker == 0xE1) orientations.see(segment);
        if (is_frame(marker)) {
            Status status = frame(marker, segment, header);
            if (!status.fine()) return status;
        }
        at += length;
    }
    header.orientation = orientations.value();
    const bool large = limit > 0 && std::int64_t{header.width} * header.height > limit;
    return large ? Status::large(header.width, header.height) : Status{};
}

namespace {

bool is_restart(int marker) { return marker >= 0xD0 && marker <= 0xD7; }

// Returns the marker that ends the coded data from `at` on, and moves behind it; 0 at the end of the file, and for
// repeated FF, which decoders treat in different ways.
int next_marker(Bytes jpeg, std::size_t& at) {
    while (at < jpeg.size) {
        const void* const found = std::memchr(jpeg.data + at, 0xFF, jpeg.size - at);
        if (!found) return 0;
        at = static_cast<std::size_t>(static_cast<const std::uint8_t*>(found) - jpeg.data) + 1;
        if (at == jpeg.size || jpeg.data[at] == 0xFF) return 0;
        const int marker = jpeg.data[at++];
        if (marker != 0 && !is_restart(marker)) return marker;
    }
    return 0;
}

}  // namespace

bool is_whole(Bytes jpeg) {
    const Integers integers(jpeg, false);
    int components = 0;
    bool sequential = false;
    for (std::size_t at = 2; at + 4 <= jpeg.size;) {
        if (jpeg.data[at] != 0xFF) return false;
        const int marker = jpeg.data[at + 1];
        const std::size_t length = integers.two(at + 2);
        if (marker < 0xC0 || is_restart(marker) || marker == 0xD9 || length < 3 || jpeg.size - at - 2 < length)
            return false;
        const Bytes segment{jpeg.data + at + 4, length - 2};
        at += 2 + length;
        if (is_frame(marker) && segment.size >= 6) {
            components = segment.data[5];
            sequential = (marker & 3) != 2;
        }
        if (marker != 0xDA) continue;
        const int next = next_marker(jpeg, at);
        if (next == 0xD9) return true;
        if (next == 0 || (sequential && segment.data[0] == components)) return false;
        at -= 2;
    }
    return false;
}

}  // namespace feedline
