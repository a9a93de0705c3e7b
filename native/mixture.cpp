#include "mixture.h"

#include <algorithm>
#include <vector>

namespace feedline {
namespace {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15u;

// Number `at` of the uniform stream of `key`, in [0, 1): splitmix64 by counter.
inline double uniform(std::uint64_t key, std::uint64_t at) {
    std::uint64_t z = key + (at + 1) * kGolden;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return static_cast<double>((z ^ z >> 31) >> 11) * 0x1p-53;
}

struct Placed {
    double place;
    std::int64_t owner;
};

// Buffers of a block, used again for the next one.
struct Scratch {
    std::vector<Placed> placed, sorted;
    std::vector<std::int64_t> starts, next, drawn;
};

std::int64_t mixture_block(const std::int64_t* counts, const std::int64_t* firsts, std::int64_t datasets,
                           std::uint64_t jitter_key, std::uint64_t begin_key, std::int64_t* owners, std::int64_t* draws,
                           Scratch& scratch) {
    auto& [placed, sorted, starts, next, drawn] = scratch;
    std::int64_t size = 0;
    for (std::int64_t d = 0; d < datasets; d++) size += counts[d];
    placed.resize(size);
    sorted.resize(size);
    // The places spread evenly, so a bucket for each element leaves little to sort.
    starts.assign(size + 1, 0);
    const auto bucket = [size](double place) {
        return std::min(size - 1, static_cast<std::int64_t>(place * static_cast<double>(size)));
    };
    std::int64_t at = 0;
    for (std::int64_t d = 0; d < datasets; d++) {
        const double begin = uniform(begin_key, d), count = static_cast<double>(counts[d]);
        for (std::int64_t within = 0; within < counts[d]; within++, at++) {
            const double turn = (static_cast<double>(within) + uniform(jitter_key, at)) / count + begin;
            placed[at] = {turn < 1.0 ? turn : turn - 1.0, d};  // the sum of two numbers of at most 1
            if (placed[at].place >= 1.0) placed[at].place -= 1.0;
            starts[bucket(placed[at].place) + 1]++;
        }
    }
    for (std::int64_t b = 0; b < size; b++) starts[b + 1] += starts[b];
    // Insertion within a bucket; equal places keep their order, as in NumPy's stable sort.
    next.assign(starts.begin(), starts.end());
    for (const Placed& each : placed) {
        const std::int64_t b = bucket(each.place);
        std::int64_t to = next[b]++;
        for (; to > starts[b] && sorted[to - 1].place > each.place; to--) sorted[to] = sorted[to - 1];
        sorted[to] = each;
    }
    drawn.assign(firsts, firsts + datasets);
    for (std::int64_t i = 0; i < size; i++) {
        owners[i] = sorted[i].owner;
        draws[i] = drawn[sorted[i].owner]++;
    }
    return size;
}

}  // namespace

void mixture_blocks(const std::int64_t* counts, const std::int64_t* firsts, const std::int64_t* keys,
                    std::int64_t blocks, std::int64_t datasets, std::int64_t* owners, std::int64_t* draws) {
    Scratch scratch;
    for (std::int64_t n = 0; n < blocks; n++, counts += datasets, firsts += datasets, keys += 2) {
        const std::int64_t size = mixture_block(counts, firsts, datasets, static_cast<std::uint64_t>(keys[0]),
                                                static_cast<std::uint64_t>(keys[1]), owners, draws, scratch);
        owners += size;
        draws += size;
    }
}

bool interleave(const std::int64_t* owners, std::int64_t count, const std::int64_t* parts, const std::int64_t* starts,
                const std::int64_t* shifts, std::int64_t datasets, std::int64_t* out) {
    std::vector<std::int64_t> next(starts, starts + datasets);
    for (std::int64_t i = 0; i < count; i++) {
        const std::int64_t owner = owners[i];
        if (owner < 0 || owner >= datasets || next[owner] >= starts[owner + 1]) return false;
        out[i] = parts[next[owner]++] + shifts[owner];
    }
    return true;
}

}  // namespace feedline
