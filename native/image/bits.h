#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

// For functions that must be inlined into the loop that calls them.
#if defined(__GNUC__)
#define FEEDLINE_INLINE __attribute__((always_inline))
#else
#define FEEDLINE_INLINE
#endif

namespace feedline {

// Bits of one segment of entropy-coded data, which ends at a marker or with the bytes. Zeros follow its end;
// `overdrawn` is true if any of these zeros was taken.
//
// Fields are public, and no hot function takes the address of a reader, so that decoding loops keep the whole reader in
// registers.
struct BitReader {
    static constexpr int kReady = 56;

    const std::uint8_t *at = nullptr, *end = nullptr;
    std::uint64_t bits = 0;    // next bits, from the highest down; undefined below the ready ones
    std::uint32_t spent = 63;  // low byte: 63 minus the number of ready bits; the rest is the caller's
    int padded = 0;            // zeros taken after the end

    FEEDLINE_INLINE int ready() const { return 63 - static_cast<int>(spent & 255); }
    FEEDLINE_INLINE bool overdrawn() const { return ready() < padded; }

    // Makes at least kReady bits ready.
    FEEDLINE_INLINE void refill() {
        if (end - at >= 8) {
            const std::uint64_t next = eight(at);
            if (!any_ff(next)) {  // FF is data with a stuffed zero after it, or a marker: go byte by byte
                bits |= next >> (~spent & 63);
                at += (spent & 255) >> 3;
                spent &= ~std::uint32_t{255 - 7};
                return;
            }
        }
        const Refilled now = refilled(at, end, bits, ready());
        at = now.at;
        bits = now.bits;
        padded += now.padded;
        spent = (spent & ~std::uint32_t{255}) | static_cast<std::uint32_t>(63 - now.ready);
    }

    FEEDLINE_INLINE void take(unsigned count) {
        bits <<= count;
        spent += count;
    }

    // Continues after the restart marker `number`, if it ends the segment, and if all bits of the segment are taken
    // except the padding of its last byte.
    bool restart(int number) {
        if (ready() - padded >= 8 || end - at < 2 || at[0] != 0xFF || at[1] != 0xD0 + number) return false;
        *this = BitReader{at + 2, end};
        return true;
    }

private:
    struct Refilled {
        const std::uint8_t* at;
        std::uint64_t bits;
        int ready, padded;
    };
    static Refilled refilled(const std::uint8_t* at, const std::uint8_t* end, std::uint64_t bits, int ready);

    static std::uint64_t eight(const std::uint8_t* at) {
        std::uint64_t bytes;
        std::memcpy(&bytes, at, sizeof(bytes));
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        return bytes;
#else
        bytes = (bytes & 0x00FF00FF00FF00FF) << 8 | (bytes >> 8 & 0x00FF00FF00FF00FF);
        bytes = (bytes & 0x0000FFFF0000FFFF) << 16 | (bytes >> 16 & 0x0000FFFF0000FFFF);
        return bytes << 32 | bytes >> 32;
#endif
    }

    static bool any_ff(std::uint64_t bytes) {
        return ((~bytes - 0x0101010101010101) & bytes & 0x8080808080808080) != 0;
    }
};

}  // namespace feedline
