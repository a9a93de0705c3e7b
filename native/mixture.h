#pragma once
#include <cstdint>

namespace feedline {

// Blocks of a mixture, numbered from `first` on; `_mixture_block_numpy` makes equal ones. `counts` has a row of
// `datasets` numbers for each block, the positions of each dataset in it; their sum is below 2**31. The random numbers
// of a block are fixed by the two keys and its number. Writes the dataset of each position.
void mixture_blocks(const std::int64_t* counts, std::int64_t blocks, std::int64_t datasets, std::uint64_t first,
                    std::uint64_t jitter_key, std::uint64_t begin_key, std::int32_t* owners);

// out[i] = parts[place] + shifts[owners[i]], where place runs through [starts[owner], starts[owner + 1]) for each owner.
// Returns false, with `out` partly written, if an owner is outside of [0, datasets) or has more positions than that.
bool interleave(const std::int32_t* owners, std::int64_t count, const std::int64_t* parts, const std::int64_t* starts,
                const std::int64_t* shifts, std::int64_t datasets, std::int64_t* out);

}  // namespace feedline
