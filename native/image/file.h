#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "scan.h"
#include "status.h"

namespace feedline {

// Reads files into one piece of memory that is used again and again.
class FileReader {
public:
    // At most `most` bytes from the file's beginning, valid until the next call. Regular files only.
    Status read(const char* path, std::size_t most, Bytes& bytes);

    static constexpr std::size_t kMost = std::size_t{1} << 31;

private:
    std::vector<std::uint8_t> memory_;
};

}  // namespace feedline
