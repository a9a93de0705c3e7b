#pragma once
#include <cstddef>
#include <cstdio>
#include <memory>
#include <vector>

#include <jpeglib.h>

#include "codes.h"

namespace feedline {

// The last few Huffman tables that pictures had, with their look-ups. Most files share a handful of tables, and making
// the look-ups of one costs as much as decoding some kilobytes: so they are made when they pay, which is for a scan of
// more than that, or when a table is met again.
class CodeCache {
public:
    // To be asked once per picture for each of its tables; `nbytes` is the length of its scan. nullptr for a table that
    // does not pay yet, and for one that no file can have.
    const DcCodes* dc(const JHUFF_TBL* table, std::size_t nbytes);
    const AcCodes* ac(const JHUFF_TBL* table, std::size_t nbytes);

private:
    template <class Lookups>
    struct Entry {
        HuffmanTable table;
        int met = 0;  // times, up to kMetForRuns
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
