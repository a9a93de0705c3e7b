"""Prefetching: the next ranges are in the cache before they are read, and nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, ConcatDataset, RandomSampler, StackDataset, Subset

import feedline as fl
from feedline.core.torch_wrappers import ranges_of
from feedline.datasets.cached_map import CachedMap
from feedline.datasets.paths import find
from feedline.datasets.wrappers import Filter, Map, Zip
from feedline.loader.building.prefetch import PeekableIterator, PrefetchingRequests
from feedline.stores.files import Extent

COUNT, NBYTES, PIECE = 64, 100, 200


class Bytes(torch.utils.data.Dataset[int]):
    """Sample i is the byte i, out of 64 times 100 bytes in a store; the pieces of its cache hold two samples."""

    traits = fl.Traits(thread_safe=True)

    def __init__(self, address: str, cache: fl.stores.Cache | None) -> None:
        self.files = find(address, "*.bin", cache=cache)

    def __len__(self) -> int:
        return COUNT

    def _extents(self, indices: Any) -> list[Extent]:
        return [Extent(0, index * NBYTES, (index + 1) * NBYTES) for index in indices]

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[Any, Any]]:
        return self.files.ranges(self._extents(indices.tolist()))

    def __getitem__(self, index: int) -> int:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [view[0] for view in self.files.read(self._extents(indices))]


@pytest.fixture
def memory() -> Iterator[str]:
    """A store in memory with one object."""
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/all.bin", b"".join(bytes([number]) * NBYTES for number in range(COUNT)))
    yield "memory://bucket/all.bin"
    system.rm("/bucket", recursive=True)


@pytest.fixture
def make(memory: str, tmp_path: Path) -> Callable[..., Bytes]:
    """A dataset with an empty cache."""

    def made(**settings: Any) -> Bytes:
        return Bytes(memory, fl.stores.Cache(tmp_path / "cache", "1 MB", PIECE, **settings))

    return made


def pieces(dataset: Bytes) -> int:
    store = dataset.files.ranges([Extent(0, 0, 1)])[0][0]
    return sum(1 for path in Path(store.cache.folder).rglob("objects/*/*") if path.is_file())


def requests(*batches: list[int]) -> Iterator[Any]:
    return iter(
        [fl.core.schedule.BatchRequest(0, number, 0, 0, batch, (), None) for number, batch in enumerate(batches)]
    )


def ended() -> None:
    """The planning thread starts the others, and ends before them."""
    for name in ("feedline-prefetch-plan", "feedline-prefetch"):
        for thread in threading.enumerate():
            if thread.name.startswith(name):
                thread.join(30)
                assert not thread.is_alive()


def test_later_ranges_are_in_the_cache(make: Callable[..., Bytes]) -> None:
    dataset = make()
    ahead = PrefetchingRequests(requests([0, 2], [4], [6, 8]), dataset.ranges)
    assert next(ahead).indices == [0, 2]
    ended()
    assert pieces(dataset) == 3
    assert [request.indices for request in ahead] == [[4], [6, 8]]


def test_no_more_is_fetched_than_the_cache_says(make: Callable[..., Bytes]) -> None:
    dataset = make(ahead_nbytes=2 * PIECE)
    entered = threading.Semaphore(0)
    store = dataset.files.ranges([Extent(0, 0, 1)])[0][0]
    whole = store.fetch_pieces
    store.fetch_pieces = lambda *pieces: (whole(*pieces), entered.release())
    ahead = PrefetchingRequests(requests(*([2 * number] for number in range(32))), dataset.ranges)
    assert next(ahead).indices == [0]
    for _ in range(2):
        assert entered.acquire(timeout=30)
    assert not entered.acquire(timeout=0.05)
    assert next(ahead).indices == [2]
    assert entered.acquire(timeout=30)
    assert not entered.acquire(timeout=0.05)
    ahead.close()
    ended()
    assert [next(ahead).indices for _ in range(30)] == [[2 * number] for number in range(2, 32)]


def test_of_a_warm_cache_not_every_batch_is_looked_at_until_something_is_missing(make: Callable[..., Bytes]) -> None:
    dataset, asked = make(), list[int]()
    for index in range(10):
        dataset[index]

    def ranges(indices: NDArray[np.int64]) -> list[Any]:
        asked.append(number := int(indices[0]))
        return dataset.ranges(np.array([number % 10 if number < 100 else number % 54 + 10]))

    ahead = PrefetchingRequests(requests(*([number] for number in range(130))), ranges)
    assert next(ahead).indices == [0]
    ended()
    assert asked[:12] == [1, 2, 3, 4, *range(20, 101, 16), 101, 102]
    assert [request.indices for request in ahead] == [[number] for number in range(1, 130)]


def test_nothing_ahead_where_the_cache_forbids_it(make: Callable[..., Bytes]) -> None:
    dataset = make(ahead_nbytes=0)
    ahead = PrefetchingRequests(requests([0], [2], [4]), dataset.ranges)
    assert next(ahead).indices == [0]
    ended()
    assert pieces(dataset) == 0
    assert len(list(ahead)) == 2


def test_a_dataset_that_wants_nothing_is_left_alone() -> None:
    asked = list[int]()

    def ranges(indices: NDArray[np.int64]) -> list[Any]:
        asked.append(int(indices[0]))
        return []

    ahead = PrefetchingRequests(requests(*([number] for number in range(50))), ranges)
    assert next(ahead).indices == [0]
    ended()
    assert asked == list(range(1, 9))
    assert [request.indices[0] for request in ahead] == list(range(1, 50))


def test_what_the_sampler_raises_comes_at_its_turn() -> None:
    def failing() -> Iterator[Any]:
        yield from requests([0], [1])
        raise RuntimeError("no more")

    lookahead = PeekableIterator(failing())
    assert [lookahead.peek_next().indices for _ in range(2)] == [[0], [1]]
    assert lookahead.peek_next() is None
    assert [next(lookahead).indices for _ in range(2)] == [[0], [1]]
    with pytest.raises(RuntimeError, match="no more"):
        next(lookahead)
    with pytest.raises(StopIteration):
        next(lookahead)


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 2}])
@pytest.mark.parametrize("seed", [None, 7])
def test_a_loader_gives_the_same_with_and_without(
    memory: str, make: Callable[..., Bytes], arguments: dict[str, Any], seed: int | None
) -> None:
    orders = []
    for dataset in (Bytes(memory, None), make()):
        torch.manual_seed(3)
        with fl.DataLoader(dataset, 4, shuffle=True, seed=seed, **arguments) as loader:
            orders.append([batch.tolist() for _ in range(2) for batch in loader])
            stats = loader.stats().since_epoch
    ended()
    assert orders[0] == orders[1]
    assert sorted(chain.from_iterable(orders[0][:16])) == list(range(COUNT))
    assert stats is not None
    assert stats.stores.requests == 0
    assert stats.stores.cache_hits > 0


def test_a_resume_in_mid_epoch_prefetches_too(make: Callable[..., Bytes]) -> None:
    dataset = make()
    with fl.DataLoader(dataset, 4, shuffle=True, seed=1, num_workers=2) as loader:
        whole = [batch.tolist() for batch in loader]
    with fl.DataLoader(dataset, 4, shuffle=True, seed=1, num_workers=2) as loader:
        iterator = iter(loader)
        begun = [next(iterator).tolist() for _ in range(5)]
        state = loader.state_dict()
    with fl.DataLoader(dataset, 4, shuffle=True, seed=1) as loader:
        loader.load_state_dict(state)
        rest = [batch.tolist() for batch in loader]
    ended()
    assert begun + rest == whole


def test_a_sampler_that_decides_late_is_not_read_early(make: Callable[..., Bytes]) -> None:
    class Late:
        def __init__(self) -> None:
            self.given = 0

        def __iter__(self) -> Iterator[int]:
            for index in range(COUNT):
                self.given += 1
                yield index

        def __len__(self) -> int:
            return COUNT

    sampler = Late()
    with fl.DataLoader(make(), 1, sampler=sampler) as loader:
        next(iter(loader))
        assert sampler.given <= 2


def test_ranges_of_wrapped_datasets(make: Callable[..., Bytes], tmp_path: Path) -> None:
    dataset = make()

    def starts(of: Any, *indices: int) -> list[int]:
        ranges = ranges_of(of)
        assert ranges is not None
        return [want.start // NBYTES for _, want in ranges(np.array(indices, np.int64))]

    plain = list(range(COUNT))
    assert starts(dataset, 3, 1) == [3, 1]
    assert starts(Subset(dataset, [5, 9, 11]), 2, 0) == [11, 5]
    assert starts(ConcatDataset([dataset, plain, dataset]), 1, COUNT, 2 * COUNT + 2, -1) == [1, 2, 63]  # type: ignore[list-item]
    assert starts(StackDataset(dataset, plain), 4) == [4]  # type: ignore[arg-type]
    assert starts(Zip(a=plain, b=dataset, c=dataset), 4) == [4, 4]
    assert starts(Map(dataset, str), 4) == [4]
    assert starts(Filter(dataset, lambda byte: byte % 2), 0, 4) == [1, 9]
    kept = CachedMap(dataset, str, tmp_path / "kept")
    assert kept[7] == "7"
    assert starts(kept, 6, 7, 8) == [6, 8]
    for lacking in (plain, Map(plain, str), Subset(plain, [1]), Zip(plain), ConcatDataset([plain])):  # type: ignore[arg-type,list-item]
        assert ranges_of(lacking) is None


def test_batch_samplers_are_looked_ahead_of_too(make: Callable[..., Bytes]) -> None:
    dataset = make()
    batches = BatchSampler(RandomSampler(range(COUNT)), 8, drop_last=False)
    with fl.DataLoader(dataset, batch_sampler=batches) as loader:
        assert sorted(chain.from_iterable(batch.tolist() for batch in loader)) == list(range(COUNT))
    ended()
    assert pieces(dataset) == COUNT // 2


def test_a_generator_that_others_may_use_is_not_drawn_from_early(make: Callable[..., Bytes]) -> None:
    def drawn(dataset: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        loader = fl.DataLoader(dataset, 4, shuffle=True, generator=generator)
        return [(batch.tolist(), int(torch.randint(100, (), generator=generator))) for batch in loader]

    assert drawn(make()) == drawn(list(range(COUNT)))
