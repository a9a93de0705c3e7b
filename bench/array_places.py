"""Rows of array files by place: mapped, and as ranges of objects in a store without latency.

The store answers at once, so the figures are the time that feedline itself takes. `--seconds` prints the best time of
each case as JSON instead, to compare two checkouts: run it with the source of each in turns.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import fsspec
import h5py
import numpy as np
import zarr

from feedline import datasets
from feedline.core.dataset import BatchRead
from feedline.core.tensors import allocate_tensor
from harness import Contest

ROWS, BATCH, BATCHES, SINGLES = 4096, 64, 20, 400


def corpus(folder: Path) -> dict[str, Callable[[str], Any]]:
    """Write the files of each case; returns a function that opens them below an address."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (ROWS, 64, 64, 3), np.uint8)
    vectors = rng.normal(size=(ROWS, 16)).astype(np.float32)
    np.save(folder / "images.npy", images)
    np.save(folder / "vectors.npy", vectors)
    np.save(folder / "swapped.npy", vectors.astype(">f4"))
    np.arange(ROWS * 64, dtype=np.uint16).tofile(folder / "tokens.bin")
    with h5py.File(folder / "rows.h5", "w") as file:
        file["flat"] = images
        file.create_dataset("chunked", data=images, chunks=(64, 64, 64, 3))
    group = zarr.open_group(folder / "rows.zarr", mode="w")
    group.create_array("x", data=images, chunks=(64, 64, 64, 3))
    h5, z = datasets.HDF5, datasets.Zarr
    return {
        "npy, images": lambda at: datasets.ArrayFile(f"{at}/images.npy"),
        "npy, two files": lambda at: datasets.ArrayFile({"x": f"{at}/images.npy", "y": f"{at}/vectors.npy"}),
        "npy, other byte order": lambda at: datasets.ArrayFile(f"{at}/swapped.npy"),
        "tokens": lambda at: datasets.TokenFile(f"{at}/tokens.bin", 64, dtype=np.uint16),
        "HDF5, contiguous": lambda at: h5(f"{at}/rows.h5", "flat"),
        "HDF5, chunked": lambda at: h5(f"{at}/rows.h5", "chunked", cache_nbytes=0),
        "Zarr": lambda at: z(f"{at}/rows.zarr", "x", cache_nbytes=0),
    }


def batches(dataset: Any, count: int) -> None:
    """Read batches of random rows."""
    rng = np.random.default_rng(1)
    for _ in range(count):
        dataset.read_batch(BatchRead(rng.integers(0, len(dataset), BATCH), allocate_tensor))


def singles(dataset: Any, count: int) -> None:
    """Read random rows one by one."""
    for index in np.random.default_rng(2).integers(0, len(dataset), count).tolist():
        dataset[index]


def put(folder: Path) -> str:
    """Copy the files into a store in memory."""
    system = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            system.pipe(f"/rows/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return "memory://rows"


def cases(folder: Path) -> dict[str, tuple[Callable[[], None], int]]:
    """Each case, and the number of reads in one call of it."""
    found: dict[str, tuple[Callable[[], None], int]] = {}
    opened = corpus(folder)
    for place, at in (("mapped", str(folder)), ("remote", put(folder))):
        for name, open_at in opened.items():
            dataset = open_at(at)
            slow = name.endswith("chunked") or name == "Zarr"
            count = 1 if slow else BATCHES
            found[f"{name}, batches, {place}"] = partial(batches, dataset, count), count
            if not slow:
                found[f"{name}, singles, {place}"] = partial(singles, dataset, SINGLES), SINGLES
    return found


def best_seconds(run: Callable[[], None], rounds: int = 7) -> float:
    """The least time of several calls."""
    run()
    times = []
    for _ in range(rounds):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return min(times)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = cases(Path(folder))
        if sys.argv[1:] == ["--seconds"]:
            print(json.dumps({name: best_seconds(run) for name, (run, _) in found.items()}))
            return
        contest = Contest("array places", unit="reads/s", baseline="npy, images, batches, mapped")
        for name, (run, work) in found.items():
            contest.add(name, run, work=work)
        contest.run(rounds=5).publish("h5py", "zarr")


if __name__ == "__main__":
    main()
