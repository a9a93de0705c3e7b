#include "bits.h"

namespace feedline {

BitReader::Refilled BitReader::refilled(const std::uint8_t* at, const std::uint8_t* end, std::uint64_t bits,
                                        int ready) {
    while (ready < kReady) {
        const std::ptrdiff_t left = end - at;
        const bool stuffed = left >= 2 && at[0] == 0xFF && at[1] == 0;
        // At a marker or the end, zeros follow; `padded` counts them, so that the decoder sees when it has used one.
        if (left == 0 || (at[0] == 0xFF && !stuffed)) return {at, bits, kReady, kReady - ready};
        bits |= static_cast<std::uint64_t>(*at) << (kReady - ready);
        ready += 8;
        at += stuffed ? 2 : 1;
    }
    return {at, bits, ready, 0};
}

}  // namespace feedline
