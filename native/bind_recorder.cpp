#include <Python.h>

#include <cstdint>
#include <ctime>

#include "module.h"
#include "spans.h"

namespace feedline {
namespace {

// Places of a page's words: see core/page.py.
constexpr std::size_t SINCE = 1, BATCHES = 2;

// The clocks of Python's `time` module: Linux only, elsewhere they have other names and origins.
std::int64_t clock_ns(clockid_t clock) {
    timespec now{};
    clock_gettime(clock, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

nb::object integer(std::int64_t value) {
    nb::object number = nb::steal(PyLong_FromLongLong(value));
    if (!number.is_valid()) throw nb::python_error();
    return number;
}

nb::object name(const char* text) { return nb::steal(PyUnicode_InternFromString(text)); }

void append(nb::handle spans, nb::handle stage, nb::handle start, nb::handle stop, nb::handle worker) {
    const nb::object span = nb::steal(PyTuple_Pack(4, stage.ptr(), start.ptr(), stop.ptr(), worker.ptr()));
    if (!span.is_valid() || PyList_Append(spans.ptr(), span.ptr())) throw nb::python_error();
}

// Spans and clocks of one thread. `cpu_` is negative where the CPU clock was not read for this batch.
class Recorder {
public:
    Recorder(std::int64_t cpu_every_ns, const nb::str& cpu_suffix, const nb::object& when_due)
        : spans(nb::none()), worker(nb::int_(-1)), every_ns_(cpu_every_ns), suffix_(cpu_suffix), when_due_(when_due) {}

    nb::object begin() {
        nb::object outer = spans;
        spans = nb::list();
        mark_ns_ = clock_ns(CLOCK_MONOTONIC);
        mark_ = integer(mark_ns_);
        cpu_ = -1;
        if (mark_ns_ >= next_cpu_ns) {
            next_cpu_ns = mark_ns_ + every_ns_;
            cpu_ = clock_ns(cpu_clock());
        }
        return outer;
    }

    void end(nb::handle stage) {
        if (cpu_ >= 0) {  // before the wall clock: the span covers what is measured
            const std::int64_t cpu = clock_ns(cpu_clock());
            append(spans, nb::steal(PyUnicode_Concat(stage.ptr(), suffix_.ptr())), integer(cpu_), integer(cpu), worker);
            cpu_ = cpu;
        }
        mark_ns_ = clock_ns(CLOCK_MONOTONIC);
        nb::object now = integer(mark_ns_);
        append(spans, stage, mark_, now, worker);
        mark_ = now;
    }

    nb::object finish(nb::handle stage, const nb::object& outer) {
        end(stage);
        if (mark_ns_ >= next_delay_ns) when_due_(spans, mark_);
        nb::object recorded = spans;
        spans = outer;
        return recorded;
    }

    nb::object spans;
    nb::object worker;
    bool own_process = false;
    std::int64_t next_cpu_ns = 0, next_delay_ns = 0, delay_ns = -1;

private:
    clockid_t cpu_clock() const { return own_process ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_THREAD_CPUTIME_ID; }

    std::int64_t every_ns_;
    nb::str suffix_;
    nb::object when_due_;
    nb::object mark_;
    std::int64_t mark_ns_ = 0, cpu_ = -1;
};

// The words of a page. Without the GIL, the lock keeps `release` from unmapping them under a writer.
class PageWords {
public:
    explicit PageWords(nb::handle memory) : buffer_(new Buffer(memory, true)) {
        words_ = buffer_->int64_items();
        length_ = static_cast<std::size_t>(buffer_->shape(0));
    }
    ~PageWords() { delete buffer_; }
    PageWords(const PageWords&) = delete;
    PageWords& operator=(const PageWords&) = delete;

    std::int64_t get(std::size_t place) {
        nb::ft_lock_guard guard(mutex_);
        return words_ && place < length_ ? words_[place] : 0;
    }
    void set(std::size_t place, std::int64_t value) {
        nb::ft_lock_guard guard(mutex_);
        if (words_ && place < length_) __atomic_store_n(words_ + place, value, __ATOMIC_RELAXED);
    }
    void release() {
        Buffer* buffer = nullptr;
        {
            nb::ft_lock_guard guard(mutex_);
            std::swap(buffer, buffer_);
            words_ = nullptr;
        }
        delete buffer;
    }

private:
    nb::ft_mutex mutex_;
    Buffer* buffer_;
    std::int64_t* words_ = nullptr;
    std::size_t length_ = 0;
};

// Clock of a loop, and its writer of the page.
class LoopClock {
public:
    explicit LoopClock(const nb::object& words)
        : object_(words), words_(words.is_none() ? nullptr : nb::cast<PageWords*>(words)) {
        leave();
    }

    std::int64_t call() {
        called_ns_ = clock_ns(CLOCK_MONOTONIC);
        if (words_) words_->set(SINCE, -called_ns_);
        return called_ns_;
    }

    void begin_sample() { sample_ns_ = clock_ns(CLOCK_MONOTONIC); }
    void end_sample() { sampled_ns_ += clock_ns(CLOCK_MONOTONIC) - sample_ns_; }

    // Counts a batch with its spans and those of the loop, which need no tuples.
    std::int64_t deliver(SpanSums& sums, nb::handle spans, std::int64_t samples, std::int64_t epoch,
                         std::int64_t number) {
        const std::int64_t now_ns = clock_ns(CLOCK_MONOTONIC);
        const SpanSums::Own own[] = {{step_.ptr(), left_ns_, called_ns_},
                                     {wait_.ptr(), called_ns_, now_ns},
                                     {sampling_.ptr(), now_ns - sampled_ns_, now_ns}};
        const std::int64_t longest = sums.add(spans, own, sampled_ns_ ? 3 : 2, samples, epoch, number);
        if (words_) {
            words_->set(BATCHES, words_->get(BATCHES) + 1);
            words_->set(SINCE, now_ns);
        }
        sampled_ns_ = 0;
        left_ns_ = now_ns;
        return longest;
    }

    void leave() { left_ns_ = clock_ns(CLOCK_MONOTONIC); }

private:
    nb::object object_;
    PageWords* words_;
    nb::object step_ = name("step"), wait_ = name("wait"), sampling_ = name("sample");
    std::int64_t left_ns_ = 0, called_ns_ = 0, sample_ns_ = 0, sampled_ns_ = 0;
};

}  // namespace

void bind_recorder(nb::module_& m) {
    nb::class_<Recorder>(m, "Recorder")
        .def(nb::init<std::int64_t, nb::str, nb::object>(), nb::arg("cpu_every_ns"), nb::arg("cpu_suffix"),
             nb::arg("when_due"))
        .def("begin", &Recorder::begin)
        .def("end", &Recorder::end, nb::arg("stage"))
        .def("finish", &Recorder::finish, nb::arg("stage"), nb::arg("outer").none())
        .def_rw("spans", &Recorder::spans, nb::arg().none())
        .def_rw("worker", &Recorder::worker)
        .def_rw("own_process", &Recorder::own_process)
        .def_rw("next_cpu_ns", &Recorder::next_cpu_ns)
        .def_rw("next_delay_ns", &Recorder::next_delay_ns)
        .def_rw("delay_ns", &Recorder::delay_ns);
    nb::class_<PageWords>(m, "PageWords")
        .def(nb::init<nb::handle>(), nb::arg("memory"))
        .def("__getitem__", &PageWords::get)
        .def("__setitem__", &PageWords::set)
        .def("release", &PageWords::release);
    nb::class_<LoopClock>(m, "LoopClock")
        .def(nb::init<const nb::object&>(), nb::arg("words").none())
        .def("call", &LoopClock::call)
        .def("begin_sample", &LoopClock::begin_sample)
        .def("end_sample", &LoopClock::end_sample)
        .def("deliver", &LoopClock::deliver, nb::arg("sums"), nb::arg("spans"), nb::arg("samples"), nb::arg("epoch"),
             nb::arg("number"))
        .def("leave", &LoopClock::leave);
}

}  // namespace feedline
