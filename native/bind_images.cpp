#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <array>
#include <climits>
#include <deque>
#include <string>
#include <vector>

#include "buffer.h"
#include "crew.h"
#include "image/file.h"
#include "image/intact.h"
#include "image/part.h"
#include "image/quick.h"
#include "image/row.h"
#include "module.h"

namespace nb = nanobind;

namespace feedline {
namespace {

using Triple = std::array<float, 3>;

nb::bytes encoded_path(nb::handle path) {
    PyObject* bytes = nullptr;
    if (!PyUnicode_FSConverter(path.ptr(), &bytes)) nb::raise_python_error();
    return nb::steal<nb::bytes>(bytes);
}

// A Python source with the object that it refers to: its path or its memory.
class Held {
public:
    explicit Held(nb::handle source) {
        if (!PyUnicode_Check(source.ptr()) && PyObject_CheckBuffer(source.ptr())) {
            view(source);
        } else {
            path_ = encoded_path(source);
            source_.path = path_.c_str();
        }
    }

    void add_grid(nb::handle lengths) {
        const Buffer& grid = buffers_.emplace_back(lengths);
        if (grid.ndim() != 1 || grid.item_nbytes() != 2 || (grid.shape(0) > 1 && grid.stride(0) != 2))
            throw nb::type_error("a grid is one axis of uint16 without gaps");
        source_.grid = reinterpret_cast<const std::uint16_t*>(grid.data());
        source_.intervals = static_cast<std::size_t>(grid.shape(0));
    }

    const Source& operator*() const { return source_; }

private:
    void view(nb::handle source) {
        const Buffer& memory = buffers_.emplace_back(source);
        const auto* data = reinterpret_cast<const std::uint8_t*>(memory.data());
        if (memory.item_nbytes() != 1) throw nb::type_error("an image in memory is of uint8");
        if (memory.ndim() == 1 && (memory.shape(0) <= 1 || memory.stride(0) == 1)) {
            source_.bytes = {data, static_cast<std::size_t>(memory.shape(0))};
            return;
        }
        if (memory.ndim() != 3 || memory.shape(2) != 3)
            throw nb::type_error("an image in memory is one axis of bytes, or pixels of shape (height, width, 3)");
        if (!memory.shape(0) || !memory.shape(1)) throw nb::value_error("an array without pixels is no image");
        if (memory.shape(0) > kMostPixels || memory.shape(1) > kMostPixels)
            throw nb::value_error("an image has at most 2^24 pixels to a side");
        source_.pixels = {data,
                          static_cast<int>(memory.shape(1)),
                          static_cast<int>(memory.shape(0)),
                          memory.stride(0),
                          memory.stride(1),
                          memory.stride(2)};
    }

    static constexpr std::int64_t kMostPixels = 1 << 24;

    nb::bytes path_;
    std::deque<Buffer> buffers_;  // a deque, since its elements never move
    Source source_;
};

nb::object left_over(std::int64_t row, const Status& status) {
    return nb::make_tuple(row, static_cast<int>(status.verdict), status.number, status.text);
}

class ImagePlan {
public:
    ImagePlan(std::pair<int, int> size, int law, std::array<double, 4> bounds, double flip, bool bicubic, bool planar,
              int number, nb::handle values, Triple mean, Triple std, bool oriented, bool scaled, bool torchs, int sets,
              bool quick) {
        plan_.layout = {size.second, size.first, planar, static_cast<Number>(number)};
        plan_.law.kind = static_cast<Kind>(law);
        if (plan_.law.kind == Kind::random_box) {
            std::copy_n(bounds.begin(), 2, plan_.law.scale);
            std::copy_n(bounds.begin() + 2, 2, plan_.law.ratio);
        }
        plan_.law.shorter = static_cast<std::int64_t>(bounds[0]);
        plan_.flip = flip;
        plan_.bicubic = bicubic;
        plan_.oriented = oriented;
        plan_.scaled = scaled;
        plan_.torchs = torchs;
        plan_.quick = quick;
        plan_.passes = &passes_of(sets);
        const Buffer table(values);
        if (table.ndim() != 2 || table.shape(0) != 3 || table.shape(1) != 256 || table.item_nbytes() != 4 ||
            table.row_nbytes() != 1024)
            throw nb::type_error("values are float32 of shape (3, 256)");
        plan_.numbers = prepared(*reinterpret_cast<const float(*)[3][256]>(table.data()), {mean[0], mean[1], mean[2]},
                                 {std[0], std[1], std[2]}, *plan_.passes);
    }

