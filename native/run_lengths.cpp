#include "run_lengths.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace feedline {
namespace {

constexpr int kLongestRun = 512;
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

// Width in bits by the code of five bits in a header.
constexpr int kWidths[32] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16,
                             17, 18, 19, 20, 21, 22, 23, 24, 26, 28, 30, 32, 40, 48, 56, 64};

int closest_width(int bits) {
    return *std::lower_bound(std::begin(kWidths), std::end(kWidths), bits);
}

std::uint64_t unzigzag(std::uint64_t value) { return value >> 1 ^ (0 - (value & 1)); }

class Runs {
public:
    Runs(const unsigned char* data, std::size_t nbytes, bool is_signed)
        : at_(data), stop_(data + nbytes), signed_(is_signed) {}

    bool at_end() const { return at_ == stop_; }

    // Number of integers of the next run, which are written to `values`; 0 for a damaged run.
    int next_of_version_1(std::uint64_t* values) {
        const int head = *at_++;
        if (head >= 0x80) {
            for (int i = 0; i < 0x100 - head; i++)
                if (!varint(values[i], signed_)) return 0;
            return 0x100 - head;
        }
        std::uint64_t first;
        if (at_end()) return 0;
        const std::uint64_t delta = static_cast<std::uint64_t>(static_cast<std::int64_t>(static_cast<signed char>(*at_++)));
        if (!varint(first, signed_)) return 0;
        for (int i = 0; i < head + 3; i++) values[i] = first + delta * i;
        return head + 3;
    }

    int next_of_version_2(std::uint64_t* values) {
        const int head = *at_++;
        if (head < 0x40) return repeat(head, values);
        if (at_end()) return 0;
        const int count = ((head & 1) << 8 | *at_++) + 1, code = head >> 1 & 31;
        if (head < 0x80) {
            if (!packed(values, count, kWidths[code])) return 0;
            if (signed_)
                for (int i = 0; i < count; i++) values[i] = unzigzag(values[i]);
            return count;
        }
        return head < 0xC0 ? patched(values, count, kWidths[code]) : deltas(values, count, code ? kWidths[code] : 0);
    }

private:
    int repeat(int head, std::uint64_t* values) {
        std::uint64_t value;
        if (!big_endian(value, (head >> 3) + 1)) return 0;
        const int count = (head & 7) + 3;
        std::fill_n(values, count, signed_ ? unzigzag(value) : value);
        return count;
    }

    int patched(std::uint64_t* values, int count, int width) {
        if (stop_ - at_ < 2) return 0;
        const int base_nbytes = (at_[0] >> 5) + 1, patch_width = kWidths[at_[0] & 31], gap_width = (at_[1] >> 5) + 1,
                  patches = at_[1] & 31;
        at_ += 2;
        std::uint64_t base, list[31];
        if (!patches || width == 64 || patch_width + gap_width > 64 || !big_endian(base, base_nbytes) ||
            !packed(values, count, width) || !packed(list, patches, closest_width(patch_width + gap_width)))
            return 0;
        const std::uint64_t sign = std::uint64_t{1} << (8 * base_nbytes - 1);
        if (base & sign) base = 0 - (base & ~sign);
        std::uint64_t place = 0;
        for (int i = 0; i < patches; i++) {
            // The gap is relative to the place of the patch before. An empty patch divides a long gap.
            const std::uint64_t patch = list[i] & ((std::uint64_t{1} << patch_width) - 1), gap = list[i] >> patch_width;
            place += gap;
            if (place >= static_cast<std::uint64_t>(count) || (i && !gap) || (i == patches - 1 && !patch)) return 0;
            values[place] |= patch << width;
        }
        for (int i = 0; i < count; i++) values[i] += base;
        return count;
    }

    int deltas(std::uint64_t* values, int count, int width) {
        std::uint64_t step;
        if (!varint(values[0], signed_) || !varint(step, true)) return 0;
        if (!width) {
            for (int i = 1; i < count; i++) values[i] = values[i - 1] + step;
            return count;
        }
        if (count < 2 || !packed(values + 2, count - 2, width)) return 0;
        values[1] = values[0] + step;
        const bool falls = static_cast<std::int64_t>(step) < 0;
        for (int i = 2; i < count; i++) values[i] = values[i - 1] + (falls ? 0 - values[i] : values[i]);
        return count;
    }

    bool varint(std::uint64_t& value, bool is_signed) {
        value = 0;
        for (int shift = 0; shift < 70; shift += 7) {
            if (at_end()) return false;
            const std::uint64_t octet = *at_++;
            value |= (octet & 0x7F) << shift;
            if (octet < 0x80) {
                if (is_signed) value = unzigzag(value);
                return true;
            }
        }
        return false;
    }

    bool big_endian(std::uint64_t& value, int nbytes) {
        if (stop_ - at_ < nbytes) return false;
        value = 0;
        for (int i = 0; i < nbytes; i++) value = value << 8 | *at_++;
        return true;
    }

    // Integers of `width` bits, the highest bit first; the last byte is filled up.
    bool packed(std::uint64_t* values, int count, int width) {
        const int nbytes = (count * width + 7) / 8;
        if (stop_ - at_ < nbytes) return false;
        if (width == 64) {
            for (int i = 0; i < count; i++) big_endian(values[i], 8);
            return true;
        }
        const unsigned char* from = at_;
        const std::uint64_t mask = (std::uint64_t{1} << width) - 1;
        std::uint64_t read = 0;
        int left = 0;
        for (int i = 0; i < count; i++) {
            for (; left < width; left += 8) read = read << 8 | *from++;
            left -= width;
            values[i] = read >> left & mask;
        }
        at_ += nbytes;
        return true;
    }

    const unsigned char* at_;
    const unsigned char* stop_;
    bool signed_;
};

}  // namespace

bool run_length_sums(const unsigned char* data, std::size_t nbytes, int version, bool is_signed, RunLengthSums& sums) {
    Runs runs(data, nbytes, is_signed);
    std::uint64_t values[kLongestRun];
    while (!runs.at_end()) {
        const int count = version == 1 ? runs.next_of_version_1(values) : runs.next_of_version_2(values);
        if (!count) return false;
        if (!sums.count) sums.least = sums.greatest = static_cast<std::int64_t>(values[0]);
        sums.count += count;
        for (int i = 0; i < count; i++) {
            const std::int64_t value = static_cast<std::int64_t>(values[i]);
            sums.least = std::min(sums.least, value);
            sums.greatest = std::max(sums.greatest, value);
            if (value > 0) sums.total = value > kMost - sums.total ? kMost : sums.total + value;
        }
    }
    return true;
}

}  // namespace feedline
