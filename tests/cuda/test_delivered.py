"""Batches of every kind on a real device: trees, conversions, depth, and batches that the loop keeps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, TensorDataset

import feedline as fl
from feedline import transforms as T
from feedline.errors import ArgumentError
from feedline.loader.device import open_stage

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MIB = 1 << 20


class Clip:
    """A class of a user, with `to` alone."""

    def __init__(self, frames: torch.Tensor, name: str) -> None:
        self.frames, self.name = frames, name

    def to(self, device: torch.device) -> Clip:
        return Clip(self.frames.to(device), self.name)


@dataclass
class Point:
    place: torch.Tensor
    name: str


def tree(samples: list[int]) -> dict[str, Any]:
    """Tensors in all containers, objects with tensors, and values without any."""
    rows = [torch.arange(number % 5 + 1) for number in samples]
    return {
        "plain": torch.stack([torch.full((64, 128), float(number)) for number in samples]),
        "ragged": (rows, {"mask": [torch.ones(2, dtype=torch.bool), "text", 3]}),
        "packed": pack_sequence(rows, enforce_sorted=False),
        "sparse": torch.eye(3).mul(samples[0]).to_sparse(),
        "clip": Clip(torch.full((2, 2), float(samples[0])), "clip"),
        "point": Point(torch.tensor(samples), "point"),
        "empty": torch.empty(0, 4),
        "array": np.arange(3),
    }


def tensors_of(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    rows, more = batch["ragged"]
    return {
        **{name: batch[name] for name in ("plain", "sparse", "empty")},
        **{f"row {place}": row for place, row in enumerate(rows)},
        "mask": more["mask"][0],
        "packed": batch["packed"].data,
        "clip": batch["clip"].frames,
        "point": batch["point"].place,
    }


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_tree_arrives_with_its_containers(num_workers: int) -> None:
    arguments: dict[str, Any] = {"batch_size": 4, "collate_fn": tree}
    with fl.DataLoader(range(40), device="cuda", num_workers=num_workers, **arguments) as loader:
        batches = list(loader)
    for number, (ours, theirs) in enumerate(zip(batches, fl.DataLoader(range(40), **arguments), strict=True)):
        for (name, got), wanted in zip(tensors_of(ours).items(), tensors_of(theirs).values(), strict=True):
            assert got.is_cuda, f"batch {number}, {name}: on {got.device}"
            got, wanted = (each.to_dense() if each.is_sparse else each for each in (got.cpu(), wanted))
            assert torch.equal(got, wanted), f"batch {number}, {name}: {got} instead of {wanted}"
        assert (type(ours["clip"]), ours["clip"].name, type(ours["point"]), ours["point"].name) == (
            Clip, "clip", Point, "point",
        )  # fmt: skip
        assert ours["ragged"][1]["mask"][1:] == ["text", 3]
        assert isinstance(ours["array"], np.ndarray)
        assert ours["packed"].batch_sizes.device.type == "cpu"  # as torch's recurrent layers need


@pytest.mark.filterwarnings("ignore:.*nested tensor:UserWarning")  # torch calls them a prototype
def test_jagged_tensors_arrive() -> None:
    def jagged(samples: list[int]) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.ones(number + 1) for number in samples], layout=torch.jagged)

    with fl.DataLoader(range(8), batch_size=4, collate_fn=jagged, device="cuda") as loader:
        batches = list(loader)
    assert [batch.device.type for batch in batches] == ["cuda"] * 2
    assert [[len(row) for row in batch.unbind()] for batch in batches] == [[1, 2, 3, 4], [5, 6, 7, 8]]


def scale(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    return [batch[0].float().div(255), batch[1]]


def test_levels_cross_the_bus_as_bytes() -> None:
    """A quarter of the bytes of float32, and the same numbers."""
    images, labels = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8), torch.arange(64)
    kinds = {"memory_format": torch.channels_last, "dtype": torch.bfloat16}
    with fl.DataLoader(
        TensorDataset(images, labels), 16, device=fl.Delivery("cuda", transform=scale, **kinds)
    ) as loader:
        ours, sent = list(loader), loader.stats().copied_nbytes
    floats = TensorDataset(images.float().div(255), labels)
    with fl.DataLoader(floats, 16, device=fl.Delivery("cuda", **kinds)) as loader:
        theirs, sent_as_floats = list(loader), loader.stats().copied_nbytes
    nbytes = (sent - labels.nbytes, sent_as_floats - labels.nbytes)
    assert nbytes == (images.nbytes, 4 * images.nbytes), f"copied {nbytes}, images have {images.nbytes} bytes"
    for (mine, _), (other, _) in zip(ours, theirs, strict=True):
        assert mine.dtype is torch.bfloat16
        assert mine.is_contiguous(memory_format=torch.channels_last), mine.stride()
        difference = (mine.float() - other.float()).abs().max().item()
        assert difference <= 1 / 256, f"largest difference {difference}"  # a step of bfloat16 near 1


@pytest.mark.parametrize(("prefetch", "ahead"), [(1, 1), (2, 2), (5, 5), ("9 MiB", 2), ("1 MiB", 1)])
def test_the_depth_limits_what_is_ahead(prefetch: int | str, ahead: int) -> None:
    host = torch.ones(MIB, dtype=torch.int32).pin_memory()
    stage: Any = open_stage(fl.Delivery("cuda", prefetch=prefetch))
    with stage:
        started = []
        while stage.has_room():
            started.append(stage.start(host))
        assert len(started) == ahead, f"{len(started)} batches of 4 MiB are ahead with prefetch={prefetch!r}"
        assert all(stage.finish(each).min().item() == 1 for each in started)


def test_device_memory_stays_bounded() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    data = TensorDataset(torch.arange(64 * 2 * MIB // 8).view(64, -1))
    total = 0
    with fl.DataLoader(data, batch_size=4, num_workers=2, device="cuda") as loader:
        for _ in range(3):
            total = sum(batch.sum() for (batch,) in loader).item()
    peak = (torch.cuda.max_memory_allocated() - before) / (8 * MIB)
    assert total == data.tensors[0].sum().item()
    assert peak <= 8, f"{peak:.1f} batches of 8 MiB were on the device at once, of 48 that passed"


def test_a_loop_may_keep_all_batches() -> None:
    data = TensorDataset(torch.arange(96 * MIB // 32).view(96, -1))
    with fl.DataLoader(data, batch_size=4, num_workers=2, device="cuda") as loader:
        kept = [batch for _ in range(2) for (batch,) in loader]
        stats = loader.stats()
    for number, batch in enumerate(kept):
        first = number % 24 * 4
        assert torch.equal(batch.cpu(), data.tensors[0][first : first + 4]), f"batch {number} of {len(kept)} changed"
    assert stats.staged_nbytes == 0, f"{stats.staged_nbytes} of {stats.copied_nbytes} bytes were copied twice"


class Drawn(Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(300) + float(np.random.rand())  # noqa: NPY002 - the global generator is tested


def test_random_values_are_those_of_a_run_on_the_cpu() -> None:
    arguments: dict[str, Any] = {"batch_size": 6, "shuffle": True, "seed": 5}
    alone = fl.DataLoader(Drawn(), **arguments)
    expected = [batch for _ in range(2) for batch in alone]
    with fl.DataLoader(Drawn(), num_workers=2, worker_method="process", device="cuda", **arguments) as loader:
        got = [batch for _ in range(2) for batch in loader]
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True)), f"batch {number} differs"


def test_random_steps_on_the_device_are_those_of_the_cpu() -> None:
    images = torch.randint(0, 256, (60, 3, 20, 24), dtype=torch.uint8)
    data, steps = TensorDataset(images, torch.arange(60)), T.OnBatch([T.RandomCrop(16), T.RandomHorizontalFlip()])
    runs = []
    for device in ("cpu", "cuda"):
        delivery = fl.Delivery(device, transform=steps)
        with fl.DataLoader(data, 16, shuffle=True, seed=3, num_workers=2, device=delivery) as loader:
            runs.append([batch for _ in range(2) for batch in loader])
    for number, (theirs, ours) in enumerate(zip(*runs, strict=True)):
        assert ours[0].is_cuda
        assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True)), f"batch {number} differs"


def test_a_wrong_device_is_named() -> None:
    there = torch.cuda.device_count()
    with pytest.raises(ArgumentError, match=f"finds {there} CUDA devices") as caught:
        list(fl.DataLoader(range(4), device=f"cuda:{there}"))
    assert re.search(r"cuda:\d+", str(caught.value))
