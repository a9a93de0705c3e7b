"""Shuffled rows of tables, compared with torch over `datasets`; rows of a remote Arrow file, compared with pyarrow."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data import DataLoader, Dataset

import datasets
import feedline as fl
from feedline.datasets.file_objects import RangeFile
from harness import Contest
from loaders import rate

SEED = 0
ROWS = 1_000_000
BATCH = 1024

FAR_ROWS = 200_704
FAR_COLUMNS = {"number and text": ["c1", "s0"], "number and list": ["c1", "v0"], "all columns": None}
FAR_BATCH = 32
FAR_BATCHES = 8
FAR_CHUNK = 256
FAR_PATH = "/tables/wide.arrow"
LATENCY_S = 0.005


class Each(Dataset[Any]):
    """A `datasets.Dataset` that is read one row at a time."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def made(folder: Path) -> tuple[Any, Path, Path]:
    """One table in three forms: saved by `datasets`, as Parquet, and as an Arrow file."""
    rng = np.random.default_rng(SEED)
    table = pa.table(
        {
            "id": np.arange(ROWS),
            "label": rng.integers(0, 10, ROWS),
            "price": rng.random(ROWS, np.float32),
            "features": pa.FixedSizeListArray.from_arrays(pa.array(rng.random(ROWS * 16, np.float32)), 16),
        }
    )
    pq.write_table(table, folder / "t.parquet", row_group_size=100_000)
    with pa.ipc.new_file(folder / "t.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=10_000)
    datasets.disable_progress_bars()
    datasets.Dataset(table).save_to_disk(folder / "hf")
    return datasets.load_from_disk(folder / "hf").with_format("torch"), folder / "t.parquet", folder / "t.arrow"


class Far(MemoryFileSystem):
    """A store in memory, each request to which takes 5 ms."""

    protocol = ("far",)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.replace("far://", "memory://", 1))
        return stripped

    def cat_file(self, *arguments: Any, **more: Any) -> Any:
        sleep(LATENCY_S)
        return super().cat_file(*arguments, **more)


def wide() -> bytes:
    """An Arrow file of 131 MiB with 50 columns: numbers, texts, lists of a fixed size."""
    rng = np.random.default_rng(SEED)
    columns: dict[str, Any] = {f"c{i}": rng.random(FAR_ROWS, np.float32 if i % 3 else np.float64) for i in range(44)}
    columns |= {f"s{i}": [f"text {row * 7919}" for row in range(FAR_ROWS)] for i in range(3)}
    lists = [pa.array(rng.random(FAR_ROWS * 32, np.float32)) for _ in range(3)]
    columns |= {f"v{i}": pa.FixedSizeListArray.from_arrays(each, 32) for i, each in enumerate(lists)}
    table, file = pa.table(columns), pa.BufferOutputStream()
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=FAR_CHUNK)
    return file.getvalue().to_pybytes()


def far_rows(columns: list[str] | None) -> Callable[[], None]:
    """Random batches of a dataset with empty caches."""

    def run() -> None:
        dataset, rng = fl.datasets.Arrow("far://tables/wide.arrow", columns), np.random.default_rng(SEED)
        for _ in range(FAR_BATCHES):
            assert len(dataset.__getitems__(rng.integers(0, FAR_ROWS, FAR_BATCH).tolist())) == FAR_BATCH

    return run


class FarFile(RangeFile):
    """The file of `wide`, for pyarrow's own reader."""

    def __init__(self, store: Far) -> None:
        super().__init__(store.size(FAR_PATH))
        self._store = store

    def _bytes(self, start: int, stop: int) -> memoryview:
        return memoryview(self._store.cat_file(FAR_PATH, start, stop))


def far_record_batches(columns: list[str] | None) -> Callable[[], None]:
    """The same rows by pyarrow, from record batches that as many threads read; the rows stay in Arrow's format.

    Each thread has a reader of its own, because readers of Python's files take turns. They are opened beforehand.
    """
    store, open_readers, pool = fsspec.filesystem("far"), threading.local(), ThreadPoolExecutor(FAR_BATCH)
    names = pa.ipc.open_file(FarFile(store)).schema.names
    options = pa.ipc.IpcReadOptions(included_fields=None if columns is None else list(map(names.index, columns)))

    def read(number: int, rows: list[int]) -> Any:
        if not hasattr(open_readers, "reader"):
            open_readers.reader = pa.ipc.open_file(FarFile(store), options=options)
        return open_readers.reader.get_batch(number).take(rows)

    def run() -> None:
        rng = np.random.default_rng(SEED)
        for _ in range(FAR_BATCHES):
            wanted: dict[int, list[int]] = {}
            for row in rng.integers(0, FAR_ROWS, FAR_BATCH).tolist():
                wanted.setdefault(row // FAR_CHUNK, []).append(row % FAR_CHUNK)
            assert sum(map(len, pool.map(read, wanted, wanted.values()))) == FAR_BATCH

    return run


def compare_far() -> None:
    fsspec.register_implementation("far", Far, clobber=True)
    fsspec.filesystem("far").pipe(FAR_PATH, wide())
    race = Contest("rows of an Arrow object 5 ms away, batches of 32", unit="rows/s", baseline="all columns, pyarrow")
    for name, columns in FAR_COLUMNS.items():
        race.add(name, far_rows(columns), FAR_BATCH * FAR_BATCHES)
        race.add(f"{name}, pyarrow", far_record_batches(columns), FAR_BATCH * FAR_BATCHES)
    race.run(rounds=5).publish("pyarrow", "fsspec")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name  # the index of the object
        compare_far()
    with tempfile.TemporaryDirectory() as name:
        hugging, parquet, arrow = made(Path(name))
        race = Contest(
            "rows of a table, shuffled, batches of 1,024", unit="rows/s", baseline="torch, datasets, each row"
        )
        for workers in (0, 2):
            arguments: Any = {"batch_size": BATCH, "shuffle": True, "num_workers": workers}
            for style, theirs in (("each row", Each(hugging)), ("__getitems__", hugging)):
                who = f"torch, datasets, {style}" + f", {workers} workers" * bool(workers)
                race.measure(who, rate(lambda d=theirs, a=arguments: DataLoader(d, **a), BATCH, most_s=1))
        ours = {
            "HuggingFace": fl.datasets.HuggingFace(hugging),
            "Arrow": fl.datasets.Arrow(arrow),
            "Parquet": fl.datasets.Parquet(parquet),
        }
        for style, dataset in ours.items():
            for workers in (0, 2):
                arguments = {"batch_size": BATCH, "shuffle": True, "seed": SEED, "num_workers": workers}
                who = f"feedline, {style}, {workers} workers"
                race.measure(who, rate(lambda d=dataset, a=arguments: fl.DataLoader(d, **a), BATCH, most_s=1))
        order = fl.samplers.ShardShuffled(ours["Parquet"].shard_sizes, SEED, window=4)
        shards = {"batch_size": BATCH, "sampler": order, "seed": SEED}
        race.measure(
            "feedline, Parquet, ShardShuffled",
            rate(lambda: fl.DataLoader(ours["Parquet"], **shards), BATCH, most_s=1),
        )
        race.run(rounds=5).publish("datasets", "pyarrow")


if __name__ == "__main__":
    main()
