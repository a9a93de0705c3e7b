"""Drop-in: with the same arguments and the same state of torch's generator, batches equal torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from law_settings import Reason, law_settings
from laws_reference import seed_torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import feedline as fl

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning")
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]

Value = Any
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
DTYPES = st.sampled_from(["int64", "float32", "float64", "uint8", "int16", "bool", "complex64", "float16"])


def tensor(shape: tuple[int, ...], dtype: str, row: int) -> torch.Tensor:
    """A tensor that differs from row to row."""
    return (torch.arange(int(np.prod(shape))).reshape(shape) + row).to(getattr(torch, dtype))


LEAVES: st.SearchStrategy[Callable[[int], Value]] = st.one_of(
    st.just(lambda row: row),
    st.just(lambda row: row / 3),
    st.just(lambda row: row % 2 == 0),
    st.just(lambda row: f"row {row}"),
    st.just(lambda row: np.float32(row)),
    st.builds(lambda shape, dtype: lambda row: tensor(shape, dtype, row), SHAPES, DTYPES),
    st.builds(lambda shape, dtype: lambda row: tensor(shape, dtype, row).numpy(), SHAPES, DTYPES),
    st.builds(lambda shape: lambda row: tensor(shape, "bfloat16", 0) + row, SHAPES),
    st.builds(lambda shape: lambda row: tensor((*shape, 2), "int32", row).transpose(0, -1), SHAPES),
)
"""Functions that make the value of a row, with the same structure for every row of a dataset."""


def _containers(inner: st.SearchStrategy[Callable[[int], Value]]) -> st.SearchStrategy[Callable[[int], Value]]:
    parts = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        parts.map(lambda makers: lambda row: [make(row) for make in makers]),
        parts.map(lambda makers: lambda row: tuple(make(row) for make in makers)),
        parts.map(lambda makers: lambda row: {f"k{i}": make(row) for i, make in enumerate(makers)}),
    )


SAMPLES = st.recursive(LEAVES, _containers, max_leaves=5)


class Made(Dataset[Any]):
    """Row `i` is `make(i)`."""

    def __init__(self, n: int, make: Callable[[int], Value]) -> None:
        self.n, self.make = n, make

    def __getitem__(self, index: int) -> Value:
        return self.make(index)

    def __len__(self) -> int:
        return self.n


def alike(ours: Any, theirs: Any) -> bool:
    """Equal in type, dtype, shape and every bit."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(theirs, torch.Tensor):
        same_kind = (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        return same_kind and torch.equal(ours, theirs)
    if isinstance(theirs, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(alike(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(alike, ours, theirs))
    return bool(ours == theirs)


def samplers(dataset: Any) -> dict[str, dict[str, Any]]:
    """Arguments for every kind of order that torch has."""
    n = len(dataset)
    return {
        "sequential": {},
        "shuffle": {"shuffle": True},
        "generator": {"shuffle": True, "generator": torch.Generator().manual_seed(n)},
        "replacement": {"sampler": RandomSampler(dataset, replacement=True, num_samples=2 * n)},
        "own generator": {"sampler": RandomSampler(dataset, generator=torch.Generator().manual_seed(n))},
        "weighted": {"sampler": WeightedRandomSampler([1.0 + i for i in range(n)], n + 3)},
        "subset": {"sampler": SubsetRandomSampler(range(0, n, 2))},
        "list": {"sampler": [i % n for i in range(n + 5)]},
    }


KINDS = st.sampled_from(sorted(samplers(range(1))))


def epochs(loader_class: Any, dataset: Any, arguments: dict[str, Any]) -> tuple[list[list[Any]], torch.Tensor]:
    """Two epochs from a known state of torch's generator, and its state afterwards."""
    seed_torch(1234)
    loader = loader_class(dataset, **arguments)
    return [list(loader) for _ in range(2)], torch.get_rng_state()


def assert_drop_in(dataset: Any, arguments: Callable[[], dict[str, Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, ours_state = epochs(fl.DataLoader, dataset, arguments())
        theirs, theirs_state = epochs(DataLoader, dataset, arguments())
    assert [len(epoch) for epoch in ours] == [len(epoch) for epoch in theirs]
    for mine, other in zip(chain.from_iterable(ours), chain.from_iterable(theirs), strict=True):
        assert alike(mine, other), f"feedline {mine!r}\ntorch {other!r}"
    assert torch.equal(ours_state, theirs_state)


@given(SAMPLES, st.integers(1, 25), KINDS, st.sampled_from([None, 1, 2, 3, 7, 30]), st.booleans())
@law_settings(suppress_health_check=CHECKS)
def test_inline(make: Any, n: int, kind: str, batch_size: int | None, drop_last: bool) -> None:
    dataset = Made(n, make)
    drop_last = drop_last and batch_size is not None
    assert_drop_in(dataset, lambda: {"batch_size": batch_size, "drop_last": drop_last, **samplers(dataset)[kind]})


@given(SAMPLES, st.integers(1, 25), KINDS, st.sampled_from([None, 1, 3, 7]), st.integers(1, 2), st.booleans())
@law_settings(at_most=10, because=Reason.PROCESSES, suppress_health_check=CHECKS)
def test_with_worker_processes(
    make: Any, n: int, kind: str, batch_size: int | None, workers: int, persistent: bool
) -> None:
    dataset = Made(n, make)
    extra = {"batch_size": batch_size, "num_workers": workers, "persistent_workers": persistent}
    assert_drop_in(dataset, lambda: {**extra, **samplers(dataset)[kind]})


class MadeOfMany(Dataset[Any]):
    """Row `(k, i)` is row `i` of the k-th maker."""

    def __init__(self, makers: list[Callable[[int], Value]]) -> None:
        self.makers = makers

    def __getitem__(self, place: tuple[int, int]) -> Value:
        return self.makers[place[0]](place[1])


@given(st.lists(st.tuples(SAMPLES, st.integers(1, 9)), min_size=12, max_size=12), st.integers(1, 2), st.booleans())
@law_settings(at_most=10, because=Reason.PROCESSES, suppress_health_check=CHECKS)
def test_many_structures_from_worker_processes(made: list[tuple[Any, int]], workers: int, persistent: bool) -> None:
    """A dozen structures for each pair of loaders, because their processes take the time."""
    dataset = MadeOfMany([make for make, _ in made])
    batches = [[(number, row) for row in range(size)] for number, (_, size) in enumerate(made)]
    arguments = {"batch_sampler": batches, "num_workers": workers, "persistent_workers": persistent}
    assert_drop_in(dataset, lambda: arguments)


@given(SAMPLES, st.integers(1, 25), st.integers(1, 5), st.booleans())
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_batch_samplers(make: Any, n: int, size: int, drop_last: bool) -> None:
    dataset = Made(n, make)
    assert_drop_in(dataset, lambda: {"batch_sampler": BatchSampler(RandomSampler(dataset), size, drop_last)})
    assert_drop_in(dataset, lambda: {"batch_sampler": [list(range(k, min(k + size, n))) for k in range(0, n, size)]})


@given(
    st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=3), st.integers(1, 20), KINDS, st.integers(1, 6), st.data()
)
@law_settings(at_most=25, because=Reason.PROCESSES, suppress_health_check=CHECKS)
def test_datasets_that_are_gathered_many_at_once(
    columns: list[tuple[tuple[int, ...], str]], n: int, kind: str, batch_size: int, data: st.DataObject
) -> None:
    """TensorDataset, and Subset and ConcatDataset of it, have fast paths, which must not show."""
    plain = TensorDataset(*(torch.stack([tensor(shape, dtype, row) for row in range(n)]) for shape, dtype in columns))
    picked = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=10))
    for dataset in (plain, Subset(plain, picked), ConcatDataset([Subset(plain, picked), plain])):
        arguments = {"batch_size": batch_size, "num_workers": data.draw(st.sampled_from([0, 0, 0, 0, 1]))}
        assert_drop_in(dataset, lambda d=dataset, a=arguments: {**a, **samplers(d)[kind]})  # type: ignore[misc]


class Changing(Dataset[torch.Tensor]):
    """Multiples of `factor`; everything may be changed."""

    def __init__(self) -> None:
        self.n, self.factor = 10, 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index * self.factor)

    def __len__(self) -> int:
        return self.n


def change_getter(loader: Any, number: int) -> None:
    """Let the dataset read many samples at once, or no more."""
    if vars(loader.dataset).pop("__getitems__", None) is None:
        loader.dataset.__getitems__ = lambda indices: [torch.tensor(index - number) for index in indices]


def change_workers(loader: Any, number: int) -> None:
    """Change the workers of feedline's loader only, whose batches do not depend on them."""
    if isinstance(loader, fl.DataLoader):
        loader.num_workers = number % 3


def change_epoch(loader: Any, number: int) -> None:
    """Set an epoch, which decides nothing here."""
    if isinstance(loader, fl.DataLoader):
        loader.set_epoch(number)


CHANGES: dict[str, Callable[[Any, int], object]] = {
    "attribute": lambda loader, number: setattr(loader.dataset, "factor", number),
    "length": lambda loader, number: setattr(loader.dataset, "n", number),
    "getter": change_getter,
    "collate_fn": lambda loader, number: setattr(loader, "collate_fn", lambda samples: (number, samples)),
    "batch_size": lambda loader, number: setattr(loader.batch_sampler, "batch_size", number),
    "drop_last": lambda loader, number: setattr(loader.batch_sampler, "drop_last", number % 2 == 0),
    "sampler": lambda loader, number: setattr(loader.batch_sampler, "sampler", SubsetRandomSampler(range(number))),
    "list": lambda loader, number: setattr(loader.batch_sampler, "sampler", list(range(number))),
    "generator": lambda loader, number: loader.generator is None or loader.generator.manual_seed(number),
    "seed": lambda _, number: torch.manual_seed(number),
    "workers": change_workers,
    "epoch": change_epoch,
}


@given(
    st.booleans(),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(1, 9), st.booleans()), min_size=1, max_size=6),
    st.integers(0, 2**31),
)
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_changes_between_two_epochs_take_effect_as_in_torch(
    shuffle: bool, has_generator: bool, changes: list[tuple[str, int, bool]], seed: int
) -> None:
    def batches(loader_class: Any, **own: Any) -> Any:
        seed_torch(seed)
        generator = torch.Generator().manual_seed(seed) if has_generator else None
        loader = loader_class(Changing(), 3, shuffle, generator=generator, **own)
        seen, workers = [], 0
        for name, number, leaves in changes:
            # Workers, which torch's loader has not here, may have reached the end of the sampler, where it draws again.
            seen.append([str(batch) for batch in islice(loader, 1 if leaves and not workers else None)])
            CHANGES[name](loader, number)
            workers = number % 3 if name == "workers" else workers
        seen.append(list(map(str, loader)))
        return seen, torch.get_rng_state().tolist()

    assert batches(fl.DataLoader, worker_method="thread") == batches(DataLoader)
