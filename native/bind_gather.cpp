#include "buffer.h"
#include "gather.h"
#include "module.h"
#include "part_block.h"
#include "planes.h"
#include "range.h"

namespace nb = nanobind;

namespace feedline {
namespace {

bool same_row_shape(const Buffer& array, const Buffer& out) {
    if (array.ndim() < 1 || out.ndim() != array.ndim()) return false;
    for (int axis = 1; axis < array.ndim(); axis++)
        if (array.shape(axis) != out.shape(axis)) return false;
    return true;
}

// The functions return False without writing if rows are not contiguous or shapes do not fit. The caller then uses
// NumPy, which handles the former and raises the error for the latter.

bool gather_rows(nb::handle array_, nb::handle indices_, nb::handle out_, int threads, nb::handle part) {
    const Buffer array(array_), indices(indices_), out(out_, true);
    const std::int64_t* const chosen = indices.int64_items();
    if (!same_row_shape(array, out) || out.shape(0) != indices.shape(0)) return false;
    const std::int64_t nbytes = array.row_nbytes(), length = array.shape(0);
    if (nbytes < 0 || out.row_nbytes() != nbytes) return false;
    const PartBlock block(part, out.shape(0) * nbytes);
    nb::gil_scoped_release nogil;
    check_range("index", chosen, indices.shape(0), -length, length, length, "rows");
    gather({array.data(), length, nbytes, array.stride(0)}, chosen, {out.data(), out.shape(0), nbytes, out.stride(0)},
           Widen::none, threads);
    return true;
}

bool gather_windows(nb::handle items_, nb::handle offsets_, nb::handle out_, int widen, int threads, nb::handle part) {
    const Buffer items(items_), offsets(offsets_), out(out_, true);
    const std::int64_t* const starts = offsets.int64_items();
    if (items.ndim() != 1 || out.ndim() != 2 || out.shape(0) != offsets.shape(0)) return false;
    const std::int64_t window = out.shape(1), length = items.shape(0), item_nbytes = items.item_nbytes();
    if (length > 1 && items.stride(0) != item_nbytes) return false;
    if (out.row_nbytes() != window * (widen ? 8 : item_nbytes)) return false;
    const PartBlock block(part, out.shape(0) * window * item_nbytes);
    nb::gil_scoped_release nogil;
    check_range("window", starts, offsets.shape(0), 0, length - window + 1, length, "items");
    gather({items.data(), length, window * item_nbytes, item_nbytes}, starts,
           {out.data(), out.shape(0), out.row_nbytes(), out.stride(0)}, static_cast<Widen>(widen), threads);
    return true;
}

Planes planes(const Buffer& array) {
    return {array.data(),    array.shape(0),  array.shape(1),  array.shape(2),
            array.shape(3),  array.stride(0), array.stride(1), array.stride(2)};
}

// True for four axes whose lines are contiguous, with aligned items.
bool has_lines(const Buffer& array) {
    const std::int64_t item = array.item_nbytes();
    if (array.ndim() != 4 || (array.shape(3) > 1 && array.stride(3) != item)) return false;
    for (int axis = 0; axis < 3; axis++)
        if (array.stride(axis) % item) return false;
    return reinterpret_cast<std::uintptr_t>(array.data()) % static_cast<std::uintptr_t>(item) == 0;
}

bool take_planes_(nb::handle images_, nb::handle lines_, nb::handle columns_, nb::handle fill_, nb::handle out_,
                  int threads) {
    const Buffer images(images_), lines(lines_), columns(columns_), fill(fill_), out(out_, true);
    if (!has_lines(images) || !has_lines(out)) return false;
    const std::int64_t item = images.item_nbytes(), batch = out.shape(0), channels = out.shape(1);
    if (item != out.item_nbytes() || item != fill.item_nbytes() || (item != 1 && item != 2 && item != 4 && item != 8))
        return false;
    if (images.shape(0) != batch || images.shape(1) != channels || fill.ndim() != 1 || fill.shape(0) != channels ||
        (channels > 1 && fill.stride(0) != item))
        return false;
    const std::int64_t *const y = lines.int64_items(), *const x = columns.int64_items();
    if (lines.shape(0) != batch * out.shape(2) || columns.shape(0) != batch * out.shape(3)) return false;
    nb::gil_scoped_release nogil;
    check_range("line", y, lines.shape(0), -1, images.shape(2), images.shape(2), "lines");
    check_range("column", x, columns.shape(0), -1, images.shape(3), images.shape(3), "columns");
    take_planes(planes(images), y, x, fill.data(), planes(out), item, threads);
    return true;
}

}  // namespace

void bind_gather(nb::module_& m) {
    m.def("gather_rows", &gather_rows, nb::arg("array"), nb::arg("indices"), nb::arg("out"), nb::arg("threads"),
          nb::arg("part").none());
    m.def("gather_windows", &gather_windows, nb::arg("items"), nb::arg("offsets"), nb::arg("out"), nb::arg("widen"),
          nb::arg("threads"), nb::arg("part").none());
    m.def("take_planes", &take_planes_, nb::arg("images"), nb::arg("lines"), nb::arg("columns"), nb::arg("fill"),
          nb::arg("out"), nb::arg("threads"));
}

}  // namespace feedline
