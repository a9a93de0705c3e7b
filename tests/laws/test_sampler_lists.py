# ruff: noqa: NPY002 - NumPy's legacy generator is one of those that samplers draw from
"""The laws of `Listed`: torch's own order and draws, and the same order again from what it recorded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws_reference import seed_all
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from feedline.samplers import MaterializedSampler

Make = Callable[[int], Any]


class Lazy(Sampler[int]):
    """Draws each index on request, from a generator of the process or from its own."""

    def __init__(self, n: int, source: str) -> None:
        self.n, self.source = n, source
        self.numpy = np.random.default_rng(n)
        self.legacy = np.random.RandomState(n)
        self.python = random.Random(n)
        self.torch = torch.Generator().manual_seed(n)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.n):
            yield self._drawn()

    def _drawn(self) -> int:
        match self.source:
            case "random":
                return random.randrange(self.n)
            case "numpy":
                return int(np.random.randint(self.n))
            case "torch":
                return int(torch.randint(self.n, ()).item())
            case "own numpy":
                return int(self.numpy.integers(self.n))
            case "own legacy":
                return int(self.legacy.randint(self.n))
            case "own python":
                return self.python.randrange(self.n)
        return int(torch.randint(self.n, (), generator=self.torch).item())


class Eager(Sampler[int]):
    """Draws in `__iter__` itself, and more at its end."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return self._items(random.sample(range(self.n), self.n))

    def _items(self, order: list[int]) -> Iterator[int]:
        yield from order
        random.random()


