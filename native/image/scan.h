#pragma once
#include <cstddef>
#include <cstdint>

#include "status.h"

namespace feedline {

// Bytes that are not owned.
struct Bytes {
    const std::uint8_t* data = nullptr;
    std::size_t size = 0;
};

// Fields of the markers before a JPEG's first scan.
struct Header {
    int width = 0, height = 0, components = 0;
    bool progressive = false;
    int orientation = 1;  // from EXIF, or from XMP if EXIF has none, as in Pillow; 0 if only Pillow can determine it
};

// Reason for a header that needs more bytes.
constexpr const char* kCutShort = "it ends within its header";

// Reads the header without allocating. `foreign` for other formats, for four components (CMYK), and for anything that
// Pillow's parser could refuse: truncated or unusual segments, and unsupported kinds of JPEG, which the text names.
// `large` above `limit` pixels (0 is no limit).
Status scan(Bytes jpeg, std::int64_t limit, Header& header);

// True if only entropy-coded data, `left` restart markers and the end marker follow from `at` on. The first restart
// marker must have the number `next`. libjpeg and Pillow then accept the rest, with any bits.
bool ends_regularly(const std::uint8_t* at, const std::uint8_t* end, std::int64_t next, std::int64_t left);

}  // namespace feedline
