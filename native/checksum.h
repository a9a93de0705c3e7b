#pragma once
#include <cstddef>
#include <cstdint>

namespace feedline {

// Whether this processor multiplies polynomials, without which `crc32` below may not be called.
bool has_quick_crc32();

// The CRC-32 of zlib, gzip and PNG, at the speed of memory.
std::uint32_t crc32(const unsigned char* data, std::size_t nbytes);

}  // namespace feedline