    // Returns None if every row was written, else (row, verdict, number, text) of the others.
    nb::object read(nb::handle sources, nb::handle out_, nb::handle keys_, nb::handle grids, std::int64_t limit,
                    int threads) const {
        std::deque<Held> held = hold(sources);
        if (!grids.is_none()) add_grids(grids, held);
        const Buffer out(out_, true);
        std::deque<Buffer> keys;
        if (!keys_.is_none()) keys.emplace_back(keys_);
        check(out, keys, static_cast<std::int64_t>(held.size()));
        std::vector<Status> statuses(held.size());
        {
            nb::gil_scoped_release nogil;
            run_chunks(threads, static_cast<std::int64_t>(held.size()), [&](std::int64_t row) {
                std::uint64_t key = 0;
                if (!keys.empty()) std::memcpy(&key, keys[0].data() + row * keys[0].stride(0), sizeof(key));
                statuses[static_cast<std::size_t>(row)] =
                    read_row(plan_, *held[static_cast<std::size_t>(row)], key, limit, out.data() + row * out.stride(0));
            });
        }
        return unwritten(statuses);
    }

    // Like `read`, with a line of `placements` for each row: x, y, width, height of the box; flip; upended; height,
    // width of the resized box; left, top of the window. `out` determines the size of the rows.
    nb::object read_placed(nb::handle sources, nb::handle out_, nb::handle placements_, std::int64_t limit,
                           int threads) const {
        const std::deque<Held> held = hold(sources);
        const auto rows = static_cast<std::int64_t>(held.size());
        const Buffer out(out_, true), placements(placements_);
        const Layout layout = layout_of(out, rows);
        if (placements.ndim() != 2 || placements.shape(0) != rows || placements.shape(1) != kPlacement ||
            placements.item_nbytes() != 8 || (rows && placements.row_nbytes() != 8 * kPlacement))
            throw nb::value_error("placements are int64 of shape (rows, 10)");
        std::vector<Status> statuses(held.size());
        {
            nb::gil_scoped_release nogil;
            run_chunks(threads, rows, [&](std::int64_t row) {
                std::array<std::int64_t, kPlacement> line;
                std::memcpy(line.data(), placements.data() + row * placements.stride(0), sizeof(line));
                const auto at = static_cast<std::size_t>(row);
                statuses[at] = feedline::read_placed(plan_, layout, *held[at], placement(line), limit,
                                                     out.data() + row * out.stride(0));
            });
        }
        return unwritten(statuses);
    }

    std::tuple<std::array<int, 4>, bool, std::pair<std::int64_t, std::int64_t>, std::array<std::int64_t, 4>> geometry(
        std::uint64_t key, int width, int height) const {
        const Geometry found =
            feedline::geometry(plan_.law, plan_.flip, {plan_.layout.width, plan_.layout.height}, key, width, height);
        return {{found.box.x, found.box.y, found.box.width, found.box.height},
                found.flip,
                {found.full.height, found.full.width},
                {found.left, found.top, plan_.layout.width, plan_.layout.height}};
    }

private:
    static constexpr std::int64_t kPlacement = 10;
    static constexpr std::int64_t kFarthest = 1 << 24;  // so that no sum of two coordinates overflows

    static std::deque<Held> hold(nb::handle sources) {
        const nb::tuple given = nb::steal<nb::tuple>(PySequence_Tuple(sources.ptr()));
        if (!given.is_valid()) nb::raise_python_error();
        std::deque<Held> held;
        for (nb::handle source : given) held.emplace_back(source);
        return held;
    }

