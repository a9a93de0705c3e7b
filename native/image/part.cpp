#include "part.h"

#include <new>
#include <vector>

#include "region.h"
#include "resampler.h"

namespace feedline {
namespace {

constexpr int kMostPixels = 65500;  // pixels per side: the limit of JPEG, small enough for all products

bool within(const Window& part, int width, int height) {
    return part.x >= 0 && part.y >= 0 && part.width > 0 && part.height > 0 && part.width <= width - part.x &&
           part.height <= height - part.y;
}

bool is_scale(int scale) { return scale == 1 || scale == 2 || scale == 4 || scale == 8; }

int reduced(int pixels, int scale) { return (pixels + scale - 1) / scale; }

// Lines as contiguous RGB.
class Rgb final : public Lines {
public:
    Rgb(int width, std::uint8_t* rgb) : width_(width), rgb_(rgb) {}
    void take(int y, const std::uint8_t* line) override {
        fastest_passes().narrow(line, width_,
                                rgb_ + static_cast<std::size_t>(y) * static_cast<std::size_t>(width_) * 3);
    }

private:
    const int width_;
    std::uint8_t* const rgb_;
};

class Copied final : public Samples {
public:
    explicit Copied(Rgb& rgb) : rgb_(rgb) {}
    void restart() override { taken_ = 0; }
    void take(const std::uint8_t* line) override { rgb_.take(taken_++, line); }

private:
    Rgb& rgb_;
    int taken_ = 0;
};

class Resampled final : public Samples {
public:
    Resampled(Resampler& resampler, Rgb& rgb) : resampler_(resampler), rgb_(rgb) {}
    void restart() override { resampler_.restart(); }
    void take(const std::uint8_t* line) override { resampler_.push(line, fastest_passes(), rgb_); }

private:
    Resampler& resampler_;
    Rgb& rgb_;
};

class PartReader {
public:
    Status read(const Source& source, const PartPlan& plan, std::uint8_t* rgb);

private:
    Window prepare(const Resize& resize, const Window& part);
    Status decode(const Source& source, const PartPlan& plan, const Window& part, int overrun, Samples& samples);
    void convert(const Pixels& pixels, const Window& part, int overrun, Samples& samples);

    RegionDecoder decoder_;
    Resampler resampler_;
    std::vector<std::uint8_t> line_;
};

Status PartReader::read(const Source& source, const PartPlan& plan, std::uint8_t* rgb) {
    const Intact& image = plan.image;
    if (!plan.resizes) {
        Rgb lines(plan.part.width, rgb);
        Copied samples(lines);
        const bool whole = plan.part.width == image.width && plan.part.height == image.height && plan.scale == 1;
        if (whole && !source.pixels.data)
            return decoder_.decode_whole(source.bytes, image.width, image.height, true, rgb);
        return decode(source, plan, plan.part, 0, samples);
    }
    const Window part = prepare(plan.resize, plan.part);
    Rgb lines(plan.resize.window.width, rgb);
    Resampled samples(resampler_, lines);
    return decode(source, plan, part, resampler_.across().overrun(), samples);
}

// Returns the samples that the resize reads.
Window PartReader::prepare(const Resize& resize, const Window& part) {
    const Window& window = resize.window;
    resampler_.prepare({resize.left, resize.right, part.width, resize.width, window.x, window.width, resize.filter,
                        resize.flip},
                       {resize.top, resize.bottom, part.height, resize.height, window.y, window.height, resize.filter,
                        false},
                       resize.across_first);
    const Taps &columns = resampler_.across(), &rows = resampler_.down();
    return {part.x + columns.low(), part.y + rows.low(), columns.high() - columns.low(), rows.high() - rows.low()};
}

Status PartReader::decode(const Source& source, const PartPlan& plan, const Window& part, int overrun,
                          Samples& samples) {
    if (!source.pixels.data)
        return decoder_.decode({source.bytes, plan.image.width, plan.image.height, plan.scale, part, nullptr, 0, true},
                               overrun, samples);
    convert(source.pixels, part, overrun, samples);
    return {};
}

void PartReader::convert(const Pixels& pixels, const Window& part, int overrun, Samples& samples) {
    line_.resize(static_cast<std::size_t>(part.width + overrun) * kPixel);
    for (int y = part.y; y < part.y + part.height; y++) {
        pixels.line(part.x, y, part.width, fastest_passes(), line_.data());
        samples.take(line_.data());
    }
}

}  // namespace

bool PartPlan::fits(const Source& source, int width, int height) const {
    if (source.path || !is_scale(scale)) return false;
    const bool is_jpeg = !source.pixels.data;
    if (!within(part, is_jpeg ? reduced(image.width, scale) : source.pixels.width,
                is_jpeg ? reduced(image.height, scale) : source.pixels.height))
        return false;
    if (!resizes) return width == part.width && height == part.height;
    const bool boxed = resize.left >= 0 && resize.left < resize.right && resize.right <= part.width &&
                       resize.top >= 0 && resize.top < resize.bottom && resize.bottom <= part.height;
    return boxed && resize.filter >= Filter::lanczos && resize.filter <= Filter::hamming &&
           resize.width <= kMostPixels && resize.height <= kMostPixels &&
           within(resize.window, resize.width, resize.height) && width == resize.window.width &&
           height == resize.window.height;
}

Status read_part(const Source& source, const PartPlan& plan, std::uint8_t* rgb) {
    static thread_local PartReader reader;
    try {
        return reader.read(source, plan, rgb);
    } catch (const std::bad_alloc&) {
        return Status::bad("there is not enough memory to decode it");
    }
}

}  // namespace feedline
