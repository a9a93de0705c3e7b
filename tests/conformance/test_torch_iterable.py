"""torch's contract for iterable datasets: the samples of each worker, their order, and the meaning of `len`."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from diagonals import at_night
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torch_datasets import Counting, CountingStream, Gate, ShardedStream, UnevenStream

import feedline as fl

Make = Callable[..., DataLoader[Any]]
Loader = type[DataLoader[Any]]
SAME_FROM_EVERY_WORKER = "ignore:.*same samples:UserWarning"
"""Some streams below yield everything from every worker, as torch allows; feedline warns of it."""


def values(loader: DataLoader[Any]) -> list[list[int]]:
    """One epoch, each batch as a list."""
    return [torch.as_tensor(batch).reshape(-1).tolist() for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    """The samples of these batches in one list."""
    return [sample for batch in batches for sample in batch]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_without_batching_samples_come_as_they_are(make_loader: Make, num_workers: int) -> None:
    seen = list(make_loader(CountingStream(20), batch_size=None, num_workers=num_workers))
    assert seen == list(range(20))
    assert {type(sample) for sample in seen} == {int}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [7, 7, 6]), (True, [7, 7])])
def test_batches_of_a_stream(make_loader: Make, num_workers: int, drop_last: bool, sizes: list[int]) -> None:
    batches = values(make_loader(CountingStream(20), batch_size=7, drop_last=drop_last, num_workers=num_workers))
    assert [len(batch) for batch in batches] == sizes
    assert flat(batches) == list(range(sum(sizes)))


@pytest.mark.parametrize("prefetch_factor", [1, *at_night(2), 3])
@pytest.mark.parametrize(
    ("drop_last", "expected"),
    [
        (False, {1: [[1000, 1001, 1002, 1003]], 2: [[*range(2000, 2007)], [*range(2007, 2014)], [*range(2014, 2020)]]}),
        (True, {1: [], 2: [[*range(2000, 2007)], [*range(2007, 2014)]]}),
    ],
)
def test_workers_batch_their_own_uneven_shares(
    loader_class: Loader, prefetch_factor: int, drop_last: bool, expected: dict[int, list[list[int]]]
) -> None:
    """A batch holds samples of one worker only, and each worker's batches keep their order."""
    loader = loader_class(
        UnevenStream([0, 4, 20]), batch_size=7, drop_last=drop_last, num_workers=3, prefetch_factor=prefetch_factor
    )
    batches = values(loader)
    assert {owner: [b for b in batches if b[0] // 1000 == owner] for owner in (1, 2)} == expected
    assert len(batches) == sum(map(len, expected.values()))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_take_turns(loader_class: Loader, persistent: bool) -> None:
    loader = loader_class(ShardedStream(12), batch_size=2, num_workers=2, persistent_workers=persistent)
    for _ in range(3):
        assert values(loader) == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11]]


@pytest.mark.parametrize(
    ("sizes", "batch_size"),
    [
        *((sizes, 2) for sizes in ([5, 6], [4, 1], [0, 3], [0, 0])),
        *(([0, 3], None), ([4, 1], 1)),
        *at_night(*((sizes, 2) for sizes in ([6, 6], [6, 5], [1, 4], [3, 0], [1, 9])), ([5, 6], None)),
    ],
)
def test_the_turns_of_uneven_workers_are_torchs(
    torch_class: Loader, feedline_class: Loader, sizes: list[int], batch_size: int | None
) -> None:
    def run(cls: Loader) -> list[list[int]]:
        return values(cls(UnevenStream(sizes), batch_size=batch_size, num_workers=2))

    assert run(feedline_class) == run(torch_class)


@pytest.mark.filterwarnings(SAME_FROM_EVERY_WORKER)
def test_a_stream_that_does_not_share_comes_once_per_worker(loader_class: Loader) -> None:
    seen = flat(values(loader_class(CountingStream(6), batch_size=2, num_workers=2)))
    assert sorted(seen) == sorted([*range(6), *range(6)])


def test_feedline_warns_of_a_stream_that_does_not_share(feedline_class: Loader) -> None:
    with pytest.warns(UserWarning, match="get_worker_info"):
        list(feedline_class(CountingStream(6), batch_size=2, num_workers=2))


def test_feedline_does_not_warn_of_a_stream_that_shares(feedline_class: Loader) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(feedline_class(ShardedStream(12), batch_size=2, num_workers=2))


@pytest.mark.filterwarnings(SAME_FROM_EVERY_WORKER)
def test_exceeding_the_announced_length_warns_every_time(loader_class: Loader) -> None:
    loader = loader_class(CountingStream(5), batch_size=None, num_workers=2)
    assert len(list(loader)) == 10
    assert len(loader) == 5
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    for _ in range(5):
        with pytest.warns(UserWarning, match=r"but [0-9]+ samples have been fetched\. For multiprocessing"):
            next(iterator)


