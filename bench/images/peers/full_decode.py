"""A limit, not a loader: every image decoded whole by libjpeg-turbo in plain threads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import simplejpeg

from task import Task


def open_epochs(task: Task) -> Callable[[], Iterator[int]]:
    paths, _ = task.files()
    rng = random.Random(0)
    pool = ThreadPoolExecutor(task.workers)

    def decoded(index: int) -> int:
        simplejpeg.decode_jpeg(Path(paths[index]).read_bytes())
        return 1

    return lambda: pool.map(decoded, task.drawn(rng))
