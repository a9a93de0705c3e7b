"""Any batch of any rank, built again: equal to what the run delivered, random values included."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

import feedline as fl


class Augmented(torch.utils.data.Dataset[Any]):
    """Samples with draws from `sample_rng` and from all global generators."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        old = random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002
        return index, float(fl.sample_rng().random()), *old


class Lanes(torch.utils.data.IterableDataset[Any]):
    """Partitions of unequal length with draws."""

    num_partitions = 5

    def __iter__(self) -> Iterator[Any]:
        return self.partition(0, 0)

    def partition(self, partition: int, epoch: int) -> Iterator[Any]:
        for number in range(3 + 2 * partition):
            yield partition, epoch, number, float(fl.sample_rng().random())


def plain(batch: Any) -> Any:
    return [torch.as_tensor(column).tolist() for column in batch]


def arguments(kind: str) -> dict[str, Any]:
    if kind == "batches":
        lengths = [1 + number % 5 for number in range(53)]
        return {"batch_sampler": fl.samplers.LengthBuckets(lengths, max_tokens=12, seed=3)}
    return {
        "batch_size": 4,
        **({"shuffle": True} if kind == "shuffle" else {"sampler": fl.samplers.Weighted([1.0, 2.0] * 26)}),
    }


@pytest.mark.parametrize("kind", ["shuffle", "weighted", "batches"])
def test_every_step_of_every_rank(kind: str) -> None:
    def loader(rank: int, world: int) -> Any:
        return fl.DataLoader(Augmented(53), seed=5, distributed=(rank, world), **arguments(kind))

    offline = loader(0, 1)
    for world in (1, 3):
        for rank in range(world):
            run = loader(rank, world)
            for epoch in range(2):
                delivered = [plain(batch) for batch in run]
                again = [
                    plain(offline.batch_at(step, epoch=epoch, rank=rank, world_size=world))
                    for step in range(len(delivered))
                ]
                assert again == delivered
                with pytest.raises(IndexError, match=f"epoch {epoch} has no step {len(delivered)} on rank {rank}"):
                    offline.batch_at(len(delivered), epoch=epoch, rank=rank, world_size=world)


@pytest.mark.filterwarnings("ignore:.*cannot share equally")
@pytest.mark.parametrize("world", [1, 2])
def test_every_step_of_a_stream(world: int) -> None:
    for rank in range(world):
        run = fl.DataLoader(Lanes(), batch_size=2, seed=1, distributed=(rank, world))
        delivered = [plain(batch) for batch in run]
        assert [plain(run.batch_at(step, epoch=0)) for step in range(len(delivered))] == delivered


def test_steps_count_from_a_state_whatever_the_world_was() -> None:
    run = fl.DataLoader(Augmented(60), batch_size=5, shuffle=True, seed=2, distributed=(0, 2))
    list(islice(run, 2))
    state = run.state_dict()
    resumed = fl.DataLoader(Augmented(60), batch_size=3, shuffle=True, seed=2, distributed=(2, 3))
    resumed.load_state_dict(state)
    delivered = [plain(batch) for batch in resumed]
    offline = fl.DataLoader(Augmented(60), batch_size=3, shuffle=True, seed=2)
    again = [plain(offline.batch_at(step, rank=2, world_size=3, state=state)) for step in range(len(delivered))]
    assert again == delivered


def test_the_run_continues_undisturbed() -> None:
    """In the middle of an epoch; the generators of the process, and the loop, stay unchanged."""
    run, alone = (fl.DataLoader(Augmented(20), batch_size=4, shuffle=True, seed=2) for _ in range(2))
    expected = [plain(batch) for batch in alone]
    seen = []
    for step, batch in enumerate(run):
        seen.append(plain(batch))
        before = torch.random.get_rng_state()
        assert plain(run.batch_at(step)) == seen[-1]
        assert torch.equal(before, torch.random.get_rng_state())
    assert seen == expected


@pytest.mark.filterwarnings("ignore:without seed= random values belong to the workers")
def test_the_order_of_a_torch_sampler_is_in_the_state() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(40))
    run = fl.DataLoader(data, batch_size=4, shuffle=True)
    batches = iter(run)
    delivered = [plain(batch) for batch in islice(batches, 3)]
    with pytest.raises(fl.errors.ArgumentError, match=r"RandomSampler has no random access: pass state=.*seed="):
        run.batch_at(0)
    state = run.state_dict()
    again = [plain(run.batch_at(step, state={**state, "position": 0})) for step in range(10)]
    assert again == delivered + [plain(batch) for batch in batches]


def test_without_a_seed_a_warning_says_what_may_differ() -> None:
    with pytest.warns(UserWarning, match="random values belong to the workers"):
        fl.DataLoader(Augmented(5)).batch_at(0)


def test_negative_steps_and_stateful_datasets_are_refused() -> None:
    with pytest.raises(fl.errors.ArgumentError, match="step must be at least 0"):
        fl.DataLoader(Augmented(5), seed=0).batch_at(-1)
    stateful = Augmented(5)
    stateful.state_dict = dict  # type: ignore[attr-defined]
    stateful.load_state_dict = lambda state: None  # type: ignore[attr-defined]
    with pytest.raises(fl.errors.ArgumentError, match="has a state of its own"):
        fl.DataLoader(stateful, seed=0).batch_at(0)
