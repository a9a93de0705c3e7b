#pragma once
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace feedline {

using Memory = std::vector<std::uint8_t>;

constexpr std::size_t kOptions = 24;  // bytes at the end of an input that are not part of its JPEG

// Changes JPEGs like damage or other encoders: bytes, numbers, lengths, whole segments, restart markers.
class Mutator {
public:
    explicit Mutator(unsigned seed) : random_(seed) {}

    // A seed, or an input that was kept, with other options; most have a changed JPEG, too. The others try options on
    // files that are read to their end.
    Memory mutated(const std::vector<Memory>& seeds, const std::vector<Memory>& kept);

private:
    // A marker, its length and its contents, without those of its scan.
    struct Segment {
        std::size_t at, size;
    };

    std::size_t below(std::size_t count) { return count ? random_() % count : 0; }
    std::uint8_t byte() { return static_cast<std::uint8_t>(random_()); }

    static std::vector<Segment> segments(const Memory& input);

    void change(Memory& input, const Memory& other);
    void change_bytes(Memory& input, std::size_t at, const Memory& other);
    void change_segment(Memory& input, const Segment& segment, const Memory& other);
    void change_scan(Memory& input, std::size_t start);

    std::mt19937 random_;
};

}  // namespace feedline
