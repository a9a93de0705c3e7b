#pragma once

namespace feedline {

// Whether ScanDecoder may take the place of libjpeg's entropy decoder in JpegReader: this libjpeg-turbo is of a version
// whose inner workings are known, and pictures made for the purpose come out the same both ways. Tried once in a
// process.
bool quick_is_sound();

}  // namespace feedline
