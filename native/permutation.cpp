#include "permutation.h"

#include <algorithm>

#include "clones.h"

namespace feedline {
namespace {

constexpr int kBlock = 512;  // fits into the first-level cache, and fills every vector width

// Values in the network, as two halves, and the target of each result.
struct Block {
    alignas(64) std::uint32_t high[kBlock];
    alignas(64) std::uint32_t low[kBlock];
    alignas(64) std::int64_t target[kBlock];
};

// A bijective 32-bit mix with low bias (constants: C. Wellons, "Prospecting for hash functions", 2018).
inline std::uint32_t mix(std::uint32_t x, std::uint32_t key) {
    x += key;
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

FEEDLINE_CLONES
void encrypt(Block& block, int count, const std::uint32_t* keys, std::uint32_t even_mask, std::uint32_t odd_mask) {
    for (int i = 0; i < count; i++) {
        std::uint32_t high = block.high[i], low = block.low[i];
#pragma GCC unroll 4
        for (int round = 0; round < Permutation::kRounds; round += 2) {
            high = (high ^ mix(low, keys[round])) & even_mask;
            low = (low ^ mix(high, keys[round + 1])) & odd_mask;
        }
        block.high[i] = high;
        block.low[i] = low;
    }
}

// Writes every value to its target, moves values outside of the range to the front, and returns their number.
int settle(Block& block, int count, int low_bits, std::uint64_t length, std::int64_t* out) {
    int kept = 0;
    for (int i = 0; i < count; i++) {
        const std::uint32_t high = block.high[i], low = block.low[i];
        const std::int64_t target = block.target[i];
        const std::uint64_t value = std::uint64_t{high} << low_bits | low;
        out[target] = static_cast<std::int64_t>(value);  // values outside are overwritten in a later round
        block.high[kept] = high;
        block.low[kept] = low;
        block.target[kept] = target;
        kept += value >= length;
    }
    return kept;
}

std::uint64_t splitmix(std::uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

int bit_length(std::uint64_t x) {
    int bits = 0;
    for (; x; x >>= 1) bits++;
    return bits;
}

}  // namespace

Permutation::Permutation(std::uint64_t key, std::uint64_t length) : length_(length) {
    const int bits = std::max(8, bit_length(length - 1));
    low_bits_ = bits / 2;
    masks_[0] = static_cast<std::uint32_t>((std::uint64_t{1} << (bits - low_bits_)) - 1);
    masks_[1] = static_cast<std::uint32_t>((std::uint64_t{1} << low_bits_) - 1);
    for (int i = 0; i < kRounds; i++)
        keys_[i] = static_cast<std::uint32_t>(splitmix(key + static_cast<std::uint64_t>(i + 1) * 0x9E3779B97F4A7C15u));
}

template <class Place>
void Permutation::walk(std::int64_t count, std::int64_t* out, Place place) const {
    Block block;
    int held = 0;
    for (std::int64_t next = 0; next < count || held > 0;) {
        const int fresh = static_cast<int>(std::min<std::int64_t>(kBlock - held, count - next));
        for (int i = 0; i < fresh; i++) {
            const auto value = static_cast<std::uint64_t>(place(next + i));
            block.high[held + i] = static_cast<std::uint32_t>(value >> low_bits_);
            block.low[held + i] = static_cast<std::uint32_t>(value) & masks_[1];
            block.target[held + i] = next + i;
        }
        held += fresh;
        next += fresh;
        encrypt(block, held, keys_, masks_[0], masks_[1]);
        held = settle(block, held, low_bits_, length_, out);
    }
}

void Permutation::range(std::int64_t start, std::int64_t count, std::int64_t* out) const {
    walk(count, out, [start](std::int64_t i) { return start + i; });
}

void Permutation::at(const std::int64_t* places, std::int64_t count, std::int64_t* out) const {
    walk(count, out, [places](std::int64_t i) { return places[i]; });
}

}  // namespace feedline
