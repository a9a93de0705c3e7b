#pragma once

namespace feedline {

// True if ScanDecoder may replace libjpeg's entropy decoder in JpegReader: the structures of this libjpeg-turbo version
// are known, and test images decode equally both ways. Tested once per process.
bool quick_is_sound();

}  // namespace feedline
