"""Opening 10,000 indexed files with ten million samples: time and memory.

Each turn is a process of its own. The tars are hard links to one tar, each with a copy of its index: ten thousand files
and ten thousand indexes are opened nevertheless. Memory is the growth of the process's own memory after opening the
dataset, and after reading 20,000 random samples. A sample is a label.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import feedline as fl
from harness import Contest

FILES, SAMPLES_EACH = 10_000, 1_000
READ, BATCH = 20_000, 1_000


def tars(folder: Path) -> Path:
    folder.mkdir()
    first = folder / "00000.tar"
    with tarfile.open(first, "w") as tar:
        for number in range(SAMPLES_EACH):
            member = tarfile.TarInfo(f"{number:06d}.cls")
            member.size = 1
            tar.addfile(member, io.BytesIO(b"%d" % (number % 10)))
    fl.datasets.TarShards(first)
    for number in range(1, FILES):
        os.link(first, folder / f"{number:05d}.tar")
        shutil.copyfile(f"{first}.index", folder / f"{number:05d}.tar.index")
    return folder


def tables(folder: Path) -> Path:
    folder.mkdir()
    first = folder / "00000.parquet"
    pq.write_table(pa.table({"label": np.arange(SAMPLES_EACH) % 10}), first)
    for number in range(1, FILES):
        shutil.copyfile(first, folder / f"{number:05d}.parquet")
    fl.datasets.Parquet(folder)
    return folder


def opened(kind: str, folder: Path) -> Any:
    if kind == "TarShards":
        return fl.datasets.TarShards(folder, ("cls",))
    if kind == "Parquet":
        return fl.datasets.Parquet(folder)
    return [path.stat() for path in sorted(folder.iterdir()) if path.suffix != ".index"]


def child(kind: str, folder: Path, samples: int) -> None:
    """Print the seconds to open, and the bytes kept after reading random samples."""
    opened(kind, folder / "few")  # modules that are imported on first use
    before, start = psutil.Process().memory_full_info().uss, perf_counter()
    dataset = opened(kind, folder / "many")
    seconds = perf_counter() - start
    indices = np.random.default_rng(0).integers(0, FILES * SAMPLES_EACH, samples).tolist()
    for at in range(0, samples, BATCH):
        dataset.__getitems__(indices[at : at + BATCH])
    print(seconds, psutil.Process().memory_full_info().uss - before)


def run_child(kind: str, folder: Path, samples: int = 0) -> tuple[float, float]:
    command = [sys.executable, __file__, kind, str(folder), str(samples)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, nbytes = map(float, done.stdout.split())
    return seconds, nbytes


def seconds_of(kind: str, folder: Path) -> float:
    return run_child(kind, folder)[0]


def nbytes_each(kind: str, folder: Path, samples: int) -> float:
    return run_child(kind, folder, samples)[1] / (FILES * SAMPLES_EACH)


def few(many: Path) -> Path:
    """The folder of the files, after copying one file into a folder next to them."""
    fewer = many.parent / "few"
    fewer.mkdir()
    for path in many.glob("00000*"):
        shutil.copy2(path, fewer)
    return many.parent


def main() -> None:
    # The indexes of Parquet files are kept in the user's cache folder.
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        places = {}
        for kind, make in (("TarShards", tars), ("Parquet", tables)):
            Path(name, kind).mkdir()
            places[kind] = few(make(Path(name, kind, "many")))
        opened("Parquet", places["Parquet"] / "few")
        race = Contest("opening 10,000 files with ten million samples", unit="s", baseline="stat of each file")
        race.measure("stat of each file", partial(seconds_of, "stat", places["TarShards"]))
        for kind, place in places.items():
            race.measure(f"feedline, {kind}", partial(seconds_of, kind, place))
        race.run(rounds=5).publish("pyarrow")
        race = Contest("memory of ten million samples", unit="bytes per sample", baseline="the limit")
        race.measure("the limit", lambda: 64.0)
        for kind, place in places.items():
            for when, samples in (("open", 0), ("20,000 samples read", READ)):
                race.measure(f"feedline, {kind}, {when}", partial(nbytes_each, kind, place, samples))
        race.run(rounds=1, warm_up=0).publish("pyarrow")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
