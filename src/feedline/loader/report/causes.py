"""Causes of waiting, one function each.

The first function of `IN_ORDER` that returns a cause explains the figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from feedline.loader.report.stats import Figures, StageTimes, count, seconds, share, size

WAITS = 0.05
"""Waiting share below which a loop is not bound by its data."""


COPYING = 0.8
"""Copying share from which a device can hardly copy more."""


BUSY = 0.5
"""Busy share below which workers are not the cause of waiting."""


STRAGGLING = 5.0
"""Multiple of the median time from which a batch is a straggler."""


STRAGGLER_BATCHES = 10
"""Batches below which a single slow one proves nothing."""


TINY_S = 2e-3
"""Building time below which sending a batch between processes does not pay."""


SENDING = 0.4
"""Share of "encode" in the building time from which it is the limit."""


BARE = 0.01
"""Step time, as a share of the building time, below which the loop does not train."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of waiting, with advice.

    `conclusion` completes the headline, the sentence with the waiting share.
    """

    stage: str
    explanation: str
    advice: tuple[str, ...]
    conclusion: str = ""


def copy_bound(figures: Figures) -> Cause | None:
    """The device copies all the time, and the steps wait there."""
    stats = figures.stats
    if figures.context.device is None or figures.copying_share < COPYING:
        return None
    rate = stats.copied_nbytes / stats.copy_s
    explanation = (
        f"The device copied for {share(figures.copying_share)} of the time, "
        f"{size(stats.copied_nbytes / stats.batches)} per batch at {size(rate)}/s: its steps wait for their data "
        "there, whatever the host does."
    )
    return Cause("copy", explanation, _fewer_bytes(figures), ", but its steps wait for copies to the device")


def not_data_bound(figures: Figures) -> Cause | None:
    """The loop's own step takes most of the time."""
    if figures.stats.wait_share >= WAITS:
        return None
    explanation = (
        f"Its own step takes {seconds(figures.step_s)} per batch; building a batch takes {seconds(figures.work_s)}"
        f"{_on_workers(figures)}."
    )
    advice = ["Make the step itself faster; faster data would not be noticed."]
    if 0 < figures.needed < figures.workers - 1:
        advice.append(f"num_workers={figures.needed} would keep up as well, and leave CPUs to other work.")
    return Cause("step", explanation, tuple(advice), ": it is not bound by its data")


def startup(figures: Figures) -> Cause | None:
    """Most of the waiting was for the first batch."""
    stats = figures.stats
    lately = f"since then it has waited {share(figures.later_wait_share)} of the time"
    if figures.later_wait_share >= WAITS and (figures.later >= STRAGGLER_BATCHES or 2 * stats.startup_s < stats.wait_s):
        return None
    explanation = (
        f"Of {seconds(stats.wait_s)} of waiting, {seconds(stats.startup_s)} passed before the first batch; "
        f"{lately if figures.later else 'nothing came after it yet'}."
    )
    if figures.inline:
        return Cause("startup", explanation, ("Open files and connections once, not per sample.",))
    advice = ["If there are several epochs: persistent_workers=True starts the workers once."]
    if figures.context.pool.needs_pickle:
        advice.append("Let the dataset open and load late, in __getitem__: less is sent to the workers.")
    return Cause("startup", explanation, tuple(advice))


def transfer_bound(figures: Figures) -> Cause | None:
    """The training process is busy with receiving."""
    if figures.inline or figures.main_s < BUSY * figures.period_s:
        return None
    stage = figures.main_stage
    explanation = (
        f"The training process spends {seconds(figures.main_s)} per batch on receiving it ({stage}), of "
        f"{seconds(figures.period_s)} from batch to batch: more workers would not help."
    )
    return Cause(stage, explanation, _fewer_objects(figures))


