#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "buffer.h"

namespace feedline {

namespace nb = nanobind;

// The spans of one stage on one worker. What a batch changes is one line of the CPU's cache, and one of the bins.
struct alignas(64) Cell {
    PyObject* stage;
    std::int32_t worker;
    bool counts_as_building;
    std::unique_ptr<std::int64_t[]> bins;
    std::int64_t count = 0, total = 0, longest = 0;

    void add(std::int64_t elapsed, std::size_t bin) {
        longest = count ? std::max(longest, elapsed) : elapsed;
        count += 1;
        total += elapsed;
        bins[bin] += 1;
    }
};

// Figures of a cell, for Python.
struct CellFigures {
    nb::object stage;
    std::int64_t worker, count, total, longest;
    std::vector<std::int64_t> bins;
};

inline std::int64_t integer_of(PyObject* number) {
    const long long value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    return value;
}

inline bool is_same(PyObject* one, PyObject* other) {
    const int result = PyObject_RichCompareBool(one, other, Py_EQ);  // names from other processes are other objects
    if (result < 0) throw nb::python_error();
    return result == 1;
}

struct Span {
    PyObject* stage;
    std::int64_t start, stop, worker;

    Span(PyObject* name, std::int64_t begin, std::int64_t end) : stage(name), start(begin), stop(end), worker(-1) {}
    explicit Span(PyObject* span) {
        if (!PyTuple_Check(span) || PyTuple_GET_SIZE(span) != 4) throw nb::value_error("a span is a tuple of four");
        stage = PyTuple_GET_ITEM(span, 0);
        if (!PyUnicode_CheckExact(stage)) throw nb::type_error("the stage of a span is a str");
        start = integer_of(PyTuple_GET_ITEM(span, 1));
        stop = integer_of(PyTuple_GET_ITEM(span, 2));
        worker = integer_of(PyTuple_GET_ITEM(span, 3));
    }
};

// A span that is kept after its tuple, with the place of its cell.
struct KeptSpan {
    std::size_t cell;
    std::int64_t start, stop;
};

struct KeptBatch {
    std::int64_t epoch, number;
    std::size_t first, size = 0;  // of its spans
};

// The latest batches and their spans: two rings in memory of their own. Small blocks for each batch would
// lie in the memory that a batch has just freed, so that the next batch would not fit there, and would touch new pages.
class KeptBatches {
public:
    explicit KeptBatches(std::size_t most) : most_(most), most_spans_(most * kSpans) {}

    void begin(std::int64_t epoch, std::int64_t number) {
        if (!most_) return;
        if (!spans_) {
            batches_.reset(new KeptBatch[most_]);
            spans_.reset(new KeptSpan[most_spans_]);
        }
        batches_[begun_++ % most_] = {epoch, number, written_};
    }

    void add(const KeptSpan& span) {
        if (!most_) return;
        spans_[written_++ % most_spans_] = span;
        batches_[(begun_ - 1) % most_].size += 1;
    }

    // The number of batches whose spans are all still there, at most `most`.
    std::size_t size(std::size_t most) const {
        std::size_t found = 0;
        while (found < std::min({most, begun_, most_}) && written_ - batch(found).first <= most_spans_) ++found;
        return found;
    }

    // The latest batch but `back`.
    const KeptBatch& batch(std::size_t back) const { return batches_[(begun_ - 1 - back) % most_]; }
    const KeptSpan& span(std::size_t place) const { return spans_[place % most_spans_]; }

private:
    static constexpr std::size_t kSpans = 12;  // of a batch: most have 4 to 8
    std::size_t most_, most_spans_, begun_ = 0, written_ = 0;
    std::unique_ptr<KeptBatch[]> batches_;
    std::unique_ptr<KeptSpan[]> spans_;
};

// Sums of spans, and the latest batches. Their tuples are not kept: the next batch finds their memory in the cache. The
// sums of a parent include its children, which are added up when they are read. No Python code runs under the lock.
class SpanSums {
public:
    SpanSums(nb::handle bounds, nb::object parent, nb::frozenset others, nb::tuple suffixes, std::size_t recent)
        : object_(parent), parent_(parent.is_none() ? nullptr : nb::cast<SpanSums*>(parent)), others_(others),
          suffixes_(suffixes), kept_(recent) {
        const Buffer edges(bounds);
        bounds_.assign(edges.int64_items(), edges.int64_items() + edges.shape(0));
        for (std::size_t octave = 0; octave < octaves_.size(); ++octave) {
            const auto first = std::lower_bound(bounds_.begin(), bounds_.end(), std::int64_t{1} << octave);
            octaves_[octave] = static_cast<std::size_t>(first - bounds_.begin());
        }
        if (!parent_) return;
        nb::ft_lock_guard guard(parent_->mutex_);
        parent_->children_.push_back(this);
    }
    ~SpanSums() {
        if (parent_) leave_to_parent();
        for (const Cell& cell : cells_) Py_DECREF(cell.stage);
    }
    SpanSums(const SpanSums&) = delete;
    SpanSums& operator=(const SpanSums&) = delete;

