"""Samples in device memory: equal to the source's, read once, in exact order, for any budget."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import feedline as fl
from feedline.core.dataset import BatchRead
from feedline.core.tensors import allocate_tensor
from feedline.core.torch_wrappers import ranges_of
from feedline.datasets import DeviceDataset
from feedline.errors import ArgumentError, NotPicklableError, SampleError
from feedline.testing import check_dataset
from feedline.testing.difference import check_same

LENGTH, SIDE = 37, 4


class Decoded:
    """A dataset whose samples cost something; it counts how often each is read."""

    def __init__(self, thread_safe: bool = True) -> None:
        self.reads: Counter[int] = Counter()
        self.traits = fl.Traits(thread_safe=thread_safe, is_random=False)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < LENGTH:
            raise IndexError(index)
        self.reads[index] += 1
        image = torch.full((3, SIDE, SIDE), index, dtype=torch.uint8)
        return {"image": image, "label": index % 5, "score": index / 7, "extra": (np.arange(2) + index, f"n{index}")}


ROW = 3 * SIDE * SIDE + 8 + 8 + 16
"""Bytes of a sample's tensors."""

ROOMS = {
    "all on the device": {},
    "a part spilled": {"budget": 10 * ROW},
    "a part read again": {"budget": 10 * ROW, "spill": False},
    "nothing on the device": {"budget": 0},
    "nothing in memory": {"budget": 0, "spill": False},
}


def batches(dataset: Any, **arguments: Any) -> list[Any]:
    with fl.DataLoader(dataset, batch_size=5, shuffle=True, seed=3, **arguments) as loader:
        return [*loader, *loader]


@pytest.mark.parametrize("room", ROOMS)
def test_batches_are_those_of_the_source(room: str) -> None:
    expected = batches(Decoded())
    data = DeviceDataset(Decoded(), device="cpu", **ROOMS[room])
    check_same(expected, batches(data), "a DeviceDataset must give the samples of its source")
    check_same(expected, batches(data, num_workers=2), "threads must give them, too")


@pytest.mark.parametrize("room", ["all on the device", "a part read again"])
def test_it_keeps_the_promises_of_a_dataset(room: str) -> None:
    check_dataset(DeviceDataset(Decoded(), device="cpu", **ROOMS[room]))


@pytest.mark.parametrize("room", ROOMS)
def test_a_sample_that_is_stored_is_read_once(room: str) -> None:
    source = Decoded()
    data = DeviceDataset(source, device="cpu", **ROOMS[room])
    source.reads.clear()
    batches(data)
    stored = data.statistics().stored
    assert stored == {"a part read again": 10, "nothing in memory": 0}.get(room, LENGTH)
    assert all(source.reads[index] == 1 for index in range(1, stored))
    assert data.statistics().read == 1 + source.reads.total()
    assert all(source.reads[index] == 2 for index in range(stored, LENGTH) if index)


def test_a_resumed_loader_continues_exactly() -> None:
    expected = batches(DeviceDataset(Decoded(), device="cpu"))
    loader = fl.DataLoader(DeviceDataset(Decoded(), device="cpu"), batch_size=5, shuffle=True, seed=3)
    begun = list(islice(loader, 3))
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = fl.DataLoader(DeviceDataset(Decoded(), device="cpu", budget=99), batch_size=5, shuffle=True, seed=3)
    resumed.load_state_dict(state)
    check_same(expected, [*begun, *resumed, *resumed], "a resumed loader must continue with the next batch")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_filling_reads_all_at_once_and_leaves_the_generator(num_workers: int) -> None:
    source = Decoded()
    data = DeviceDataset(source, device="cpu", budget=20 * ROW)
    state = torch.get_rng_state()
    data.fill(num_workers)
    assert torch.equal(state, torch.get_rng_state())
    source.reads.clear()
    sizes = data.statistics()
    assert (sizes.stored, sizes.resident, sizes.resident_nbytes, sizes.spilled_nbytes) == (
        LENGTH, 20, 20 * ROW, (LENGTH - 20) * ROW,
    )  # fmt: skip
    check_same(batches(Decoded()), batches(data), "filled data must be the source's")
    assert not source.reads
    data.fill()


def sources() -> dict[str, Any]:
    images, labels = torch.arange(LENGTH * 6).reshape(LENGTH, 2, 3), torch.arange(LENGTH) % 4
    return {
        "tensor": images,
        "array": images.numpy(),
        "tuple": (images, labels.numpy()),
        "dict": {"x": images.half(), "y": labels},
        "TensorDataset": TensorDataset(images, labels),
        "Subset": Subset(TensorDataset(images, labels), range(3, 30)),
        "ConcatDataset": ConcatDataset([TensorDataset(images, labels)] * 2),
        "list": [(torch.ones(2) * n, n) for n in range(LENGTH)],
    }


