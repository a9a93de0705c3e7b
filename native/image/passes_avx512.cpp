// Inner loops for x86 CPUs that multiply bytes (AVX-512 with VNNI and VBMI), chosen at run time. A product of four
// samples with four weights of one byte each is one instruction, and samples are never widened.
#include "passes.h"

#if defined(__x86_64__) && defined(__GNUC__)
#if !defined(__clang__)
// GCC's headers begin some vectors with a value that is never used, and GCC warns of it.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstring>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni")))
#define AVX512_LAMBDA AVX512 __attribute__((always_inline))
#define AVX512_INLINE AVX512_LAMBDA inline

namespace feedline {
namespace {

constexpr int kBytes = 64, kPixels = 16;

// Places of the bytes that a permutation takes.
struct Order {
    alignas(kBytes) std::uint8_t places[kBytes];
};

template <class Place>
constexpr Order order_of(Place place) {
    Order order{};
    for (int i = 0; i < kBytes; i++) order.places[i] = static_cast<std::uint8_t>(place(i));
    return order;
}

// Between sixteen pixels and sixteen levels of each channel.
constexpr Order kToPixels = order_of([](int i) { return i % 4 * 16 + i / 4; });
constexpr Order kToChannels = order_of([](int i) { return i % 16 * 4 + i / 16; });
// From four pixels of each of four outputs to the order of Taps::Team::places.
constexpr Order kToTeam = order_of([](int i) { return i % 16 * 4 + i / 16; });
constexpr Order kWithoutFourth = order_of([](int i) { return i < 48 ? i / 3 * 4 + i % 3 : 0; });
constexpr Order kWithFourth = order_of([](int i) { return i / 4 * 3 + i % 4; });

AVX512_INLINE __m512i load(const void* bytes) { return _mm512_loadu_si512(bytes); }

AVX512_INLINE __m512i permuted(const Order& order, __m512i bytes) {
    return _mm512_permutexvar_epi8(_mm512_load_si512(order.places), bytes);
}

AVX512_INLINE __m128i sixteen(const void* bytes) { return _mm_loadu_si128(static_cast<const __m128i*>(bytes)); }

// Initial value of sums that are shifted twice by a byte: half of a level.
AVX512_INLINE __m512i half() { return _mm512_set1_epi32(1 << (Taps::kBits - 1 - 16)); }

AVX512_INLINE __m512i next_byte(__m512i sums) { return _mm512_slli_epi32(sums, 8); }

AVX512_INLINE __m512i finished(__m512i sums) { return _mm512_srai_epi32(sums, Taps::kBits); }

// Weighted sums of one block of samples, from the weights' highest byte to the lowest.
AVX512_INLINE __m512i of_block(__m512i samples, __m512i low, __m512i middle, __m512i high) {
    const __m512i upper = _mm512_dpbusd_epi32(next_byte(_mm512_dpbusd_epi32(half(), samples, high)), samples, middle);
    return finished(_mm512_dpbusd_epi32(next_byte(upper), samples, low));
}

// Sums over many blocks, by the byte of the weights: three short chains of additions instead of a long one.
struct Sums {
    __m512i low, middle, high;
};

AVX512_INLINE Sums no_sums() { return {_mm512_setzero_si512(), _mm512_setzero_si512(), half()}; }

AVX512_INLINE void add(Sums& sums, __m512i samples, __m512i low, __m512i middle, __m512i high) {
    sums.low = _mm512_dpbusd_epi32(sums.low, samples, low);
    sums.middle = _mm512_dpbusd_epi32(sums.middle, samples, middle);
    sums.high = _mm512_dpbusd_epi32(sums.high, samples, high);
}

AVX512_INLINE __m512i joined(const Sums& sums) {
    const __m512i upper = _mm512_add_epi32(next_byte(sums.high), sums.middle);
    return finished(_mm512_add_epi32(next_byte(upper), sums.low));
}

AVX512_INLINE __m512i levels_of(__m512i first, __m512i second, __m512i third, __m512i fourth) {
    return _mm512_packus_epi16(_mm512_packs_epi32(first, second), _mm512_packs_epi32(third, fourth));
}

// Four pixels of each output of a team.
AVX512_INLINE __m512i far_samples(const std::uint8_t* line, const int* offset) {
    const auto at = [line, offset](int i) { return line + static_cast<std::size_t>(offset[i]) * kPixel; };
    __m512i all = _mm512_castsi128_si512(sixteen(at(0)));
    all = _mm512_inserti32x4(all, sixteen(at(1)), 1);
    all = _mm512_inserti32x4(all, sixteen(at(2)), 2);
    return _mm512_inserti32x4(all, sixteen(at(3)), 3);
}

AVX512_INLINE __m512i weights(const std::int8_t (&bytes)[Taps::kTeam][Taps::kBlock]) {
    return _mm512_broadcast_i32x4(sixteen(bytes));
}

// A team's four outputs, channel by channel.
AVX512_INLINE __m512i near_outputs(const std::uint8_t* line, const Taps& taps, int team, int blocks) {
    const std::uint8_t* base = line + static_cast<std::size_t>(taps.base(team)) * kPixel;
    const Taps::TeamBlock* block = taps.of_team(team);
    const __m512i places = _mm512_load_si512(taps.places(team).at);
    const auto samples = [&](int b) AVX512_LAMBDA {
        return _mm512_permutexvar_epi8(places, load(base + static_cast<std::size_t>(b * Taps::kBlock) * kPixel));
    };
    if (blocks == 1)
        return of_block(samples(0), weights(block->bytes[0]), weights(block->bytes[1]), weights(block->bytes[2]));
    Sums sums = no_sums();
    for (int b = 0; b < blocks; b++, block++)
        add(sums, samples(b), weights(block->bytes[0]), weights(block->bytes[1]), weights(block->bytes[2]));
    return joined(sums);
}

AVX512_INLINE __m512i far_outputs(const std::uint8_t* line, const Taps& taps, int team, int blocks) {
    const Taps::TeamBlock* block = taps.of_team(team);
    const int* const offset = taps.offsets() + Taps::kTeam * team;
    Sums sums = no_sums();
    for (int b = 0; b < blocks; b++, block++, line += Taps::kBlock * kPixel)
        add(sums, permuted(kToTeam, far_samples(line, offset)), weights(block->bytes[0]), weights(block->bytes[1]),
            weights(block->bytes[2]));
    return joined(sums);
}

// `outputs(team)` computes four.
template <class Outputs>
AVX512_INLINE void all_teams(const Taps& taps, std::uint8_t* out, Outputs outputs) {
    const int teams = taps.padded_count() / Taps::kTeam;
    for (int team = 0; team < teams; team += 4, out += kBytes) {
        const __m512i by_channel = levels_of(outputs(team), outputs(team + 1), outputs(team + 2), outputs(team + 3));
        _mm512_storeu_si512(out, permuted(kToPixels, by_channel));
    }
}

AVX512_INLINE void across_near(const std::uint8_t* line, const Taps& taps, int blocks, std::uint8_t* out) {
    all_teams(taps, out, [&](int team) AVX512_LAMBDA { return near_outputs(line, taps, team, blocks); });
}

AVX512 void across(const std::uint8_t* line, const Taps& taps, std::uint8_t* out) {
    const int blocks = taps.blocks();
    if (!taps.near())
        return all_teams(taps, out, [&](int team) AVX512_LAMBDA { return far_outputs(line, taps, team, blocks); });
    switch (blocks) {  // the compiler unrolls loops of constant length
        case 1: return across_near(line, taps, 1, out);
        case 2: return across_near(line, taps, 2, out);
        default: return across_near(line, taps, blocks, out);
    }
}

AVX512_INLINE __m512i weight(const std::int8_t* four_bytes) {
    std::int32_t all;
    std::memcpy(&all, four_bytes, sizeof(all));
    return _mm512_set1_epi32(all);
}

// 64 bytes of four lines, interleaved, so that each sum is of one column.
struct Columns {
    __m512i first, second, third, fourth;
};

AVX512_INLINE Columns columns(const std::uint8_t* const* lines, std::size_t x) {
    const __m512i l0 = load(lines[0] + x), l1 = load(lines[1] + x), l2 = load(lines[2] + x), l3 = load(lines[3] + x);
    const __m512i upper_left = _mm512_unpacklo_epi8(l0, l1), upper_right = _mm512_unpackhi_epi8(l0, l1);
    const __m512i lower_left = _mm512_unpacklo_epi8(l2, l3), lower_right = _mm512_unpackhi_epi8(l2, l3);
    return {_mm512_unpacklo_epi16(upper_left, lower_left), _mm512_unpackhi_epi16(upper_left, lower_left),
            _mm512_unpacklo_epi16(upper_right, lower_right), _mm512_unpackhi_epi16(upper_right, lower_right)};
}

AVX512_INLINE void down_block(const std::uint8_t* const* lines, const Taps::TeamBlock& block, int output,
                              std::size_t nbytes, std::uint8_t* out) {
    const __m512i low = weight(block.bytes[0][output]), middle = weight(block.bytes[1][output]),
                  high = weight(block.bytes[2][output]);
    for (std::size_t x = 0; x < nbytes; x += kBytes) {
        const Columns all = columns(lines, x);
        _mm512_storeu_si512(out + x, levels_of(of_block(all.first, low, middle, high),
                                               of_block(all.second, low, middle, high),
                                               of_block(all.third, low, middle, high),
                                               of_block(all.fourth, low, middle, high)));
    }
}

AVX512_INLINE void down_blocks(const std::uint8_t* const* lines, const Taps::TeamBlock* blocks, int count, int output,
                               std::size_t nbytes, std::uint8_t* out) {
    for (std::size_t x = 0; x < nbytes; x += kBytes) {
        Sums first = no_sums(), second = first, third = first, fourth = first;
        for (int b = 0; b < count; b++) {
            const auto& bytes = blocks[b].bytes;
            const __m512i low = weight(bytes[0][output]), middle = weight(bytes[1][output]),
                          high = weight(bytes[2][output]);
            const Columns all = columns(lines + b * Taps::kBlock, x);
            add(first, all.first, low, middle, high);
            add(second, all.second, low, middle, high);
            add(third, all.third, low, middle, high);
            add(fourth, all.fourth, low, middle, high);
        }
        _mm512_storeu_si512(out + x, levels_of(joined(first), joined(second), joined(third), joined(fourth)));
    }
}

AVX512 void down(const std::uint8_t* const* lines, const Taps& taps, int output, std::size_t nbytes,
                 std::uint8_t* out) {
    const Taps::TeamBlock* const blocks = taps.of_team(output / Taps::kTeam);
    const int within = output % Taps::kTeam;
    if (taps.blocks() == 1) down_block(lines, *blocks, within, nbytes, out);
    else down_blocks(lines, blocks, taps.blocks(), within, nbytes, out);
}

// One bit for each of `bytes` bytes.
AVX512_INLINE __mmask64 first_bytes(int bytes) { return ~std::uint64_t{0} >> (kBytes - bytes); }

AVX512 void widen(const std::uint8_t* rgb, int count, std::uint8_t* line) {
    const __mmask64 three = 0x7777777777777777;
    for (; count > 0; count -= kPixels, rgb += 3 * kPixels, line += kBytes) {
        const int pixels = count < kPixels ? count : kPixels;
        const __m512i bytes = _mm512_maskz_loadu_epi8(first_bytes(3 * pixels), rgb);
        const __m512i wide = _mm512_maskz_permutexvar_epi8(three, _mm512_load_si512(kWithFourth.places), bytes);
        _mm512_mask_storeu_epi8(line, first_bytes(4 * pixels), wide);
    }
}

AVX512 void narrow(const std::uint8_t* line, int count, std::uint8_t* rgb) {
    for (; count > 0; count -= kPixels, rgb += 3 * kPixels, line += kBytes) {
        const int pixels = count < kPixels ? count : kPixels;
        const __m512i bytes = _mm512_maskz_loadu_epi8(first_bytes(4 * pixels), line);
        _mm512_mask_storeu_epi8(rgb, first_bytes(3 * pixels), permuted(kWithoutFourth, bytes));
    }
}

AVX512 void levels(const std::uint8_t* line, int count, std::uint8_t* out, std::size_t plane) {
    for (; count > 0; count -= kPixels, line += kBytes, out += kPixels) {
        const int pixels = count < kPixels ? count : kPixels;
        const __mmask16 stored = static_cast<__mmask16>(first_bytes(pixels));
        const __m512i by_channel = permuted(kToChannels, _mm512_maskz_loadu_epi8(first_bytes(4 * pixels), line));
        _mm_mask_storeu_epi8(out, stored, _mm512_castsi512_si128(by_channel));
        _mm_mask_storeu_epi8(out + plane, stored, _mm512_extracti32x4_epi32(by_channel, 1));
        _mm_mask_storeu_epi8(out + 2 * plane, stored, _mm512_extracti32x4_epi32(by_channel, 2));
    }
}

}  // namespace

const Passes* avx512_passes() {
    const Passes* const narrower = avx2_passes();
    const bool multiplies_bytes = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                                  __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
    if (!narrower || !multiplies_bytes) return nullptr;
    static const Passes passes{across, down, widen, narrow, levels, narrower->floats, narrower->halves};
    return &passes;
}

}  // namespace feedline

#else

namespace feedline {
const Passes* avx512_passes() { return nullptr; }
}  // namespace feedline

#endif
