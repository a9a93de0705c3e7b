"""Parts of building a batch: reads, decoding and transforms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from feedline.core.stage_parts import DECODE, READ, TRANSFORM, is_part
from feedline.loader.report.stats import Stats, share

STAGES_WITH_PARTS = ("fetch", "collate")
"""Stages whose parts are timed: images that were deferred are decoded when they are collated."""


DOMINANT = 0.5
"""Least share of building a batch at which a part is named in place of its stage."""


_WORTH_A_WORD = 0.03
"""Share of building a batch below which a part is not mentioned."""


class PartShare(NamedTuple):
    """A part, with its share of building a batch."""

    stage: str
    """Name of the part, such as "decode" or "read s3://bucket"."""
    share: float
    waiting: float | None = None
    """Share of the part's time without a CPU; None if unknown."""

    @property
    def words(self) -> str:
        """Name of the work, such as "reading from s3://bucket"."""
        where = self.stage.removeprefix(f"{READ} ")
        known = {DECODE: "decoding", TRANSFORM: "transforms", f"{READ} files": "reading files"}
        return known.get(self.stage, f"reading from {where}")

    def __str__(self) -> str:
        waiting = "" if not self.waiting or self.waiting < 0.1 else f" ({share(self.waiting)} waiting)"
        return f"{share(self.share)} is {self.words}{waiting}"


def part_shares(totals: Mapping[str, float]) -> dict[str, float]:
    """Share of each part of building batches, largest first.

    `totals` are the seconds of each stage. Empty if nothing was timed.
    """
    built_s = sum(totals.get(stage, 0.0) for stage in STAGES_WITH_PARTS)
    parts = {stage: min(total_s / built_s, 1.0) for stage, total_s in totals.items() if is_part(stage) and built_s > 0}
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def parts_of(stats: Stats) -> list[PartShare]:
    """The parts of building batches, largest first."""
    shares = part_shares({stage: times.total_s for stage, times in stats.stages.items()})
    return [PartShare(stage, part, _waiting(stats, stage)) for stage, part in shares.items()]


def _waiting(stats: Stats, stage: str) -> float | None:
    times = stats.stages[stage]
    return None if times.cpu_s is None or not times.total_s else max(1 - times.cpu_s / times.total_s, 0.0)


def dominant_part(stats: Stats, stage: str) -> PartShare | None:
    """The part that takes most of a stage; None without one."""
    first = next(iter(parts_of(stats)), None)
    return first if stage in STAGES_WITH_PARTS and first is not None and first.share >= DOMINANT else None


def sentence(stats: Stats) -> str:
    """Sentence on the parts of building; empty without any."""
    parts = [str(part) for part in parts_of(stats) if part.share >= _WORTH_A_WORD]
    return f"Of building a batch, {', '.join(parts)}." if parts else ""
