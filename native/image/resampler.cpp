#include "resampler.h"

#include <cstring>

namespace feedline {
namespace {

void grow(std::vector<std::uint8_t>& memory, std::size_t nbytes) {
    if (memory.size() < nbytes) memory.resize(nbytes);
}

std::size_t line_nbytes(int pixels) {
    constexpr std::size_t step = kStep * kPixel;
    return (static_cast<std::size_t>(pixels) * kPixel + step - 1) / step * step;
}

}  // namespace

void Resampler::prepare(const Axis& across, const Axis& down, bool across_first) {
    const std::int64_t shrinks = down.samples - down.outputs;
    down_first_ = !across_first && shrinks > 0 && shrinks > 2 * (across.samples - across.outputs);
    across_.prepare(across);
    down_.prepare(down);
    stride_ = line_nbytes(down_first_ ? across_.high() - across_.low() : across_.count());
    std::size_t lines = 1;
    while (lines <= static_cast<std::size_t>(down_.length())) lines *= 2;
    mask_ = lines - 1;
    taken_.resize(lines);
    grow(ring_, lines * stride_);
    grow(above_, stride_ + static_cast<std::size_t>(across_.overrun()) * kPixel);
    grow(result_, line_nbytes(across_.count()));
    restart();
}

void Resampler::push(const std::uint8_t* samples, const Passes& passes, Lines& lines) {
    std::uint8_t* const kept = line(pushed_++);
    if (down_first_) std::memcpy(kept, samples, static_cast<std::size_t>(across_.high() - across_.low()) * kPixel);
    else passes.across(samples, across_, kept);
    for (; made_ < down_.count() && down_.end(made_) <= pushed_; made_++) {
        for (int j = 0; j < down_.length(); j++) taken_[static_cast<std::size_t>(j)] = line(down_.offset(made_) + j);
        passes.down(taken_.data(), down_, made_, stride_, above_.data());
        if (down_first_) passes.across(above_.data(), across_, result_.data());
        lines.take(made_, down_first_ ? result_.data() : above_.data());
    }
}

}  // namespace feedline
