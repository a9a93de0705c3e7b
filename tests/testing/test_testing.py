"""The conformance checks accept good datasets and samplers, and name the faults of bad ones."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import feedline as fl
from feedline.testing import check_dataset, check_sampler, difference


@dataclass
class Pair:
    image: torch.Tensor
    label: int


class Good:
    traits = fl.Traits(thread_safe=True)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if not -40 <= index < 40:
            raise IndexError(index)
        return torch.tensor([index % 40]), fl.sample_rng().random()


class Forgetful(Good):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], random.random()


class OfTheSeed(Good):
    """Samples that depend on a loader's use of torch's generator."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], torch.initial_seed()


class Endless(Good):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index % 40)


class OtherMany(Good):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(torch.tensor([index]), 0.0) for index in indices]


class OtherBatch(Good):
    def read_batch(self, request: fl.BatchRead) -> Any:
        return [torch.as_tensor(request.indices), torch.zeros(len(request.indices))]


class Traitless(OtherBatch):
    traits = None  # type: ignore[assignment]


class Locked(Good):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Drifting(Good):
    def __init__(self) -> None:
        self.shift = 0

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0] + self.shift

    def __setstate__(self, state: Any) -> None:
        self.shift = 1


def test_good_datasets_pass() -> None:
    check_dataset(Good(), methods=("thread", "process"))
    check_dataset(TensorDataset(torch.arange(30), torch.rand(30, 2)))
    check_dataset(ConcatDataset([Good(), Subset(Good(), [3, 1])]), methods=("thread",))


@pytest.mark.parametrize(
    ("dataset", "complaint"),
    [
        (Forgetful(), "the same random address"),
        (OfTheSeed(), "a loader without workers must give the samples that __getitem__ gives"),
        (Endless(), "index 40 of 40 samples must raise IndexError"),
        (OtherMany(), "__getitems__ must give"),
        (OtherBatch(), "read_batch must give"),
        (Traitless(), "add traits = fl.Traits()"),
        (Locked(), "survive pickling"),
        (Drifting(), "an unpickled dataset"),
        (TensorDataset(torch.ones(0)), "empty"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_wrong_is_named(dataset: Any, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_dataset(dataset)


@pytest.mark.parametrize(
    "sampler",
    [
        fl.samplers.Sequential(10),
        fl.samplers.Shuffled(100_000, seed=3),
        fl.samplers.Weighted([1.0, 2.0, 3.0], num_samples=50, seed=0),
        fl.samplers.Infinite(fl.samplers.Shuffled(7, seed=1)),
        fl.samplers.LengthBuckets([3, 5, 2, 8, 8, 1, 4], max_tokens=16, seed=1),
        fl.samplers.StratifiedBatches([0, 1, 1, 0, 1], 2, seed=1),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_feedlines_own_samplers_pass(sampler: Any) -> None:
    check_sampler(sampler)


class Stateful(fl.samplers.Sequential):
    def indices(self, epoch: int, start: int, stop: int) -> Any:
        return super().indices(epoch, start, stop) + (stop - start == 1)


class Backwards(fl.samplers.Sequential):
    def __iter__(self) -> Any:
        return reversed(range(len(self)))


class Listing(fl.samplers.Sequential):
    def take(self, epoch: int, start: int, stop: int) -> Any:
        return list(range(start, stop))


class Batches(fl.samplers.BatchIndexSampler):
    def __init__(self, mistake: str) -> None:
        self.mistake = mistake
        self.length = 4

    def batches(self, epoch: int, start: int, stop: int) -> Any:
        shift = stop - start == 1 and self.mistake == "cut"
        dtype = np.int32 if self.mistake == "dtype" else np.int64
        return [np.array([2 * number + shift, 2 * number + 1], dtype) for number in range(start, stop)]


@pytest.mark.parametrize(
    ("sampler", "complaint"),
    [
        (Stateful(9), "depends on the division of an epoch into spans"),
        (Backwards(9), "disagree, from position 0"),
        (Listing(9), "list"),
        (Batches("cut"), "take_batches depends on the division of an epoch into spans"),
        (Batches("dtype"), "must be an int64 array, but one is int32 array"),
    ],
)
def test_what_is_wrong_with_a_sampler_is_named(sampler: Any, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_sampler(sampler)


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (1, 1.0, "int once and float"),
        ({"a": 1}, {"b": 1}, "keys"),
        ([1, [2]], [1, [3]], "it[1][0] is 2"),
        (torch.ones(2), torch.ones(3), "(2,) once"),
        (np.ones(2), np.zeros(2), "other values"),
        ((1,), (1, 2), "parts"),
        (torch.tensor([float("nan")]), torch.zeros(1), "it has other values"),
        (torch.tensor([float("inf")]), torch.tensor([torch.finfo().max]), "it has other values"),
        (Pair(torch.zeros(2), 1), Pair(torch.zeros(2), 2), "it.label is 1 once and 2 once"),
        (Pair(torch.zeros(2), 1), Pair(torch.ones(2), 1), "it.image has other values"),
    ],
)
def test_differences(one: Any, other: Any, text: str) -> None:
    assert text in (difference(one, other) or "")


def test_no_difference() -> None:
    value = {"a": [torch.tensor([float("nan"), 1.0]), np.array([np.nan]), "x", float("nan")]}
    assert difference(value, {"a": [torch.tensor([float("nan"), 1.0]), np.array([np.nan]), "x", float("nan")]}) is None
    assert difference(Pair(torch.zeros(2), 1), Pair(torch.zeros(2), 1)) is None
