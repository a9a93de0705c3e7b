"""`feedline.share`: one memory for the training process and all of its workers."""

from __future__ import annotations

import fcntl
import gc
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diagonals import diagonal

import feedline as fl
from feedline.errors import ArgumentError, NotPicklableError
from feedline.workers.transport import SlotMemoryError, dump_builder, load_builder, memory, sharing

STRUCTURE = np.dtype([("a", "u1"), ("b", ">f4")])

ARRAYS = {
    "float32": np.random.default_rng(0).random((300, 70), np.float32),
    "one number": np.array(5.5),
    "empty": np.empty((0, 3), np.int16),
    "big endian": np.arange(9000, dtype=">i8"),
    "bool": np.arange(50_000) % 3 == 0,
    "text": np.array(["a", "bcd"] * 9000),
    "bytes": np.array([b"a", b"bcd"]),
    "structure": np.array([(1, 2.5), (3, -1)] * 5000, STRUCTURE),
    "times": np.arange(9).astype("M8[s]"),
    "transposed": np.arange(60_000).reshape(200, 300).T,
    "every other": np.arange(60_000)[::-2],
}

TENSORS = {
    "float32": torch.randn(300, 70),
    "bfloat16": torch.randn(9000).bfloat16(),
    "complex64": torch.randn(90, 2, dtype=torch.complex64),
    "transposed": torch.arange(60_000).reshape(200, 300).T,
    "one number": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "requires grad": torch.randn(5, requires_grad=True),
}


def thawed(obj: Any) -> Any:
    with dump_builder(obj) as frozen:
        return load_builder(frozen.fds, frozen.skeleton)


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays_keep_shape_dtype_and_values(array: np.ndarray[Any, Any]) -> None:
    shared = fl.share(array)
    for one in (shared, thawed(shared)):
        assert (type(one), one.dtype, one.shape) == (np.ndarray, array.dtype, array.shape)
        np.testing.assert_array_equal(one, array)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(shared)), array)
    assert not np.shares_memory(shared, array)


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_tensors_keep_shape_dtype_and_values(tensor: torch.Tensor) -> None:
    shared = fl.share(tensor)
    for one in (shared, thawed(shared), pickle.loads(pickle.dumps(shared))):
        assert (type(one), one.dtype, one.shape) == (torch.Tensor, tensor.dtype, tensor.shape)
        assert one.requires_grad == tensor.requires_grad
        assert torch.equal(one, tensor)