    // A span of the loop itself, which needs no tuple.
    struct Own {
        PyObject* stage;
        std::int64_t start, stop;
    };

    // The longest stage of building the batch, in ns; -1 without one.
    std::int64_t add(nb::handle batch, const Own* own, std::size_t owned, std::int64_t samples, std::int64_t epoch,
                     std::int64_t number) {
        const nb::object items = nb::steal(PySequence_Fast(batch.ptr(), "spans must be a sequence"));
        if (!items.is_valid()) throw nb::python_error();
        nb::ft_lock_guard guard(root().mutex_);
        std::int64_t longest = -1;
        kept_.begin(epoch, number);
        const bool first = batches_ == 0;
        built_ns_ = -1;
        for (Py_ssize_t place = 0; place < PySequence_Fast_GET_SIZE(items.ptr()); ++place)
            count(Span(PySequence_Fast_GET_ITEM(items.ptr(), place)), first, longest);
        for (const Own* each = own; each != own + owned; ++each)
            count(Span(each->stage, each->start, each->stop), first, longest);
        // A batch that was built before its predecessor waits for it.
        if (in_order && built_ns_ >= 0 && built_ns_ < latest_built_ns_)
            count(Span(reorder_.ptr(), built_ns_, latest_built_ns_), first, longest);
        latest_built_ns_ = std::max(latest_built_ns_, built_ns_);
        batches_ += 1;
        samples_ += samples;
        return longest;
    }

    std::int64_t batches() { return sum(&SpanSums::batches_); }
    std::int64_t samples() { return sum(&SpanSums::samples_); }
    std::int64_t startup_ns() { return sum(&SpanSums::startup_ns_); }

    nb::dict cells() {
        nb::dict result;
        for (const CellFigures& cell : figures()) {
            nb::list bins;
            for (const std::int64_t number : cell.bins) bins.append(number);
            result[nb::make_tuple(cell.stage, cell.worker)] =
                nb::make_tuple(cell.count, cell.total, cell.longest, bins);
        }
        return result;
    }

    // The latest batches, at most `most`, oldest first.
    nb::list recent(std::size_t most) {
        std::vector<std::pair<KeptBatch, std::vector<KeptSpan>>> kept;
        std::vector<std::pair<nb::object, std::int64_t>> names;
        {
            nb::ft_lock_guard guard(root().mutex_);
            for (std::size_t back = kept_.size(most); back--;) {
                const KeptBatch& batch = kept_.batch(back);
                kept.emplace_back(batch, std::vector<KeptSpan>());
                for (std::size_t place = batch.first; place < batch.first + batch.size; ++place)
                    kept.back().second.push_back(kept_.span(place));
            }
            for (const Cell& cell : cells_) names.emplace_back(nb::borrow(cell.stage), cell.worker);
        }
        nb::list result;
        for (const auto& [batch, its_spans] : kept) {
            nb::list spans;
            for (const KeptSpan& span : its_spans)
                spans.append(nb::make_tuple(names[span.cell].first, span.start, span.stop, names[span.cell].second));
            result.append(nb::make_tuple(spans, batch.epoch, batch.number));
        }
        return result;
    }

    std::int64_t opening_ns = 0;
    bool in_order = true;

private:
    // The wait for the first batch begins with `iter(loader)`, and counts as start-up. No step precedes it.
    void count(const Span& span, bool first, std::int64_t& longest) {
        std::int64_t elapsed = span.stop - span.start;
        if (first) {
            if (is_of_step(span.stage)) return;
            if (PyUnicode_CompareWithASCIIString(span.stage, "wait") == 0) {
                elapsed += opening_ns;
                startup_ns_ += elapsed;
            }
        }
        const std::size_t place = find(span.stage, span.worker);
        kept_.add({place, span.start, span.stop});
        Cell& cell = cells_[place];
        cell.add(elapsed, bin_of(elapsed));
        if (!cell.counts_as_building) return;
        longest = std::max(longest, elapsed);
        if (span.worker >= 0) built_ns_ = std::max(built_ns_, span.stop);
    }

