// A CRC is the remainder of a polynomial over GF(2), with one coefficient per bit. Bits n places before the end count
// times x^n, and any polynomial with the same remainder may replace them. So 512 bits at a time are multiplied by the
// remainder of x^512 and added to the next 512; the last register is divided bit by bit.
#include "checksum.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>

#include <array>

namespace feedline {
namespace {

constexpr std::uint32_t kPolynomial = 0xEDB88320;  // the coefficient of x^0 is the highest bit, here and below

constexpr std::uint32_t times_x(std::uint32_t value) { return value >> 1 ^ (value & 1 ? kPolynomial : 0); }

// Remainder of x^n, shifted left by one: a product of two such numbers is shifted right by one.
constexpr std::uint64_t power(int n) {
    std::uint32_t value = 0x80000000;
    for (int i = 0; i < n; i++) value = times_x(value);
    return std::uint64_t{value} << 1;
}

constexpr std::array<std::uint32_t, 256> byte_table() {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t byte = 0; byte < 256; byte++) {
        std::uint32_t value = byte;
        for (int bit = 0; bit < 8; bit++) value = times_x(value);
        table[byte] = value;
    }
    return table;
}

constexpr std::array<std::uint32_t, 256> kBytes = byte_table();
constexpr std::size_t kBlock = 64;

std::uint32_t divided(std::uint32_t state, const unsigned char* data, std::size_t nbytes) {
    for (std::size_t i = 0; i < nbytes; i++) state = state >> 8 ^ kBytes[(state ^ data[i]) & 0xFF];
    return state;
}

// `value` moved away from the end by the number of bits of `by`, plus the bits there.
__attribute__((target("pclmul,sse4.1"))) inline __m128i folded(__m128i value, __m128i by, __m128i there) {
    const __m128i early = _mm_clmulepi64_si128(value, by, 0x00), late = _mm_clmulepi64_si128(value, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(early, late), there);
}

// Factors that move both halves of a register by the same number of bits. The early half counts 64 bits more; a product
// of 64 bits with 33 ends 32 bits before the end of the register.
inline __m128i move_by(std::uint64_t early, std::uint64_t late) {
    return _mm_set_epi64x(static_cast<long long>(late), static_cast<long long>(early));
}

__attribute__((target("pclmul,sse4.1"))) std::uint32_t folded_all(std::uint32_t state, const unsigned char* data,
                                                                  std::size_t blocks) {
    constexpr std::uint64_t far[] = {power(512 + 32), power(512 - 32)}, near[] = {power(128 + 32), power(128 - 32)};
    const __m128i by_block = move_by(far[0], far[1]), by_one = move_by(near[0], near[1]);
    const auto* at = reinterpret_cast<const __m128i*>(data);
    __m128i a = _mm_xor_si128(_mm_loadu_si128(at), _mm_cvtsi32_si128(static_cast<int>(state)));
    __m128i b = _mm_loadu_si128(at + 1), c = _mm_loadu_si128(at + 2), d = _mm_loadu_si128(at + 3);
    for (std::size_t block = 1; block < blocks; block++) {
        at += 4;
        a = folded(a, by_block, _mm_loadu_si128(at));
        b = folded(b, by_block, _mm_loadu_si128(at + 1));
        c = folded(c, by_block, _mm_loadu_si128(at + 2));
        d = folded(d, by_block, _mm_loadu_si128(at + 3));
    }
    unsigned char rest[16];
    const __m128i left = folded(folded(folded(a, by_one, b), by_one, c), by_one, d);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), left);
    return divided(0, rest, sizeof rest);
}

}  // namespace

bool has_quick_crc32() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

std::uint32_t crc32(const unsigned char* data, std::size_t nbytes) {
    const std::size_t blocks = nbytes / kBlock;
    std::uint32_t state = 0xFFFFFFFF;
    if (blocks > 0) state = folded_all(state, data, blocks);
    return ~divided(state, data + blocks * kBlock, nbytes % kBlock);
}

}  // namespace feedline
#else
namespace feedline {

bool has_quick_crc32() { return false; }

std::uint32_t crc32(const unsigned char*, std::size_t) { return 0; }

}  // namespace feedline
#endif
