#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace feedline {

// Grid-packed JPEGs: a baseline JPEG with a restart marker every g MCUs, where g divides the MCUs of a row, and beside
// it the length of each restart interval in bytes, its marker included, in scan order. No interval depends on another,
// so those that a window touches make a smaller valid JPEG, without decoding anything.

// A rectangle of pixels of the full picture.
struct Window {
    int x, y, width, height;
};

// Rewrites a JPEG as a grid-packed one with the same coefficients, hence the same pixels bit for bit.
//
// The finest grid is chosen that costs no more than about 1/40 of the file. Application markers and comments stay, but
// for an index of further pictures behind the first (MPF) and those pictures themselves. False, with the reason in
// `why`, for what cannot be rewritten without loss (damaged, 12-bit, lossless, too many blocks in an MCU) or is not
// worth it.
bool rewrite(const std::uint8_t* jpeg, std::size_t nbytes, std::vector<std::uint8_t>& out,
             std::vector<std::uint16_t>& lengths, std::string& why);

// The lengths of the intervals, found by reading the whole file, for when the index was lost; false for a file that is
// not as `rewrite` would have written it.
bool measure(const std::uint8_t* jpeg, std::size_t nbytes, std::vector<std::uint16_t>& lengths);

// The part of a grid-packed JPEG that holds `wanted`, as a JPEG of its own in `out`; `got` says where it lies in the
// full picture. Pixels of `wanted` decode from it exactly as from the full file, by any decoder whose upsampling looks
// no further than one chroma sample to each side, at full scale or at 1/denominator (2, 4, 8) of it. At a scale,
// what decodes equally are the reduced pixels that lie in `wanted` or on its border.
//
// False, and the plain path is to be taken, when the grid does not fit the file (hostile and damaged input included:
// nothing outside of `jpeg` and `lengths` is ever read), and when it would win nothing: the window takes in nearly all
// that a decoder would go through anyway, which is every row down to the window's last. That is found from the header
// alone, in a fraction of a microsecond, so a caller may always ask. It need not ask for a picture that is hardly
// larger than the output: there a whole decode costs less than what is left out.
//
// Touches the header, the intervals of the window, and `lengths`; `out` is overwritten and may be used again, so that
// its memory is allocated once.
bool assemble(const std::uint8_t* jpeg, std::size_t nbytes, const std::uint16_t* lengths, std::size_t count,
              Window wanted, std::vector<std::uint8_t>& out, Window& got, int denominator = 1);

}  // namespace feedline
