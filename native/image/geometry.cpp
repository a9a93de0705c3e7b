#include "geometry.h"

#include <algorithm>
#include <cmath>

namespace feedline {
namespace {

constexpr int kAttempts = 10;
constexpr int kSpare = 2;  // with a smaller margin, libjpeg's filter is visible: 35 dB from a full decode instead of 45

// Numbers in [0, 1) from splitmix64, as `Draws` in feedline/core/rng.py.
class Draws {
public:
    explicit Draws(std::uint64_t key) : state_(key) {}
    double next() {
        std::uint64_t z = state_ += 0x9E3779B97F4A7C15u;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        return static_cast<double>((z ^ z >> 31) >> 11) * 0x1p-53;
    }

private:
    std::uint64_t state_;
};

// Rounds half to even, as Python's round().
double rounded(double value) { return std::nearbyint(value); }

Window fallback(const Law& law, int width, int height) {
    const double shape = static_cast<double>(width) / height;
    int w = width, h = height;
    if (shape < law.ratio[0]) h = std::max(1, static_cast<int>(rounded(width / law.ratio[0])));
    else if (shape > law.ratio[1]) w = std::max(1, static_cast<int>(rounded(height * law.ratio[1])));
    return {(width - w) / 2, (height - h) / 2, w, h};
}

Window random_box(const Law& law, Draws& draws, int width, int height) {
    const double area = static_cast<double>(width) * height;
    const double low = std::log(law.ratio[0]), high = std::log(law.ratio[1]);
    for (int attempt = 0; attempt < kAttempts; attempt++) {
        const double wanted = area * (law.scale[0] + (law.scale[1] - law.scale[0]) * draws.next());
        const double ratio = std::exp(low + (high - low) * draws.next());
        const double w = rounded(std::sqrt(wanted * ratio)), h = rounded(std::sqrt(wanted / ratio));
        if (!(0 < w && w <= width && 0 < h && h <= height)) continue;
        const int x = static_cast<int>(draws.next() * (width - w + 1));
        const int y = static_cast<int>(draws.next() * (height - h + 1));
        return {x, y, static_cast<int>(w), static_cast<int>(h)};
    }
    return fallback(law, width, height);
}

Extent resized(std::int64_t shorter, int width, int height) {
    if (width <= height) return {shorter, shorter * height / width};
    return {shorter * width / height, shorter};
}

// Start of the center; negative for padding, of which the smaller half comes first.
std::int64_t offset(std::int64_t full, std::int64_t size) {
    if (full < size) return -((size - full) / 2);
    return static_cast<std::int64_t>(rounded(static_cast<double>(full - size) / 2));
}

}  // namespace

Geometry geometry(const Law& law, double flip, Extent size, std::uint64_t key, int width, int height) {
    Draws draws(key);
    Geometry found;
    found.box = {0, 0, width, height};
    found.full = size;
    if (law.kind == Kind::random_box) {
        found.box = random_box(law, draws, width, height);
    } else if (law.kind == Kind::center_box) {
        found.full = resized(law.shorter, width, height);
        found.left = offset(found.full.width, size.width);
        found.top = offset(found.full.height, size.height);
    }
    found.flip = draws.next() < flip;
    return found;
}

int Geometry::largest_scale() const {
    for (int scale = 8; scale > 1; scale /= 2)
        if (box.width >= kSpare * full.width * scale && box.height >= kSpare * full.height * scale) return scale;
    return 1;
}

}  // namespace feedline
