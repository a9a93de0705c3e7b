#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace feedline {

// Resampling filters, with Pillow's numbers.
enum class Filter : int { lanczos = 1, bilinear = 2, bicubic = 3, box = 4, hamming = 5 };

// One axis of an antialiased resize: `outputs` pixels from the samples [begin, end) of a line of `samples`; only pixels
// [first, first + count) are computed.
struct Axis {
    double begin, end;
    int samples;
    std::int64_t outputs;
    std::int64_t first;
    int count;
    Filter filter;
    bool mirrored;  // pixels come in reverse order
};

// Weights of that axis, bit for bit those of Pillow: integers in units of 2^-22.
//
// Each weight is stored as high * 256 + low, for multiplication of pairs of 16 bits. The weights of an output are
// padded with zeros to whole blocks of four, and the outputs to a multiple of eight.
class Taps {
public:
    static constexpr int kBlock = 4, kBits = 22;

    struct Block {
        std::int16_t high[kBlock], low[kBlock];
        std::int32_t weight(int i) const { return high[i] * 256 + low[i]; }
    };

    void prepare(const Axis& axis);

    int count() const { return count_; }
    int padded_count() const { return (count_ + 7) & ~7; }
    int low() const { return low_; }  // the samples in use are [low, high)
    int high() const { return high_; }
    int blocks() const { return blocks_; }            // per output
    int overrun() const { return blocks_ * kBlock; }  // samples from high() on that kernels may touch, with weight zero
    int offset(int output) const {
        return offsets_[static_cast<std::size_t>(output)];
    }                                                                              // of the first sample, from low
    int end(int output) const { return ends_[static_cast<std::size_t>(output)]; }  // past the last sample, from low
    const int* offsets() const { return offsets_.data(); }
    const Block* of(int output) const {
        return weights_.data() + static_cast<std::size_t>(output) * static_cast<std::size_t>(blocks_);
    }

private:
    int count_ = 0, low_ = 0, high_ = 0, blocks_ = 0;
    std::vector<int> offsets_, ends_;
    std::vector<Block> weights_;
    std::vector<double> shares_;
};

}  // namespace feedline
