#include "jpeg.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include <jerror.h>

namespace feedline {
namespace {

constexpr int kMostScans =
    500;                        // a few kilobytes can contain thousands, and each takes a pass over the whole image
constexpr int kMargin = 2;      // columns beyond the region that fancy upsampling reads
constexpr int kNarrowest = 48;  // libjpeg upsamples narrower regions differently

// Warnings about parameters that change nothing.
bool is_harmless(int warning) {
    return warning == JWRN_NOT_SEQUENTIAL || warning == JWRN_ADOBE_XFORM || warning == JWRN_JFIF_MAJOR;
}

// First members of libjpeg's entropy decoders, in all versions since 6; the header that declares them is rarely
// installed. quick.cpp verifies the layout at run time.
struct EntropyDecoder {
    void (*start_pass)(j_decompress_ptr);
    boolean (*decode_mcu)(j_decompress_ptr, JBLOCKROW*);
};

}  // namespace

template <class Call>
bool JpegReader::guarded(Call call) {
    if (setjmp(errors_.escape)) return false;
    call();
    return true;
}

JpegReader::JpegReader() : decoder_(), errors_(), input_(), progress_() {
    decoder_.err = jpeg_std_error(&errors_.base);
    errors_.base.error_exit = fail;
    errors_.base.emit_message = warn;
    errors_.base.output_message = say_nothing;
    input_.base.init_source = nothing;
    input_.base.fill_input_buffer = fill;
    input_.base.skip_input_data = skip;
    input_.base.resync_to_restart = jpeg_resync_to_restart;
    input_.base.term_source = nothing;
    progress_.progress_monitor = count_scans;
}

JpegReader::~JpegReader() { jpeg_destroy_decompress(&decoder_); }

bool JpegReader::open(Bytes jpeg) {
    quick_ = gave_up_ = hopeless_ = false;
    errors_.text[0] = 0;
    errors_.base.num_warnings = 0;
    return guarded([&] {
        // libjpeg keeps tables from one image to the next: an image without some tables would be decoded with those of
        // another image.
        jpeg_destroy_decompress(&decoder_);
        jpeg_create_decompress(&decoder_);
        decoder_.progress = &progress_;
        decoder_.src = &input_.base;
        input_.base.next_input_byte = jpeg.data;
        input_.base.bytes_in_buffer = jpeg.size;
        input_.decoding = false;
        decoder_.client_data = this;
        jpeg_read_header(&decoder_, TRUE);
    });
}

bool JpegReader::start(int scale, J_COLOR_SPACE space, bool quick) {
    return guarded([&] {
        decoder_.scale_num = 1;
        decoder_.scale_denom = static_cast<unsigned>(scale);
        decoder_.out_color_space = space;
        decoder_.dct_method = JDCT_ISLOW;
        decoder_.do_fancy_upsampling = TRUE;
        input_.decoding = true;
        jpeg_start_decompress(&decoder_);
        if (quick && !jpeg_has_multiple_scans(&decoder_)) take_over();
    });
}

bool JpegReader::region(int left, int right, int top, int& first) {
    return guarded([&] {
        const int whole = scaled_width();
        const int from = std::max(0, std::min(left - kMargin, whole - kNarrowest));
        const int to = std::min(whole, std::max(right + kMargin, from + kNarrowest));
        JDIMENSION column = static_cast<JDIMENSION>(from), width = static_cast<JDIMENSION>(to - from);
        if (to - from < whole) {
            jpeg_crop_scanline(&decoder_, &column, &width);
            widen_components();
        }
        first = to - from < whole ? static_cast<int>(column) : 0;
        if (quick_) scan_.window(decoder_, first, line_width());
        if (top > 0) jpeg_skip_scanlines(&decoder_, static_cast<JDIMENSION>(top));
    });
}

// jpeg_crop_scanline derives the width of each component from its sampling alone. At a reduced scale libjpeg decodes
// coarse components with larger blocks than fine ones: with 4:1:0 or 2x4 sampling it would then interpolate only the
// first part of each line, and leave the rest of its buffer as it was.
void JpegReader::widen_components() {
    const long per = static_cast<long>(decoder_.max_h_samp_factor) * least_side(decoder_);
    for (int i = 0; i < decoder_.num_components; i++) {
        jpeg_component_info& what = decoder_.comp_info[i];
        const long wide = static_cast<long>(line_width()) * what.h_samp_factor * side_of(what);
        what.downsampled_width = static_cast<JDIMENSION>((wide + per - 1) / per);
    }
}

int JpegReader::read(std::uint8_t* const* lines, int most) {
    JSAMPROW rows[kLines];
    std::copy(lines, lines + most, rows);
    int got = 0;
    const bool fine =
        guarded([&] { got = static_cast<int>(jpeg_read_scanlines(&decoder_, rows, static_cast<JDIMENSION>(most))); });
    return fine ? got : 0;
}

void JpegReader::take_over() {
    quick_ = scan_.begin(decoder_);
    if (!quick_) return;
    reinterpret_cast<EntropyDecoder*>(decoder_.entropy)->decode_mcu = decode_mcu;
}

boolean JpegReader::decode_mcu(j_decompress_ptr decoder, JBLOCKROW* blocks) {
    JpegReader& reader = *static_cast<JpegReader*>(decoder->client_data);
    if (reader.scan_.decode(blocks)) return TRUE;
    reader.gave_up_ = true;
    std::longjmp(reader.errors_.escape, 1);
}

bool JpegReader::finish() {
    const bool regular = errors_.base.num_warnings == 0 && rest_is_regular();
    gave_up_ = quick_ && !regular;
    if (!regular && !quick_) explain();
    stop();
    return regular;
}

void JpegReader::stop() {
    if (decoder_.mem) jpeg_abort_decompress(&decoder_);
}

// Decodes the rest as well, for libjpeg's message.
void JpegReader::explain() {
    std::vector<std::uint8_t> line(static_cast<std::size_t>(line_width()) * decoder_.output_components);
    JSAMPROW row = line.data();
    guarded([&] {
        // Not skipped: after lines that were read, libjpeg-turbo's skip may never end if components are sampled 1x2 and
        // 1x4.
        while (decoder_.output_scanline < decoder_.output_height) {
            if (jpeg_read_scanlines(&decoder_, &row, 1) == 0) return;
        }
        jpeg_finish_decompress(&decoder_);
    });
}

// libjpeg has read files of several scans to their end. Of other files, the rest is not decoded, but checked.
bool JpegReader::rest_is_regular() {
    if (jpeg_has_multiple_scans(&decoder_)) return is_refined();
    const std::int64_t rows_of_mcus = decoder_.comps_in_scan == 1 ? decoder_.cur_comp_info[0]->height_in_blocks
                                                                  : decoder_.MCU_rows_in_scan;
    const std::int64_t all = restarts_before(rows_of_mcus * decoder_.MCUs_per_row);
    const std::uint8_t* const end = decoder_.src->next_input_byte + decoder_.src->bytes_in_buffer;
    if (quick_) return ends_regularly(scan_.at(), end, scan_.restarts(), all - scan_.restarts());
    const std::int64_t per_row = decoder_.comps_in_scan == 1 ? decoder_.cur_comp_info[0]->v_samp_factor : 1;
    const std::int64_t rows = std::min(rows_of_mcus, per_row * decoder_.input_iMCU_row);
    std::int64_t before = restarts_before(rows * decoder_.MCUs_per_row);
    if (decoder_.unread_marker == JPEG_EOI) return before == all;
    if (decoder_.unread_marker && decoder_.unread_marker != JPEG_RST0 + (before++ & 7)) return false;
    return ends_regularly(decoder_.src->next_input_byte, end, before, all - before);
}

// libjpeg smooths progressive images with missing scans, and the result depends on its version.
bool JpegReader::is_refined() const {
    if (!decoder_.progressive_mode) return true;
    const int* const bits = decoder_.coef_bits[0];
    return std::all_of(bits, bits + decoder_.num_components * DCTSIZE2, [](int left) { return left == 0; });
}

// Returns the number of restart markers before the last of that many MCUs.
std::int64_t JpegReader::restarts_before(std::int64_t mcus) const {
    return decoder_.restart_interval && mcus > 0 ? (mcus - 1) / decoder_.restart_interval : 0;
}

JpegReader::Input& JpegReader::input_of(j_common_ptr decoder) {
    return *reinterpret_cast<Input*>(reinterpret_cast<j_decompress_ptr>(decoder)->src);
}

void JpegReader::fail(j_common_ptr decoder) {
    Errors& errors = *reinterpret_cast<Errors*>(decoder->err);
    const char intro[] = "its data are damaged (libjpeg: ";
    std::strcpy(errors.text, intro);
    errors.base.format_message(decoder, errors.text + sizeof(intro) - 1);
    std::strcat(errors.text, ")");
    std::longjmp(errors.escape, 1);
}

void JpegReader::fail_short(j_common_ptr decoder, const char* where) {
    Errors& errors = *reinterpret_cast<Errors*>(decoder->err);
    std::snprintf(errors.text, sizeof(errors.text), "it is truncated: it ends %s", where);
    std::longjmp(errors.escape, 1);
}

void JpegReader::warn(j_common_ptr decoder, int level) {
    if (level < 0 && !is_harmless(decoder->err->msg_code)) decoder->err->num_warnings++;
}

// Called when the bytes run out. Pillow then waits for more bytes, even if libjpeg only reads ahead, and there are
// none.
boolean JpegReader::fill(j_decompress_ptr decoder) {
    const auto common = reinterpret_cast<j_common_ptr>(decoder);
    if (!input_of(common).decoding) fail_short(common, "within its header");
    if (decoder->arith_code || jpeg_has_multiple_scans(decoder)) fail_short(common, "before its last scan does");
    fail_short(common, "before its image does");
}

void JpegReader::skip(j_decompress_ptr decoder, long nbytes) {
    jpeg_source_mgr& source = *decoder->src;
    if (nbytes <= 0) return;
    if (static_cast<std::size_t>(nbytes) > source.bytes_in_buffer) fill(decoder);
    source.next_input_byte += nbytes;
    source.bytes_in_buffer -= static_cast<std::size_t>(nbytes);
}

void JpegReader::count_scans(j_common_ptr decoder) {
    if (reinterpret_cast<j_decompress_ptr>(decoder)->input_scan_number <= kMostScans) return;
    Errors& errors = *reinterpret_cast<Errors*>(decoder->err);
    static_cast<JpegReader*>(decoder->client_data)->hopeless_ = true;
    std::snprintf(errors.text, sizeof(errors.text), "it has more than %d scans, as only files made to waste time have",
                  kMostScans);
    std::longjmp(errors.escape, 1);
}

}  // namespace feedline
