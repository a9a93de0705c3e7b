#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include <jpeglib.h>

#include "grid.h"

namespace feedline {
namespace {

using std::int64_t;
using std::size_t;
using std::uint16_t;
using std::uint8_t;

// Limit on the size of a grid. An interval costs its marker, padding and the loss of the DC prediction (about 3.5
// bytes), and 2 bytes of the index. Bytes saved by optimized tables may be spent, too.
struct Budget {
    int64_t share;        // the grid may cost 1/share of the file
    int64_t cost_of_two;  // bytes per two intervals
};
constexpr Budget kWithIndex{40, 11};
constexpr Budget kFileAlone{33, 7};  // for widths with few divisors, such as primes

constexpr int64_t kFewest = 64;     // MCUs: decoding a smaller image is faster than assembling a part
constexpr int64_t kMostPixels = int64_t{1} << 27;  // coefficients of 128 megapixels take up to 800 MB
constexpr int kMostScans = 200;                     // scans of a progressive file; encoders write about ten

// libjpeg reports errors by longjmp. The jump ends in `guarded`, whose callees have no objects with destructors.
struct Errors {
    jpeg_error_mgr manager;  // the first member: libjpeg's pointer to it is a pointer to this
    std::jmp_buf landing;
    char reason[JMSG_LENGTH_MAX];

    jpeg_error_mgr* installed() {
        jpeg_std_error(&manager);
        manager.error_exit = [](j_common_ptr info) {
            Errors* const self = reinterpret_cast<Errors*>(info->err);
            self->keep(info);
            std::longjmp(self->landing, 1);
        };
        manager.emit_message = [](j_common_ptr info, int level) {
            if (level < 0 && info->err->num_warnings++ == 0) reinterpret_cast<Errors*>(info->err)->keep(info);
        };
        manager.output_message = [](j_common_ptr) {};
        reason[0] = 0;
        return &manager;
    }

    void keep(j_common_ptr info) { manager.format_message(info, reason); }
};

// True if `work` completed; else `errors.reason` has the reason.
template <class Work>
bool guarded(Errors& errors, Work work) {
    if (setjmp(errors.landing)) return false;
    work();
    return true;
}

bool refuse(const char* reason, std::string& why) {
    why = reason;
    return false;
}

// The coefficients of a JPEG, read whole.
class Source {
public:
    Source() {
        info_.err = errors_.installed();
        progress_.progress_monitor = [](j_common_ptr info) {
            auto* const source = reinterpret_cast<j_decompress_ptr>(info);
            if (source->input_scan_number <= kMostScans) return;
            auto* const errors = reinterpret_cast<Errors*>(info->err);
            std::snprintf(errors->reason, JMSG_LENGTH_MAX, "More than %d scans", kMostScans);
            std::longjmp(errors->landing, 1);
        };
    }
    ~Source() { jpeg_destroy_decompress(&info_); }
    Source(const Source&) = delete;
    Source& operator=(const Source&) = delete;

    bool read(const uint8_t* jpeg, size_t nbytes, std::string& why) {
        if (nbytes == 0) return refuse("Empty input file", why);
        if (!guarded(errors_, [&] { read_header(jpeg, nbytes); })) return refuse(errors_.reason, why);
        if (const char* const reason = oddity(nbytes)) return refuse(reason, why);
        if (!guarded(errors_, [&] { coefficients_ = jpeg_read_coefficients(&info_); }))
            return refuse(errors_.reason, why);
        if (errors_.manager.num_warnings) return refuse(errors_.reason, why);
        return complete() || refuse("Progressive file ends before its last scan", why);
    }

    jpeg_decompress_struct& info() { return info_; }
    size_t markers() const { return markers_; }
    jvirt_barray_ptr* coefficients() { return coefficients_; }

private:
    void read_header(const uint8_t* jpeg, size_t nbytes) {
        jpeg_create_decompress(&info_);
        info_.progress = &progress_;
        jpeg_mem_src(&info_, jpeg, static_cast<unsigned long>(nbytes));
        for (int marker = JPEG_APP0; marker < JPEG_APP0 + 16; marker++) jpeg_save_markers(&info_, marker, 0xFFFF);
        jpeg_save_markers(&info_, JPEG_COM, 0xFFFF);
        jpeg_read_header(&info_, TRUE);
        for (const jpeg_marker_struct* marker = info_.marker_list; marker; marker = marker->next) markers_++;
    }

    // Refuses other kinds of samples, and headers that declare more data than the file can contain.
    const char* oddity(size_t nbytes) const {
        const int64_t pixels = int64_t{info_.image_width} * info_.image_height;
        if (info_.data_precision != 8) return "Not 8 bits a sample";
        if (pixels > kMostPixels) return "More than 128 megapixels";
        if (pixels / 64 > static_cast<int64_t>(nbytes) * 8) return "Too few bytes for its width and height";
        return nullptr;
    }

