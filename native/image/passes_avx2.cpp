// Inner loops for x86 CPUs with AVX2 and FMA, chosen at run time; the rest of the build requires neither.
#include "passes.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#include <cstring>

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX2_INLINE AVX2 __attribute__((always_inline)) inline

namespace feedline {
namespace {

AVX2_INLINE __m256i twice(const void* sixteen_bytes) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(sixteen_bytes)));
}

AVX2_INLINE __m256i four_weights(const std::int16_t* weights) {
    std::int64_t all;
    std::memcpy(&all, weights, sizeof(all));
    return _mm256_set1_epi64x(all);
}

// One output: sums over two taps each, in the order r r g g | b b x x.
AVX2_INLINE __m256i output(const std::uint8_t* pixel, const Taps::Block* block, int blocks) {
    // Four pixels as 16-bit numbers, by channel: rrrr gggg in one half, bbbb xxxx in the other.
    const __m256i by_channel = _mm256_setr_epi8(0, -1, 4, -1, 8, -1, 12, -1, 1, -1, 5, -1, 9, -1, 13, -1,  //
                                                2, -1, 6, -1, 10, -1, 14, -1, 3, -1, 7, -1, 11, -1, 15, -1);
    __m256i high = _mm256_setzero_si256(), low = high;
    for (int b = 0; b < blocks; b++, block++, pixel += Taps::kBlock * kPixel) {
        const __m256i four = _mm256_shuffle_epi8(twice(pixel), by_channel);
        high = _mm256_add_epi32(high, _mm256_madd_epi16(four, four_weights(block->high)));
        low = _mm256_add_epi32(low, _mm256_madd_epi16(four, four_weights(block->low)));
    }
    return _mm256_add_epi32(_mm256_slli_epi32(high, 8), low);
}

AVX2_INLINE const std::uint8_t* pixel(const std::uint8_t* line, int offset) {
    return line + static_cast<std::size_t>(offset) * kPixel;
}

AVX2_INLINE __m256i shifted(__m256i sums) {
    const __m256i half = _mm256_set1_epi32(1 << (Taps::kBits - 1));
    return _mm256_srai_epi32(_mm256_add_epi32(sums, half), Taps::kBits);
}

AVX2_INLINE void across_blocks(const std::uint8_t* line, const Taps& taps, int blocks, std::uint8_t* out) {
    const __m128i by_pixel = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    const int* offset = taps.offsets();
    const Taps::Block* block = taps.of(0);
    for (int i = 0; i < taps.count(); i += 4, offset += 4, block += 4 * blocks, out += 4 * kPixel) {
        const __m256i first = _mm256_hadd_epi32(output(pixel(line, offset[0]), block, blocks),
                                                output(pixel(line, offset[1]), block + blocks, blocks));
        const __m256i second = _mm256_hadd_epi32(output(pixel(line, offset[2]), block + 2 * blocks, blocks),
                                                 output(pixel(line, offset[3]), block + 3 * blocks, blocks));
        const __m256i four = _mm256_packs_epi32(shifted(first), shifted(second));
        const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_shuffle_epi8(bytes, by_pixel));
    }
}

AVX2 void across(const std::uint8_t* line, const Taps& taps, std::uint8_t* out) {
    switch (taps.blocks()) {  // the compiler unrolls loops of constant length
        case 1: return across_blocks(line, taps, 1, out);
        case 2: return across_blocks(line, taps, 2, out);
        default: return across_blocks(line, taps, taps.blocks(), out);
    }
}

AVX2_INLINE __m256i load(const std::uint8_t* bytes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}

AVX2_INLINE __m256i pair(const std::int16_t* weights) {
    std::int32_t both;
    std::memcpy(&both, weights, sizeof(both));
    return _mm256_set1_epi32(both);
}

// Eight sums of high and of low parts.
struct Sums {
    __m256i high, low;
};

AVX2_INLINE void add(Sums& sums, __m256i both, __m256i highs, __m256i lows) {
    sums.high = _mm256_add_epi32(sums.high, _mm256_madd_epi16(both, highs));
    sums.low = _mm256_add_epi32(sums.low, _mm256_madd_epi16(both, lows));
}

AVX2_INLINE __m256i finished(const Sums& sums) {
    return shifted(_mm256_add_epi32(_mm256_slli_epi32(sums.high, 8), sums.low));
}