    // Places out of range become an empty box, which the reader refuses.
    static Placement placement(const std::array<std::int64_t, kPlacement>& line) {
        const bool near = std::all_of(line.begin(), line.end(),
                                      [](std::int64_t item) { return -kFarthest <= item && item <= kFarthest; });
        Placement placed;
        if (!near || line[6] < 1 || line[7] < 1) return placed;
        placed.geometry.box = {static_cast<int>(line[0]), static_cast<int>(line[1]), static_cast<int>(line[2]),
                               static_cast<int>(line[3])};
        placed.geometry.flip = line[4] != 0;
        placed.upended = line[5] != 0;
        placed.geometry.full = {line[7], line[6]};
        placed.geometry.left = line[8];
        placed.geometry.top = line[9];
        return placed;
    }

    Layout layout_of(const Buffer& out, std::int64_t rows) const {
        Layout layout = plan_.layout;
        const int height = layout.planar ? 2 : 1, channels = layout.planar ? 1 : 3;
        if (out.ndim() != 4 || out.shape(0) != rows || out.shape(channels) != 3 || out.row_nbytes() < 1 ||
            out.shape(height) > kFarthest || out.shape(height + 1) > kFarthest)
            throw nb::value_error("out does not fit the sources and the plan");
        layout.height = static_cast<int>(out.shape(height));
        layout.width = static_cast<int>(out.shape(height + 1));
        if (out.row_nbytes() != static_cast<std::int64_t>(layout.nbytes()))
            throw nb::value_error("out does not fit the sources and the plan");
        return layout;
    }

    static void add_grids(nb::handle grids, std::deque<Held>& held) {
        const nb::tuple given = nb::steal<nb::tuple>(PySequence_Tuple(grids.ptr()));
        if (!given.is_valid()) nb::raise_python_error();
        if (given.size() != held.size()) throw nb::value_error("there must be a grid, or None, for each source");
        for (std::size_t row = 0; row < held.size(); row++)
            if (!given[row].is_none()) held[row].add_grid(given[row]);
    }

    void check(const Buffer& out, const std::deque<Buffer>& keys, std::int64_t rows) const {
        if (out.ndim() < 2 || out.shape(0) != rows ||
            out.row_nbytes() != static_cast<std::int64_t>(plan_.layout.nbytes()))
            throw nb::value_error("out does not fit the sources and the plan");
        if (!keys.empty() && (keys[0].ndim() != 1 || keys[0].shape(0) != rows || keys[0].item_nbytes() != 8))
            throw nb::value_error("keys do not fit the sources");
    }

    static nb::object unwritten(const std::vector<Status>& statuses) {
        nb::list left;
        for (std::size_t row = 0; row < statuses.size(); row++)
            if (!statuses[row].fine()) left.append(left_over(static_cast<std::int64_t>(row), statuses[row]));
        return left.size() ? nb::object(left) : nb::none();
    }