@pytest.mark.parametrize("kind", sources())
def test_tensors_are_taken_as_they_are(kind: str) -> None:
    source = sources()[kind]
    plain = {
        "tuple": lambda: TensorDataset(source[0], torch.as_tensor(source[1])),
        "dict": lambda: [{"x": x, "y": y} for x, y in zip(source["x"], source["y"], strict=True)],
    }.get(kind, lambda: source)()
    expected = batches(plain)
    check_same(expected, batches(DeviceDataset(source, device="cpu")), "tensors must come out as they are")
    check_same(expected, batches(DeviceDataset(source, device="cpu", budget=100)), "spilled ones, too")


class Ranged(Decoded):
    def ranges(self, indices: Any) -> Any:
        return [("store", index) for index in indices.tolist()]


def test_only_missing_samples_have_ranges_to_prefetch() -> None:
    data = DeviceDataset(Ranged(), device="cpu")
    ranges = ranges_of(data)
    assert ranges is not None
    assert ranges(np.array([5, 0, 7])) == [("store", 5), ("store", 7)]
    data.fill()
    assert ranges(np.array([5, 0, 7])) == []
    assert ranges_of(data) is None
    assert ranges_of(DeviceDataset(torch.arange(3), device="cpu")) is None


def test_tensors_on_the_device_are_not_copied() -> None:
    images = torch.arange(24.0).reshape(6, 4)
    data = DeviceDataset(images, device="cpu", budget=0)
    images[2] = 99
    assert data[2].tolist() == [99] * 4


def test_tensors_on_the_device_that_are_converted_keep_to_the_budget() -> None:
    images = torch.randn(50, 10)
    data = DeviceDataset((images,), device="cpu", budget=200, dtype=torch.bfloat16)
    assert data.statistics().resident == 10
    assert torch.equal(data[40][0], images[40].bfloat16())


def test_arrays_of_the_other_byte_order_are_converted() -> None:
    numbers = np.arange(6)
    data = DeviceDataset((numbers.astype(">i4"), numbers.astype("<f8")), device="cpu")
    assert [int(value) for value in data[5]] == [5, 5]


def test_floats_are_stored_in_the_requested_dtype() -> None:
    data = DeviceDataset((torch.randn(8, 3), torch.arange(8)), device="cpu", dtype=torch.bfloat16)
    numbers, labels = data[5]
    assert (numbers.dtype, labels.dtype) == (torch.bfloat16, torch.int64)
    assert data.statistics().resident_nbytes == 8 * (3 * 2 + 8)


def test_a_gather_beyond_the_budget_of_another_device_is_joined_there() -> None:
    data = DeviceDataset((torch.zeros(10, 3), torch.arange(10)), device="meta", budget=4 * 20)
    assert data.statistics().resident == 4
    images, labels = data.read_batch(BatchRead(np.array([9, 0, 5]), allocate_tensor))
    assert (images.device.type, images.shape, labels.shape) == ("meta", (3, 3), (3,))


def test_device_memory_does_not_go_to_another_process() -> None:
    with pytest.raises(NotPicklableError, match=r"memory of meta.*num_workers=0"):
        pickle.dumps(DeviceDataset(torch.zeros(4, 2), device="meta", budget=100))


class Ragged(Decoded):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3 if index < 20 else 4)


class Noisy(Decoded):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(3)


def test_samples_of_another_shape_are_named() -> None:
    loader = fl.DataLoader(DeviceDataset(Ragged(), device="cpu"), batch_size=4)
    with pytest.raises(SampleError, match=r"shape \(4,\) in some sample, and \(3,\) in the first") as caught:
        list(loader)
    assert any("sample 20 of DeviceDataset" in note for note in caught.value.__notes__)


class Wider(Decoded):
    """Batches have another dtype than samples."""

    def __getitem__(self, index: int) -> Any:
        return index

    def read_batch(self, request: BatchRead) -> Any:
        return torch.from_numpy(request.indices / 2)


BYTES = [np.zeros(2, np.uint8), np.array([300, -1], np.int16)]


