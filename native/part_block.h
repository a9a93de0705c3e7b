#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>

namespace feedline {

class Part;

// Counts its time, and bytes that are read in it, for a part of the current stage, where the batch is timed. `part` may
// be None. Needs the GIL at both ends.
class PartBlock {
public:
#ifdef FEEDLINE_RECORDER
    PartBlock(nanobind::handle part, std::int64_t nbytes);
    ~PartBlock();
#else
    PartBlock(nanobind::handle, std::int64_t) {}
#endif
    PartBlock(const PartBlock&) = delete;
    PartBlock& operator=(const PartBlock&) = delete;

private:
    const Part* part_ = nullptr;
};

}  // namespace feedline
