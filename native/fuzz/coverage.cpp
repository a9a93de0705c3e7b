// Counts branches as afl does: https://lcamtuf.coredump.cx/afl/technical_details.txt. GCC and clang call
// __sanitizer_cov_trace_pc in every block of code that is compiled with -fsanitize-coverage=trace-pc; this file must not
// be, or it would call itself.
#include "coverage.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr std::size_t kPlaces = 1 << 15;
using Places = std::array<std::uint8_t, kPlaces>;

Places taken;  // how often, in this input; 255 stands for more, too
Places seen;   // one bit for each range of counts, in all inputs
const char origin = 0;
std::uintptr_t last = 0;

// Bit for a number of times: 1, 2, 3, 4-7, 8-15, 16-31, 32-127, more.
std::uint8_t range_of(std::uint8_t count) {
    constexpr std::uint8_t kMost[] = {1, 2, 3, 7, 15, 31, 127};
    unsigned range = 0;
    while (range < sizeof(kMost) && count > kMost[range]) range++;
    return static_cast<std::uint8_t>(1u << range);
}

}  // namespace

// The distance to `origin` is the same in every process, wherever the program was loaded.
extern "C" void __sanitizer_cov_trace_pc() {
    const std::uintptr_t here = static_cast<std::uintptr_t>(static_cast<const char*>(__builtin_return_address(0)) - &origin);
    std::uint8_t& count = taken[(here ^ last) % kPlaces];
    count = static_cast<std::uint8_t>(count + (count < 255));
    last = here << 1;
}

namespace feedline {

void forget_branches() {
    taken.fill(0);
    last = 0;
}

bool found_branches() {
    bool found = false;
    for (std::size_t at = 0; at < kPlaces; at += sizeof(std::uint64_t)) {
        std::uint64_t word;
        std::memcpy(&word, &taken[at], sizeof word);
        if (word == 0) continue;
        for (std::size_t place = at; place < at + sizeof word; place++) {
            const std::uint8_t range = taken[place] ? range_of(taken[place]) : 0;
            found = found || (range & ~seen[place]);
            seen[place] |= range;
        }
    }
    return found;
}

}  // namespace feedline
