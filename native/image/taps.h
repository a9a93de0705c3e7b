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
    bool torchs = false;  // weights are rounded as torch's, not as Pillow's
};

// Weights of that axis, bit for bit those of Pillow, or of torch's antialiased resize of uint8: integers in units of
// 2^-22. Those of torch have 16 bits, with as many fraction bits as the largest weight of the axis allows.
//
// Each weight is stored twice: as high * 256 + low, for multiplication of pairs of 16 bits, and as three signed bytes.
// The weights of an output are padded with zeros to whole blocks of four, and the outputs to a multiple of kOutputs.
class Taps {
public:
    static constexpr int kBlock = 4, kBits = 22, kOutputs = 16;

    struct Block {
        std::int16_t high[kBlock], low[kBlock];
        std::int32_t weight(int i) const { return high[i] * 256 + low[i]; }
    };

    // One block of four neighboring outputs: weight j of output i is the sum of bytes[k][i][j] * 256^k.
    static constexpr int kTeam = 4;
    struct TeamBlock {
        std::int8_t bytes[3][kTeam][kBlock];
    };

    // The samples of a team are near if all its first blocks are within kReach samples from base(). places() are then
    // the bytes from base() on that a block multiplies: four samples of each output, for one channel after the other.
    static constexpr int kReach = 16;
    struct alignas(64) Places {
        std::uint8_t at[64];
    };

    void prepare(const Axis& axis);

    int count() const { return count_; }
    int padded_count() const { return (count_ + kOutputs - 1) / kOutputs * kOutputs; }
    int low() const { return low_; }  // the samples in use are [low, high)
    int high() const { return high_; }
    int blocks() const { return blocks_; }             // per output
    int length() const { return blocks_ * kBlock; }    // weights per output, with the padding
    int overrun() const { return length() + kReach; }  // samples from high() on that kernels may touch
    // First sample of an output, and the sample after its last, from low() on.
    int offset(int output) const { return offsets_[static_cast<std::size_t>(output)]; }
    int end(int output) const { return ends_[static_cast<std::size_t>(output)]; }
    const int* offsets() const { return offsets_.data(); }
    const Block* of(int output) const {
        return weights_.data() + static_cast<std::size_t>(output) * static_cast<std::size_t>(blocks_);
    }
    const TeamBlock* of_team(int team) const {
        return team_weights_.data() + static_cast<std::size_t>(team) * static_cast<std::size_t>(blocks_);
    }
    int base(int team) const { return bases_[static_cast<std::size_t>(team)]; }
    const Places& places(int team) const { return places_[static_cast<std::size_t>(team)]; }
    bool near() const { return near_; }  // the samples of all teams are

private:
    void fix(int output, const double* shares, int count, int bits);
    void form_teams();

    int count_ = 0, low_ = 0, high_ = 0, blocks_ = 0;
    bool near_ = false;
    std::vector<int> offsets_, ends_;
    std::vector<Block> weights_;
    std::vector<TeamBlock> team_weights_;
    std::vector<int> bases_;
    std::vector<Places> places_;
    std::vector<double> shares_;
};

}  // namespace feedline
