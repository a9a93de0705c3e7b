#include "region.h"

#include <algorithm>

#include "passes.h"
#include "quick.h"

namespace feedline {

Status RegionDecoder::decode(const Region& region, int overrun, Samples& samples) {
    Region smaller = region;
    // Lengths that do not match the file fail here at the latest; decode the file without them.
    if (assembled(region, smaller) && drawn(smaller, overrun, samples)) return {};
    return drawn(region, overrun, samples) ? Status{} : failure();
}

Status RegionDecoder::decode_whole(Bytes jpeg, int width, int height, bool quick, std::uint8_t* rgb) {
    Region region{jpeg, width, height, 1, {0, 0, width, height}, nullptr, 0, quick && quick_is_sound()};
    if (whole(region, rgb)) return {};
    region.quick = false;
    return jpeg_.gave_up() && whole(region, rgb) ? Status{} : failure();
}

// Pillow decides about irregular files, so that both read the same files.
Status RegionDecoder::failure() const { return jpeg_.hopeless() ? Status::bad(problem_) : Status::foreign(problem_); }

// Reads all lines from the top; again with libjpeg alone if ScanDecoder gave up.
bool RegionDecoder::drawn(const Region& region, int overrun, Samples& samples) {
    Region ordinary = region;
    ordinary.quick = false;
    samples.restart();
    if (region.quick && quick_is_sound()) {
        if (lines(region, overrun, samples)) return true;
        if (!jpeg_.gave_up()) return false;
        samples.restart();
    }
    return lines(ordinary, overrun, samples);
}

bool RegionDecoder::whole(const Region& region, std::uint8_t* rgb) {
    if (!open(region)) return false;
    problem_ = jpeg_.problem();
    if (!jpeg_.start(1, JCS_RGB, region.quick)) return false;
    const std::size_t stride = static_cast<std::size_t>(region.width) * 3;
    for (int y = 0, got = 0; y < region.height; y += got) {
        std::uint8_t* lines[JpegReader::kLines];
        const int most = std::min(JpegReader::kLines, region.height - y);
        for (int i = 0; i < most; i++) lines[i] = rgb + static_cast<std::size_t>(y + i) * stride;
        got = jpeg_.read(lines, most);
        if (got == 0) return false;
    }
    return jpeg_.finish();
}

bool RegionDecoder::open(const Region& region) {
    if (!jpeg_.open(region.jpeg)) {
        problem_ = jpeg_.problem();
        return false;
    }
    if (jpeg_.width() == region.width && jpeg_.height() == region.height) return true;
    problem_ = "it has two headers that tell different sizes";
    return false;
}

bool RegionDecoder::assembled(const Region& region, Region& smaller) {
    if (!region.grid) return false;
    const int scale = region.scale;
    const Window& part = region.part;
    Window wanted{part.x * scale, part.y * scale, part.width * scale, part.height * scale}, got;
    wanted.width = std::min(wanted.width, region.width - wanted.x);
    wanted.height = std::min(wanted.height, region.height - wanted.y);
    if (!assemble(region.jpeg.data, region.jpeg.size, region.grid, region.intervals, wanted, assembled_, got, scale))
        return false;
    if (got.x % scale || got.y % scale) return false;
    smaller.jpeg = {assembled_.data(), assembled_.size()};
    smaller.width = got.width;
    smaller.height = got.height;
    smaller.part.x -= got.x / scale;
    smaller.part.y -= got.y / scale;
    return true;
}

// libjpeg-turbo writes aligned lines without the caches, but each line is read at once. Therefore, no line is aligned.
void RegionDecoder::place(std::uint8_t* (&lines)[JpegReader::kLines], std::size_t pixels) {
    constexpr std::size_t kAligned = 64, kAside = 8;
    const std::size_t stride = (pixels * kPixel + kAligned - 1) / kAligned * kAligned;
    const std::size_t nbytes = JpegReader::kLines * stride + kAligned + kAside;
    if (lines_.size() < nbytes) lines_.resize(nbytes);
    const auto from = reinterpret_cast<std::uintptr_t>(lines_.data()) % kAligned;
    for (std::size_t i = 0; i < JpegReader::kLines; i++)
        lines[i] = lines_.data() + (kAligned - from) + kAside + i * stride;
}

bool RegionDecoder::lines(const Region& region, int overrun, Samples& samples) {
    const Window& part = region.part;
    int first = 0;
    if (!open(region)) return false;
    problem_ = jpeg_.problem();
    if (!jpeg_.start(region.scale, JCS_EXT_RGBX, region.quick)) return false;
    if (part.x + part.width > jpeg_.scaled_width() || part.y + part.height > jpeg_.scaled_height()) return false;
    if (!jpeg_.region(part.x, part.x + part.width, part.y, first)) return false;
    std::uint8_t* lines[JpegReader::kLines];
    place(lines, static_cast<std::size_t>(jpeg_.line_width()) + static_cast<std::size_t>(overrun));
    for (int left = part.height; left > 0;) {
        const int got = jpeg_.read(lines, std::min(left, JpegReader::kLines));
        if (got == 0) return false;
        for (int i = 0; i < got; i++) samples.take(lines[i] + static_cast<std::size_t>(part.x - first) * kPixel);
        left -= got;
    }
    return jpeg_.finish();
}

}  // namespace feedline
