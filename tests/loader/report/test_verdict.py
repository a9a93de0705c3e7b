"""The verdict on simulated loops: the limiting stage, its advice with gains, and text that fits every terminal."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from diagonals import diagonal
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rounds import rounds
from simulated_pipeline import Pipeline

from feedline.core.store_metrics import StoreStatistics
from feedline.core.telemetry import MAIN, Span
from feedline.errors import ArgumentError
from feedline.loader.report import Advice, StageTimes, Stats, Totals, Verdict, diagnose
from feedline.loader.report.advice import _rank
from feedline.loader.report.calibration import HOP_S
from feedline.loader.report.context import Context
from feedline.loader.report.measured import Measured
from feedline.loader.report.model import Model
from feedline.loader.report.remedy import LEAST_GAIN
from feedline.loader.report.replay import PROCESS, BatchTimes, EngineSetting, Machine, Task, replay, replay_step
from feedline.loader.report.sources import LineShare, SampleSource
from feedline.loader.report.verdict import limiting_stage
from feedline.workers.registry import INLINE, PROCESSES, THREADS

BASE = Pipeline(fetch=(2, 4), step=(2, 4), workers=2, batches=72)


def slow(number: int) -> float:
    return 25.0 if number % 16 == 5 else 1.0


LIMITS: dict[str, tuple[Pipeline, str, str]] = {
    "computing fetch": (replace(BASE, fetch=(0, 60)), "fetch", "do less in Photos.__getitem__"),
    "waiting fetch": (replace(BASE, fetch=(60, 1)), "fetch", "num_workers="),
    "inline fetch": (replace(BASE, fetch=(0, 20), workers=0), "fetch", "num_workers="),
    "slow collate": (replace(BASE, collate=(0, 50)), "collate", "fewer fields, or smaller ones"),
    "packing": (replace(BASE, serialize=(0, 50)), "serialize", "num_workers=0"),
    "receiving": (replace(BASE, receive=25), "receive", "num_workers=0"),
    "sampler": (replace(BASE, sample=40), "sample", "draw the order of an epoch at once"),
    "step": (replace(BASE, step=(30, 5)), "step", ""),
    "computing step": (replace(BASE, fetch=(0, 2), step=(0, 30)), "step", ""),
    "stragglers": (
        replace(BASE, fetch=(4, 0), slow=slow, workers=4, step=(8, 0), batches=240), "straggler", "prefetch_factor=",
    ),
    "threads under a lock": (
        replace(BASE, fetch=(0, 30), method="thread", locks=True, workers=2), "fetch", "worker_method='process'",
    ),
    "others take the CPUs": (replace(BASE, fetch=(0, 10), step=(0, 10), others=6), "cpus", ""),
}  # fmt: skip


@cache
def verdict_of(pipeline: Pipeline, **known: Any) -> Verdict:
    run = pipeline.run()
    return diagnose(run.stats, pipeline.context(**known), run.recent)


@pytest.mark.parametrize("name", LIMITS)
def test_the_limit_is_named_with_its_remedy_and_all_waiting_is_explained(name: str) -> None:
    pipeline, stage, remedy = LIMITS[name]
    verdict = verdict_of(pipeline)
    assert verdict.limiting_stage == stage, str(verdict)
    assert remedy in "\n".join(map(str, verdict.advice[:2])), str(verdict)
    assert verdict.explained_share >= 0.9 or stage == "step"
    assert (stage == "step") == (verdict.free_gain < 1.11)
    assert verdict.headline.startswith("The loop waits for data ")
    assert all(advice.gain <= 1.01 * verdict.free_gain for advice in verdict.advice if advice.arguments), str(verdict)


UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)  # replays make shrinking slow

SOME_S = st.floats(-5, -1.5).map(lambda power: 10**power)
TASKS = st.tuples(st.just(0.0) | SOME_S, st.just(0.0) | SOME_S).map(lambda times: Task(*times))


@dataclass(frozen=True)
class Loop:
    """A loop of equal batches on a known machine, which replays give its times."""

    work: dict[str, Task]
    sample: Task
    receive: Task
    step: Task
    overhead_s: float
    workers: int
    cpus: int

    @property
    def setting(self) -> EngineSetting:
        return EngineSetting(self.workers, method=PROCESS if self.workers else "inline")

    def period_s(self, **changes: Any) -> float:
        loop = replace(self, **changes)
        batch = BatchTimes(loop.work, loop.sample, loop.receive if self.workers else Task(), step=loop.step)
        return replay([batch], self.setting, Machine(self.cpus, latency_s=loop.overhead_s))

    @property
    def gains(self) -> dict[str, float]:
        """True gain of the loop without each stage, or without all data."""
        whole = {stage: {"work": {**self.work, stage: Task()}} for stage in self.work}
        whole |= {stage: {stage: Task()} for stage in ("sample", "receive", "step")}
        whole |= {"overhead": {"overhead_s": 0.0}, "data": {"work": {}, "sample": Task(), "receive": Task()}}
        whole["data"] |= whole["overhead"]
        now_s = self.period_s()
        return {stage: now_s / max(self.period_s(**changes), 1e-9) for stage, changes in whole.items()}

    def limit(self) -> str:
        """The stage that is named from measured times alone."""
        batch = BatchTimes(self.work, self.sample, self.receive if self.workers else Task(), step=self.step)
        step_s = replay_step([batch], self.setting, Machine(self.cpus))
        wait_s = max(self.period_s() - step_s, 0.0)
        kind = PROCESSES if self.workers else INLINE
        context = Context(pool=kind, num_workers=self.workers, cpus=self.cpus)
        delivery_s = self.overhead_s - HOP_S[PROCESS] if self.workers else None  # the rest is the way of the request
        measured = Measured((batch,), step_s + wait_s, wait_s, step_s, has_cpu=True, delivery_s=delivery_s)
        model = Model.of(measured, context)
        return limiting_stage(model, Stats())


LOOPS = st.builds(
    Loop, st.fixed_dictionaries({"fetch": TASKS, "collate": TASKS}), TASKS, TASKS,
    TASKS.filter(lambda step: step.alone_s > 0), st.floats(HOP_S[PROCESS], 0.003), st.integers(0, 4), st.integers(1, 4),
)  # fmt: skip


@settings(max_examples=rounds(20, 100), deadline=None, phases=UNSHRUNK)
@given(loop=LOOPS)
def test_the_step_is_named_where_it_limits_and_else_the_stage_that_gains_most(loop: Loop) -> None:
    named, gains = loop.limit(), loop.gains
    data = {stage: gain for stage, gain in gains.items() if stage not in ("step", "data")}
    if gains["data"] < 1.08:
        assert named == "step", gains
    if named == "step":  # nothing of the data is worth a change before it
        assert gains["data"] < 1.15 or max(data.values()) < min(gains["step"], 1.28) * 1.03, gains
        longer = replace(loop, step=loop.step + loop.step)
        # It limits all the more, unless it takes the CPU of others or ends the wait for them.
        assert (found := longer.limit()) == "step" or longer.gains[found] > 1.08, found
    else:
        assert data[named] > 0.97 * max(data.values()), (named, gains)


NO_SOURCE = SampleSource()


def with_parts(pipeline: Pipeline, source: SampleSource = NO_SOURCE, **shares: float) -> tuple[Verdict, Stats]:
    """The verdict where parts take these shares of building a batch."""
    run = pipeline.run()
    built_s = sum(run.stats.stages[stage].total_s for stage in ("fetch", "collate"))
    parts = {
        stage.replace("_", " "): StageTimes(run.stats.batches, part * built_s, 0.0, 1.0, (0, 1), 0.25 * part * built_s)
        for stage, part in shares.items()
    }
    stats = replace(run.stats, stages={**run.stats.stages, **parts})
    return diagnose(stats, pipeline.context(source=source), run.recent), stats


@pytest.mark.parametrize(
    ("parts", "stage", "words", "remedy"),
    [
        ({"decode": 0.7, "transform": 0.1}, "decode", "70 % is decoding (75 % waiting), 10 % is transforms", "decoder"),
        ({"transform": 0.8}, "transform", "80 % is transforms", "a cheaper transform for Photos"),
        (
            {"read_s3://photos": 0.6, "decode": 0.3},
            "read s3://photos",
            "60 % is reading from s3://photos",
            "faster storage",
        ),
        ({"read_files": 0.6}, "read files", "60 % is reading files", "faster storage for Photos"),
        (
            {"decode": 0.4, "read_files": 0.02},
            "fetch",
            "a batch, 40 % is decoding (75 % waiting).",
            "do less",
        ),
    ],
)
def test_the_part_that_takes_most_of_a_fetch_is_named(
    parts: dict[str, float], stage: str, words: str, remedy: str
) -> None:
    verdict, _ = with_parts(replace(BASE, fetch=(0, 60)), **parts)
    assert verdict.limiting_stage == stage, str(verdict)
    assert words in verdict.explanation, str(verdict)
    assert any(remedy in advice.text for advice in verdict.advice), str(verdict)


def test_the_gain_of_a_cheaper_part_is_that_of_its_share() -> None:
    pipeline = replace(BASE, fetch=(0, 60))
    verdict, _ = with_parts(pipeline, decode=0.75)
    (cheaper,) = (advice for advice in verdict.advice if "decoder" in advice.text)
    truth = pipeline.run().period_s / replace(pipeline, fetch=(0, 15)).run().period_s
    assert cheaper.gain == pytest.approx(truth, rel=0.15)
    assert cheaper.basis == "bound"


def test_the_own_way_comes_before_a_cheaper_decoder() -> None:
    """The part is named, but feedline's own dataset is the better remedy."""
    source = SampleSource("Image.open", "data.py:3", "feedline.datasets.ImageFolder with feedline.transforms", "PIL")
    verdict, _ = with_parts(replace(BASE, fetch=(0, 60)), source, decode=0.8)
    assert verdict.limiting_stage == "decode"
    assert any("feedline.datasets.ImageFolder" in advice.text for advice in verdict.advice), str(verdict)
    assert not any("cheaper decoder" in advice.text for advice in verdict.advice)


