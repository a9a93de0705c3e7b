#pragma once
#include <cstddef>
#include <cstdint>

namespace feedline {

// `count` equal runs of bytes in memory, `stride` bytes from one start to the next; windows overlap, rows need not.
struct Rows {
    char* base;
    std::int64_t count;
    std::int64_t nbytes;
    std::ptrdiff_t stride;

    char* operator[](std::int64_t i) const { return base + i * stride; }
};

// How the items of a row change on the way: not at all, or to int64.
enum class Widen { none, uint8, uint16, int32, uint32 };

// out[i] = source[indices[i]] for every row of `out`; a negative index counts from the end. Indices are not checked.
// `threads` is an upper bound: a small batch is not worth waking another thread.
void gather(const Rows& source, const std::int64_t* indices, const Rows& out, Widen widen, int threads);

}  // namespace feedline
