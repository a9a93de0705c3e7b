"""The replay compared with arithmetic, and its predictions with a simulated machine."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_pipeline import Pipeline, Run

from feedline.core.copying import CopyRates
from feedline.core.telemetry import MAIN, Span
from feedline.loader.report import doubts, verdict
from feedline.loader.report.advice import predict
from feedline.loader.report.calibration import PREEMPTED_SHARE
from feedline.loader.report.context import Context
from feedline.loader.report.measured import Measured, files_nbytes_of
from feedline.loader.report.model import Case, Model
from feedline.loader.report.replay import (
    INLINE,
    PROCESS,
    SWITCH_S,
    THREAD,
    BatchTimes,
    EngineSetting,
    Machine,
    Task,
    replay,
)  # fmt: skip
from feedline.loader.report.stats import Stats
from feedline.workers.registry import PROCESSES

STEP = Task(0, 0.01)


def batches(wait: float = 0, cpu: float = 0, step: Task = STEP, **stages: Task) -> list[BatchTimes]:
    return [BatchTimes({"fetch": Task(wait, cpu)}, step=step, **stages)] * 64


def test_without_workers_times_add_up() -> None:
    times = batches(0.02, 0.06, sample=Task(0, 0.005))
    assert replay(times, EngineSetting(), Machine(2)) == pytest.approx(0.095)


@pytest.mark.parametrize(("workers", "expected"), [(1, 0.08), (2, 0.04), (4, 0.02), (8, 0.01), (16, 0.01)])
def test_waiting_overlaps_without_limit(workers: int, expected: float) -> None:
    setting = EngineSetting(workers, method=PROCESS)
    assert replay(batches(0.08), setting, Machine(1)) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("workers", [4, 6, 8, 10, 12])
def test_workers_with_equal_tasks_do_not_compute_at_the_same_moments(workers: int) -> None:
    pipeline = Pipeline(fetch=(20, 4), step=(1, 0), workers=workers, cpus=2)
    expected = max(0.024 / workers, 0.002)
    assert pipeline.run().period_s == pytest.approx(expected, rel=0.05)
    period = replay(batches(0.02, 0.004, Task(0.001)), EngineSetting(workers, method=PROCESS), Machine(2))
    assert period == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize(("workers", "cpus", "expected"), [(2, 8, 0.04), (2, 2, 0.045), (8, 2, 0.045), (4, 1, 0.09)])
def test_computing_shares_the_cpus_with_the_step(workers: int, cpus: float, expected: float) -> None:
    setting = EngineSetting(workers, method=PROCESS)
    assert replay(batches(cpu=0.08), setting, Machine(cpus)) == pytest.approx(expected, rel=0.05)


def test_threads_compute_one_at_a_time_as_far_as_they_hold_the_lock() -> None:
    times = batches(cpu=0.08, step=Task(0.001))
    periods = [replay(times, EngineSetting(4, method=THREAD), Machine(8, gil_share=gil)) for gil in (1.0, 0.5, 0.1)]
    assert periods == pytest.approx([0.08, 0.04, 0.02], rel=0.05)
    assert replay(times, EngineSetting(4, method=PROCESS), Machine(8, gil_share=1.0)) == pytest.approx(0.02, rel=0.05)


def test_a_sampler_runs_before_every_batch_whatever_the_workers_do() -> None:
    times = batches(0.001, sample=Task(0, 0.03))
    assert replay(times, EngineSetting(8, method=PROCESS), Machine(8)) == pytest.approx(0.04)


def test_a_task_with_threads_of_its_own_uses_several_cpus() -> None:
    wide = [BatchTimes({"fetch": Task(0, 0.08, 4.0)}, step=Task(0.01))] * 64
    assert replay(wide, EngineSetting(2, method=PROCESS), Machine(8)) == pytest.approx(0.04, rel=0.05)
    assert replay(wide, EngineSetting(2, method=PROCESS), Machine(4)) == pytest.approx(0.08, rel=0.05)


def test_a_slow_batch_holds_up_its_worker_where_requests_are_assigned() -> None:
    slow = [BatchTimes({"fetch": Task(0.5 if n % 16 == 0 else 0.01)}, step=Task(0.005)) for n in range(128)]
    round_robin, free = (
        replay(slow, EngineSetting(4, method=PROCESS, round_robin=round_robin), Machine(8))
        for round_robin in (True, False)
    )
    unordered = replay(slow, EngineSetting(4, in_order=False, method=PROCESS), Machine(8))
    deep = replay(slow, EngineSetting(4, prefetch_factor=16, method=PROCESS), Machine(8))
    assert round_robin >= 0.99 * free > 1.05 * unordered
    assert deep < free


TIMES = st.floats(0, 0.05)
TASKS = st.builds(Task, TIMES, TIMES, st.just(1.0), st.just(0.0))


@settings(max_examples=40)
@given(
    fetch=TASKS, step=TASKS, sample=TASKS, decode=TASKS, workers=st.integers(0, 6), prefetch=st.integers(1, 4),
    cpus=st.floats(0.2, 8), method=st.sampled_from([PROCESS, THREAD]),
    round_robin=st.booleans(), in_order=st.booleans(),
)  # fmt: skip
def test_no_replay_beats_what_its_parts_allow(
    fetch: Task, step: Task, sample: Task, decode: Task, workers: int, prefetch: int, cpus: float, method: str,
    round_robin: bool, in_order: bool,
) -> None:  # fmt: skip
    times = [BatchTimes({"fetch": fetch}, sample, decode, step)] * 24
    setting = EngineSetting(workers, prefetch, in_order, method if workers else INLINE, round_robin)
    period = replay(times, setting, Machine(cpus, gil_share=0.0))
    decoding = decode if workers else Task()
    loop = step.alone_s + sample.alone_s
    everything = (fetch.cpu_s + sample.cpu_s + step.cpu_s) / cpus
    least = max(loop, fetch.alone_s / max(workers, 1), everything)
    most = (fetch.wait_s + sample.wait_s + step.wait_s + decoding.wait_s) + (
        fetch.cpu_s + sample.cpu_s + step.cpu_s + decoding.cpu_s
    ) * max(1.0, (workers + 1) / cpus)
    assert 0.93 * least - 1e-9 <= period <= 1.07 * most + 1e-9


def test_a_replay_needs_batches() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        replay([], EngineSetting(), Machine())


WAITS = Pipeline(fetch=(40, 2), step=(3, 2), workers=2)
COMPUTES = Pipeline(fetch=(0, 30), step=(3, 5), workers=1)
ROBBED = Pipeline(fetch=(10, 20), step=(2, 4), workers=1, others=2)
PAIRS = {
    "waiting fetch, 2 to 8 workers": (WAITS, replace(WAITS, workers=8)),
    "waiting fetch, 8 to 2 workers": (replace(WAITS, workers=8), WAITS),
    "computing fetch, 1 to 2 workers": (COMPUTES, replace(COMPUTES, workers=2)),
    "computing fetch, 1 to 8 workers": (COMPUTES, replace(COMPUTES, workers=8)),
    "computing fetch, 8 CPUs, 1 to 6 workers": (replace(COMPUTES, cpus=8), replace(COMPUTES, cpus=8, workers=6)),
    "mixed fetch, 2 to 6 workers": (
        Pipeline(fetch=(20, 10), step=(2, 3), workers=2), Pipeline(fetch=(20, 10), step=(2, 3), workers=6),
    ),
    "inline to 2 workers": (replace(COMPUTES, workers=0), replace(COMPUTES, workers=2)),
    "stragglers, prefetch 1 to 6": (
        Pipeline(fetch=(6, 1), slow=lambda n: 12.0 if n % 12 == 5 else 1.0, prefetch=1, workers=2),
        Pipeline(fetch=(6, 1), slow=lambda n: 12.0 if n % 12 == 5 else 1.0, prefetch=6, workers=2),
    ),
    "stragglers, any order": (
        Pipeline(fetch=(6, 1), slow=lambda n: 12.0 if n % 12 == 5 else 1.0, prefetch=2, workers=3),
        Pipeline(fetch=(6, 1), slow=lambda n: 12.0 if n % 12 == 5 else 1.0, prefetch=2, workers=3, in_order=False),
    ),
    "threads that compute under a lock, to processes": (
        Pipeline(fetch=(0, 20), workers=2, method="thread", locks=True), Pipeline(fetch=(0, 20), workers=2),
    ),
    "a step that waits for the lock, to processes": (
        Pipeline(fetch=(0, 8), step=(2, 0), workers=2, method="thread", locks=True, cpus=4),
        Pipeline(fetch=(0, 8), step=(2, 0), workers=2, cpus=4),
    ),
    "a long step that waits for the lock, to processes": (
        Pipeline(fetch=(0, 12), step=(12, 0), workers=2, method="thread", locks=True, cpus=4),
        Pipeline(fetch=(0, 12), step=(12, 0), workers=2, cpus=4),
    ),
}  # fmt: skip


@pytest.fixture
def equal_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions for CPUs like the simulated ones, which do not slow each other down."""
    monkeypatch.setattr("feedline.loader.report.model.WORTH_EXPECTED", 1.0)


