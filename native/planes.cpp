#include "planes.h"

#include <cstring>

#include "clones.h"
#include "crew.h"

namespace feedline {
namespace {

template <class Item>
inline void reverse(Item* __restrict out, const Item* __restrict from, std::int64_t count) {
    for (std::int64_t i = 0; i < count; i++) out[i] = from[count - 1 - i];
}

FEEDLINE_CLONES void reverse_u8(std::uint8_t* out, const std::uint8_t* from, std::int64_t n) { reverse(out, from, n); }
FEEDLINE_CLONES void reverse_u16(std::uint16_t* out, const std::uint16_t* from, std::int64_t n) { reverse(out, from, n); }
FEEDLINE_CLONES void reverse_u32(std::uint32_t* out, const std::uint32_t* from, std::int64_t n) { reverse(out, from, n); }
FEEDLINE_CLONES void reverse_u64(std::uint64_t* out, const std::uint64_t* from, std::int64_t n) { reverse(out, from, n); }

inline void reversed(std::uint8_t* out, const std::uint8_t* from, std::int64_t n) { reverse_u8(out, from, n); }
inline void reversed(std::uint16_t* out, const std::uint16_t* from, std::int64_t n) { reverse_u16(out, from, n); }
inline void reversed(std::uint32_t* out, const std::uint32_t* from, std::int64_t n) { reverse_u32(out, from, n); }
inline void reversed(std::uint64_t* out, const std::uint64_t* from, std::int64_t n) { reverse_u64(out, from, n); }

// The longest run of neighbors among the columns, upwards or downwards: crops and flips consist almost only of such
// runs.
struct Run {
    std::int64_t start = 0, stop = 0;
    bool down = false;
};

Run longest_run(const std::int64_t* columns, std::int64_t count) {
    Run best;
    for (std::int64_t start = 0; start < count;) {
        std::int64_t stop = start + 1;
        if (columns[start] >= 0 && stop < count && columns[stop] >= 0) {
            const std::int64_t step = columns[stop] - columns[start];
            if (step == 1 || step == -1)
                while (stop < count && columns[stop] >= 0 && columns[stop] - columns[stop - 1] == step) stop++;
            if (stop - start > best.stop - best.start) best = {start, stop, step == -1};
        }
        start = stop;
    }
    return best;
}

template <class Item>
void take_image(const Planes& source, const std::int64_t* lines, const std::int64_t* columns, const Item* fill,
                const Planes& out, std::int64_t image) {
    const Run run = longest_run(columns, out.width);
    const auto each = [&](Item* to, const Item* from, Item empty, std::int64_t start, std::int64_t stop) {
        for (std::int64_t x = start; x < stop; x++) to[x] = columns[x] < 0 ? empty : from[columns[x]];
    };
    for (std::int64_t channel = 0; channel < out.channels; channel++) {
        const char* const plane = source.base + image * source.image + channel * source.channel;
        char* const rows = out.base + image * out.image + channel * out.channel;
        for (std::int64_t y = 0; y < out.height; y++) {
            Item* const to = reinterpret_cast<Item*>(rows + y * out.line);
            if (lines[y] < 0) {
                for (std::int64_t x = 0; x < out.width; x++) to[x] = fill[channel];
                continue;
            }
            const Item* const from = reinterpret_cast<const Item*>(plane + lines[y] * source.line);
            const std::int64_t count = run.stop - run.start;
            each(to, from, fill[channel], 0, run.start);
            if (run.down)
                reversed(to + run.start, from + columns[run.stop - 1], count);
            else if (count)
                std::memcpy(to + run.start, from + columns[run.start], static_cast<std::size_t>(count) * sizeof(Item));
            each(to, from, fill[channel], run.stop, out.width);
        }
    }
}

template <class Item>
void take(const Planes& source, const std::int64_t* lines, const std::int64_t* columns, const char* fill,
          const Planes& out, int threads) {
    run_chunks(threads, out.batch, [&](std::int64_t image) {
        take_image(source, lines + image * out.height, columns + image * out.width,
                   reinterpret_cast<const Item*>(fill), out, image);
    });
}

}  // namespace

void take_planes(const Planes& source, const std::int64_t* lines, const std::int64_t* columns, const char* fill,
                 const Planes& out, std::int64_t item_nbytes, int threads) {
    switch (item_nbytes) {
        case 1: return take<std::uint8_t>(source, lines, columns, fill, out, threads);
        case 2: return take<std::uint16_t>(source, lines, columns, fill, out, threads);
        case 4: return take<std::uint32_t>(source, lines, columns, fill, out, threads);
        case 8: return take<std::uint64_t>(source, lines, columns, fill, out, threads);
    }
}

}  // namespace feedline