class Liar(CountingStream):
    """Yields more samples than its length."""

    def __len__(self) -> int:
        return 2


def test_inline_the_length_warning_has_no_word_of_workers(loader_class: Loader) -> None:
    loader = loader_class(Liar(3), batch_size=None)
    assert len(loader) == 2
    iterator = iter(loader)
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.warns(UserWarning, match="Length of IterableDataset .* was reported to be 2") as caught:
        assert next(iterator) == 2
    assert "multiprocessing" not in str(caught[0].message)
    assert caught[0].filename == __file__


class NoLength(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2, 3])


def test_a_stream_without_length_has_none(loader_class: Loader) -> None:
    loader = loader_class(NoLength(), batch_size=2)
    with pytest.raises(TypeError):
        len(loader)
    assert values(loader) == [[1, 2], [3]]


class OnlyNext(IterableDataset[int]):
    """Its own iterator: a single pass over the data."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        return self.left


@pytest.mark.parametrize("batch_size", [None, 1, 2])
def test_a_stream_that_is_its_own_iterator(loader_class: Loader, batch_size: int | None) -> None:
    loader = loader_class(OnlyNext(3), batch_size=batch_size)
    assert flat(values(loader)) == [2, 1, 0]
    assert values(loader) == []


class Rewinding(IterableDataset[int]):
    """Its own iterator, which returns to its first sample at its end."""

    def __init__(self, n: int) -> None:
        self.n, self.at, self.ends = n, 0, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == self.n:
            self.at, self.ends = 0, self.ends + 1
            raise StopIteration
        self.at += 1
        return 100 * self.ends + self.at


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("n", [4, 5])
def test_an_iterator_is_not_called_again_after_its_end(loader_class: Loader, n: int, drop_last: bool) -> None:
    loader = loader_class(
        Rewinding(n), batch_size=2, num_workers=1, prefetch_factor=3, drop_last=drop_last, persistent_workers=True
    )
    rest = [[5]] if n == 5 and not drop_last else []
    expected = [[1, 2], [3, 4], *rest]
    assert [values(loader) for _ in range(2)] == [expected, [[100 + each for each in batch] for batch in expected]]


class Beginning(IterableDataset[int]):
    """Its own iterator, which begins again with each `iter`."""

    def __init__(self, n: int) -> None:
        self.n, self.at = n, 0

    def __iter__(self) -> Iterator[int]:
        self.at = 0
        return self

    def __next__(self) -> int:
        if self.at == self.n:
            raise StopIteration
        self.at += 1
        return self.at


class Bare:
    """An iterator without `__iter__`."""

    def __init__(self, n: int) -> None:
        self.left = iter(range(1, n + 1))

    def __next__(self) -> int:
        return next(self.left)


class OfBare(IterableDataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return Bare(self.n)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [Beginning, OfBare])
def test_iter_is_called_once(loader_class: Loader, kind: Any, num_workers: int) -> None:
    for batch_size in (None, 2):
        loader = loader_class(kind(5), batch_size=batch_size, num_workers=num_workers)
        assert [flat(values(loader)) for _ in range(2)] == [[1, 2, 3, 4, 5]] * 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_chains_of_streams(make_loader: Make, num_workers: int) -> None:
    first, second = CountingStream(4), CountingStream(3)
    for chain in (first + second, ChainDataset([first, second])):
        assert flat(values(make_loader(chain, num_workers=num_workers))) == [0, 1, 2, 3, 0, 1, 2]
    with pytest.raises(AssertionError, match="ChainDataset only supports IterableDataset"):
        list(make_loader(first + Counting(3), num_workers=num_workers))


class Announcing(IterableDataset[int]):
    """The worker's id, endlessly."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        yield from [info.id] * 20


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_repeat_the_turns(loader_class: Loader, persistent: bool) -> None:
    loader = loader_class(Announcing(), batch_size=10, num_workers=2, persistent_workers=persistent)
    for _ in range(3):
        assert values(loader) == [[0] * 10, [1] * 10, [0] * 10, [1] * 10]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_endless_stream_can_be_left(make_loader: Make, num_workers: int) -> None:
    loader = make_loader(Endless(), batch_size=3, num_workers=num_workers)
    for _ in range(2):
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
        del iterator
        gc.collect()


