#include "intact.h"

#include <cstring>
#include <new>

#include "jpeg.h"

namespace feedline {
namespace {

constexpr int kEnd = 0xD9, kScan = 0xDA, kRestart = 0xD0;

bool is_restart(int marker) { return (marker & 0xF8) == kRestart; }

// Reads the markers of a JPEG one by one; every step returns false at the first irregularity.
class Walk {
public:
    explicit Walk(Bytes jpeg) : jpeg_(jpeg) {}

    bool sequential(Intact& found) {
        if (jpeg_.size < 4 || std::memcmp(jpeg_.data, "\xFF\xD8\xFF", 3)) return false;
        at_ = 2;
        while (next()) {
            if (marker_ == kScan) return scan(found) && codes() && marker_ == kEnd && ended(found);
            if (!header(found)) return false;
        }
        return false;
    }

private:
    // Moves to the next segment.
    bool next() {
        if (jpeg_.size - at_ < 4 || jpeg_.data[at_] != 0xFF) return false;
        marker_ = jpeg_.data[at_ + 1];
        segment_ = jpeg_.data + at_ + 4;
        const std::size_t length = static_cast<std::size_t>(jpeg_.data[at_ + 2] << 8 | jpeg_.data[at_ + 3]);
        if (length < 2 || jpeg_.size - at_ - 2 < length) return false;
        size_ = length - 2;
        at_ += 2 + length;
        return true;
    }

    bool header(Intact& found) {
        if (marker_ == 0xC0 || marker_ == 0xC1) return frame(found);
        const bool tables = marker_ == 0xC4 || marker_ == 0xDB || marker_ == 0xDD;
        return tables || (marker_ >= 0xE0 && marker_ <= 0xEF) || marker_ == 0xFE;
    }

    bool frame(Intact& found) {
        if (found.components || size_ < 6 || segment_[0] != 8) return false;
        found.height = segment_[1] << 8 | segment_[2];
        found.width = segment_[3] << 8 | segment_[4];
        found.components = segment_[5];
        return found.width && found.height && (found.components == 1 || found.components == 3);
    }

    bool scan(const Intact& found) const { return found.components && size_ > 0 && segment_[0] == found.components; }

    // Moves to the first marker after the codes that is not a restart marker.
    bool codes() {
        while (true) {
            const void* const found = std::memchr(jpeg_.data + at_, 0xFF, jpeg_.size - at_);
            if (!found) return false;
            at_ = static_cast<std::size_t>(static_cast<const std::uint8_t*>(found) - jpeg_.data) + 1;
            if (at_ == jpeg_.size) return false;
            marker_ = jpeg_.data[at_++];
            if (marker_ != 0 && !is_restart(marker_)) return true;
        }
    }

    bool ended(Intact& found) const {
        found.end = at_;
        return true;
    }

    Bytes jpeg_;
    std::size_t at_ = 0, size_ = 0;
    const std::uint8_t* segment_ = nullptr;
    int marker_ = 0;
};

}  // namespace

bool is_intact(Bytes jpeg, Intact& found) {
    found = {};
    try {
        static thread_local JpegReader reader;
        if (!Walk(jpeg).sequential(found) || !reader.open(jpeg)) return false;
        const bool agrees = reader.width() == found.width && reader.height() == found.height &&
                            reader.components() == found.components;
        const bool started = agrees && reader.start(1, JCS_RGB, false);
        return started;
    } catch (const std::bad_alloc&) {
        return false;
    }
}

}  // namespace feedline
