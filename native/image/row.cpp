#include "row.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "file.h"
#include "region.h"
#include "resampler.h"
#include "turn.h"

namespace feedline {
namespace {

constexpr const char* kMisplaced = "the crop does not lie within the image";
constexpr std::size_t kKept = std::size_t{64} << 20;   // bytes for rotated images that a thread keeps
constexpr std::size_t kProbed = std::size_t{256} << 10;  // bytes of a file that almost always hold the header

// Samples [low, high) of one side of a scaled image that a box may read, and the box within them.
struct Side {
    int low, high;
    double begin, end;  // from `low`

    Side(double from, double to, int samples)
        : low(static_cast<int>(from)),
          high(std::min(samples, static_cast<int>(std::ceil(to)))),
          begin(from - low),
          end(to - low) {}
};

// Part of one side of the output that the resized image covers: `count` pixels, of which the first is pixel `first` of
// the resized image, at `place` in the output.
struct Shown {
    std::int64_t first;
    int count, place;

    Shown(std::int64_t window, int size, std::int64_t full)
        : first(std::max<std::int64_t>(0, window)),
          count(static_cast<int>(std::min(full, window + size) - first)),
          place(static_cast<int>(first - window)) {}
};

int reduced(int pixels, int scale) { return (pixels + scale - 1) / scale; }

// Upright image at 1/scale. If a side is mirrored, its incomplete last pixel comes first and shifts all others.
struct ScaledImage {
    int width, height;
    double shift_x, shift_y;

    ScaledImage(int width_, int height_, double shift_x_, double shift_y_)
        : width(width_), height(height_), shift_x(shift_x_), shift_y(shift_y_) {}
    ScaledImage(int full_width, int full_height, int scale, const Turn& turn)
        : ScaledImage(reduced(full_width, scale), reduced(full_height, scale), 0, 0) {
        const double per = scale;
        if (turn.transposed ? turn.mirrored_y : turn.mirrored_x) shift_x = width - full_width / per;
        if (turn.transposed ? turn.mirrored_x : turn.mirrored_y) shift_y = height - full_height / per;
    }
};

// Lines of an image that is stored upright.
class Upright final : public Samples {
public:
    Upright(Resampler& resampler, const Passes& passes, Lines& lines)
        : resampler_(resampler), passes_(passes), lines_(lines) {}
    void restart() override { resampler_.restart(); }
    void take(const std::uint8_t* line) override { resampler_.push(line, passes_, lines_); }

private:
    Resampler& resampler_;
    const Passes& passes_;
    Lines& lines_;
};

// Lines of the stored image, rotated in memory: `part` of the upright image, `stride` bytes per line.
class Turned final : public Samples {
public:
    Turned(const Turn& turn, const Window& part, std::uint8_t* pixels, std::size_t stride)
        : turn_(turn), part_(part), pixels_(pixels), stride_(static_cast<std::ptrdiff_t>(stride)) {}

    void restart() override { taken_ = 0; }
    void take(const std::uint8_t* line) override {
        const int width = turn_.transposed ? part_.height : part_.width,
                  height = turn_.transposed ? part_.width : part_.height;
        const std::ptrdiff_t pixel = kPixel, along = turn_.transposed ? stride_ : pixel,
                             across = turn_.transposed ? pixel : stride_;
        std::uint8_t* to = pixels_ + across * (turn_.mirrored_y ? height - 1 - taken_ : taken_);
        if (turn_.mirrored_x) to += along * (width - 1);
        for (int x = 0; x < width; x++, line += kPixel, to += turn_.mirrored_x ? -along : along)
            std::memcpy(to, line, kPixel);
        taken_++;
    }

private:
    const Turn turn_;
    const Window part_;
    std::uint8_t* const pixels_;
    const std::ptrdiff_t stride_;
    int taken_ = 0;
};

// One row to write: its layout, and its geometry, from a key or given by the caller.
struct Order {
    const Plan& plan;
    const Layout& layout;
    std::uint64_t key = 0;
    const Placement* given = nullptr;

    Geometry at(int width, int height) const {
        if (given) return given->geometry;
        return geometry(plan.law, plan.flip, {layout.width, layout.height}, key, width, height);
    }

