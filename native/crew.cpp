#include "crew.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#ifdef __unix__
#include <pthread.h>
#endif

namespace feedline {
namespace {

// One call of run_chunks; it stays on the caller's stack until no helper uses it.
struct Job {
    const std::function<void(std::int64_t)>& work;
    const std::int64_t chunks;
    std::atomic<std::int64_t> next{0};
    int helpers = 0;  // helpers inside `run`; guarded by the crew's mutex

    void run() {
        for (std::int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) work(chunk);
    }
};

class Crew {
public:
    void run(int helpers, std::int64_t chunks, const std::function<void(std::int64_t)>& work) {
        Job job{work, chunks};
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            hire(helpers);
            wanted_.insert(wanted_.end(), static_cast<std::size_t>(helpers), &job);
        }
        helpers == 1 ? work_.notify_one() : work_.notify_all();
        job.run();
        std::unique_lock<std::mutex> lock(mutex_);
        // Helpers that start after this find no chunk, and must not see the job: it ends with this call.
        wanted_.erase(std::remove(wanted_.begin(), wanted_.end(), &job), wanted_.end());
        left_.wait(lock, [&job] { return job.helpers == 0; });
    }

private:
    void hire(int helpers) {
        for (; size_ < helpers; size_++) {
            try {
                std::thread([this] { help(); }).detach();
            } catch (const std::system_error&) {
                return;  // no more threads can be started: the caller does the work itself
            }
        }
    }

    [[noreturn]] void help() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            work_.wait(lock, [this] { return !wanted_.empty(); });
            Job* job = wanted_.front();
            wanted_.pop_front();
            job->helpers++;
            lock.unlock();
            job->run();
            lock.lock();
            if (--job->helpers == 0) left_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable work_;
    std::condition_variable left_;
    std::deque<Job*> wanted_;  // a job appears once for each helper that it requests
    int size_ = 0;
};

// Never destroyed: its threads wait on it until the process ends.
std::atomic<Crew*> crew{new Crew};

#ifdef __unix__
// A forked child has none of the threads, and the mutex may be locked: it starts with a new crew.
const int registered = pthread_atfork(nullptr, nullptr, [] { crew.store(new Crew); });
#endif

}  // namespace

void run_chunks(int threads, std::int64_t chunks, const std::function<void(std::int64_t)>& work) {
    const int helpers = static_cast<int>(std::min<std::int64_t>(threads, chunks)) - 1;
    if (helpers > 0) return crew.load()->run(helpers, chunks, work);
    for (std::int64_t chunk = 0; chunk < chunks; chunk++) work(chunk);
}

}  // namespace feedline