def period_of(case: Case, recorded: Sequence[BatchTimes]) -> float:
    return replay(case.apply(recorded), case.setting, case.machine)


def model_of(run: Run) -> Model:
    return Model.of(Measured.of(run.recent, run.stats), run.pipeline.context())


def gain_of(before: Pipeline, after: Pipeline, model: Model) -> float:
    return model.gain(model.with_setting(after.context().setting))


@pytest.mark.usefixtures("equal_cpus")
@pytest.mark.parametrize("name", PAIRS)
def test_the_gain_of_a_setting_is_predicted(name: str) -> None:
    before, after = PAIRS[name]
    run = before.run()
    truth = run.period_s / after.run().period_s
    assert gain_of(before, after, model_of(run)) == pytest.approx(truth, rel=0.15)


@pytest.mark.parametrize("stage", ["sample", "collate", "receive", "fetch"])
def test_the_gain_of_a_free_stage_is_predicted(stage: str) -> None:
    slow = {
        "sample": {"sample": 30},
        "collate": {"collate": (0, 30)},
        "receive": {"receive": 30},
        "fetch": {"fetch": (20, 20)},
    }
    free = {
        "sample": {"sample": 0},
        "collate": {"collate": (0, 0)},
        "receive": {"receive": 0},
        "fetch": {"fetch": (0, 0)},
    }
    base = Pipeline(fetch=(2, 4), step=(2, 4), workers=2)
    run = replace(base, **slow[stage]).run()
    truth = run.period_s / replace(base, **free[stage]).run().period_s
    model = model_of(run)
    assert model.removal_gains[stage] == pytest.approx(truth, rel=0.15)
    assert max(model.removal_gains, key=model.removal_gains.__getitem__) == stage
    assert model.explained_share >= 0.9


