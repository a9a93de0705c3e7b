"""Lines of the user's code in which samples spend their time."""

from __future__ import annotations

import linecache
import os
import pickle
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, monotonic_ns
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from feedline.core.descriptors import pipe
from feedline.core.openmp import end_openmp_threads
from feedline.core.rng_globals import restoring_globals
from feedline.core.torch_wrappers import batch_getter
from feedline.loader.report.sources import LineShare, consumes
from feedline.workers.process.forked import ForkedProcess

SECONDS = 1.0
"""Time for which samples are read."""


INTERVAL_S = 0.002
"""Time between two samples of the stack."""


SWITCH_S = 0.0001
"""Time after which Python's lock is requested from the watched thread.

Python's default is so long that the thread is mostly seen where it gives up the lock by itself, such as in a read.
"""


MOST_LINES = 5


LEAST_SHARE = 0.03
"""Share of the time below which a line is left out."""


_LIBRARIES = tuple({str(Path(path).resolve()) for name, path in sysconfig.get_paths().items() if "lib" in name})


_OWN = str(Path(__file__).resolve().parents[1])


def costly_lines(loader: DataLoader[Any], seconds: float = SECONDS) -> tuple[LineShare, ...]:
    """The lines with the largest shares of the time, largest first.

    Reads samples of a map-style dataset in this process, in a random order, and collates them; nothing is delivered,
    and global generators are restored. A copy of a stream is read from its beginning, in a forked process. Empty for a
    stream that cannot be copied, such as one of an open file, or that takes messages from a queue. Exceptions of the
    dataset are raised.
    """
    if isinstance(loader.dataset, IterableDataset):
        return _lines_of_stream(loader, seconds)
    times = _LineTimes()
    with restoring_globals(), _watching(times):
        _read(loader, monotonic() + seconds, times)
    return tuple(times.shares())


def _lines_of_stream(loader: DataLoader[Any], seconds: float) -> tuple[LineShare, ...]:
    """The lines of a stream; see `costly_lines`."""
    if consumes(loader.dataset) or not hasattr(os, "fork"):
        return ()
    end_openmp_threads()
    reading, writing = pipe()
    with reading, writing:
        process = ForkedProcess()
        process.start(lambda _: _send_lines(loader, seconds, writing.fd))
        writing.close()
        process.end(seconds + _LATE_S)  # a stream may wait for its next sample without a limit
        with open(reading.fd, "rb", closefd=False) as file:
            sent = file.read()
    found = pickle.loads(sent) if sent else ()
    if isinstance(found, Exception):
        raise found
    return tuple(found)


_LATE_S = 2.0
"""Time in which a stream has to give its last sample."""


def _send_lines(loader: DataLoader[Any], seconds: float, fd: int) -> None:
    times, result = _LineTimes(), list[LineShare]()
    try:
        with suppress(TypeError, pickle.PicklingError):
            source = deepcopy(loader.dataset)
            with _watching(times):
                _read_stream(loader, source, monotonic() + seconds, times)
            result = list(times.shares())
        sent = pickle.dumps(result)
    except Exception as error:  # noqa: BLE001 - any error of the user's stream, to be raised in the parent
        sent = pickle.dumps(error)
    os.write(fd, sent)


def _read_stream(loader: DataLoader[Any], source: Any, deadline: float, times: _LineTimes) -> None:
    """Iterate over a stream, and collate its samples, until the deadline."""
    size = loader.batch_size or 1
    while monotonic() < deadline:
        times.stage = "fetch"
        samples, samples_of = list[Any](), iter(source)
        for sample in samples_of:
            samples.append(sample)
            if len(samples) == size or monotonic() > deadline:
                times.stage = "collate"
                loader.collate_fn(samples if loader._auto_collation else samples[0])
                times.stage, samples = "fetch", []
            if monotonic() > deadline:
                return
        if not samples:
            return


