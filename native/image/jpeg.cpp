#include "jpeg.h"

#include <algorithm>
#include <cstring>

#include <jerror.h>

namespace feedline {
namespace {

constexpr int kMostScans =
    500;                        // a few kilobytes can hold thousands, and each costs a pass over the whole image
constexpr int kMargin = 2;      // columns beyond the region that fancy upsampling reads
constexpr int kNarrowest = 48;  // libjpeg upsamples narrower regions differently

const JOCTET kEnd[] = {0xFF, JPEG_EOI};

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
    input_.base.resync_to_restart = resync;
    input_.base.term_source = nothing;
    progress_.progress_monitor = count_scans;
}

JpegReader::~JpegReader() { jpeg_destroy_decompress(&decoder_); }

bool JpegReader::open(Bytes jpeg) {
    quick_ = gave_up_ = false;
    return guarded([&] {
        // libjpeg keeps tables from one image to the next: an image that lacks some would be decoded with another's.
        jpeg_destroy_decompress(&decoder_);
        jpeg_create_decompress(&decoder_);
        decoder_.progress = &progress_;
        decoder_.src = &input_.base;
        input_.base.next_input_byte = jpeg.data;
        input_.base.bytes_in_buffer = jpeg.size;
        input_.decoding = input_.ended = false;
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
    decoder_.client_data = this;
    reinterpret_cast<EntropyDecoder*>(decoder_.entropy)->decode_mcu = decode_mcu;
}

boolean JpegReader::decode_mcu(j_decompress_ptr decoder, JBLOCKROW* blocks) {
    JpegReader& reader = *static_cast<JpegReader*>(decoder->client_data);
    if (reader.scan_.decode(blocks)) return TRUE;
    reader.gave_up_ = true;
    std::longjmp(reader.errors_.escape, 1);
}

void JpegReader::stop() {
    if (decoder_.mem) jpeg_abort_decompress(&decoder_);
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

// libjpeg replaces missing data by zero bits and warns; this distinguishes truncation from damage within the file.
void JpegReader::warn(j_common_ptr decoder, int level) {
    if (level < 0 && decoder->err->msg_code == JWRN_HIT_MARKER && input_of(decoder).ended)
        fail_short(decoder, "before the part of the picture that is wanted");
}

// Called when the bytes run out. libjpeg reads ahead, so the end alone is not an error while it decodes a single scan
// of Huffman codes: it gets an end marker, and `warn` is called if bits were missing.
boolean JpegReader::fill(j_decompress_ptr decoder) {
    const auto common = reinterpret_cast<j_common_ptr>(decoder);
    Input& input = input_of(common);
    if (!input.decoding) fail_short(common, "within its header");
    if (decoder->arith_code || jpeg_has_multiple_scans(decoder)) fail_short(common, "before its last scan does");
    input.ended = true;
    input.base.next_input_byte = kEnd;
    input.base.bytes_in_buffer = sizeof(kEnd);
    return TRUE;
}

void JpegReader::skip(j_decompress_ptr decoder, long nbytes) {
    jpeg_source_mgr& source = *decoder->src;
    if (nbytes <= 0) return;
    if (static_cast<std::size_t>(nbytes) > source.bytes_in_buffer) {
        fill(decoder);
        return;
    }
    source.next_input_byte += nbytes;
    source.bytes_in_buffer -= static_cast<std::size_t>(nbytes);
}

boolean JpegReader::resync(j_decompress_ptr decoder, int marker) {
    const auto common = reinterpret_cast<j_common_ptr>(decoder);
    if (input_of(common).ended) fail_short(common, "before the part of the picture that is wanted");
    return jpeg_resync_to_restart(decoder, marker);
}

void JpegReader::count_scans(j_common_ptr decoder) {
    if (reinterpret_cast<j_decompress_ptr>(decoder)->input_scan_number <= kMostScans) return;
    Errors& errors = *reinterpret_cast<Errors*>(decoder->err);
    std::snprintf(errors.text, sizeof(errors.text), "it has more than %d scans, as only files made to waste time have",
                  kMostScans);
    std::longjmp(errors.escape, 1);
}

}  // namespace feedline