def test_parts_that_do_not_limit_are_not_named() -> None:
    verdict, _ = with_parts(replace(BASE, step=(30, 5)), decode=0.9)
    assert verdict.limiting_stage == "step"


@pytest.mark.parametrize(("workers", "fewer"), [(4, 2), (3, 2), (2, None)])
def test_the_fewest_workers_that_keep_up_with_a_slow_step_are_named(workers: int, fewer: int | None) -> None:
    explanation = verdict_of(replace(BASE, fetch=(50, 0), step=(30, 0), workers=workers)).explanation
    assert re.findall(r"num_workers=(\d+) would keep up", explanation) == ([] if fewer is None else [str(fewer)])


@pytest.mark.parametrize("name", ["waiting fetch", "inline fetch", "threads under a lock", "stragglers"])
def test_the_first_advice_keeps_its_promise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Simulated CPUs do not slow each other down.
    monkeypatch.setattr("feedline.loader.report.model.WORTH_EXPECTED", 1.0)
    pipeline = LIMITS[name][0]
    first = verdict_of.__wrapped__(pipeline).advice[0]
    assert first.basis == "replayed"
    names = {"num_workers": "workers", "prefetch_factor": "prefetch", "worker_method": "method"}
    changed = {names.get(name, name): value for name, value in first.arguments.items()}
    locks = {"locks": False} if "method" in changed else {}
    truth = pipeline.run().period_s / replace(pipeline, **changed, **locks).run().period_s
    assert first.gain == pytest.approx(truth, rel=0.15)
    assert first.low <= first.gain <= first.high


