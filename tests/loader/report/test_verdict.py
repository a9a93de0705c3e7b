"""Each cause of waiting, made of synthetic spans, and what the verdict says about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline.core.telemetry import MAIN, Span
from feedline.loader.report import Context, StageTimes, Stats, Totals, diagnose
from feedline.loader.report.stats import Figures
from feedline.loader.report.verdict import WIDTH
from feedline.workers.registry import INLINE, PROCESSES, THREADS

FOUR = Context(dataset="Photos", pool=PROCESSES, num_workers=2, cpus=8)


class Run:
    """A synthetic run: each batch adds the given milliseconds to each stage."""

    def __init__(self, context: Context = FOUR, samples: int = 64) -> None:
        self.context, self.samples, self.totals = context, samples, Totals()

    def batch(self, *, step: float = 0, wait: float = 0, **stages: float) -> None:
        worker = self.totals.batches % max(self.context.num_workers, 1) if self.context.num_workers else MAIN
        spans = [
            self._span(stage, ms, MAIN if stage in {"decode", "sample"} else worker) for stage, ms in stages.items()
        ]
        spans += [self._span("step", step, MAIN), self._span("wait", wait, MAIN)]
        self.totals.add(spans, self.samples)

    def batches(self, number: int, **stages: float) -> Run:
        for _ in range(number):
            self.batch(**stages)
        return self

    def verdict(self, **known: Any) -> Any:
        return diagnose(replace(self.totals.stats(), **known), self.context)

    @staticmethod
    def _span(stage: str, ms: float, worker: int) -> Span:
        return Span(stage, 0, round(ms * 1e6), worker)


def test_nothing_delivered() -> None:
    verdict = diagnose(Stats())
    assert verdict.limiting_stage == "nothing"
    assert str(verdict) == "No batch has been delivered yet."


def test_too_few_workers() -> None:
    verdict = Run().batches(50, fetch=326.4, collate=4, step=80, wait=85).verdict()
    assert verdict.limiting_stage == "fetch"
    assert verdict.headline == "The loop waited for data 52 % of the time."
    assert verdict.explanation.startswith("The fetch stage (Photos.__getitem__) takes 5.1 ms per sample, 326 ms per")
    assert "to keep up with the training step (80 ms per batch) it needs 5." in verdict.explanation
    assert verdict.advice[0] == "num_workers=5 would keep up."


def test_more_workers_are_not_advised_beyond_the_cpus() -> None:
    context = replace(FOUR, cpus=4)
    verdict = Run(context).batches(50, fetch=1000, step=80, wait=420).verdict()
    assert verdict.advice[0] == "num_workers=4, one for each CPU, is the most that helps here."


def test_all_cpus_are_in_use() -> None:
    verdict = Run(replace(FOUR, cpus=2)).batches(50, fetch=1000, step=80, wait=420).verdict()
    assert verdict.limiting_stage == "fetch"
    assert verdict.advice[0] == "More workers would not help: there are 2 CPUs, all in use."
    assert "Photos.__getitem__" in verdict.advice[1]


def test_a_loop_without_a_training_step_is_recognized() -> None:
    verdict = Run().batches(50, fetch=100, step=0.02, wait=50).verdict()
    assert "the loop itself takes only 20 µs per batch, so this measures the loader alone" in verdict.explanation


def test_collate_bound() -> None:
    verdict = Run().batches(50, fetch=40, collate=300, step=80, wait=90).verdict()
    assert verdict.limiting_stage == "collate"
    assert "The collate stage takes 300 ms per batch" in verdict.explanation
    assert any("feedline.collate" in hint for hint in verdict.advice)


def test_packing_in_the_workers() -> None:
    verdict = Run().batches(50, fetch=40, encode=120, step=20, wait=60).verdict()
    assert verdict.limiting_stage == "encode"
    assert "Of the 160 ms that a batch takes its worker, 120 ms go into packing it" in verdict.explanation
    assert any("tensors or NumPy arrays" in hint for hint in verdict.advice)


def test_unpacking_in_the_training_process() -> None:
    verdict = Run().batches(50, fetch=40, decode=60, step=20, wait=62).verdict()
    assert verdict.limiting_stage == "decode"
    assert "more workers would not help" in verdict.explanation
    assert any("worker_method='thread'" in hint for hint in verdict.advice)


def test_threads_have_no_border_to_cross() -> None:
    verdict = Run(replace(FOUR, pool=THREADS)).batches(50, fetch=40, decode=60, step=20, wait=62).verdict()
    assert not any("worker_method='thread'" in hint for hint in verdict.advice)


def test_the_device_copies_all_the_time() -> None:
    run = Run(replace(FOUR, device="cuda")).batches(50, fetch=20, step=40, wait=0.4)
    verdict = run.verdict(copy_s=1.9, copied_nbytes=50 << 30, staged_nbytes=25 << 30)
    assert verdict.limiting_stage == "copy"
    assert (
        verdict.headline == "The loop waited for data 1.0 % of the time, but its steps wait for copies to the device."
    )
    assert "1.0 GiB per batch at 26 GiB/s" in verdict.explanation
    assert "uint8" in verdict.advice[0]
    assert verdict.advice[1].startswith("50 % of the bytes were not in page-locked memory")


def test_without_a_device_nothing_is_said_of_copies() -> None:
    assert Run().batches(50, fetch=20, step=40, wait=0.4).verdict(copy_s=1.9).limiting_stage == "step"


def test_start_up() -> None:
    run = Run()
    run.batch(fetch=30, wait=3000)
    verdict = run.batches(60, fetch=30, step=50, wait=0.5).verdict()
    assert verdict.limiting_stage == "startup"
    assert "Of 3.0 s of waiting, 3.0 s passed before the first batch" in verdict.explanation
    assert "since then it has waited 1.0 % of the time" in verdict.explanation
    assert verdict.advice[0].startswith("If there are several epochs: persistent_workers=True")
    assert "__getitem__" in verdict.advice[1]


def test_start_up_without_workers() -> None:
    run = Run(Context(dataset="Photos", cpus=8))
    run.batch(fetch=3000, wait=3000)
    verdict = run.batches(60, fetch=0.5, step=50, wait=0.5).verdict()
    assert verdict.limiting_stage == "startup"
    assert not any("persistent_workers" in hint for hint in verdict.advice)


def test_a_single_batch() -> None:
    run = Run()
    run.batch(fetch=30, wait=3000)
    verdict = run.verdict()
    assert verdict.limiting_stage == "startup"
    assert verdict.explanation.startswith("Only 1 batch seen: take this as a first impression.")
    assert "nothing came after it yet" in verdict.explanation


def test_not_data_bound() -> None:
    verdict = Run(replace(FOUR, num_workers=6)).batches(50, fetch=100, step=80, wait=1).verdict()
    assert verdict.limiting_stage == "step"
    assert verdict.headline == "The loop waited for data 1.3 % of the time: it is not bound by its data."
    assert "Its own step takes 80 ms per batch; building a batch takes 100 ms on 6 workers." in verdict.explanation
    assert verdict.advice[1] == "num_workers=2 would keep up as well, and leave CPUs to other work."


def test_no_fewer_workers_are_advised_where_they_are_needed() -> None:
    verdict = Run().batches(50, fetch=100, step=80, wait=1).verdict()
    assert len(verdict.advice) == 1


def test_a_straggler() -> None:
    run = Run()
    for number in range(100):
        slow = number % 20 == 19
        run.batch(fetch=900 if slow else 40, step=80, wait=700 if slow else 1)
    verdict = run.verdict()
    assert verdict.limiting_stage == "straggler"
    assert "Most batches take 40 ms in the fetch stage, but some up to 900 ms." in verdict.explanation
    assert verdict.advice[0].startswith("prefetch_factor=4")
    assert "in_order=False" in verdict.advice[1]
    assert "Photos" in verdict.advice[2]


def test_a_slow_moment_of_a_cheap_stage_is_no_straggler() -> None:
    run = Run().batches(50, fetch=100, collate=0.6, step=51, wait=6)
    run.batch(fetch=100, collate=9, step=51, wait=6)
    assert run.verdict().limiting_stage == "fetch"


def test_one_slow_batch_does_not_explain_too_few_workers() -> None:
    run = Run().batches(50, fetch=326, step=80, wait=85)
    run.batch(fetch=5000, step=80, wait=4000)
    assert run.verdict().limiting_stage == "fetch"


def test_process_overhead() -> None:
    verdict = Run().batches(50, fetch=0.1, collate=0.1, step=0.05, wait=0.9).verdict()
    assert verdict.limiting_stage == "overhead"
    assert "A batch takes only 200 µs to build" in verdict.explanation
    assert "num_workers=0" in verdict.advice[0]
    assert "__getitems__" in verdict.advice[1]


def test_many_at_once_is_not_advised_to_those_who_do() -> None:
    verdict = Run(replace(FOUR, many_at_once=True)).batches(50, fetch=0.2, step=0.05, wait=0.9).verdict()
    assert len(verdict.advice) == 1


def test_more_workers_than_cpus() -> None:
    context = replace(FOUR, num_workers=16, cpus=4)
    verdict = Run(context).batches(50, fetch=1600, step=20, wait=80).verdict()
    assert verdict.limiting_stage == "fetch"
    assert "16 workers share 4 CPUs" in verdict.explanation
    assert verdict.advice[0] == "num_workers=4 is as fast or faster."


def test_built_inline() -> None:
    verdict = Run(Context(dataset="Photos", cpus=8)).batches(50, fetch=320, step=80, wait=320).verdict()
    assert verdict.limiting_stage == "fetch"
    assert "(num_workers=0)" in verdict.explanation
    assert "takes 5.0 ms per sample, 320 ms per batch" in verdict.explanation
    assert verdict.advice[0] == "num_workers=4 would keep up."


def test_built_inline_and_cheap() -> None:
    verdict = Run(Context(cpus=8)).batches(50, fetch=0.5, step=0.5, wait=0.5).verdict()
    assert not any("num_workers" in hint for hint in verdict.advice)
    verdict = Run(Context(cpus=8, many_at_once=True)).batches(50, fetch=0.5, step=0.5, wait=0.5).verdict()
    assert verdict.advice == ("Larger batches would share what each costs.",)


def test_threads_are_warned_of_the_lock() -> None:
    verdict = Run(replace(FOUR, pool=THREADS)).batches(50, fetch=320, step=80, wait=80).verdict()
    assert any("Python's lock" in hint for hint in verdict.advice)


def test_idle_workers_and_a_waiting_loop() -> None:
    verdict = Run().batches(50, fetch=40, step=80, wait=20).verdict()
    assert verdict.limiting_stage == "prefetch"
    assert "The workers were busy only 20 % of the time" in verdict.explanation
    assert verdict.advice == ("prefetch_factor=4 would let the workers get further ahead.",)


def test_samples_of_unknown_number() -> None:
    verdict = Run(samples=0).batches(50, fetch=320, step=80, wait=85).verdict()
    assert "takes 320 ms per batch on 2 workers" in verdict.explanation
    assert "per sample" not in verdict.explanation


def test_few_batches_are_said_to_be_few() -> None:
    run = Run().batches(3, fetch=320, step=80, wait=85)
    assert run.verdict().explanation.startswith("Only 3 batches seen: take this as a first impression. ")


def test_deaths_and_skips_are_reported_in_any_case() -> None:
    verdict = Run().batches(50, fetch=100, step=80, wait=1).verdict(restarts=1, skipped=1200)
    assert "1 worker died and was replaced" in verdict.advice[-2]
    assert "1,200 samples could not be read and were skipped" in verdict.advice[-1]
    assert "2 workers died and were" in diagnose(Stats(restarts=2)).advice[0]


def test_a_note_of_an_engineer() -> None:
    run = Run(replace(FOUR, many_at_once=True)).batches(50, fetch=326.4, collate=4, step=80, wait=85)
    assert str(run.verdict()).splitlines() == [
        "The loop waited for data 52 % of the time.",
        "The fetch stage (Photos.__getitem__) takes 5.1 ms per sample, 326 ms per batch",
        "on 2 workers; to keep up with the training step (80 ms per batch) it needs 5.",
        "→ num_workers=5 would keep up.",
        "→ Do less per sample in Photos.__getitem__: decode only what is used, and store",
        "  what never changes ready-made.",
    ]


TIMES = st.builds(
    lambda count, each, longest, workers: StageTimes(count, count * each, each, each * longest, workers),
    st.integers(1, 10**6),
    st.floats(0, 100),
    st.floats(1, 100),
    st.sampled_from([(-1,), (0,), (0, 1), (-1, 0, 1, 2)]),
)
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
        stages=draw(st.dictionaries(st.sampled_from(["fetch", "collate", "encode", "decode", "custom"]), TIMES)),
        copied_nbytes=draw(st.integers(0, 10**15)),
        staged_nbytes=draw(st.integers(0, 10**15)),
        copy_s=draw(SECONDS),
        restarts=draw(st.integers(0, 3)),
        skipped=draw(st.integers(0, 10**6)),
    )


CONTEXTS = st.builds(
    Context,
    pool=st.sampled_from([INLINE, THREADS, PROCESSES]),
    num_workers=st.integers(0, 64),
    prefetch_factor=st.integers(0, 8),
    cpus=st.integers(1, 64),
    many_at_once=st.booleans(),
    device=st.sampled_from([None, "cuda"]),
)


@given(stats=statistics(), context=CONTEXTS)
def test_any_statistics_give_a_readable_verdict(stats: Stats, context: Context) -> None:
    verdict = diagnose(stats, context)
    assert 0 <= verdict.wait_share <= 1
    lines = str(verdict).splitlines()
    assert all(0 < len(line) <= WIDTH for line in lines)
    assert "nan" not in str(verdict)


@given(stats=statistics(), context=CONTEXTS)
def test_figures_are_shares_and_times(stats: Stats, context: Context) -> None:
    figures = Figures(stats, context)
    shares = [
        figures.later_wait_share,
        figures.busy_share,
        figures.copying_share,
        *map(figures.share_of_work, stats.stages),
    ]
    assert all(0 <= share <= 1 for share in shares)
    parts = [figures.share_of_work(name) for name, times in stats.stages.items() if figures.inline or times.in_workers]
    assert sum(parts) == pytest.approx(1) or figures.work_s < 1e-300  # too small to be divided
    assert min(figures.step_s, figures.period_s, figures.work_s, figures.main_s, figures.needed) >= 0
