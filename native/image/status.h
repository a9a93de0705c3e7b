#pragma once
#include <cstdint>
#include <string>
#include <utility>

namespace feedline {

// What became of a picture. The numbers are known to feedline/images/decode.py.
enum class Verdict {
    written = 0,
    foreign = 1,  // not an ordinary JPEG: for Pillow
    bad = 2,      // `text` says why
    file = 3,     // its file could not be read: `number` is the errno
    large = 4,    // above the limit on pixels: `number` is width << 32 | height
};

struct Status {
    Verdict verdict = Verdict::written;
    std::int64_t number = 0;
    std::string text;

    bool fine() const { return verdict == Verdict::written; }

    static Status foreign() { return {Verdict::foreign, 0, {}}; }
    static Status bad(std::string why) { return {Verdict::bad, 0, std::move(why)}; }
    static Status file(int error) { return {Verdict::file, error, {}}; }
    static Status large(int width, int height) {
        return {Verdict::large, static_cast<std::int64_t>(width) << 32 | height, {}};
    }
};

}  // namespace feedline