def test_advice_is_sorted_worth_it_and_never_set_already() -> None:
    verdict = verdict_of(replace(BASE, fetch=(60, 1)))
    keys = [(advice.basis == "bound", -round(advice.gain, 1)) for advice in verdict.advice if advice.gain >= 1.5]
    assert len(keys) > 2
    assert keys == sorted(keys)
    assert all(advice.gain >= LEAST_GAIN for advice in verdict.advice)
    assert all(advice.arguments != {"num_workers": 2} for advice in verdict.advice)
    assert len({str(advice) for advice in verdict.advice}) == len(verdict.advice)


def test_a_small_gain_does_not_come_before_the_remedy_of_the_limit() -> None:
    """Without workers the loop is a tenth faster, with a cheap sampler twice as fast."""
    verdict = verdict_of(
        replace(BASE, sample=50, fetch=(0, 1), collate=(0, 1), serialize=(0, 4), receive=10, step=(30, 0))
    )
    assert verdict.limiting_stage == "sample"
    assert "draw the order of an epoch at once" in verdict.advice[0].text, str(verdict)
    small = next(advice for advice in verdict.advice if advice.arguments)
    assert 1.05 <= small.gain < 1.25


@pytest.mark.parametrize(("epoch", "batches"), [(8, 8), (6, 60), (None, 5), (1000, 4)])
def test_a_short_run_is_not_advised_to_start_dozens_of_workers(epoch: int | None, batches: int) -> None:
    run = replace(BASE, fetch=(400, 1), workers=1, batches=batches).run()
    verdict = diagnose(run.stats, BASE.context(epoch_batches=epoch, num_workers=1), run.recent)
    numbers = [advice.arguments["num_workers"] for advice in verdict.advice if "num_workers" in advice.arguments]
    assert numbers
    assert max(numbers) <= min(batches, max((epoch or 1000) // 2, 2))


def test_a_stream_that_does_not_share_itself_out_gets_no_workers() -> None:
    for workers in (0, 1):
        pipeline = replace(BASE, fetch=(60, 1), workers=workers)
        verdict = verdict_of(pipeline, shards_itself=False)
        assert not any(advice.arguments.get("num_workers") for advice in verdict.advice)
        assert any("shard the stream" in advice.text for advice in verdict.advice)
    verdict = verdict_of(replace(BASE, fetch=(60, 1), workers=1), most_workers=3)
    assert verdict.advice[0].arguments == {"num_workers": 3}


def test_samples_that_wait_get_more_workers_than_there_are_cpus() -> None:
    verdict = verdict_of(replace(BASE, fetch=(100, 1)))
    assert verdict.advice[0].arguments["num_workers"] >= 8
    assert "99 % of that is waiting" in verdict.explanation or "99 % of it waiting" in str(verdict)


def test_samples_that_compute_get_no_more_workers_than_help() -> None:
    verdict = verdict_of(replace(BASE, fetch=(0, 60), workers=1))
    assert verdict.advice[0].arguments["num_workers"] <= 3


def test_workers_that_grow_are_noted_with_a_remedy() -> None:
    run = BASE.run()
    steady = replace(run.stats, worker_nbytes=1 << 30, worker_growth_nbytes=float(10 << 20))
    growing = replace(steady, worker_growth_nbytes=float(50 << 20))
    assert not any("grow" in note for note in diagnose(steady, BASE.context(), run.recent).notes)
    (note,) = (note for note in diagnose(growing, BASE.context(), run.recent).notes if "grow" in note)
    assert "grow by 50 MiB an epoch, to 1.0 GiB now" in note
    assert "feedline.share" in note
    context = BASE.context(memory_left_nbytes=5 << 30, epoch_batches=1000)
    slow = replace(growing, wall_s=growing.batches * 0.72)
    (note,) = (note for note in diagnose(slow, context, run.recent).notes if "grow" in note)
    assert note.endswith("At this rate, the 5.0 GiB that are left last for 102 epochs, or about 20 hours.")
    unknown = replace(context, epoch_batches=None)
    (note,) = (note for note in diagnose(slow, unknown, run.recent).notes if "grow" in note)
    assert note.endswith("last for 102 epochs.")


def test_start_up_counts_by_the_length_of_the_epoch() -> None:
    run = BASE.run()
    run.recorded[0] = [
        span._replace(stop_ns=span.start_ns + 900_000_000) if span.stage == "wait" else span
        for span in run.recorded[0]
        if span.stage != "step"
    ]
    short, long = (diagnose(run.stats, BASE.context(epoch_batches=n), run.recent) for n in (100, 10**6))
    assert short.limiting_stage == "startup"
    assert short.advice[0].arguments == {"persistent_workers": True}
    assert short.advice[0].basis == "measured"
    assert short.free_gain >= short.advice[0].gain
    assert " at the start of an epoch" in short.headline
    assert long.limiting_stage != "startup"
    kept = diagnose(run.stats, BASE.context(epoch_batches=100, persistent_workers=True), run.recent)
    assert kept.limiting_stage != "startup"


def test_stores_that_send_everything_again_get_a_cache() -> None:
    run = replace(BASE, fetch=(60, 1)).run()
    stats = replace(run.stats, stores=StoreStatistics(requests=900, nbytes=1 << 30))
    assert any("cache=" in advice.text for advice in diagnose(stats, BASE.context(), run.recent).advice)
    warm = replace(stats, stores=StoreStatistics(requests=9, nbytes=1 << 20, cache_hits=990, cache_misses=10))
    assert not any("cache" in advice.text for advice in diagnose(warm, BASE.context(), run.recent).advice)


def test_a_known_library_gets_the_own_answer_with_its_line() -> None:
    source = SampleSource("Image.open", "photos.py:31", "feedline.datasets.ImageFolder decodes less")
    verdict = verdict_of(replace(BASE, fetch=(0, 60)), source=source)
    assert any(
        "ImageFolder decodes less: Photos.__getitem__ uses Image.open (photos.py:31)" in str(advice)
        for advice in verdict.advice
    )


def test_a_users_collate_function_is_named_and_the_default_one_is_not_advised_to_stack() -> None:
    slow_collate = replace(BASE, collate=(0, 50))
    own = verdict_of(slow_collate, collate_fn="pad_documents").advice
    assert any("a cheaper pad_documents" in advice.text and "only stack or pad" in advice.text for advice in own)
    assert not any("stack or pad" in advice.text for advice in verdict_of(slow_collate).advice)


@pytest.mark.parametrize("library", ["scipy", ""], ids=["of a library", "of the user's own"])
def test_the_line_that_takes_most_is_advised_and_the_own_answer_leaves_it(library: str) -> None:
    pipeline = replace(BASE, fetch=(0, 60))
    source = SampleSource("Image.open", "photos.py:31", "feedline.datasets.ImageFolder decodes less", "PIL")
    lines = (
        LineShare(0.6, "photos.py:40", "x = rotate(x, angle)", "fetch", library),
        LineShare(0.2, "photos.py:31", "x = np.array(Image.open(path))", "fetch", "PIL"),
    )
    verdict = verdict_of(pipeline, source=source, lines=lines)
    line = next(advice for advice in verdict.advice if "photos.py:40, 60 % of building a batch" in advice.text)
    own = next(advice for advice in verdict.advice if "ImageFolder" in advice.text)
    assert line.basis == own.basis == "bound"
    now_s = pipeline.run().period_s
    assert line.gain == pytest.approx(now_s / replace(pipeline, fetch=(0, 24)).run().period_s, rel=0.15)
    assert own.gain == pytest.approx(now_s / replace(pipeline, fetch=(0, 36)).run().period_s, rel=0.15)
    whole = verdict_of(pipeline, source=source).advice
    assert next(advice for advice in whole if "ImageFolder" in advice.text).gain > 1.5 * own.gain
    called_in_c = verdict_of(pipeline, source=replace(source, library="lmdb"), lines=(lines[0],)).advice
    assert next(advice for advice in called_in_c if "ImageFolder" in advice.text).gain > 1.5 * own.gain
    alone = verdict_of(pipeline, source=source, lines=(lines[0]._replace(share=1.0),)).advice
    assert not any("ImageFolder" in advice.text for advice in alone)
    reads = verdict_of(pipeline, source=source, lines=lines[1:]).advice
    assert not any("do less in photos.py" in advice.text for advice in reads)


def test_a_prediction_that_may_be_a_loss_comes_after_a_better_bound() -> None:
    sampler = Advice("a faster sampler", {}, 1.58, 1.0, 1.6, "bound")
    inline = Advice("sends nothing", {"num_workers": 0}, 1.27, 0.61, 1.3)
    assert sorted([inline, sampler], key=_rank) == [sampler, inline]
    certain = replace(inline, low=1.2)
    assert sorted([sampler, certain], key=_rank) == [certain, sampler]


def test_a_lock_is_not_also_advised_as_a_fetch() -> None:
    run = replace(BASE, fetch=(60, 0), workers=4).run()
    stats = replace(run.stats, contended_share=0.6)
    advice = diagnose(stats, run.pipeline.context(), run.recent).advice
    assert any("hold the lock in Photos.__getitem__" in each.text for each in advice)
    assert not any("do less in" in each.text for each in advice)


def test_no_workers_run_no_init_function() -> None:
    packing = replace(BASE, serialize=(0, 50))
    for initializes in (False, True):
        (inline,) = (
            a for a in verdict_of(packing, initializes=initializes).advice if a.arguments == {"num_workers": 0}
        )
        assert inline.text.endswith("worker_init_fn does not run then") == initializes


def test_worker_processes_may_decode_faster_than_the_training_process() -> None:
    inline = replace(BASE, fetch=(0, 60), workers=0)
    first = verdict_of(inline, accelerates=True).advice[0]
    plain = verdict_of(inline).advice[0]
    assert first.arguments["num_workers"] >= 1
    assert "feedline's kernels" in first.text
    assert first.gain == plain.gain
    assert first.high > 1.5 * plain.high
    assert "kernels" not in str(verdict_of(replace(inline, workers=1), accelerates=True).advice[0])


def test_threads_that_wait_for_servers_gain_what_the_lock_of_python_leaves() -> None:
    pipeline = replace(BASE, fetch=(110, 8), step=(4, 0), workers=2, method="thread", locks=True, batches=400)
    first = verdict_of(pipeline).advice[0]
    workers = first.arguments["num_workers"]
    truth = pipeline.run().period_s / replace(pipeline, workers=workers).run().period_s
    assert workers > 4
    assert first.gain == pytest.approx(truth, rel=0.2)


def test_a_stream_is_read_by_its_iterator() -> None:
    run = replace(BASE, fetch=(0, 40)).run()
    text = str(diagnose(run.stats, BASE.context(reads_by="__iter__", shards_itself=False), run.recent))
    assert "Photos.__iter__" in text
    assert "__getitem" not in text


def test_threads_of_the_workers_that_outnumber_the_cpus() -> None:
    totals = Totals()
    for number in range(60):
        start, worker = number * 40_000_000, number % 4
        spans = [Span("fetch", 0, 150_000_000, worker), Span("fetch.cpu", 0, 450_000_000, worker)]
        spans += [Span("step", start, start + 10_000_000), Span("wait", start + 10_000_000, start + 100_000_000)]
        totals.add(spans, 8)
    context = Context(pool=PROCESSES, num_workers=4, cpus=4)
    verdict = diagnose(totals.stats(), context, totals.recent)
    assert "4 workers with 3.0 threads each share 4 CPUs" in verdict.explanation
    assert any("OMP_NUM_THREADS=1" in advice.text for advice in verdict.advice)


def test_threads_of_workers_gain_no_more_than_free_data() -> None:
    totals = Totals()
    for number in range(60):
        start, worker = number * 100_000_000, number % 2
        spans = [Span("fetch", start, start + 10_000_000, worker), Span("fetch.cpu", 0, 40_000_000, worker)]
        totals.add([*spans, Span("step", start, start + 100_000_000), Span("wait", start, start + 200_000)], 10)
    context = Context(pool=PROCESSES, num_workers=2, cpus=2, epoch_batches=60)
    verdict = diagnose(totals.stats(), context, totals.recent)
    assert any("OMP_NUM_THREADS" in advice.text for advice in verdict.advice)
    assert all(advice.gain <= verdict.free_gain for advice in verdict.advice)


def test_a_loop_without_workers_is_not_advised_to_change_their_method() -> None:
    pipeline = replace(BASE, fetch=(0, 1), step=(5, 0), workers=0)
    run = pipeline.run()
    copied = replace(run.stats, copy_s=0.5 * run.stats.wall_s, copied_nbytes=50 << 30, staged_nbytes=50 << 30)
    verdict = diagnose(copied, pipeline.context(device="cuda"), run.recent)
    assert verdict.limiting_stage == "copy"
    assert not any("worker_method" in advice.arguments for advice in verdict.advice)


def test_values_that_a_loader_refuses_have_no_prediction() -> None:
    run = BASE.run()
    verdict = diagnose(run.stats, BASE.context(), run.recent)
    for arguments in (
        {"num_workers": "auto"}, {"num_workers": -1}, {"num_workers": 2.5}, {"num_workers": None},
        {"prefetch_factor": "x"}, {"prefetch_factor": 0},
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match="nothing can be predicted for"):
            verdict.predict(**arguments)
    assert verdict.predict(num_workers=4, prefetch_factor=None) == verdict.predict(num_workers=4, prefetch_factor=2)
    alone = replace(BASE, workers=0)
    with pytest.raises(ArgumentError, match="nothing can be predicted for persistent_workers=True"):
        diagnose(alone.run().stats, alone.context(), alone.run().recent).predict(persistent_workers=True)


def test_workers_without_a_partition_gain_nothing() -> None:
    alone = replace(BASE, fetch=(100, 0), workers=0)
    verdict = diagnose(alone.run().stats, alone.context(most_workers=2), alone.run().recent)
    assert verdict.predict(num_workers=16) == verdict.predict(num_workers=2)


def test_a_quota_that_stops_the_job_is_the_limit_of_its_workers() -> None:
    run = replace(BASE, fetch=(0, 20), cpus=1).run()
    verdict = diagnose(run.stats, replace(BASE, cpus=1).context(throttled=True), run.recent)
    assert any("a CPU quota of 2, not 1" in advice.text for advice in verdict.advice)
    assert verdict.limiting_stage == "cpus"
    assert "The quota of 1 CPUs is used up" in verdict.explanation or "the quota of 1 CPUs" in verdict.explanation
    assert not any("without other programs" in advice.text for advice in verdict.advice)
    before = replace(run.stats, throttled_share=0.0)  # it was throttled before the loop began
    assert diagnose(before, replace(BASE, cpus=1).context(throttled=True), run.recent).limiting_stage == "fetch"


def test_the_device_copies_all_the_time() -> None:
    on_threads = replace(BASE, step=(40, 0), method="thread")
    run = on_threads.run()
    copied = replace(run.stats, copy_s=0.95 * run.stats.wall_s, copied_nbytes=50 << 30, staged_nbytes=25 << 30)
    verdict = diagnose(copied, on_threads.context(device="cuda"), run.recent)
    assert verdict.limiting_stage == "copy"
    assert "Its steps wait for copies to the device." in verdict.headline
    (smaller,) = (advice for advice in verdict.advice if "uint8" in advice.text)
    assert smaller.gain == pytest.approx(1 / (0.05 + 0.95 / 4), rel=0.05)
    assert any("50 % of the bytes were copied twice" in advice.text for advice in verdict.advice)
    assert diagnose(copied, on_threads.context(), run.recent).limiting_stage == "step"
    hidden = replace(copied, hidden_copy_s=0.94 * run.stats.wall_s)
    verdict = diagnose(hidden, on_threads.context(device="cuda"), run.recent)
    assert verdict.limiting_stage == "step", "copies behind the step cost nothing"
    assert not any("uint8" in advice.text for advice in verdict.advice)


def test_what_is_not_explained_is_said() -> None:
    run = Pipeline(fetch=(1, 0), step=(5, 0), workers=2).run()
    for spans in run.recorded:
        spans[:] = [s._replace(stop_ns=s.stop_ns + 20_000_000) if s.stage == "wait" else s for s in spans]
    verdict = diagnose(run.stats, run.pipeline.context(), run.recent)
    assert verdict.limiting_stage == "overhead"
    assert verdict.explained_share < 0.2
    assert "Not explained: " in verdict.notes[-1]


def test_nothing_delivered() -> None:
    verdict = diagnose(Stats())
    assert verdict.limiting_stage == "nothing"
    assert str(verdict) == "No batch has been delivered yet."


def test_a_single_batch_is_a_first_impression() -> None:
    run = replace(BASE, batches=1).run()
    verdict = diagnose(run.stats, BASE.context(), run.recent)
    assert verdict.limiting_stage == "startup"
    assert "first impression" in verdict.explanation
    few = verdict_of(replace(BASE, batches=5))
    assert few.explanation.startswith("Only 5 batches seen: take this as a first impression.")
    run = replace(BASE, batches=5).run()
    many = diagnose(run.stats, replace(BASE.context(), earlier_batches=5), run.recent)  # of epochs as short as this one
    assert "Only" not in many.explanation


def test_deaths_and_skips_are_noted_in_any_case() -> None:
    run = BASE.run()
    notes = diagnose(replace(run.stats, restarts=1, skipped=1200), BASE.context(), run.recent).notes
    assert "1 worker died and was replaced" in notes[0]
    assert "1,200 samples could not be read and were skipped" in notes[1]
    assert "2 workers died and were" in diagnose(Stats(restarts=2)).notes[0]


@pytest.mark.parametrize(
    ("name", "width"), diagonal(["waiting fetch", "sampler", "step", "others take the CPUs"], [40, 120])
)
def test_the_text_fits_its_width(name: str, width: int) -> None:
    text = verdict_of(LIMITS[name][0]).text(width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "nan" not in text


def test_an_engineer_reads_change_times_and_gain_in_one_line() -> None:
    lines = verdict_of(replace(BASE, fetch=(80, 0), step=(10, 0))).text().splitlines()
    (line,) = [line for line in lines if line.startswith("→ num_workers=8")]
    assert "40 ms → 10 ms" in line
    assert re.search(r" [34]\.\d × \(", line)


def test_a_stream_without_the_signs_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = verdict_of(replace(BASE, fetch=(60, 1)))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    print(verdict)  # raises UnicodeEncodeError where a sign is left
    assert "-> num_workers" in str(verdict)
    print(replace(verdict, explanation="Why: fetch (Bilder für 画像)"))


TIMES = st.builds(
    lambda count, each, longest, workers: StageTimes(count, count * each, each, each * longest, workers),
    st.integers(1, 10**6), st.floats(0, 100), st.floats(1, 100), st.sampled_from([(-1,), (0,), (0, 1), (-1, 0, 1, 2)]),
)  # fmt: skip
SECONDS = st.floats(0, 1e6)


@st.composite
def statistics(draw: Any) -> Stats:
    startup_s, later_s, step_s = draw(SECONDS), draw(SECONDS), draw(SECONDS)
    return Stats(
        batches=draw(st.integers(0, 10**6)),
        samples=draw(st.integers(0, 10**9)),
        wall_s=startup_s + later_s + step_s,
        wait_s=startup_s + later_s,
        startup_s=startup_s,
        step_s=step_s,
        step_cpu_s=draw(st.none() | SECONDS),
        stages=draw(st.dictionaries(st.sampled_from(["fetch", "collate", "serialize", "receive", "custom"]), TIMES)),
        copied_nbytes=draw(st.integers(0, 10**15)),
        staged_nbytes=draw(st.integers(0, 10**15)),
        copy_s=draw(SECONDS),
        restarts=draw(st.integers(0, 3)),
    )


CONTEXTS = st.builds(
    Context,
    pool=st.sampled_from([INLINE, THREADS, PROCESSES]),
    num_workers=st.integers(0, 8),
    prefetch_factor=st.integers(0, 4),
    cpus=st.sampled_from([0.5, 1.0, 8.0]),
    fetches_many=st.booleans(),
    device=st.sampled_from([None, "cuda"]),
    throttled=st.booleans(),
)


@settings(max_examples=rounds(10, 100), deadline=None, phases=UNSHRUNK)
@given(stats=statistics(), context=CONTEXTS)
def test_any_statistics_give_a_readable_verdict(stats: Stats, context: Context) -> None:
    verdict = diagnose(stats, context)
    assert 0 <= verdict.wait_share <= 1
    assert 0 <= verdict.explained_share <= 1
    assert all(len(line) <= 80 for line in str(verdict).splitlines())
    assert "nan" not in str(verdict)
    assert all(advice.low <= advice.high for advice in verdict.advice)


def test_advice_is_text_arguments_and_figures() -> None:
    advice = Advice("because", {"num_workers": 4}, 2.0, 1.8, 2.2, "replayed")
    assert str(advice) == "num_workers=4: because"
    assert str(Advice("a cheaper collate")) == "a cheaper collate"
    with pytest.raises(AttributeError):
        advice.gain = 3.0  # type: ignore[misc]


def test_the_loop_is_the_worker_of_its_own_stages() -> None:
    assert all(span.worker == MAIN for spans in BASE.run().recent for span in spans if span.stage in ("step", "sample"))


def test_the_use_of_the_gpu_is_said_where_it_is_known() -> None:
    run = BASE.run()
    assert "GPU" not in str(diagnose(run.stats, BASE.context(), run.recent))
    known = replace(run.stats, gpu_utilization=0.34)
    notes = diagnose(known, BASE.context(), run.recent).notes
    assert notes[-1].endswith("The GPU was in use for 34 % of the latest second.")
