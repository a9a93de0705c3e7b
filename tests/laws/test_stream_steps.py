"""Exact over chains of stream steps: cuts in any buffer, random draws, any workers, changing world sizes."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from law_settings import Reason, law_settings
from laws_reference import Hands, KeptLoaders, saved

import feedline as fl
from feedline import streams

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot share equally")
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

Sample = tuple[int, ...]
"""A document: its number, and then random tokens."""


@dataclass
class Documents:
    """Documents of one partition, with a state of its own if `keeps`; its draws belong to the numbers of samples."""

    first: int
    count: int
    keeps: bool

    def __iter__(self) -> Iterator[Sample]:
        return Counted(self) if self.keeps else self.read()

    def read(self) -> Iterator[Sample]:
        for number in range(self.first, self.first + self.count):
            yield document(number)


class Counted:
    """An iterator with a state."""

    def __init__(self, documents: Documents) -> None:
        self.documents, self.at = documents, 0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> Sample:
        if self.at == self.documents.count:
            raise StopIteration
        self.at += 1
        return document(self.documents.first + self.at - 1)

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


class Table(torch.utils.data.Dataset[Sample]):
    """A map-style dataset that reads many samples at once, and draws without declaring it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        return document(1000 + index)

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        return [self[index] for index in indices]


def document(number: int) -> Sample:
    return number, *fl.sample_rng().integers(0, 1000, 1 + number * 7 % 5).tolist()


def augmented(sample: Any, rng: Any) -> Any:
    return (*sample, int(rng.integers(0, 1000)))


def drawing(sample: Any) -> Any:
    return (*sample, int(fl.sample_rng().integers(0, 1000)))


def kept_by_chance(sample: Any, rng: Any) -> bool:
    return bool(rng.random() < 0.8)


def joined(samples: list[Sample]) -> Sample:
    return tuple(number for sample in samples for number in sample)


def tokens(row: Any) -> Sample:
    return tuple(row["tokens"].tolist())


def other() -> Any:
    return streams.from_items(
        [Documents(500, 7, True), Documents(600, 4, False), Documents(700, 6, True)], iter, seed=9
    )


STEPS: dict[str, Callable[[Any, int], Any]] = {
    "map": lambda s, _: s.map(augmented),
    "draw": lambda s, _: s.map(drawing),
    "filter": lambda s, _: s.filter(kept_by_chance),
    "shuffle": lambda s, n: s.shuffle(n),
    "batch": lambda s, n: s.batch(n, collate_fn=joined),
    "take": lambda s, n: s.take(6 * n),
    "repeat": lambda s, _: s.repeat(2),
    "pack": lambda s, n: s.map(list).pack(16, buffer=n, long="split").map(tokens),
    "mix, first": lambda s, n: streams.mix([s, other()], [n, 1], seed=4),
    "mix, all": lambda s, n: streams.mix([s, other().shuffle(n)], [1, 2], stop="all_exhausted", max_repeats=2, seed=4),
    "mix, once": lambda s, n: streams.mix([other(), s], [1, n], stop="each_once"),
    "mix, weights": lambda s, n: streams.mix([s, other()], lambda epoch: (epoch + 1, n), stop="each_once", seed=5),
    "mix, lists": lambda s, n: streams.mix([s, other()], [[1, n], [n, 1]], stop="each_once", seed=5),
    "mix, number": lambda s, n: streams.mix([s, other()], [n, 1], stop=7 * n, temperature=2.0, seed=4),
    "curriculum": lambda s, n: streams.curriculum([other(), s], [(5, [n, 1]), (2 * n, [1, 2]), (4, [1, 0])]),
}
CHAINS = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(1, 6)), min_size=1, max_size=4)


@dataclass(frozen=True)
class Chain:
    """A source, and steps with their sizes."""

    sizes: tuple[int, ...]
    source: str
    steps: tuple[tuple[str, int], ...]

    def open(self) -> Any:
        if self.source == "table":
            order = fl.samplers.Shuffled(sum(self.sizes), 2)
            made = streams.from_dataset(Table(sum(self.sizes)), order, partitions=len(self.sizes), seed=3)
        else:
            parts = [Documents(100 * n, size, self.source == "stateful") for n, size in enumerate(self.sizes)]
            made = streams.from_items(parts, iter, seed=3)
        for name, size in self.steps:
            made = STEPS[name](made, size)
        return made


SOURCES = st.sampled_from(["items", "stateful", "table"])
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple)
PIPELINES = st.builds(Chain, SIZES, SOURCES, CHAINS.map(tuple))