def straggler(figures: Figures) -> Cause | None:
    """The workers could keep up, but single slow batches delay the others."""
    slow = _slowest(figures)
    if figures.inline or slow is None or figures.stats.batches < STRAGGLER_BATCHES:
        return None
    if figures.needed > figures.workers:
        return None
    stage, times = slow
    explanation = (
        f"Most batches take {seconds(times.median_s)} in the {stage} stage, but some up to {seconds(times.max_s)}. "
        "Batches are delivered in order, so the finished ones wait behind a slow one."
    )
    advice = (
        f"prefetch_factor={2 * max(figures.context.prefetch_factor, 1)} gives the slow ones more time.",
        "in_order=False delivers what is finished, if the order need not be exact.",
        f"Look for the slow samples of {figures.context.dataset}: large files, retries, cold storage.",
    )
    return Cause("straggler", explanation, advice)


def process_overhead(figures: Figures) -> Cause | None:
    """Sending batches between processes costs more than building them."""
    if not figures.context.pool.needs_pickle or figures.inline or figures.work_s >= TINY_S:
        return None
    if figures.busy_share >= BUSY and figures.share_of_work("encode") < SENDING:
        return None
    explanation = (
        f"A batch takes only {seconds(figures.work_s)} to build, less than sending it from one process to another "
        f"costs; the workers are idle {share(1 - figures.busy_share)} of the time."
    )
    advice = ["num_workers=0 or worker_method='thread' avoids that cost.", *_many_at_once(figures)]
    return Cause("overhead", explanation, tuple(advice))


def encode_bound(figures: Figures) -> Cause | None:
    """The workers spend most of their time on packing batches."""
    if figures.share_of_work("encode") < SENDING or figures.busy_share < BUSY:
        return None
    explanation = (
        f"Of the {seconds(figures.work_s)} that a batch takes its worker, {seconds(figures.each_s('encode'))} go into "
        "packing it for the training process (encode)."
    )
    return Cause("encode", explanation, _fewer_objects(figures))


def too_many_workers(figures: Figures) -> Cause | None:
    """More workers than CPUs share the time with the training process."""
    context = figures.context
    if figures.workers <= context.cpus or figures.busy_share < BUSY:
        return None
    stage = figures.building_stage
    explanation = (
        f"{count(figures.workers, 'worker')} share {count(int(context.cpus), 'CPU')}, so they take turns, also with the "
        f"training process; a batch takes {seconds(figures.work_s)} to build, most of it in the {stage} stage."
    )
    return Cause(stage, explanation, (f"num_workers={context.cpus} is as fast or faster.", *_cheaper(figures, stage)))


def built_inline(figures: Figures) -> Cause | None:
    """The training process builds every batch itself."""
    if not figures.inline:
        return None
    stage = figures.building_stage
    explanation = (
        f"The training process builds each batch itself (num_workers=0): {_cost(figures, stage)}. "
        f"The loop's own step takes {seconds(figures.step_s)} per batch."
    )
    if figures.work_s < TINY_S:
        advice = _many_at_once(figures) or ("Larger batches would share what each costs.",)
    else:
        advice = (_workers_hint(figures), *_cheaper(figures, stage))
    return Cause(stage, explanation, advice)


def too_few_workers(figures: Figures) -> Cause | None:
    """The workers are busy and do not keep up."""
    if figures.busy_share < BUSY:
        return None
    stage = figures.building_stage
    explanation = f"{_capitalize(_cost(figures, stage))} on {count(figures.workers, 'worker')}; {_demand(figures)}."
    return Cause(stage, explanation, (_workers_hint(figures), *_cheaper(figures, stage)))


def irregular(figures: Figures) -> Cause:
    """The workers could keep up, but batches or steps vary in length."""
    explanation = (
        f"The workers were busy only {share(figures.busy_share)} of the time, and still the loop waited: batches or "
        "steps of very different length, or other work on the same CPUs."
    )
    doubled = 2 * max(figures.context.prefetch_factor, 1)
    return Cause("prefetch", explanation, (f"prefetch_factor={doubled} would let the workers get further ahead.",))


