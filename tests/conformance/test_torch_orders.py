"""torch's contract for order and length: samplers, batch samplers, shuffling, and their random draws."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from diagonals import at_night, by_day
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler
from torch_datasets import Bulk, Counting, CountingStream, Draws, IndexTypes, Many

Make = Callable[..., DataLoader[Any]]
workers = pytest.mark.parametrize("num_workers", [0, 2])


def flat(loader: DataLoader[Any]) -> list[int]:
    """One epoch as one list of numbers."""
    return [int(x) for batch in loader for x in torch.as_tensor(batch).reshape(-1)]


@pytest.mark.parametrize(("num_workers", "batch_size"), [(0, None), (2, None), (2, 1), (0, 2), (2, 7), (0, 30)])
def test_without_shuffle_the_order_is_that_of_the_dataset(
    make_loader: Make, num_workers: int, batch_size: int | None
) -> None:
    assert flat(make_loader(Counting(23), batch_size=batch_size, num_workers=num_workers)) == list(range(23))


@pytest.mark.parametrize(
    ("num_workers", "batch_size", "drop_last", "sizes"),
    [(0, 4, False, [4, 4, 3]), (0, 4, True, [4, 4]), (2, 4, True, [4, 4]), (0, 12, True, []), (2, 12, True, [])],
)
def test_the_tail_is_kept_or_dropped(
    make_loader: Make, num_workers: int, batch_size: int, drop_last: bool, sizes: list[int]
) -> None:
    loader = make_loader(Counting(11), batch_size=batch_size, drop_last=drop_last, num_workers=num_workers)
    assert [len(batch) for batch in loader] == sizes
    assert len(loader) == len(sizes)


@pytest.mark.parametrize(("num_workers", "batch_size"), [(0, None), (2, 1), (0, 4)])
def test_shuffle_gives_every_sample_once(make_loader: Make, num_workers: int, batch_size: int | None) -> None:
    order = flat(make_loader(Counting(50), batch_size=batch_size, shuffle=True, num_workers=num_workers))
    assert sorted(order) == list(range(50))
    assert order != list(range(50))


@workers
def test_shuffle_differs_between_epochs_and_repeats_with_the_seed(make_loader: Make, num_workers: int) -> None:
    loader = make_loader(Counting(50), shuffle=True, num_workers=num_workers)
    torch.manual_seed(3)
    first, second = flat(loader), flat(loader)
    torch.manual_seed(3)
    assert [flat(loader), flat(loader)] == [first, second]
    assert first != second


@workers
def test_a_generator_decides_the_shuffle(make_loader: Make, num_workers: int) -> None:
    def order() -> list[int]:
        generator = torch.Generator().manual_seed(42)
        return flat(make_loader(Counting(50), shuffle=True, generator=generator, num_workers=num_workers))

    torch.manual_seed(1)
    first = order()
    torch.manual_seed(2)
    assert order() == first


@workers
def test_a_generator_leaves_the_global_one_alone(make_loader: Make, num_workers: int) -> None:
    before = torch.get_rng_state()
    flat(make_loader(Counting(9), shuffle=True, generator=torch.Generator().manual_seed(1), num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), before)


class Evens(Sampler[int]):
    """Even indices, from a generator function, with a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        yield from range(0, self.n, 2)

    def __len__(self) -> int:
        return math.ceil(self.n / 2)


class NoLength:
    """Sampler without `__len__`: allowed while its length is not needed."""

    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 2])


@pytest.mark.parametrize(
    ("num_workers", "sampler", "order"),
    [
        (0, range(2, 12), list(range(2, 12))),
        (0, [5, 5, 0, 19], [5, 5, 0, 19]),
        (0, Evens(20), list(range(0, 20, 2))),
        (0, NoLength(), [3, 1, 2]),
        (2, NoLength(), [3, 1, 2]),
        (0, [], []),
        (2, [], []),
        (0, torch.tensor([4, 2, 9]), [4, 2, 9]),
        (2, torch.tensor([4, 2, 9]), [4, 2, 9]),
    ],
)
def test_any_iterable_is_a_sampler(make_loader: Make, num_workers: int, sampler: Any, order: list[int]) -> None:
    assert flat(make_loader(Counting(20), sampler=sampler, batch_size=3, num_workers=num_workers)) == order


class UnknownLength(Counting):
    """Dataset whose length cannot be given: allowed with a sampler."""

    def __len__(self) -> int:
        raise ValueError("not read yet")


