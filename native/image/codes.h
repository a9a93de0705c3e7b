#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "bits.h"

namespace feedline {

// Huffman table as stored in a file: the number of codes of each length, and their symbols in the order of codes.
struct HuffmanTable {
    std::uint8_t counts[17];  // of codes by length; [0] is 0
    std::uint8_t symbols[256];
};

// Finds any code by comparison: for codes too long for the look-up tables below, and to build these.
class Codes {
public:
    // False for a table whose codes do not fit their lengths.
    bool prepare(const HuffmanTable& table);

    struct Code {
        int length, symbol;  // length 0: there is no such code
    };
    Code find(std::uint32_t sixteen_bits) const {
        int length = 1;
        while (length <= 16 && sixteen_bits >= limits_[length]) length++;
        if (length > 16) return {0, 0};
        const std::uint32_t place = places_[length] + ((sixteen_bits - limits_[length - 1]) >> (16 - length));
        return {length, symbols_[place & 255]};
    }

private:
    std::uint32_t limits_[17];  // codes up to a length, with any bits after them, are below this
    std::uint32_t places_[17];  // position of the first symbol of a length
    std::uint8_t symbols_[256];
};

// Returns the number encoded by the `size` bits after the first `skipped` bits.
inline int number_behind(std::uint64_t bits, unsigned skipped, unsigned size) {
    bits <<= skipped;
    const int below = static_cast<int>(static_cast<std::int64_t>(~bits) >> 63);  // all ones if the first bit is 0
    return static_cast<int>(bits >> 1 >> (63 - size)) - (below & ((1 << size) - 1));
}

// Reads the differences of DC coefficients.
class DcCodes {
public:
    // False if the table cannot hold DC codes.
    bool prepare(const HuffmanTable& table);

    // Takes up to 31 of the ready bits; false if they do not begin with a code.
    FEEDLINE_INLINE bool read(BitReader& reader, int& difference) const {
        const std::uint64_t bits = reader.bits;
        std::uint32_t entry = entries_[bits >> (64 - kBits)];
        if (!entry) entry = found(bits);
        reader.take(entry & 63);
        difference = number_behind(bits, entry >> 6 & 31, entry >> 11);
        return entry != 0;
    }

private:
    static constexpr int kBits = 9;

    std::uint32_t found(std::uint64_t bits) const;

    Codes codes_;
    // All bits | bits of the code << 6 | bits of the number << 11; 0 for no code, or one longer than kBits.
    std::uint16_t entries_[1 << kBits];
};

// Position of coefficients in a block by their order in the file, which is along its diagonals. Speculative writes
// beyond the block, which are not used, go to its last position.
using Places = std::array<std::uint8_t, 256>;
constexpr Places along_diagonals() {
    Places places{};
    std::size_t order = 0;
    for (int diagonal = 0; diagonal < 15; diagonal++)
        for (int i = 0; i <= diagonal; i++) {
            const int row = diagonal % 2 ? i : diagonal - i, column = diagonal - row;
            if (row < 8 && column < 8) places[order++] = static_cast<std::uint8_t>(8 * row + column);
        }
    while (order < places.size()) places[order++] = 63;
    return places;
}
inline constexpr Places kPlaces = along_diagonals();

// Reads the AC coefficients of blocks, looking up several at once.
//
// The progress of a look-up is one number: the bits it takes in the low byte, the coefficients it passes above. One
// addition to BitReader::spent counts both. The end of a block passes kEnd coefficients.
class AcCodes {
public:
    // False for an invalid table.
    bool prepare(const HuffmanTable& table);

    // Makes `pass` faster; saves time only for many blocks. Call after `prepare` with the same table.
    void prepare_runs(const HuffmanTable& table);
    bool has_runs() const { return has_runs_; }

    // Decodes into a zeroed block. False for invalid data, which leave reader and coefficients undefined.
    FEEDLINE_INLINE bool read(BitReader& reader, std::int16_t* block) const { return rest<true>(reader, 1, block); }

    // Skips a block.
    FEEDLINE_INLINE bool pass(BitReader& reader) const;

private:
    static constexpr int kPairBits = 11, kRunBits = 12;
    static constexpr int kPairs = 4, kRuns = 3;  // look-ups per refill
    static constexpr unsigned kEnd = 128, kNone = (kEnd + 64) << 8;  // kNone takes no bits and ends no block

