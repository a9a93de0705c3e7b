#include "quick.h"

#include <csetjmp>
#include <cstdlib>
#include <vector>

#include "jpeg.h"

namespace feedline {
namespace {

// Versions 2.1 to 3.2 were read or tested. Later ones may change their structures.
constexpr bool kKnown = LIBJPEG_TURBO_VERSION_NUMBER >= 2001000 && LIBJPEG_TURBO_VERSION_NUMBER < 3003000;

constexpr int kWidth = 200, kHeight = 72;

using Memory = std::vector<std::uint8_t>;

// Writes a JPEG of noise over a gradient, with chroma at half the resolution; empty if libjpeg cannot write it.
class Specimen {
public:
    Specimen() {
        encoder_.err = jpeg_std_error(&errors_.base);
        errors_.base.error_exit = [](j_common_ptr encoder) {
            std::longjmp(reinterpret_cast<Errors*>(encoder->err)->escape, 1);
        };
    }
    ~Specimen() {
        jpeg_destroy_compress(&encoder_);
        std::free(jpeg_);
    }
    Specimen(const Specimen&) = delete;
    Specimen& operator=(const Specimen&) = delete;

    bool write(int components, unsigned interval) {
        line_.resize(static_cast<std::size_t>(kWidth * components));
        if (setjmp(errors_.escape)) return false;
        jpeg_create_compress(&encoder_);
        jpeg_mem_dest(&encoder_, &jpeg_, &nbytes_);
        encoder_.image_width = kWidth;
        encoder_.image_height = kHeight;
        encoder_.input_components = components;
        encoder_.in_color_space = components == 1 ? JCS_GRAYSCALE : JCS_RGB;
        jpeg_set_defaults(&encoder_);
        jpeg_set_quality(&encoder_, 90, TRUE);
        encoder_.restart_interval = interval;
        jpeg_start_compress(&encoder_, TRUE);
        while (encoder_.next_scanline < encoder_.image_height) lines();
        jpeg_finish_compress(&encoder_);
        return true;
    }

    Bytes bytes() const { return {jpeg_, static_cast<std::size_t>(nbytes_)}; }

private:
    struct Errors {
        jpeg_error_mgr base;
        std::jmp_buf escape;
    };

    void lines() {
        for (std::size_t i = 0; i < line_.size(); i++) {
            noise_ = noise_ * 1664525 + 1013904223;
            line_[i] = static_cast<std::uint8_t>((i / 4 + encoder_.next_scanline + (noise_ >> 26)) & 255);
        }
        JSAMPROW line = line_.data();
        jpeg_write_scanlines(&encoder_, &line, 1);
    }

    jpeg_compress_struct encoder_{};
    Errors errors_{};
    unsigned char* jpeg_ = nullptr;
    unsigned long nbytes_ = 0;
    Memory line_;
    std::uint32_t noise_ = 1;
};

// Reads the lines from `top` on with the columns around [left, right); empty after a failure.
Memory lines_of(JpegReader& reader, Bytes jpeg, int scale, int left, int right, int top, bool quick) {
    Memory all;
    int first = 0;
    if (!reader.open(jpeg) || !reader.start(scale, JCS_EXT_RGBX, quick)) return {};
    if (!reader.region(left / scale, right / scale, top / scale, first)) return {};
    const std::size_t stride = static_cast<std::size_t>(reader.line_width()) * 4;
    for (int left_over = reader.scaled_height() - top / scale, got = 0; left_over > 0; left_over -= got) {
        std::uint8_t* lines[JpegReader::kLines];
        all.resize(all.size() + JpegReader::kLines * stride);
        for (int i = 0; i < JpegReader::kLines; i++)
            lines[i] = all.data() + all.size() - static_cast<std::size_t>(JpegReader::kLines - i) * stride;
        got = reader.read(lines, JpegReader::kLines);
        if (got == 0) return {};
        all.resize(all.size() - static_cast<std::size_t>(JpegReader::kLines - got) * stride);
    }
    if (!reader.finish()) return {};
    return all;
}

// Several times, because look-up tables are built only when a table is seen again.
bool agree(JpegReader& reader, Bytes jpeg, int scale) {
    const Memory expected = lines_of(reader, jpeg, scale, 80, 120, 40, false);
    for (int i = 0; i < 4; i++)
        if (lines_of(reader, jpeg, scale, 80, 120, 40, true) != expected) return false;
    return !expected.empty() && reader.is_quick();
}

bool tried() {
    for (const int components : {3, 1}) {
        Specimen specimen;
        JpegReader reader;
        if (!specimen.write(components, components == 3 ? 5 : 0)) return false;
        for (const int scale : {1, 2, 8})
            if (!agree(reader, specimen.bytes(), scale)) return false;
    }
    return true;
}

}  // namespace

bool quick_is_sound() {
    static const bool sound = kKnown && tried();
    return sound;
}

}  // namespace feedline
