#include "gather.h"

#include <algorithm>
#include <cstring>

#include "clones.h"
#include "crew.h"

namespace feedline {
namespace {

constexpr std::int64_t kLine = 64;                 // bytes of a cache line
constexpr std::int64_t kAhead = 4096;              // bytes that are prefetched before they are copied,
constexpr std::int64_t kMostAhead = 32;            // and rows
constexpr std::int64_t kChunk = std::int64_t{1} << 20;  // bytes per chunk of a thread: 50 µs, several times a wake-up

inline const char* row_at(const Rows& source, std::int64_t index) {
    return source[index < 0 ? index + source.count : index];
}

inline void prefetch(const char* row, std::int64_t nbytes) {
#if defined(__GNUC__)
    for (std::int64_t at = 0; at < nbytes; at += kLine) __builtin_prefetch(row + at);
    __builtin_prefetch(row + nbytes - 1);  // rows rarely start at a cache line, so they often end in another one
#endif
}

// Copies rows [start, stop) with `copy`, and prefetches the next rows: hardware prefetchers cannot predict them.
template <class Copy>
inline void each_row(const Rows& source, const std::int64_t* indices, std::int64_t start, std::int64_t stop, Copy copy) {
    const std::int64_t distance = std::max<std::int64_t>(1, std::min<std::int64_t>(kMostAhead, kAhead / source.nbytes));
    const std::int64_t nbytes = std::min(source.nbytes, kAhead);
    const std::int64_t last = std::max(start, stop - distance);
    for (std::int64_t i = start; i < last; i++) {
        prefetch(row_at(source, indices[i + distance]), nbytes);
        copy(i, row_at(source, indices[i]));
    }
    for (std::int64_t i = last; i < stop; i++) copy(i, row_at(source, indices[i]));
}

// Rows so short that calling memcpy would cost more than the copy.
template <std::size_t nbytes>
void copy_short(const Rows& source, const std::int64_t* indices, const Rows& out, std::int64_t start, std::int64_t stop) {
    each_row(source, indices, start, stop,
             [&](std::int64_t i, const char* row) { std::memcpy(out[i], row, nbytes); });
}

void copy_rows(const Rows& source, const std::int64_t* indices, const Rows& out, std::int64_t start, std::int64_t stop) {
    switch (source.nbytes) {
        case 1: return copy_short<1>(source, indices, out, start, stop);
        case 2: return copy_short<2>(source, indices, out, start, stop);
        case 4: return copy_short<4>(source, indices, out, start, stop);
        case 8: return copy_short<8>(source, indices, out, start, stop);
        case 12: return copy_short<12>(source, indices, out, start, stop);
        case 16: return copy_short<16>(source, indices, out, start, stop);
        case 32: return copy_short<32>(source, indices, out, start, stop);
        case 64: return copy_short<64>(source, indices, out, start, stop);
    }
    each_row(source, indices, start, stop, [&](std::int64_t i, const char* row) {
        std::memcpy(out[i], row, static_cast<std::size_t>(source.nbytes));
    });
}

template <class Item>
inline void widen_row(char* out, const char* row, std::int64_t items) {
    for (std::int64_t j = 0; j < items; j++) {
        Item item;  // windows may start at any byte, so items may be unaligned
        std::memcpy(&item, row + j * static_cast<std::int64_t>(sizeof(Item)), sizeof(Item));
        const std::int64_t wide = item;
        std::memcpy(out + j * 8, &wide, 8);
    }
}

FEEDLINE_CLONES void widen_row_u8(char* out, const char* row, std::int64_t n) { widen_row<std::uint8_t>(out, row, n); }
FEEDLINE_CLONES void widen_row_u16(char* out, const char* row, std::int64_t n) { widen_row<std::uint16_t>(out, row, n); }
FEEDLINE_CLONES void widen_row_i32(char* out, const char* row, std::int64_t n) { widen_row<std::int32_t>(out, row, n); }
FEEDLINE_CLONES void widen_row_u32(char* out, const char* row, std::int64_t n) { widen_row<std::uint32_t>(out, row, n); }

void gather_range(const Rows& source, const std::int64_t* indices, const Rows& out, Widen widen, std::int64_t start,
                  std::int64_t stop) {
    if (widen == Widen::none) return copy_rows(source, indices, out, start, stop);
    const auto widened = widen == Widen::uint8    ? widen_row_u8
                         : widen == Widen::uint16 ? widen_row_u16
                         : widen == Widen::int32  ? widen_row_i32
                                                  : widen_row_u32;
    const std::int64_t items = out.nbytes / 8;
    each_row(source, indices, start, stop, [&](std::int64_t i, const char* row) { widened(out[i], row, items); });
}

}  // namespace

void gather(const Rows& source, const std::int64_t* indices, const Rows& out, Widen widen, int threads) {
    if (out.nbytes == 0) return;
    // Chunks of one size: the call ends with the last of them.
    const std::int64_t most = std::max<std::int64_t>(1, kChunk / out.nbytes);
    const std::int64_t parts = std::max<std::int64_t>(1, (out.count + most - 1) / most);
    const std::int64_t rows = std::max<std::int64_t>(1, (out.count + parts - 1) / parts);
    const std::int64_t chunks = (out.count + rows - 1) / rows;
    run_chunks(threads, chunks, [&](std::int64_t chunk) {
        gather_range(source, indices, out, widen, chunk * rows, std::min(out.count, (chunk + 1) * rows));
    });
}

}  // namespace feedline