@pytest.mark.parametrize("late", [
    Pipeline(fetch=(0, 40), step=(10, 0.25), workers=4, slice_ms=6),
    Pipeline(fetch=(0, 60), step=(20, 0.25), workers=3, slice_ms=3),
])  # fmt: skip
def test_a_step_that_is_woken_late_by_workers_is_shorter_without_their_work(late: Pipeline) -> None:
    run = late.run()
    truth = run.period_s / replace(late, fetch=(0, 0)).run().period_s
    assert model_of(run).removal_gains["fetch"] == pytest.approx(truth, rel=0.1)


def test_the_time_of_workers_between_batches_overlaps() -> None:
    slow = Pipeline(fetch=(0, 10), turn=6, step=(4, 0.25), workers=1, cpus=4)
    run, faster = slow.run(), replace(slow, workers=3)
    model = verdict.model_of(run.stats, slow.context(), run.recent)
    assert model is not None
    assert gain_of(slow, faster, model) == pytest.approx(run.period_s / faster.run().period_s, rel=0.1)
    inline = model.with_setting(EngineSetting())
    assert period_of(inline, model.measured.batches) == pytest.approx(replace(slow, workers=0).run().period_s, rel=0.05)


def test_a_loop_waits_no_longer_for_a_batch_than_its_delivery_takes() -> None:
    run = Pipeline(fetch=(0, 10), turn=3, step=(1, 0.25), workers=1, cpus=4, method="thread").run()
    for spans in run.recorded:
        spans[:] = [span for span in spans if span.stage != "receive"]
    assert model_of(run).removal_gains["fetch"] > 3


@pytest.mark.parametrize("more_ms", [0, 8])
def test_objects_may_take_as_long_to_make_as_to_unpack(more_ms: int) -> None:
    sent = Pipeline(fetch=(0, 4), serialize=(0, 4), receive=8, step=(2, 2), workers=2, cpus=4)
    run = sent.run()
    gain = predict(model_of(run), {"num_workers": 0})
    assert gain is not None
    made = replace(sent, workers=0, fetch=(0, 4 + more_ms))
    assert 0.98 * gain.low < run.period_s / made.run().period_s < 1.02 * gain.high


