"""Notes on growing workers, restarts and skipped samples."""

from __future__ import annotations

from collections.abc import Iterator

from feedline.loader.report.context import Context
from feedline.loader.report.stats import Stats, count, seconds, size

GROWTH = 0.02
"""Growth of the workers per epoch above which it is worth a note, as a share of their memory."""


LEAST_GROWTH_NBYTES = 4 << 20


_NAMED = 3
"""Number of failed samples that a note names."""


def grows(stats: Stats) -> bool:
    """True if the memory of the workers grows from epoch to epoch."""
    return (stats.worker_growth_nbytes or 0.0) > max(GROWTH * stats.worker_nbytes, LEAST_GROWTH_NBYTES)


def incidents(stats: Stats, context: Context) -> Iterator[str]:
    """Sentences on growing workers, restarts and failed samples."""
    growth = stats.worker_growth_nbytes or 0.0
    if grows(stats):
        now = f", to {size(stats.worker_nbytes)} now" if stats.worker_nbytes else ""  # workers may have ended
        yield (
            f"The workers grow by {size(growth)} an epoch{now}: a cache without a "
            "limit, or Python objects of the dataset, of which each worker copies the pages that it reads. "
            "feedline.datasets.PackedStrings and feedline.share(array) hold them once."
            + _until_full(growth, stats, context)
        )
    if stats.restarts:
        died = "died and was" if stats.restarts == 1 else "died and were"
        yield (
            f"{count(stats.restarts, 'worker')} {died} replaced; no sample was lost, but restarts cost time; the "
            "log gives the reasons"
        )
    if stats.skipped:
        were = "was" if stats.skipped == 1 else "were"
        indices = list(dict.fromkeys(str(index) for _, _, index in reversed(stats.latest_skipped)))[:_NAMED]
        latest = f", the latest at index {', '.join(indices)}" if indices else ""
        yield (
            f"{count(stats.skipped, 'sample')} could not be read and {were} skipped or replaced{latest}; "
            "ErrorPolicy(quarantine=...) lists them in a file"
        )


def _until_full(growth: float, stats: Stats, context: Context) -> str:
    """Sentence on the time that the remaining memory lasts."""
    left_nbytes, batches = context.memory_left_nbytes, context.epoch_batches or stats.length
    if left_nbytes is None:
        return ""
    epochs = left_nbytes / growth
    lasts = f" At this rate, the {size(left_nbytes)} that are left last for {count(int(epochs), 'epoch')}"
    if not batches or not stats.batches:
        return f"{lasts}."
    return f"{lasts}, or {_format_duration(epochs * batches * stats.wall_s / stats.batches)}."


def _format_duration(elapsed_s: float) -> str:
    """A duration in its largest unit."""
    for unit, unit_s in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if elapsed_s >= 2 * unit_s:
            return f"about {count(round(elapsed_s / unit_s), unit)}"
    return seconds(elapsed_s)
