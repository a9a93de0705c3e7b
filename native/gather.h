#pragma once
#include <cstddef>
#include <cstdint>

namespace feedline {

// `count` runs of `nbytes` bytes, `stride` bytes from one start to the next. Windows overlap, rows need not.
struct Rows {
    char* base;
    std::int64_t count;
    std::int64_t nbytes;
    std::ptrdiff_t stride;

    char* operator[](std::int64_t i) const { return base + i * stride; }
};

// Conversion of the items of a row: none, or to int64.
enum class Widen { none, uint8, uint16, int32, uint32 };

// out[i] = source[indices[i]] for every row of `out`; negative indices count from the end. Indices are not checked.
// `threads` is an upper bound: small batches do not wake another thread.
void gather(const Rows& source, const std::int64_t* indices, const Rows& out, Widen widen, int threads);

}  // namespace feedline