def test_cpus_that_other_programs_use_may_be_missing_to_more_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubts, "WORTH_TOGETHER", 1.0)
    slow = replace(COMPUTES, workers=0, others=1)
    run, faster = slow.run(), replace(slow, workers=2)
    for others_cpus in (0.0, 1.0):
        measured = replace(Measured.of(run.recent, run.stats), others_cpus=others_cpus)
        gain = predict(Model.of(measured, slow.context()), {"num_workers": 2})
        assert gain is not None
        assert (gain.low < run.period_s / faster.run().period_s < gain.high) == (others_cpus > 0)


def test_cpus_may_be_slower_while_others_compute() -> None:
    slow = replace(COMPUTES, workers=0)
    run = slow.run()
    gain = predict(model_of(run), {"num_workers": 2})
    assert gain is not None
    waits_ms, computes_ms = slow.fetch
    slower, equal = (replace(slow, workers=2, fetch=(waits_ms, times * computes_ms)).run() for times in (1.3, 1.0))
    assert gain.low < run.period_s / slower.period_s < 0.95 * gain.gain
    assert 1.05 * gain.gain < run.period_s / equal.period_s < 1.02 * gain.high
    busy = replace(COMPUTES, workers=2).run()
    same = predict(model_of(busy), {"num_workers": 2})
    assert same is None or same.low > 0.9


def test_the_draw_of_a_batch_is_no_time_of_its_worker() -> None:
    slow = Pipeline(fetch=(0, 1), sample=20, step=(4, 0), workers=2, cpus=4)
    run = slow.run()
    expected = run.period_s / replace(slow, sample=0).run().period_s
    model = verdict.model_of(run.stats, slow.context(), run.recent)
    assert model is not None
    assert model.removal_gains["sample"] == pytest.approx(expected, rel=0.1)


def test_other_programs_are_found_by_the_run_delay() -> None:
    run = ROBBED.run()
    model = model_of(run)
    assert model.machine.cpus < 1.5
    alone = model.gain(model.present._replace(machine=replace(model.machine, cpus=2.0)))
    assert alone == pytest.approx(run.period_s / replace(ROBBED, others=0).run().period_s, rel=0.2)


def test_cpus_that_others_do_not_use_are_no_reason_for_a_delay() -> None:
    run = ROBBED.run()
    measured = replace(Measured.of(run.recent, run.stats), others_cpus=0.25)
    assert Model.of(measured, run.pipeline.context()).machine.cpus >= 1.75


def test_the_start_and_the_end_of_workers_count_only_where_there_are_any() -> None:
    run = COMPUTES.run()
    measured = replace(Measured.of(run.recent, run.stats), startup_s=0.4, closing_s=0.2)
    model = Model.of(measured, run.pipeline.context(epoch_batches=20))
    assert model.startup_s == pytest.approx(0.57, rel=0.02)
    inline = model.with_setting(EngineSetting())
    assert model.gain(inline) == pytest.approx(
        (0.57 + 20 * model.now_s) / (20 * period_of(inline, measured.batches)), rel=0.05
    )


def contended(share: float) -> Model:
    """Two workers whose samples hold one lock, so that each waits half of its time for the other."""
    run = Pipeline(fetch=(48, 0), step=(4, 0), workers=2).run()
    measured = replace(Measured.of(run.recent, run.stats), contended_share=share)
    return Model.of(measured, run.pipeline.context())


def test_workers_that_wait_for_each_other_gain_nothing_from_more() -> None:
    model = contended(0.5)
    more = model.with_setting(replace(model.present.setting, num_workers=8))
    assert model.gain(more) == pytest.approx(1.0, abs=0.03)
    assert model.gain(more._replace(change=BatchTimes.without_exclusion)) > 3
    assert model.removal_gains["fetch"] > 3
    assert contended(0.01).gain(more) > 3, "a lock that is rarely waited for is free most of the time"


def with_a_lock(workers: int, held_ms: float, alone_ms: float, samples: int = 16) -> tuple[float, float]:
    """Milliseconds from batch to batch, and share of waiting, of workers that hold a lock for a part of each sample."""
    source = random.Random(0)
    free_ms, number = 0.0, 600 * samples
    asks = [(source.random() * alone_ms, worker) for worker in range(workers)]
    heapq.heapify(asks)
    waited_ms = ended_ms = 0.0
    for _ in range(number):
        asked_ms, worker = heapq.heappop(asks)
        begun_ms = max(asked_ms, free_ms)
        waited_ms += begun_ms - asked_ms
        free_ms = begun_ms + source.expovariate(samples / held_ms)
        ended_ms = free_ms
        heapq.heappush(asks, (free_ms + source.expovariate(samples / (alone_ms - held_ms)), worker))
    return ended_ms * samples / number, waited_ms / (ended_ms * workers)


