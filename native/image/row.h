#pragma once
#include <cstddef>
#include <cstdint>

#include "geometry.h"
#include "scan.h"
#include "status.h"
#include "writer.h"

namespace feedline {

// Ready pixels: three bytes each, in any strides.
struct Pixels {
    const std::uint8_t* data = nullptr;
    int width = 0, height = 0;
    std::ptrdiff_t line_stride = 0, pixel_stride = 0, channel_stride = 0;

    // A part of line y, with four bytes a pixel.
    void line(int x, int y, int count, const Passes& passes, std::uint8_t* out) const;
};

// A picture: what is not null of path, bytes and pixels; with its grid where that is known (grid.h).
struct Source {
    const char* path = nullptr;
    Bytes bytes;
    Pixels pixels;
    const std::uint16_t* grid = nullptr;
    std::size_t intervals = 0;
};

// What is wanted of every picture; feedline/images/recipe.py says what the fields mean.
struct Plan {
    Layout layout;
    Law law;
    double flip;
    bool bicubic, oriented, scaled;
    Numbers numbers;
    const Passes* passes;
    bool quick;  // entropy decoding of our own; the pixels are the same
};

// Writes one row of a batch. Uses memory and decoder of the calling thread, which are kept for its next picture.
// A picture of more than `limit` pixels is refused before anything is done with it; 0 is no limit.
Status read_row(const Plan& plan, const Source& source, std::uint64_t key, std::int64_t limit, void* row);

// The header of an encoded picture.
Status read_header(const Source& source, std::int64_t limit, Header& header);

// A JPEG as it is stored, into 3 * width * height bytes; `quick` as in a plan.
Status read_whole(Bytes jpeg, bool quick, std::uint8_t* rgb);

}  // namespace feedline
