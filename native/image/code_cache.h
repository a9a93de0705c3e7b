#pragma once
#include <cstddef>
#include <cstdio>
#include <memory>
#include <vector>

#include <jpeglib.h>

#include "codes.h"

namespace feedline {

// Cache of the most recent Huffman tables, with their look-up tables. Most files share a few tables, and building the
// look-up tables of one takes as long as decoding some kilobytes. They are therefore built only if that saves time: for
// a longer scan, or when a table is seen again.
class CodeCache {
public:
    // Call once per image for each of its tables; `nbytes` is the length of its scan. nullptr for a table that does not
    // save time yet, and for an invalid table.
    const DcCodes* dc(const JHUFF_TBL* table, std::size_t nbytes);
    const AcCodes* ac(const JHUFF_TBL* table, std::size_t nbytes);

private:
    template <class Lookups>
    struct Entry {
        HuffmanTable table;
        int met = 0;  // images seen with this table, up to kMetForRuns
        bool tried = false, fine = false;
        Lookups lookups;
    };
    template <class Lookups>
    using Entries = std::vector<std::unique_ptr<Entry<Lookups>>>;

    template <class Lookups>
    static Entry<Lookups>& entry_of(Entries<Lookups>& entries, const JHUFF_TBL& table);
    template <class Lookups>
    static Entry<Lookups>* met(Entries<Lookups>& entries, const JHUFF_TBL* table, std::size_t nbytes);

    Entries<DcCodes> dc_;
    Entries<AcCodes> ac_;
};

}  // namespace feedline
