#include "file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <utility>

namespace feedline {
namespace {

constexpr std::size_t kKept = std::size_t{64} << 20;  // bytes that a thread keeps between images

class Descriptor {
public:
    // O_NONBLOCK: the opening of a pipe without a writer would wait. A pipe is refused below, by its type.
    explicit Descriptor(const char* path) {
        do number_ = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        while (number_ < 0 && errno == EINTR);  // on network and user-space file systems
    }
    ~Descriptor() {
        if (number_ >= 0) close(number_);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    operator int() const { return number_; }

private:
    int number_;
};

thread_local FileReader::Sum sum;

std::int64_t now_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// Counts the time of a block.
class Timer {
public:
    Timer() : begun_(now_ns()) {}
    ~Timer() { sum.elapsed_ns += now_ns() - begun_; }
    Timer(const Timer&) = delete;
    Timer& operator=(const Timer&) = delete;

private:
    std::int64_t begun_;
};

bool is_jpeg(int file) {
    std::uint8_t beginning[3] = {};
    return pread(file, beginning, 3, 0) == 3 && beginning[0] == 0xFF && beginning[1] == 0xD8 && beginning[2] == 0xFF;
}

}  // namespace

FileReader::Sum FileReader::take() { return std::exchange(sum, {}); }

Status FileReader::read(const char* path, std::size_t most, Bytes& bytes) {
    const Timer timer;
    const Descriptor file(path);
    struct stat info;
    if (file < 0 || fstat(file, &info)) return Status::file(errno);
    if (S_ISDIR(info.st_mode)) return Status::file(EISDIR);
    if (!S_ISREG(info.st_mode)) return Status::bad("it is not a regular file");
    if (static_cast<std::size_t>(info.st_size) > kMost && most >= kMost)
        return is_jpeg(file) ? Status::bad("it is larger than 2 GiB") : Status::foreign();
    const std::size_t wanted = std::min(static_cast<std::size_t>(info.st_size), most);
    // After one huge file, no thread may keep a buffer of that size until the process ends.
    if (memory_.size() > kKept && wanted <= kKept) std::vector<std::uint8_t>().swap(memory_);
    if (memory_.size() < wanted) memory_.resize(wanted + wanted / 2);
    std::size_t got = 0;
    while (got < wanted) {
        const ssize_t count = ::read(file, memory_.data() + got, wanted - got);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return Status::file(errno);
        if (count == 0) break;
        got += static_cast<std::size_t>(count);
    }
    sum.nbytes += static_cast<std::int64_t>(got);
    bytes = {memory_.data(), got};
    return {};
}

}  // namespace feedline
