#include "passes.h"

#include <algorithm>

namespace feedline {
namespace {

constexpr std::int32_t kHalf = 1 << (Taps::kBits - 1);

std::uint8_t level(std::int32_t sum) {
    return static_cast<std::uint8_t>(std::min(255, std::max(0, sum >> Taps::kBits)));
}

void across(const std::uint8_t* line, const Taps& taps, std::uint8_t* out) {
    const int blocks = taps.blocks();
    for (int i = 0; i < taps.padded_count(); i++, out += kPixel) {
        const std::uint8_t* pixel = line + static_cast<std::size_t>(taps.offset(i)) * kPixel;
        const Taps::Block* block = taps.of(i);
        std::int32_t sums[kPixel] = {kHalf, kHalf, kHalf, kHalf};
        for (int b = 0; b < blocks; b++, block++)
            for (int j = 0; j < Taps::kBlock; j++, pixel += kPixel)
                for (std::size_t c = 0; c < kPixel; c++) sums[c] += block->weight(j) * pixel[c];
        for (std::size_t c = 0; c < kPixel; c++) out[c] = level(sums[c]);
    }
}

void down(const std::uint8_t* const* lines, const Taps& taps, int output, std::size_t nbytes, std::uint8_t* out) {
    const Taps::Block* const block = taps.of(output);
    constexpr std::size_t kBytes = kStep * kPixel;
    for (std::size_t x = 0; x < nbytes; x += kBytes) {
        std::int32_t sums[kBytes];
        std::fill(sums, sums + kBytes, kHalf);
        for (int j = 0; j < taps.length(); j++) {
            const std::uint8_t* const line = lines[j] + x;
            const std::int32_t weight = block[j / Taps::kBlock].weight(j % Taps::kBlock);
            for (std::size_t i = 0; i < kBytes; i++) sums[i] += weight * line[i];
        }
        for (std::size_t i = 0; i < kBytes; i++) out[x + i] = level(sums[i]);
    }
}

void widen(const std::uint8_t* rgb, int count, std::uint8_t* line) {
    for (int i = 0; i < count; i++, rgb += 3, line += kPixel) {
        line[0] = rgb[0];
        line[1] = rgb[1];
        line[2] = rgb[2];
        line[3] = 0;
    }
}

void narrow(const std::uint8_t* line, int count, std::uint8_t* rgb) {
    for (int i = 0; i < count; i++, rgb += 3, line += kPixel) {
        rgb[0] = line[0];
        rgb[1] = line[1];
        rgb[2] = line[2];
    }
}

void levels(const std::uint8_t* line, int count, std::uint8_t* out, std::size_t plane) {
    for (std::size_t c = 0; c < 3; c++)
        for (int i = 0; i < count; i++)
            out[c * plane + static_cast<std::size_t>(i)] = line[static_cast<std::size_t>(i) * kPixel + c];
}

template <class Item>
void looked_up(const std::uint8_t* line, int count, const Item (*of)[256], Item* out, std::size_t plane) {
    for (std::size_t c = 0; c < 3; c++)
        for (int i = 0; i < count; i++)
            out[c * plane + static_cast<std::size_t>(i)] = of[c][line[static_cast<std::size_t>(i) * kPixel + c]];
}

void floats(const std::uint8_t* line, int count, const Numbers& numbers, float* out, std::size_t plane) {
    looked_up(line, count, numbers.of, out, plane);
}

void halves(const std::uint8_t* line, int count, const Numbers& numbers, std::uint16_t* out, std::size_t plane) {
    looked_up(line, count, numbers.halves, out, plane);
}

}  // namespace

const Passes plain_passes{across, down, widen, narrow, levels, floats, halves};

const Passes& passes_of(int sets) {
    const Passes *const wide = avx2_passes(), *const widest = avx512_passes();
    if (sets > 2 && widest) return *widest;
    return sets > 1 && wide ? *wide : plain_passes;
}

const Passes& fastest_passes() {
    static const Passes& chosen = passes_of(kAllSets);
    return chosen;
}

}  // namespace feedline
