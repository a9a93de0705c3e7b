#include "codes.h"

#include <algorithm>
#include <cstring>

namespace feedline {
bool Codes::prepare(const HuffmanTable& table) {
    std::uint32_t limit = 0, place = 0;
    limits_[0] = 0;
    for (int length = 1; length <= 16; length++) {
        places_[length] = place;
        place += table.counts[length];
        limit += static_cast<std::uint32_t>(table.counts[length]) << (16 - length);
        limits_[length] = limit;
    }
    std::memcpy(symbols_, table.symbols, sizeof(symbols_));
    // The counts of a damaged table may ask for more codes than 16 bits have, or for more symbols than a table holds.
    return limit <= 1 << 16 && place <= sizeof(symbols_);
}

namespace {

// Calls `put(code's length, symbol, i)` for each i that begins with a code of up to `bits` bits, in order: codes are
// assigned from zero on. Returns the first i that begins with none.
template <class Put>
std::uint32_t each(const HuffmanTable& table, int bits, Put put) {
    std::uint32_t i = 0;
    const std::uint8_t* symbol = table.symbols;
    for (int length = 1; length <= bits; length++)
        for (int code = 0; code < table.counts[length]; code++, symbol++)
            for (std::uint32_t next = i + (1u << (bits - length)); i < next; i++) put(length, *symbol, i);
    return i;
}

}  // namespace

bool DcCodes::prepare(const HuffmanTable& table) {
    if (!codes_.prepare(table)) return false;
    bool fine = true;
    std::memset(entries_, 0, sizeof(entries_));
    each(table, kBits, [&](int length, int size, std::uint32_t i) {
        entries_[i] = static_cast<std::uint16_t>((length + size) | length << 6 | size << 11);
    });
    for (int length = 1, place = 0; length <= 16; length++)
        for (int code = 0; code < table.counts[length]; code++) fine = fine && table.symbols[place++] <= 15;
    return fine;
}

std::uint32_t DcCodes::found(std::uint64_t bits) const {
    const Codes::Code code = codes_.find(static_cast<std::uint32_t>(bits >> 48));
    return static_cast<std::uint32_t>((code.length + code.symbol) | code.length << 6 | code.symbol << 11);
}

AcCodes::Ahead AcCodes::first_of(int length, int symbol, std::uint64_t bits) {
    const int size = symbol & 15, run = symbol >> 4, all = length + size;
    // The first bit of a number is its sign, without which its value is unknown.
    const bool known = size == 0 || length < kPairBits;
    if (!known || all > BitReader::kReady / kPairs) return {kNone, {}};
    const bool end = size == 0 && run != 15;
    const unsigned places = end ? kEnd : static_cast<unsigned>(run) + 1;
    const int value = number_behind(bits, static_cast<unsigned>(length), static_cast<unsigned>(size));
    const int late = all > kPairBits ? (1 << (all - kPairBits)) - 1 : 0;
    return {static_cast<std::uint16_t>(static_cast<unsigned>(all) | places << 8),
            {static_cast<std::uint8_t>(end ? 0 : run), static_cast<std::uint8_t>(all), static_cast<std::int16_t>(value),
             0, static_cast<std::uint8_t>(late)}};
}

bool AcCodes::prepare(const HuffmanTable& table) {
    if (!codes_.prepare(table)) return false;
    has_runs_ = false;
    constexpr std::uint32_t count = 1 << kPairBits;
    Ahead firsts[count];
    const std::uint32_t codes = each(table, kPairBits, [&](int length, int symbol, std::uint32_t i) {
        firsts[i] = first_of(length, symbol, static_cast<std::uint64_t>(i) << (64 - kPairBits));
    });
    std::fill(firsts + codes, firsts + count, Ahead{kNone, {}});
    for (std::uint32_t i = 0; i < count; i++) {
        const Ahead& first = firsts[i];
        const Ahead& second = firsts[(i << first.pair.alone) & (count - 1)];
        // A second coefficient is added if the look-up includes all its bits, and if its value fits into a byte.
        const bool both = first.value < kEnd << 8 && second.pair.alone &&
                          first.pair.alone + second.pair.alone <= kPairBits &&
                          second.pair.first == static_cast<std::int8_t>(second.pair.first);
        aheads_[i] = static_cast<std::uint16_t>(first.value + (both ? second.value : 0));
        pairs_[i] = first.pair;
        pairs_[i].second = static_cast<std::int8_t>(both ? second.pair.first : 0);
    }
    return true;
}

void AcCodes::prepare_runs(const HuffmanTable& table) {
    struct Symbol {
        std::uint8_t length, size, places;
    };
    Symbol symbols[1 << kRunBits];
    const std::uint32_t codes = each(table, kRunBits, [&](int length, int symbol, std::uint32_t i) {
        const int size = symbol & 15, run = symbol >> 4;
        const bool end = size == 0 && run != 15;
        symbols[i] = {static_cast<std::uint8_t>(length), static_cast<std::uint8_t>(size),
                      static_cast<std::uint8_t>(end ? kEnd : static_cast<unsigned>(run) + 1)};
    });
    for (std::uint32_t i = codes; i < 1 << kRunBits; i++) symbols[i] = {kRunBits + 1, 0, 0};
    for (std::uint32_t i = 0; i < 1 << kRunBits; i++) {
        unsigned taken = 0, places = 0;
        while (taken < kRunBits) {
            const Symbol& next = symbols[(i << taken) & ((1 << kRunBits) - 1)];
            const unsigned after = taken + next.length + next.size;
            const bool fits = taken + next.length <= kRunBits && after <= BitReader::kReady / kRuns;
            if (!fits || (next.places < kEnd && places + next.places > 63)) break;
            taken = after;
            places += next.places;
            if (next.places == kEnd) break;
        }
        runs_[i] = static_cast<std::uint16_t>(taken ? taken | places << 8 : kNone);
    }
    has_runs_ = true;
}

AcCodes::Step AcCodes::step(std::uint64_t bits, std::uint32_t place, std::int16_t* block) const {
    const Codes::Code code = codes_.find(static_cast<std::uint32_t>(bits >> 48));
    const unsigned length = static_cast<unsigned>(code.length), size = static_cast<unsigned>(code.symbol & 15),
                   run = static_cast<unsigned>(code.symbol >> 4);
    if (size == 0 && run != 15) return {length, 64};
    place += run;
    if (place > 63) return {0, 64};
    if (block && size) block[kPlaces[place]] = static_cast<std::int16_t>(number_behind(bits, length, size));
    return {length + size, place + 1};
}

}  // namespace feedline
