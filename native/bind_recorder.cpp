#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <deque>
#include <vector>

#include "module.h"
#include "part_block.h"
#include "spans.h"

namespace feedline {
namespace {

// Places of a page's words: see core/page.py.
constexpr std::size_t PHASE_START = 1, BATCHES = 2;

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

// Times of one part of the current stage, such as "decode".
struct PartSum {
    nb::object stage;
    std::int64_t number = 0, total = 0, cpu_wall = 0, cpu = 0, nbytes = 0;
};

// Parts of one batch. A batch that a dataset builds within another batch has its own frame.
struct Frame {
    nb::object spans;
    bool timed = false, has_cpu = false;
    std::int64_t begun = 0, mark = 0, cpu_mark = 0, switches = 0, cpu_switches = 0;
    std::vector<PartSum> sums;
    std::vector<std::size_t> open;
};

// Spans and clocks of one thread. `cpu_` is negative where the CPU clock was not read for this batch.
class Recorder {
public:
    // Further parts count as a part of the last one.
    static constexpr std::size_t MOST_PARTS = 16;
    // Switches between parts at which the CPU clock is read. The rest of a batch is assumed to be like its beginning.
    static constexpr std::int64_t CPU_SWITCHES = 32;
    // Nanoseconds of a switch, and of a switch that reads the CPU clock. After a timed batch, no batch is timed for
    // `REST` times the cost of its switches.
    static constexpr std::int64_t SWITCH_NS = 80, CPU_SWITCH_NS = 500, REST = 250;

    Recorder(std::int64_t cpu_every_ns, const nb::tuple& suffixes, const nb::str& timed, const nb::object& when_due)
        : spans(nb::none()), worker(nb::int_(-1)), every_ns_(cpu_every_ns), suffix_(suffixes[0]), nbytes_(suffixes[1]),
          timed_(timed), when_due_(when_due) {}
    ~Recorder() {
        if (current == this) current = nullptr;
        if (kept == this) kept = nullptr;
    }

    // The recorder of this thread's latest batch, from its first batch on.
    static thread_local Recorder* current;
    // The one that Python's data of this thread owns, and its object.
    static thread_local Recorder* kept;
    static thread_local PyObject* kept_object;

    nb::object begin() {
        nb::object outer = spans;
        drop_stale_frames();
        spans = nb::list();
        mark_ns_ = clock_ns(CLOCK_MONOTONIC);
        mark_ = integer(mark_ns_);
        cpu_ = -1;
        if (mark_ns_ >= next_cpu_ns) {
            next_cpu_ns = mark_ns_ + every_ns_;
            cpu_ = clock_ns(cpu_clock());
        }
        current = this;
        open_frame();
        return outer;
    }

    void end(nb::handle stage) {
        if (cpu_ >= 0) {  // before the wall clock, so that the span covers the measured time
            const std::int64_t cpu = clock_ns(cpu_clock());
            append_counter(stage, suffix_, cpu_, cpu);
            cpu_ = cpu;
        }
        const std::int64_t begun_ns = mark_ns_;
        mark_ns_ = clock_ns(CLOCK_MONOTONIC);
        nb::object now = integer(mark_ns_);
        append(spans, stage, mark_, now, worker);
        mark_ = now;
        if (Frame* const frame = timed_frame()) append_parts(*frame, begun_ns);
    }

    nb::object finish(nb::handle stage, const nb::object& outer) {
        end(stage);
        if (Frame* const frame = timed_frame()) close_frame(*frame);
        if (mark_ns_ >= next_delay_ns) when_due_(spans, mark_);
        nb::object recorded = spans;
        spans = outer;
        drop_stale_frames();
        return recorded;
    }

    // The frame of the current batch, if its parts are timed.
    Frame* timed_frame() {
        if (!depth_) return nullptr;
        if (frames_[depth_ - 1].spans.ptr() != spans.ptr()) drop_stale_frames();
        return depth_ && frames_[depth_ - 1].timed ? &frames_[depth_ - 1] : nullptr;
    }

    // Begin a part; a part around it pauses.
    void enter(Frame& frame, nb::handle stage) {
        change(frame);
        frame.open.push_back(place_of(frame, stage));
        frame.sums[frame.open.back()].number += 1;
    }

    void leave(Frame& frame) {
        if (frame.open.empty()) return;  // begun before the batch
        change(frame);
        frame.open.pop_back();
    }

    static void count(Frame& frame, std::int64_t nbytes) {
        if (!frame.open.empty()) frame.sums[frame.open.back()].nbytes += nbytes;
    }

    // Time of the innermost part that belongs to another one.
    void claim(Frame& frame, nb::handle stage, std::int64_t elapsed, std::int64_t nbytes) {
        if (frame.open.empty()) return;
        PartSum& part = frame.sums[place_of(frame, stage)];  // first: it may move the others
        PartSum& inner = frame.sums[frame.open.back()];
        part.number += 1;
        part.total += elapsed;
        part.nbytes += nbytes;
        inner.total -= elapsed;
        if (frame.has_cpu && frame.cpu_switches && frame.cpu_switches < CPU_SWITCHES) inner.cpu_wall -= elapsed;
    }

