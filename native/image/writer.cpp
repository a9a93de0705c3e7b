#include "writer.h"

#include <cstring>
#include <vector>

namespace feedline {
namespace {

// Upper half of a float, rounded half to even; NaN stays NaN.
std::uint16_t halved(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    if (value != value) return 0x7FC0;
    return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

template <class Item>
void looked_up(const std::uint8_t* line, int count, const Item (*of)[256], Item* out) {
    for (int i = 0; i < count; i++, line += kPixel)
        for (std::size_t c = 0; c < 3; c++) *out++ = of[c][line[c]];
}

}  // namespace

std::size_t Layout::item_nbytes() const { return number == Number::level ? 1 : number == Number::half ? 2 : 4; }

std::size_t Layout::nbytes() const {
    return std::size_t{3} * static_cast<std::size_t>(width) * static_cast<std::size_t>(height) * item_nbytes();
}

void Writer::clear() {
    const std::vector<std::uint8_t> black(static_cast<std::size_t>(layout_.width + static_cast<int>(kStep)) * kPixel);
    const int width = width_, left = left_, top = top_;
    place(0, 0, layout_.width);
    for (int y = 0; y < layout_.height; y++) take(y, black.data());
    place(left, top, width);
}

void Writer::take(int y, const std::uint8_t* line) {
    const int row = upended_ ? layout_.height - 1 - (y + top_) : y + top_;
    const auto pixel =
        static_cast<std::size_t>(row) * static_cast<std::size_t>(layout_.width) + static_cast<std::size_t>(left_);
    layout_.planar ? planes(pixel, line) : interleaved(3 * pixel, line);
}

void Writer::interleaved(std::size_t item, const std::uint8_t* line) {
    switch (layout_.number) {
        case Number::level: return passes_.narrow(line, width_, static_cast<std::uint8_t*>(row_) + item);
        case Number::single: return looked_up(line, width_, numbers_.of, static_cast<float*>(row_) + item);
        case Number::half: return looked_up(line, width_, numbers_.halves, static_cast<std::uint16_t*>(row_) + item);
    }
}

void Writer::planes(std::size_t item, const std::uint8_t* line) {
    const std::size_t plane = static_cast<std::size_t>(layout_.width) * static_cast<std::size_t>(layout_.height);
    switch (layout_.number) {
        case Number::level: return passes_.levels(line, width_, static_cast<std::uint8_t*>(row_) + item, plane);
        case Number::single: return passes_.floats(line, width_, numbers_, static_cast<float*>(row_) + item, plane);
        case Number::half:
            return passes_.halves(line, width_, numbers_, static_cast<std::uint16_t*>(row_) + item, plane);
    }
}

Numbers prepared(const float (&of)[3][256], const float (&mean)[3], const float (&std)[3], const Passes& passes) {
    Numbers numbers{};
    std::memcpy(numbers.of, of, sizeof(of));
    std::uint8_t line[256 * kPixel] = {};
    for (std::size_t level = 0; level < 256; level++)
        for (std::size_t c = 0; c < 3; c++) {
            numbers.halves[c][level] = halved(of[c][level]);
            line[level * kPixel + c] = static_cast<std::uint8_t>(level);
        }
    for (std::size_t c = 0; c < 3; c++) {
        const double reciprocal = 1.0 / static_cast<double>(std[c]);
        numbers.mean[c] = mean[c];
        numbers.reciprocal[c][0] = static_cast<float>(reciprocal);
        numbers.reciprocal[c][1] = static_cast<float>(reciprocal - static_cast<double>(numbers.reciprocal[c][0]));
    }
    // Arithmetic is faster than tables, but may round differently: it is used if it gives every value exactly.
    constexpr float share = 1 / 255.0f, rest = static_cast<float>(1 / 255.0 - static_cast<double>(share));
    constexpr float shares[3][2] = {{share, rest}, {share, 0}, {1, 0}};  // divided by 255, multiplied by 1 / 255, as is
    for (const float (&each)[2] : shares) {
        float computed[3][256];
        std::uint16_t halves[3][256];
        std::memcpy(numbers.share, each, sizeof(each));
        numbers.by_arithmetic = true;
        passes.floats(line, 256, numbers, computed[0], 256);
        passes.halves(line, 256, numbers, halves[0], 256);
        numbers.by_arithmetic =
            !std::memcmp(computed, of, sizeof(of)) && !std::memcmp(halves, numbers.halves, sizeof(halves));
        if (numbers.by_arithmetic) break;
    }
    return numbers;
}

}  // namespace feedline
