#pragma once

namespace feedline {

// Clears the branches of the last input.
void forget_branches();

// True if the input since then took branches, or took them a number of times, that no input before it did. Always false
// without -fsanitize-coverage=trace-pc.
bool found_branches();

}  // namespace feedline
