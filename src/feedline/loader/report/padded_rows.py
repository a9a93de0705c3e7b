"""Advice for batches with much padding."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import NamedTuple

from feedline.loader.report.model import Case, Model
from feedline.loader.report.remedy import LEAST_GAIN, Advice
from feedline.loader.report.replay import BatchTimes
from feedline.loader.report.stats import Stats, seconds, share


def samples_of_one_length(model: Model, stats: Stats) -> Iterator[Advice]:
    """Batches of samples of similar length."""
    uneven, padded = stats.uneven_share or 0.0, stats.padding_share or 0.0
    left = (1 - uneven) / (1 - _LEFT_IN_BUCKETS)
    # Rows that are padded to a fixed length keep it in any order: see `longest_of_a_batch`.
    if not model.context.can_be_sorted or uneven < _LEAST_SHARE or padded - uneven >= _LEAST_SHARE:
        return
    text = (
        "batch_sampler=feedline.samplers.LengthBuckets(lengths, batch_size, seed=...), from the length of each sample: "
        f"{share(uneven)} of a batch is padding up to its longest sample, and {share(_LEFT_IN_BUCKETS)} would be left"
    )
    yield from _fewer_places(model, stats, left, text, "; the order is then another one, and batches of like samples")


def longest_of_a_batch(model: Model, stats: Stats) -> Iterator[Advice]:
    """Padding to the longest sample of each batch."""
    fixed = (stats.padding_share or 0.0) - (stats.uneven_share or 0.0)
    if not stats.uneven_share or fixed < _LEAST_SHARE:
        return
    text = (
        'pad to the longest sample of a batch, not to a fixed length (padding="longest", feedline.collate.pad): '
        f"{share(fixed)} of a batch is padding beyond its longest sample"
    )
    yield from _fewer_places(model, stats, 1 - fixed, text, "; shapes then change from batch to batch")


_LEAST_SHARE = 0.1
"""Least share of places whose padding is worth a change."""


_LEFT_IN_BUCKETS = 0.05
"""Padding of `LengthBuckets`: the shortest sample of a bucket is a tenth shorter than the longest."""


def _fewer_places(model: Model, stats: Stats, left: float, text: str, caveat: str) -> Iterator[Advice]:
    """Advice that leaves a share of the places of a batch."""
    growth = None if _is_asynchronous(model, stats) else growth_of_steps(model.measured.padded_steps)
    if growth is None:
        gain = model.range_of(_with_places(model, left, 1.0))
        text += f"; steps of {seconds(model.measured.step_s)} take {share(left)} of that if they grow with the places"
        if gain.gain >= LEAST_GAIN:
            yield Advice(text + caveat, {}, gain.gain, 1.0, gain.high, "bound")
        return
    usual = min(growth.share, 1.0)  # batches as small as those with less padding may not have been seen
    text += (
        f"; {share(usual)} of a step grows with the places, so that one of "
        f"{seconds(model.measured.step_s)} takes {seconds(_left_of_step(left, usual) * model.measured.step_s)}"
    )
    growths = usual, usual - growth.error, growth.share + growth.error
    cases = [_with_places(model, left, each) for each in growths]
    if model.gain(cases[0]) >= LEAST_GAIN:
        yield Advice(text + caveat, {}, *model.range_of(*cases))


def _is_asynchronous(model: Model, stats: Stats) -> bool:
    """True if steps may end before their work does: on a device."""
    return model.context.device is not None or stats.gpu_utilization is not None


def _with_places(model: Model, left: float, growth: float) -> Case:
    """The loop whose batches have a share of their places left."""

    def changed(batch: BatchTimes) -> BatchTimes:
        for stage in ("collate", "serialize", "receive", "copy"):
            batch = batch.scale(stage, left)
        return batch.scale("step", _left_of_step(left, growth))

    return model.present._replace(change=changed)


def _left_of_step(left: float, growth: float) -> float:
    """Share of a step with a share of its places.

    A part of the step may not depend on them, or it may grow with a power of them.
    """
    return 1 + max(growth, 0.0) * (left - 1) if growth < 1 else left**growth


class Growth(NamedTuple):
    """Relative growth of a step per relative growth of its batch."""

    share: float
    """1 for steps that take time in proportion to the places of a batch."""
    error: float
    """Twice the standard error."""


def growth_of_steps(steps: tuple[tuple[int, float], ...]) -> Growth | None:
    """Growth of steps with the places of padded batches, by least squares.

    None if the batches are too few, or too much alike. Few steps take many times as long as others, for another reason:
    they do not count.
    """
    usual_s = sorted(step_s for _, step_s in steps)[len(steps) // 2] if steps else 0.0
    counted = [(places, step_s) for places, step_s in steps if step_s <= _MOST_OF_USUAL * usual_s]
    if len(counted) < _LEAST_STEPS or usual_s <= 0:
        return None
    number = len(counted)
    mean_places, mean_s = (sum(column) / number for column in zip(*counted, strict=True))
    relative = [(places / mean_places - 1, step_s / mean_s - 1) for places, step_s in counted]
    spread = sum(x * x for x, _ in relative)
    if spread <= 0:
        return None
    slope = sum(x * y for x, y in relative) / spread
    rest = sum((y - slope * x) ** 2 for x, y in relative) / (number - 2)
    error = 2 * sqrt(rest / spread)
    return Growth(min(max(slope, 0.0), _MOST_GROWTH), error) if error <= _MOST_ERROR else None


_LEAST_STEPS = 16
"""Number of steps from which their growth is known."""


_MOST_OF_USUAL = 4.0
"""Multiple of the median step above which a step does not count."""


_MOST_GROWTH = 2.0
"""Growth of attention alone, which compares each place of a sample with each other one."""


_MOST_ERROR = 0.5
"""Error above which the growth is unknown."""
