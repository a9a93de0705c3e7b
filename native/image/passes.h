#pragma once
#include <cstddef>
#include <cstdint>

#include "taps.h"

namespace feedline {

// Lines hold pixels of four bytes, the fourth of no meaning. Kernels work in steps of up to kStep pixels: they may
// write that many behind the end of a line of output, and read Taps::overrun() behind a line of samples.
constexpr std::size_t kPixel = 4, kStep = 8;

// Levels as numbers: `of[channel][level]`, equal to (level / 255 - mean) / std in float32.
//
// A kernel may compute them where `by_arithmetic` says that this gives the very bits of the table: products with the
// reciprocal of std as the sum of two floats, the second of which holds what the first rounds away.
struct Numbers {
    float of[3][256];
    std::uint16_t halves[3][256];  // as bfloat16
    float mean[3], reciprocal[3][2];
    bool by_arithmetic = false;
};

// The inner loops, in one instruction set. All sets give the same bits.
struct Passes {
    // One line of outputs, taps.padded_count() of them, from a line of samples that begins with sample taps.low().
    void (*across)(const std::uint8_t* line, const Taps& taps, std::uint8_t* out);
    // One line of the result: the sum of `lines`, as many as `blocks` has weights; `nbytes` is a multiple of 32.
    void (*down)(const std::uint8_t* const* lines, const Taps::Block* block, int blocks, std::size_t nbytes,
                 std::uint8_t* out);
    // Pixels of three bytes to lines and back.
    void (*widen)(const std::uint8_t* rgb, int count, std::uint8_t* line);
    void (*narrow)(const std::uint8_t* line, int count, std::uint8_t* rgb);
    // Into planes that lie `plane` items apart.
    void (*levels)(const std::uint8_t* line, int count, std::uint8_t* out, std::size_t plane);
    void (*floats)(const std::uint8_t* line, int count, const Numbers& numbers, float* out, std::size_t plane);
    void (*halves)(const std::uint8_t* line, int count, const Numbers& numbers, std::uint16_t* out, std::size_t plane);
};

extern const Passes plain_passes;
const Passes* avx2_passes();     // nullptr where the CPU or the compiler does not have them
const Passes& fastest_passes();  // that this CPU has

}  // namespace feedline
