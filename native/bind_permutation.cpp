#include "buffer.h"
#include "module.h"
#include "permutation.h"
#include "range.h"

namespace nb = nanobind;

namespace feedline {
namespace {

// A position out of range could cycle through the network forever.
void check_places(const std::int64_t* places, std::int64_t count, std::int64_t length) {
    check_range("place", places, count, 0, length, length, "permuted elements");
}

void permuted(std::uint64_t key, std::int64_t length, std::int64_t start, nb::handle out) {
    const Buffer result(out, true);
    std::int64_t* const elements = result.int64_items();
    const std::int64_t count = result.shape(0);
    nb::gil_scoped_release nogil;
    const std::int64_t ends[] = {start, start + count - 1};
    if (count > 0) check_places(ends, 2, length);
    Permutation(key, length).range(start, count, elements);
}

void permuted_at(std::uint64_t key, std::int64_t length, nb::handle places, nb::handle out) {
    const Buffer source(places), result(out, true);
    const std::int64_t* const chosen = source.int64_items();
    std::int64_t* const elements = result.int64_items();
    if (source.shape(0) != result.shape(0)) throw nb::value_error("out must be as long as places");
    nb::gil_scoped_release nogil;
    check_places(chosen, result.shape(0), length);
    Permutation(key, length).at(chosen, result.shape(0), elements);
}

}  // namespace

void bind_permutation(nb::module_& m) {
    m.def("permuted", &permuted, nb::arg("key"), nb::arg("length"), nb::arg("start"), nb::arg("out"));
    m.def("permuted_at", &permuted_at, nb::arg("key"), nb::arg("length"), nb::arg("places"), nb::arg("out"));
}

}  // namespace feedline
