#pragma once
#include <cstdint>
#include <functional>

namespace feedline {

// Runs work(0) ... work(chunks - 1) on at most `threads` threads, this one included, and returns when all are done.
//
// Helper threads start on first use and then sleep between calls; a forked process starts its own. Any number of
// threads may call at once and share them: a call never waits for a helper that works for another call.
void run_chunks(int threads, std::int64_t chunks, const std::function<void(std::int64_t)>& work);

}  // namespace feedline
