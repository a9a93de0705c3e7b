"""Reading, decoding and transforms as parts of a fetch, in every kind of workers, and waits for earlier batches."""

from __future__ import annotations

import multiprocessing
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from diagonals import at_night
from PIL import Image
from torch.utils.data import Dataset

import feedline as fl
from feedline.core.stage_parts import DECODING, TRANSFORMING, is_part
from feedline.datasets import ArrayFile, Files, ImageFolder
from feedline.loader.report.totals import Totals
from feedline.stores import ObjectInfo, Scheme, register_scheme

SAMPLES, BATCH = 24, 4


def slept(seconds: float) -> float:
    """Seconds of a sleep of about `seconds`."""
    began = time.monotonic()
    time.sleep(seconds)
    return time.monotonic() - began


def computed(seconds: float) -> float:
    """Seconds of a computation that takes `seconds` of a CPU."""
    began, deadline = time.monotonic(), time.thread_time() + seconds
    while time.thread_time() < deadline:
        sum(range(100))
    return time.monotonic() - began


class SlowStore:
    """A store whose objects are 1,000 bytes, and the seconds that reading them took."""

    url = "slow://disk/folder"

    def info(self, path: str) -> ObjectInfo:
        return ObjectInfo(path, 1008, "1")

    def size(self, path: str) -> int:
        return 1008

    def read(self, path: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> memoryview:
        return memoryview(bytes(1000) + struct.pack("d", slept(0.006)))

    def read_many(self, path: str, ranges: Sequence[Any], *, version: str | None = None) -> list[memoryview]:
        whole = self.read(path)
        return [whole[start:stop] for start, stop in ranges]

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter(())


def open_slow(url: str, options: Any, policy: Any) -> SlowStore:
    return SlowStore()


def decode(content: bytes) -> list[float]:
    return [*struct.unpack("d", content[1000:]), computed(0.004)]


def transform(times: list[float]) -> torch.Tensor:
    return torch.tensor([*times, slept(0.003)], dtype=torch.float64)


KINDS = {
    "inline": {"num_workers": 0},
    "threads": {"num_workers": 2, "worker_method": "thread"},
    "processes": {"num_workers": 2, "worker_method": "process"},
    "fork": {"num_workers": 2, "worker_method": "process", "multiprocessing_context": "fork"},
    "spawn": {"num_workers": 1, "worker_method": "process", "multiprocessing_context": "spawn"},  # it imports torch
}


def agrees(parts_of: tuple[str, ...], spans: Sequence[Any], truth: list[float]) -> bool:
    """True if the parts of a batch take as long as they measured themselves, and nearly all of its fetch."""
    taken_s = [sum(span.stop_ns - span.start_ns for span in spans if span.stage == stage) / 1e9 for stage in parts_of]
    (fetch,) = (span for span in spans if span.stage == "fetch")
    excess_s = [part_s - 1.1 * true_s for part_s, true_s in zip(taken_s, truth, strict=True)]
    return max(excess_s) <= 0.0005 and sum(taken_s) >= 0.9 * (fetch.stop_ns - fetch.start_ns) / 1e9


@pytest.mark.parametrize("kind", ["inline", "threads", "processes", *at_night("fork", "spawn")])
def test_the_parts_of_a_fetch_take_as_long_as_measured_within(kind: str) -> None:
    register_scheme("slow", Scheme(open_slow))
    dataset = Files([f"slow://disk/{n}" for n in range(SAMPLES)], decode=decode, transform=transform)
    parts_of = ("read slow://disk", "decode", "transform")
    for _ in range(5):  # between a part and what it encloses, other programs may have the CPUs
        # Without on_error, the objects of a batch are read at once, while others are decoded.
        with fl.DataLoader(dataset, BATCH, on_error="skip", **KINDS[kind]) as loader:
            truths = [batch.sum(0).tolist() for batch in loader]
            stats = loader.stats()
            verdict = loader.report()
        parts = [stats.stages[stage] for stage in parts_of]
        for part, true_s in zip(parts, map(sum, zip(*truths, strict=True)), strict=True):
            assert true_s <= part.total_s
            assert part.count == SAMPLES // BATCH
            assert part.in_workers == (kind != "inline")
        assert sum(part.total_s for part in parts) <= stats.stages["fetch"].total_s
        assert loader._fl_progress is not None
        if any(map(partial(agrees, parts_of), loader._fl_progress.totals.recent, truths)):
            break
    else:
        raise AssertionError((truths, stats.stages))
    read, decoded, transformed = (0.0 if part.cpu_s is None else part.cpu_s / part.total_s for part in parts)
    assert read < 0.5
    assert transformed < 0.5
    assert decoded * parts[1].total_s >= 0.7 * SAMPLES * 0.004
    assert stats.read_nbytes_per_sample == pytest.approx(1008)
    assert stats.delivered_nbytes_per_sample == pytest.approx(3 * 8)
    names = list(stats.stages)
    at = names.index("fetch")
    assert names[at + 1 : at + 4] == ["read slow://disk", "decode", "transform"]
    if kind == "inline" and verdict.limiting_stage == "fetch":
        assert "is reading from slow://disk" in verdict.explanation, str(verdict)
        assert verdict.explained_share >= 0.9


class Many(Dataset[Any]):
    """Samples that decode so fast that clocks around each would take a tenth of their time."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        raise AssertionError

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        for _ in range(2000):
            with DECODING:
                sum(range(20))
            with TRANSFORMING:
                pass
        return [torch.zeros(1)] * len(indices)


def test_parts_that_are_timed_now_and_then_are_scaled_to_all_batches() -> None:
    shares = list[float]()
    for _ in range(5):  # the timed batches may be those during which other programs have no CPU
        loader = fl.DataLoader(Many(), 1)
        for _ in loader:
            pass
        stages = loader.stats().stages
        assert loader._fl_progress is not None
        recent = loader._fl_progress.totals.recent
        timed = [spans for spans in recent if any(span.stage == "decode" for span in spans)]
        assert 0 < len(timed) < 100
        assert stages["decode"].count > len(timed)
        shares.append(stages["decode"].total_s / stages["fetch"].total_s)
        assert shares[-1] <= 1
        if shares[-1] >= 0.05:  # the timed batches alone would give about a hundredth of it
            return
    raise AssertionError(shares)


def test_the_times_of_some_batches_stand_for_all() -> None:
    ms = 1_000_000
    plain = [("fetch", 0, 6 * ms, 0), ("collate", 6 * ms, 8 * ms, 0), ("wait", 0, 9 * ms, -1)]
    timed = [
        *(("decode", 0, 3 * ms, 0), ("decode.cpu", 0, 1 * ms, 0)),
        *(("read files", 3 * ms, 4 * ms, 0), ("read files.nbytes", 0, 800, 0), ("parts", 0, 8 * ms, 0)),
    ]
    totals = Totals()
    for number in range(12):
        totals.add(plain + timed if number % 4 == 0 else plain, 10)
    stats = totals.stats()
    assert list(stats.stages) == ["fetch", "read files", "decode", "collate"]
    decoded = stats.stages["decode"]
    assert (decoded.count, decoded.total_s, decoded.cpu_s) == pytest.approx((12, 0.036, 0.012))
    assert decoded.mean_s == pytest.approx(0.003)
    assert stats.read_nbytes_per_sample == 80
    assert stats.delivered_nbytes_per_sample is None
    flat = stats.flat("")
    assert flat["read_files_mean_s"] == pytest.approx(0.001)
    assert flat["read_nbytes_per_sample"] == 80


class Overtaken(Dataset[torch.Tensor]):
    """The first sample is read a tenth of a second after the second one."""

    def __init__(self) -> None:
        self.second = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            assert self.second.wait(60)
            time.sleep(0.1)
        if index == 1:
            self.second.set()
        return torch.zeros(1)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("method", ["thread", "process"])
def test_a_batch_that_waits_for_an_earlier_one_shows_it(method: str, in_order: bool) -> None:
    arguments = {"num_workers": 2, "worker_method": method, "prefetch_factor": 4, "in_order": in_order}
    with fl.DataLoader(Overtaken(), 1, **arguments, seed=0) as loader:
        for _ in loader:
            pass
        reorder = loader.stats().stages.get("reorder")
    if not in_order:
        assert reorder is None
        return
    assert reorder is not None
    assert reorder.max_s >= 0.01
    assert not reorder.in_workers


@pytest.mark.parametrize(
    "crop", [fl.transforms.CenterCrop(32), fl.transforms.RandomResizedCrop(32)], ids=["some", "all"]
)
def test_files_that_the_kernels_read_are_no_decoding(tmp_path: Path, crop: Any) -> None:
    (tmp_path / "some").mkdir()
    for number in range(24):
        Image.new("RGB", (64, 64), (90, 80, 120)).save(tmp_path / "some" / f"{number}.jpg", quality=95)
    nbytes = sum(path.stat().st_size for path in tmp_path.rglob("*.jpg"))
    dataset = ImageFolder(tmp_path, transform=crop)
    loader = fl.DataLoader(dataset, 8)
    for _ in loader:
        pass
    stats = loader.stats()
    assert {"read files", "decode", "transform"} <= set(stats.stages)
    assert stats.read_nbytes_per_sample == pytest.approx(nbytes / 24)
    assert stats.delivered_nbytes_per_sample == 3 * 32 * 32 + 8
    assert all(stats.stages[stage].total_s > 0 for stage in ("read files", "decode", "transform"))


def test_a_mapped_array_reports_the_bytes_it_has_read(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((64, 100), np.float32))
    loader = fl.DataLoader(ArrayFile(tmp_path / "rows.npy"), 16)
    for _ in loader:
        pass
    stats = loader.stats()
    assert stats.read_nbytes_per_sample == stats.delivered_nbytes_per_sample == 400


def write_hdf5(folder: Path, *, compressed: bool) -> Path:
    with h5py.File(path := folder / "rows.h5", "w") as file:
        data = np.random.default_rng(0).integers(0, 9, (256, 64, 64)).astype(np.float32)
        file.create_dataset("x", data=data, chunks=(8, 64, 64), compression="gzip" if compressed else None)
    return path


def write_zarr(folder: Path) -> Path:
    array = zarr.create_array(path := folder / "rows.zarr", shape=(256, 64, 64), chunks=(8, 64, 64), dtype="f4")
    array[:] = np.random.default_rng(0).integers(0, 9, (256, 64, 64))
    return path


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
@pytest.mark.parametrize(
    ("write", "dataset", "parts"),
    [
        (partial(write_hdf5, compressed=True), fl.datasets.HDF5, {"decode"}),
        (partial(write_hdf5, compressed=False), fl.datasets.HDF5, {"read files"}),
        (write_zarr, fl.datasets.Zarr, {"decode", "read files"}),
    ],
    ids=["HDF5, compressed", "HDF5", "Zarr"],
)
def test_chunks_of_arrays_are_read_and_decoded(
    write: Callable[[Path], Path], dataset: Any, parts: set[str], kind: str, tmp_path: Path
) -> None:
    arguments = {} if kind == "inline" else {"num_workers": 1, "worker_method": kind}
    with fl.DataLoader(dataset(write(tmp_path)), 16, **arguments, seed=0) as loader:
        for _ in loader:
            pass
        stages = loader.stats().stages
    found = {stage for stage in stages if is_part(stage)}
    assert found == parts
    taken_s = sum(stages[part].total_s for part in parts)
    # Inflating takes most of a fetch, reading files in memory almost nothing. The first batch opens the file, too.
    least = 0.05 if "decode" in parts else 0.0
    assert least * stages["fetch"].total_s < taken_s <= 1.02 * stages["fetch"].total_s
    if dataset is fl.datasets.Zarr:
        nbytes = sum(path.stat().st_size for path in tmp_path.rglob("c/*/*/*"))
        assert loader.stats().read_nbytes_per_sample == pytest.approx(nbytes / 256, rel=0.01)


def test_the_wait_for_messages_is_a_part_by_the_name_of_their_source(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "rows.db") as connection:
        connection.execute("create table rows (id integer primary key, value real)")
        connection.executemany("insert into rows (value) values (?)", [(float(number),) for number in range(64)])
    connection.close()
    source = f"sqlite:///{tmp_path / 'rows.db'}"
    stream = fl.streams.SQLRows(source, "select id, value from rows", until="latest", settle_s=0, max_wait_s=0.02)
    with fl.DataLoader(stream, 8, seed=0) as loader:
        assert sum(len(batch["id"]) for batch in loader) == 64
        stages = loader.stats().stages
    assert stages["read SQLRows"].total_s > 0
