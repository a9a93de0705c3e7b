#pragma once
#include <cstddef>
#include <cstdint>

namespace feedline {

// A batch of images, channels first. Items of a line are contiguous; strides are in bytes.
struct Planes {
    char* base;
    std::int64_t batch, channels, height, width;
    std::ptrdiff_t image, channel, line;
};

// out[b, c, y, x] = source[b, c, lines[b, y], columns[b, x]], or fill[c] where a line or column is -1.
//
// `lines` has (batch, out.height) numbers, `columns` (batch, out.width), `fill` an item per channel. Numbers are not
// checked.
void take_planes(const Planes& source, const std::int64_t* lines, const std::int64_t* columns, const char* fill,
                 const Planes& out, std::int64_t item_nbytes, int threads);

}  // namespace feedline
