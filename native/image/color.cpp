#include "color.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "../clones.h"

// Compiled without contraction of products and sums (see CMakeLists.txt), so that all CPUs give the same bits.

namespace feedline {
namespace {

using Level = std::uint8_t;

constexpr std::size_t kBlock = 256;  // pixels whose planes fit the first-level cache

// Truncated, as Pillow's Image.blend; `from` and `to` are levels.
inline Level blended(int from, int to, float alpha) {
    const float mixed = static_cast<float>(from) + alpha * static_cast<float>(to - from);
    return static_cast<Level>(static_cast<int>(std::min(std::max(mixed, 0.0f), 255.0f)));
}

// ITU-R 601 in 16 bits, as Pillow's convert("L").
inline int luma(int red, int green, int blue) { return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16; }

FEEDLINE_CLONES void blend_with(Level gray, float alpha, Level* data, std::size_t count) {
    for (std::size_t i = 0; i < count; i++) data[i] = blended(gray, data[i], alpha);
}

FEEDLINE_CLONES void saturate(float alpha, Level* data, std::size_t pixels) {
    for (std::size_t i = 0; i < pixels; i++) {
        Level* const rgb = data + 3 * i;
        const int gray = luma(rgb[0], rgb[1], rgb[2]);
        rgb[0] = blended(gray, rgb[0], alpha);
        rgb[1] = blended(gray, rgb[1], alpha);
        rgb[2] = blended(gray, rgb[2], alpha);
    }
}

// Sums of at most 2^24 pixels fit into 32 bits, which vectorizes better than 64.
FEEDLINE_CLONES std::uint32_t luma_sum(const Level* data, std::size_t pixels) {
    std::uint32_t sum = 0;
    for (std::size_t i = 0; i < pixels; i++)
        sum += static_cast<std::uint32_t>(luma(data[3 * i], data[3 * i + 1], data[3 * i + 2]));
    return sum;
}

FEEDLINE_CLONES std::uint32_t level_sum(const Level* data, std::size_t count) {
    std::uint32_t sum = 0;
    for (std::size_t i = 0; i < count; i++) sum += data[i];
    return sum;
}

// Returns the mean brightness, rounded.
Level mean_of(const Levels& levels) {
    constexpr std::size_t kPart = std::size_t{1} << 24;
    std::uint64_t sum = 0;
    for (std::size_t at = 0; at < levels.pixels; at += kPart) {
        const std::size_t count = std::min(kPart, levels.pixels - at);
        sum += levels.channels == 3 ? luma_sum(levels.data + 3 * at, count) : level_sum(levels.data + at, count);
    }
    return static_cast<Level>(static_cast<double>(sum) / static_cast<double>(levels.pixels) + 0.5);
}

// A hue: its sector of the color circle, and the position within the sector.
struct Circle {
    std::array<std::int32_t, 256> sector;
    std::array<float, 256> place;

