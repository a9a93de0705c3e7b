#include <algorithm>
#include <limits>

#include "buffer.h"
#include "mixture.h"
#include "module.h"

namespace nb = nanobind;

namespace feedline {
namespace {

constexpr std::int64_t kLargestBlock = std::numeric_limits<std::int32_t>::max();

void blocks(nb::handle counts_, std::int64_t datasets, std::uint64_t first, std::uint64_t jitter_key,
            std::uint64_t begin_key, nb::handle owners_) {
    const Buffer counts(counts_), owners(owners_, true);
    const std::int64_t* const each = counts.int64_items();
    std::int32_t* const owner_items = owners.int32_items();
    if (datasets <= 0 || counts.shape(0) % datasets) throw nb::value_error("counts must have a row for each block");
    std::int64_t left = owners.shape(0), size = 0;
    bool fit = true;
    for (std::int64_t i = 0; fit && i < counts.shape(0); i++) {
        if (i % datasets == 0) size = 0;
        fit = each[i] >= 0 && each[i] <= std::min(left, kLargestBlock - size);
        size += each[i];
        left -= each[i];
    }
    if (!fit || left) throw nb::value_error("counts must add up to the length of owners, and below 2**31 in each block");
    nb::gil_scoped_release nogil;
    mixture_blocks(each, counts.shape(0) / datasets, datasets, first, jitter_key, begin_key, owner_items);
}

void interleaved(nb::handle owners_, nb::handle parts_, nb::handle starts_, nb::handle shifts_, nb::handle out_) {
    const Buffer owners(owners_), parts(parts_), starts(starts_), shifts(shifts_), out(out_, true);
    const std::int32_t* const owner_items = owners.int32_items();
    const std::int64_t *const part_items = parts.int64_items(), *const start_items = starts.int64_items(),
                       *const shift_items = shifts.int64_items();
    std::int64_t* const items = out.int64_items();
    const std::int64_t datasets = shifts.shape(0);
    bool fits = starts.shape(0) == datasets + 1 && out.shape(0) == owners.shape(0) && start_items[0] >= 0 &&
                start_items[datasets] <= parts.shape(0);
    for (std::int64_t d = 0; fits && d < datasets; d++) fits = start_items[d] <= start_items[d + 1];
    if (fits) {
        nb::gil_scoped_release nogil;
        fits = interleave(owner_items, owners.shape(0), part_items, start_items, shift_items, datasets, items);
    }
    if (!fits) throw nb::value_error("starts must divide the parts among the owners");
}

}  // namespace

void bind_mixture(nb::module_& m) {
    m.def("mixture_blocks", &blocks, nb::arg("counts"), nb::arg("datasets"), nb::arg("first"), nb::arg("jitter_key"),
          nb::arg("begin_key"), nb::arg("owners"));
    m.def("interleave", &interleaved, nb::arg("owners"), nb::arg("parts"), nb::arg("starts"), nb::arg("shifts"),
          nb::arg("out"));
}

}  // namespace feedline
