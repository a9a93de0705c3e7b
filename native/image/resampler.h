#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "passes.h"
#include "taps.h"

namespace feedline {

// Where lines of the result go: line `y` of the outputs wanted, taps.count() pixels of `line`.
class Lines {
public:
    virtual void take(int y, const std::uint8_t* line) = 0;

protected:
    ~Lines() = default;
};

// A resize as the lines of the picture come in; a line of the result is made as soon as all it needs is there. Only as
// many lines are kept as one output needs. Reusable.
//
// The pass across comes first, or the pass down where the height shrinks by far more than the width: the order, of
// which the rounding in between depends, is that of Pillow since 13.
class Resampler {
public:
    // The axes of the samples that `push` will bring.
    void prepare(const Axis& across, const Axis& down);

    void restart() { pushed_ = made_ = 0; }  // the lines come from the top again

    const Taps& across() const { return across_; }
    const Taps& down() const { return down_; }

    // The next line of samples; the first one is down().low(), and begins with sample across().low().
    void push(const std::uint8_t* line, const Passes& passes, Lines& lines);

private:
    std::uint8_t* line(int y) { return ring_.data() + (static_cast<std::size_t>(y) & mask_) * stride_; }

    Taps across_, down_;
    bool down_first_ = false;
    std::vector<std::uint8_t> ring_, above_, result_;
    std::vector<const std::uint8_t*> taken_;  // the lines in the ring that make one of the result
    std::size_t stride_ = 0, mask_ = 0;
    int pushed_ = 0, made_ = 0;
};

}  // namespace feedline
