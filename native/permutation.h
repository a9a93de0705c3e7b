#pragma once
#include <cstdint>

namespace feedline {

// Permutation of [0, length) given by `key`, 1 <= length < 2**62. Same numbers as `_permuted_numpy`.
//
// A Feistel network of eight rounds over the smallest sufficient power of two; values of at least `length` go through
// it again (cycle walking).
class Permutation {
public:
    static constexpr int kRounds = 8;

    Permutation(std::uint64_t key, std::uint64_t length);

    // out[i] = element at position start + i.
    void range(std::int64_t start, std::int64_t count, std::int64_t* out) const;

    // out[i] = element at position places[i]; `out` may be `places`. Every position must be in [0, length).
    void at(const std::int64_t* places, std::int64_t count, std::int64_t* out) const;

private:
    template <class Place>
    void walk(std::int64_t count, std::int64_t* out, Place place) const;

    std::uint64_t length_;
    int low_bits_;
    std::uint32_t masks_[2];
    std::uint32_t keys_[kRounds];
};

}  // namespace feedline
