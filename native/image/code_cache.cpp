#include "code_cache.h"

#include <algorithm>
#include <cstring>

namespace feedline {
namespace {

constexpr std::size_t kMost = 8;                              // tables of each class
constexpr std::size_t kPays = std::size_t{3} << 10;           // bytes of a scan from which look-up tables pay
constexpr std::size_t kPaysForRuns = std::size_t{64} << 10;   // and from which tables that skip blocks pay
constexpr int kMetForRuns = 3;                                // images with a table, after which both pay

bool same(const HuffmanTable& kept, const JHUFF_TBL& table) {
    return !std::memcmp(kept.counts + 1, table.bits + 1, sizeof(kept.counts) - 1) &&
           !std::memcmp(kept.symbols, table.huffval, sizeof(kept.symbols));
}

HuffmanTable copied(const JHUFF_TBL& table) {
    HuffmanTable copy;
    std::memcpy(copy.counts, table.bits, sizeof(copy.counts));
    std::memcpy(copy.symbols, table.huffval, sizeof(copy.symbols));
    copy.counts[0] = 0;
    return copy;
}

}  // namespace

// Returns the entry of a table and moves it to the front.
template <class Lookups>
CodeCache::Entry<Lookups>& CodeCache::entry_of(Entries<Lookups>& entries, const JHUFF_TBL& table) {
    auto at = std::find_if(entries.begin(), entries.end(), [&](auto& entry) { return same(entry->table, table); });
    if (at == entries.end()) {
        if (entries.size() < kMost) entries.push_back(std::make_unique<Entry<Lookups>>());
        at = entries.end() - 1;
        (*at)->table = copied(table);
        (*at)->met = 0;
        (*at)->tried = (*at)->fine = false;
    }
    std::rotate(entries.begin(), at, at + 1);
    return *entries.front();
}

// Counts one more image with a table and returns its entry; nullptr until its look-up tables save time, or if it is
// invalid.
template <class Lookups>
CodeCache::Entry<Lookups>* CodeCache::met(Entries<Lookups>& entries, const JHUFF_TBL* table, std::size_t nbytes) {
    if (!table) return nullptr;
    Entry<Lookups>& entry = entry_of(entries, *table);
    if (!entry.tried && (entry.met > 0 || nbytes >= kPays)) {
        entry.fine = entry.lookups.prepare(entry.table);
        entry.tried = true;
    }
    if (entry.met < kMetForRuns) entry.met++;
    return entry.fine ? &entry : nullptr;
}

const DcCodes* CodeCache::dc(const JHUFF_TBL* table, std::size_t nbytes) {
    Entry<DcCodes>* const entry = met(dc_, table, nbytes);
    return entry ? &entry->lookups : nullptr;
}

const AcCodes* CodeCache::ac(const JHUFF_TBL* table, std::size_t nbytes) {
    Entry<AcCodes>* const entry = met(ac_, table, nbytes);
    if (!entry) return nullptr;
    if (!entry->lookups.has_runs() && (entry->met == kMetForRuns || nbytes >= kPaysForRuns))
        entry->lookups.prepare_runs(entry->table);
    return &entry->lookups;
}

}  // namespace feedline
