#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "grid.h"
#include "jpeg.h"
#include "scan.h"
#include "status.h"

namespace feedline {

// Takes the lines of a region from the top down, pixels of four bytes; `restart` when they come from the top again.
class Samples {
public:
    virtual void restart() = 0;
    virtual void take(const std::uint8_t* line) = 0;

protected:
    ~Samples() = default;
};

// A JPEG, whose header has been read, and what is wanted of it: `part` of the picture at 1/scale. With the lengths of
// its restart intervals, where known, only those that the part touches are decoded.
struct Region {
    Bytes jpeg;
    int width, height;
    int scale;
    Window part;
    const std::uint16_t* grid;
    std::size_t intervals;
    bool quick;  // as JpegReader::start; whether it helps or not, the pixels are the same
};

// Decodes regions of JPEGs, one after another, with memory that is used again.
class RegionDecoder {
public:
    // Lines may be read up to `overrun` pixels behind their end.
    Status decode(const Region& region, int overrun, Samples& samples);

    // The whole picture at full scale, as RGB without gaps.
    Status decode_whole(Bytes jpeg, int width, int height, bool quick, std::uint8_t* rgb);

private:
    bool open(const Region& region);
    bool assembled(const Region& region, Region& smaller);
    bool drawn(const Region& region, int overrun, Samples& samples);
    bool lines(const Region& region, int overrun, Samples& samples);
    bool whole(const Region& region, std::uint8_t* rgb);

    JpegReader jpeg_;
    std::vector<std::uint8_t> lines_, assembled_;
    const char* problem_ = "";
};

}  // namespace feedline
