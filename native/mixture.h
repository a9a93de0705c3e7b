#pragma once
#include <cstdint>

namespace feedline {

// Blocks of a mixture, as `_mixture_block_numpy` makes each. `counts` and `firsts` have a row of `datasets` numbers for
// each block: dataset d has `counts[d]` of its positions, whose draws are numbered from `firsts[d]` on. `keys` has two
// random keys for each block. Writes the dataset and the draw of each position.
void mixture_blocks(const std::int64_t* counts, const std::int64_t* firsts, const std::int64_t* keys,
                    std::int64_t blocks, std::int64_t datasets, std::int64_t* owners, std::int64_t* draws);

// out[i] = parts[place] + shifts[owners[i]], where place runs through [starts[owner], starts[owner + 1]) for each owner.
// Returns false, with `out` partly written, if an owner is outside of [0, datasets) or has more positions than that.
bool interleave(const std::int64_t* owners, std::int64_t count, const std::int64_t* parts, const std::int64_t* starts,
                const std::int64_t* shifts, std::int64_t datasets, std::int64_t* out);

}  // namespace feedline
