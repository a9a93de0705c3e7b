// Runs a fuzz target without libFuzzer: with any compiler and its sanitizers, and under valgrind, which also sees memory
// that was never written. Inputs that take new branches are kept, and changed again. An input that takes minutes ends
// the run, too. Usage: standalone COUNT SEED FOLDER, with a folder of seeds, or standalone again FILE to read one input.
//
// The file PROGRAM-input-SEED has the input that is being read. The file remains after a crash.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "coverage.h"
#include "mutator.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using feedline::Memory;

constexpr unsigned kPatience = 120;       // seconds for one input, which takes milliseconds, or a second under valgrind
constexpr std::size_t kMostKept = 20000;  // inputs
constexpr std::size_t kRoom = 1 << 20;    // bytes of the file of the current input

// A file of the current input: its size, and its bytes. Shared memory remains after any end of the process.
class CurrentInput {
public:
    explicit CurrentInput(std::string path) : path_(std::move(path)) {
        const int file = open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
        if (file < 0 || ftruncate(file, kRoom)) throw std::runtime_error("cannot write " + path_);
        memory_ = mmap(nullptr, kRoom, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        if (memory_ == MAP_FAILED) throw std::runtime_error("cannot map " + path_);
    }
    ~CurrentInput() {
        munmap(memory_, kRoom);
        unlink(path_.c_str());
    }
    CurrentInput(const CurrentInput&) = delete;
    CurrentInput& operator=(const CurrentInput&) = delete;

    void show(const Memory& input) {
        const std::uint64_t size = input.size();
        std::memcpy(memory_, &size, sizeof size);
        std::memcpy(static_cast<std::uint8_t*>(memory_) + sizeof size, input.data(), input.size());
    }

    static Memory parsed(const Memory& file) {
        std::uint64_t size = 0;
        if (file.size() == kRoom) std::memcpy(&size, file.data(), sizeof size);
        if (file.size() != kRoom || size > kRoom - sizeof size) return file;  // an input of another fuzzer
        const auto start = file.begin() + sizeof size;
        return {start, start + static_cast<std::ptrdiff_t>(size)};
    }

private:
    std::string path_;
    void* memory_;
};

long current = 0;

void stop(int) {
    std::fprintf(stderr, "input %ld of this seed does not end\n", current);
    std::_Exit(1);
}

Memory contents(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// In the order of their names: the same in every run.
std::vector<Memory> contents_of_all(const char* folder) {
    std::vector<std::filesystem::path> paths;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
    std::sort(paths.begin(), paths.end());
    std::vector<Memory> all;
    for (const auto& path : paths) all.push_back(contents(path));
    return all;
}

void run(const Memory& input) {
    alarm(kPatience);
    LLVMFuzzerTestOneInput(input.data(), input.size());
}

void run_many(long count, const char* program, const char* seed, const std::vector<Memory>& seeds) {
    CurrentInput shown(std::string(program) + "-input-" + seed);
    feedline::Mutator mutator(static_cast<unsigned>(std::strtoul(seed, nullptr, 10)));
    std::vector<Memory> kept;
    for (current = 0; current < count; current++) {
        Memory input = mutator.mutated(seeds, kept);
        shown.show(input);
        feedline::forget_branches();
        run(input);
        if (feedline::found_branches() && kept.size() < kMostKept) kept.push_back(std::move(input));
    }
    std::printf("%ld inputs of seed %s, of which %zu took new branches\n", count, seed, kept.size());
}

}  // namespace

int main(int count, char** arguments) {
    std::signal(SIGALRM, stop);
    if (count == 3 && std::string(arguments[1]) == "again") {
        run(CurrentInput::parsed(contents(arguments[2])));
        return 0;
    }
    if (count != 4) return 2;
    run_many(std::atol(arguments[1]), arguments[0], arguments[2], contents_of_all(arguments[3]));
    return 0;
}
