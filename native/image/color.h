#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace feedline {

// As torchvision numbers them; see src/feedline/transforms/color.py.
enum class Adjustment : int { brightness, contrast, saturation, hue };

struct Change {
    Adjustment what;
    double factor;  // 1 changes nothing; of hue, a share of the color circle, where 0 changes nothing
};

// Levels without gaps, of `channels` interleaved: 3 (RGB) or 1 (gray, which has neither saturation nor hue).
struct Levels {
    std::uint8_t* data;
    std::size_t pixels;
    int channels;
};

// Changes the levels in place, one change after the other, to the bits that Pillow's ImageEnhance gives; the hue as its
// conversion to HSV and back does.
void adjust(const Levels& levels, const std::vector<Change>& changes);

// A picture with its border for a convolution: (height + down - 1) lines of (width + across - 1) pixels, where `down`
// and `across` are the lengths of the kernels.
struct Bordered {
    const std::uint8_t* data;
    std::size_t height, width, channels;
};

// Writes the weighted means to `out`, (height, width, channels): along lines, then down; products added in order, in
// float32, rounded at ties to even levels.
void blur(const Bordered& source, const std::vector<float>& across, const std::vector<float>& down, std::uint8_t* out);

}  // namespace feedline
