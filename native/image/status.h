#pragma once
#include <cstdint>
#include <string>
#include <utility>

namespace feedline {

// Result of reading an image. feedline/images/decode.py uses the same numbers.
enum class Verdict {
    written = 0,
    foreign = 1,  // for Pillow, which decides; `text` may have the reason if it cannot read the image, either
    bad = 2,      // `text` has the reason
    file = 3,     // the file could not be read: `number` is the errno
    large = 4,    // more pixels than the limit: `number` is width << 32 | height
};

struct Status {
    Verdict verdict = Verdict::written;
    std::int64_t number = 0;
    std::string text;

    bool fine() const { return verdict == Verdict::written; }

    static Status foreign(std::string why = {}) { return {Verdict::foreign, 0, std::move(why)}; }
    static Status bad(std::string why) { return {Verdict::bad, 0, std::move(why)}; }
    static Status file(int error) { return {Verdict::file, error, {}}; }
    static Status large(int width, int height) {
        return {Verdict::large, static_cast<std::int64_t>(width) << 32 | height, {}};
    }
};

}  // namespace feedline