@pytest.mark.parametrize(
    ("workers", "held_ms", "gain"),
    [(2, 24, 1.25), (2, 4, 1.01), (4, 5, 1.04), (4, 12, 1.26), (4, 24, 2.05), (3, 47, 2.95), (16, 4, 1.41)],
)
def test_a_lock_costs_what_workers_wait_for_it(workers: int, held_ms: float, gain: float) -> None:
    period_ms, waited = with_a_lock(workers, held_ms, 48)
    assert workers * period_ms / 48 == pytest.approx(gain, rel=0.04)
    fetch = round(workers * period_ms), 0
    run = Pipeline(fetch=fetch, step=(1, 0), workers=workers, cpus=4, batches=max(120, 25 * workers)).run()
    measured = replace(Measured.of(run.recent, run.stats), contended_share=waited)
    model = Model.of(measured, run.pipeline.context())
    assert model.now_s == pytest.approx(run.period_s, rel=0.04)
    assert model.lock_gain == pytest.approx(gain, rel=0.05)
    assert model.is_locked == (gain >= 1.1)
    for number in (workers + 1, 2 * workers):
        more = model.with_setting(replace(model.present.setting, num_workers=number))
        expected = max(with_a_lock(number, held_ms, 48)[0], 1)
        assert model.gain(more) == pytest.approx(period_ms / expected, rel=0.1)


def test_a_lock_that_costs_little_is_not_the_limit() -> None:
    """Its removal alone would hardly help; more workers do, with the lock or without it."""
    run = Pipeline(fetch=(48, 0), step=(4, 0), workers=4).run()
    lightly, heavily = (
        verdict.diagnose(replace(run.stats, contended_share=share), run.pipeline.context(), run.recent)
        for share in (0.06, 0.2)
    )
    assert "lock" not in str(lightly)
    assert "holds a lock" in heavily.explanation
    (bound,) = (advice for advice in heavily.advice if "hold the lock" in advice.text)
    assert bound.gain == pytest.approx(1.25, rel=0.05)


def test_a_lock_of_workers_is_no_lack_of_cpus() -> None:
    """Other programs compute, too, but it is the lock that limits the loop."""
    waits = Pipeline(fetch=(48, 4), turn=3, step=(4, 0.5), workers=2, others=2)
    run = waits.run()
    measured = replace(Measured.of(run.recent, run.stats), contended_share=0.5)
    assert measured.delay_share > PREEMPTED_SHARE
    model = Model.of(measured, waits.context())
    assert model.machine.cpus == waits.cpus
    assert model.now_s == pytest.approx(run.period_s, rel=0.01)
    # A worker waits for the lock half of the time in which it builds a batch. A bound is that of an idle machine.
    free = replace(waits, fetch=(48 - 26, 4), workers=4, others=0).run()
    case = model.with_setting(free.pipeline.context().setting)._replace(change=BatchTimes.without_exclusion)
    assert model.gain(case) == pytest.approx(run.period_s / free.period_s, rel=0.15)


@pytest.mark.parametrize("fetch", [(0, 10), (5, 5), (10, 10)])
@pytest.mark.parametrize("others", [2, 6])
def test_uneven_run_delays_do_not_look_like_waiting(fetch: tuple[int, int], others: int) -> None:
    run = Pipeline(fetch=fetch, step=(5, 0), workers=1, others=others, batches=80).run()
    measured = Measured.of(run.recent, run.stats)
    assert all(task.wait_s >= 0 for batch in measured.batches for task in batch.work.values())
    assert measured.mean("fetch").wait_s == pytest.approx(fetch[0] / 1000, abs=0.0002)


def with_waits_of_steps(run: Run, more_ms: float = 0) -> Run:
    """The run, whose computing steps stop to wait twice in each interval in which others have Python's lock.

    Every eighth step waits for `more_ms` more, and once more often.
    """
    for number, spans in enumerate(run.recorded):
        own_ms = 0 if number % 8 else more_ms
        times = {span.stage: span.stop_ns - span.start_ns for span in spans}
        waits = round(2 * (times["step"] - times.get("step.cpu", times["step"])) / 1e9 / SWITCH_S + 0.5 + bool(own_ms))
        longer = {"step": times["step"] + round(own_ms * 1e6), "step.switches": waits}
        spans[:] = [span._replace(stop_ns=span.start_ns + longer.get(span.stage, times[span.stage])) for span in spans]
    return run


LOCKED = Pipeline(fetch=(0, 12), step=(0, 4), workers=2, method="thread", locks=True, cpus=4)


