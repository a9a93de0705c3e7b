"""Merging the states of ranks: what is missing, given twice or from another step is named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import IterableDataset

import feedline as fl

SIZES = [3, 8, 9, 8]


class Lanes(IterableDataset[Any]):
    """Partitions of unequal length."""

    num_partitions = len(SIZES)

    def __iter__(self) -> Iterator[Any]:
        return self.partition(0, 0)

    def partition(self, partition: int, epoch: int) -> Iterator[Any]:
        yield from range(100 * partition, 100 * partition + SIZES[partition])


class Plain(IterableDataset[int]):
    """A stream without partitions."""

    def __iter__(self) -> Iterator[int]:
        yield from range(24)


def rank_of(rank: int, world: int, state: Any = None, stream: Any = Lanes) -> Any:
    made = fl.DataLoader(stream(), 2, seed=3, distributed=(rank, world))
    if state is not None:
        made.load_state_dict(state)
    return made


def saved(rank: int, world: int, steps: int, state: Any = None, stream: Any = Lanes) -> Any:
    """The state of a rank after some steps."""
    run = rank_of(rank, world, state, stream)
    for _ in islice(run, steps):
        pass
    return json.loads(json.dumps(run.state_dict()))


def numbers(loaders: list[Any]) -> list[int]:
    return sorted(number for loader in loaders for batch in loader for number in batch.tolist())


FAULTS: dict[str, Any] = {
    "has none of ranks 1, 3": lambda: [saved(0, 4, 1), saved(2, 4, 1)],
    "has several of rank 1 of 2": lambda: [saved(1, 2, 1), saved(0, 2, 1), saved(1, 2, 1)],
    "has several of rank 0 of 1": lambda: [saved(0, 1, 1), saved(0, 1, 2)],
    "ranks 0, 2 after 2 batches of epoch 0, rank 1 after 1": lambda: [
        saved(rank, 3, 2 - rank % 2) for rank in (2, 1, 0)
    ],
    "rank 0 after 0 batches of epoch 1, ranks 1, 2, 3 after 4 batches of epoch 0": lambda: [
        saved(rank, 4, steps) for rank, steps in enumerate([4] * 4)
    ],
    "world_size is 2 in one and 3": lambda: [saved(0, 2, 1), saved(1, 3, 1)],
    "num_partitions is 4 in one and 5": lambda: [saved(0, 2, 1), {**saved(1, 2, 1), "num_partitions": 5}],
    "others those of all ranks": lambda: [fl.merge_states([saved(0, 1, 1)]), saved(0, 2, 1)],
    "partitions is [": lambda: [
        fl.merge_states([saved(rank, world, 2) for rank in range(world)]) for world in (2, 3)
    ],
    "'rank' of this state is 2": lambda: [{**saved(0, 2, 1), "rank": 2}],
    "'step' is missing": lambda: [{name: value for name, value in saved(0, 1, 1).items() if name != "step"}],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*cannot share equally")
@pytest.mark.parametrize("said", FAULTS)
def test_faults_are_named(said: str) -> None:
    states = FAULTS[said]()
    with pytest.raises(fl.errors.StateError, match=re.escape(said)):
        fl.merge_states(states)


def test_a_rank_without_further_batches_may_be_behind() -> None:
    """Rank 0 has received the only two batches of its partition, and knows that it has ended."""
    states = [saved(rank, 4, steps) for rank, steps in enumerate([2, 3, 3, 3])]
    merged = fl.merge_states(states)
    assert merged["step"] == 3
    assert numbers([rank_of(rank, 2, merged) for rank in range(2)]) == [106, 107, 206, 207, 208, 306, 307]


@pytest.mark.filterwarnings("ignore:.*cannot share equally")
def test_the_state_of_one_rank_loads_on_this_rank_only() -> None:
    state = saved(0, 2, 3)
    assert saved(0, 2, 0, state) == state
    for rank, world in ((1, 2), (0, 1), (0, 3)):
        with pytest.raises(fl.errors.StateError, match=f"rank 0 of 2, but this loader is rank {rank} of {world}"):
            rank_of(rank, world, state)
    with pytest.raises(fl.errors.StateError, match="rank 0 of 2, but this loader is rank 1 of 2"):
        rank_of(0, 2).batch_at(0, rank=1, state=state)
    over = saved(0, 2, 100)
    assert (over["epoch"], over["step"]) == (1, 0)
    assert len(numbers([rank_of(0, 1, over)])) == sum(SIZES), "the start of an epoch fits all ranks"


def test_steps_count_on_after_a_resume_on_other_ranks() -> None:
    merged = fl.merge_states([saved(rank, 2, 2) for rank in range(2)])
    assert (merged["rank"], merged["world_size"], merged["step"]) == (None, 2, 2)
    assert fl.merge_states([merged]) == fl.merge_states([merged, merged]) == merged
    states = [rank_of(rank, 4, merged).state_dict() for rank in range(4)]  # saved at once, before the first step
    assert fl.merge_states(states) == {**merged, "world_size": 4}
    states = [saved(rank, 4, 1, merged) for rank in range(4)]
    assert [state["step"] for state in states] == [3] * 4
    assert rank_of(3, 4, states[3]).delivered == 3


def test_a_merged_state_of_one_rank_keeps_the_order() -> None:
    state = saved(0, 1, 3)
    merged = fl.merge_states([state])
    rest = [[batch.tolist() for batch in rank_of(0, 1, each)] for each in (state, merged)]
    assert rest[0] == rest[1]


@pytest.mark.filterwarnings("ignore:.*has no partitions")
def test_each_rank_of_a_stream_without_partitions_has_the_state_of_all() -> None:
    states = [saved(rank, 2, 3, stream=Plain) for rank in range(2)]
    assert states[0] == states[1] == fl.merge_states(states) == fl.merge_states(states[1:])
    assert len(numbers([rank_of(rank, 3, states[1], Plain) for rank in range(3)])) == 12
    with pytest.raises(fl.errors.StateError, match="step is 3 in one and 2 in another"):
        fl.merge_states([states[0], saved(1, 2, 2, stream=Plain)])


def test_damaged_workers_are_named() -> None:
    state = saved(0, 2, 1)
    for ranks in ('{"ranks":[]}', '{"ranks":{}}', '{"ranks":{"0":1}}'):
        for use in (lambda damaged: fl.merge_states([damaged, saved(1, 2, 1)]), lambda damaged: rank_of(0, 2, damaged)):
            with pytest.raises(fl.errors.StateError, match="the field 'workers' of this state is damaged"):
                use({**state, "workers": ranks})
