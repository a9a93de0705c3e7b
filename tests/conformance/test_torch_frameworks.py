"""Trainers' uses of a loader: they subclass, recognize, rebuild and wrap it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from torch_datasets import Counting, CountingStream, collate_sum

Loader = type[DataLoader[Any]]


def flat(loader: Any) -> list[int]:
    return [int(x) for batch in loader for x in torch.as_tensor(batch).reshape(-1)]


def test_it_is_a_torch_loader(loader_class: Loader) -> None:
    assert issubclass(loader_class, DataLoader)
    assert isinstance(loader_class(Counting(2)), DataLoader)


def test_subclasses_may_add_arguments_and_override_iteration(loader_class: Loader) -> None:
    class Renamed(loader_class):  # type: ignore[valid-type, misc]
        def __init__(self, dataset: Any, size: int, **rest: Any) -> None:
            self.size = size
            super().__init__(dataset, batch_size=size, **rest)

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield batch * 10

    loader = Renamed(Counting(5), 2, num_workers=1)
    assert flat(loader) == [0, 10, 20, 30, 40]
    assert loader.size == 2
    assert len(loader) == 3


def test_subclasses_may_change_arguments_on_their_way(loader_class: Loader) -> None:
    class Fixed(loader_class):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["collate_fn"] = collate_sum
            super().__init__(*args, **kwargs)

    assert list(Fixed(Counting(4), batch_size=2)) == [1, 5]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_subclasses_may_replace_the_sampler_that_the_loop_reads(loader_class: Loader, num_workers: int) -> None:
    class Batches(loader_class):  # type: ignore[valid-type, misc]
        @property
        def _index_sampler(self) -> Any:
            return [[4, 5], [0]]

    class Singles(loader_class):  # type: ignore[valid-type, misc]
        @property
        def _auto_collation(self) -> bool:
            return False

    assert flat(Batches(Counting(6), batch_size=2, num_workers=num_workers)) == [4, 5, 0]
    assert list(Singles(Counting(3), batch_size=2, num_workers=num_workers)) == [0, 1, 2]


def test_attributes_of_the_users_own_may_be_set(loader_class: Loader) -> None:
    loader: Any = loader_class(Counting(2))
    loader.tag = "validation"
    assert loader.tag == "validation"


def arguments_from_attributes(loader: Any) -> dict[str, Any]:
    """How Lightning reads a loader: every parameter of the constructor that is an attribute of the same name."""
    parameters = inspect.signature(type(loader).__init__).parameters
    names = [name for name in parameters if name != "self" and name in {*vars(loader), "multiprocessing_context"}]
    return {name: getattr(loader, name) for name in names}


def distributed_again(loader: Any, rank: int, world: int) -> Any:
    """The loader built again over a DistributedSampler, in the way Lightning does it."""
    arguments = arguments_from_attributes(loader)
    shuffle = isinstance(loader.sampler, RandomSampler)
    arguments["sampler"] = DistributedSampler(loader.dataset, world, rank, shuffle=shuffle, seed=3)
    arguments.pop("batch_sampler", None)
    arguments["shuffle"] = False
    return type(loader)(**arguments)


def test_a_trainer_rebuilds_the_loader_with_another_sampler(loader_class: Loader) -> None:
    loader = loader_class(Counting(12), batch_size=2, shuffle=True, num_workers=1, collate_fn=collate_sum)
    rebuilt = [distributed_again(loader, rank, 2) for rank in range(2)]
    expected = [DistributedSampler(Counting(12), 2, rank, shuffle=True, seed=3) for rank in range(2)]
    for ours, sampler in zip(rebuilt, expected, strict=True):
        indices = list(sampler)
        assert type(ours) is loader_class
        assert list(ours) == [sum(indices[i : i + 2]) for i in range(0, 6, 2)]
        assert ours.num_workers == 1


def test_a_trainer_rebuilds_over_a_batch_sampler_of_the_same_class(loader_class: Loader) -> None:
    loader = loader_class(Counting(10), batch_sampler=BatchSampler(SequentialSampler(range(10)), 3, drop_last=True))
    old: Any = loader.batch_sampler
    arguments = arguments_from_attributes(loader)
    for name in ("batch_size", "shuffle", "sampler", "drop_last"):
        arguments.pop(name, None)
    arguments["batch_sampler"] = type(old)([9, 8, 7, 6], batch_size=old.batch_size, drop_last=old.drop_last)
    assert flat(type(loader)(**arguments)) == [9, 8, 7]


def test_feedlines_own_arguments_are_attributes_too_and_survive_a_rebuild(feedline_class: Loader) -> None:
    own = {
        "seed": 7,
        "worker_method": "thread",
        "distributed": (1, 2),
        "on_error": "skip",
        "device": None,
        "num_workers": 1,
    }
    loader = feedline_class(Counting(12), batch_size=2, shuffle=True, **own)
    assert {name: getattr(loader, name) for name in own} == own
    arguments = arguments_from_attributes(loader)
    for name in ("batch_sampler", "shuffle"):
        arguments.pop(name, None)
    again = feedline_class(**arguments)
    assert {name: getattr(again, name) for name in (*own, "recovery")} == {**own, "recovery": loader.recovery}  # type: ignore[attr-defined]
    assert flat(again) == flat(loader)


class Shard(Sampler[list[int]]):
    """Every `world`-th batch of a batch sampler: how Accelerate distributes batches."""

    def __init__(self, batches: Any, rank: int, world: int) -> None:
        self.batches, self.rank, self.world = batches, rank, world

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(self.batches):
            if number % self.world == self.rank:
                yield batch

    def __len__(self) -> int:
        return len(self.batches) // self.world


def test_a_wrapper_deals_out_the_batches_of_a_loader(loader_class: Loader) -> None:
    """Accelerate passes the arguments on, wraps the batch sampler, and subclasses the class of the user's loader."""
    loader = loader_class(Counting(12), batch_size=2, shuffle=False, num_workers=1)

    class Prepared(type(loader)):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            iterator = super().__iter__()
            current = next(iterator)
            for upcoming in iterator:
                yield current
                current = upcoming
            yield current

    kept = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    kwargs = {name: getattr(loader, name) for name in (*kept, "generator", "prefetch_factor", "persistent_workers")}
    shards = [Prepared(loader.dataset, batch_sampler=Shard(loader.batch_sampler, rank, 2), **kwargs) for rank in (0, 1)]
    assert [flat(shard) for shard in shards] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert [len(shard) for shard in shards] == [3, 3]


