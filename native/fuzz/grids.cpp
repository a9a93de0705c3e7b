// libFuzzer target for grid-packed JPEGs: rewriting, measuring, and parts of files whose lengths may be wrong.
// Rewritten files have the pixels of the original, and so has each part. The last bytes of an input are options.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "../image/grid.h"
#include "../image/intact.h"
#include "../image/row.h"

namespace {

using namespace feedline;
using Memory = std::vector<std::uint8_t>;
using Lengths = std::vector<std::uint16_t>;

constexpr std::int64_t kLimit = 1 << 20;  // pixels: keeps inputs fast
constexpr std::size_t kOptions = 24;

struct Options {
    std::uint8_t switches, denominator, damages, unused;
    std::uint16_t box[4];
    std::uint16_t numbers[6];
};
static_assert(sizeof(Options) == kOptions);

void must(bool holds) {
    if (!holds) __builtin_trap();
}

// Lengths between the restart markers of a file, even of a file with other faults.
Lengths lengths_of(const Memory& jpeg) {
    Lengths lengths;
    std::size_t start = 0;
    for (std::size_t at = 0; at + 4 <= jpeg.size(); at++) {
        if (jpeg[at] != 0xFF) continue;
        const std::uint8_t marker = jpeg[at + 1];
        if (marker == 0xDA) start = at + 2 + (static_cast<std::size_t>(jpeg[at + 2]) << 8 | jpeg[at + 3]);
        if ((marker & 0xF8) != 0xD0 || start == 0 || start > at) continue;
        lengths.push_back(static_cast<std::uint16_t>(at + 2 - start));
        start = at + 2;
    }
    if (start < jpeg.size()) lengths.push_back(static_cast<std::uint16_t>(jpeg.size() - start));
    return lengths;
}

// Bytes moved from one interval to another keep the sum right.
void damage(Lengths& lengths, const Options& options) {
    const std::size_t count = lengths.size();
    if (count == 0) return;
    for (unsigned i = 0; i < options.damages % 3u; i++) {
        const std::uint16_t moved = options.numbers[5] % (i ? 65536u : 4u);
        lengths[options.numbers[2 * i] % count] += moved;
        lengths[options.numbers[2 * i + 1] % count] -= moved;
    }
    if (options.damages & 0x40) lengths.resize(count - 1);
    if (options.damages & 0x80) lengths[options.numbers[4] % count] = options.numbers[5];
}

Window window_of(const Options& options, int width, int height) {
    const int x = options.box[0] % width, y = options.box[1] % height;
    return {x, y, options.box[2] % (width - x) + 1, options.box[3] % (height - y) + 1};
}

// Boxes with any numbers, valid or not.
Window wild_window(const Options& options) {
    const auto side = [](std::uint16_t number) { return static_cast<std::int16_t>(number) * (1 << number % 17); };
    return {side(options.box[0]), side(options.box[1]), side(options.box[2]), side(options.box[3])};
}

Memory decoded(const Memory& jpeg, const Header& header) {
    Memory pixels(3 * static_cast<std::size_t>(header.width) * static_cast<std::size_t>(header.height));
    if (!read_whole({jpeg.data(), jpeg.size()}, true, pixels.data()).fine()) pixels.clear();
    return pixels;
}

bool header_of(const Memory& jpeg, Header& header) {
    Source source;
    source.bytes = {jpeg.data(), jpeg.size()};
    return read_header(source, kLimit, header).fine();
}

// The wanted pixels of a part equal those of the whole image.
void must_show(const Memory& whole, const Header& header, const Memory& part, const Window& wanted, const Window& got) {
    Header small;
    must(header_of(part, small) && small.width == got.width && small.height == got.height);
    const Memory pixels = decoded(part, small);
    must(!pixels.empty());
    for (int y = wanted.y; y < wanted.y + wanted.height; y++) {
        const std::size_t row = static_cast<std::size_t>(y) * static_cast<std::size_t>(header.width);
        const std::size_t part_row = static_cast<std::size_t>(y - got.y) * static_cast<std::size_t>(got.width);
        must(std::memcmp(&whole[3 * (row + static_cast<std::size_t>(wanted.x))],
                         &pixels[3 * (part_row + static_cast<std::size_t>(wanted.x - got.x))],
                         3 * static_cast<std::size_t>(wanted.width)) == 0);
    }
}

void assemble_hostile(const Memory& jpeg, const Options& options) {
    Lengths lengths = lengths_of(jpeg);
    damage(lengths, options);
    Memory part;
    Window got{};
    Header header;
    const bool known = header_of(jpeg, header);
    const Window box = known && (options.switches & 1) ? window_of(options, header.width, header.height) : wild_window(options);
    if (!assemble(jpeg.data(), jpeg.size(), lengths.data(), lengths.size(), box, part, got, options.denominator % 10)) return;
    Header small;
    if (header_of(part, small)) decoded(part, small);
}

void rewrite_and_compare(const Memory& jpeg, const Options& options) {
    Memory grid, part;
    Lengths lengths, measured;
    std::string why;
    if (!rewrite(jpeg.data(), jpeg.size(), grid, lengths, why)) return must(!why.empty());
    must(measure(grid.data(), grid.size(), measured) && measured == lengths);
    Header header, first;
    if (!header_of(grid, header) || !(options.switches & 2)) return;
    const Memory whole = decoded(grid, header);
    if (whole.empty()) return;
    if (header_of(jpeg, first)) {
        const Memory before = decoded(jpeg, first);
        must(before.empty() || before == whole);
    }
    Window got{};
    const Window wanted = window_of(options, header.width, header.height);
    if (assemble(grid.data(), grid.size(), lengths.data(), lengths.size(), wanted, part, got))
        must_show(whole, header, part, wanted, got);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < kOptions) return 0;
    Options options;
    std::memcpy(&options, data + size - kOptions, kOptions);
    const Memory jpeg(data, data + size - kOptions);  // own memory: reads beyond it are detected
    Lengths measured;
    measure(jpeg.data(), jpeg.size(), measured);
    assemble_hostile(jpeg, options);
    rewrite_and_compare(jpeg, options);
    return 0;
}
