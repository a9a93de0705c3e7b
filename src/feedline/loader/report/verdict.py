"""Diagnosis of a loader: its limiting stage, with advice."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any

from feedline.core.telemetry import Span
from feedline.core.wrapping import WIDTH, columns, printable
from feedline.errors import ArgumentError
from feedline.loader.report import layout
from feedline.loader.report.advice import advise, is_oversubscribed, predict
from feedline.loader.report.context import THROTTLED_SHARE, Context
from feedline.loader.report.copies import copies_of
from feedline.loader.report.incidents import incidents
from feedline.loader.report.measured import BUILD_STAGES, Measured, files_nbytes_of
from feedline.loader.report.model import Gain, Model
from feedline.loader.report.parts import STAGES_WITH_PARTS, dominant_part, sentence
from feedline.loader.report.remedy import LEAST_GAIN, Advice
from feedline.loader.report.replay import INLINE, LEAST_REPLAYED, MAIN_STAGES, THREAD, BatchTimes, Task
from feedline.loader.report.sources import LineShare
from feedline.loader.report.stats import Stats, count, seconds, share, size

FEW_BATCHES = 10
"""Number of batches below which a verdict is called a first impression."""


EXPLAINED_SHARE = 0.9
"""Share of the waiting that the stages should explain."""


_LIMIT_GAIN = 1 / 0.9
"""Least gain without a stage at which this stage is the limit: below it, the step takes nine tenths of the time."""


_OVERHEAD_GAIN = 1.25
"""The same for the overhead: it is no work, but what the stages leave of the waiting, such as wake-ups on busy CPUs."""


_COPY_GAIN = 1.25
"""Least gain without waiting for copies to the device at which these copies are the limit."""


STRAGGLER_RATIO = 3.0
"""Ratio of the 99th to the 50th percentile above which slow batches may be the limit."""


_BANDWIDTH_SHARE = 0.8
"""Share of the memory bandwidth in use above which the explanation names the bandwidth."""


_QUOTA_GAIN = 1.25
"""Least gain of twice the quota at which a used-up quota is the limit."""


_NOTHING_S = 1e-9
"""Resolution of the clock: no batch arrives faster."""


PageWriter = Callable[["str | os.PathLike[str]", "Verdict"], None]
"""Writes the page on a run to a path."""


@dataclass(frozen=True)
class Verdict:
    """The limit of a loop, and advice with predicted gains.

    `str()` wraps it for the terminal, or at 80 columns for files, with the characters that standard output can show.
    """

    limiting_stage: str
    """A stage ("sample", "fetch", "collate", "serialize", "receive", "copy", "device_decode", "device_transform"), or
    "step", "startup", "straggler", "overhead", "cpus"; "nothing" before the first batch. In place of "fetch" or
    "collate", the part that takes most of it ("read s3://bucket", "read files", "decode", "transform"), where feedline
    reads the samples."""
    wait_share: float
    """Waiting time of the loop as a share of the wall time, 0 to 1."""
    headline: str
    explanation: str
    advice: tuple[Advice, ...] = ()
    """Worthwhile changes: predictions first, then bounds, each sorted by gain.

    Only a part of a bound may be reached: next to predictions below 1.25, a bound counts with half of its gain.
    """
    notes: tuple[str, ...] = ()
    """Restarts, skips, and the basis of the verdict."""
    period_s: float = 0.0
    """Seconds from batch to batch."""
    free_gain: float = 1.0
    """Speed of the loop if data were free, as a multiple of today's; free data needs no start of workers."""
    data_gain: float = 1.0
    """Speed of the data alone, as a multiple of the loop's."""
    explained_share: float = 1.0
    """Share of the waiting that the recorded stages explain, 0 to 1."""
    lines: tuple[LineShare, ...] = ()
    """The user's lines that take the time of samples, for `report(lines=True)`."""
    raised: str = ""
    """The error that ended the loop, with the sample, its address and the remedy; empty if the loader raised none, or
    the loop went on."""
    model: InitVar[Model | None] = None
    """See `replayed`."""
    write_page: InitVar[PageWriter | None] = None
    """See `to_html`."""

    def __post_init__(self, model: Model | None, write_page: PageWriter | None) -> None:
        # No fields: `dataclasses.asdict` gives plain values only. `dataclasses.replace` reads them under these names.
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "write_page", write_page)

    @property
    def replayed(self) -> Model | None:
        """The model of the loop; None before the second batch."""
        model: Model | None = self.__dict__["model"]
        return model

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page on the run so far, with this verdict.

        The page is that of `DataLoader.report_html`. ArgumentError for a verdict that no loader made.
        """
        write_page: PageWriter | None = self.__dict__["write_page"]
        if write_page is None:
            raise ArgumentError("this verdict has no loader: only those of loader.report() have a page")
        write_page(path, self)

    def predict(self, **arguments: Any) -> Gain:
        """Predicted gain of other arguments, such as `predict(num_workers=8)`, with its range.

        The model knows `num_workers`, `prefetch_factor`, `in_order`, `worker_method` and `persistent_workers=True`.
        ArgumentError for others, and before the second batch.
        """
        gain = None if self.replayed is None else predict(self.replayed, arguments)
        if gain is None:
            words = ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "no change"
            raise ArgumentError(f"nothing can be predicted for {words}: {_why_not(self.replayed)}")
        return gain

    def text(self, width: int = WIDTH) -> str:
        """The verdict in lines of at most `width` columns."""
        parts = [layout.paragraph(part, width) for part in (self.raised, self.headline, self.explanation)]
        parts.append("\n".join(layout.table(self.advice, self.period_s, width)))
        parts.append(self.lines_text(width))
        parts.append("\n".join(layout.paragraph(note, width) for note in self.notes))
        return "\n\n".join(part for part in parts if part)

    def lines_text(self, width: int = WIDTH) -> str:
        """The user's costly lines, below a title; empty if unknown.

        Each is cut to `width` columns.
        """
        lines = [f"{share(each.share):>5}  {each.where}  {each.text}"[:width] for each in self.lines]
        return "\n".join(["Lines that take the time of samples:", *lines]) if lines else ""

    def __str__(self) -> str:
        return printable(self.text(columns()), getattr(sys.stdout, "encoding", None))


def _why_not(model: Model | None) -> str:
    if model is None:
        return "the loop has received fewer than two batches"
    return "the model knows num_workers, prefetch_factor, in_order, worker_method and persistent_workers=True"


def diagnose(
    stats: Stats, context: Context | None = None, recent: Sequence[Sequence[Span]] = (), *, quick: bool = False
) -> Verdict:
    """Find the limiting stage, and replay the remedies.

    `recent` are the spans of the latest batches; without them the means of the totals stand for every batch. With
    `quick`, only the last batches count and gains have no range: it takes a tenth of the time.
    """
    context = context or Context()
    if not stats.batches:
        return Verdict("nothing", 0.0, "No batch has been delivered yet.", "", notes=tuple(incidents(stats, context)))
    model = model_of(stats, context, recent, quick=quick)
    if model is None:
        return _after_one_batch(stats, context)
    stage = limiting_stage(model, stats)
    part = dominant_part(stats, stage)
    return Verdict(
        stage if part is None else part.stage,
        stats.wait_share,
        _headline(model, stats, stage),
        _explanation(model, stats, stage),
        advise(model, stats),
        (*incidents(stats, context), _basis(model, stats)),
        model.now_s,
        _headroom(model),
        model.data_gain,
        model.explained_share,
        model=model,
    )


def model_of(stats: Stats, context: Context, recent: Sequence[Sequence[Span]], *, quick: bool = False) -> Model | None:
    """The model of the latest batches; None if there are too few."""
    if context.epoch_batches is None and context.shards_itself:
        context = replace(context, epoch_batches=stats.batches)
    if stats.throttled_share is not None:
        context = replace(context, throttled=stats.throttled_share > THROTTLED_SHARE)
    # Threads that build one batch together have no turns, and others wait for Python's lock.
    ahead = 0 if context.setting.method == THREAD else context.setting.ahead
    measured = Measured.of(recent[-LEAST_REPLAYED:] if quick else recent, stats, ahead)
    if context.copy_rates is not None:
        measured = measured.with_copying(stats.delivered_nbytes or 0.0, context.copy_rates.thread_rate)
    return (
        Model.of(measured, context, has_ranges=not quick)
        if measured.batches and measured.period_s > _NOTHING_S
        else None
    )


def limiting_stage(model: Model, stats: Stats) -> str:
    """The stage whose removal gains most, the step among them.

    It is the step if that takes nearly all of the time, or gains more than any stage of the data that is worth a limit.
    """
    gains = {**model.removal_gains, "overhead": model.gain(model.removal("latency"))}
    if copies_of(stats, model).gain(0.0) >= max(_COPY_GAIN, *gains.values()):
        return "copy"
    if _startup_gain(model) >= max(_LIMIT_GAIN, *gains.values()):
        return "startup"
    if model.free_gain < _LIMIT_GAIN:
        return "step"
    if _is_preempted(model):
        return "cpus"
    stage = max(gains, key=gains.__getitem__)
    if stage in BUILD_STAGES and _straggles(model):
        return "straggler"
    least = _OVERHEAD_GAIN if stage == "overhead" else _LIMIT_GAIN
    return "step" if gains[stage] < min(least, model.data_gain) else stage


def _is_preempted(model: Model) -> bool:
    """True if dedicated CPUs would help the loop most."""
    if model.is_throttled:
        return model.gain(model.present._replace(machine=model.twice_the_cpus)) >= _QUOTA_GAIN
    gain = model.gain(model.present._replace(machine=replace(model.machine, cpus=model.context.cpus)))
    return gain >= 1.5 and gain - 1 >= 0.5 * (model.free_gain - 1)


def _straggles(model: Model) -> bool:
    """True if the same work, evenly spread, would help most."""
    if model.present.setting.method == INLINE:
        return False
    works = [batch.whole_work for batch in model.measured.batches]
    times = sorted(work.alone_s for work in works)
    if times[-1 - len(times) // 100] < STRAGGLER_RATIO * times[len(times) // 2]:
        return False
    mean = Task(sum(work.wait_s for work in works) / len(works), sum(work.cpu_s for work in works) / len(works))

    def smooth(batch: BatchTimes) -> BatchTimes:
        return replace(batch, work={"fetch": mean})

    gain = model.gain(model.present._replace(change=smooth))
    return gain >= LEAST_GAIN and gain - 1 >= 0.5 * (model.free_gain - 1)


def _after_one_batch(stats: Stats, context: Context) -> Verdict:
    return Verdict(
        "startup",
        stats.wait_share,
        f"The loop waited {seconds(stats.startup_s)} for its first batch.",
        "No batch has followed yet: take this as a first impression.",
        notes=tuple(incidents(stats, context)),
    )


def _headroom(model: Model) -> float:
    """Gain of free data over whole epochs."""
    return model.free_gain * _startup_gain(model)


def _startup_gain(model: Model) -> float:
    """Gain of epochs that begin at once."""
    return 1.0 if model.context.persistent_workers else model.without_startup()


def _headline(model: Model, stats: Stats, stage: str) -> str:
    measured = model.measured
    begins = f", and {seconds(model.startup_s)} at the start of an epoch" if _startup_gain(model) >= _LIMIT_GAIN else ""
    waits = (
        f"The loop waits for data {share(stats.wait_share)} of the time: {seconds(measured.step_s)} of step and "
        f"{seconds(measured.wait_s)} of waiting per batch{begins}."
    )
    if stage == "copy" and copies_of(stats, model).exposed_s:
        return f"{waits} Its steps wait for copies to the device."
    free = f"with free data it would be {layout.number(_headroom(model))} × as fast"
    if stage == "step":
        return f"{waits} The step limits it: {free}, and the data alone is {layout.number(model.data_gain)} × as fast."
    return f"{waits} {free.capitalize()}."


def _explanation(model: Model, stats: Stats, stage: str) -> str:
    caution = ""
    if stats.batches + model.context.earlier_batches < FEW_BATCHES:
        caution = f"Only {count(stats.batches, 'batch')} seen: take this as a first impression. "
    return caution + _EXPLANATIONS.get(stage, _explain_stage)(model, stats, stage)


def _explain_stage(model: Model, stats: Stats, stage: str) -> str:
    context, measured, setting = model.context, model.measured, model.present.setting
    task = measured.mean(stage)
    name = f"{stage} ({context.dataset}.{context.reads_by})" if stage == "fetch" else stage
    samples = stats.samples / stats.batches
    each = f", {seconds(task.alone_s / samples)} a sample" if samples > 1 and stage == "fetch" else ""
    waiting = (
        f", and {share(task.wait_s / task.alone_s)} of that is waiting" if task.wait_s > 0.03 * task.alone_s else ""
    )
    place = f" ({context.source.where}, {context.source.call})" if waiting and context.source.where else ""
    where = _where(setting.num_workers, setting.method, stage)
    if task.held_s and model.is_locked:
        waits = share(measured.contended_share)
        return (
            f"Why: {name} holds a lock for {seconds(task.held_s)} a batch, and one worker at a time has it: "
            f"{count(setting.num_workers, 'worker')} wait for it {waits} of their time. {_machine(model)}"
        )
    parts = f"{sentence(stats)} " if stage in STAGES_WITH_PARTS and sentence(stats) else ""
    if is_oversubscribed(model):
        robbed = measured.preempted_share
        late = f" Those that are ready to run wait for a CPU for {share(robbed)} of their time." if robbed > 0.1 else ""
        return f"Why: the threads that {name} starts outnumber the CPUs. {parts}{_machine(model)}{late}"
    return f"Why: {name} takes {seconds(task.alone_s)} a batch{each}{waiting}{place}, {where}. {parts}{_machine(model)}"


def _where(workers: int, method: str, stage: str) -> str:
    if stage in MAIN_STAGES or method == INLINE:
        return "in the training process, where no worker helps" if method != INLINE else "in the training process"
    return f"on {count(workers, 'worker')}"


def _machine(model: Model) -> str:
    """CPU usage, in one sentence."""
    cpus, measured = model.context.cpus, model.measured
    if model.present.setting.method == THREAD and model.machine.gil_share >= 1:
        return "Its threads hold Python's lock in turn: only one of them computes at a time."
    copiers = model.machine.copiers
    if copiers < _BANDWIDTH_SHARE * cpus and measured.copiers > _BANDWIDTH_SHARE * copiers:
        return f"Its copies use the memory bandwidth, which {copiers:.1f} threads use up."
    width = measured.mean("fetch").width
    demand = model.present.setting.num_workers * width
    if demand > cpus and (is_oversubscribed(model) or measured.concurrency > 0.8 * cpus):
        threads = f" with {width:.1f} threads each" if width > 1.2 else ""
        return f"{count(model.present.setting.num_workers, 'worker')}{threads} share {cpus:g} CPUs with the step."
    if model.is_throttled:
        return f"The quota of {cpus:g} CPUs is used up."
    if measured.preempted_share > 0.1:
        return f"Processes were ready to run but had no CPU for {share(measured.preempted_share)} of their time."
    return f"The CPUs are idle {share(max(1 - measured.concurrency / cpus, 0.0))} of the time."


def _explain_step(model: Model, _: Stats, stage: str) -> str:
    measured, setting = model.measured, model.present.setting
    built_s = sum(measured.mean(each).alone_s for each in BUILD_STAGES)
    on = "" if setting.method == INLINE else f" on {count(setting.num_workers, 'worker')}"
    text = (
        f"Why: its own {stage} takes {seconds(measured.step_s)} a batch; building one takes {seconds(built_s)}{on}. "
        "Make the step itself faster."
    )
    fewer = _fewer_workers(model)
    return f"{text} num_workers={fewer} would keep up as well." if fewer else text


def _fewer_workers(model: Model) -> int:
    """The least number of workers that is as fast; 0 for none."""
    setting = model.present.setting
    for number in range(1, setting.num_workers) if setting.method != INLINE else ():
        if model.gain(model.with_setting(replace(setting, num_workers=number))) > 0.98:
            return number
    return 0


def _explain_copy(model: Model, stats: Stats, stage: str) -> str:
    copies = copies_of(stats, model)
    if not copies.exposed_s:
        return _explain_stage(model, stats, stage)
    return (
        f"Why: the device copies {size(copies.nbytes)} a batch in {seconds(copies.total_s)}, at {size(copies.rate)}/s, "
        f"and its steps wait for {seconds(copies.exposed_s)} of that, whatever the host does."
    )


def _explain_startup(model: Model, stats: Stats, _: str) -> str:
    batches = count(model.context.epoch_batches or stats.batches, "batch")
    return (
        f"Why: an epoch of {batches} begins with {seconds(model.measured.startup_s)} of waiting for its first batches; "
        f"after them, one comes every {seconds(model.now_s)}."
    )


def _explain_straggler(model: Model, _: Stats, __: str) -> str:
    times = sorted(sum(task.alone_s for task in batch.work.values()) for batch in model.measured.batches)
    return (
        f"Why: half of the batches take up to {seconds(times[len(times) // 2])} to build, but some "
        f"{seconds(times[-1 - len(times) // 100])}. Finished ones wait behind a slow one."
    )


def _explain_overhead(model: Model, _: Stats, __: str) -> str:
    measured = model.measured
    built_s = sum(measured.mean(each).alone_s for each in BUILD_STAGES)
    where = "between the loop and its workers" if model.present.setting.method != INLINE else "outside every stage"
    return (
        f"Why: a batch takes {seconds(built_s)} to build, and {seconds(model.machine.latency_s)} pass {where}: queues, "
        "sockets, wake-ups."
    )


def _explain_cpus(model: Model, stats: Stats, _: str) -> str:
    if model.is_throttled:
        used_up = "" if stats.throttled_share is None else f" in {share(stats.throttled_share)} of its periods"
        return (
            f"Why: the quota of {model.context.cpus:g} CPUs is used up{used_up}: the system then stops workers and "
            "loop until the next period, whatever other programs do."
        )
    return (
        "Why: other programs use the CPUs. Your processes were ready to run but had no CPU for "
        f"{share(model.measured.preempted_share)} of their time: of {model.context.cpus:g} CPUs, others leave about "
        f"{model.machine.cpus:.1f}."
    )


_EXPLANATIONS = {
    "step": _explain_step,
    "copy": _explain_copy,
    "startup": _explain_startup,
    "straggler": _explain_straggler,
    "overhead": _explain_overhead,
    "cpus": _explain_cpus,
}


def _basis(model: Model, stats: Stats) -> str:
    """Explained share of the waiting, and number of batches, as text."""
    explained = f"Explained: {share(model.explained_share)} of the waiting."
    if model.explained_share < EXPLAINED_SHARE:
        missing_s = (1 - model.explained_share) * model.measured.wait_s
        explained = f"Not explained: {seconds(missing_s)} of {seconds(model.measured.wait_s)} of waiting per batch."
    use = stats.gpu_utilization
    gpu = "" if use is None else f" The GPU was in use for {share(use)} of the latest second."
    return f"{explained} {count(stats.batches, 'batch')}, {seconds(stats.wall_s)}.{gpu}"


def copies_much(stats: Stats, recent: Sequence[Sequence[Span]]) -> bool:
    """True if memory bandwidth may limit the building of batches.

    The bandwidth can be the limit only if building computes for a short time, for the size of the batches or of what
    they read. Waiting does not count: it overlaps with other workers.
    """
    times = [stats.stages[stage] for stage in BUILD_STAGES if stage in stats.stages]
    built_s = sum(each.total_s if each.cpu_s is None else each.cpu_s for each in times)
    copied_nbytes = (stats.delivered_nbytes or 0.0) + files_nbytes_of(recent)
    return built_s > 0 and copied_nbytes * stats.batches / built_s > _FAST_NBYTES_PER_S


_FAST_NBYTES_PER_S = 0.5e9
"""Bytes per second above which copying may be a large part of a stage: memory allows some ten times as many."""