class Stateful(Sampler[int]):
    """Has state of its own that moves from epoch to epoch."""

    def __init__(self, n: int) -> None:
        self.n, self.turn = n, 0

    def __iter__(self) -> Iterator[int]:
        self.turn += 1
        return iter([(i * i + self.turn) % self.n for i in range(self.n)])

    def state_dict(self) -> dict[str, Any]:
        return {"turn": torch.tensor(self.turn), "of": (self.n,)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["of"] == (self.n,)
        self.turn = int(state["turn"])


def generator(n: int) -> torch.Generator:
    return torch.Generator().manual_seed(n)


PLAIN: dict[str, Make] = {
    "sequential": lambda n: SequentialSampler(range(n)),
    "random": lambda n: RandomSampler(range(n)),
    "random, some": lambda n: RandomSampler(range(n + 9), num_samples=n),
    "random, more": lambda n: RandomSampler(range(n), num_samples=2 * n + 3),
    "random, replaced": lambda n: RandomSampler(range(n), replacement=True, num_samples=n + 40),
    "weighted": lambda n: WeightedRandomSampler(range(1, n + 1), n + 5),
    "subset": lambda n: SubsetRandomSampler(range(7, 7 + n)),
    "list": lambda n: [i * i for i in range(n)],
    "eager": Eager,
    "lazy torch": lambda n: Lazy(n, "torch"),
    "lazy random": lambda n: Lazy(n, "random"),
    "lazy numpy": lambda n: Lazy(n, "numpy"),
}
OWN: dict[str, Make] = {
    "random, own": lambda n: RandomSampler(range(n), generator=generator(n)),
    "random, replaced, own": lambda n: RandomSampler(range(n), True, n + 40, generator(n)),
    "weighted, own": lambda n: WeightedRandomSampler(range(1, n + 1), n, generator=generator(n)),
    "subset, own": lambda n: SubsetRandomSampler(range(n), generator(n)),
    "lazy, own torch": lambda n: Lazy(n, "own torch"),
    "lazy, own python": lambda n: Lazy(n, "own python"),
    "lazy, own numpy": lambda n: Lazy(n, "own numpy"),
    "lazy, own legacy": lambda n: Lazy(n, "own legacy"),
    "stateful": Stateful,
    "distributed": lambda n: DistributedSampler(range(n), 2, 1),  # type: ignore[arg-type]
}


def makers(kinds: dict[str, Make]) -> st.SearchStrategy[Make]:
    """Samplers of these kinds, and torch's batch sampler around them."""
    plain = st.sampled_from(sorted(kinds)).map(kinds.__getitem__)
    around = st.builds(
        lambda make, size, drop_last: lambda n: BatchSampler(make(n), size, drop_last),
        plain, st.integers(1, 5), st.booleans(),
    )  # fmt: skip
    return st.one_of(plain, around)


SIZES = st.integers(1, 60)
STEPS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def process_state() -> tuple[Any, ...]:
    _, legacy, *more = np.random.get_state()
    return random.getstate(), np.asarray(legacy).tobytes(), more, torch.get_rng_state().numpy().tobytes()


def disturb() -> None:
    """The draws of a training loop between two batches."""
    random.random()
    np.random.rand()
    torch.rand(1)


def listed(make: Make, n: int) -> MaterializedSampler:
    sampler = make(n)
    return MaterializedSampler(sampler, batches=isinstance(sampler, BatchSampler))


def plainly(items: Any) -> list[Any]:
    if isinstance(items, np.ndarray):
        return items.tolist()
    return [item.tolist() if isinstance(item, np.ndarray) else item for item in items]


def rest(
    sampler: MaterializedSampler, epoch: int, start: int, steps: list[int], between: Callable[[], None]
) -> list[Any]:
    """All indices from `start` to the end, requested in steps; the last one is short."""
    found: list[Any] = []
    while True:
        for step in steps:
            items = plainly(sampler.take(epoch, start + len(found), start + len(found) + step))
            found += items
            between()
            if len(items) < step:
                return found


@given(makers(PLAIN | OWN), SIZES, STEPS, st.booleans(), st.integers(0, 2**31))
def test_items_and_draws_are_those_of_the_sampler_itself(
    make: Make, n: int, steps: list[int], now: bool, seed: int
) -> None:
    theirs, ours = make(n), listed(make, n)
    for epoch in range(3):
        seed_all(seed + epoch)
        expected, after = list(theirs), process_state()
        seed_all(seed + epoch)
        assert ours.begin(epoch, now=now) == epoch
        assert rest(ours, epoch, 0, steps, lambda: None) == expected
        assert process_state() == after


@given(makers(PLAIN | OWN), SIZES, st.lists(STEPS, min_size=3, max_size=3), st.booleans(), st.integers(0, 3))
def test_a_recording_repeats_its_epoch_any_number_of_times(
    make: Make, n: int, steps: list[list[int]], now: bool, epoch: int
) -> None:
    """The process may draw at any time before the cut and after the resume, from any state.

    The indices after the cut were drawn undisturbed here: a sampler that draws step by step has not drawn them before.
    """
    seed_all(1)
    first = listed(make, n)
    for earlier in range(epoch):
        first.begin(earlier, now=now)
        rest(first, earlier, 0, [100], disturb)
    first.begin(epoch, now=now)
    before: list[Any] = []
    for step in steps[0]:
        disturb()
        before += plainly(first.take(epoch, len(before), len(before) + step))
    state = json.loads(json.dumps(first.record()))
    known = before + rest(first, epoch, len(before), [7], lambda: None)

    for seed, resumed_steps in enumerate(steps[1:]):
        seed_all(1000 + seed)
        second = listed(make, n)
        second.restore(state)
        second.begin(epoch, now=now)
        own = process_state()
        assert plainly(second.take(epoch, 0, resumed_steps[0])) == known[: resumed_steps[0]]
        assert process_state() == own
        state = json.loads(json.dumps(second.record()))
        done = min(resumed_steps[0], len(known))
        assert rest(second, epoch, done, resumed_steps, disturb) == known[done:]


@given(makers(OWN), SIZES, STEPS, st.integers(1, 40), st.integers(0, 3))
def test_a_sampler_with_its_own_generators_continues_as_if_never_stopped(
    make: Make, n: int, steps: list[int], cut: int, epoch: int
) -> None:
    first = listed(make, n)
    for earlier in range(epoch):
        first.begin(earlier)
        rest(first, earlier, 0, [100], disturb)
    first.begin(epoch)
    first.take(epoch, 0, cut)
    state = json.loads(json.dumps(first.record()))

    second = listed(make, n)
    second.restore(state)
    second.begin(epoch)
    assert rest(second, epoch, 0, steps, disturb) == plainly(first.take(epoch, 0, 500))
    for later in (epoch + 1, epoch + 2):
        first.begin(later)
        second.begin(later)
        assert rest(second, later, 0, steps, disturb) == plainly(first.take(later, 0, 500))


@given(st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 50)), max_size=20))
def test_positions_not_forgotten_can_be_taken_in_any_order(asked: list[tuple[int, int]]) -> None:
    numbers, keys, kept_from = (
        MaterializedSampler(range(10**9)),
        MaterializedSampler(f"key {i}" for i in range(10**9)),
        0,
    )
    for offset, size in asked:
        start, stop = kept_from + offset, kept_from + offset + size
        assert plainly(numbers.take(0, start, stop)) == list(range(start, stop))
        assert plainly(keys.take(0, start, stop)) == [f"key {i}" for i in range(start, stop)]
        kept_from += offset // 2
        numbers.forget(kept_from)
        keys.forget(kept_from)
