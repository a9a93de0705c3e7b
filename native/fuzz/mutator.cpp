#include "mutator.h"

#include <algorithm>
#include <iterator>

namespace feedline {
namespace {

constexpr std::size_t kMostNbytes = 1 << 15;  // bytes of an input: longer inputs are slow, and find no other faults
constexpr std::uint8_t kStartOfScan = 0xDA, kFirstRestart = 0xD0;
constexpr std::uint16_t kNumbers[] = {0, 1, 2, 7, 8, 16, 64, 255, 256, 1024, 32767, 32768, 65500, 65535};

Memory::iterator place(Memory& input, std::size_t at) { return input.begin() + static_cast<std::ptrdiff_t>(at); }

std::size_t jpeg_nbytes(const Memory& input) { return input.size() - std::min(kOptions, input.size()); }

}  // namespace

Memory Mutator::mutated(const std::vector<Memory>& seeds, const std::vector<Memory>& kept) {
    Memory input = kept.empty() || below(2) ? seeds[below(seeds.size())] : kept[below(kept.size())];
    for (std::size_t i = jpeg_nbytes(input); i < input.size(); i++)
        if (below(4)) input[i] = byte();
    if (below(16) == 0) return input;
    for (std::size_t changes = 1 + below(below(2) ? 2 : 8); changes > 0 && input.size() > kOptions; changes--)
        change(input, seeds[below(seeds.size())]);
    if (input.size() > kMostNbytes) input.erase(place(input, kMostNbytes - kOptions), place(input, jpeg_nbytes(input)));
    return input;
}

std::vector<Mutator::Segment> Mutator::segments(const Memory& input) {
    std::vector<Segment> found;
    const std::size_t end = jpeg_nbytes(input);
    for (std::size_t at = 2; at + 4 <= end;) {
        if (input[at] != 0xFF || input[at + 1] == 0 || (input[at + 1] & 0xF8) == kFirstRestart) {
            at++;  // data of a scan
            continue;
        }
        const std::size_t size = 2 + (static_cast<std::size_t>(input[at + 2]) << 8 | input[at + 3]);
        found.push_back({at, std::min(size, end - at)});
        at += std::min(std::max<std::size_t>(size, 4), end - at);
    }
    return found;
}

void Mutator::change(Memory& input, const Memory& other) {
    const std::vector<Segment> found = segments(input);
    const std::size_t nbytes = jpeg_nbytes(input);
    if (found.empty() || below(4) == 0) return change_bytes(input, below(nbytes), other);
    const Segment chosen = found[below(found.size())];
    if (input[chosen.at + 1] == kStartOfScan && below(2)) return change_scan(input, chosen.at + chosen.size);
    if (below(2)) return change_segment(input, chosen, other);
    change_bytes(input, chosen.at + below(std::min<std::size_t>(chosen.size, 64)), other);
}

void Mutator::change_bytes(Memory& input, std::size_t at, const Memory& other) {
    const std::size_t left = jpeg_nbytes(input) - at;
    const std::uint16_t number = kNumbers[below(std::size(kNumbers))];
    switch (below(7)) {
        case 0: input[at] = byte(); break;
        case 1: input[at] ^= static_cast<std::uint8_t>(1u << below(8)); break;
        case 2: input[at] = static_cast<std::uint8_t>(input[at] + below(2) * 2 - 1); break;
        case 3: input.erase(place(input, at), place(input, at + std::min(left, 1 + below(64)))); break;
        case 4: input.insert(place(input, at), 1 + below(8), byte()); break;
        case 5:
            if (left < 2) break;
            input[at] = static_cast<std::uint8_t>(number >> 8);
            input[at + 1] = static_cast<std::uint8_t>(number);
            break;
        default: std::copy_n(other.begin(), std::min({other.size(), left, below(200)}), place(input, at));
    }
}

// Another length, marker or place; a copy; or the segment of another file in its place.
void Mutator::change_segment(Memory& input, const Segment& segment, const Memory& other) {
    const Memory copy(place(input, segment.at), place(input, segment.at + segment.size));
    const std::vector<Segment> others = segments(other);
    switch (below(6)) {
        case 0: input[segment.at + 2 + below(2)] = byte(); break;
        case 1: input[segment.at + 1] = static_cast<std::uint8_t>(0xC0 + below(0x40)); break;
        case 2: input.erase(place(input, segment.at), place(input, segment.at + segment.size)); break;
        case 3: input.insert(place(input, segment.at), copy.begin(), copy.end()); break;
        case 4: {
            input.erase(place(input, segment.at), place(input, segment.at + segment.size));
            const std::vector<Segment> rest = segments(input);
            const std::size_t to = rest.empty() ? 0 : rest[below(rest.size())].at;
            input.insert(place(input, to), copy.begin(), copy.end());
            break;
        }
        default: {
            if (others.empty()) break;
            const Segment from = others[below(others.size())];
            const auto start = other.begin() + static_cast<std::ptrdiff_t>(from.at);
            if (below(2)) input.erase(place(input, segment.at), place(input, segment.at + segment.size));
            input.insert(place(input, segment.at), start, start + static_cast<std::ptrdiff_t>(from.size));
        }
    }
}

// Data after `start`: bits, markers, and an early end.
void Mutator::change_scan(Memory& input, std::size_t start) {
    const std::size_t end = jpeg_nbytes(input);
    if (start >= end) return;
    const std::size_t at = start + below(end - start);
    const std::uint8_t marker = below(2) ? static_cast<std::uint8_t>(kFirstRestart + below(10)) : byte();
    switch (below(5)) {
        case 0: input[at] = below(2) ? 0xFF : byte(); break;
        case 1: input.insert(place(input, at), {0xFF, marker}); break;
        case 2: input.erase(place(input, at), place(input, below(4) ? std::min(end, at + 1 + below(40)) : end)); break;
        case 3: {
            const Memory copy(place(input, at), place(input, std::min(end, at + 1 + below(100))));
            input.insert(place(input, start + below(end - start)), copy.begin(), copy.end());
            break;
        }
        default: for (std::size_t i = 1 + below(9); i > 0; i--) input[start + below(end - start)] ^= byte() & byte();
    }
}

}  // namespace feedline
