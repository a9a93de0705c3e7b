#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "grid.h"
#include "jpeg.h"
#include "scan.h"
#include "status.h"

namespace feedline {

// Receives the lines of a region from the top down, with pixels of four bytes; `restart` announces a new start at the
// top.
class Samples {
public:
    virtual void restart() = 0;
    virtual void take(const std::uint8_t* line) = 0;

protected:
    ~Samples() = default;
};

// A JPEG whose header has been read, and the region to decode: `part` of the image at 1/scale. If the lengths of its
// restart intervals are known, only those that the part touches are decoded.
struct Region {
    Bytes jpeg;
    int width, height;
    int scale;
    Window part;
    const std::uint16_t* grid;
    std::size_t intervals;
    bool quick;  // as in JpegReader::start; the pixels are the same
};

// Decodes regions of JPEGs with reused memory.
class RegionDecoder {
public:
    // Lines may be read up to `overrun` pixels past their end.
    Status decode(const Region& region, int overrun, Samples& samples);

    // Decodes the whole image at full scale to contiguous RGB.
    Status decode_whole(Bytes jpeg, int width, int height, bool quick, std::uint8_t* rgb);

private:
    Status failure() const;
    bool open(const Region& region);
    bool assembled(const Region& region, Region& smaller);
    bool drawn(const Region& region, int overrun, Samples& samples);
    bool lines(const Region& region, int overrun, Samples& samples);
    void place(std::uint8_t* (&lines)[JpegReader::kLines], std::size_t pixels);
    bool whole(const Region& region, std::uint8_t* rgb);

    JpegReader jpeg_;
    std::vector<std::uint8_t> lines_, assembled_;
    const char* problem_ = "";
};

}  // namespace feedline
