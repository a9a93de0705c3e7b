#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "buffer.h"

namespace feedline {

namespace nb = nanobind;

// The spans of one stage on one worker.
struct Cell {
    nb::object stage;
    std::int64_t worker;
    bool counts_as_building;
    std::size_t in_parent;
    std::int64_t count = 0, total = 0, longest = 0;
    std::size_t latest_bin = 0;
    std::vector<std::int64_t> bins;

    void add(std::int64_t elapsed, std::size_t bin) {
        latest_bin = bin;
        longest = count ? std::max(longest, elapsed) : elapsed;
        count += 1;
        total += elapsed;
        bins[bin] += 1;
    }
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

// A span that is stored without its tuple.
struct KeptSpan {
    nb::object stage;
    std::int64_t start, stop, worker;
};

struct KeptBatch {
    std::vector<KeptSpan> spans;
    std::int64_t epoch, number;
};

// Sums of spans, and the latest batches. Their tuples are not kept: the next batch finds their memory in the cache.
// Additions also go to the parent. No Python code runs under the lock.
class SpanSums {
public:
    SpanSums(nb::handle bounds, nb::object parent, nb::frozenset others, nb::tuple suffixes, std::size_t recent)
        : object_(parent), parent_(parent.is_none() ? nullptr : nb::cast<SpanSums*>(parent)), others_(others),
          suffixes_(suffixes), most_kept_(recent) {
        const Buffer edges(bounds);
        bounds_.assign(edges.int64_items(), edges.int64_items() + edges.shape(0));
    }

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
        KeptBatch* const kept = keep(epoch, number);
        const bool first = batches == 0;
        built_ns_ = -1;
        for (Py_ssize_t place = 0; place < PySequence_Fast_GET_SIZE(items.ptr()); ++place)
            count(Span(PySequence_Fast_GET_ITEM(items.ptr(), place)), kept, first, longest);
        for (const Own* each = own; each != own + owned; ++each)
            count(Span(each->stage, each->start, each->stop), kept, first, longest);
        // A batch that was built before its predecessor waits for it.
        if (in_order && built_ns_ >= 0 && built_ns_ < latest_built_ns_)
            count(Span(reorder_.ptr(), built_ns_, latest_built_ns_), kept, first, longest);
        latest_built_ns_ = std::max(latest_built_ns_, built_ns_);
        for (SpanSums* sums = this; sums; sums = sums->parent_) sums->batches += 1, sums->samples += samples;
        return longest;
    }

    nb::dict cells() {
        nb::ft_lock_guard guard(root().mutex_);
        nb::dict result;
        for (const Cell& cell : cells_) {
            nb::list bins;
            for (const std::int64_t number : cell.bins) bins.append(number);
            result[nb::make_tuple(cell.stage, cell.worker)] =
                nb::make_tuple(cell.count, cell.total, cell.longest, bins);
        }
        return result;
    }

    // The latest batches, at most `most`, oldest first.
    nb::list recent(std::size_t most) {
        nb::ft_lock_guard guard(root().mutex_);
        nb::list result;
        const std::size_t size = kept_.size();
        for (std::size_t step = size - std::min(most, size); step < size; ++step) {
            const KeptBatch& batch = kept_[(next_ + step) % size];
            nb::list spans;
            for (const KeptSpan& span : batch.spans)
                spans.append(nb::make_tuple(span.stage, span.start, span.stop, span.worker));
            result.append(nb::make_tuple(spans, batch.epoch, batch.number));
        }
        return result;
    }

    std::int64_t batches = 0, samples = 0, opening_ns = 0, startup_ns = 0;
    bool in_order = true;

private:
    // The wait for the first batch begins with `iter(loader)`, and counts as start-up. No step precedes it.
    void count(const Span& span, KeptBatch* kept, bool first, std::int64_t& longest) {
        std::int64_t elapsed = span.stop - span.start;
        if (first) {
            if (is_of_step(span.stage)) return;
            if (PyUnicode_CompareWithASCIIString(span.stage, "wait") == 0) {
                elapsed += opening_ns;
                for (SpanSums* sums = this; sums; sums = sums->parent_) sums->startup_ns += elapsed;
            }
        }
        if (kept) kept->spans.push_back({nb::borrow(span.stage), span.start, span.stop, span.worker});
        Cell& cell = cells_[find(span.stage, span.worker)];
        const std::size_t bin = bin_of(elapsed, cell.latest_bin);
        cell.add(elapsed, bin);
        if (parent_) parent_->cells_[cell.in_parent].add(elapsed, bin);
        if (!cell.counts_as_building) return;
        longest = std::max(longest, elapsed);
        if (span.worker >= 0) built_ns_ = std::max(built_ns_, span.stop);
    }

    static bool is_of_step(PyObject* stage) {
        for (const char* name : {"step", "step.cpu", "step.switches"})
            if (PyUnicode_CompareWithASCIIString(stage, name) == 0) return true;
        return false;
    }

    std::size_t bin_of(std::int64_t elapsed, std::size_t hint) const {
        if (hint && hint < bounds_.size() && bounds_[hint - 1] < elapsed && elapsed <= bounds_[hint]) return hint;
        return static_cast<std::size_t>(std::lower_bound(bounds_.begin(), bounds_.end(), elapsed) - bounds_.begin());
    }

    SpanSums& root() { return parent_ ? *parent_ : *this; }

    // The place of the oldest batch, once there are enough.
    KeptBatch* keep(std::int64_t epoch, std::int64_t number) {
        if (!most_kept_) return nullptr;
        if (kept_.size() < most_kept_) {
            kept_.push_back({{}, epoch, number});
            return &kept_.back();
        }
        KeptBatch& batch = kept_[next_];
        next_ = (next_ + 1) % most_kept_;
        batch.spans.clear();
        batch.epoch = epoch;
        batch.number = number;
        return &batch;
    }

    // A loop has few stages and workers: a search through all of them is faster than a hash table.
    std::size_t find(PyObject* stage, std::int64_t worker) {
        for (std::size_t place = 0; place < cells_.size(); ++place)
            if (cells_[place].worker == worker && cells_[place].stage.ptr() == stage) return place;
        for (std::size_t place = 0; place < cells_.size(); ++place)
            if (cells_[place].worker == worker && is_same(cells_[place].stage.ptr(), stage)) return place;
        const std::size_t in_parent = parent_ ? parent_->find(stage, worker) : 0;
        cells_.push_back({nb::borrow(stage), worker, is_building(stage), in_parent});
        cells_.back().bins.resize(bounds_.size() + 1);
        return cells_.size() - 1;
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
    std::vector<Cell> cells_;
    std::size_t most_kept_, next_ = 0;
    std::vector<KeptBatch> kept_;
    nb::object reorder_ = nb::steal(PyUnicode_InternFromString("reorder"));
    std::int64_t built_ns_ = -1, latest_built_ns_ = -1;
};

}  // namespace feedline
