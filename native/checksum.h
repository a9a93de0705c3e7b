#pragma once
#include <cstddef>
#include <cstdint>

namespace feedline {

// True if this CPU has carry-less multiplication; `crc32` below needs it.
bool has_quick_crc32();

// CRC-32 of zlib, gzip and PNG, at memory speed.
std::uint32_t crc32(const unsigned char* data, std::size_t nbytes);

}  // namespace feedline
