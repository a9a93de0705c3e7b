// Runs the fuzz target without libFuzzer: with any compiler and its sanitizers, and under valgrind, which also sees
// memory that was never written. Usage: standalone COUNT SEED FILE...
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Memory = std::vector<std::uint8_t>;

constexpr std::size_t kOptions = 24;  // bytes at the end of an input, as in images.cpp

class Mutator {
public:
    explicit Mutator(unsigned seed) : random_(seed) {}

    std::size_t below(std::size_t count) { return count ? random_() % count : 0; }

    // Half of the inputs keep their JPEG, so that options meet files that are read to their end.
    Memory mutated(const std::vector<Memory>& seeds) {
        Memory input = seeds[below(seeds.size())];
        for (std::size_t i = input.size() - std::min(kOptions, input.size()); i < input.size(); i++) input[i] = byte();
        if (below(2)) return input;
        for (std::size_t changes = 1 + below(8); changes > 0 && input.size() > kOptions; changes--) change(input, seeds);
        return input;
    }

private:
    std::uint8_t byte() { return static_cast<std::uint8_t>(random_()); }

    void change(Memory& input, const std::vector<Memory>& seeds) {
        const std::size_t jpeg = input.size() - kOptions;
        // Half of the changes are in the header, which is short.
        const std::size_t at = below(below(2) ? jpeg : std::min<std::size_t>(jpeg, 700));
        const auto place = input.begin() + static_cast<std::ptrdiff_t>(at);
        const Memory& other = seeds[below(seeds.size())];
        switch (below(6)) {
            case 0: input[at] = byte(); break;
            case 1: input[at] ^= static_cast<std::uint8_t>(1u << below(8)); break;
            case 2: input.erase(place, place + static_cast<std::ptrdiff_t>(std::min(jpeg - at, 1 + below(64)))); break;
            case 3: input.insert(place, 1 + below(8), byte()); break;
            case 4: input.insert(place, {0xFF, static_cast<std::uint8_t>(0xC0 + below(0x30))}); break;
            default: std::copy_n(other.begin(), std::min({other.size(), jpeg - at, below(200)}), place);
        }
    }

    std::mt19937 random_;
};

Memory contents(const char* path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 4) return 2;
    std::vector<Memory> seeds;
    for (int i = 3; i < count; i++) seeds.push_back(contents(arguments[i]));
    Mutator mutator(static_cast<unsigned>(std::atoi(arguments[2])));
    const long runs = std::atol(arguments[1]);
    for (long run = 0; run < runs; run++) {
        const Memory input = mutator.mutated(seeds);
        LLVMFuzzerTestOneInput(input.data(), input.size());
    }
    std::printf("%ld inputs\n", runs);
    return 0;
}