    nb::object spans;
    nb::object worker;
    bool own_process = false;
    std::int64_t next_cpu_ns = 0, next_delay_ns = 0, delay_ns = -1, files_nbytes = -1, next_parts_ns = 0;

private:
    clockid_t cpu_clock() const { return own_process ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_THREAD_CPUTIME_ID; }

    void append_counter(nb::handle stage, const nb::object& suffix, std::int64_t start, std::int64_t stop) {
        const nb::object name = nb::steal(PyUnicode_Concat(stage.ptr(), suffix.ptr()));
        if (!name.is_valid()) throw nb::python_error();
        append(spans, name, integer(start), integer(stop), worker);
    }

    // After an error, the frame of the failed batch remains.
    void drop_stale_frames() {
        while (depth_ && frames_[depth_ - 1].spans.ptr() != spans.ptr()) frames_[--depth_].spans = nb::object();
    }

    void open_frame() {
        if (frames_.size() == depth_) frames_.emplace_back();
        Frame& frame = frames_[depth_++];
        frame.spans = spans;
        frame.timed = mark_ns_ >= next_parts_ns;
        frame.has_cpu = cpu_ >= 0;
        frame.begun = mark_ns_;
        frame.switches = frame.cpu_switches = 0;
        frame.sums.clear();
        frame.open.clear();
    }

    void close_frame(Frame& frame) {
        if (!has_parts_) return;
        append(spans, timed_, integer(frame.begun), mark_, worker);
        const std::int64_t cost = frame.switches * SWITCH_NS + frame.cpu_switches * CPU_SWITCH_NS;
        next_parts_ns = frame.begun + std::max(every_ns_, REST * cost);
    }

    std::size_t place_of(Frame& frame, nb::handle stage) {
        has_parts_ = true;
        for (std::size_t place = 0; place < frame.sums.size(); ++place)
            if (frame.sums[place].stage.is(stage)) return place;
        if (frame.sums.size() == MOST_PARTS) return MOST_PARTS - 1;
        frame.sums.push_back({nb::borrow(stage)});
        return frame.sums.size() - 1;
    }

    // Count the time since the last change for the innermost part.
    void change(Frame& frame) {
        const bool reads_cpu = frame.has_cpu && frame.cpu_switches < CPU_SWITCHES;
        // The first switch only marks the clock.
        const std::int64_t cpu = reads_cpu ? clock_ns(cpu_clock()) : 0;
        const std::int64_t now = clock_ns(CLOCK_MONOTONIC);
        if (!frame.open.empty()) {
            PartSum& sum = frame.sums[frame.open.back()];
            sum.total += now - frame.mark;
            if (reads_cpu && frame.cpu_switches) sum.cpu_wall += now - frame.mark, sum.cpu += cpu - frame.cpu_mark;
        }
        frame.mark = now;
        frame.cpu_mark = cpu;
        frame.switches += 1;
        frame.cpu_switches += reads_cpu;
    }

    // Spans of the parts, in sequence from the start of their stage.
    void append_parts(Frame& frame, std::int64_t start) {
        for (PartSum& sum : frame.sums) {
            if (!sum.number) continue;
            append(spans, sum.stage, integer(start), integer(start + sum.total), worker);
            start += sum.total;
            if (sum.cpu_wall > 0) {
                const double share = static_cast<double>(sum.total) / static_cast<double>(sum.cpu_wall);
                append_counter(sum.stage, suffix_, 0, static_cast<std::int64_t>(static_cast<double>(sum.cpu) * share));
            }
            if (sum.nbytes) append_counter(sum.stage, nbytes_, 0, sum.nbytes);
            sum.number = sum.total = sum.cpu_wall = sum.cpu = sum.nbytes = 0;
        }
    }

    std::int64_t every_ns_;
    nb::object suffix_, nbytes_, timed_;
    nb::object when_due_;
    nb::object mark_;
    std::int64_t mark_ns_ = 0, cpu_ = -1;
    bool has_parts_ = false;
    std::size_t depth_ = 0;
    std::deque<Frame> frames_;
};

thread_local Recorder* Recorder::current = nullptr;
thread_local Recorder* Recorder::kept = nullptr;
thread_local PyObject* Recorder::kept_object = nullptr;

// Returns the recorder in Python's data of a thread. Never freed: threads may outlive the module.
PyObject* owner = nullptr;

void set_owner(nb::handle own) {
    Py_XDECREF(owner);
    owner = own.inc_ref().ptr();
}

// The recorder of this thread. Python's data of a thread take twice as long.
nb::object recorder_of_thread() {
    if (!Recorder::kept) {
        const nb::object recorder = nb::handle(owner)();
        Recorder::kept = nb::cast<Recorder*>(recorder);
        Recorder::kept_object = recorder.ptr();
    }
    return nb::borrow(Recorder::kept_object);
}

}  // namespace

// A part of the stages of batches, for `with` statements. It has no state: threads share it.
class Part {
public:
    explicit Part(const nb::str& stage) : stage(stage) {}

