from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder import Recorder
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import feedline as fl
from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead
from feedline.core.rng import sample_rng, torch_keys
from feedline.errors import ArgumentError


def numbers(length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(length * 3).reshape(length, 3).to(dtype)


def pairs(length: int, offset: int = 0) -> TensorDataset:
    return TensorDataset(numbers(length) + offset, torch.arange(length))


DATASETS: dict[str, Callable[[], Any]] = {
    "TensorDataset": lambda: pairs(10),
    "one tensor": lambda: TensorDataset(numbers(10)),
    "strided": lambda: TensorDataset(torch.arange(30).reshape(3, 10).t(), torch.arange(20)[::2]),
    "bfloat16": lambda: TensorDataset(numbers(10, torch.bfloat16), torch.ones(10, dtype=torch.bool)),
    "empty rows": lambda: TensorDataset(torch.ones(10, 0)),
    "tensor": lambda: numbers(10),
    "array": lambda: np.arange(30).reshape(10, 3),
    "Subset": lambda: Subset(pairs(12), [3, 1, 4, 1, -5, 9, 2, 6, 5, 11]),
    "Subset by array": lambda: Subset(pairs(12), np.arange(10, dtype=np.int32)),
    "Subset by tensor": lambda: Subset(pairs(12), torch.arange(10)),
    "Subset by range": lambda: Subset(pairs(12), range(1, 11)),
    "Subset of Subset": lambda: Subset(Subset(pairs(12), range(11)), range(10, 0, -1)),
    "Concat": lambda: ConcatDataset([pairs(3), pairs(0), pairs(5, 100), pairs(2, 200)]),
    "Concat of mixtures": lambda: ConcatDataset([Subset(pairs(9), range(4)), ConcatDataset([pairs(2, 50), pairs(4)])]),
    "Concat of other dtypes": lambda: ConcatDataset(
        [TensorDataset(numbers(4)), TensorDataset(numbers(6, torch.float64))]
    ),
    "Stack of tuple": lambda: StackDataset(pairs(10), Subset(numbers(12), range(10))),
    "Stack of dict": lambda: StackDataset(x=pairs(10), y=numbers(10)),
    "Concat of Stacks": lambda: ConcatDataset(
        [StackDataset(a=pairs(6), b=numbers(6)), StackDataset(a=pairs(4), b=numbers(4))]
    ),
}


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return (
            type(ours) is type(theirs) and list(ours) == list(theirs) and all(same(ours[k], theirs[k]) for k in theirs)
        )
    parts = zip(ours, theirs, strict=True)
    return type(ours) is type(theirs) and all(same(mine, other) for mine, other in parts)


@pytest.mark.parametrize("name", DATASETS)
@given(indices=st.lists(st.integers(-10, 9), min_size=1, max_size=20))
@settings(max_examples=60)  # of each dataset: there are 18
def test_gather_gives_the_collated_samples_in_the_memory_given(name: str, indices: list[int]) -> None:
    dataset = DATASETS[name]()
    read = reader_of(dataset)
    assert read is not None
    empty = Recorder()
    batch = read(BatchRead(np.array(indices), empty))
    assert same(batch, default_collate([dataset[i] for i in indices]))
    assert empty.holds(batch) or name == "Concat of other dtypes"  # which torch promotes: made by the element path


@pytest.mark.parametrize("name", DATASETS)
def test_an_index_out_of_range_raises_the_same_type(name: str) -> None:
    dataset = DATASETS[name]()
    read = reader_of(dataset)
    assert read is not None
    for index in (10, -11, 2**40):
        with pytest.raises((IndexError, ValueError)) as theirs:
            dataset[index]
        with pytest.raises(theirs.type, match=f"{index}.* 10 ") as ours:
            read(BatchRead(np.array([0, index]), Recorder()))
        assert issubclass(ours.type, theirs.type)


def test_the_indices_of_a_subset_are_read_again() -> None:
    subset = Subset(pairs(5), [0, 1])
    read = reader_of(subset)
    assert read is not None
    subset.indices[1] = 4
    assert read(BatchRead(np.array([1]), Recorder()))[1].tolist() == [4]
    for mask in ([False, True], np.array([False, True]), [np.False_, np.True_]):
        subset.indices = mask  # type: ignore[assignment]
        with pytest.raises(ArgumentError, match="indices of a Subset are a mask"):
            read(BatchRead(np.array([1]), Recorder()))
    for fractions in ([0.0, 1.7], np.array([0.0, 1.7])):
        subset.indices = fractions  # type: ignore[assignment]
        with pytest.raises(IndexError):
            read(BatchRead(np.array([1]), Recorder()))
    subset.indices = np.array([0, 2**64 - 1], np.uint64)  # type: ignore[assignment]
    with pytest.raises(IndexError, match="index 18446744073709551615 is out of range"):  # -1 as int64
        read(BatchRead(np.array([1]), Recorder()))


class Doubled(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * value for value in super().__getitem__(index))


class Reversed(Subset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(len(self) - 1 - index)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Listed:
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 5


class OwnReadBatch(Listed):
    traits = fl.Traits(is_random=False)

    def read_batch(self, request: BatchRead) -> torch.Tensor:
        return torch.as_tensor(request.indices)


class OtherReadBatch(Listed):
    """A dataset with a method of that name, but without traits."""

    def read_batch(self, path: str) -> None:
        raise AssertionError


class SwitchedOff(Listed):
    traits = fl.Traits(reads_batches=False)

    def read_batch(self, request: BatchRead) -> None:
        raise AssertionError


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "dataset",
    [
        Doubled(torch.ones(3)),
        Reversed(pairs(3), range(3)),
        Subset(Listed(), [1]),
        ConcatDataset([pairs(3), Listed()]),
        StackDataset(pairs(5), Listed()),
        Listed(),
        OtherReadBatch(),
        SwitchedOff(),
        range(5),
        torch.tensor(5),
        np.arange(5),
        np.array([["a"], ["b"]]),
        TensorDataset(torch.ones(3, requires_grad=True)),
        TensorDataset(torch.ones(3).as_subclass(Tagged)),
        TensorDataset(torch.eye(3).to_sparse()),
        TensorDataset(torch.ones(3, dtype=torch.complex64).conj()),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_what_may_do_more_than_copy_rows_is_left_alone(dataset: Any) -> None:
    assert reader_of(dataset) is None


def test_a_dataset_may_bring_its_own() -> None:
    read = reader_of(Subset(OwnReadBatch(), [4, 2]))
    assert read is not None
    assert read(BatchRead(np.array([1, 0]), Recorder())).tolist() == [2, 4]


@pytest.mark.parametrize(
    "dataset",
    [
        fl.datasets.Arrays(np.arange(5), transform=str),
        fl.datasets.Arrow(pa.table({"x": [1]}), transform=str),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_a_batch_is_refused_where_a_transform_sees_each_sample(dataset: Any) -> None:
    with pytest.raises(TypeError, match=f"this {type(dataset).__name__} reads its samples one by one"):
        dataset.read_batch(BatchRead(np.array([0]), Recorder()))


def test_registered_collate_functions_switch_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (torch.Tensor, object, Sized, (Tagged, float)):
        with monkeypatch.context() as patch:
            patch.setitem(default_collate_fn_map, kind, lambda batch, *, collate_fn_map: batch)
            assert reader_of(pairs(3)) is None
            plan = str(fl.DataLoader(pairs(3), 2).plan()).replace("\n", " ")
            assert "a collate function that is registered with torch, for" in plan


def test_functions_for_types_of_others_leave_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of DALI's plugin registers one."""
    monkeypatch.setitem(default_collate_fn_map, Tagged, lambda batch, *, collate_fn_map: batch)
    assert reader_of(pairs(3)) is not None
    with fl.DataLoader([Tagged([number]) for number in range(4)], 2) as loader:
        assert [type(batch) for batch in loader] == [list, list]


class Noisy(Listed):
    """Sample i is i and the key of its random numbers."""

    def __init__(self, size: int = 5) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return torch.tensor([index, np.uint64(sample_rng().key).astype(np.int64)])


class NoisyAtOnce(Noisy):
    traits = fl.Traits()

    def read_batch(self, request: BatchRead) -> torch.Tensor:
        indices, keys = request.indices, request.keys
        out = request.allocate((len(indices), 2), torch.int64)
        out[:, 0] = torch.as_tensor(indices)
        out[:, 1] = torch.from_numpy((torch_keys(len(indices)) if keys is None else keys).view(np.int64))
        return out


class Quiet(Listed):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, 0])


class QuietAtOnce(Quiet):
    traits = fl.Traits(uses_keys=False)

    def read_batch(self, request: BatchRead) -> torch.Tensor:
        return torch.stack([self[i] for i in request.indices.tolist()])


WRAPPED = {
    "bare": lambda noisy, quiet: noisy(),
    "Subset": lambda noisy, quiet: Subset(noisy(), [4, 0, 3, 3, 1]),
    "ConcatDataset": lambda noisy, quiet: ConcatDataset([noisy(), quiet(), noisy(3)]),
    "StackDataset": lambda noisy, quiet: StackDataset(quiet(), noisy()),
    "both of a StackDataset": lambda noisy, quiet: StackDataset(noisy(), noisy()),
}


@pytest.mark.parametrize(("name", "seed"), [*((name, None) for name in WRAPPED), (next(iter(WRAPPED)), 3)])
def test_random_samples_are_the_same_one_by_one_and_at_once(name: str, seed: int | None) -> None:
    def batches(noisy: Any, quiet: Any) -> list[Any]:
        torch.manual_seed(7)
        loader = fl.DataLoader(WRAPPED[name](noisy, quiet), batch_size=3, shuffle=True, seed=seed)
        return [*loader, *loader]

    assert same(batches(NoisyAtOnce, QuietAtOnce), batches(Noisy, Quiet))


def test_only_readers_that_draw_are_given_keys() -> None:
    draws = {
        name: (found := reader_of(make(NoisyAtOnce, QuietAtOnce))) and found.uses_keys for name, make in WRAPPED.items()
    }
    assert draws == {
        "bare": True,
        "Subset": True,
        "ConcatDataset": True,
        "StackDataset": True,
        "both of a StackDataset": None,
    }
    quiet = reader_of(ConcatDataset([QuietAtOnce(), QuietAtOnce()]))
    assert quiet is not None
    assert not quiet.uses_keys


class NoisyTogether(Noisy):
    """Fetches many samples at once, in a loop that does not report its current sample."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def test_a_loop_over_many_gives_every_sample_its_own_key() -> None:
    one_by_one, together = (next(iter(fl.DataLoader(noisy(), 5, seed=1))) for noisy in (Noisy, NoisyTogether))
    assert same(together, one_by_one)


class TwiceNoisy(NoisyTogether):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([super(TwiceNoisy, self).__getitem__(index) for _ in range(2)])


def test_no_key_is_given_twice_to_a_loop_that_draws_more_often() -> None:
    batch = next(iter(fl.DataLoader(TwiceNoisy(), 5, seed=1)))
    assert len(batch[..., 1].unique()) == 10


class Splitting(NoisyAtOnce):
    """Records the number of threads that it gets, and the number of batches in progress."""

    traits = fl.Traits(thread_safe=True, supports_threads=True)

    def __init__(self) -> None:
        super().__init__(60)
        self.given: list[int] = []

    def read_batch(self, request: BatchRead) -> torch.Tensor:
        self.given.append(request.threads)
        return super().read_batch(request)


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(60))])
def test_threads_work_on_batches_together_where_they_can(wrap: Callable[[Any], Any]) -> None:
    data = Splitting()
    with fl.DataLoader(wrap(data), 5, seed=1, num_workers=5, worker_method="thread") as loader:
        batches = list(loader)
        assert loader.stats().workers <= 2
    assert set(data.given) == {4}
    assert same(batches, list(fl.DataLoader(Noisy(60), 5, seed=1)))
    data.given.clear()
    list(fl.DataLoader(wrap(data), 5, seed=1))
    assert set(data.given) == {1}
