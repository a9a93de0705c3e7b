#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "scan.h"
#include "status.h"

namespace feedline {

// Reads files into one reused buffer.
class FileReader {
public:
    // Reads at most `most` bytes from the start of a regular file; valid until the next call.
    Status read(const char* path, std::size_t most, Bytes& bytes);

    static constexpr std::size_t kMost = std::size_t{1} << 31;

    // Counts of the reads of this thread since the last call.
    struct Sum {
        std::int64_t elapsed_ns = 0, nbytes = 0;
    };
    static Sum take();

private:
    std::vector<std::uint8_t> memory_;
};

}  // namespace feedline
