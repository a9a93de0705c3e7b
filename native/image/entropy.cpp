#include "entropy.h"

#include <algorithm>
#include <iterator>

namespace feedline {
namespace {

bool is_ours(const jpeg_decompress_struct& info) {
    return !info.progressive_mode && !info.arith_code && info.data_precision == 8 &&
           info.comps_in_scan == info.num_components && info.blocks_in_MCU <= D_MAX_BLOCKS_IN_MCU;
}

}  // namespace

bool ScanDecoder::begin(const jpeg_decompress_struct& info) {
    if (!is_ours(info) || !find_codes(info)) return false;
    const jpeg_source_mgr& source = *info.src;
    reader_ = BitReader{source.next_input_byte, source.next_input_byte + source.bytes_in_buffer};
    columns_ = static_cast<int>(info.MCUs_per_row);
    column_ = first_ = 0;
    last_ = columns_ - 1;
    interval_ = left_ = info.restart_interval;
    restarts_ = 0;
    std::fill(std::begin(means_), std::end(means_), 0);
    return true;
}

// Looks up all tables even if one is missing: this counts how often those of short scans are seen.
bool ScanDecoder::find_codes(const jpeg_decompress_struct& info) {
    const std::size_t nbytes = info.src->bytes_in_buffer;
    const DcCodes* dc[NUM_HUFF_TBLS] = {};
    const AcCodes* ac[NUM_HUFF_TBLS] = {};
    bool met_dc[NUM_HUFF_TBLS] = {}, met_ac[NUM_HUFF_TBLS] = {}, all = true;
    count_ = info.blocks_in_MCU;
    for (int i = 0; i < count_; i++) {
        const int component = info.MCU_membership[i];
        const jpeg_component_info& what = *info.cur_comp_info[component];
        const int d = what.dc_tbl_no, a = what.ac_tbl_no;
        if (std::max(d, a) >= NUM_HUFF_TBLS) return false;
        if (!met_dc[d]) dc[d] = codes_.dc(info.dc_huff_tbl_ptrs[d], nbytes);
        if (!met_ac[a]) ac[a] = codes_.ac(info.ac_huff_tbl_ptrs[a], nbytes);
        met_dc[d] = met_ac[a] = true;
        blocks_[i] = {dc[d], ac[a], component, side_of(what) == 1};
        all = all && dc[d] && ac[a];
    }
    return all;
}

void ScanDecoder::window(const jpeg_decompress_struct& info, int left, int width) {
    // A single component has one block per MCU, whatever its sampling.
    const int wide = least_side(info) * (info.comps_in_scan == 1 ? 1 : info.max_h_samp_factor);
    first_ = left / wide;
    last_ = (left + width - 1) / wide;
}

bool ScanDecoder::restart() {
    if (!reader_.restart(restarts_ & 7)) return false;
    restarts_++;
    left_ = interval_;
    std::fill(std::begin(means_), std::end(means_), 0);
    return true;
}

FEEDLINE_INLINE inline bool ScanDecoder::decode_mcu(JBLOCKROW* blocks) {
    if (interval_) {
        if (left_ == 0 && !restart()) return false;
        left_--;
    }
    const bool wanted = blocks && column_ >= first_ && column_ <= last_;
    if (++column_ == columns_) column_ = 0;
    BitReader reader = reader_;
    for (int i = 0; i < count_; i++) {
        const Block& block = blocks_[i];
        int difference;
        reader.refill();
        if (!block.dc->read(reader, difference)) return false;
        const int mean = means_[block.component] += difference;
        if (mean != static_cast<JCOEF>(mean)) return false;
        if (wanted) (*blocks[i])[0] = static_cast<JCOEF>(mean);
        if (!(wanted && !block.flat ? block.ac->read(reader, *blocks[i]) : block.ac->pass(reader))) return false;
    }
    reader_ = reader;
    return !reader.overdrawn();
}

// Shifts by a number in a register are half of the work, and take half the time with BMI2.
ScanDecoder::Decoder ScanDecoder::fastest_decoder() {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("bmi2"))
        return [](ScanDecoder& scan, JBLOCKROW* blocks) __attribute__((target("bmi2"))) {
            return scan.decode_mcu(blocks);
        };
#endif
    return [](ScanDecoder& scan, JBLOCKROW* blocks) { return scan.decode_mcu(blocks); };
}

}  // namespace feedline
