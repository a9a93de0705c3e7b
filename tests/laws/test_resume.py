"""Exact and invariant: the stream is the same for all cuts, resumes and workers after each."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from law_settings import Reason, law_settings
from laws_reference import LARGEST, ORDERS, Hands, KeptLoaders, Work, rows_of, saved, taken

SEEDS = st.sampled_from([0, 7, 2**40])
SIZES = st.sampled_from([None, 1, 2, 3, 5, 8, 16])
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]


@dataclass(frozen=True)
class Leg:
    """One run between two checkpoints: its workers, and the number of batches that the loop receives."""

    hands: Hands
    count: int


def hands(*methods: str) -> st.SearchStrategy[Hands]:
    """Workers of these methods."""
    crew = st.builds(
        Hands,
        method=st.sampled_from([method for method in methods if method != "inline"]),
        workers=st.integers(1, 3),
        prefetch=st.sampled_from([None, 1, 3]),
        more=st.fixed_dictionaries({"persistent_workers": st.sampled_from([True, True, True, False])}),
    )
    return st.one_of(st.just(Hands()), crew) if "inline" in methods else crew


def legs(*methods: str) -> st.SearchStrategy[list[Leg]]:
    return st.lists(st.builds(Leg, hands(*methods), st.integers(0, 9)), min_size=2, max_size=4)


def works(*, legacy: bool) -> st.SearchStrategy[Work]:
    return st.builds(Work, st.integers(1, LARGEST), st.sampled_from(ORDERS), SEEDS, st.booleans(), st.just(legacy))


def relay(work: Work, batch_size: int | None, runs: list[Leg]) -> list[Any]:
    """All batches that the loop receives, when each run starts from the checkpoint of the previous one."""
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
@law_settings(suppress_health_check=CHECKS)
def test_resuming_inline_and_with_threads(work: Work, batch_size: int | None, runs: list[Leg]) -> None:
    assume(work.has_batches(batch_size or 1))
    assert_exact(work, batch_size, runs)


@given(works(legacy=True), SIZES, legs("inline", "process"))
@law_settings(at_most=8, because=Reason.PROCESSES, suppress_health_check=CHECKS)
def test_resuming_inline_and_with_new_processes_and_global_generators(
    work: Work, batch_size: int | None, runs: list[Leg]
) -> None:
    assume(work.has_batches(batch_size or 1))
    assert_exact(work, batch_size, runs)


@given(works(legacy=False), SIZES, legs("inline", "thread", "process"))
@law_settings(at_most=8, because=Reason.PROCESSES, suppress_health_check=CHECKS)
def test_resuming_across_all_kinds_of_new_workers(work: Work, batch_size: int | None, runs: list[Leg]) -> None:
    assume(work.has_batches(batch_size or 1))
    assert_exact(work, batch_size, runs)


PROCESSES = [
    Hands("process", workers, prefetch, {"persistent_workers": True}) for workers, prefetch in ((1, 1), (3, None))
]
KEPT_WORK = [
    (Work(31, ORDERS[1], 7), 3),
    (Work(LARGEST, ORDERS[2], 2**40, drop_last=True), 16),
    (Work(1, ORDERS[0], 0), None),
    (Work(17, ORDERS[3], 0, drop_last=True), 5),
    (Work(12, ORDERS[4], 7), 1),
]
"""Every order and tail, each with processes that live as long as these tests."""


def kept_legs(*methods: str) -> st.SearchStrategy[list[Leg]]:
    crews = st.one_of(st.sampled_from(PROCESSES), hands(*methods) if len(methods) > 1 else st.just(Hands()))
    return st.lists(st.builds(Leg, crews, st.integers(0, 9)), min_size=2, max_size=4)


def kept_relay(kept: KeptLoaders, work: Work, batch_size: int | None, runs: list[Leg]) -> list[Any]:
    """`relay`, but with processes that exist before and stay."""
    received: list[Any] = []
    state = None
    for leg in runs:
        is_kept = leg.hands in PROCESSES
        key = work, batch_size, leg.hands.workers
        loader = kept.begin(key, lambda leg=leg: work.loader(batch_size, leg.hands), state) if is_kept else None  # type: ignore[misc]
        with nullcontext(loader) if is_kept else work.loader(batch_size, leg.hands) as running:
            if not is_kept and state is not None:
                running.load_state_dict(state)
            received += [rows_of(batch) for batch in taken(running, leg.count)]
            state = saved(running)
    return received


@given(st.sampled_from(KEPT_WORK), kept_legs("inline"))
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_resuming_inline_and_with_processes_and_global_generators(
    kept: KeptLoaders, what: tuple[Work, int | None], runs: list[Leg]
) -> None:
    work, batch_size = replace(what[0], legacy=True), what[1]
    received = kept_relay(kept, work, batch_size, runs)
    assert received == work.batches(batch_size, sum(leg.count for leg in runs))


@given(st.sampled_from(KEPT_WORK), kept_legs("inline", "thread"))
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_resuming_across_all_kinds_of_workers(
    kept: KeptLoaders, what: tuple[Work, int | None], runs: list[Leg]
) -> None:
    received = kept_relay(kept, *what, runs)
    assert received == what[0].batches(what[1], sum(leg.count for leg in runs))


@given(works(legacy=False), st.integers(1, 6), st.integers(0, 12), hands("inline", "thread"), st.integers(0, 6))
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_a_state_describes_the_moment_it_was_taken(
    work: Work, batch_size: int, before: int, crew: Hands, beyond: int
) -> None:
    """However far the loader continues afterwards, and whatever it had prefetched."""
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
@law_settings(suppress_health_check=CHECKS)
def test_a_state_that_was_loaded_and_saved_again_is_the_same(work: Work, batch_size: int, count: int) -> None:
    assume(work.has_batches(batch_size))
    with work.loader(batch_size, Hands()) as loader:
        taken(loader, count)
        state = saved(loader)
    with work.loader(batch_size, Hands()) as resumed:
        resumed.load_state_dict(state)
        assert saved(resumed) == state


@given(works(legacy=False), st.integers(1, 6), st.integers(2, 3), st.data())
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_out_of_order_delivery_loses_and_repeats_nothing(
    work: Work, batch_size: int, workers: int, data: st.DataObject
) -> None:
    """Only the order is lost: with `delivered_ahead` in the state, every batch is delivered exactly once."""
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