    // True if every bit of every coefficient was read; decoders smooth progressive images that lack some.
    bool complete() const {
        for (int i = 0; info_.coef_bits && i < info_.num_components * DCTSIZE2; i++)
            if (info_.coef_bits[i / DCTSIZE2][i % DCTSIZE2] != 0) return false;
        return true;
    }

    Errors errors_;
    jpeg_progress_mgr progress_{};
    jpeg_decompress_struct info_{};
    jvirt_barray_ptr* coefficients_ = nullptr;
    size_t markers_ = 0;  // saved ones before the first scan
};

// Writes the coefficients as one baseline scan with optimized tables.
class Target {
public:
    Target() { info_.err = errors_.installed(); }
    ~Target() {
        jpeg_destroy_compress(&info_);
        std::free(bytes_);
    }
    Target(const Target&) = delete;
    Target& operator=(const Target&) = delete;

    bool write(Source& source, unsigned interval, std::string& why) {
        return guarded(errors_, [&] { transcode(source, interval); }) || refuse(errors_.reason, why);
    }

    const uint8_t* data() const { return bytes_; }
    size_t nbytes() const { return nbytes_; }

private:
    void transcode(Source& source, unsigned interval) {
        jpeg_create_compress(&info_);
        jpeg_mem_dest(&info_, &bytes_, &nbytes_);
        jpeg_copy_critical_parameters(&source.info(), &info_);
        info_.optimize_coding = TRUE;
        info_.restart_interval = interval;
        info_.write_JFIF_header = FALSE;  // copied if present: decoders infer the color space from it
        info_.write_Adobe_marker = FALSE;
        jpeg_write_coefficients(&info_, source.coefficients());
        // Markers between scans are too late to determine color space or orientation. In the header, they would.
        const jpeg_marker_struct* marker = source.info().marker_list;
        for (size_t left = source.markers(); left > 0; left--, marker = marker->next)
            if (!is_further_images(*marker))
                jpeg_write_marker(&info_, marker->marker, marker->data, marker->data_length);
        jpeg_finish_compress(&info_);
    }

    static bool is_further_images(const jpeg_marker_struct& marker) {
        return marker.marker == JPEG_APP0 + 2 && marker.data_length >= 4 && std::memcmp(marker.data, "MPF", 4) == 0;
    }

    Errors errors_;
    jpeg_compress_struct info_{};
    uint8_t* bytes_ = nullptr;
    unsigned long nbytes_ = 0;
};

struct Units {
    int64_t columns, rows;

    explicit Units(const jpeg_decompress_struct& info) {
        const bool single = info.num_components == 1;
        const int64_t wide = single ? 8 : 8 * info.max_h_samp_factor, high = single ? 8 : 8 * info.max_v_samp_factor;
        columns = (info.image_width + wide - 1) / wide;
        rows = (info.image_height + high - 1) / high;
    }
};

// Returns the finest grid that a budget allows for a file of `before` bytes, which has `bare` bytes when rewritten
// without a grid: MCUs per interval, at most a row; 0 if even that is too much.
int64_t finest(const Units& units, int64_t before, int64_t bare, Budget budget) {
    const int64_t most = before + before / budget.share - bare;
    for (int64_t interval = 1; interval <= units.columns; interval++)
        if (units.columns % interval == 0 && units.columns / interval * units.rows * budget.cost_of_two / 2 <= most)
            return interval;
    return 0;
}

int64_t chosen(const Units& units, int64_t before, int64_t bare) {
    const int64_t interval = finest(units, before, bare, kWithIndex);
    return interval && interval * 2 <= units.columns ? interval : finest(units, before, bare, kFileAlone);
}

}  // namespace

bool rewrite(const uint8_t* jpeg, size_t nbytes, std::vector<uint8_t>& out, std::vector<uint16_t>& lengths,
             std::string& why) {
    Source source;
    if (!source.read(jpeg, nbytes, why)) return false;
    const Units units(source.info());
    if (units.columns * units.rows < kFewest) return refuse("Too small for a grid", why);
    Target bare;
    if (!bare.write(source, 0, why)) return false;
    // A progressive file grows when it becomes a baseline one, which decodes several times faster; this growth does not
    // count as a cost of the grid.
    const bool progressive = source.info().progressive_mode;
    const int64_t left = static_cast<int64_t>(bare.nbytes());
    const int64_t interval = chosen(units, progressive ? left : static_cast<int64_t>(nbytes), left);
    if (interval == 0) return refuse("A grid would make it grow too much", why);
    Target target;
    if (!target.write(source, static_cast<unsigned>(interval), why)) return false;
    if (!measure(target.data(), target.nbytes(), lengths)) return refuse("A row takes more than 65,535 bytes", why);
    out.assign(target.data(), target.data() + target.nbytes());
    return true;
}

}  // namespace feedline