    static bool is_of_step(PyObject* stage) {
        for (const char* name : {"step", "step.cpu", "step.switches"})
            if (PyUnicode_CompareWithASCIIString(stage, name) == 0) return true;
        return false;
    }

    // The first bin whose bound is not below: the search begins in the octave.
    std::size_t bin_of(std::int64_t elapsed) const {
        if (elapsed <= 0) return 0;
        std::size_t bin = octaves_[64 - __builtin_clzll(static_cast<unsigned long long>(elapsed)) - 1];
        while (bin < bounds_.size() && bounds_[bin] < elapsed) ++bin;
        return bin;
    }

    SpanSums& root() { return parent_ ? *parent_ : *this; }

    // A loop has few stages and workers: a search through all of them is faster than a hash table.
    std::size_t find(PyObject* stage, std::int64_t worker) {
        for (std::size_t place = 0; place < cells_.size(); ++place)
            if (cells_[place].worker == worker && cells_[place].stage == stage) return place;
        for (std::size_t place = 0; place < cells_.size(); ++place)
            if (cells_[place].worker == worker && is_same(cells_[place].stage, stage)) return place;
        auto bins = std::make_unique<std::int64_t[]>(bounds_.size() + 1);
        cells_.push_back({Py_NewRef(stage), static_cast<std::int32_t>(worker), is_building(stage), std::move(bins)});
        return cells_.size() - 1;
    }

    std::int64_t sum(std::int64_t SpanSums::*field) {
        nb::ft_lock_guard guard(root().mutex_);
        std::int64_t total = this->*field;
        for (const SpanSums* child : children_) total += child->*field;
        return total;
    }

    // Copies of all cells, those of children included: to make Python's objects may run other code.
    std::vector<CellFigures> figures() {
        nb::ft_lock_guard guard(root().mutex_);
        std::vector<CellFigures> found;
        add_to(found);
        for (SpanSums* child : children_) child->add_to(found);
        return found;
    }

    void add_to(std::vector<CellFigures>& found) const {
        for (const Cell& cell : cells_) {
            auto same = std::find_if(found.begin(), found.end(), [&](const CellFigures& each) {
                return each.worker == cell.worker && is_same(each.stage.ptr(), cell.stage);
            });
            if (same == found.end()) {
                found.push_back({nb::borrow(cell.stage), cell.worker, 0, 0, 0, {}});
                same = found.end() - 1;
                same->bins.resize(bounds_.size() + 1);
            }
            if (!cell.count) continue;
            same->longest = same->count ? std::max(same->longest, cell.longest) : cell.longest;
            same->count += cell.count;
            same->total += cell.total;
            for (std::size_t bin = 0; bin <= bounds_.size(); ++bin) same->bins[bin] += cell.bins[bin];
        }
    }

    // The sums of an epoch that is over stay in the parent.
    void leave_to_parent() {
        nb::ft_lock_guard guard(parent_->mutex_);
        auto& siblings = parent_->children_;
        siblings.erase(std::remove(siblings.begin(), siblings.end(), this), siblings.end());
        parent_->batches_ += batches_;
        parent_->samples_ += samples_;
        parent_->startup_ns_ += startup_ns_;
        for (const Cell& cell : cells_) {
            Cell& sums = parent_->cells_[parent_->find(cell.stage, cell.worker)];
            if (!cell.count) continue;
            sums.longest = sums.count ? std::max(sums.longest, cell.longest) : cell.longest;
            sums.count += cell.count;
            sums.total += cell.total;
            for (std::size_t bin = 0; bin <= bounds_.size(); ++bin) sums.bins[bin] += cell.bins[bin];
        }
    }

    bool is_building(PyObject* stage) const {
        const int other = PySet_Contains(others_.ptr(), stage);
        if (other < 0) throw nb::python_error();
        if (other) return false;
        for (nb::handle suffix : suffixes_)
            if (PyUnicode_Tailmatch(stage, suffix.ptr(), 0, PY_SSIZE_T_MAX, 1) == 1) return false;
        return true;
    }

    nb::ft_mutex mutex_;
    nb::object object_;
    SpanSums* parent_;
    nb::frozenset others_;
    nb::tuple suffixes_;
    std::vector<std::int64_t> bounds_;
    std::array<std::size_t, 63> octaves_{};
    std::vector<Cell> cells_;
    std::vector<SpanSums*> children_;
    std::int64_t batches_ = 0, samples_ = 0, startup_ns_ = 0;
    KeptBatches kept_;
    nb::object reorder_ = nb::steal(PyUnicode_InternFromString("reorder"));
    std::int64_t built_ns_ = -1, latest_built_ns_ = -1;
};

}  // namespace feedline
