#include "range.h"

#include <stdexcept>
#include <string>

#include "clones.h"

namespace feedline {
namespace {

FEEDLINE_CLONES
bool all_within(const std::int64_t* values, std::int64_t count, std::int64_t low, std::int64_t high) {
    // Without a branch in the loop, which is then vectorized; the value is searched for only if there is one.
    bool outside = false;
    for (std::int64_t i = 0; i < count; i++) outside |= (values[i] < low) | (values[i] >= high);
    return !outside;
}

}  // namespace

void check_range(const char* what, const std::int64_t* values, std::int64_t count, std::int64_t low, std::int64_t high,
                 std::int64_t length, const char* things) {
    if (all_within(values, count, low, high)) return;
    while (*values >= low && *values < high) values++;
    throw std::out_of_range(std::string(what) + " " + std::to_string(*values) + " is out of range for " +
                            std::to_string(length) + " " + things);
}

}  // namespace feedline
