#include "spans.h"

#include "module.h"

namespace feedline {

void bind_spans(nb::module_& m) {
    nb::class_<SpanSums>(m, "SpanSums")
        .def(nb::init<nb::handle, nb::object, nb::frozenset, nb::tuple, std::size_t>(), nb::arg("bounds"),
             nb::arg("parent").none(), nb::arg("others"), nb::arg("suffixes"), nb::arg("recent"))
        .def(
            "add",
            [](SpanSums& sums, nb::handle spans, std::int64_t samples, std::int64_t epoch, std::int64_t number) {
                return sums.add(spans, nullptr, 0, samples, epoch, number);
            },
            nb::arg("spans"), nb::arg("samples") = 0, nb::arg("epoch") = -1, nb::arg("number") = -1)
        .def("recent", &SpanSums::recent, nb::arg("most"))
        .def("cells", &SpanSums::cells)
        .def_rw("opening_ns", &SpanSums::opening_ns)
        .def_rw("in_order", &SpanSums::in_order)
        .def_prop_ro("startup_ns", &SpanSums::startup_ns)
        .def_prop_ro("batches", &SpanSums::batches)
        .def_prop_ro("samples", &SpanSums::samples);
}

}  // namespace feedline
