"""Threads of the steps, which compete with workers for CPUs.

All of them work on each operator of torch, and wait for the last one. If workers have the CPU of one, the others wait
for it, most of that time by computing in vain: steps take up to ten times as long as alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from feedline.loader.report.doubts import WORTH_TOGETHER
from feedline.loader.report.measured import MULTITHREADED_CPUS
from feedline.loader.report.model import Case, Model
from feedline.loader.report.remedy import LEAST_GAIN, Advice
from feedline.loader.report.replay import INLINE, BatchTimes
from feedline.loader.report.stats import Stats, count, seconds


def fewer_step_threads(model: Model, _: Stats) -> Iterator[Advice]:
    """Fewer threads for the step, where workers have their CPUs."""
    if not model.are_steps_crowded:
        return
    measured, context = model.measured, model.context
    left = _threads_left(model, context.num_workers)
    fastest_s, most_s = measured.fastest_step_s, context.step_threads / left * measured.fastest_step_s
    # Half the threads take between once and twice the time, depending on the sizes of the operators. The CPUs that the
    # replay misses are those that the threads waste, unless other programs have them.
    whole = max(model.machine.cpus, context.cpus - (measured.others_cpus or 0.0))
    usual = _gain(model, (fastest_s * most_s) ** 0.5, left, whole)
    worst = _gain(model, most_s, left, model.machine.cpus)
    # Threads that compute in vain also slow down the CPUs of the workers.
    best = _gain(model, fastest_s, left, context.cpus, WORTH_TOGETHER)
    text = (
        f"torch.set_num_threads({left}) in the training process: its {context.step_threads} threads and "
        f"{count(context.num_workers, 'worker')} share {context.cpus:g} CPUs, and wait for each other; a step takes "
        f"{seconds(measured.step_s)}, the fastest ones {seconds(fastest_s)}"
    )
    if usual >= LEAST_GAIN:
        yield Advice(text, {}, usual, worst, best, "replayed")


def _gain(model: Model, step_s: float, threads: int, cpus: float, fetching: float = 1.0) -> float:
    def changed(batch: BatchTimes) -> BatchTimes:
        return batch.with_step(step_s, threads).scale("fetch", fetching)

    return model.gain(Case(model.present.setting, replace(model.machine, cpus=cpus), changed))


def mention_of_step_threads(model: Model, number: int) -> str:
    """Words on steps whose threads lose their CPUs to `number` workers."""
    threads, left = model.context.step_threads, _threads_left(model, number)
    is_parallel = model.present.setting.method == INLINE and model.measured.mean("step").width > MULTITHREADED_CPUS
    if threads <= left or not (is_parallel or model.are_steps_crowded):
        return ""
    return (
        f"; together with torch.set_num_threads({left}) in the training process, as its {threads} threads would wait "
        "for CPUs that workers have"
    )


def _threads_left(model: Model, workers: int) -> int:
    return max(1, min(model.context.step_threads, int(model.context.cpus) - workers))