@workers
def test_the_length_of_a_dataset_is_not_read_if_there_is_a_sampler(make_loader: Make, num_workers: int) -> None:
    assert flat(make_loader(UnknownLength(5), sampler=[3, 1], num_workers=num_workers)) == [3, 1]
    assert flat(make_loader(UnknownLength(5), batch_sampler=[[3], [1]], num_workers=num_workers)) == [3, 1]


def test_the_length_of_a_sampler_without_one_is_a_type_error(loader_class: type[DataLoader[Any]]) -> None:
    with pytest.raises(TypeError):
        len(loader_class(Counting(5), sampler=NoLength()))


@workers
@pytest.mark.parametrize("container", [list, tuple])
def test_a_batch_sampler_decides_the_batches(make_loader: Make, num_workers: int, container: type) -> None:
    batches = [container(b) for b in ([0, 1], [2, 3, 4], [9], [5, 5])]
    loader = make_loader(Counting(10), batch_sampler=batches, num_workers=num_workers)
    assert len(loader) == 4
    assert [batch.tolist() for batch in loader] == [list(b) for b in batches]


@workers
def test_a_generator_is_a_batch_sampler_for_one_epoch(make_loader: Make, num_workers: int) -> None:
    batches = ([i, i + 1] for i in range(0, 6, 2))
    loader = make_loader(Counting(6), batch_sampler=batches, num_workers=num_workers)
    assert flat(loader) == list(range(6))
    assert flat(loader) == []


class Endless(Sampler[Any]):
    """One generator for all epochs, as mmengine's InfiniteSampler keeps."""

    def __init__(self, items: Iterator[Any]) -> None:
        self.items = (item for item in items)

    def __iter__(self) -> Iterator[Any]:
        yield from self.items


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("argument", ["sampler", "batch_sampler"])
def test_leaving_an_epoch_closes_the_iterator_of_the_sampler(
    make_loader: Make, num_workers: int, persistent: bool, argument: str
) -> None:
    items: Any = count() if argument == "sampler" else ([number] for number in count())
    arguments = {argument: Endless(items), "num_workers": num_workers, "persistent_workers": persistent}
    loader = make_loader(Counting(10**6), **arguments)
    assert len(list(islice(loader, 3))) == 3
    assert list(loader) == []


@workers
def test_torchs_batch_sampler_over_a_sampler(make_loader: Make, num_workers: int) -> None:
    batch_sampler = BatchSampler(Evens(20), batch_size=4, drop_last=True)
    loader = make_loader(Counting(20), batch_sampler=batch_sampler, num_workers=num_workers)
    assert [batch.tolist() for batch in loader] == [[0, 2, 4, 6], [8, 10, 12, 14]]
    assert loader.batch_sampler is batch_sampler
    assert loader.batch_size is None


@pytest.mark.parametrize(
    ("num_workers", "drop_last", "sizes"),
    [
        (0, False, [4, 3, 3, 3, 6, 6, 6, 6, 3]),
        (2, False, [4, 4, 4, 4, 4, 3, 3, 3, 6, 5]),  # four batches are drawn ahead
        (0, True, [4] * 10),
    ],
)
def test_a_size_set_during_an_epoch_counts_from_the_next_drawn_batch(
    make_loader: Make, num_workers: int, drop_last: bool, sizes: list[int]
) -> None:
    loader = make_loader(Counting(40), batch_size=4, shuffle=True, num_workers=num_workers, drop_last=drop_last)
    batches = []
    for step, batch in enumerate(loader):
        batches.append(batch.tolist())
        loader.batch_sampler.batch_size = {0: 3, 3: 6}.get(step, loader.batch_sampler.batch_size)  # type: ignore[union-attr]
    assert [len(batch) for batch in batches] == sizes
    assert sorted(index for batch in batches for index in batch) == list(range(40))


def test_a_size_may_change_with_every_batch(make_loader: Make) -> None:
    loader = make_loader(Counting(4500), batch_size=9)
    batches: Any = loader.batch_sampler
    iterator, sizes = iter(loader), []
    batches.batch_size = 2  # the first batch is not drawn yet
    for batch in iterator:
        sizes.append(len(batch))
        batches.batch_size = 3 - batches.batch_size
    assert sizes == [2, 1] * 1500


@workers
def test_a_sampler_may_yield_whole_batches_when_batching_is_off(make_loader: Make, num_workers: int) -> None:
    loader = make_loader(Bulk(7), sampler=[[0, 1], [6, 5, 4]], batch_size=None, num_workers=num_workers)
    assert not loader._auto_collation
    assert [batch.tolist() for batch in loader] == [[0, 1], [6, 5, 4]]