def test_a_wrapper_asks_the_sampler_for_its_generator(loader_class: Loader) -> None:
    """Accelerate sets a generator on the random sampler of a loader so that all ranks shuffle in the same way."""
    loader: Any = loader_class(Counting(20), shuffle=True)
    orders = []
    for _ in range(2):
        loader.sampler.generator = torch.Generator().manual_seed(5)
        orders.append(flat(loader))
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == list(range(20))


def test_a_wrapper_calls_set_epoch_of_a_distributed_sampler(loader_class: Loader) -> None:
    sampler: Any = DistributedSampler(Counting(10), 1, 0, shuffle=True, seed=1)
    loader = loader_class(Counting(10), sampler=sampler)
    seen = []
    for epoch in (5, 6):
        sampler.set_epoch(epoch)
        seen.append(flat(loader))
    reference: Any = DistributedSampler(Counting(10), 1, 0, shuffle=True, seed=1)
    for epoch, order in zip((5, 6), seen, strict=True):
        reference.set_epoch(epoch)
        assert list(reference) == order


def test_a_loop_may_be_zipped_counted_and_sliced(loader_class: Loader) -> None:
    left, right = loader_class(Counting(4)), loader_class(CountingStream(3))
    assert [(int(a), int(b)) for a, b in zip(left, right, strict=False)] == [(0, 0), (1, 1), (2, 2)]
    assert len(flat(left)) == 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterator_has_the_arguments_of_its_loader(loader_class: Loader, num_workers: int) -> None:
    """GPT-NeoX reads and sets its batch sampler there, long after it has dropped the loader."""
    dataset, batches = Counting(8), BatchSampler(SequentialSampler(range(8)), 2, drop_last=True)
    iterator: Any = iter(loader_class(dataset, batch_sampler=batches, num_workers=num_workers, collate_fn=collate_sum))
    assert iterator._index_sampler is batches
    assert iterator._dataset is dataset
    assert iterator._collate_fn is collate_sum
    assert iterator._num_workers == num_workers
    assert not iterator._persistent_workers
    assert not iterator._pin_memory
    assert not iterator._drop_last
    assert iterator._timeout == 0
    assert iterator._auto_collation
    assert list(iterator) == [1, 5, 9, 13]
    with pytest.raises(AttributeError, match="_no_such_name"):
        _ = iterator._no_such_name


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_an_iterator_knows_whether_its_workers_were_shut_down(loader_class: Loader, persistent_workers: bool) -> None:
    """Federated clients of one process make new iterators for those that were shut down."""
    loader = loader_class(Counting(4), num_workers=1, persistent_workers=persistent_workers)
    iterator: Any = iter(loader)
    assert not iterator._shutdown
    list(iterator)
    assert iterator._shutdown is not persistent_workers
    iterator._shutdown_workers()
    assert iterator._shutdown


def test_the_base_class_is_not_changed(feedline_class: Loader) -> None:
    """Importing feedline leaves torch's own loader as it was."""
    assert DataLoader.__module__ == "torch.utils.data.dataloader"
    assert feedline_class is not DataLoader
    assert flat(DataLoader(Counting(3), num_workers=1)) == [0, 1, 2]
