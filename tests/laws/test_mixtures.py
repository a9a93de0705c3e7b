"""Mixtures, packed or not, are exact over random cuts with other numbers of ranks after each."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from rounds import rounds

import feedline as fl
from feedline import streams

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot share equally")
CUTS = rounds(30, 200)


def documents(count: int, first: int) -> list[torch.Tensor]:
    return [torch.arange(first + 100 * n, first + 100 * n + 1 + n * 7 % 13) for n in range(count)]


def packed_after_mixing() -> Any:
    parts = [
        streams.from_dataset(documents(40, first), fl.samplers.Shuffled(40, 1), partitions=4)  # type: ignore[arg-type]
        for first in (10_000, 20_000, 30_000)
    ]
    return streams.mix(parts, [3, 2, 1], stop="each_once", seed=4).shuffle(5).pack(16, buffer=6)


def mixed_after_packing() -> Any:
    web, code = (
        streams.from_dataset(documents(30, first), partitions=4).shuffle(4).pack(16, buffer=5)  # type: ignore[arg-type]
        for first in (10_000, 20_000)
    )
    return streams.mix([web, code], [1, 2], stop="all_exhausted", max_repeats=2, seed=4)


def in_phases() -> Any:
    parts = [
        streams.from_dataset(documents(30, first), fl.samplers.Shuffled(30, 1), partitions=4)  # type: ignore[arg-type]
        for first in (10_000, 20_000)
    ]
    course = streams.curriculum(parts, [(21, [9, 1]), (40, [1, 1]), (30, [1, 9])], temperature=1.5, seed=2)
    return course.shuffle(5).pack(16, buffer=6)


def rows_of(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(row) for row in torch.cat([batch["tokens"], batch["segments"]], 1).tolist()]


def steps_of(loader: Any, steps: int | None) -> list[tuple[int, ...]]:
    return [row for batch in islice(loader, steps) for row in rows_of(batch)]


def saved(loader: Any) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize("make", [packed_after_mixing, mixed_after_packing, in_phases])
def test_each_row_of_packed_tokens_comes_once(make: Any) -> None:
    whole = Counter(steps_of(fl.DataLoader(make(), 1, seed=1), None))
    draw, cuts = random.Random(7), 0
    while cuts < CUTS // 2:
        state, seen, is_over = None, Counter[tuple[int, ...]](), False
        while not is_over:
            world = draw.randint(1, 4)
            ranks = [fl.DataLoader(make(), draw.choice([1, 2]), seed=1, distributed=(n, world)) for n in range(world)]
            for rank in ranks:
                if state is not None:
                    rank.load_state_dict(state)
            is_over = draw.random() < 0.2
            steps = None if is_over else draw.randint(0, 2)
            for rank in ranks:
                seen.update(steps_of(rank, steps))
            states = [saved(rank) for rank in ranks]
            cuts += not is_over
            if any(each["epoch"] for each in states) and not is_over:
                break  # a rank has ended its epoch, so there is no common step
            state = states[0] if is_over else fl.merge_states(states)
        assert not seen - whole, "a row came twice"
        if is_over:
            assert seen == whole


ORDERS: dict[str, Any] = {
    "mixture": fl.samplers.Mixture([50, 30, 20], [5, 3, 2], seed=3, stop=120),
    "temperature and repeats": fl.samplers.Mixture(
        [50, 30, 20], [50, 30, 20], 3, stop=120, temperature=4.0, max_repeats=2
    ),
    "weights by epoch": fl.samplers.Mixture([50, 30, 20], [[1, 0, 0], [2, 3, 5]], seed=3, stop=120),
    "phases": fl.samplers.Curriculum([50, 30, 20], [(40, [1, 0, 0]), (50, [5, 3, 2]), (30, [0, 1, 3])], seed=3),
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_a_mixture_continues_after_each_cut(name: str) -> None:
    order = ORDERS[name]
    data = torch.utils.data.TensorDataset(torch.arange(100))
    draw, cuts = random.Random(5), 0
    while cuts < CUTS:
        state = None
        for epoch in range(3):
            seen, left = list[int](), 120
            while left:
                world, size = draw.randint(1, 5), draw.randint(1, 4)
                whole_steps = left // (world * size)
                steps = None if draw.random() < 0.1 or not whole_steps else draw.randint(0, whole_steps)
                ranks = [
                    fl.DataLoader(data, size, sampler=order, seed=0, distributed=(rank, world)) for rank in range(world)
                ]
                for rank in ranks:
                    if state is not None:
                        rank.load_state_dict(state)
                batches = [[batch.tolist() for (batch,) in islice(rank, steps)] for rank in ranks]
                state, cuts = saved(ranks[-1]), cuts + 1
                rows = [row for step in zip(*batches, strict=True) for batch in step for row in batch]
                seen += rows[:left]
                left -= len(rows[:left])
            assert seen == order.take(epoch, 0, 120).tolist()
            if isinstance(order, fl.samplers.Mixture):
                counts = np.bincount(np.searchsorted([50, 80], seen, "right"), minlength=3)
                assert counts.tolist() == order.draws(epoch)


BUCKETS: dict[str, Any] = {
    "rows": fl.samplers.LengthBuckets([1 + n * 7 % 50 for n in range(200)], 4, seed=3),
    "tokens": fl.samplers.LengthBuckets([1 + n * 7 % 50 for n in range(200)], max_tokens=200, seed=3),
}


@pytest.mark.parametrize("name", BUCKETS)
def test_length_buckets_go_on_with_other_ranks_after_each_cut(name: str) -> None:
    buckets = BUCKETS[name]
    data = torch.utils.data.TensorDataset(torch.arange(200))
    expected = [batch.tolist() for batch in buckets.take_batches(0, 0, len(buckets))]
    draw, cuts = random.Random(6), 0
    while cuts < CUTS:
        state, seen = None, list[list[int]]()
        while (left := len(expected) - len(seen)) > 0:
            world = draw.randint(1, 5)
            steps = draw.randint(0, left // world) if left >= world else None
            ranks = [
                fl.DataLoader(data, batch_sampler=buckets, seed=0, distributed=(rank, world)) for rank in range(world)
            ]
            for rank in ranks:
                if state is not None:
                    rank.load_state_dict(state)
            batches = [[batch.tolist() for (batch,) in islice(rank, steps)] for rank in ranks]
            state, cuts = saved(ranks[-1]), cuts + 1
            seen += [batch for step in zip(*batches, strict=True) for batch in step][:left]
        assert seen == expected