@pytest.mark.parametrize("room", [{}, {"budget": 1}, {"budget": 1, "spill": False}], ids=["device", "host", "source"])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([{"price": 3}, {"price": 2.5}], r"leaf 0 of sample 1 is torch\.float64, and torch\.int64 in the first"),
        (BYTES, r"sample 1 is torch\.int16, and torch\.uint8 in the first"),
        ([True, 2], r"sample 1 is torch\.int64, and torch\.bool in the first"),
        ([np.float32(1), np.float64(0.1)], r"sample 1 is torch\.float64, and torch\.float32 in the first"),
        ([np.uint16(1), np.int32(2)], r"sample 1 is torch\.int32, and torch\.uint16 in the first"),
        (["1", 2], r"sample 1 is torch\.int64, and not a number in the first"),
        (Wider(), r"leaf 0 of some sample is torch\.float64, and torch\.int64 in the first"),
    ],
    ids=["price", "bytes", "bool", "precision", "unsigned", "text", "batches"],
)
def test_values_that_the_dtype_of_the_first_would_change_are_refused(
    source: Any, message: str, room: dict[str, Any]
) -> None:
    data = DeviceDataset(source, device="cpu", **room)
    with pytest.raises(SampleError, match=message):
        data[1]
    with pytest.raises(SampleError, match="in the first"):
        data.fill() if data.statistics().stored == len(data) else data.__getitems__(range(1, len(data)))


def test_a_process_that_fills_refuses_them_too() -> None:
    with pytest.raises(SampleError, match=r"sample 1 is torch\.int16"):
        DeviceDataset(BYTES, device="cpu").fill(num_workers=1)


def test_values_that_fit_into_the_dtype_of_the_first_are_exact_in_any_batch() -> None:
    data = DeviceDataset([0.5, 1, 2.1, True], device="cpu")
    assert [number.item() for number in data.__getitems__([1, 2, 3, 0])] == [1, 2.1, 1, 0.5]
    halves = DeviceDataset([np.float32(1), np.float64(0.5), 2], device="cpu", dtype=torch.bfloat16)
    assert torch.equal(torch.stack(halves.__getitems__([1, 2, 0])), torch.tensor([0.5, 2, 1], dtype=torch.bfloat16))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.complex32, torch.complex64, torch.bool]
)
def test_every_dtype_can_be_stored(dtype: torch.dtype, room: str) -> None:
    source = [torch.full((3,), float(number)).to(dtype) for number in range(13)]
    data = DeviceDataset(source, device="cpu", **ROOMS[room])
    check_same([torch.stack(source)], list(fl.DataLoader(data, batch_size=13)), "values must be those of the source")


@pytest.mark.parametrize("room", ROOMS)
def test_samples_with_a_gradient_are_stored_without_it(room: str) -> None:
    source = [torch.full((3,), float(number), requires_grad=True) for number in range(4)]
    data = DeviceDataset(source, device="cpu", **ROOMS[room])
    [batch] = fl.DataLoader(data, batch_size=4)
    assert not batch.requires_grad
    assert batch[:, 0].tolist() == [0, 1, 2, 3]


def test_samples_of_another_shape_can_be_left_out() -> None:
    loader = fl.DataLoader(DeviceDataset(Ragged(), device="cpu"), batch_size=4, on_error="skip")
    assert sum(map(len, loader)) == 20
    assert loader.stats().skipped == LENGTH - 20


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        ([], {}, "is empty"),
        ((), {}, "is empty"),
        ({}, {}, "is empty"),
        ((torch.zeros(3), torch.zeros(4)), {}, r"equally many rows, but have \[3, 4\]"),
        (torch.zeros(3), {"budget": "lots"}, "budget='lots': give bytes"),
        (torch.zeros(3), {"budget": "180%"}, "budget='180%'"),
        (torch.zeros(3), {"dtype": torch.uint8}, "give a floating-point dtype"),
        (torch.zeros(3), {"device": "cuda:7"}, r"cuda.*pass device=\"cpu\""),
        ((np.array(["a", "b"]),), {}, "an array of <U1 cannot be a table"),
        (Noisy(), {}, r"samples of this Noisy are random.*OnBatch"),
    ],
    ids=["empty", "no columns", "no fields", "lengths", "budget", "share", "dtype", "device", "strings", "random"],
)
def test_bad_arguments_are_named(source: Any, arguments: dict[str, Any], message: str) -> None:
    budget = {} if isinstance(source, list) else {"budget": 8}
    if isinstance(source, torch.Tensor) and "device" not in arguments:
        arguments = {"device": "meta", **budget, **arguments}
    with pytest.raises(ArgumentError, match=message):
        DeviceDataset(source, **{"device": "cpu", **arguments})


def test_more_than_the_host_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feedline.core.devices._free_host_nbytes", lambda: 10 * ROW)
    with pytest.raises(
        ArgumentError, match=rf"37 samples in host memory take {37 * ROW} bytes, but {10 * ROW} are free"
    ):
        DeviceDataset(Decoded(), device="cpu")
    assert DeviceDataset(Decoded(), device="cpu", spill=False).statistics().resident == 8