    Circle() {
        for (int hue = 0; hue < 256; hue++) {
            const double turned = hue * 6.0 / 255.0;
            sector[hue] = static_cast<int>(turned) % 6;
            place[hue] = static_cast<float>(turned - std::floor(turned));
        }
    }
};

// One block of pixels as planes, so that the compiler can work on many pixels at a time.
struct Planes {
    std::int32_t red[kBlock], green[kBlock], blue[kBlock], most[kBlock], hue[kBlock], sector[kBlock];
    float saturation[kBlock], place[kBlock];
};

inline int rounded(double level) { return static_cast<int>(level + 0.5); }

// Hue in 255ths of the circle, and saturation. Mixed precision as in Pillow's conversion, which defines the result.
inline void to_hue(Planes& p, std::size_t i) {
    const int red = p.red[i], green = p.green[i], blue = p.blue[i];
    const int most = std::max(red, std::max(green, blue)), least = std::min(red, std::min(green, blue));
    const float range = static_cast<float>(std::max(most - least, 1));
    const float r = static_cast<float>(most - red) / range;
    const float g = static_cast<float>(most - green) / range;
    const float b = static_cast<float>(most - blue) / range;
    const double from = red == most ? 0.0 : green == most ? 2.0 : 4.0;
    const float plus = red == most ? b : green == most ? r : g;
    const float minus = red == most ? g : green == most ? b : r;
    const float sixth = static_cast<float>(from + plus - minus);
    const double turn = sixth / 6.0 + 1.0;
    const float hue = static_cast<float>(turn >= 1.0 ? turn - 1.0 : turn);
    const float share = static_cast<float>(most - least) / static_cast<float>(std::max(most, 1));
    p.most[i] = most;
    p.hue[i] = most == least ? 0 : static_cast<int>(hue * 255.0);
    p.saturation[i] = static_cast<float>(static_cast<int>(share * 255.0) / 255.0);
}

// The value, which is the brightest channel, does not change.
inline void from_hue(Planes& p, std::size_t i) {
    const int most = p.most[i], sector = p.sector[i];
    const double value = most;
    const float share = p.saturation[i], place = p.place[i];
    const int low = rounded(value * (1.0 - share));
    const int falling = rounded(value * (1.0 - share * place));
    const int rising = rounded(value * (1.0 - share * (1.0 - place)));
    // Masks instead of conditions, which the compiler would turn into branches.
    const auto when = [sector](int wanted) { return -static_cast<int>(sector == wanted); };
    p.red[i] = (most & (when(0) | when(5))) | (falling & when(1)) | (rising & when(4)) | (low & (when(2) | when(3)));
    p.green[i] = (most & (when(1) | when(2))) | (falling & when(3)) | (rising & when(0)) | (low & (when(4) | when(5)));
    p.blue[i] = (most & (when(3) | when(4))) | (falling & when(5)) | (rising & when(2)) | (low & (when(0) | when(1)));
}

FEEDLINE_CLONES void turn_block(int turn, const Circle& circle, Planes& p, Level* data, std::size_t count) {
    for (std::size_t i = 0; i < count; i++) {
        p.red[i] = data[3 * i];
        p.green[i] = data[3 * i + 1];
        p.blue[i] = data[3 * i + 2];
    }
    for (std::size_t i = 0; i < kBlock; i++) to_hue(p, i);
    for (std::size_t i = 0; i < kBlock; i++) {
        const int hue = (p.hue[i] + turn) & 255;
        p.sector[i] = circle.sector[hue];
        p.place[i] = circle.place[hue];
    }
    for (std::size_t i = 0; i < kBlock; i++) from_hue(p, i);
    for (std::size_t i = 0; i < count; i++) {
        data[3 * i] = static_cast<Level>(p.red[i]);
        data[3 * i + 1] = static_cast<Level>(p.green[i]);
        data[3 * i + 2] = static_cast<Level>(p.blue[i]);
    }
}

void turn_hue(int turn, const Levels& levels) {
    static const Circle circle;
    Planes planes{};
    for (std::size_t at = 0; at < levels.pixels; at += kBlock)
        turn_block(turn, circle, planes, levels.data + 3 * at, std::min(kBlock, levels.pixels - at));
}

// sums[j] += weights[k] * source[j + k * step], k by k.
template <class Source>
inline void add_weighted(const Source* source, std::size_t step, const std::vector<float>& weights, float* sums,
                         std::size_t count) {
    std::fill(sums, sums + count, 0.0f);
    for (std::size_t k = 0; k < weights.size(); k++) {
        const float weight = weights[k];
        const Source* const from = source + k * step;
        for (std::size_t j = 0; j < count; j++) sums[j] += weight * static_cast<float>(from[j]);
    }
}

FEEDLINE_CLONES void weigh_across(const Level* line, std::size_t channels, const std::vector<float>& weights, float* sums,
                                  std::size_t count) {
    add_weighted(line, channels, weights, sums, count);
}

FEEDLINE_CLONES void weigh_down(const float* lines, std::size_t line, const std::vector<float>& weights, float* sums,
                                Level* out) {
    add_weighted(lines, line, weights, sums, line);
    constexpr float kTies = 12582912.0f;  // 1.5 * 2^23: adding it rounds fractions away, half to even
    for (std::size_t j = 0; j < line; j++) {
        const float level = std::min(std::max(sums[j], 0.0f), 255.0f);
        out[j] = static_cast<Level>(static_cast<int>((level + kTies) - kTies));
    }
}

}  // namespace

void adjust(const Levels& levels, const std::vector<Change>& changes) {
    const std::size_t count = levels.pixels * static_cast<std::size_t>(levels.channels);
    for (const Change& change : changes) {
        const float alpha = static_cast<float>(change.factor);
        switch (change.what) {
            case Adjustment::brightness: blend_with(0, alpha, levels.data, count); break;
            case Adjustment::contrast: blend_with(mean_of(levels), alpha, levels.data, count); break;
            case Adjustment::saturation: saturate(alpha, levels.data, levels.pixels); break;
            case Adjustment::hue: turn_hue(static_cast<int>(change.factor * 255) & 255, levels); break;
        }
    }
}

void blur(const Bordered& source, const std::vector<float>& across, const std::vector<float>& down, std::uint8_t* out) {
    const std::size_t line = source.width * source.channels;
    const std::size_t bordered_line = line + (across.size() - 1) * source.channels;
    const std::size_t lines = source.height + down.size() - 1;
    std::vector<float> weighed((lines + 1) * line);  // one extra line for the sums
    float* const sums = weighed.data() + lines * line;
    for (std::size_t y = 0; y < lines; y++)
        weigh_across(source.data + y * bordered_line, source.channels, across, weighed.data() + y * line, line);
    for (std::size_t y = 0; y < source.height; y++)
        weigh_down(weighed.data() + y * line, line, down, sums, out + y * line);
}

}  // namespace feedline