@given(PIPELINES, st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(0, 2))
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_a_partition_continues_after_cuts_in_any_buffer(chain: Chain, cuts: list[int], epoch: int) -> None:
    stream = chain.open()
    for partition in range(stream.num_partitions):
        whole = list(islice(stream.partition(partition, epoch), 200))
        seen: list[Any] = []
        flow = stream.partition(partition, epoch)
        for cut in cuts:
            seen += islice(flow, cut)
            state = json.loads(json.dumps(flow.state_dict()))
            flow = chain.open().partition(partition, epoch)
            flow.load_state_dict(state)
        seen += islice(flow, 200 - len(seen))
        assert seen == whole


def batches(loader: Any, count: int | None = None) -> list[Any]:
    return [list(batch) for batch in islice(loader, count)]


def rows(received: list[Any]) -> Counter[Any]:
    return Counter(sample for batch in received for sample in batch)


CREWS = st.sampled_from([Hands(), Hands("thread", 1), Hands("thread", 2)])


@given(PIPELINES, st.lists(st.tuples(CREWS, st.integers(0, 6)), min_size=2, max_size=4), st.integers(1, 4))
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_a_loader_continues_with_other_workers(chain: Chain, legs: list[tuple[Hands, int]], size: int) -> None:
    """The same batches in the same order."""
    with fl.DataLoader(chain.open(), size, seed=1, collate_fn=list) as loader:
        whole = batches(loader)
    seen, state = [], None
    for hands, count in [*legs, (Hands(), None)]:
        with fl.DataLoader(chain.open(), size, seed=1, collate_fn=list, **hands.arguments()) as loader:
            if state is not None:
                loader.load_state_dict(state)
            left = len(whole) - len(seen) - 1
            seen += batches(loader, None if count is None else min(count, max(left, 0)))
            state = saved(loader)
    assert seen == whole


@given(
    PIPELINES,
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(1, 3),
)
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_other_worlds_go_on_with_the_same_samples(
    chain: Chain, legs: list[tuple[int, int, int]], last_world: int
) -> None:
    """Ranks and batch sizes change at each cut; every sample is delivered once, with its draws."""
    partitions = chain.open().num_partitions

    def run(world: int, size: int, steps: int | None, state: Any) -> tuple[Counter[Any], list[Any]]:
        seen: Counter[Any] = Counter()
        states = []
        for rank in range(world):
            loader = fl.DataLoader(chain.open(), size, seed=1, collate_fn=list, distributed=(rank, world))
            if state is not None:
                loader.load_state_dict(state)
            seen += rows(batches(loader, steps))
            states.append(saved(loader))
        return seen, states

    whole, _ = run(1, 8, None, None)
    seen: Counter[Any] = Counter()
    state = None
    for world, steps, size in legs:
        more, states = run(min(world, partitions), size, steps, state)
        assume(not any(each["epoch"] for each in states))  # else the states have no common step
        seen += more
        state = fl.merge_states(states)
    more, _ = run(min(last_world, partitions), 2, None, state)
    assert seen + more == whole


KEPT = [
    Chain((7, 0, 9, 3), "items", (("draw", 1), ("shuffle", 4), ("filter", 1), ("mix, once", 2), ("shuffle", 3))),
    Chain((5, 8, 6), "stateful", (("filter", 1), ("pack", 3), ("mix, all", 2), ("batch", 2))),
    Chain((9, 9), "table", (("map", 1), ("repeat", 1), ("shuffle", 5), ("draw", 1))),
]
"""Chains whose loaders have processes that live as long as these tests."""


MORE: dict[str, Any] = {"seed": 1, "collate_fn": list}


@cache
def undivided(number: int) -> list[Any]:
    """The batches of a kept chain."""
    return batches(fl.DataLoader(KEPT[number].open(), 2, **MORE))


@given(st.integers(0, len(KEPT) - 1), st.integers(1, 2), st.lists(st.integers(0, 5), min_size=1, max_size=3))
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_processes_go_on_where_others_left(kept: KeptLoaders, number: int, workers: int, cuts: list[int]) -> None:
    whole = undivided(number)
    draw = random.Random(repr((number, workers, cuts)))
    seen, state = [], None
    for cut in cuts:
        crew = draw.choice([1, workers])
        loader = kept.begin(
            ("steps", number, crew),
            lambda crew=crew: fl.DataLoader(
                KEPT[number].open(), 2, num_workers=crew, worker_method="process", persistent_workers=True, **MORE
            ),
            state,
        )
        seen += batches(loader, min(cut, max(0, len(whole) - len(seen) - 1)))
        state = saved(loader)
    last = fl.DataLoader(KEPT[number].open(), 2, **MORE)
    last.load_state_dict(state)
    assert seen + batches(last) == whole
