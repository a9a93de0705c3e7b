"""The laws for datasets of every format: one stream for all workers, cuts and loaders, torch's included."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
import torch
import zarr
from diagonals import by_day
from format_cases import equal
from hypothesis import given
from hypothesis import strategies as st
from law_settings import law_settings
from peers import written
from torch.utils.data import DataLoader
from writers.values import COUNT, jpeg

import feedline as fl
from feedline.datasets import HDF5, LMDB, MDS, Files, LitData, LitDataTokens, SQLManifest, TFRecord, Zarr

CROP = fl.transforms.Compose(
    [fl.transforms.RandomResizedCrop(8), fl.transforms.RandomHorizontalFlip(), fl.transforms.ToTensor()]
)
WORKERS = ({}, {"num_workers": 2, "worker_method": "thread"}, {"num_workers": 2, "worker_method": "process"})


def noisy(sample: Any, rng: Any) -> Any:
    """A random transform, whose results show any mistake with keys."""
    return sample, rng.random()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    rows = np.arange(COUNT * 6, dtype=np.float32).reshape(COUNT, 2, 3)
    with h5py.File(folder / "a.h5", "w") as file:
        file["flat"] = rows
        file.create_dataset("chunked", data=rows, chunks=(3, 2, 3), compression="gzip")
    for version in (2, 3):
        zarr.open_group(folder / f"{version}.zarr", mode="w", zarr_format=version).create_array(
            "x", data=rows, chunks=(4, 2, 3)
        )
    for name, value in (("texts", lambda i: b"text %d" % i), ("jpegs", lambda i: jpeg(i, (24, 18)))):
        with (
            lmdb.open(str(folder / name), map_size=1 << 24) as environment,
            environment.begin(write=True) as transaction,
        ):
            for i in range(COUNT):
                transaction.put(b"%04d" % i, value(i))
    with sqlite3.connect(folder / "list.db") as connection:
        connection.execute("CREATE TABLE samples (id INTEGER, path TEXT, label INTEGER)")
        connection.executemany(
            "INSERT INTO samples VALUES (?, ?, ?)", [(i, f"{i:02}.jpg", i % 3) for i in range(COUNT)]
        )
    connection.close()
    for i in range(COUNT):
        (folder / f"{i:02}.jpg").write_bytes(jpeg(i, (24, 18)))
    return folder


MADE: dict[str, Callable[[Path], Any]] = {
    "lmdb": lambda folder: LMDB(folder / "texts", decode="text", transform=noisy),
    "lmdb images": lambda folder: LMDB(folder / "jpegs", "{:04d}", decode="image", transform=CROP),
    "hdf5": lambda folder: HDF5(folder / "a.h5", ["flat", "chunked"]),
    "hdf5 transformed": lambda folder: HDF5(folder / "a.h5", "chunked", transform=noisy, cache_nbytes=0),
    "zarr 2": lambda folder: Zarr(folder / "2.zarr"),
    "zarr 3": lambda folder: Zarr(folder / "3.zarr", "x"),
    "tfrecord": lambda folder: TFRecord(
        written("examples"),
        {"label": "int64", "box": ("float32", (4,)), "image": "image"},
        transform={"image": CROP},
        index_dir=folder,
    ),
    "mds": lambda folder: MDS(written("mds") / "plain", columns=["int", "str", "fixed_array"], transform=noisy),
    "mds images": lambda folder: MDS(
        written("mds") / "zstd", columns=["jpeg", "int16"], transform={"jpeg": CROP}, cache=folder / "cache"
    ),
    "litdata": lambda folder: LitData(written("litdata_chunks") / "batch"),
    "litdata rows": lambda folder: LitData(
        written("litdata_chunks") / "mixed", transform={"x": noisy, "mapping.words": len, "mapping.deep": len}
    ),
    "litdata tokens": lambda folder: LitDataTokens(written("litdata_chunks") / "tokens", 9),
    "sql": lambda folder: SQLManifest(
        folder / "list.db", "SELECT * FROM samples", root=folder, key="id", decode="image", transform={"data": CROP}
    ),
    "files": lambda folder: Files(folder / "*.jpg", decode="image", transform=CROP),
}

PLAIN = ("hdf5", "zarr 2", "mds", "litdata")
"""Datasets of the night: by day another one has the same reader, and a transform or the newer version."""

NAMES = by_day([*MADE], [name for name in MADE if name not in PLAIN])


@pytest.fixture(params=NAMES)
def dataset(request: pytest.FixtureRequest, folder: Path) -> Any:
    return MADE[request.param](folder)


def batches(dataset: Any, **settings: Any) -> list[Any]:
    with fl.DataLoader(dataset, 6, shuffle=True, seed=11, **settings) as loader:
        return list(loader)


def test_every_kind_of_worker_gives_one_stream(dataset: Any) -> None:
    inline = batches(dataset)
    for workers in WORKERS[1:]:
        assert equal(batches(dataset, **workers), inline)
    # One by one, as with `on_error`.
    assert equal(batches(dataset, on_error="skip"), inline)


@pytest.mark.parametrize("name", NAMES)
@law_settings()
@given(cut=st.integers(0, 4), before=st.sampled_from(WORKERS[:2]), after=st.sampled_from(WORKERS[:2]))
def test_any_cut_resumes_to_the_same_stream(
    folder: Path, name: str, cut: int, before: dict[str, Any], after: dict[str, Any]
) -> None:
    dataset = MADE[name](folder)
    whole = batches(dataset)
    with fl.DataLoader(dataset, 6, shuffle=True, seed=11, **before) as loader:
        cut = min(cut, len(whole) - 1)
        begun = list(islice(loader, cut))
        state = loader.state_dict()
    with fl.DataLoader(dataset, 6, shuffle=True, seed=11, **after) as loader:
        loader.load_state_dict(state)
        assert equal(begun + list(loader), whole)


def test_it_keeps_the_rules_of_every_dataset(dataset: Any) -> None:
    fl.testing.check_dataset(dataset, methods=("thread",))


def test_torchs_own_loader_gives_the_same(dataset: Any) -> None:
    torch.manual_seed(5)
    theirs = list(DataLoader(dataset, 6))
    torch.manual_seed(5)
    with fl.DataLoader(dataset, 6) as loader:
        assert equal(list(loader), theirs)


@pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning")
def test_files_open_before_a_fork_are_opened_again(dataset: Any) -> None:
    with fl.DataLoader(dataset, 6, seed=3) as loader:
        inline = list(loader)  # opens everything in this process
    with fl.DataLoader(dataset, 6, seed=3, num_workers=2, multiprocessing_context="fork") as loader:
        assert equal(list(loader), inline)
    with fl.DataLoader(dataset, 6, seed=3) as loader:
        assert equal(list(loader), inline)


@pytest.mark.parametrize("name", ["lmdb", "hdf5 transformed", "zarr 3", "tfrecord", "mds images", "litdata", "sql"])
def test_many_threads_read_at_once(folder: Path, name: str) -> None:
    """From the first access on, while handles, shards and caches are created."""
    dataset, threads = MADE[name](folder), 8
    start = threading.Barrier(threads)

    def read(thread: int) -> list[int]:
        start.wait()
        order = np.random.default_rng(thread).permutation(len(dataset))
        for at in order.tolist():
            dataset[at]
            dataset.__getitems__([at, 0])
        return sorted(order.tolist())

    with ThreadPoolExecutor(threads) as pool:
        assert all(seen == list(range(len(dataset))) for seen in pool.map(read, range(threads)))


def test_shards_make_an_order_that_reads_few_at_a_time(folder: Path) -> None:
    for name in ("hdf5", "zarr 2", "tfrecord", "mds", "litdata", "litdata tokens"):
        dataset = MADE[name](folder)
        order = fl.samplers.ShardShuffled(dataset.shard_sizes, seed=1, window=2).take(0, 0, len(dataset))
        assert sorted(order.tolist()) == list(range(len(dataset)))
