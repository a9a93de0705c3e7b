#pragma once
#include <cstddef>

#include "scan.h"

namespace feedline {

// Size and end of a JPEG: `end` is the number of bytes up to and including its end marker.
struct Intact {
    int width = 0, height = 0, components = 0;
    std::size_t end = 0;
};

// True if libjpeg decodes the JPEG to its end without an error, even with damaged codes: a Huffman JPEG with a regular
// sequence of markers, up to an end marker. False if that is not certain. Reads markers only, and sets libjpeg up once,
// which checks the tables.
bool is_intact(Bytes jpeg, Intact& found);

}  // namespace feedline