@workers
def test_a_sampler_may_yield_keys_that_are_no_numbers(make_loader: Make, num_workers: int) -> None:
    dataset: Any = {"a": 1, "b": 2, "c": 3}
    loader = make_loader(dataset, sampler=["c", "a", "b"], batch_size=2, num_workers=num_workers)
    assert [batch.tolist() for batch in loader] == [[3, 1], [2]]


@workers
def test_the_dataset_gets_plain_integers(make_loader: Make, num_workers: int) -> None:
    for arguments in ({}, {"shuffle": True}, {"sampler": [0, 1, 2]}, {"batch_sampler": [[0, 1], [2]]}):
        loader = make_loader(IndexTypes(), num_workers=num_workers, **arguments)
        assert {name for batch in loader for name in batch} == {"int"}


TYPES_OF_INDICES: dict[str, Any] = {
    "tensor": torch.arange(4), "array": np.arange(4), "int32": np.arange(4, dtype=np.int32),
    "mixed": [True, 1, np.int64(2)],
}  # fmt: skip


@workers
@pytest.mark.parametrize("kind", TYPES_OF_INDICES)
def test_the_dataset_gets_indices_of_the_samplers_type(make_loader: Make, num_workers: int, kind: str) -> None:
    indices = TYPES_OF_INDICES[kind]
    expected = [type(index).__name__ for index in indices]
    for arguments in ({"sampler": indices, "batch_size": None}, {"sampler": indices}, {"batch_sampler": [indices]}):
        batches = list(make_loader(IndexTypes(), num_workers=num_workers, **arguments))
        assert [name for batch in batches for name in ([batch] if isinstance(batch, str) else batch)] == expected


@workers
def test_a_subset_of_a_split_gets_plain_integers(make_loader: Make, num_workers: int) -> None:
    (whole,) = random_split(IndexTypes(), [6])
    assert {name for batch in make_loader(whole, num_workers=num_workers) for name in batch} == {"int"}


@workers
def test_getitems_is_used_for_whole_batches(make_loader: Make, num_workers: int) -> None:
    assert flat(make_loader(Many(10), batch_size=4, num_workers=num_workers)) == list(range(0, 100, 10))


CONTAINERS: dict[str, Any] = {
    "array": np.array([1, 2]),
    "array-int32": np.array([1, 2], np.int32),
    "tensor": torch.tensor([1, 2]),
    "tuple": (1, 2),
    "range": range(1, 3),
    "deque": deque([1, 2]),
    "texts": ("a", "b"),
    "matrix": torch.tensor([[1], [2]]),
}


