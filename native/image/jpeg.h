#pragma once
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstdio>

#include <jpeglib.h>

#include "entropy.h"
#include "scan.h"

namespace feedline {

// libjpeg on bytes in memory: header, then a region at a scale, line by line. Reusable after success and failure.
//
// libjpeg reports errors by longjmp; every such jump begins and ends in this class, and crosses only frames of libjpeg.
// Every irregularity is a failure, including those that libjpeg ignores, and those below the requested region.
class JpegReader {
public:
    JpegReader();
    ~JpegReader();
    JpegReader(const JpegReader&) = delete;
    JpegReader& operator=(const JpegReader&) = delete;

    // Each step returns false if it fails; problem() has the reason.
    bool open(Bytes jpeg);
    int width() const { return static_cast<int>(decoder_.image_width); }
    int height() const { return static_cast<int>(decoder_.image_height); }
    int components() const { return decoder_.num_components; }

    // Second step: lines of `space` at 1/scale; scale is 1, 2, 4 or 8. With `quick`, ScanDecoder replaces libjpeg's
    // entropy decoder if it can. The pixels are the same. Data that it cannot decode fail with gave_up() set: start
    // again without `quick`.
    bool start(int scale, J_COLOR_SPACE space, bool quick);
    bool is_quick() const { return quick_; }
    bool gave_up() const { return gave_up_; }
    int scaled_width() const { return static_cast<int>(decoder_.output_width); }
    int scaled_height() const { return static_cast<int>(decoder_.output_height); }

    // Optional third step: columns [left, right) and lines from `top` on, exactly as in a full decode. Lines are wider
    // than requested; `first` is their first column.
    bool region(int left, int right, int top, int& first);
    int line_width() const { return static_cast<int>(decoder_.output_width); }

    // Last step, repeated: reads the next lines, at most kLines; 0 after a failure.
    static constexpr int kLines = 4;
    int read(std::uint8_t* const* lines, int most);

    // After the last line: checks the rest of the data, and stops.
    bool finish();
    void stop();

    const char* problem() const { return errors_.text; }  // empty if only libjpeg's warnings are known
    bool hopeless() const { return hopeless_; }           // true if Pillow should not try, either

private:
    struct Errors {
        jpeg_error_mgr base;
        std::jmp_buf escape;
        char text[JMSG_LENGTH_MAX + 64];
    };
    struct Input {
        jpeg_source_mgr base;
        bool decoding;
    };

    template <class Call>
    bool guarded(Call call);
    [[noreturn]] static void fail(j_common_ptr decoder);
    [[noreturn]] static void fail_short(j_common_ptr decoder, const char* where);
    static void warn(j_common_ptr decoder, int level);
    static void say_nothing(j_common_ptr) {}
    static void nothing(j_decompress_ptr) {}
    [[noreturn]] static boolean fill(j_decompress_ptr decoder);
    static void skip(j_decompress_ptr decoder, long nbytes);
    static void count_scans(j_common_ptr decoder);
    bool rest_is_regular();
    bool is_refined() const;
    void explain();
    std::int64_t restarts_before(std::int64_t mcus) const;
    static Input& input_of(j_common_ptr decoder);
    void take_over();
    void widen_components();
    static boolean decode_mcu(j_decompress_ptr decoder, JBLOCKROW* blocks);

    jpeg_decompress_struct decoder_;
    Errors errors_;
    Input input_;
    jpeg_progress_mgr progress_;
    ScanDecoder scan_;
    bool quick_ = false, gave_up_ = false, hopeless_ = false;
};

}  // namespace feedline
