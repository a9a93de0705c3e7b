// libFuzzer target for all code that reads images: header, geometry, region, resize, grid. The quick entropy decoder
// must give libjpeg's results. The last bytes of an input are options for the rest; `scripts/fuzz` builds and runs
// this, with libFuzzer or with standalone.cpp.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../image/intact.h"
#include "../image/part.h"
#include "../image/row.h"

namespace {

using namespace feedline;

constexpr std::int64_t kLimit = 1 << 20;  // pixels: keeps inputs fast
constexpr std::size_t kOptions = 24;
constexpr int kMeetings = 4;  // times that tables are seen before the quick decoder uses its fastest path

// Options of one input; the fuzzer varies them, too.
struct Options {
    std::uint8_t law, height, width, switches, number;
    std::uint8_t bounds[3];
    std::uint64_t key;
    std::uint16_t lengths[4];
};
static_assert(sizeof(Options) == kOptions);

// Most files have the tables of a seed, which were seen before.
int meetings_of(const Options& options) { return options.law & 0x38 ? 1 : kMeetings; }

Plan plan_of(const Options& options) {
    Plan plan{};
    plan.layout = {options.width % 96 + 1, options.height % 96 + 1, (options.switches & 1) != 0,
                   static_cast<Number>(options.number % 3)};
    plan.law.kind = static_cast<Kind>(options.law % 3);
    plan.law.scale[0] = (options.bounds[0] + 1) / 512.0;
    plan.law.scale[1] = plan.law.scale[0] + 0.5;
    plan.law.ratio[0] = (options.bounds[1] + 1) / 128.0;
    plan.law.ratio[1] = plan.law.ratio[0] * 2;
    plan.law.shorter = options.bounds[2] + 1;
    plan.flip = (options.switches & 2) ? 1 : 0;
    plan.bicubic = options.switches & 4;
    plan.oriented = options.switches & 8;
    plan.scaled = options.switches & 16;
    plan.torchs = options.number & 64;
    plan.passes = &passes_of((options.switches & 32) ? 1 + (options.law >> 7) : kAllSets);
    return plan;
}

// Place of a row in a small image; some places leave it.
Placement placement_of(const Options& options) {
    Placement placed;
    const auto number = [&](int byte) { return static_cast<int>(options.key >> 8 * byte & 255); };
    placed.geometry.box = {options.lengths[0] % 40 - 2, options.lengths[1] % 40 - 2, options.lengths[2] % 40,
                           options.lengths[3] % 40};
    placed.geometry.flip = options.switches & 2;
    placed.geometry.full = {number(0) + 1, number(1) + 1};
    placed.geometry.left = number(2) % 128 - 64;
    placed.geometry.top = number(3) % 128 - 64;
    placed.upended = number(4) & 1;
    return placed;
}

using Memory = std::vector<std::uint8_t>;

void must(bool holds) {
    if (!holds) __builtin_trap();
}

bool is_left_to_pillow(const Status& status) { return status.fine() || status.verdict == Verdict::foreign; }

// Calls `read(quick, memory)`, which returns a Status, both ways; the results must be equal.
template <class Read>
void both_ways(std::size_t nbytes, int meetings, Read read) {
    Memory expected(nbytes);
    const Status status = read(false, expected.data());
    for (int i = 0; i < meetings; i++) {
        Memory row(nbytes);
        const Status quick = read(true, row.data());
        must(quick.verdict == status.verdict && quick.number == status.number && quick.text == status.text);
        must(!status.fine() || row == expected);
    }
}

// Part and resize of an image, within its bounds.
PartPlan part_of(const Options& options, const Intact& image) {
    PartPlan plan{image, 1 << options.law % 4, {0, 0, 0, 0}, (options.switches & 1) != 0, {}};
    const int width = (image.width + plan.scale - 1) / plan.scale, height = (image.height + plan.scale - 1) / plan.scale;
    const int x = options.lengths[0] % width, y = options.lengths[1] % height;
    plan.part = {x, y, options.lengths[2] % (width - x) + 1, options.lengths[3] % (height - y) + 1};
    Resize& resize = plan.resize;
    resize.filter = static_cast<Filter>(options.number % 5 + 1);
    resize.left = plan.part.width * (options.bounds[0] / 512.0);
    resize.top = plan.part.height * (options.bounds[1] / 512.0);
    resize.right = plan.part.width;
    resize.bottom = plan.part.height;
    resize.width = options.width % 96 + 1;
    resize.height = options.height % 96 + 1;
    resize.window = {0, 0, resize.width, resize.height};
    resize.flip = options.switches & 2;
    resize.across_first = options.switches & 4;
    return plan;
}

// Intact files decode without an error, as a whole and in part.
void intact_decodes(const Source& source, const Options& options) {
    Intact image;
    if (!is_intact(source.bytes, image) || std::int64_t{image.width} * image.height > kLimit) return;
    const PartPlan plan = part_of(options, image);
    const Window& shown = plan.resizes ? plan.resize.window : plan.part;
    must(plan.fits(source, shown.width, shown.height));
    Memory part(3 * static_cast<std::size_t>(shown.width) * static_cast<std::size_t>(shown.height));
    // Codes that only cause a warning of libjpeg are left to Pillow. No other failure is allowed here.
    must(is_left_to_pillow(read_part(source, plan, part.data())));
    both_ways(3 * static_cast<std::size_t>(image.width) * static_cast<std::size_t>(image.height), meetings_of(options),
              [&](bool quick, std::uint8_t* rgb) {
                  const Status status = read_whole(source.bytes, quick, rgb);
                  must(is_left_to_pillow(status));
                  return status;
              });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < kOptions) return 0;
    Options options;
    std::memcpy(&options, data + size - kOptions, kOptions);
    const std::vector<std::uint8_t> jpeg(data, data + size - kOptions);  // own memory: reads beyond it are detected
    Plan plan = plan_of(options);
    Source source;
    source.bytes = {jpeg.data(), jpeg.size()};
    std::vector<std::uint16_t> grid;
    if (options.switches & 64) {
        for (int i = 0; i < 256; i++) grid.push_back(options.lengths[i % 4]);
        source.grid = grid.data();
        source.intervals = grid.size();
    }
    both_ways(plan.layout.nbytes(), meetings_of(options), [&](bool quick, std::uint8_t* row) {
        plan.quick = quick;
        if (options.number & 128) return read_placed(plan, plan.layout, source, placement_of(options), kLimit, row);
        return read_row(plan, source, options.key, kLimit, row);
    });
    intact_decodes(source, options);
    Header header;
    if (!read_header(source, kLimit, header).fine() || !(options.switches & 128)) return 0;
    const std::size_t pixels = static_cast<std::size_t>(header.width) * static_cast<std::size_t>(header.height);
    both_ways(3 * pixels, meetings_of(options), [&](bool quick, std::uint8_t* rgb) { return read_whole(source.bytes, quick, rgb); });
    return 0;
}