def test_a_mapped_file_becomes_an_array(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", np.int32, "w+", shape=(5,))
    assert type(fl.share(mapped)) is np.ndarray


VIEWS = {
    "whole": lambda x: x,
    "rows": lambda x: x[3:7],
    "few bytes": lambda x: x[1, :2],
    "columns": lambda x: x[:, ::-3],
    "transposed": lambda x: x.T,
    "bytes": lambda x: x.view("S4"),
    "structure": lambda x: x.view([("low", "u2"), ("high", "u2")]),
    "tensor": torch.from_numpy,
    "columns of a tensor": lambda x: torch.from_numpy(x)[:, 5:6],
    "storage": lambda x: torch.from_numpy(x).untyped_storage(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_are_of_the_one_memory(view: Any) -> None:
    shared = fl.share(np.arange(100_000, dtype=np.int32).reshape(1000, 100))
    here = view(shared)
    with dump_builder({"x": here}) as frozen:
        assert (frozen.fd, len(frozen.fds)) == (None, 1)
        assert len(frozen.skeleton) < 2000
        there = load_builder(frozen.fds, frozen.skeleton)["x"]
    assert type(there) is type(here)
    shared[...] = 0x01010101
    assert bytes(there.numpy() if isinstance(there, torch.Tensor) else there).strip(b"\1") == b""


def test_writes_are_seen_on_both_sides_and_again_further_on() -> None:
    shared = fl.share(torch.zeros(10))
    there = thawed(shared)
    further = thawed(there)
    shared[1] = 1
    there[2] = 2
    further[3] = 3
    for tensor in (shared, there, further):
        assert tensor.tolist() == [0, 1, 2, 3, *[0] * 6]


def test_next_to_arrays_that_are_not_shared() -> None:
    dataset = {"own": np.arange(50_000), "small": np.arange(3), "shared": [fl.share(np.ones(i)) for i in (7, 9000)]}
    with dump_builder(dataset) as frozen:
        assert len(frozen.fds) == 3
        assert frozen.nbytes == dataset["own"].nbytes
        there = load_builder(frozen.fds, frozen.skeleton)
    dataset["shared"][1][5] = dataset["own"][5] = 8
    assert there["own"].tolist() == list(range(50_000))
    assert there["small"].tolist() == [0, 1, 2]
    assert (there["shared"][0].tolist(), there["shared"][1][5]) == ([1] * 7, 8)


def test_matching_is_by_the_memory() -> None:
    shared = fl.share(np.zeros(50_000))
    with dump_builder(shared) as frozen:
        assert frozen.matches(shared)
        shared[3] = 1
        assert frozen.matches(shared)
        assert not frozen.matches(fl.share(shared))
        assert not frozen.matches(np.array(shared))
        assert not frozen.matches(shared[1:])


def test_the_memory_outlives_what_was_shared_for_as_long_as_it_is_frozen() -> None:
    shared = fl.share(np.arange(50_000))
    frozen = dump_builder(shared)
    del shared
    there = load_builder(frozen.fds, frozen.skeleton)
    frozen.close()
    assert there.tolist() == list(range(50_000))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_and_memory_go_with_the_last_array() -> None:
    gc.collect()
    before = descriptors()
    shared = fl.share(np.ones(1 << 20))
    address = shared.__array_interface__["data"][0]
    kept = thawed(shared)[5:8]
    assert (descriptors() > before, sharing.file_at(address) is not None) == (True, True)
    del shared, kept
    gc.collect()
    assert (descriptors(), sharing.file_at(address)) == (before, None)


def test_no_one_can_change_the_size_of_the_file() -> None:
    shared = fl.share(np.ones(50_000))
    with dump_builder(shared) as frozen:
        (fd,) = frozen.fds
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        with pytest.raises(PermissionError):
            os.truncate(fd, 10)


def test_without_anonymous_files_it_is_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "has_anonymous_files", lambda: False)
    shared = fl.share(np.arange(50_000))
    there = thawed(shared)
    shared[7] = -1
    assert there[7] == -1


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sharing, "fixed_file", full)
    with pytest.raises(
        SlotMemoryError, match=r"800000 bytes .* an array could not be allocated: No space left.*memmap"
    ):
        fl.share(np.zeros(100_000))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([1, 2], "list is neither"),
        (np.array([object()]), "dtype object refers to Python objects"),
        (np.ma.masked_array([1, 2]), "MaskedArray is neither"),
        (torch.nn.Parameter(torch.ones(2)), "Parameter is neither"),
        (torch.ones(3, device="meta"), "Tensor is neither .*detach"),
        (torch.eye(3).to_sparse(), "Tensor is neither"),
    ],
    ids=["list", "objects", "masked", "parameter", "meta", "sparse"],
)
def test_what_cannot_be_shared(wrong: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"share: .*{words}"):
        fl.share(wrong)


def test_too_many_for_one_message_are_refused() -> None:
    with pytest.raises(NotPicklableError, match=r"dataset holds 241 arrays of feedline\.share.*views of it"):
        dump_builder([fl.share(np.zeros(1)) for _ in range(241)], "dataset")


class Counted:
    """Rows of an array; each read is noted in the array, where all processes see it."""

    def __init__(self, rows: Any, reads: Any) -> None:
        self.rows, self.reads = rows, reads

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        return self.rows[index]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("how", "make"),
    diagonal(
        [
            {"num_workers": 0},
            {"num_workers": 2, "worker_method": "thread"},
            {"num_workers": 2, "worker_method": "process"},
            {"num_workers": 2, "worker_method": "process", "multiprocessing_context": "fork"},
        ],
        [np.asarray, torch.from_numpy],
    ),
)
def test_loaders_read_and_write_the_one_memory(how: dict[str, Any], make: Any) -> None:
    rows = np.arange(60_000, dtype=np.float32).reshape(60, 1000)
    dataset: Any = Counted(fl.share(make(rows)), fl.share(make(np.zeros(60, np.int64))))
    for epoch in range(2):
        with fl.DataLoader(dataset, batch_size=7, **how) as loader:
            batches = list(loader)
        assert np.array_equal(np.concatenate([np.asarray(batch) for batch in batches]), rows + epoch)
        assert dataset.reads.tolist() == [epoch + 1] * 60
        dataset.rows += 1  # the next workers see it, old and new ones
