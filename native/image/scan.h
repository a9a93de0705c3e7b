#pragma once
#include <cstddef>
#include <cstdint>

#include "status.h"

namespace feedline {

// A run of bytes that someone else owns.
struct Bytes {
    const std::uint8_t* data = nullptr;
    std::size_t size = 0;
};

// What the markers before a JPEG's first scan tell.
struct Header {
    int width = 0, height = 0, components = 0;
    bool progressive = false;
    int orientation = 1;  // of EXIF, or of XMP where EXIF has none, as Pillow reads it
};

// Reads the header; no memory is taken. `foreign` for what does not begin as a JPEG does and for four components
// (CMYK), `bad` for what is empty, cut short or of a kind of JPEG that is not read here, which the text names, `large`
// above `limit` pixels (0 is no limit).
Status scan(Bytes jpeg, std::int64_t limit, Header& header);

}  // namespace feedline
