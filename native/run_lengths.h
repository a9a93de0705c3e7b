#pragma once
#include <cstddef>
#include <cstdint>

namespace feedline {

struct RunLengthSums {
    std::int64_t count = 0;
    std::int64_t least = 0;
    std::int64_t greatest = 0;
    std::int64_t total = 0;  // of the positive integers, at most INT64_MAX
};

// Sums of integers in ORC's run-length encodings of version 1 and 2 (https://orc.apache.org/specification/ORCv1/);
// `_run_length_sums_numpy` gives equal ones. Returns false for a damaged run, and for one that ends too early.
bool run_length_sums(const unsigned char* data, std::size_t nbytes, int version, bool is_signed, RunLengthSums& sums);

}  // namespace feedline