@pytest.mark.parametrize("locked", [LOCKED, replace(LOCKED, workers=4)])
def test_steps_wait_for_the_lock_alone_if_some_of_them_never_stop(locked: Pipeline) -> None:
    """Steps of many operators outside Python take its lock again after each of them."""
    run = with_waits_of_steps(locked.run())
    truth = run.period_s / replace(locked, fetch=(0, 0)).run().period_s
    assert model_of(run).free_gain == pytest.approx(truth, rel=0.1)


def test_waits_that_are_too_long_for_the_lock_are_those_of_the_step() -> None:
    """As where every eighth step reads a result from a device."""
    run = with_waits_of_steps(LOCKED.run(), 400)
    assert model_of(run).measured.mean("step").wait_s == pytest.approx(0.4 / 8, rel=0.2)


def test_the_headroom_goes_both_ways() -> None:
    model = model_of(Pipeline(fetch=(40, 0), step=(10, 0), workers=1).run())
    assert model.free_gain == pytest.approx(4, rel=0.1)
    model = model_of(Pipeline(fetch=(10, 0), step=(40, 0), workers=2).run())
    assert model.free_gain == pytest.approx(1, rel=0.02)
    assert model.data_gain == pytest.approx(8, rel=0.15)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_range_contains_the_gain(workers: int) -> None:
    pipeline = Pipeline(fetch=(10, 2), slow=lambda n: 1 + n * 7 % 5, workers=workers)
    model = model_of(pipeline.run())
    for number, method in itertools.product((1, 4), ("process", "thread")):
        gain = model.range_of(model.with_setting(replace(pipeline, workers=number, method=method).context().setting))
        assert 0 < gain.low <= gain.gain <= gain.high


def test_waiting_that_no_stage_contains_is_not_explained() -> None:
    run = Pipeline(fetch=(1, 0), step=(5, 0), workers=2).run()
    for spans in run.recorded:
        spans[:] = [
            span._replace(stop_ns=span.stop_ns + 20_000_000) if span.stage == "wait" else span for span in spans
        ]
    assert model_of(run).explained_share < 0.2


@pytest.mark.parametrize(("workers", "expected"), [(1, 0.08), (2, 0.04), (3, 0.032), (8, 0.032)])
def test_copies_share_the_memory_bandwidth(workers: int, expected: float) -> None:
    copies = [BatchTimes({"collate": Task(0, 0.08, copying=1.0)}, step=Task(0.005))] * 64
    setting = EngineSetting(workers, method=PROCESS)
    assert replay(copies, setting, Machine(8, copiers=2.5)) == pytest.approx(expected, rel=0.03)
    computed = batches(cpu=0.08, step=Task(0.005))
    assert replay(computed, setting, Machine(8, copiers=2.5)) == pytest.approx(0.08 / workers, rel=0.05)


def test_more_workers_gain_nothing_where_copies_use_up_the_memory_bandwidth() -> None:
    run = Pipeline(fetch=(0, 2), collate=(0, 20), step=(1, 0), workers=2, cpus=8).run()
    nbytes = int(0.02 * 10e9)
    stats = replace(run.stats, delivered_nbytes=nbytes)

    def gain(copiers: float) -> float:
        model = model_of_stats(run, stats, CopyRates(10e9, copiers))
        return model.gain(model.with_setting(replace(model.present.setting, num_workers=6)))

    assert gain(inf) > 2.5
    assert gain(2.0) == pytest.approx(1.0, abs=0.1)
    assert gain(4.0) == pytest.approx(2.0, rel=0.15)


@given(st.integers(1, 5), st.integers(0, 1 << 30), st.lists(st.booleans(), min_size=20, max_size=80), st.booleans())
def test_batches_of_equal_bytes_give_these_whenever_workers_read_their_counters(
    workers: int, nbytes: int, reads: list[bool], together: bool
) -> None:
    recent = [list[Span]() for _ in reads]
    for worker in range(workers):
        counter = last = 0
        for number in range(worker, len(reads), 1 if together else workers):
            counter += nbytes
            if reads[number] or number < 2 * workers:
                recent[number].append(Span("files.nbytes", last, counter, worker))
                last = counter
    expected = pytest.approx(nbytes * workers if together else nbytes)
    assert files_nbytes_of(recent) == expected
    for spans in recent:  # what the loop reads is not part of a batch
        spans.append(Span("files.nbytes", 0, 1000, MAIN))
    assert files_nbytes_of(recent) == expected


