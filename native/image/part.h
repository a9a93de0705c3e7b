#pragma once
#include <cstdint>

#include "intact.h"
#include "row.h"
#include "taps.h"

namespace feedline {

// Pillow's resize: the box of the samples becomes `width` x `height` pixels, of which only `window` is computed,
// mirrored if `flip`.
struct Resize {
    Filter filter = Filter::bilinear;
    double left = 0, top = 0, right = 0, bottom = 0;
    int width = 0, height = 0;
    Window window{0, 0, 0, 0};
    bool flip = false;
    bool across_first = false;  // always, as in Pillow before 13
};

// A part of an image at 1/scale, and its resize, if any. `image` is the size of the whole JPEG; pixels in memory have
// their own size.
struct PartPlan {
    Intact image;
    int scale = 1;
    Window part{0, 0, 0, 0};
    bool resizes = false;
    Resize resize;

    // True if the part and the window lie within `source`, and the result has this size.
    bool fits(const Source& source, int width, int height) const;
};

// Writes contiguous RGB with the calling thread's buffers and decoder, which are kept for its next image. Pixels that do
// not matter for the result are not decoded.
Status read_part(const Source& source, const PartPlan& plan, std::uint8_t* rgb);

}  // namespace feedline