    void enter() const {
        Recorder* const recorder = Recorder::current;
        if (!recorder) return;
        if (Frame* const frame = recorder->timed_frame()) recorder->enter(*frame, stage);
    }

    void leave() const {
        Recorder* const recorder = Recorder::current;
        if (!recorder) return;
        if (Frame* const frame = recorder->timed_frame()) recorder->leave(*frame);
    }

    bool timed() const { return Recorder::current && Recorder::current->timed_frame(); }

    void count(std::int64_t nbytes) const {
        if (!Recorder::current) return;
        if (Frame* const frame = Recorder::current->timed_frame()) Recorder::count(*frame, nbytes);
    }

    void claim(std::int64_t elapsed_ns, std::int64_t nbytes) const {
        if (!Recorder::current) return;
        if (Frame* const frame = Recorder::current->timed_frame())
            Recorder::current->claim(*frame, stage, elapsed_ns, nbytes);
    }

    nb::str stage;
};

PartBlock::PartBlock(nb::handle part, std::int64_t nbytes) {
    if (part.is_none() || !Recorder::current || !Recorder::current->timed_frame()) return;
    part_ = nb::cast<const Part*>(part);
    part_->enter();
    part_->count(nbytes);
}

PartBlock::~PartBlock() {
    if (part_) part_->leave();
}

namespace {

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
        if (words_) words_->set(PHASE_START, -called_ns_);
        return called_ns_;
    }

    // The result of `draw()`, whose time is that of the sampler if it is true.
    nb::object sample(nb::handle draw) {
        const std::int64_t begun_ns = clock_ns(CLOCK_MONOTONIC);
        nb::object drew = draw();
        const int counts = PyObject_IsTrue(drew.ptr());
        if (counts < 0) throw nb::python_error();
        if (counts) sampled_ns_ += clock_ns(CLOCK_MONOTONIC) - begun_ns;
        return drew;
    }

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
            words_->set(PHASE_START, now_ns);
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
    std::int64_t left_ns_ = 0, called_ns_ = 0, sampled_ns_ = 0;
};

}  // namespace

void bind_recorder(nb::module_& m) {
    nb::class_<Recorder>(m, "Recorder")
        .def(nb::init<std::int64_t, nb::tuple, nb::str, nb::object>(), nb::arg("cpu_every_ns"), nb::arg("suffixes"),
             nb::arg("timed"), nb::arg("when_due"))
        .def("begin", &Recorder::begin)
        .def("end", &Recorder::end, nb::arg("stage"))
        .def("finish", &Recorder::finish, nb::arg("stage"), nb::arg("outer").none())
        .def_rw("spans", &Recorder::spans, nb::arg().none())
        .def_rw("worker", &Recorder::worker)
        .def_rw("own_process", &Recorder::own_process)
        .def_rw("next_cpu_ns", &Recorder::next_cpu_ns)
        .def_rw("next_delay_ns", &Recorder::next_delay_ns)
        .def_rw("delay_ns", &Recorder::delay_ns)
        .def_rw("files_nbytes", &Recorder::files_nbytes)
        .def_rw("next_parts_ns", &Recorder::next_parts_ns);
    m.def("own_recorders", &set_owner, nb::arg("own"));
    m.def("recorder_of_thread", &recorder_of_thread);
    nb::class_<Part>(m, "Part")
        .def(nb::init<nb::str>(), nb::arg("stage"))
        .def("__enter__", [](nb::object self) { nb::cast<const Part&>(self).enter(); return self; })
        .def("__exit__", [](const Part& self, nb::handle, nb::handle, nb::handle) { self.leave(); },
             nb::arg("kind").none(), nb::arg("error").none(), nb::arg("traceback").none())
        .def("count", &Part::count, nb::arg("nbytes"))
        .def("claim", &Part::claim, nb::arg("elapsed_ns"), nb::arg("nbytes"))
        .def_prop_ro("timed", &Part::timed)
        .def_ro("stage", &Part::stage);
    nb::class_<PageWords>(m, "PageWords")
        .def(nb::init<nb::handle>(), nb::arg("memory"))
        .def("__getitem__", &PageWords::get)
        .def("__setitem__", &PageWords::set)
        .def("release", &PageWords::release);
    nb::class_<LoopClock>(m, "LoopClock")
        .def(nb::init<const nb::object&>(), nb::arg("words").none())
        .def("call", &LoopClock::call)
        .def("sample", &LoopClock::sample, nb::arg("draw"))
        .def("deliver", &LoopClock::deliver, nb::arg("sums"), nb::arg("spans"), nb::arg("samples"), nb::arg("epoch"),
             nb::arg("number"))
        .def("leave", &LoopClock::leave);
}

}  // namespace feedline
