#include "buffer.h"
#include "mixture.h"
#include "module.h"

namespace nb = nanobind;

namespace feedline {
namespace {

void blocks(nb::handle counts_, nb::handle firsts_, nb::handle keys_, nb::handle owners_, nb::handle draws_) {
    const Buffer counts(counts_), firsts(firsts_), keys(keys_), owners(owners_, true), draws(draws_, true);
    const std::int64_t *const each = counts.int64_items(), *const numbers = firsts.int64_items(),
                       *const key_items = keys.int64_items();
    std::int64_t *const owner_items = owners.int64_items(), *const draw_items = draws.int64_items();
    const std::int64_t number = keys.shape(0) / 2;
    std::int64_t left = owners.shape(0);
    for (std::int64_t i = 0; i < counts.shape(0); i++) {
        if (each[i] < 0 || each[i] > left) throw nb::value_error("counts must add up to the length of owners");
        left -= each[i];
    }
    if (left || draws.shape(0) != owners.shape(0) || firsts.shape(0) != counts.shape(0) || number == 0 ||
        keys.shape(0) % 2 || counts.shape(0) % number)
        throw nb::value_error("counts must add up to the length of owners, with two keys for each block");
    nb::gil_scoped_release nogil;
    mixture_blocks(each, numbers, key_items, number, counts.shape(0) / number, owner_items, draw_items);
}

void interleaved(nb::handle owners_, nb::handle parts_, nb::handle starts_, nb::handle shifts_, nb::handle out_) {
    const Buffer owners(owners_), parts(parts_), starts(starts_), shifts(shifts_), out(out_, true);
    const std::int64_t *const owner_items = owners.int64_items(), *const part_items = parts.int64_items(),
                       *const start_items = starts.int64_items(), *const shift_items = shifts.int64_items();
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
    m.def("mixture_blocks", &blocks, nb::arg("counts"), nb::arg("firsts"), nb::arg("keys"), nb::arg("owners"),
          nb::arg("draws"));
    m.def("interleave", &interleaved, nb::arg("owners"), nb::arg("parts"), nb::arg("starts"), nb::arg("shifts"),
          nb::arg("out"));
}

}  // namespace feedline
