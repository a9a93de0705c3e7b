#pragma once
#include <utility>

#include "grid.h"

namespace feedline {

// Mapping of an EXIF orientation: the upright pixel (x, y) is the stored (x, y), exchanged if `transposed`, then
// counted from the stored image's opposite edge if mirrored.
struct Turn {
    bool transposed = false, mirrored_x = false, mirrored_y = false;

    explicit Turn(int orientation)
        : transposed(orientation >= 5),
          mirrored_x(orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8),
          mirrored_y(orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7) {}

    bool none() const { return !transposed && !mirrored_x && !mirrored_y; }

    // Returns the stored part that an upright part comes from, in a stored image of this size.
    Window stored(Window part, int width, int height) const {
        if (transposed) {
            std::swap(part.x, part.y);
            std::swap(part.width, part.height);
        }
        if (mirrored_x) part.x = width - part.x - part.width;
        if (mirrored_y) part.y = height - part.y - part.height;
        return part;
    }
};

}  // namespace feedline
