"""The schedule as a pure function: the requests of every rank, for any cursor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline.core.cursor import Cursor, PartitionCursor, PartitionOffset
from feedline.core.schedule import BatchSchedule, PartitionSchedule, Schedule, Share


class Order:
    """Epoch e gives e * 1000 + position, for `length` positions."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def take(self, epoch: int, start: int, stop: int) -> np.ndarray:
        return np.arange(start, min(stop, self.length)) + epoch * 1000

    def forget(self, before: int) -> None:
        """As foreign samplers do."""

    def take_batches(self, epoch: int, start: int, stop: int) -> list[list[int]]:
        return [[epoch * 1000 + place] * 2 for place in range(start, min(stop, self.length))]


def rows(schedule: Schedule, cursor: Cursor | None = None) -> list[list[int]]:
    return [list(map(int, request.indices)) for request in schedule.requests(cursor or Cursor())]


shares = st.integers(1, 4).flatmap(lambda world: st.tuples(st.just(world), st.booleans(), st.booleans()))


@given(
    length=st.integers(0, 60),
    size=st.integers(1, 7),
    drop_last=st.booleans(),
    lookahead=st.sampled_from([0, 3, 1 << 14]),
)
def test_one_rank_reads_the_order_in_batches(length: int, size: int, drop_last: bool, lookahead: int) -> None:
    schedule = Schedule(Order(length), size, drop_last=drop_last, lookahead=lookahead)
    expected = [list(range(start, min(start + size, length))) for start in range(0, length, size)]
    if drop_last:
        expected = [batch for batch in expected if len(batch) == size]
    assert rows(schedule) == expected
    assert schedule.length(length) == len(expected)


@given(length=st.integers(1, 60), size=st.integers(1, 5), world=shares, drop_last=st.booleans())
def test_ranks_take_equal_steps_and_cover_the_epoch(
    length: int, size: int, world: tuple[int, bool, bool], drop_last: bool
) -> None:
    world_size, strided, pad = world
    every = [
        list(
            Schedule(Order(length), size, drop_last=drop_last, share=Share(rank, world_size, strided, pad)).requests(
                Cursor()
            )
        )
        for rank in range(world_size)
    ]
    assert len({len(requests) for requests in every}) == 1
    seen: list[int] = []
    for requests in zip(*every, strict=True):
        assert len({len(request.indices) for request in requests}) == 1
        assert len({(request.start, request.stop) for request in requests}) == 1
        positions = [place for request in requests for place in request.positions]
        assert [int(i) for request in requests for i in request.indices] == positions
        seen += positions
    assert len(seen) - len(set(seen)) < (world_size if pad else 1)
    if pad and not drop_last:
        assert set(seen) == set(range(length))


@given(data=st.data(), length=st.integers(1, 50), size=st.integers(1, 5), world_size=st.integers(1, 3))
def test_any_cursor_gives_exactly_what_was_not_delivered(
    data: st.DataObject, length: int, size: int, world_size: int
) -> None:
    spans = [(s, min(s + size * world_size, length)) for s in range(0, length, size * world_size)]
    cursor = Cursor()
    for start, stop in data.draw(st.permutations(spans))[: data.draw(st.integers(0, len(spans)))]:
        cursor = cursor.after(start, stop)
    delivered = set(range(cursor.position)) | {p for low, high in cursor.delivered_ahead for p in range(low, high)}
    other = data.draw(st.integers(1, 6))
    rest: set[int] = set()
    for rank in range(world_size):
        schedule = Schedule(Order(length), other, share=Share(rank, world_size))
        for request in schedule.requests(cursor):
            covered = range(request.start, request.stop)
            assert delivered.isdisjoint(covered)
            rest.update(covered)
    assert rest | delivered == set(range(length))


def test_torchs_distributed_sampler_and_the_strided_share_agree() -> None:
    from torch.utils.data import BatchSampler, DistributedSampler

    for length in (1, 2, 5, 16, 17, 23):
        for drop_last in (False, True):
            for world_size in (1, 2, 3):
                for rank in range(world_size):
                    theirs = DistributedSampler(range(length), world_size, rank, shuffle=False, drop_last=drop_last)
                    share = Share(rank, world_size, strided=True, pad=not drop_last)
                    assert rows(Schedule(Order(length), 4, share=share)) == list(BatchSampler(theirs, 4, False))


def test_batch_samplers_are_dealt_to_ranks_in_turn() -> None:
    requests = [list(BatchSchedule(Order(5), Share(rank, 2)).requests(Cursor(1))) for rank in range(2)]
    assert [[r.indices[0] for r in mine] for mine in requests] == [[1000, 1002, 1004], [1001, 1003, 1000]]
    resumed = BatchSchedule(Order(5)).requests(Cursor(0, 1, ((2, 4),)))
    assert [r.indices[0] for r in resumed] == [1, 4]


def test_bare_indices_are_plain_integers() -> None:
    first = next(Schedule(Order(3), batched=False).requests(Cursor()))
    assert first.indices == 0
    assert type(first.indices) is int


def test_partitions_take_turns_and_leave_when_they_end() -> None:
    delivered = [PartitionCursor()]
    asked = []
    for request in PartitionSchedule(3, (0, 1, 2)).requests(PartitionCursor(), lambda: delivered[-1]):
        asked.append((request.partition, request.number))
        over = request.number == request.partition  # partition k has k batches
        mark = PartitionOffset(request.number, request.number, None, ended=over)
        delivered.append(request.advance(delivered[-1], mark)[0])
    assert asked == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (2, 2)]


@pytest.mark.parametrize("rows_left_out", [[0], [1, 2]])
def test_a_request_without_rows_keeps_the_positions_of_the_others(rows_left_out: list[int]) -> None:
    request = next(Schedule(Order(4), 4).requests(Cursor()))
    kept = [row for row in range(4) if row not in rows_left_out]
    smaller = request.without(set(rows_left_out))
    assert list(smaller.positions) == kept == [int(i) for i in smaller.indices]
