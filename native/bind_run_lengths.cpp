#include "buffer.h"
#include "module.h"
#include "run_lengths.h"

namespace nb = nanobind;

namespace feedline {
namespace {

nb::object sums_of(nb::handle data_, int version, bool is_signed) {
    const Buffer data(data_);
    if (data.ndim() != 1 || data.item_nbytes() != 1 || (data.shape(0) > 1 && data.stride(0) != 1))
        throw nb::type_error("expected one axis of bytes without gaps");
    RunLengthSums sums;
    bool is_intact;
    {
        nb::gil_scoped_release nogil;
        is_intact = run_length_sums(reinterpret_cast<const unsigned char*>(data.data()),
                                    static_cast<std::size_t>(data.shape(0)), version, is_signed, sums);
    }
    return is_intact ? nb::object(nb::make_tuple(sums.count, sums.least, sums.greatest, sums.total)) : nb::none();
}

}  // namespace

void bind_run_lengths(nb::module_& m) {
    m.def("run_length_sums", &sums_of, nb::arg("data"), nb::arg("version"), nb::arg("is_signed"));
}

}  // namespace feedline