def test_bytes_read_are_unknown_before_a_worker_has_read_its_counter_twice() -> None:
    assert files_nbytes_of([]) == 0
    assert files_nbytes_of([[Span("files.nbytes", 0, 100, MAIN)], [Span("files.nbytes", 100, 300, MAIN)]]) == 200
    assert files_nbytes_of([[Span("files.nbytes", 0, 100, 0)], [Span("files.nbytes", 0, 100, 1)]]) == 0


def reading(run: Run, nbytes: int) -> Run:
    """The run, whose workers read files with each batch."""
    for spans in run.recorded:
        worker = next(span.worker for span in spans if span.stage == "fetch")
        spans.append(Span("files.nbytes", 0, nbytes, worker))
    return run


def test_more_workers_gain_nothing_where_reads_use_up_the_memory_bandwidth() -> None:
    pipeline = Pipeline(fetch=(0, 20), step=(1, 0), workers=2, cpus=8)

    def gain(run: Run, copiers: float) -> float:
        model = model_of_stats(run, run.stats, CopyRates(10e9, copiers))
        return model.gain(model.with_setting(replace(model.present.setting, num_workers=6)))

    assert not verdict.copies_much(pipeline.run().stats, pipeline.run().recent)
    assert verdict.copies_much(pipeline.run().stats, reading(pipeline.run(), int(0.02 * 10e9)).recent)
    assert gain(pipeline.run(), 2.0) > 2.5
    assert gain(reading(pipeline.run(), int(0.02 * 10e9)), inf) > 2.5
    assert gain(reading(pipeline.run(), int(0.02 * 10e9)), 2.0) == pytest.approx(1.0, abs=0.1)
    assert gain(reading(pipeline.run(), int(0.01 * 10e9)), 2.0) == pytest.approx(2.0, rel=0.15)


def test_the_range_includes_what_caches_may_change_where_copies_are_the_limit() -> None:
    run = reading(Pipeline(fetch=(0, 20), step=(1, 0), workers=1, cpus=8).run(), int(0.03 * 10e9))
    model = model_of_stats(run, run.stats, CopyRates(10e9, 1.8))
    assert model.measured.cached_copying == pytest.approx(1.5, rel=0.05)
    gain = predict(model, {"num_workers": 2})
    assert gain is not None
    assert gain.gain == pytest.approx(1.8, rel=0.05)
    assert gain.low == pytest.approx(1.2, rel=0.05)
    assert gain.high == pytest.approx(2.0, rel=0.05)


def model_of_stats(run: Run, stats: Stats, rates: CopyRates) -> Model:
    model = verdict.model_of(stats, run.pipeline.context(copy_rates=rates), run.recent)
    assert model is not None
    return model


@pytest.mark.parametrize(("fetch", "locks", "outside", "gain"), [((0, 16), True, 0.0, 2.0), ((8, 8), False, 0.5, 1.0)])
def test_waiting_of_threads_is_for_the_lock_unless_it_was_seen_outside(
    fetch: tuple[int, int], locks: bool, outside: float, gain: float
) -> None:
    run = Pipeline(fetch=fetch, step=(1, 0), workers=2, method="thread", cpus=4, locks=locks).run()
    measured = replace(Measured.of(run.recent, run.stats), outside_share=outside, lock_share=0.5)
    model = Model.of(measured, run.pipeline.context())
    processes = model.with_setting(replace(model.present.setting, method=PROCESS))
    assert model.gain(processes) == pytest.approx(gain, rel=0.15)


@pytest.mark.parametrize(
    ("fetch", "step", "workers"), [((0, 8), (0, 4), 4), ((0, 4), (0, 4), 4), ((0, 16), (0, 6), 2), ((0, 8), (4, 2), 4)]
)
def test_steps_next_to_threads_wait_by_themselves_as_long_as_samples_saw_it(
    fetch: tuple[int, int], step: tuple[int, int], workers: int
) -> None:
    run = Pipeline(fetch=fetch, step=step, workers=workers, method="thread", cpus=4, locks=True).run()
    measured = replace(Measured.of(run.recent, run.stats), outside_share=0.0, lock_share=0.9)
    own_share = step[0] / 1000 / measured.mean("step").wait_s
    model = Model.of(replace(measured, step_outside_share=own_share), run.pipeline.context())
    assert model.free_gain == pytest.approx(1000 * run.period_s / sum(step), rel=0.15)