class Asked(Dataset[Any]):
    """The types of the indices of a batch, and what they give when doubled."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError

    def __getitems__(self, indices: Any) -> list[Any]:
        doubled = indices * 2 if isinstance(indices, (np.ndarray, torch.Tensor, list)) else indices
        return [(type(indices).__name__, str(doubled), type(index).__name__) for index in indices]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_getitems_gets_what_the_batch_sampler_yields(make_loader: Make, num_workers: int) -> None:
    batches = [*CONTAINERS.values(), [1, 2]]
    how: dict[str, Any] = {"batch_sampler": batches, "collate_fn": list}
    assert list(make_loader(Asked(), num_workers=num_workers, **how)) == list(DataLoader(Asked(), **how))
    assert CONTAINERS["array"].tolist() == [1, 2]


@workers
def test_torchs_combined_datasets(make_loader: Make, num_workers: int) -> None:
    both = ConcatDataset([TensorDataset(torch.arange(5)), TensorDataset(torch.arange(100, 107))])
    loader = make_loader(Subset(both, [11, 0, 5, 4]), batch_size=3, num_workers=num_workers)
    assert [batch[0].tolist() for batch in loader] == [[106, 0, 100], [4]]


@pytest.mark.parametrize("num_samples", [49, 50, 51, 110])
@pytest.mark.parametrize("replacement", [True, False])
def test_random_sampler_with_a_number_of_samples(
    loader_class: type[DataLoader[Any]], num_samples: int, replacement: bool
) -> None:
    dataset = Counting(50)
    sampler = RandomSampler(dataset, replacement=replacement, num_samples=num_samples)
    loader = loader_class(dataset, sampler=sampler, batch_size=6)
    order = flat(loader)
    assert len(order) == num_samples
    assert len(loader) == math.ceil(num_samples / 6)
    assert set(order) <= set(range(50))
    assert replacement or max(order.count(i) for i in order) == math.ceil(num_samples / 50)


def test_drop_last_over_distributed_samplers_never_repeats(loader_class: type[DataLoader[Any]]) -> None:
    dataset = Counting(9)
    seen: list[int] = []
    for rank in range(4):
        sampler = DistributedSampler(dataset, 4, rank, shuffle=False)
        seen += flat(loader_class(dataset, batch_size=2, drop_last=True, sampler=sampler))
    assert len(seen) == len(set(seen)) == 8


def test_the_length_follows_a_growing_dataset(loader_class: type[DataLoader[Any]]) -> None:
    dataset: Any = [torch.ones(4) for _ in range(4)]
    plain, shuffled = loader_class(dataset), loader_class(dataset, shuffle=True)
    dataset.append(torch.ones(4))
    assert len(plain) == len(shuffled) == 5
    assert len(list(plain)) == 5


@pytest.mark.parametrize(
    ("batch_size", "drop_last"),
    [(None, False), *((size, drop) for size in (1, 2, 3, 10, 11) for drop in (False, True))],
)
def test_the_length_of_a_stream_is_that_of_its_dataset(
    loader_class: type[DataLoader[Any]], batch_size: int | None, drop_last: bool
) -> None:
    loader = loader_class(CountingStream(10), batch_size=batch_size, drop_last=drop_last)
    assert len(loader) == len(list(loader))


ARGUMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sequential": lambda d: {"batch_size": 4},
    "shuffle": lambda d: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "shuffle-generator": lambda d: {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "random": lambda d: {"batch_size": 4, "sampler": RandomSampler(d)},
    "random-replacement": lambda d: {"batch_size": 4, "sampler": RandomSampler(d, replacement=True, num_samples=70)},
    "random-generator": lambda d: {"sampler": RandomSampler(d, generator=torch.Generator().manual_seed(9))},
    "weighted": lambda d: {"sampler": WeightedRandomSampler([float(i + 1) for i in range(len(d))], 40)},
    "weighted-once": lambda d: {"sampler": WeightedRandomSampler([1.0] * len(d), 20, replacement=False)},
    "subset": lambda d: {"batch_size": 3, "sampler": SubsetRandomSampler(range(3, 17))},
    "batches": lambda d: {"batch_sampler": BatchSampler(RandomSampler(d), 5, drop_last=True)},
    "one-at-a-time": lambda d: {"batch_size": None, "sampler": SequentialSampler(d)},
}


def trace(loader: DataLoader[Any], epochs: int) -> list[Any]:
    """Every batch of some epochs, with torch's generator after `iter`, after each batch and at the end."""
    torch.manual_seed(77)
    seen: list[Any] = []
    for _ in range(epochs):
        iterator = iter(loader)
        seen.append(hash(torch.get_rng_state().numpy().tobytes()))
        for batch in iterator:
            seen.append(torch.as_tensor(batch).tolist() if not isinstance(batch, (list, tuple)) else batch)
            seen.append(hash(torch.get_rng_state().numpy().tobytes()))
        seen.append(hash(torch.get_rng_state().numpy().tobytes()))
    return seen


# Workers cannot see which order it is, so six families run with one kind of worker process, and at night all.
CREWS = [(family, 2, bool(at % 2)) for at, family in enumerate(ARGUMENTS)]
KINDS = [(family, 0, False) for family in ARGUMENTS] + CREWS[1:5] + CREWS[-2:] + at_night(*CREWS[:1], *CREWS[5:-2])


@pytest.mark.parametrize(("family", "num_workers", "persistent"), KINDS)
def test_orders_and_draws_equal_torchs(
    feedline_class: type[DataLoader[Any]], family: str, num_workers: int, persistent: bool
) -> None:
    """The same batches, and torch's global generator left in the same state at every step."""

    def run(cls: type[DataLoader[Any]]) -> list[Any]:
        dataset = Counting(23)
        arguments = ARGUMENTS[family](dataset)
        return trace(cls(dataset, num_workers=num_workers, persistent_workers=persistent, **arguments), epochs=2)

    assert run(feedline_class) == run(DataLoader)