IN_ORDER: tuple[Callable[[Figures], Cause | None], ...] = (
    copy_bound,
    not_data_bound,
    startup,
    built_inline,
    transfer_bound,
    straggler,
    process_overhead,
    encode_bound,
    too_many_workers,
    too_few_workers,
    irregular,
)
"""A cause that excludes others comes before them; the last one always fits."""


def _on_workers(figures: Figures) -> str:
    return "" if figures.inline else f" on {count(figures.workers, 'worker')}"


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cost(figures: Figures, stage: str) -> str:
    name = f"the {stage} stage" + (f" ({figures.context.dataset}.__getitem__)" if stage == "fetch" else "")
    batch_s = figures.each_s(stage)
    if not figures.samples_each or stage != "fetch":
        return f"{name} takes {seconds(batch_s)} per batch"
    return f"{name} takes {seconds(batch_s / figures.samples_each)} per sample, {seconds(batch_s)} per batch"


def _demand(figures: Figures) -> str:
    if figures.step_s < BARE * figures.work_s:
        return (
            f"the loop itself takes only {seconds(figures.step_s)} per batch, so this measures the loader alone: no "
            "number of workers hides its time"
        )
    return (
        f"to keep up with the training step ({seconds(figures.step_s)} per batch) it needs "
        f"{max(figures.needed, figures.workers + 1)}"
    )


def _workers_hint(figures: Figures) -> str:
    cpus = figures.context.cpus
    wanted = max(figures.needed, figures.workers + 1)
    if figures.workers >= cpus:
        return f"More workers would not help: there {'is 1 CPU' if cpus == 1 else f'are {cpus} CPUs'}, all in use."
    if wanted <= cpus:
        return f"num_workers={wanted} would keep up."
    return f"num_workers={cpus}, one for each CPU, is the most that helps here."


def _cheaper(figures: Figures, stage: str) -> tuple[str, ...]:
    if stage == "collate":
        hint = (
            "Let the dataset return arrays or tensors, and collate_fn only stack or pad them (feedline.collate); work "
            "on single samples belongs in __getitem__."
        )
        return (hint,)
    if stage != "fetch":
        return ()
    method = f"{figures.context.dataset}.__getitem__"
    advice = [f"Do less per sample in {method}: decode only what is used, and store what never changes ready-made."]
    if figures.context.pool.shares_rng:
        advice.append("Threads share Python's lock: worker_method='process' for samples that are made in Python.")
    return (*advice, *_many_at_once(figures))


def _many_at_once(figures: Figures) -> tuple[str, ...]:
    if figures.context.many_at_once:
        return ()
    return ("If samples are rows of arrays, fetch many at once: __getitems__, or feedline.datasets.ArrayFile.",)


def _fewer_bytes(figures: Figures) -> tuple[str, ...]:
    advice = ["Send fewer bytes: uint8 instead of float32, and convert on the device."]
    staged = figures.stats.staged_nbytes / max(figures.stats.copied_nbytes, 1)
    if staged >= WAITS:
        advice.append(
            f"{share(min(staged, 1.0))} of the bytes were not in page-locked memory and were copied twice: worker "
            "processes send them in memory that is."
        )
    return tuple(advice)


def _fewer_objects(figures: Figures) -> tuple[str, ...]:
    advice = [
        "Return tensors or NumPy arrays, few and large: they are sent without a copy, Python objects one by one.",
        "Send fewer bytes: uint8 instead of float32, and convert on the device.",
    ]
    if figures.context.pool.needs_pickle:
        advice.append("worker_method='thread' sends nothing between processes, if the dataset is thread-safe.")
    return tuple(advice)


def _slowest(figures: Figures) -> tuple[str, StageTimes] | None:
    slow = [
        (stage, times)
        for stage, times in figures.stats.stages.items()
        if times.in_workers
        and times.max_s >= STRAGGLING * times.median_s > 0
        # A delay shorter than one batch holds up nothing.
        and times.max_s - times.median_s >= figures.work_s
    ]
    return max(slow, key=lambda item: item[1].max_s, default=None)
