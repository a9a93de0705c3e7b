#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace feedline {

// Grid-packed JPEGs: a baseline JPEG with a restart marker every g MCUs, where g divides the MCUs of a row, and the
// length of each restart interval in bytes, including its marker, in scan order. Intervals are independent, so those
// that a window touches form a smaller valid JPEG, without decoding.

// A rectangle of pixels of the full image.
struct Window {
    int x, y, width, height;
};

// Rewrites a JPEG as a grid-packed one with the same coefficients, and so the same pixels bit for bit.
//
// Chooses the finest grid that costs at most about 1/40 of the file. Keeps application markers and comments before the
// first scan, except an index of further images after the first (MPF) and those images. False, with the reason in `why`, for files that
// cannot be rewritten without loss (damaged, 12-bit, lossless, too many blocks in an MCU) or do not profit.
bool rewrite(const std::uint8_t* jpeg, std::size_t nbytes, std::vector<std::uint8_t>& out,
             std::vector<std::uint16_t>& lengths, std::string& why);

// Recovers the lengths of the intervals by reading the whole file, if the index was lost; false for a file that
// `rewrite` did not write.
bool measure(const std::uint8_t* jpeg, std::size_t nbytes, std::vector<std::uint16_t>& lengths);

// Writes the part of a grid-packed JPEG that holds `wanted` to `out`, as a JPEG; `got` is its place in the full image.
// Pixels of `wanted` decode from it exactly as from the full file, with any decoder whose upsampling reads at most one
// chroma sample to each side, at full scale or at 1/denominator (2, 4, 8). At a reduced scale this holds for the pixels
// in `wanted` and on its border.
//
// False if the grid does not match the file, also for hostile and damaged input: no memory outside of `jpeg` and
// `lengths` is read. Also false if the part would save no time: the window then covers nearly all rows that a decoder
// reads in any case, down to the window's last row. Decode the whole file then. The answer takes a fraction of a
// microsecond, from the header alone. For images hardly larger than the output a whole decode is cheaper.
//
// Reads only the header, the intervals of the window, and `lengths`. `out` is overwritten; reuse it to keep its memory.
bool assemble(const std::uint8_t* jpeg, std::size_t nbytes, const std::uint16_t* lengths, std::size_t count,
              Window wanted, std::vector<std::uint8_t>& out, Window& got, int denominator = 1);

}  // namespace feedline
