#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>

#include <jpeglib.h>

#include "bits.h"
#include "code_cache.h"
#include "codes.h"

namespace feedline {

// Decodes the entropy-coded data of a baseline JPEG for libjpeg, two to three times as fast, and only as long as
// nothing is amiss.
class ScanDecoder {
public:
    // Begins the one scan whose header libjpeg has just read. False for one that is left to libjpeg: of another kind,
    // or so short that tables of its own do not pay.
    bool begin(const jpeg_decompress_struct& info);

    // Of each row of MCUs only those that show `width` columns of pixels from `left` on are wanted.
    void window(const jpeg_decompress_struct& info, int left, int width);

    // The next MCU: into blocks of zeros, as libjpeg's own entropy decoder does it, or past it for nullptr. False when
    // anything is not as it should be. Then all of the picture is for libjpeg, which knows what to make of it.
    bool decode(JBLOCKROW* blocks);

private:
    // A block of an MCU.
    struct Block {
        const DcCodes* dc;
        const AcCodes* ac;
        int component;
        bool flat;  // only its mean is wanted
    };

    bool find_codes(const jpeg_decompress_struct& info);
    bool restart();

    CodeCache codes_;
    BitReader reader_;
    Block blocks_[D_MAX_BLOCKS_IN_MCU];
    int means_[MAX_COMPS_IN_SCAN];
    int count_ = 0, columns_ = 0, column_ = 0, first_ = 0, last_ = 0;
    unsigned interval_ = 0, left_ = 0;
    int marker_ = 0;
};

}  // namespace feedline