    // The geometry of a crop policy always fits.
    bool fits(const Geometry& found, int width, int height) const {
        if (!given) return true;
        const Window& box = found.box;
        return box.x >= 0 && box.y >= 0 && box.width > 0 && box.height > 0 && box.width <= width - box.x &&
               box.height <= height - box.y && Shown(found.left, layout.width, found.full.width).count > 0 &&
               Shown(found.top, layout.height, found.full.height).count > 0;
    }
};

// Buffers and decoders with which a thread reads images.
class Reader {
public:
    Status row(const Order& order, const Source& source, std::int64_t limit, void* row);
    Status header(const Source& source, std::int64_t limit, Header& header);
    Status whole(Bytes jpeg, bool quick, std::uint8_t* rgb);

private:
    Status encoded(const Source& source, std::size_t most, Bytes& bytes);
    Status ready(const Order& order, const Pixels& pixels, Writer& writer);
    Status jpeg(const Order& order, const Source& source, Bytes bytes, std::int64_t limit, Writer& writer);
    Status turned(const Region& region, const Turn& turn, const Window& part, const Passes& passes, Writer& writer);
    Window prepare(const Order& order, const Geometry& found, int scale, const ScaledImage& image, Writer& writer);
    int overrun() const { return resampler_.across().overrun(); }
    std::uint8_t* room(std::size_t nbytes) {
        if (memory_.size() < nbytes) memory_.resize(nbytes);
        return memory_.data();
    }

