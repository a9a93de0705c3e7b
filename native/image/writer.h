#pragma once
#include <cstddef>
#include <cstdint>

#include "passes.h"
#include "resampler.h"

namespace feedline {

// Type of the numbers in a batch; equal to `_DTYPES` in feedline/images/native.py.
enum class Number { level = 0, single = 1, half = 2 };

// Memory layout of a row of a batch.
struct Layout {
    int width, height;
    bool planar;  // CHW
    Number number;

    std::size_t item_nbytes() const;
    std::size_t nbytes() const;
};

// Writes lines of pixels to one row as numbers, from (left, top) on.
class Writer final : public Lines {
public:
    Writer(const Layout& layout, const Passes& passes, const Numbers& numbers, void* row)
        : layout_(layout), passes_(passes), numbers_(numbers), row_(row) {}

    void place(int left, int top, int width) {
        left_ = left;
        top_ = top;
        width_ = width;
    }
    void upend(bool upended) { upended_ = upended; }  // mirror the row top to bottom
    void clear();  // sets every pixel to black
    void take(int y, const std::uint8_t* line) override;

private:
    void interleaved(std::size_t item, const std::uint8_t* line);
    void planes(std::size_t item, const std::uint8_t* line);

    const Layout& layout_;
    const Passes& passes_;
    const Numbers& numbers_;
    void* const row_;
    int left_ = 0, top_ = 0, width_ = 0;
    bool upended_ = false;
};

// Builds the table, its bfloat16 form, and the flag that arithmetic with `mean` and `std` gives the same bits in
// `passes`.
Numbers prepared(const float (&of)[3][256], const float (&mean)[3], const float (&std)[3], const Passes& passes);

}  // namespace feedline