class _Line(NamedTuple):
    """A line that a thread runs."""

    path: str = ""
    number: int = 0
    is_own: bool = True
    library: str = ""
    """See `LineShare`."""


@dataclass(slots=True)
class _LineTimes:
    """Nanoseconds of each line, by stage."""

    stage: str = ""
    """The stage that runs now; empty while none does."""
    _times: Counter[tuple[str, _Line]] = field(default_factory=Counter)

    def add(self, line: _Line, taken_ns: int) -> None:
        """Add the time of a line in the present stage."""
        self._times[self.stage, line] += taken_ns

    def shares(self) -> Iterator[LineShare]:
        """The lines with the largest shares, largest first."""
        total_ns, places = self._times.total(), Counter[tuple[str, _Line]]()
        for (stage, line), taken_ns in self._times.items():
            places[stage, line._replace(library="")] += taken_ns
        for (stage, line), taken_ns in places.most_common(MOST_LINES):
            if taken_ns >= LEAST_SHARE * total_ns and line.path:
                where = f"{line.path.rpartition('/')[2]}:{line.number}"
                text = linecache.getline(line.path, line.number).strip()
                yield LineShare(taken_ns / total_ns, where, text, stage, self._library(stage, line), line.is_own)

    def _library(self, stage: str, line: _Line) -> str:
        """The library in which a line spends most of its time."""
        called = {each.library: ns for (of, each), ns in self._times.items() if (of, each[:3]) == (stage, line[:3])}
        return max(called, key=called.__getitem__)


def _read(loader: DataLoader[Any], deadline: float, times: _LineTimes) -> None:
    """Fetch and collate batches until the deadline."""
    dataset: Any = loader.dataset
    size = loader.batch_size or 1
    length = len(dataset)
    if not length:
        return
    source, many = np.random.default_rng(0), batch_getter(dataset)
    while monotonic() < deadline:
        times.stage = "fetch"
        indices = source.integers(0, length, min(size, length)).tolist()
        samples = many(indices) if many is not None else [dataset[index] for index in indices if monotonic() < deadline]
        if samples:
            times.stage = "collate"
            loader.collate_fn(samples if loader._auto_collation else samples[0])


@contextmanager
def _watching(times: _LineTimes) -> Iterator[None]:
    """Add up the nanoseconds of each line of this thread."""
    ended, watched = threading.Event(), threading.get_ident()

    def watch() -> None:
        latest_ns = monotonic_ns()
        while not ended.wait(INTERVAL_S):
            # Before and after its stages, the thread waits for the start or the end of this one.
            line = _line_of(sys._current_frames().get(watched)) if times.stage else None
            now_ns = monotonic_ns()
            if line is not None:
                # Not 1: while a thread that holds Python's lock has no CPU, no sample can be taken.
                times.add(line, now_ns - latest_ns)
            latest_ns = now_ns

    watcher = threading.Thread(target=watch, name="feedline-lines", daemon=True)
    watcher.start()
    usual_s = sys.getswitchinterval()
    try:
        sys.setswitchinterval(min(SWITCH_S, usual_s))
        yield
    finally:
        times.stage = ""
        sys.setswitchinterval(usual_s)
        ended.set()
        watcher.join()


def _line_of(frame: FrameType | None) -> _Line:
    """The innermost line of the user's code, else of a library.

    Empty if there is only feedline's code.
    """
    innermost, library = _Line(), ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path == _INNERMOST_OF_OURS:
            break
        if not path.startswith(("<", _OWN)):
            if not path.startswith(_LIBRARIES):
                return _Line(path, frame.f_lineno, True, library)
            innermost = innermost if innermost.path else _Line(path, frame.f_lineno, False)
            library = _module_of(path)
        frame = frame.f_back
    return innermost


def _module_of(path: str) -> str:
    """Top-level module of a library's file."""
    folder = max((each for each in _LIBRARIES if path.startswith(each)), key=len)
    return path[len(folder) + 1 :].partition("/")[0].removesuffix(".py")


_INNERMOST_OF_OURS = __file__