@pytest.mark.parametrize(
    ("family", "num_workers"), [(f, 0) for f in ARGUMENTS] + [(f, 1) for f in ("shuffle", "weighted", "one-at-a-time")]
)
def test_augmentation_from_global_generators_equals_torchs(
    feedline_class: type[DataLoader[Any]], family: str, num_workers: int
) -> None:
    """Without `seed`, inline and with one worker, samples draw the same numbers as under torch."""

    def run(cls: type[DataLoader[Any]]) -> list[Any]:
        random.seed(1)
        np.random.seed(2)  # noqa: NPY002 - the generator that the samples draw from
        torch.manual_seed(3)
        dataset = Draws(23)
        loader = cls(dataset, num_workers=num_workers, **ARGUMENTS[family](dataset))
        return [[torch.as_tensor(column).tolist() for column in batch] for _ in range(2) for batch in loader]

    assert run(feedline_class) == run(DataLoader)


class ShuffledAtOnce:
    """Draws its order in `iter`, not with the first item."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        random.shuffle(self.items)
        return iter(list(self.items))

    def __len__(self) -> int:
        return len(self.items)


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_samplers_that_draw_in_iter_give_torchs_order(
    feedline_class: type[DataLoader[Any]], arguments: dict[str, Any]
) -> None:
    """torch calls `iter(sampler)` twice where workers start."""

    def orders(loader_class: Any, **more: Any) -> list[Any]:
        random.seed(4)
        loader = loader_class(Counting(12), **arguments, **more)
        return [[[torch.as_tensor(batch).tolist() for batch in loader] for _ in range(3)], random.random()]

    for name, items in (("sampler", list(range(12))), ("batch_sampler", [[i, i + 1] for i in range(0, 12, 2)])):
        size = {"batch_size": None} if name == "sampler" else {}
        theirs = orders(DataLoader, **size, **{name: ShuffledAtOnce(list(items))})
        assert orders(feedline_class, **size, **{name: ShuffledAtOnce(list(items))}) == theirs


REPLACED: dict[str, tuple[type, list[Any], Callable[[], dict[str, Any]]]] = {
    "sequential": (SequentialSampler, [3, 0, 0], dict),
    "random": (RandomSampler, [3, 0, 0], lambda: {"shuffle": True}),
    "batches": (BatchSampler, [[3], [0, 0]], lambda: {"shuffle": True}),
    "distributed": (DistributedSampler, [3, 0, 0], lambda: {"sampler": DistributedSampler(Counting(4), 1, 0)}),
    "weighted": (WeightedRandomSampler, [3, 0, 0], lambda: {"sampler": WeightedRandomSampler([1.0] * 4, 4)}),
}


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [(name, 0) for name in REPLACED] + by_day([(name, 2) for name in REPLACED], [("random", 2), ("batches", 2)]),
)
def test_replaced_members_of_samplers_are_called(
    make_loader: Make, monkeypatch: pytest.MonkeyPatch, name: str, num_workers: int
) -> None:
    """Tests and tools replace them, also between two epochs of a loader."""
    kind, items, arguments = REPLACED[name]
    loader = make_loader(Counting(4), batch_size=2, num_workers=num_workers, **arguments())
    assert len(flat(loader)) == 4
    with monkeypatch.context() as patch:
        patch.setattr(kind, "__iter__", lambda _: iter(items))
        assert flat(loader) == [3, 0, 0]
        assert flat(make_loader(Counting(4), batch_size=2, num_workers=num_workers, **arguments())) == [3, 0, 0]
    assert sorted(flat(loader)) == [0, 1, 2, 3] or name == "weighted"


@workers
def test_replaced_members_of_datasets_are_called(
    make_loader: Make, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    numbers = TensorDataset(torch.arange(4))
    loaders = [make_loader(dataset, 2, num_workers=num_workers) for dataset in (numbers, Subset(numbers, [0, 1, 2, 3]))]

    def epochs() -> list[list[int]]:
        return [[int(number) for (batch,) in loader for number in batch] for loader in loaders]

    assert epochs() == [[0, 1, 2, 3]] * 2
    with monkeypatch.context() as patch:
        patch.setattr(TensorDataset, "__getitem__", lambda _, index: (torch.tensor(-index),))
        assert epochs() == [[0, -1, -2, -3]] * 2
        patch.setattr(Subset, "__getitems__", lambda _, indices: [(torch.tensor(7),)] * len(indices))
        assert epochs() == [[0, -1, -2, -3], [7] * 4]
    assert epochs() == [[0, 1, 2, 3]] * 2
    vars(numbers)["__getitems__"] = lambda indices: [(torch.tensor(10 + index),) for index in indices]
    assert epochs() == [[10, 11, 12, 13]] * 2
