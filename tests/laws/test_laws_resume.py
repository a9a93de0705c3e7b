"""Exact and invariant: whatever the cuts, the resumes and the workers after each, the stream stays the same."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from laws_reference import LARGEST, ORDERS, Hands, Work, rows_of, saved, taken

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")

SEEDS = st.sampled_from([0, 7, 2**40])
SIZES = st.sampled_from([None, 1, 2, 3, 5, 8, 16])
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]


@dataclass(frozen=True)
class Leg:
    """One run between two checkpoints: who works, and how many batches the loop receives."""

    hands: Hands
    count: int


def hands(*methods: str) -> st.SearchStrategy[Hands]:
    """Workers of these methods."""
    crew = st.builds(
        Hands,
        method=st.sampled_from([method for method in methods if method != "inline"]),
        workers=st.integers(1, 3),
        prefetch=st.sampled_from([None, 1, 3]),
    )
    return st.one_of(st.just(Hands()), crew) if "inline" in methods else crew


def legs(*methods: str) -> st.SearchStrategy[list[Leg]]:
    return st.lists(st.builds(Leg, hands(*methods), st.integers(0, 9)), min_size=2, max_size=4)


def works(*, legacy: bool) -> st.SearchStrategy[Work]:
    return st.builds(Work, st.integers(1, LARGEST), st.sampled_from(ORDERS), SEEDS, st.booleans(), st.just(legacy))


def relay(work: Work, batch_size: int | None, runs: list[Leg]) -> list[Any]:
    """What the loop receives in all, when each run starts from the checkpoint of the one before."""
    received: list[Any] = []
    state = None
    for leg in runs:
        with work.loader(batch_size, leg.hands) as loader:
            if state is not None:
                loader.load_state_dict(state)
            received += [rows_of(batch) for batch in taken(loader, leg.count)]
            state = saved(loader)
    return received


def assert_exact(work: Work, batch_size: int | None, runs: list[Leg]) -> None:
    received = relay(work, batch_size, runs)
    assert len(received) == sum(leg.count for leg in runs)
    assert received == work.batches(batch_size, len(received))


@given(works(legacy=False), SIZES, legs("inline", "thread"))
@settings(max_examples=200, deadline=None, suppress_health_check=CHECKS)
def test_resuming_inline_and_with_threads(work: Work, batch_size: int | None, runs: list[Leg]) -> None:
    assume(work.has_batches(batch_size or 1))
    assert_exact(work, batch_size, runs)


@given(works(legacy=True), SIZES, legs("inline", "process"))
@settings(max_examples=40, deadline=None, suppress_health_check=CHECKS)
def test_resuming_inline_and_with_processes_and_global_generators(
    work: Work, batch_size: int | None, runs: list[Leg]
) -> None:
    assume(work.has_batches(batch_size or 1))
    assert_exact(work, batch_size, runs)


@given(works(legacy=False), SIZES, legs("inline", "thread", "process"))
@settings(max_examples=30, deadline=None, suppress_health_check=CHECKS)
def test_resuming_across_all_kinds_of_workers(work: Work, batch_size: int | None, runs: list[Leg]) -> None:
    assume(work.has_batches(batch_size or 1))
    assert_exact(work, batch_size, runs)


@given(works(legacy=False), st.integers(1, 6), st.integers(0, 12), hands("inline", "thread"), st.integers(0, 6))
@settings(max_examples=40, deadline=None, suppress_health_check=CHECKS)
def test_a_state_describes_the_moment_it_was_taken(
    work: Work, batch_size: int, before: int, crew: Hands, beyond: int
) -> None:
    """However far the loader goes on afterwards, and whatever it had prefetched by then."""
    assume(work.has_batches(batch_size))
    with work.loader(batch_size, crew) as loader:
        first = taken(loader, before)
        state = saved(loader)
        taken(loader, beyond)
    with work.loader(batch_size, Hands()) as resumed:
        resumed.load_state_dict(state)
        rest = taken(resumed, 5)
    assert [rows_of(batch) for batch in [*first, *rest]] == work.batches(batch_size, before + 5)


@given(works(legacy=False), st.integers(1, 6), st.integers(0, 12))
@settings(max_examples=40, deadline=None, suppress_health_check=CHECKS)
def test_a_state_that_was_loaded_and_saved_again_is_the_same(work: Work, batch_size: int, count: int) -> None:
    assume(work.has_batches(batch_size))
    with work.loader(batch_size, Hands()) as loader:
        taken(loader, count)
        state = saved(loader)
    with work.loader(batch_size, Hands()) as resumed:
        resumed.load_state_dict(state)
        assert saved(resumed) == state


@given(works(legacy=False), st.integers(1, 6), st.integers(2, 3), st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=CHECKS)
def test_out_of_order_delivery_loses_and_repeats_nothing(
    work: Work, batch_size: int, workers: int, data: st.DataObject
) -> None:
    """Order is given up, not exactness: with `delivered_ahead` in the state, every batch comes exactly once."""
    assume(work.has_batches(batch_size))
    length = len(epoch_spans(work, batch_size))
    cut = data.draw(st.integers(0, length))
    crew = Hands("thread", workers, more={"in_order": False})
    with work.loader(batch_size, crew) as loader:
        first = taken(loader, cut)
        state = saved(loader)
    with work.loader(batch_size, crew) as resumed:
        resumed.load_state_dict(state)
        rest = list(resumed)
    received = [rows_of(batch) for batch in [*first, *rest]]
    assert sorted(received) == sorted(work.batches(batch_size, length))


def epoch_spans(work: Work, batch_size: int) -> list[range]:
    """The spans of the first epoch."""
    return [span for _, span in takewhile(lambda step: step[0] == 0, work.steps(batch_size))]