    // The first symbol in kPairBits bits, and the second if both fit.
    struct Pair {
        std::uint8_t run;    // coefficients skipped before the first one
        std::uint8_t alone;  // bits of the first symbol; 0 if step() has to find it
        std::int16_t first;
        std::int8_t second;
        std::uint8_t late;  // mask of the first coefficient's last bits, if they are beyond kPairBits
    };

    struct Step {
        std::uint32_t taken, next;  // bits, 0 for no code; the position after the symbol
    };

    Step step(std::uint64_t bits, std::uint32_t place, std::int16_t* block) const;

    struct Ahead {
        std::uint16_t value;
        Pair pair;
    };
    static Ahead first_of(int length, int symbol, std::uint64_t bits);

    // Position after a look-up. No branches here and below: they would be unpredictable.
    static bool ends(std::uint32_t place) { return (place == 64) | (place - (kEnd + 1) < 63); }

    template <bool kStored>
    FEEDLINE_INLINE bool rest(BitReader& reader, std::uint32_t place, std::int16_t* block) const;

    Codes codes_;
    std::uint16_t aheads_[1 << kPairBits];  // of the pairs; separate, because each look-up waits for the one before
    Pair pairs_[1 << kPairBits];
    std::uint16_t runs_[1 << kRunBits];  // of as many symbols as fit
    bool has_runs_ = false;
};

template <bool kStored>
inline bool AcCodes::rest(BitReader& reader, std::uint32_t place, std::int16_t* block) const {
    for (reader.spent |= place << 8;;) {
        std::uint64_t bits;
        std::uint32_t spent;
        const Pair* pair;
        const auto look = [&]() FEEDLINE_INLINE {
            bits = reader.bits;
            spent = reader.spent;
            pair = pairs_ + (bits >> (64 - kPairBits));
            const std::uint32_t ahead = aheads_[bits >> (64 - kPairBits)];
            reader.bits <<= ahead & 63;
            reader.spent += ahead;
            if (kStored) {
                const int late = static_cast<int>(bits >> (-pair->alone & 63)) & pair->late;
                // Without a second coefficient, this writes a zero at the position of the first one, or at a later
                // position.
                block[kPlaces[(reader.spent >> 8) - 1]] = pair->second;
                block[kPlaces[(spent >> 8) + pair->run]] = static_cast<std::int16_t>(pair->first + late);
            }
            return reader.spent >= 64 << 8;
        };
        static_assert(kPairs == 4);
        do reader.refill();
        while (!(look() || look() || look() || look()));

        const std::uint32_t before = spent >> 8, after = reader.spent >> 8;
        if (pair->alone) {
            // A full block has no end code: its second symbol then belongs to the next block.
            const bool full = before + pair->run + 1 == 64;
            const std::uint32_t all = (reader.spent - spent) & 255;
            const std::uint32_t taken = all - ((all - pair->alone) & (0u - static_cast<std::uint32_t>(full)));
            reader.bits = bits << taken;
            reader.spent = (spent & 255) + taken;
            return full | ends(after);
        }
        reader.bits = bits;
        reader.spent = spent & 255;
        reader.refill();
        const Step next = step(reader.bits, before, block);
        if (!next.taken) return false;
        reader.take(next.taken);
        if (next.next >= 64) return true;
        reader.spent |= next.next << 8;
    }
}

inline bool AcCodes::pass(BitReader& reader) const {
    std::uint32_t place = 1;
    if (has_runs_) {
        std::uint64_t bits;
        std::uint32_t spent;
        const auto look = [&]() FEEDLINE_INLINE {
            bits = reader.bits;
            spent = reader.spent;
            const std::uint32_t ahead = runs_[bits >> (64 - kRunBits)];
            reader.bits <<= ahead & 63;
            reader.spent += ahead;
            return reader.spent >= 64 << 8;
        };
        static_assert(kRuns == 3);
        reader.spent |= place << 8;
        do reader.refill();
        while (!(look() || look() || look()));
        if (ends(reader.spent >> 8)) {
            reader.spent &= 255;
            return true;
        }
        // The last look-up passed the block's end, or found nothing: repeat that part in smaller steps.
        reader.bits = bits;
        reader.spent = spent & 255;
        place = spent >> 8;
    }
    return rest<false>(reader, place, nullptr);
}

}  // namespace feedline
