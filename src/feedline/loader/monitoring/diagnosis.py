"""Verdict, predictions and tuning of one loader."""

from __future__ import annotations

import warnings
from dataclasses import replace
from operator import attrgetter
from typing import Any

from torch.utils.data import IterableDataset

from feedline.core.cgroups import Cgroup
from feedline.core.copying import measure_copy_rates
from feedline.loader.building.captures import is_stateful
from feedline.loader.loop import is_iterated
from feedline.loader.monitoring.lines import SECONDS, costly_lines
from feedline.loader.monitoring.memory_trend import memory_left
from feedline.loader.monitoring.resources import affine_cpus
from feedline.loader.partitions import is_partitioned
from feedline.loader.pools import LoaderPools, builder_of
from feedline.loader.report import Advice, Verdict, diagnose
from feedline.loader.report.incidents import grows
from feedline.loader.report.sources import LineShare
from feedline.loader.report.verdict import copies_much

_VERDICT_NS = 2_000_000_000


_VERDICT_PAUSE_FACTOR = 2000
"""Verdicts take at most 1 / `_VERDICT_PAUSE_FACTOR` of the time, unless the pause would exceed `_MOST_VERDICT_NS`."""


_MOST_VERDICT_NS = 120_000_000_000


_LEAST_VERDICT_PAUSE_FACTOR = 200
"""Verdicts never take more than 1 / `_LEAST_VERDICT_PAUSE_FACTOR` of the time, however rare that makes them."""


USUAL_VERDICT_NS = 80_000_000
"""Assumed time of the first verdict."""


class Arguments:
    """Arguments of a loader, which may be deleted while its loop runs."""

    def __init__(self, loader: Any, length: int | None) -> None:
        vars(self).update(zip(_ARGUMENTS, _read_arguments(loader), strict=True))
        self._length = length

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the loader has no length")
        return self._length


_ARGUMENTS = (
    "dataset", "batch_size", "sampler", "batch_sampler", "drop_last", "collate_fn", "num_workers", "prefetch_factor",
    "in_order", "persistent_workers", "worker_init_fn", "multiprocessing_context", "_fl", "_fl_adapts", "_fl_policy",
    "_fl_world_size", "_auto_collation",
)  # fmt: skip
"""Attributes of a loader that a verdict reads."""


_read_arguments = attrgetter(*_ARGUMENTS)


def verdict_of(loader: Any, monitor: Any, pools: LoaderPools, *, quick: bool, lines: bool = False) -> Verdict:
    """The limit of the current epoch, and advice.

    `loader` is the loader, or its `Arguments`. With `lines`, also the user's lines that take the time.
    """
    stats, recent = monitor.verdict_inputs()
    found, notes = _lines_of(loader) if lines else ((), ())
    context = replace(
        pools.context(loader),
        lines=found,
        earlier_batches=max(monitor.whole.batches - stats.batches, 0),
        sending=monitor.sending.cost,
        # Both take milliseconds.
        memory_left_nbytes=memory_left(Cgroup.of_process()) if grows(stats) else None,
        copy_rates=None if quick or not copies_much(stats, recent) else measure_copy_rates(affine_cpus()),
    )
    verdict = diagnose(stats, context, recent, quick=quick)
    raised, text = monitor.raised, ""
    if raised is not None and raised.went_on:
        notes = (raised.text, *notes)
    elif raised is not None:
        text = raised.text
    notes = (*verdict.notes, *notes)
    return replace(verdict, lines=found, notes=notes, raised=text, write_page=monitor.write_page)


def with_lines(verdict: Verdict, loader: Any, seconds: float = SECONDS) -> Verdict:
    """The verdict, with the user's lines that take the time."""
    lines, notes = _lines_of(loader, seconds)
    return replace(verdict, lines=lines or verdict.lines, notes=(*verdict.notes, *notes))


def _lines_of(loader: Any, seconds: float = SECONDS) -> tuple[tuple[LineShare, ...], tuple[str, ...]]:
    """The user's lines that take the time, and notes on failures."""
    try:
        return costly_lines(loader, seconds), ()
    except Exception as error:  # noqa: BLE001 - the dataset is the user's, and the rest of the verdict stays useful
        note = f"The lines that take the time are not known: the dataset raised {type(error).__name__}: {error}"
        return (), (note,)


def tune(loader: Any) -> tuple[Advice, ...]:
    """Take the first advice that changes neither order nor values; return it.

    Warns of advice that only `seed` would allow.
    """
    are_free, advised = _workers_are_free(loader), loader.report().advice
    may_change = {"prefetch_factor"} | ({"num_workers"} if are_free else set())
    for advice in advised:
        if advice.arguments.get("num_workers") == 0 and loader.timeout:  # torch refuses a timeout without workers
            continue
        if advice.arguments and may_change.issuperset(advice.arguments):
            for name, value in advice.arguments.items():
                setattr(loader, name, value)
            loader._fl_pools.renew(running=is_iterated(loader))
            return (advice,)
    is_map = not isinstance(loader.dataset, IterableDataset) and not is_stateful(loader.dataset)
    is_refused = not are_free and any(advice.arguments.keys() == {"num_workers"} for advice in advised)
    if is_map and loader._fl.seed is None and is_refused:
        warnings.warn(
            f"tune() changes nothing: without seed, random values may depend on num_workers={loader.num_workers}. Pass"
            " seed= to the loader, tune() after a whole epoch of worker processes that draws no random numbers, or set"
            " num_workers yourself",
            stacklevel=3,
        )
    return ()


def _workers_are_free(loader: Any) -> bool:
    """True if the number of workers affects only the speed."""
    if isinstance(loader.dataset, IterableDataset):
        return is_partitioned(loader.dataset) and loader._fl.seed is not None
    builder = builder_of(loader)
    is_fixed = loader._fl.seed is not None or not getattr(builder, "draws", True) or _drew_nothing(loader)
    return not is_stateful(loader.dataset) and is_fixed


def _drew_nothing(loader: Any) -> bool:
    """True if a whole epoch has changed nothing in worker processes.

    Neither random generators nor the dataset.
    """
    progress = loader._fl_progress
    is_whole = progress is not None and progress.is_over and bool(progress.workers.captures)
    return is_whole and loader._fl_pools.keeps_objects and not progress.workers.has_drawn


def verdict_pause_ns(last_ns: int, expected_ns: int) -> int:
    """Pause after a verdict of `last_ns` before one of `expected_ns`."""
    usual_ns = min(max(_VERDICT_NS, _VERDICT_PAUSE_FACTOR * last_ns), _MOST_VERDICT_NS)
    return max(usual_ns, _LEAST_VERDICT_PAUSE_FACTOR * max(last_ns, expected_ns))
