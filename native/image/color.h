#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace feedline {

// torchvision's numbers; see feedline/transforms/color.py.
enum class Adjustment : int { brightness, contrast, saturation, hue };

struct Change {
    Adjustment what;
    double factor;  // 1 changes nothing; for hue, a share of the color circle, and 0 changes nothing
};

// Contiguous levels with `channels` interleaved: 3 (RGB) or 1 (gray, which has neither saturation nor hue).
struct Levels {
    std::uint8_t* data;
    std::size_t pixels;
    int channels;
};

// Applies the adjustments in order, in place, with the bits of Pillow's ImageEnhance; hue with those of its conversion
// to HSV and back.
void adjust(const Levels& levels, const std::vector<Change>& changes);

// Image with its border for a convolution: (height + down - 1) lines of (width + across - 1) pixels, where `down` and
// `across` are the lengths of the kernels.
struct Bordered {
    const std::uint8_t* data;
    std::size_t height, width, channels;
};

// Writes the weighted means to `out`, (height, width, channels): horizontal pass, then vertical. Products are added in
// order, in float32, and rounded half to even.
void blur(const Bordered& source, const std::vector<float>& across, const std::vector<float>& down, std::uint8_t* out);

}  // namespace feedline
