"""A builder is dumped once and loaded by many."""

from __future__ import annotations

import fcntl
import functools
import mmap
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from preloaded import Preloaded

from feedline.errors import NotPicklableError
from feedline.workers.transport import SharedBuilder, SlotMemoryError, dump_builder, load_builder, shared_builder


class Dataset:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def round_trip(obj: Any) -> Any:
    with dump_builder(obj) as dumped:
        return load_builder(dumped.fds, dumped.skeleton)


def test_large_arrays_are_in_one_sealed_file() -> None:
    dataset = Dataset(x=np.arange(100_000), y=torch.randn(50, 1000), labels=["a", "b"], small=np.arange(10))
    with dump_builder(dataset) as dumped:
        assert len(dumped.skeleton) < 2000
        assert dumped.nbytes == dataset.x.nbytes + dataset.y.nbytes
        assert dumped.fd is not None
        seals = fcntl.fcntl(dumped.fd, fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_WRITE
        assert seals & fcntl.F_SEAL_SHRINK
        with pytest.raises(PermissionError):
            os.pwrite(dumped.fd, b"x", 0)
        loaded = load_builder(dumped.fds, dumped.skeleton)
    assert dumped.fd is None
    np.testing.assert_array_equal(loaded.x, dataset.x)
    assert torch.equal(loaded.y, dataset.y)
    assert loaded.small.tolist() == list(range(10))


def test_what_a_worker_writes_stays_with_it() -> None:
    with dump_builder({"x": np.zeros(100_000), "t": torch.zeros(100_000)}) as dumped:
        one, other = (load_builder(dumped.fds, dumped.skeleton) for _ in range(2))
    one["x"][:] = 1
    one["t"].fill_(1)
    assert not other["x"].any()
    assert not other["t"].any()


def test_shared_storages_stay_shared() -> None:
    x = torch.zeros(100_000)
    loaded = round_trip([x, x[5:10], x])
    loaded[1].fill_(1)
    assert loaded[0].sum() == 5
    assert loaded[0] is loaded[2]


def test_nothing_large_needs_no_file() -> None:
    with dump_builder({"x": np.arange(3), "f": lambda: 5}) as dumped:
        assert dumped.fd is None
        loaded = load_builder(dumped.fds, dumped.skeleton)
    assert loaded["f"]() == 5
    assert loaded["x"].tolist() == [0, 1, 2]


def test_closures_partials_and_generators() -> None:
    table = np.arange(50_000)
    generator = torch.Generator().manual_seed(3)
    rng = np.random.Generator(np.random.Philox(7))
    lookup = round_trip((lambda i: table[i], functools.partial(np.add, table), generator, rng))
    assert lookup[0](41) == 41
    assert lookup[1](1)[2] == 3
    assert torch.equal(torch.rand(4, generator=lookup[2]), torch.rand(4, generator=generator))
    assert lookup[3].random() == rng.random()


@pytest.fixture
def file(tmp_path: Path) -> np.memmap[Any, Any]:
    mapped = np.memmap(tmp_path / "data.bin", np.float32, "w+", offset=5000, shape=(200, 300))
    mapped[:] = np.arange(60_000).reshape(200, 300)
    mapped.flush()
    return mapped


def read_only(file: np.memmap[Any, Any]) -> np.memmap[Any, Any]:
    return np.memmap(file.filename, np.float32, "r", offset=5000, shape=(200, 300))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[20:],
        lambda x: x[3:100:7, ::-2],
        lambda x: x.T,
        lambda x: np.asarray(x)[50:60],
        lambda x: x.view(np.uint8)[:, 8:],
        lambda x: np.memmap(x.filename, np.float32, "c", offset=5000 + 44, shape=(11, 13), order="F"),
        lambda x: read_only(x)[7],
    ],
)
def test_mapped_files_are_mapped_again(file: np.memmap[Any, Any], view: Any) -> None:
    sent = view(file)
    with dump_builder(Dataset(x=sent)) as dumped:
        assert dumped.fd is None
        assert len(dumped.skeleton) < 2000
        loaded = load_builder(dumped.fds, dumped.skeleton)
        again = round_trip(loaded)
    for arrived in (loaded.x, again.x):
        assert type(arrived) is type(sent)
        assert arrived.strides == sent.strides
        np.testing.assert_array_equal(arrived, sent)
    assert loaded.x.flags.writeable == sent.flags.writeable
    if type(sent) is np.memmap:
        assert loaded.x.filename == sent.filename
        assert loaded.x.mode == {"w+": "r+"}.get(sent.mode, sent.mode)


