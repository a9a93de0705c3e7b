#pragma once
#include <cstdint>

namespace feedline {

// Throws std::out_of_range (IndexError in Python) that names the first of `values` not in [low, high), if there is one:
// "`what` 7 is out of range for `length` `things`".
void check_range(const char* what, const std::int64_t* values, std::int64_t count, std::int64_t low, std::int64_t high,
                 std::int64_t length, const char* things);

}  // namespace feedline