@pytest.mark.parametrize(("outside", "locked"), [(0.0, True), (0.85, False)])
def test_many_threads_that_compute_are_not_taken_for_threads_that_wait(outside: float, locked: bool) -> None:
    """By their clocks, eight threads under one lock wait for seven eighths of their time, as those of a slow server."""
    run = Pipeline(fetch=(56, 8), step=(1, 0), workers=8, method="thread", cpus=16).run()
    measured = replace(Measured.of(run.recent, run.stats), period_s=0.009, outside_share=outside, lock_share=0.9)
    model = Model.of(replace(measured, step_outside_share=1.0), run.pipeline.context())
    assert (model.measured.mean("fetch").wait_s == 0) == locked
    assert (model.gain(model.with_setting(replace(model.present.setting, method=PROCESS))) > 2) == locked


def test_what_is_left_without_a_lock_has_not_the_luck_of_its_queue() -> None:
    """Every other batch waits long for the lock. Without it, all are equal."""
    pipeline = Pipeline(
        fetch=(44, 1), slow=lambda number: 0.6 + 0.8 * (number % 16 < 8), step=(1, 0), workers=4, cpus=4
    )
    run = pipeline.run()
    measured = replace(Measured.of(run.recent, run.stats), contended_share=0.5)
    model = Model.of(measured, pipeline.context())
    ten = model.with_setting(replace(model.present.setting, num_workers=10))
    gain = model.gain(ten._replace(change=BatchTimes.without_exclusion))
    free = replace(pipeline, fetch=(21.5, 1), slow=lambda _: 1.0, workers=10)
    assert gain == pytest.approx(model.now_s / free.run().period_s, rel=0.1)


def test_processes_do_not_share_the_locks_of_threads() -> None:
    run = Pipeline(fetch=(48, 0), step=(4, 0), workers=4, method="thread").run()
    measured = replace(Measured.of(run.recent, run.stats), contended_share=0.6, outside_share=0.4)
    model = Model.of(measured, run.pipeline.context())
    setting = model.present.setting
    assert model.gain(model.with_setting(replace(setting, num_workers=8))) == pytest.approx(1.0, abs=0.05)
    assert model.gain(model.with_setting(replace(setting, method=PROCESS))) > 1.5


def test_steps_are_faster_as_far_as_workers_leave_them_cpus() -> None:
    """Four of five steps wait for CPUs of the workers; the fifth takes 2 ms."""
    steps = [Task(0, 0.002 if turn % 5 == 0 else 0.022) for turn in range(50)]
    recorded = tuple(BatchTimes({"fetch": Task(0, 0.03), "collate": Task(0, 0.01)}, step=step) for step in steps)
    measured = Measured(
        recorded, period_s=0.03, wait_s=0.01, step_s=0.018, fastest_step_s=0.002, step_threads_delay_s=0.009
    )
    setting = {"pool": PROCESSES, "num_workers": 2, "cpus": 2.0}
    crowded = Model(measured, Machine(cpus=2.0), 1.0, Context(**setting, step_threads=2))
    alone = Model(measured, Machine(cpus=2.0), 1.0, Context(**setting, step_threads=1))
    assert crowded.are_steps_crowded
    assert not alone.are_steps_crowded
    assert crowded.free_gain == pytest.approx(crowded.now_s / 0.002, rel=0.02)
    assert alone.free_gain == pytest.approx(alone.now_s / 0.018, rel=0.02)
    inline = crowded.gain(crowded.with_setting(EngineSetting()))
    assert inline > alone.gain(alone.with_setting(EngineSetting())) > 0
    assert crowded.removal_gains["fetch"] > crowded.removal_gains["collate"] > 1
    assert crowded.data_gain == pytest.approx(alone.data_gain)


def test_steps_are_not_shorter_than_those_that_other_programs_left_alone() -> None:
    steps = [Task(0.003 if turn % 5 == 0 else 0.006, 0.0001) for turn in range(50)]
    recorded = tuple(BatchTimes({"fetch": Task(0, 0.03)}, step=step) for step in steps)
    known = {"period_s": 0.03, "wait_s": 0.025, "step_s": 0.0055, "fastest_step_s": 0.0031, "step_waits": 1.0}
    measured = Measured(recorded, **known, delayed_s=0.04, late_s=0.02, others_cpus=1.0, has_cpu=True)
    model = Model.of(measured, Context(pool=PROCESSES, num_workers=2, cpus=2.0))
    assert min(batch.step.alone_s for batch in model.measured.batches) == pytest.approx(0.0031)
    assert model.free_gain <= 1.001 * model.now_s / 0.0031
