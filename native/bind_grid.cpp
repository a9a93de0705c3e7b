#include <string>
#include <vector>

#include "buffer.h"
#include "image/grid.h"
#include "module.h"

namespace nb = nanobind;

namespace feedline {
namespace {

struct Bytes {
    const std::uint8_t* data;
    std::size_t items;
};

Bytes contents(const Buffer& buffer, std::int64_t item_nbytes) {
    if (buffer.ndim() != 1 || buffer.item_nbytes() != item_nbytes ||
        (buffer.shape(0) > 1 && buffer.stride(0) != item_nbytes))
        throw nb::type_error("expected one axis of bytes, or of uint16 for lengths, without gaps");
    return {reinterpret_cast<const std::uint8_t*>(buffer.data()), static_cast<std::size_t>(buffer.shape(0))};
}

template <class Item>
nb::bytes as_bytes(const std::vector<Item>& items) {
    return nb::bytes(items.data(), items.size() * sizeof(Item));
}

// Returns the JPEG and its lengths (native uint16), or the reason why it was not rewritten.
nb::object grid_rewrite(nb::handle jpeg_) {
    const Buffer buffer(jpeg_);
    const Bytes jpeg = contents(buffer, 1);
    std::vector<std::uint8_t> out;
    std::vector<std::uint16_t> lengths;
    std::string why;
    bool done;
    {
        nb::gil_scoped_release nogil;
        done = rewrite(jpeg.data, jpeg.items, out, lengths, why);
    }
    if (!done) return nb::str(why.c_str(), why.size());
    return nb::make_tuple(as_bytes(out), as_bytes(lengths));
}

// Returns the lengths in a file that grid_rewrite wrote, or None.
nb::object grid_measure(nb::handle jpeg_) {
    const Buffer buffer(jpeg_);
    const Bytes jpeg = contents(buffer, 1);
    std::vector<std::uint16_t> lengths;
    bool done;
    {
        nb::gil_scoped_release nogil;
        done = measure(jpeg.data, jpeg.items, lengths);
    }
    if (!done) return nb::none();
    return as_bytes(lengths);
}

// Returns the JPEG of the part and the box that it covers, or None.
nb::object grid_assemble(nb::handle jpeg_, nb::handle lengths_, const nb::tuple& wanted, int denominator) {
    const Buffer buffer(jpeg_), held(lengths_);
    const Bytes jpeg = contents(buffer, 1), lengths = contents(held, 2);
    if (wanted.size() != 4) throw nb::value_error("a box has x, y, width and height");
    const Window box{nb::cast<int>(wanted[0]), nb::cast<int>(wanted[1]), nb::cast<int>(wanted[2]),
                     nb::cast<int>(wanted[3])};
    std::vector<std::uint8_t> out;
    Window got{};
    bool done;
    {
        nb::gil_scoped_release nogil;
        done = assemble(jpeg.data, jpeg.items, reinterpret_cast<const std::uint16_t*>(lengths.data), lengths.items,
                        box, out, got, denominator);
    }
    if (!done) return nb::none();
    return nb::make_tuple(as_bytes(out), nb::make_tuple(got.x, got.y, got.width, got.height));
}

}  // namespace

void bind_grid(nb::module_& m) {
    m.def("grid_rewrite", &grid_rewrite, nb::arg("jpeg"));
    m.def("grid_measure", &grid_measure, nb::arg("jpeg"));
    m.def("grid_assemble", &grid_assemble, nb::arg("jpeg"), nb::arg("lengths"), nb::arg("wanted"),
          nb::arg("denominator") = 1);
}

}  // namespace feedline