// Works on 32 bytes of two lines at a time: their bytes are interleaved, so that each product is of a pair.
AVX2_INLINE void down_blocks(const std::uint8_t* const* lines, const Taps::Block* block, int blocks, std::size_t nbytes,
                             std::uint8_t* out) {
    const __m256i zero = _mm256_setzero_si256();
    for (std::size_t x = 0; x < nbytes; x += 32) {
        Sums first{zero, zero}, second = first, third = first, fourth = first;  // separate variables stay in registers
        for (int j = 0; j < blocks * Taps::kBlock; j += 2) {
            const __m256i above = load(lines[j] + x), below = load(lines[j + 1] + x);
            const __m256i left = _mm256_unpacklo_epi8(above, below), right = _mm256_unpackhi_epi8(above, below);
            const __m256i highs = pair(block[j / Taps::kBlock].high + j % Taps::kBlock);
            const __m256i lows = pair(block[j / Taps::kBlock].low + j % Taps::kBlock);
            add(first, _mm256_unpacklo_epi8(left, zero), highs, lows);
            add(second, _mm256_unpackhi_epi8(left, zero), highs, lows);
            add(third, _mm256_unpacklo_epi8(right, zero), highs, lows);
            add(fourth, _mm256_unpackhi_epi8(right, zero), highs, lows);
        }
        const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(finished(first), finished(second)),
                                                  _mm256_packs_epi32(finished(third), finished(fourth)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + x), bytes);
    }
}

AVX2 void down(const std::uint8_t* const* lines, const Taps& taps, int output, std::size_t nbytes, std::uint8_t* out) {
    if (taps.blocks() == 1) down_blocks(lines, taps.of(output), 1, nbytes, out);
    else down_blocks(lines, taps.of(output), taps.blocks(), nbytes, out);
}

AVX2 void widen(const std::uint8_t* rgb, int count, std::uint8_t* line) {
    const __m128i spread = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
    int i = 0;
    for (; i + 6 <= count; i += 4, rgb += 12, line += 16)  // 16 bytes are read, of which 12 are used
        _mm_storeu_si128(reinterpret_cast<__m128i*>(line),
                         _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rgb)), spread));
    plain_passes.widen(rgb, count - i, line);
}

AVX2 void narrow(const std::uint8_t* line, int count, std::uint8_t* rgb) {
    const __m128i squeeze = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    int i = 0;
    for (; i + 6 <= count; i += 4, line += 16, rgb += 12)  // 16 bytes are written, of which 12 stay
        _mm_storeu_si128(reinterpret_cast<__m128i*>(rgb),
                         _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(line)), squeeze));
    plain_passes.narrow(line, count - i, rgb);
}

// Eight levels of one channel.
AVX2_INLINE __m256i channel_of(const std::uint8_t* line, int channel) {
    return _mm256_and_si256(_mm256_srl_epi32(load(line), _mm_cvtsi32_si128(8 * channel)), _mm256_set1_epi32(255));
}

AVX2 void levels(const std::uint8_t* line, int count, std::uint8_t* out, std::size_t plane) {
    const __m256i by_channel = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m256i join = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // the channels' parts from both halves
    int i = 0;
    for (; i + 8 <= count; i += 8, line += 8 * kPixel, out += 8) {
        const __m256i eight = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(load(line), by_channel), join);
        const __m128i red_green = _mm256_castsi256_si128(eight);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out), red_green);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out + plane), _mm_unpackhi_epi64(red_green, red_green));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out + 2 * plane), _mm256_extracti128_si256(eight, 1));
    }
    plain_passes.levels(line, count - i, out, plane);
}

// value * factor, rounded to nearest; the factor is the sum of two floats.
AVX2_INLINE __m256 times(__m256 value, const float* factor) {
    return _mm256_fmadd_ps(value, _mm256_set1_ps(factor[0]), _mm256_mul_ps(value, _mm256_set1_ps(factor[1])));
}

AVX2_INLINE __m256 numbers_of(const std::uint8_t* line, int channel, const Numbers& numbers) {
    const __m256 level = times(_mm256_cvtepi32_ps(channel_of(line, channel)), numbers.share);
    return times(_mm256_sub_ps(level, _mm256_set1_ps(numbers.mean[channel])), numbers.reciprocal[channel]);
}

AVX2 void floats(const std::uint8_t* line, int count, const Numbers& numbers, float* out, std::size_t plane) {
    int i = 0;
    for (; numbers.by_arithmetic && i + 8 <= count; i += 8, line += 8 * kPixel, out += 8)
        for (int c = 0; c < 3; c++)
            _mm256_storeu_ps(out + static_cast<std::size_t>(c) * plane, numbers_of(line, c, numbers));
    plain_passes.floats(line, count - i, numbers, out, plane);
}

// Upper halves of eight floats, rounded half to even.
AVX2_INLINE __m128i halved(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i upper = _mm256_srli_epi32(rounded, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
}

AVX2 void halves(const std::uint8_t* line, int count, const Numbers& numbers, std::uint16_t* out, std::size_t plane) {
    int i = 0;
    for (; numbers.by_arithmetic && i + 8 <= count; i += 8, line += 8 * kPixel, out += 8)
        for (int c = 0; c < 3; c++)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + static_cast<std::size_t>(c) * plane),
                             halved(numbers_of(line, c, numbers)));
    plain_passes.halves(line, count - i, numbers, out, plane);
}

const Passes passes{across, down, widen, narrow, levels, floats, halves};

}  // namespace

const Passes* avx2_passes() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &passes : nullptr;
}

}  // namespace feedline

#else

namespace feedline {
const Passes* avx2_passes() { return nullptr; }
}  // namespace feedline

#endif
