"""Cursors: the set of delivered positions in a short form."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline.core.cursor import Cursor, PartitionCursor, PartitionOffset

spans = st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda span: (span[0], sum(span)))


def delivered(cursor: Cursor) -> set[int]:
    return set(range(cursor.position)).union(*(range(low, high) for low, high in cursor.delivered_ahead))


def is_canonical(cursor: Cursor) -> bool:
    edges = [cursor.position, *(edge for range_ahead in cursor.delivered_ahead for edge in range_ahead)]
    return edges == sorted(set(edges))


@given(st.lists(spans, max_size=20))
def test_after_is_the_union_of_sets(deliveries: list[tuple[int, int]]) -> None:
    cursor, wanted = Cursor(3), set()
    for start, stop in deliveries:
        cursor = cursor.after(start, stop)
        wanted |= set(range(start, stop))
        assert delivered(cursor) == wanted
        assert is_canonical(cursor)
        assert cursor.epoch == 3


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_batches_in_any_order_end_at_the_same_cursor(sizes: list[int], rnd: random.Random) -> None:
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    batches = list(itertools.pairwise(edges))
    rnd.shuffle(batches)
    cursor = Cursor()
    for start, stop in batches:
        cursor = cursor.after(start, stop)
    assert cursor == Cursor(0, edges[-1])


@given(st.lists(spans, max_size=12), st.integers(0, 90))
def test_gaps_are_what_is_missing(deliveries: list[tuple[int, int]], stop: int) -> None:
    cursor = Cursor()
    for span in deliveries:
        cursor = cursor.after(*span)
    gaps = cursor.gaps(stop)
    assert {position for low, high in gaps for position in range(low, high)} == set(range(stop)) - delivered(cursor)
    edges = [edge for gap in gaps for edge in gap]
    assert edges == sorted(set(edges))


def test_filling_the_gaps_leaves_no_delivered_ahead() -> None:
    cursor = Cursor().after(4, 6).after(10, 11)
    for gap in cursor.gaps(12):
        cursor = cursor.after(*gap)
    assert cursor == Cursor(0, 12)


def test_epochs_begin_at_their_start() -> None:
    assert Cursor(2, 10, ((12, 14),)).next_epoch() == Cursor(3)


def test_a_cursor_never_changes() -> None:
    cursor = Cursor(0, 4)
    cursor.after(4, 8)
    assert cursor == Cursor(0, 4)
    with pytest.raises(AttributeError):
        cursor.position = 5  # type: ignore[misc]


def test_partitions_advance_apart() -> None:
    cursor = (
        PartitionCursor(1)
        .after(2, PartitionOffset(1, 4), next_partition=0)
        .after(0, PartitionOffset(1, 4, ended=True), next_partition=1)
    )
    assert cursor.mark(0) == PartitionOffset(1, 4, ended=True)
    assert cursor.mark(1) == PartitionOffset()
    assert cursor.mark(2) == PartitionOffset(1, 4)
    assert cursor.next_partition == 1
    assert cursor.ended() == {0}
    assert cursor.next_epoch() == PartitionCursor(2)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=20))
def test_a_partition_stands_at_its_last_mark(deliveries: list[tuple[int, int]]) -> None:
    cursor = PartitionCursor()
    for partition, batches in deliveries:
        cursor = cursor.after(partition, PartitionOffset(batches), next_partition=partition)
    assert dict(cursor.marks) == {partition: PartitionOffset(batches) for partition, batches in deliveries}
    assert list(cursor.marks) == sorted(cursor.marks)
    last = dict(deliveries)
    assert [cursor.mark(partition).batches for partition in range(-1, 5)] == [last.get(n, 0) for n in range(-1, 5)]
