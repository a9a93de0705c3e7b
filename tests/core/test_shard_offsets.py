"""Positions in shards: equal one by one, all at once, and grouped by shard."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from feedline.core.shard_offsets import ShardOffsets

ANY = st.lists(st.integers(0, 4), min_size=1, max_size=6)
EQUAL_BUT_THE_LAST = st.builds(
    lambda size, count, last: [size] * count + [last], st.integers(0, 4), st.integers(1, 5), st.integers(0, 5)
)


@given(sizes=(ANY | EQUAL_BUT_THE_LAST).filter(any), data=st.data())
def test_every_way_gives_the_shard_and_row_of_a_list(sizes: list[int], data: st.DataObject) -> None:
    expected = [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]
    offsets = ShardOffsets(sizes)
    assert len(offsets) == len(expected)
    indices = np.array(data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=9)), np.int64)
    wanted = [expected[at] for at in indices]
    assert [offsets.one(at) for at in indices.tolist()] == wanted
    shards, rows = offsets.locate(indices)
    assert list(zip(shards.tolist(), rows.tolist(), strict=True)) == wanted
    groups = offsets.by_shard(indices)
    assert [group.shard for group in groups] == sorted({shard for shard, _ in wanted})
    found = {place: (group.shard, row) for group in groups for place, row in zip(group.places, group.rows, strict=True)}
    assert [found[place] for place in range(len(wanted))] == wanted
