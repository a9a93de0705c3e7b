#pragma once
#include <cstddef>
#include <cstdint>

#include "taps.h"

namespace feedline {

// Lines hold pixels of four bytes; the fourth is unused. Kernels work in steps of up to kStep pixels: they may write
// that many pixels past the end of an output line, and read Taps::overrun() past the end of a line of samples.
constexpr std::size_t kPixel = 4, kStep = 16;

// Levels as numbers: `of[channel][level]`, usually equal to (level / 255 - mean) / std in float32.
//
// A kernel may compute them if `by_arithmetic` says that this gives the bits of the table: products with `share` and the
// reciprocal of std, each stored as the sum of two floats. The second holds the rounding error of the first, so that a
// product is that of a division; 0 gives the product with the first, as some libraries scale levels.
struct Numbers {
    float of[3][256];
    std::uint16_t halves[3][256];  // as bfloat16
    float share[2], mean[3], reciprocal[3][2];
    bool by_arithmetic = false;
};

// Inner loops for one instruction set. All sets give the same bits.
struct Passes {
    // Computes one line of taps.padded_count() outputs from a line of samples that begins with sample taps.low().
    void (*across)(const std::uint8_t* line, const Taps& taps, std::uint8_t* out);
    // Computes line `output` of the result: the weighted sum of taps.length() `lines`; `nbytes` is a multiple of 64.
    void (*down)(const std::uint8_t* const* lines, const Taps& taps, int output, std::size_t nbytes, std::uint8_t* out);
    // Convert between pixels of three bytes and lines.
    void (*widen)(const std::uint8_t* rgb, int count, std::uint8_t* line);
    void (*narrow)(const std::uint8_t* line, int count, std::uint8_t* rgb);
    // Write planes that are `plane` items apart.
    void (*levels)(const std::uint8_t* line, int count, std::uint8_t* out, std::size_t plane);
    void (*floats)(const std::uint8_t* line, int count, const Numbers& numbers, float* out, std::size_t plane);
    void (*halves)(const std::uint8_t* line, int count, const Numbers& numbers, std::uint16_t* out, std::size_t plane);
};

extern const Passes plain_passes;
const Passes* avx2_passes();    // nullptr if the CPU or the compiler lacks them
const Passes* avx512_passes();  // nullptr, too, if they are missing

// Best passes for this CPU, of the first `sets` of: plain, AVX2, AVX-512.
constexpr int kAllSets = 3;
const Passes& passes_of(int sets);
const Passes& fastest_passes();

}  // namespace feedline
