#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>

#include <jpeglib.h>

#include "bits.h"
#include "code_cache.h"
#include "codes.h"

namespace feedline {

// Pixels per block of a component, and of the finest one. libjpeg-turbo is built with either set of names.
#if JPEG_LIB_VERSION >= 70
inline int side_of(const jpeg_component_info& what) { return std::max(what.DCT_h_scaled_size, what.DCT_v_scaled_size); }
inline int least_side(const jpeg_decompress_struct& info) { return info.min_DCT_h_scaled_size; }
#else
inline int side_of(const jpeg_component_info& what) { return what.DCT_scaled_size; }
inline int least_side(const jpeg_decompress_struct& info) { return info.min_DCT_scaled_size; }
#endif

// Decodes the entropy-coded data of a baseline JPEG for libjpeg, two to three times as fast, up to the first irregular
// data.
class ScanDecoder {
public:
    // Begins the scan whose header libjpeg has just read. False for scans that libjpeg must decode: other kinds, or
    // scans too short to make up for the cost of look-up tables.
    bool begin(const jpeg_decompress_struct& info);

    // Limits each row of MCUs to those that show `width` columns of pixels from `left` on.
    void window(const jpeg_decompress_struct& info, int left, int width);

    // Decodes the next MCU into zeroed blocks, as libjpeg's entropy decoder does, or skips it for nullptr. False for
    // irregular data: libjpeg then has to decode the whole image.
    bool decode(JBLOCKROW* blocks) { return decoder_(*this, blocks); }

    // Position in the data: all data before it were regular.
    const std::uint8_t* at() const { return reader_.at; }
    std::int64_t restarts() const { return restarts_; }  // so far

private:
    // A block of an MCU.
    struct Block {
        const DcCodes* dc;
        const AcCodes* ac;
        int component;
        bool flat;  // only its mean is needed
    };

    using Decoder = bool (*)(ScanDecoder&, JBLOCKROW*);
    static Decoder fastest_decoder();

    bool decode_mcu(JBLOCKROW* blocks);
    bool find_codes(const jpeg_decompress_struct& info);
    bool restart();

    const Decoder decoder_ = fastest_decoder();
    CodeCache codes_;
    BitReader reader_;
    Block blocks_[D_MAX_BLOCKS_IN_MCU];
    int means_[MAX_COMPS_IN_SCAN];
    int count_ = 0, columns_ = 0, column_ = 0, first_ = 0, last_ = 0;
    unsigned interval_ = 0, left_ = 0;
    int restarts_ = 0;
};

}  // namespace feedline
