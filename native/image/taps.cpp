#include "taps.h"

#include <algorithm>
#include <cmath>

namespace feedline {
namespace {

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

struct Filter {
    bool bicubic;
    double support, narrowing;
};

// Rounds shares to integers, halves away from zero.
void fix(const double* shares, int count, Taps::Block* blocks) {
    for (int j = 0; j < count; j++) {
        const double scaled = shares[j] * (1 << Taps::kBits);
        const int weight = static_cast<int>(shares[j] < 0 ? scaled - 0.5 : scaled + 0.5), high = (weight + 128) >> 8;
        Taps::Block& block = blocks[j / Taps::kBlock];
        block.high[j % Taps::kBlock] = static_cast<std::int16_t>(high);
        block.low[j % Taps::kBlock] = static_cast<std::int16_t>(weight - high * 256);
    }
}

// Computes the share of each sample [from, to) in an output centered at `center`; they sum to one.
void shares_of(const Filter& filter, double center, int from, int to, double* shares) {
    double sum = 0.0;
    for (int j = from; j < to; j++) {
        const double x = (j - center + 0.5) * filter.narrowing;
        const double share = filter.bicubic ? cubic(x) : triangle(x);
        shares[j - from] = share;
        sum += share;
    }
    for (int j = 0; j < to - from && sum != 0.0; j++) shares[j] /= sum;
}

}  // namespace

// The arithmetic and its order are those of Pillow's resampling, so that the weights are equal.
void Taps::prepare(const Axis& axis) {
    const double scale = (axis.end - axis.begin) / static_cast<double>(axis.outputs);
    const double widening = std::max(scale, 1.0);  // widens the filter, which makes it antialiased
    const Filter filter{axis.bicubic, (axis.bicubic ? 2.0 : 1.0) * widening, 1.0 / widening};
    const auto center = [&](int i) { return axis.begin + (static_cast<double>(axis.first + i) + 0.5) * scale; };
    const auto place = [&](int i) { return static_cast<std::size_t>(axis.mirrored ? axis.count - 1 - i : i); };
    count_ = axis.count;
    offsets_.assign(static_cast<std::size_t>(padded_count()), 0);
    ends_.assign(offsets_.size(), 0);
    int most = 0;
    for (int i = 0; i < count_; i++) {
        const int from = std::max(0, static_cast<int>(center(i) - filter.support + 0.5));
        const int to = std::min(axis.samples, static_cast<int>(center(i) + filter.support + 0.5));
        offsets_[place(i)] = from;
        ends_[place(i)] = to;
        most = std::max(most, to - from);
    }
    low_ = *std::min_element(offsets_.begin(), offsets_.begin() + count_);
    high_ = *std::max_element(ends_.begin(), ends_.begin() + count_);
    blocks_ = (most + kBlock - 1) / kBlock;
    weights_.assign(offsets_.size() * static_cast<std::size_t>(blocks_), Block{});
    shares_.resize(static_cast<std::size_t>(most));
    for (int i = 0; i < count_; i++) {
        int& from = offsets_[place(i)];
        int& to = ends_[place(i)];
        shares_of(filter, center(i), from, to, shares_.data());
        fix(shares_.data(), to - from, weights_.data() + place(i) * static_cast<std::size_t>(blocks_));
        from -= low_;
        to -= low_;
    }
}

}  // namespace feedline
