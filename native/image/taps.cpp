#include "taps.h"

#include <algorithm>
#include <cmath>

namespace feedline {
namespace {

constexpr double kPi = 3.14159265358979323846;

double triangle(double x) {
    x = std::fabs(x);
    return x < 1.0 ? 1.0 - x : 0.0;
}

// Keys' cubic convolution with a = -1/2.
double cubic(double x) {
    constexpr double a = -0.5;
    x = std::fabs(x);
    if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
    if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * a;
    return 0.0;
}

double box(double x) { return x > -0.5 && x <= 0.5 ? 1.0 : 0.0; }

double sinc(double x) {
    if (x == 0.0) return 1.0;
    x *= kPi;
    return std::sin(x) / x;
}

double lanczos(double x) { return x >= -3.0 && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0; }

double hamming(double x) {
    x = std::fabs(x);
    if (x == 0.0) return 1.0;
    if (x >= 1.0) return 0.0;
    x *= kPi;
    return std::sin(x) / x * (0.54f + 0.46f * std::cos(x));  // Pillow's constants are floats
}

// Weight by the distance from the center, in output pixels; zero from `support` on.
struct Kernel {
    double (*weight)(double);
    double support;
};

Kernel kernel_of(Filter filter) {
    switch (filter) {
        case Filter::lanczos: return {lanczos, 3.0};
        case Filter::bicubic: return {cubic, 2.0};
        case Filter::box: return {box, 0.5};
        case Filter::hamming: return {hamming, 1.0};
        case Filter::bilinear: break;
    }
    return {triangle, 1.0};
}

// Computes the share of each sample [from, to) in an output centered at `center`; they sum to one.
void shares_of(const Kernel& kernel, double narrowing, double center, int from, int to, double* shares) {
    double sum = 0.0;
    for (int j = from; j < to; j++) {
        const double share = kernel.weight((j - center + 0.5) * narrowing);
        shares[j - from] = share;
        sum += share;
    }
    for (int j = 0; j < to - from && sum != 0.0; j++) shares[j] /= sum;
}

// Fraction bits of torch's weights, where `largest` is the largest of the axis.
int torch_bits(double largest) {
    int bits = 0;
    while (bits < Taps::kBits && static_cast<int>(0.5 + largest * (1 << (bits + 1))) < 1 << 15) bits++;
    return bits;
}

}  // namespace

// Rounds shares to integers with `bits` fraction bits, halves away from zero, and stores them in units of 2^-kBits.
void Taps::fix(int output, const double* shares, int count, int bits) {
    const auto first = static_cast<std::size_t>(output) * static_cast<std::size_t>(blocks_);
    const auto team = static_cast<std::size_t>(output / kTeam) * static_cast<std::size_t>(blocks_);
    for (int j = 0; j < count; j++) {
        const double scaled = shares[j] * (1 << bits);
        const int rounded = static_cast<int>(shares[j] < 0 ? scaled - 0.5 : scaled + 0.5);
        const int weight = rounded * (1 << (kBits - bits)), high = (weight + 128) >> 8,
                  highest = (high + 128) >> 8;
        Block& block = weights_[first + static_cast<std::size_t>(j / kBlock)];
        block.high[j % kBlock] = static_cast<std::int16_t>(high);
        block.low[j % kBlock] = static_cast<std::int16_t>(weight - high * 256);
        auto& bytes = team_weights_[team + static_cast<std::size_t>(j / kBlock)].bytes;
        bytes[0][output % kTeam][j % kBlock] = static_cast<std::int8_t>(weight - high * 256);
        bytes[1][output % kTeam][j % kBlock] = static_cast<std::int8_t>(high - highest * 256);
        bytes[2][output % kTeam][j % kBlock] = static_cast<std::int8_t>(highest);
    }
}

void Taps::form_teams() {
    constexpr int kSamples = kTeam * kBlock;
    near_ = true;
    for (std::size_t team = 0; team < bases_.size(); team++) {
        const int* const offset = offsets_.data() + team * kTeam;
        const int base = *std::min_element(offset, offset + kTeam);
        near_ = near_ && *std::max_element(offset, offset + kTeam) - base <= kReach - kBlock;
        bases_[team] = base;
        std::uint8_t* const places = places_[team].at;
        for (int i = 0; i < kSamples; i++)
            places[i] = static_cast<std::uint8_t>((offset[i / kBlock] - base + i % kBlock) * 4);
        for (int c = 1; c < 4; c++)
            for (int i = 0; i < kSamples; i++) places[c * kSamples + i] = static_cast<std::uint8_t>(places[i] + c);
    }
}

// The arithmetic and its order are those of Pillow's resampling, and of torch's, so that the weights are equal.
void Taps::prepare(const Axis& axis) {
    // Pillow keeps a box as floats, and rounds its length to a float, too.
    const double length = static_cast<float>(axis.end) - static_cast<float>(axis.begin);
    const double scale = length / static_cast<double>(axis.outputs);
    const double widening = std::max(scale, 1.0);  // widens the filter, which makes it antialiased
    const Kernel kernel = kernel_of(axis.filter);
    const double support = kernel.support * widening, narrowing = 1.0 / widening;
    const auto center = [&](std::int64_t i) {
        return axis.begin + (static_cast<double>(axis.first + i) + 0.5) * scale;
    };
    const auto from_of = [&](std::int64_t i) { return std::max(0, static_cast<int>(center(i) - support + 0.5)); };
    const auto to_of = [&](std::int64_t i) {
        return std::min(axis.samples, static_cast<int>(center(i) + support + 0.5));
    };
    const auto place = [&](int i) { return static_cast<std::size_t>(axis.mirrored ? axis.count - 1 - i : i); };
    count_ = axis.count;
    offsets_.assign(static_cast<std::size_t>(padded_count()), 0);
    ends_.assign(offsets_.size(), 0);
    int most = 0;
    for (int i = 0; i < count_; i++) {
        const int from = from_of(i), to = to_of(i);
        offsets_[place(i)] = from;
        ends_[place(i)] = to;
        most = std::max(most, to - from);
    }
    low_ = *std::min_element(offsets_.begin(), offsets_.begin() + count_);
    high_ = *std::max_element(ends_.begin(), ends_.begin() + count_);
    blocks_ = (most + kBlock - 1) / kBlock;
    weights_.assign(offsets_.size() * static_cast<std::size_t>(blocks_), Block{});
    bases_.resize(offsets_.size() / kTeam);
    places_.resize(bases_.size());
    team_weights_.assign(bases_.size() * static_cast<std::size_t>(blocks_), TeamBlock{});
    // As many as any output may have.
    shares_.resize(static_cast<std::size_t>(std::min<double>(axis.samples, 2 * std::ceil(support) + 1)));
    double largest = 0.0;
    for (std::int64_t i = -axis.first; axis.torchs && i < axis.outputs - axis.first; i++) {
        const int from = from_of(i), to = to_of(i);
        shares_of(kernel, narrowing, center(i), from, to, shares_.data());
        largest = std::max(largest, *std::max_element(shares_.data(), shares_.data() + std::max(1, to - from)));
    }
    const int bits = axis.torchs ? torch_bits(largest) : kBits;
    for (int i = 0; i < count_; i++) {
        int& from = offsets_[place(i)];
        int& to = ends_[place(i)];
        shares_of(kernel, narrowing, center(i), from, to, shares_.data());
        fix(static_cast<int>(place(i)), shares_.data(), to - from, bits);
        from -= low_;
        to -= low_;
    }
    // Outputs of the padding read the last output's samples, with weight zero, so that the samples of their team are
    // near.
    std::fill(offsets_.begin() + count_, offsets_.end(), offsets_[static_cast<std::size_t>(count_ - 1)]);
    form_teams();
}

}  // namespace feedline
