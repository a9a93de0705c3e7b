#include "scan.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace feedline {
namespace {

constexpr std::uint32_t kOrientation = 0x0112, kXResolution = 0x011A, kShort = 3, kLong = 4, kRational = 5;

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

// Tags of a TIFF structure's first directory that decide how Pillow opens and turns an image.
struct Tags {
    bool is_plain = true;  // false if Pillow may fail to open a file with them
    bool is_sure = true;   // false if Pillow's parser is needed for the orientation
    bool has_orientation = false;
    int orientation = 1;

    explicit Tags(Bytes tiff) {
        if (tiff.size == 0) return;
        if (!begins(tiff, "II*\0", 4) && !begins(tiff, "MM\0*", 4)) {
            is_sure = false;
            return;
        }
        const Integers integers(tiff, tiff.data[0] == 'I');
        const std::size_t directory = integers.four(4);
        const std::uint32_t entries = integers.two(directory);
        for (std::uint32_t i = 0; i < entries && is_sure; i++)
            see(integers, directory + 2 + std::size_t{12} * i, tiff.size);
        is_sure = is_sure && entries > 0;
    }

private:
    // Pillow skips values beyond the end, or stops there. If a tag occurs twice, the used one depends on the version of
    // Pillow.
    void see(const Integers& integers, std::size_t entry, std::size_t nbytes) {
        static const std::uint8_t sizes[] = {0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8};
        const std::uint32_t tag = integers.two(entry), type = integers.two(entry + 2), count = integers.four(entry + 4);
        const std::uint64_t size = type < sizeof(sizes) ? std::uint64_t{sizes[type]} * count : 0;
        const bool is_integer = type == kShort || type == kLong;
        if (size > 4) distant_ += size;
        if (entry + 12 > nbytes || distant_ > nbytes || (size > 4 && integers.four(entry + 8) + size > nbytes)) {
            is_sure = false;
        } else if (tag == kOrientation && size > 0) {
            is_sure = is_integer && count == 1 && !has_orientation;
            has_orientation = true;
            orientation = static_cast<int>(type == kShort ? integers.two(entry + 8) : integers.four(entry + 8));
        } else if (tag == kXResolution && size > 0) {
            is_plain = is_integer || type == kRational;  // Pillow indexes others without a check
        }
    }

    std::uint64_t distant_ = 0;  // bytes of values that do not fit their entries
};

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

// Orientations in the APP1 segments of one file. Pillow joins several EXIF segments, and uses the last XMP packet.
struct Orientations {
    Tags exif{Bytes{}};
    int segments = 0, xmp = 0;

    // False for contents that Pillow may fail to open.
    bool see(Bytes segment) {
        static const char xmp_name[] = "http://ns.adobe.com/xap/1.0/";
        if (begins(segment, "Exif\0\0", 6)) exif = Tags({segment.data + 6, segment.size - 6}), segments++;
        else if (begins(segment, xmp_name, sizeof(xmp_name))) xmp = xmp_orientation(segment);
        return exif.is_plain && segments <= 1;
    }

