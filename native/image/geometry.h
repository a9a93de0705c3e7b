#pragma once
#include <cstdint>

#include "grid.h"

namespace feedline {

// Crop policies of feedline/images/crops.py, with the same numbers.
enum class Kind { random_box = 0, center_box = 1, whole_box = 2 };

struct Law {
    Kind kind = Kind::whole_box;
    double scale[2] = {0, 0};  // random_box
    double ratio[2] = {0, 0};
    std::int64_t shorter = 0;  // center_box
};

struct Extent {
    std::int64_t width = 0, height = 0;
};

// Mapping from an image to a row: the pixels of `box` are resized to `full`; the row shows the part that begins at
// (left, top), mirrored if `flip`. Pixels outside of `full`, also for a negative left or top, are zero.
struct Geometry {
    Window box{0, 0, 0, 0};
    bool flip = false;
    Extent full;
    std::int64_t left = 0, top = 0;

    // Returns the largest of 1, 2, 4 and 8 by which the box can shrink and stay twice as large as the output.
    int largest_scale() const;
};

// As `geometry` in feedline/images/recipe.py, bit for bit.
Geometry geometry(const Law& law, double flip, Extent size, std::uint64_t key, int width, int height);

}  // namespace feedline
