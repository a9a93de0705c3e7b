#pragma once
#include <cstddef>
#include <cstdint>

#include "geometry.h"
#include "scan.h"
#include "status.h"
#include "writer.h"

namespace feedline {

// Decoded pixels: three bytes each, with any strides.
struct Pixels {
    const std::uint8_t* data = nullptr;
    int width = 0, height = 0;
    std::ptrdiff_t line_stride = 0, pixel_stride = 0, channel_stride = 0;

    // Reads part of line y, with four bytes per pixel.
    void line(int x, int y, int count, const Passes& passes, std::uint8_t* out) const;
};

// Source of an image: whichever of path, bytes and pixels is not null; with its grid, if known (grid.h).
struct Source {
    const char* path = nullptr;
    Bytes bytes;
    Pixels pixels;
    const std::uint16_t* grid = nullptr;
    std::size_t intervals = 0;
};

// Parameters of all rows of a batch; feedline/images/recipe.py documents the fields.
struct Plan {
    Layout layout;
    Law law;
    double flip;
    bool bicubic, oriented, scaled;
    bool torchs;  // resizes round as torch's, not as Pillow's
    Numbers numbers;
    const Passes* passes;
    bool quick;  // use ScanDecoder; the pixels are the same
};

// Geometry that the caller chose for one row; with `upended` the row is mirrored top to bottom, too.
struct Placement {
    Geometry geometry;
    bool upended = false;
};

// Writes one row of a batch, with the calling thread's buffers and decoder, which are kept for its next image. An image
// with more than `limit` pixels in its header is refused; 0 means no limit.
Status read_row(const Plan& plan, const Source& source, std::uint64_t key, std::int64_t limit, void* row);

// Like `read_row`, for a row of any layout at a given place. A box beyond the bounds of the image, or a window without
// pixels of the image, is refused.
Status read_placed(const Plan& plan, const Layout& layout, const Source& source, const Placement& placement,
                   std::int64_t limit, void* row);

// Reads the header of an encoded image.
Status read_header(const Source& source, std::int64_t limit, Header& header);

// Decodes a JPEG, without orientation, into 3 * width * height bytes; `quick` as in a plan.
Status read_whole(Bytes jpeg, bool quick, std::uint8_t* rgb);

}  // namespace feedline
