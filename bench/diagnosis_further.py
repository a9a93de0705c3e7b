"""Eight further loops with one known bottleneck each.

Unlike those of `diagnosis_fields`, their workers limit each other: locks, Python's lock, memory, uneven samples.
"""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from diagnosis_pipelines import Pipeline, Samples, plain_list, sleep_step

PROCESSES = {"worker_method": "process"}
THREADS = {"worker_method": "thread"}


class MelFrames(Samples):
    """Mel spectrograms, in NumPy."""

    sound = np.random.default_rng(0).normal(0, 0.1, 32_000).astype(np.float32)
    bank = np.random.default_rng(1).random((201, 64), dtype=np.float32)

    def __getitem__(self, index: int) -> Any:
        frames = np.lib.stride_tricks.sliding_window_view(np.roll(self.sound, index), 400)[::160] * np.hanning(400)
        return torch.from_numpy(np.log1p(np.abs(np.fft.rfft(frames)).astype(np.float32) @ self.bank))


class Walks(Samples):
    """Random walks on a graph, one step of Python after the other."""

    neighbors = np.random.default_rng(0).integers(0, 5000, (5000, 16)).tolist()

    def __getitem__(self, index: int) -> Any:
        node, path = index % 5000, []
        for step in range(2000):
            node = self.neighbors[node][(index * 31 + step * 17) % 16]
            path.append(node)
        return torch.tensor(path[::50])


class Pages(Dataset[Any]):
    """Blobs of a SQLite table, each worker with a connection of its own."""

    def __init__(self, path: Path, length: int) -> None:
        self.path, self.length = path, length
        self.kept = threading.local()

    def __len__(self) -> int:
        return self.length

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "kept": None}

    def __getitem__(self, index: int) -> Any:
        if self.kept is None:
            self.kept = threading.local()
        if not hasattr(self.kept, "connection"):
            self.kept.connection = sqlite3.connect(self.path)
        rows = self.kept.connection.execute(
            "select value from pages where number between ? and ? order by number desc",
            (index % 500, index % 500 + 400),
        ).fetchall()
        return torch.tensor([sum(value[:64]) for (value,) in rows])


class Grids(Dataset[Any]):
    """Rows of a compressed HDF5 file, in an order that decodes a chunk for each."""

    def __init__(self, path: Path, length: int) -> None:
        self.path, self.length = path, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        import h5py

        with h5py.File(self.path) as file:
            return torch.from_numpy(file["grids"][index * 67 % 512])


WORDS = re.compile(r"\w+|[^\w\s]")


class Sentences(Samples):
    """Texts, tokenized by regular expressions: Python's lock is held all the time."""

    def __getitem__(self, index: int) -> Any:
        words = WORDS.findall(f"Sentence {index}: it's plain, isn't it? " * 200)
        return torch.tensor([hash(word) % 30_000 for word in words[:128]])


LOCK = threading.Lock()


class OneReader(Samples):
    """Samples that one thread at a time may read."""

    def __getitem__(self, _: int) -> Any:
        time.sleep(0.001)
        with LOCK:
            time.sleep(0.003)
        return torch.zeros(8)


class Volumes(Samples):
    """Large arrays in memory: only their copy into the batch takes time."""

    volume = torch.ones(1 << 20)

    def __getitem__(self, _: int) -> Any:
        return self.volume


class LongTails(Samples):
    """Samples of which a few take a hundred times as long as most."""

    waits = np.random.default_rng(3).lognormal(-7.0, 1.8, 1 << 16).clip(0, 0.3)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.waits[index])
        return torch.zeros(8)


def further(folder: Path) -> list[Pipeline]:
    """Eight loops on files below `folder`."""
    one, two = {**PROCESSES, "num_workers": 1}, {**THREADS, "num_workers": 2}
    return [
        Pipeline("mel frames in NumPy", ("fetch",), {"dataset": MelFrames(3200), **one}, sleep_step(0.001)),
        Pipeline("random walks", ("fetch",), {"dataset": Walks(3200)}, sleep_step(0.002)),
        Pipeline("SQLite: a range of rows", ("fetch",), {"dataset": Pages(folder / "pages.db", 8000), **one},
                 sleep_step(0.002)),
        Pipeline("HDF5: a chunk for a row", ("fetch",), {"dataset": Grids(folder / "grids.h5", 1600), **one},
                 sleep_step(0.002)),
        Pipeline("a tokenizer on threads", ("fetch",), {"dataset": Sentences(6400), **two}, sleep_step(0.001)),
        Pipeline("a lock between 4 threads", ("fetch",), {"dataset": OneReader(1200), **two, "num_workers": 4},
                 sleep_step(0.002)),
        Pipeline("batches of 32 MB", ("collate",), {"dataset": Volumes(1600), **one}, sleep_step(0.001),
                 {"collate_fn": plain_list, "dataset": Samples(1600)}),
        Pipeline("a long tail of samples", ("straggler", "fetch"),
                 {"dataset": LongTails(3200), **PROCESSES, "num_workers": 4}, sleep_step(0.006)),
    ]  # fmt: skip


def write_further_files(folder: Path) -> None:
    """A database of pages, and grids."""
    import h5py

    source = np.random.default_rng(0)
    with sqlite3.connect(folder / "pages.db") as connection:
        connection.execute("create table pages (number integer primary key, value blob)")
        pages = ((number, source.bytes(4096)) for number in range(1000))
        connection.executemany("insert into pages values (?, ?)", pages)
    connection.close()
    with h5py.File(folder / "grids.h5", "w") as file:
        grids = source.integers(0, 60, (512, 64, 64)).astype(np.float32)
        file.create_dataset("grids", data=grids, chunks=(8, 64, 64), compression="gzip", compression_opts=1)
