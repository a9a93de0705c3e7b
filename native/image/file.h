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

private:
    std::vector<std::uint8_t> memory_;
};

}  // namespace feedline
