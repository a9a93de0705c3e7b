#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "buffer.h"
#include "image/color.h"
#include "module.h"

namespace nb = nanobind;

namespace feedline {
namespace {

// Levels of an image: (height, width, 1 or 3) contiguous bytes.
Levels levels_of(const Buffer& image) {
    const bool fits = image.ndim() == 3 && image.item_nbytes() == 1 && (image.shape(2) == 1 || image.shape(2) == 3);
    if (!fits || image.row_nbytes() < 0 || (image.shape(0) > 1 && image.stride(0) != image.row_nbytes()))
        throw nb::value_error("an image is uint8 of shape (height, width, 1 or 3), without gaps");
    return {reinterpret_cast<std::uint8_t*>(image.data()),
            static_cast<std::size_t>(image.shape(0) * image.shape(1)), static_cast<int>(image.shape(2))};
}

void adjust_colors(nb::handle image_, const std::vector<std::pair<int, double>>& adjustments) {
    const Buffer image(image_, true);
    const Levels levels = levels_of(image);
    std::vector<Change> changes;
    for (const auto& [what, factor] : adjustments) {
        if (what < 0 || what > (levels.channels == 3 ? 3 : 1)) throw nb::value_error("no such adjustment");
        changes.push_back({static_cast<Adjustment>(what), factor});
    }
    nb::gil_scoped_release nogil;
    if (levels.pixels) adjust(levels, changes);
}

void blur_image(nb::handle bordered_, const std::vector<float>& across, const std::vector<float>& down, nb::handle out_) {
    const Buffer bordered(bordered_), out(out_, true);
    const Levels source = levels_of(bordered), target = levels_of(out);
    const auto down_size = static_cast<std::int64_t>(down.size()), across_size = static_cast<std::int64_t>(across.size());
    if (!down_size || !across_size || source.channels != target.channels ||
        bordered.shape(0) != out.shape(0) + down_size - 1 || bordered.shape(1) != out.shape(1) + across_size - 1)
        throw nb::value_error("the border does not fit the kernels");
    nb::gil_scoped_release nogil;
    blur({source.data, static_cast<std::size_t>(out.shape(0)), static_cast<std::size_t>(out.shape(1)),
          static_cast<std::size_t>(target.channels)},
         across, down, target.data);
}

}  // namespace

void bind_color(nb::module_& m) {
    m.def("adjust_colors", &adjust_colors, nb::arg("image"), nb::arg("adjustments"));
    m.def("blur_image", &blur_image, nb::arg("bordered"), nb::arg("across"), nb::arg("down"), nb::arg("out"));
}

}  // namespace feedline
