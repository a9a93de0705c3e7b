"""Partitions of iterable datasets: reading can continue at any mark."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

import feedline as fl
from feedline.core.batch import EMPTY_BATCH
from feedline.core.cursor import PartitionOffset
from feedline.core.schedule import PartitionRequest
from feedline.loader.building.partition_builder import PartitionBuilder


class Numbers(IterableDataset[Any]):
    """Numbers with noise from the generators of transforms."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            yield torch.tensor([number, random.randrange(1000), int(fl.sample_rng().integers(1000))])


class Remembering(Numbers):
    """Has a state of its own and refuses to be read again from the start."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.length:
            self.position += 1
            yield self.position - 1

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Sharded(IterableDataset[Any]):
    """Twelve numbers in four partitions, by feedline's partition protocol."""

    num_partitions = 4

    def partition(self, partition: int, epoch: int) -> Iterator[int]:
        return iter(range(partition + epoch * 100, 12 + epoch * 100, 4))

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def drawn(builder: PartitionBuilder, number: int, mark: PartitionOffset, seed: int | None = 5) -> Any:
    return builder(PartitionRequest(0, number, 0, 1, mark, seed))


def whole(dataset: Any, size: int, *, drop_last: bool = False) -> list[Any]:
    builder, found, mark = PartitionBuilder(dataset, None, size, drop_last), [], PartitionOffset()
    while (built := drawn(builder, len(found), mark)).batch is not EMPTY_BATCH:
        found.append(built.batch)
        assert built.mark is not None
        mark = built.mark
    assert built.mark == PartitionOffset(mark.batches, mark.samples, mark.state, ended=True)
    return found


def equal(mine: list[Any], theirs: list[Any]) -> bool:
    return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_worker_that_lives_on_opens_the_partitions_of_each_iteration() -> None:
    """The state of another loader may name the same partition and epoch, but not the same samples."""
    builder = PartitionBuilder(Remembering(20), None, 2)
    for number in range(3):
        built = builder(PartitionRequest(0, number, 0, 1, PartitionOffset(), 5, run=1))
    assert built.batch.tolist() == [4, 5]
    mark = PartitionOffset(2, 9, ({"position": 9}, None))
    assert builder(PartitionRequest(0, 3, 0, 1, mark, 5, run=1)).batch.tolist() == [6, 7]
    again = builder(PartitionRequest(0, 2, 0, 1, mark, 5, run=2))
    assert again.batch.tolist() == [9, 10]
    assert len(builder._open) == 1


@given(length=st.integers(0, 20), size=st.integers(1, 5), cut=st.integers(0, 20), ahead=st.integers(0, 3))
def test_a_new_worker_continues_from_any_mark(length: int, size: int, cut: int, ahead: int) -> None:
    expected = whole(Numbers(length), size)
    builder, mark = PartitionBuilder(Numbers(length), None, size), PartitionOffset()
    for number in range(min(cut, len(expected))):
        built = drawn(builder, number, mark)
        assert built.mark is not None
        mark = built.mark
    first = mark.batches + ahead  # what the window already had when the worker was lost
    if first < len(expected):
        again = drawn(PartitionBuilder(Numbers(length), None, size), first, mark)
        assert torch.equal(again.batch, expected[first])


class Breaking(Numbers):
    """Numbers from an iterator that raises at 3 and goes on."""

    def __iter__(self) -> Any:
        return map(except_3, range(self.length))


def except_3(number: int) -> int:
    if number == 3:
        raise ValueError(number)
    return number


def test_a_new_worker_passes_a_batch_that_raised() -> None:
    """The error was delivered in its turn: it must not take the turn of a later batch."""
    built = drawn(PartitionBuilder(Breaking(9), None, 2), 0, PartitionOffset())
    assert built.mark is not None
    assert drawn(PartitionBuilder(Breaking(9), None, 2), 2, built.mark).batch.tolist() == [4, 5]


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_batch_is_kept_or_dropped(drop_last: bool) -> None:
    sizes = [len(batch) for batch in whole(Numbers(7), 3, drop_last=drop_last)]
    assert sizes == ([3, 3] if drop_last else [3, 3, 1])


def test_a_dataset_with_a_state_is_not_read_again_from_the_start() -> None:
    built = drawn(PartitionBuilder(Remembering(9), None, 2), 0, PartitionOffset())
    assert built.mark == PartitionOffset(1, 2, ({"position": 2}, None))
    dataset = Remembering(9)
    again = drawn(PartitionBuilder(dataset, None, 2), 1, built.mark)
    assert again.batch.tolist() == [2, 3]


@given(cut=st.integers(0, 8), before=st.sampled_from([1, 2, 4]), after=st.sampled_from([1, 2, 4]))
def test_partition_datasets_resume_on_another_number_of_ranks(cut: int, before: int, after: int) -> None:
    loaders = [fl.DataLoader(Sharded(), 1, distributed=(rank, before), seed=1) for rank in range(before)]
    seen: list[int] = []
    for loader in loaders:
        for _, batch in zip(range(min(cut, 12 // before)), loader, strict=False):
            seen += batch.tolist()
    state = fl.merge_states([loader.state_dict() for loader in loaders])
    state["partitions"].reverse()  # the order of the entries has no meaning
    for rank in range(after):
        loader = fl.DataLoader(Sharded(), 1, distributed=(rank, after), seed=1)
        loader.load_state_dict(state)
        for batch in loader:
            seen += batch.tolist()
    assert sorted(seen) == list(range(12))


def test_a_partition_that_has_ended_is_not_opened_again() -> None:
    opened = []

    class Counted(Numbers):
        def __iter__(self) -> Iterator[Any]:
            opened.append(1)
            return super().__iter__()

    builder = PartitionBuilder(Counted(2), None, 2)
    assert [drawn(builder, number, PartitionOffset()).batch is EMPTY_BATCH for number in range(4)] == [
        False,
        True,
        True,
        True,
    ]
    assert opened == [1]


def test_partitions_that_repeat_each_other_are_noticed_and_constants_are_not() -> None:
    from feedline.loader.checks import DuplicateStreamCheck

    twins = DuplicateStreamCheck("Numbers")
    numbers = "".join(digit * 16 for digit in "abc")
    twins.add(0, numbers)
    with pytest.warns(UserWarning, match="get_worker_info"):
        twins.add(1, numbers)
    for flags in ("a" * 16, "a" * 16 + "b" * 16):
        constant = DuplicateStreamCheck("Flags")
        constant.add(0, flags)
        constant.add(1, flags)
