// libFuzzer's target for everything that reads pictures from outside: header, geometry, region, resize, grid.
// The last bytes of an input say what is done with the rest of it; `scripts/fuzz` builds and runs this.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../image/row.h"

namespace {

using namespace feedline;

constexpr std::int64_t kLimit = 1 << 20;  // pixels: so that inputs are quick
constexpr std::size_t kOptions = 24;

// The options of one input, which the fuzzer varies like everything else.
struct Options {
    std::uint8_t law, height, width, switches, number;
    std::uint8_t bounds[3];
    std::uint64_t key;
    std::uint16_t lengths[4];
};
static_assert(sizeof(Options) == kOptions);

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
    plan.passes = (options.switches & 32) ? &plain_passes : &fastest_passes();
    return plan;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < kOptions) return 0;
    Options options;
    std::memcpy(&options, data + size - kOptions, kOptions);
    const std::vector<std::uint8_t> jpeg(data, data + size - kOptions);  // of its own, so that reads beyond it show
    const Plan plan = plan_of(options);
    Source source;
    source.bytes = {jpeg.data(), jpeg.size()};
    std::vector<std::uint16_t> grid;
    if (options.switches & 64) {
        for (int i = 0; i < 256; i++) grid.push_back(options.lengths[i % 4]);
        source.grid = grid.data();
        source.intervals = grid.size();
    }
    std::vector<std::uint8_t> row(plan.layout.nbytes());
    read_row(plan, source, options.key, kLimit, row.data());
    Header header;
    if (read_header(source, kLimit, header).fine() && (options.switches & 128)) {
        std::vector<std::uint8_t> whole(std::size_t{3} * static_cast<std::size_t>(header.width) *
                                        static_cast<std::size_t>(header.height));
        read_whole(source.bytes, whole.data());
    }
    return 0;
}