class Half(IterableDataset[int]):
    """Worker 0 stops at the gate before its second sample."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        yield 10 * info.id
        if info.id == 0:
            self.gate.wait()
        yield from range(10 * info.id + 1, 10 * info.id + 5)


def test_out_of_order_a_slow_worker_holds_no_one_up(loader_class: Loader, gate: Gate) -> None:
    iterator = iter(loader_class(Half(gate), batch_size=None, num_workers=2, in_order=False))
    early = [next(iterator) for _ in range(5)]
    assert 1 not in early
    gate.open()
    assert sorted([*early, *iterator]) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]


@pytest.mark.filterwarnings("ignore:.*same samples:UserWarning")
@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_data_pipes_are_seeded_and_sharded(loader_class: Loader, num_workers: int, persistent: bool) -> None:
    pipe = IterableWrapper(range(30)).shuffle(buffer_size=10).sharding_filter()
    loader = loader_class(pipe, shuffle=True, num_workers=num_workers, persistent_workers=persistent)
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        orders.append(flat(values(loader)))
    assert orders[0] == orders[1] != orders[2]
    assert [sorted(order) for order in orders] == [list(range(30))] * 3


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, True), *at_night((2, False))])
def test_data_pipes_leave_the_generator_as_torch_does(num_workers: int, persistent: bool) -> None:
    def orders(loader_class: Any) -> Any:
        torch.manual_seed(5)
        found = []
        for _ in range(2):
            pipe = IterableWrapper(range(9)).shuffle().sharding_filter()
            loader = loader_class(pipe, batch_size=2, num_workers=num_workers, persistent_workers=persistent)
            found += [[batch.tolist() for batch in loader] for _ in range(2)]
        return found, torch.rand(1)

    assert orders(fl.DataLoader) == orders(DataLoader)


class FailsLater(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0
        raise ValueError("the stream broke")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_stream(make_loader: Make, num_workers: int) -> None:
    iterator = iter(make_loader(FailsLater(), batch_size=None, num_workers=num_workers))
    assert next(iterator) == 0
    with pytest.raises(ValueError, match="the stream broke"):
        next(iterator)


class Eager(IterableDataset[int]):
    """Draws its samples in `__iter__`, not with the first one."""

    first = 0

    def __iter__(self) -> Iterator[int]:
        return iter((torch.randperm(6) + self.first).tolist())


def test_streams_without_workers_begin_in_iter(loader_class: Loader) -> None:
    def pairs(loader_class: Loader) -> list[Any]:
        torch.manual_seed(3)
        dataset = Eager()
        both = [iter(loader_class(dataset, batch_size=size)) for size in (2, 3)]
        torch.manual_seed(4)
        dataset.first = 100
        return [[batch.tolist() for batch in iterator] for iterator in both]

    assert pairs(loader_class) == pairs(DataLoader)


class Closing(IterableDataset[int]):
    """Makes a file of its number when the generator of its samples is closed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.opened = folder, 0

    def __iter__(self) -> Iterator[int]:
        self.opened += 1
        name = str(self.opened)
        try:
            yield from range(100)
        finally:
            (self.folder / name).touch()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_leaving_an_epoch_closes_the_stream(loader_class: Loader, num_workers: int, tmp_path: Path) -> None:
    loader = loader_class(Closing(tmp_path), batch_size=2, num_workers=num_workers)
    for _ in loader:
        break
    if num_workers:  # the worker may still be on its way out
        deadline = monotonic() + 60
        while not (tmp_path / "1").exists() and monotonic() < deadline:
            sleep(0.01)
    assert (tmp_path / "1").exists()


def test_each_iteration_without_workers_closes_its_own_stream(loader_class: Loader, tmp_path: Path) -> None:
    loader = loader_class(Closing(tmp_path), batch_size=2)
    first, second = iter(loader), iter(loader)
    assert [next(first).tolist(), next(second).tolist()] == [[0, 1], [0, 1]]
    del first
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert next(second).tolist() == [2, 3]
    del second
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2"}


class Unreadable(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise KeyError("not there")


def test_an_error_of_a_stream_without_workers_comes_from_iter(loader_class: Loader) -> None:
    with pytest.raises(KeyError, match="not there"):
        iter(loader_class(Unreadable()))


class Splits(IterableDataset[int]):
    """Has a method of its own named as that of `fl.PartitionedDataset`, and a fingerprint that it cannot give."""

    num_partitions = 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))

    def partition(self, index: int, seed: int = 0) -> Iterator[int]:
        return iter(range(index + seed, 12, 3))

    def fingerprint(self) -> str:
        raise RuntimeError("only after the download")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_partition_method_of_the_users_own_is_not_called(loader_class: Loader, num_workers: int) -> None:
    assert values(loader_class(Splits(), batch_size=4, num_workers=num_workers)) == values(DataLoader(Splits(), 4))