    int value() const {
        if (!exif.is_sure) return 0;
        const int found = exif.has_orientation ? exif.orientation : xmp;
        return found >= 2 && found <= 8 ? found : 1;
    }
};

bool is_frame(int marker) {
    return marker >= 0xC0 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 && marker != 0xCC;
}

// Markers that both libjpeg and Pillow read as segments, in addition to those of frames.
bool is_segment(int marker) {
    return marker == 0xC4 || marker == 0xCC || marker == 0xDA || marker == 0xDB || marker == 0xDD ||
           (marker >= 0xE0 && marker <= 0xEF) || marker == 0xFE;
}

bool are_whole_tables(Bytes segment) {
    std::size_t at = 0;
    while (at < segment.size) at += segment.data[at] >> 4 ? 129 : 65;
    return at == segment.size;
}

// Pillow reads the length of each resource's name without a check.
bool are_resources(Bytes segment) {
    const Integers integers(segment, false);
    for (std::size_t at = 14; segment.size >= at + 4 && !std::memcmp(segment.data + at, "8BIM", 4);) {
        if (segment.size < at + 6) return true;
        if (segment.size == at + 6) return false;
        at += 7 + std::size_t{segment.data[at + 6]};
        at += at & 1;
        if (segment.size < at + 4) return true;
        at += 4 + std::size_t{integers.four(at)};
        at += at & 1;
    }
    return true;
}

// False for contents that make Pillow's parser fail. libjpeg ignores them, or checks them itself.
bool is_plain(int marker, Bytes segment) {
    switch (marker) {
        case 0xDB: return are_whole_tables(segment);
        case 0xE0: return !begins(segment, "JFIF", 4) || segment.size >= 7;
        case 0xE2: return !begins(segment, "ICC_PROFILE\0", 12) || segment.size >= 14;
        case 0xED: return !begins(segment, "Photoshop 3.0\0", 14) || are_resources(segment);
        case 0xEE: return !begins(segment, "Adobe", 5) || segment.size >= 7;
        default: return true;
    }
}

Status unsupported(int marker) {
    if ((marker & 3) == 3 && marker <= 0xCB) return Status::foreign("it is a lossless JPEG, which is not supported");
    return Status::foreign("it is a hierarchical JPEG, which is not supported");
}

// SOFn segment.
Status frame(int marker, Bytes segment, Header& header) {
    const Integers integers(segment, false);
    if (segment.size < 6) return Status::foreign(kCutShort);
    const int process = marker & 3;
    if (process == 3 || (marker >= 0xC5 && marker <= 0xC7) || marker >= 0xCD) return unsupported(marker);
    if (segment.data[0] != 8)
        return Status::foreign("it is a JPEG of " + std::to_string(segment.data[0]) +
                               " bits per sample, of which only 8 are supported");
    if (header.components) return Status::foreign("it has two headers");
    header.height = static_cast<int>(integers.two(1));
    header.width = static_cast<int>(integers.two(3));
    header.components = segment.data[5];
    header.progressive = process == 2;
    if (header.width == 0 || header.height == 0) return Status::foreign("its header says that it has no pixels");
    if (header.components == 4) return Status::foreign();
    if (header.components != 1 && header.components != 3)
        return Status::foreign("it is a JPEG of " + std::to_string(header.components) +
                               " components, of which only 1, 3 and 4 are supported");
    return segment.size == std::size_t{6} + 3 * segment.data[5] ? Status{} : Status::foreign();
}

}  // namespace

Status scan(Bytes jpeg, std::int64_t limit, Header& header) {
    if (jpeg.size == 0) return Status::bad("it is empty (0 bytes)");
    if (!begins(jpeg, "\xFF\xD8\xFF", 3)) return Status::foreign();
    header = {};
    Orientations orientations;
    const Integers integers(jpeg, false);
    for (std::size_t at = 2;;) {
        if (at < jpeg.size && jpeg.data[at] != 0xFF) return Status::foreign();  // bytes between segments
        while (at < jpeg.size && jpeg.data[at] == 0xFF) at++;
        if (at >= jpeg.size) return Status::foreign(kCutShort);
        const int marker = jpeg.data[at++];
        if (marker == 0xD9) return Status::foreign("it ends before its image begins");
        if (!is_segment(marker) && !is_frame(marker)) return Status::foreign();
        const std::size_t length = integers.two(at);
        if (length < 2 || jpeg.size - at < length) return Status::foreign(kCutShort);
        if (marker == 0xDA && header.components) break;
        const Bytes segment{jpeg.data + at + 2, length - 2};
        if (!is_plain(marker, segment) || (marker == 0xE1 && !orientations.see(segment))) return Status::foreign();
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

bool ends_regularly(const std::uint8_t* at, const std::uint8_t* end, std::int64_t next, std::int64_t left) {
    while (end - at >= 2) {
        at = static_cast<const std::uint8_t*>(std::memchr(at, 0xFF, static_cast<std::size_t>(end - at - 1)));
        if (!at) return false;
        const int marker = at[1];
        at += 2;
        if (marker == 0) continue;  // a stuffed byte: data
        if (marker == 0xD9) return left == 0;
        if (left == 0 || marker != 0xD0 + (next & 7)) return false;
        next++;
        left--;
    }
    return false;
}

}  // namespace feedline
