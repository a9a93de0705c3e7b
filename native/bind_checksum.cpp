#include "buffer.h"
#include "checksum.h"
#include "module.h"

namespace nb = nanobind;

namespace feedline {
namespace {

std::uint32_t crc32_of(nb::handle data_) {
    const Buffer data(data_);
    if (data.ndim() != 1 || data.item_nbytes() != 1 || (data.shape(0) > 1 && data.stride(0) != 1))
        throw nb::type_error("expected one axis of bytes without gaps");
    nb::gil_scoped_release nogil;
    return crc32(reinterpret_cast<const unsigned char*>(data.data()), static_cast<std::size_t>(data.shape(0)));
}

}  // namespace

// The function is missing on CPUs without carry-less multiplication; zlib's is used there.
void bind_checksum(nb::module_& m) {
    if (has_quick_crc32()) m.def("crc32", &crc32_of, nb::arg("data"));
}

}  // namespace feedline
