"""Lines of the user's code in which samples spend their time."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, monotonic_ns
from types import FrameType
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from feedline.core.rng_globals import restoring_globals
from feedline.core.torch_wrappers import batch_getter
from feedline.loader.report.verdict import LineShare

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
    and global generators are restored. Empty for a stream: reading would advance it. Exceptions of the dataset are
    raised.
    """
    if isinstance(loader.dataset, IterableDataset):
        return ()
    times = Counter[tuple[str, int]]()
    with restoring_globals(), _watching(times):
        _read(loader, monotonic() + seconds)
    total_ns = times.total()
    return tuple(
        LineShare(taken_ns / total_ns, f"{place[0].rpartition('/')[2]}:{place[1]}", linecache.getline(*place).strip())
        for place, taken_ns in times.most_common(MOST_LINES)
        if taken_ns >= LEAST_SHARE * total_ns and place[0]
    )


def _read(loader: DataLoader[Any], deadline: float) -> None:
    """Fetch and collate batches until the deadline."""
    dataset: Any = loader.dataset
    size = loader.batch_size or 1
    length = len(dataset)
    if not length:
        return
    source, many = np.random.default_rng(0), batch_getter(dataset)
    while monotonic() < deadline:
        indices = source.integers(0, length, min(size, length)).tolist()
        samples = many(indices) if many is not None else [dataset[index] for index in indices if monotonic() < deadline]
        if samples:
            loader.collate_fn(samples if loader._auto_collation else samples[0])


@contextmanager
def _watching(times: Counter[tuple[str, int]]) -> Iterator[None]:
    """Add up the nanoseconds of each line of this thread."""
    ended, watched = threading.Event(), threading.get_ident()
    reads = False  # else the thread waits for the start or the end of the other

    def watch() -> None:
        latest_ns = monotonic_ns()
        while not ended.wait(INTERVAL_S):
            line = _line_of(sys._current_frames().get(watched)) if reads else None
            now_ns = monotonic_ns()
            if line is not None:
                # Not 1: while a thread that holds Python's lock has no CPU, no sample can be taken.
                times[line] += now_ns - latest_ns
            latest_ns = now_ns

    watcher = threading.Thread(target=watch, name="feedline-lines", daemon=True)
    watcher.start()
    usual_s = sys.getswitchinterval()
    try:
        sys.setswitchinterval(min(SWITCH_S, usual_s))
        reads = True
        yield
    finally:
        reads = False
        sys.setswitchinterval(usual_s)
        ended.set()
        watcher.join()


def _line_of(frame: FrameType | None) -> tuple[str, int]:
    """The innermost line of the user's code, else of a library.

    ("", 0) if there is only feedline's code.
    """
    of_library = "", 0
    while frame is not None:
        path = frame.f_code.co_filename
        if path == _INNERMOST_OF_OURS:
            break
        if not path.startswith(("<", _OWN)):
            if not path.startswith(_LIBRARIES):
                return path, frame.f_lineno
            of_library = of_library if of_library[0] else (path, frame.f_lineno)
        frame = frame.f_back
    return of_library


_INNERMOST_OF_OURS = __file__
