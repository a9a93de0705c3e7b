#pragma once
#include <cstdint>

#include "grid.h"

namespace feedline {

// The law by which a part of the picture is chosen: feedline/images/recipe.py, whose numbers these are.
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

// Which pixels go where: those of `box` are resized to `full`, of which the row shows what begins at (left, top),
// mirrored if `flip`. A negative left or top, and what lies beyond `full`, is zeros.
struct Geometry {
    Window box{0, 0, 0, 0};
    bool flip = false;
    Extent full;
    std::int64_t left = 0, top = 0;

    // The largest of 1, 2, 4, 8 by which the box can shrink and still be twice as large as the output.
    int largest_scale() const;
};

// As feedline/images/geometry.py, bit for bit.
Geometry geometry(const Law& law, double flip, Extent size, std::uint64_t key, int width, int height);

}  // namespace feedline