@pytest.mark.parametrize("mode", ["r", "c"])
def test_a_mapped_file_that_was_deleted_is_copied(file: np.memmap[Any, Any], mode: str) -> None:
    mapped = np.memmap(file.filename, np.float32, mode, offset=5000, shape=(200, 300))
    Path(file.filename).unlink()
    arrived = round_trip([mapped, mapped[:0]])
    assert type(arrived[0]) is np.memmap
    assert arrived[0].filename is None
    np.testing.assert_array_equal(arrived[0], file)


def shared_memory(file: np.memmap[Any, Any]) -> dict[str, Any]:
    Path(file.filename).unlink()
    return {
        "share_memory_": torch.zeros(10).share_memory_(),
        "share_memory_[2:]": torch.zeros(10).share_memory_()[2:],
        "parameter": torch.nn.Parameter(torch.zeros(10).share_memory_()),
        "multiprocessing.Array": np.frombuffer(multiprocessing.Array("i", 10).get_obj(), np.int32)[2:],
        "mmap": np.frombuffer(mmap.mmap(-1, 4096), np.int8),
        "unlinked file": file,
    }


@pytest.mark.parametrize(
    "name", ["share_memory_", "share_memory_[2:]", "parameter", "multiprocessing.Array", "mmap", "unlinked file"]
)
def test_memory_that_only_inheritance_can_share_is_refused(file: np.memmap[Any, Any], name: str) -> None:
    with pytest.raises(NotPicklableError, match=r"dataset\.cache.*can only inherit it by a fork"):
        dump_builder(Dataset(cache=shared_memory(file)[name]), "dataset")


def test_what_was_computed_from_a_mapped_file_is_not_the_file(file: np.memmap[Any, Any]) -> None:
    np.testing.assert_array_equal(round_trip(file + 1), file + 1)


def test_matches_compares_every_byte() -> None:
    dataset = Dataset(x=np.arange(100_000), names=["a"])
    with dump_builder(dataset) as dumped:
        assert dumped.matches(dataset)
        assert dumped.matches(Dataset(x=np.arange(100_000), names=["a"]))
        assert not dumped.matches(Dataset(x=np.arange(100_000), names=["b"]))
        assert not dumped.matches(Dataset(x=np.arange(100_001), names=["a"]))
        with dump_builder(dataset) as other:
            assert dumped.matches(other)
        dataset.x[77_777] = 0
        assert not dumped.matches(dataset)
        with dump_builder(dataset) as changed:
            assert not dumped.matches(changed)
    with dump_builder([1]) as dumped:
        assert dumped.matches([1])
        assert not dumped.matches([2])


def test_what_cannot_be_pickled_is_named() -> None:
    handle = threading.Lock()
    with pytest.raises(
        NotPicklableError, match=r"dataset\.x\[0\]\.<nonlocal handle> \(type _thread.lock\).*__getstate__"
    ):
        dump_builder(Dataset(x=[lambda: handle]), "dataset")


def test_no_room_for_the_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_builder, "sealed_file", full)
    with pytest.raises(SlotMemoryError, match=r"800000 bytes .* arrays of the dataset .*No space left.*memmap"):
        dump_builder(np.zeros(100_000), "dataset")


def test_without_anonymous_files_all_is_in_the_skeleton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_builder, "has_anonymous_files", lambda: False)
    with dump_builder(np.arange(100_000)) as dumped:
        assert dumped.fd is None
        assert load_builder(dumped.fds, dumped.skeleton)[-1] == 99_999


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_descriptor_stays_open() -> None:
    before = open_descriptors()
    kept = round_trip(np.zeros(100_000))
    assert open_descriptors() == before
    assert kept.sum() == 0


def test_a_frozen_builder_says_its_size() -> None:
    dumped = dump_builder(np.zeros(100_000))
    assert isinstance(dumped, SharedBuilder)
    assert dumped.nbytes == 800_000
    dumped.close()
    dumped.close()


def test_instances_of_classes_of_main_come_back_as_such(preloaded: Preloaded, tmp_path: Path) -> None:
    script, log = Path(__file__).with_name("transport_script.py"), tmp_path / "output.log"
    assert (preloaded.run(script, log, 240), log.read_text()) == (0, "by reference\n")
