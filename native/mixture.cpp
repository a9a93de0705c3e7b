#include "mixture.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "clones.h"

namespace feedline {
namespace {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15u;
constexpr std::int32_t kMostBuckets = 1 << 26;

inline std::uint64_t mix(std::uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

// Key of a part of an address, as in `rng.derive`.
inline std::uint64_t derived(std::uint64_t key, std::uint64_t part) { return mix((key ^ part) + kGolden); }

// The double with a mantissa of 32 given bits: `exponent` holds its upper half.
inline double with_mantissa(std::uint64_t exponent, std::uint64_t bits) {
    const std::uint64_t whole = exponent << 32 | bits;
    double result;
    std::memcpy(&result, &whole, sizeof result);
    return result;
}

// Number `at` of the uniform stream of `key`, in [0, 1): splitmix64 by counter.
inline double uniform(std::uint64_t key, std::uint64_t at) {
    const std::uint64_t bits = mix(key + (at + 1) * kGolden) >> 11;
    // Converted in two exact halves, 2**84 + upper * 2**32 and 2**52 + lower: before AVX-512DQ, vectors have no
    // conversion of 64-bit integers.
    const double upper = with_mantissa(0x45300000u, bits >> 32), lower = with_mantissa(0x43300000u, bits & 0xFFFFFFFFu);
    return (upper - 0x1.00000001p84 + lower) * 0x1p-53;
}

// Places of a dataset's draws on the circle of a block, in order except for the wrap at its end, and their buckets.
// `at` is the number of the first one in the stream of `key`.
FEEDLINE_CLONES
void place(std::uint64_t key, std::int32_t at, std::int32_t count, double begin, std::int32_t buckets, double* places,
           std::int32_t* chosen) {
    const double parts = static_cast<double>(count), width = static_cast<double>(buckets);
    for (std::int32_t i = 0; i < count; i++) {
        const double part = static_cast<double>(i) + uniform(key, static_cast<std::uint64_t>(at + i));
        const double turn = part / parts + begin;  // 2 or less
        const double within = turn < 1.0 ? turn : turn - 1.0;
        places[i] = within < 1.0 ? within : within - 1.0;
        chosen[i] = std::min(buckets - 1, static_cast<std::int32_t>(places[i] * width));
    }
}

// Buffers of a block, used again for the next one.
struct Scratch {
    std::vector<double> places, sorted;
    std::vector<std::int32_t> chosen, next;
};

std::int32_t mixture_block(const std::int64_t* counts, std::int64_t datasets, std::uint64_t jitter_key,
                           std::uint64_t begin_key, std::int32_t* owners, Scratch& scratch) {
    auto& [places, sorted, chosen, next] = scratch;
    std::int64_t size = 0;
    for (std::int64_t d = 0; d < datasets; d++) size += counts[d];
    // The places spread evenly, so with two buckets for each there is little to sort within one.
    const auto buckets = static_cast<std::int32_t>(std::clamp<std::int64_t>(2 * size, 1, kMostBuckets));
    places.resize(size);
    chosen.resize(size);
    std::int32_t at = 0;
    for (std::int64_t d = 0; d < datasets; d++) {
        const auto count = static_cast<std::int32_t>(counts[d]);
        const double begin = uniform(begin_key, static_cast<std::uint64_t>(d));
        place(jitter_key, at, count, begin, buckets, places.data() + at, chosen.data() + at);
        at += count;
    }
    next.assign(buckets, 0);
    for (const std::int32_t bucket : chosen) next[bucket]++;
    std::int32_t sum = 0;
    for (std::int32_t& start : next) sum += std::exchange(start, sum);
    // Insertion within a bucket; equal places keep their order, as in NumPy's stable sort. sorted[0] and all places
    // that are not yet written are 0, and no place is below 0. Insertion ends there, or at a place of an earlier
    // bucket.
    sorted.assign(size + 1, 0.0);
    at = 0;
    for (std::int64_t d = 0; d < datasets; d++) {
        for (std::int64_t i = 0; i < counts[d]; i++, at++) {
            std::int32_t to = next[chosen[at]]++;
            for (; sorted[to] > places[at]; to--) {
                sorted[to + 1] = sorted[to];
                owners[to] = owners[to - 1];
            }
            sorted[to + 1] = places[at];
            owners[to] = static_cast<std::int32_t>(d);
        }
    }
    return at;
}

}  // namespace

void mixture_blocks(const std::int64_t* counts, std::int64_t blocks, std::int64_t datasets, std::uint64_t first,
                    std::uint64_t jitter_key, std::uint64_t begin_key, std::int32_t* owners) {
    Scratch scratch;
    for (std::int64_t n = 0; n < blocks; n++, counts += datasets) {
        const std::uint64_t number = first + static_cast<std::uint64_t>(n);
        owners += mixture_block(counts, datasets, derived(jitter_key, number), derived(begin_key, number), owners,
                                scratch);
    }
}

bool interleave(const std::int32_t* owners, std::int64_t count, const std::int64_t* parts, const std::int64_t* starts,
                const std::int64_t* shifts, std::int64_t datasets, std::int64_t* out) {
    std::vector<std::int64_t> next(starts, starts + datasets);
    for (std::int64_t i = 0; i < count; i++) {
        const std::int32_t owner = owners[i];
        if (owner < 0 || owner >= datasets || next[owner] >= starts[owner + 1]) return false;
        out[i] = parts[next[owner]++] + shifts[owner];
    }
    return true;
}

}  // namespace feedline