    FileReader file_;
    RegionDecoder decoder_;
    Resampler resampler_;
    std::vector<std::uint8_t> memory_;
};

Status Reader::row(const Order& order, const Source& source, std::int64_t limit, void* row) {
    Writer writer(order.layout, *order.plan.passes, order.plan.numbers, row);
    if (order.given) writer.upend(order.given->upended);
    if (source.pixels.data) return ready(order, source.pixels, writer);
    Bytes bytes;
    Status status = encoded(source, FileReader::kMost, bytes);
    return status.fine() ? jpeg(order, source, bytes, limit, writer) : status;
}

Status Reader::encoded(const Source& source, std::size_t most, Bytes& bytes) {
    if (source.path) return file_.read(source.path, most, bytes);
    bytes = source.bytes;
    return {};
}

Status Reader::header(const Source& source, std::int64_t limit, Header& header) {
    Bytes bytes;
    Status status = encoded(source, kProbed, bytes);
    if (status.fine()) status = scan(bytes, limit, header);
    if (!source.path || bytes.size < kProbed || status.text != kCutShort) return status;
    status = encoded(source, FileReader::kMost, bytes);
    return status.fine() ? scan(bytes, limit, header) : status;
}

Status Reader::whole(Bytes jpeg, bool quick, std::uint8_t* rgb) {
    Header header;
    Status status = scan(jpeg, 0, header);
    return status.fine() ? decoder_.decode_whole(jpeg, header.width, header.height, quick, rgb) : status;
}

// Sets up resampler and writer; returns the part of the upright image at 1/scale whose lines the resampler takes.
Window Reader::prepare(const Order& order, const Geometry& found, int scale, const ScaledImage& image, Writer& writer) {
    const Plan& plan = order.plan;
    const Layout& layout = order.layout;
    const Window& box = found.box;
    const double per = scale;
    const Side x(box.x / per + image.shift_x, (box.x + box.width) / per + image.shift_x, image.width);
    const Side y(box.y / per + image.shift_y, (box.y + box.height) / per + image.shift_y, image.height);
    const Shown across(found.left, layout.width, found.full.width),
        down(found.top, layout.height, found.full.height);
    const Filter filter = plan.bicubic ? Filter::bicubic : Filter::bilinear;
    resampler_.prepare(
        {x.begin, x.end, x.high - x.low, found.full.width, across.first, across.count, filter, found.flip,
         plan.torchs},
        {y.begin, y.end, y.high - y.low, found.full.height, down.first, down.count, filter, false, plan.torchs},
        plan.torchs);
    if (across.count < layout.width || down.count < layout.height) writer.clear();
    writer.place(found.flip ? layout.width - across.place - across.count : across.place, down.place, across.count);
    const Taps &columns = resampler_.across(), &rows = resampler_.down();
    return {x.low + columns.low(), y.low + rows.low(), columns.high() - columns.low(), rows.high() - rows.low()};
}

Status Reader::ready(const Order& order, const Pixels& pixels, Writer& writer) {
    const Passes& passes = *order.plan.passes;
    const Geometry found = order.at(pixels.width, pixels.height);
    if (!order.fits(found, pixels.width, pixels.height)) return Status::bad(kMisplaced);
    const Window part = prepare(order, found, 1, {pixels.width, pixels.height, 0, 0}, writer);
    std::uint8_t* const line = room(static_cast<std::size_t>(part.width + overrun()) * kPixel);
    for (int y = part.y; y < part.y + part.height; y++) {
        pixels.line(part.x, y, part.width, passes, line);
        resampler_.push(line, passes, writer);
    }
    return {};
}

Status Reader::jpeg(const Order& order, const Source& source, Bytes bytes, std::int64_t limit, Writer& writer) {
    const Plan& plan = order.plan;
    Header header;
    Status status = scan(bytes, limit, header);
    if (!status.fine()) return status;
    if (plan.oriented && !header.orientation) return Status::foreign();
    const Turn turn(plan.oriented ? header.orientation : 1);
    const int width = turn.transposed ? header.height : header.width,
              height = turn.transposed ? header.width : header.height;
    const Geometry found = order.at(width, height);
    if (!order.fits(found, width, height)) return Status::bad(kMisplaced);
    const int scale = plan.scaled ? found.largest_scale() : 1;
    const Window part = prepare(order, found, scale, ScaledImage(width, height, scale, turn), writer);
    const Window stored = turn.stored(part, reduced(header.width, scale), reduced(header.height, scale));
    const Region region{bytes, header.width, header.height, scale, stored, source.grid, source.intervals, plan.quick};
    if (!turn.none()) return turned(region, turn, part, *plan.passes, writer);
    Upright samples(resampler_, *plan.passes, writer);
    return decoder_.decode(region, overrun(), samples);
}

Status Reader::turned(const Region& region, const Turn& turn, const Window& part, const Passes& passes,
                      Writer& writer) {
    const std::size_t stride = static_cast<std::size_t>(part.width + overrun()) * kPixel;
    std::uint8_t* const pixels = room(stride * static_cast<std::size_t>(part.height));
    Turned samples(turn, part, pixels, stride);
    Status status = decoder_.decode(region, 0, samples);
    for (int y = 0; y < part.height && status.fine(); y++)
        resampler_.push(pixels + static_cast<std::size_t>(y) * stride, passes, writer);
    if (memory_.size() > kKept) std::vector<std::uint8_t>().swap(memory_);
    return status;
}

Reader& reader() {
    static thread_local Reader own;
    return own;
}

// Allocations can fail in many places. libjpeg reports the failure of its own ones.
template <class Work>
Status within_memory(Work work) {
    try {
        return work();
    } catch (const std::bad_alloc&) {
        return Status::bad("there is not enough memory to decode it");
    }
}

}  // namespace

void Pixels::line(int x, int y, int count, const Passes& passes, std::uint8_t* out) const {
    const std::uint8_t* pixel = data + y * line_stride + x * pixel_stride;
    if (pixel_stride == 3 && channel_stride == 1) return passes.widen(pixel, count, out);
    for (int i = 0; i < count; i++, pixel += pixel_stride, out += kPixel)
        for (int c = 0; c < 3; c++) out[c] = pixel[c * channel_stride];
}

Status read_row(const Plan& plan, const Source& source, std::uint64_t key, std::int64_t limit, void* row) {
    return within_memory([&] { return reader().row({plan, plan.layout, key}, source, limit, row); });
}

Status read_placed(const Plan& plan, const Layout& layout, const Source& source, const Placement& placement,
                   std::int64_t limit, void* row) {
    return within_memory([&] { return reader().row({plan, layout, 0, &placement}, source, limit, row); });
}

Status read_header(const Source& source, std::int64_t limit, Header& header) {
    return within_memory([&] { return reader().header(source, limit, header); });
}

Status read_whole(Bytes jpeg, bool quick, std::uint8_t* rgb) {
    return within_memory([&] { return reader().whole(jpeg, quick, rgb); });
}

}  // namespace feedline
