#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "passes.h"
#include "taps.h"

namespace feedline {

// Receives lines of the result: line `y` of the requested outputs, taps.count() pixels of `line`.
class Lines {
public:
    virtual void take(int y, const std::uint8_t* line) = 0;

protected:
    ~Lines() = default;
};

// Streaming resize: a line of the result is computed as soon as its last input line arrives. Only the lines that one
// output needs are kept. Reusable.
//
// The horizontal pass comes first, unless the height shrinks by far more than the width. The order decides how
// intermediate values round; it is that of Pillow since 13.
class Resampler {
public:
    // Sets the axes of the samples that `push` will receive; with `across_first`, the horizontal pass always comes first.
    void prepare(const Axis& across, const Axis& down, bool across_first = false);

    void restart() { pushed_ = made_ = 0; }  // lines start at the top again

    const Taps& across() const { return across_; }
    const Taps& down() const { return down_; }

    // Takes the next line of samples; the first one is line down().low(), and begins with sample across().low().
    void push(const std::uint8_t* line, const Passes& passes, Lines& lines);

private:
    std::uint8_t* line(int y) { return ring_.data() + (static_cast<std::size_t>(y) & mask_) * stride_; }

    Taps across_, down_;
    bool down_first_ = false;
    std::vector<std::uint8_t> ring_, above_, result_;
    std::vector<const std::uint8_t*> taken_;  // lines in the ring that make one line of the result
    std::size_t stride_ = 0, mask_ = 0;
    int pushed_ = 0, made_ = 0;
};

}  // namespace feedline
