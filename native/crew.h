#pragma once
#include <cstdint>
#include <functional>

namespace feedline {

// Runs work(0) ... work(chunks - 1) on at most `threads` threads, this one included, and returns when all are done.
//
// The helpers are started on first need and then kept, asleep; a process that was forked starts its own. Any number
// of threads may call at once and share them: a helper that is busy elsewhere is not waited for.
void run_chunks(int threads, std::int64_t chunks, const std::function<void(std::int64_t)>& work);

}  // namespace feedline