    Plan plan_;
};

// Returns (the fields of images.Header, None), or (None, the verdict); a verdict also above `limit` pixels, if that is
// not 0.
nb::tuple image_header(nb::handle source, std::int64_t limit) {
    const Held held(source);
    Header header;
    Status status;
    {
        nb::gil_scoped_release nogil;
        status = read_header(*held, limit, header);
        if (status.fine() && !header.orientation) status = Status::foreign();
    }
    if (!status.fine()) return nb::make_tuple(nb::none(), left_over(0, status));
    return nb::make_tuple(
        nb::make_tuple(header.width, header.height, "JPEG", header.components, header.progressive, header.orientation),
        nb::none());
}

// Decodes a whole JPEG from memory into `out`, (height, width, 3) as in its header; returns None, or the verdict.
// Without `quick`, libjpeg decodes all data, with equal results.
nb::object image_decode(nb::handle jpeg, nb::handle out_, bool quick) {
    const Held held(jpeg);
    const Buffer out(out_, true);
    Header header;
    Status status = read_header(*held, 0, header);
    if ((*held).path || (*held).pixels.data) throw nb::type_error("image_decode takes encoded bytes");
    if (status.fine()) {
        if (out.ndim() != 3 || out.shape(0) != header.height || out.row_nbytes() != std::int64_t{3} * header.width ||
            out.stride(0) != out.row_nbytes())
            throw nb::value_error("out does not fit the image");
        nb::gil_scoped_release nogil;
        status = read_whole((*held).bytes, quick, reinterpret_cast<std::uint8_t*>(out.data()));
    }
    return status.fine() ? nb::none() : left_over(0, status);
}

using ResizeArguments =
    std::tuple<int, std::array<double, 4>, std::pair<int, int>, std::pair<int, int>, bool, bool>;

Resize resize_of(const ResizeArguments& given, int width, int height) {
    const auto& [filter, box, size, corner, flip, across_first] = given;
    const Window window{corner.first, corner.second, width, height};
    return {static_cast<Filter>(filter), box[0], box[1], box[2], box[3], size.first, size.second, window, flip,
            across_first};
}

// Returns (width, height, components, end) of a JPEG that decodes without an error; None if that is not certain.
nb::object image_intact(nb::handle jpeg) {
    const Held held(jpeg);
    if ((*held).path || (*held).pixels.data) throw nb::type_error("image_intact takes encoded bytes");
    Intact found;
    bool fine = false;
    {
        nb::gil_scoped_release nogil;
        fine = is_intact((*held).bytes, found);
    }
    if (!fine) return nb::none();
    return nb::make_tuple(found.width, found.height, found.components, found.end);
}

// Returns a part of a JPEG, or of pixels, as contiguous RGB of `rows` = (height, width); resized if `resize` is not None.
// None if it cannot be decoded.
nb::object image_part(nb::handle source, std::pair<int, int> size, int scale, std::array<int, 4> part_,
                      nb::handle resize_, std::pair<int, int> rows) {
    const Held held(source);
    const auto [height, width] = rows;
    PartPlan plan{{size.first, size.second, 0, 0}, scale, {part_[0], part_[1], part_[2], part_[3]}, false, {}};
    plan.resizes = !resize_.is_none();
    if (plan.resizes) plan.resize = resize_of(nb::cast<ResizeArguments>(resize_), width, height);
    if (!plan.fits(*held, width, height))
        throw nb::value_error("the part lies outside of the source, or the rows have another size");
    // Bytes, not an array: Pillow returns its pixels as bytes, and these need no copy.
    PyObject* const rgb = PyBytes_FromStringAndSize(nullptr, Py_ssize_t{3} * width * height);
    if (!rgb) nb::raise_python_error();
    nb::object content = nb::steal(rgb);
    Status status;
    {
        nb::gil_scoped_release nogil;
        status = read_part(*held, plan, reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(rgb)));
    }
    return status.fine() ? content : nb::none();
}

}  // namespace

void bind_images(nb::module_& m) {
    nb::class_<ImagePlan>(m, "ImagePlan")
        .def(nb::init<std::pair<int, int>, int, std::array<double, 4>, double, bool, bool, int, nb::handle, Triple,
                      Triple, bool, bool, bool, int, bool>(),
             nb::arg("size"), nb::arg("law"), nb::arg("bounds"), nb::kw_only(), nb::arg("flip"), nb::arg("bicubic"),
             nb::arg("planar"), nb::arg("number"), nb::arg("values"), nb::arg("mean"), nb::arg("std"),
             nb::arg("oriented"), nb::arg("scaled"), nb::arg("torchs") = false, nb::arg("sets") = kAllSets,
             nb::arg("quick") = true)
        .def("read", &ImagePlan::read, nb::arg("sources"), nb::arg("out"), nb::arg("keys").none(),
             nb::arg("grids").none(), nb::arg("limit"), nb::arg("threads"))
        .def("read_placed", &ImagePlan::read_placed, nb::arg("sources"), nb::arg("out"), nb::arg("placements"),
             nb::arg("limit"), nb::arg("threads"))
        .def("geometry", &ImagePlan::geometry, nb::arg("key"), nb::arg("width"), nb::arg("height"));
    m.def("image_header", &image_header, nb::arg("source"), nb::arg("limit"));
    m.def("image_decode", &image_decode, nb::arg("jpeg"), nb::arg("out"), nb::arg("quick") = true);
    m.def("image_intact", &image_intact, nb::arg("jpeg"));
    m.def("image_part", &image_part, nb::arg("source"), nb::arg("size"), nb::arg("scale"), nb::arg("part"),
          nb::arg("resize").none(), nb::arg("rows"));
    m.def("image_reads", [] {
        const FileReader::Sum sum = FileReader::take();
        return nb::make_tuple(sum.elapsed_ns, sum.nbytes);
    });
    m.def("image_quick", &quick_is_sound, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace feedline
