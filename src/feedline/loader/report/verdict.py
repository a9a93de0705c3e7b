"""Diagnosis of a loader: its limiting stage, with advice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from textwrap import fill

from feedline.loader.report import causes
from feedline.loader.report.context import Context
from feedline.loader.report.stats import Figures, Stats, count, share

WIDTH = 80


FEW = 10
"""Batches below which a verdict calls itself a first impression."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The limit of a loop; `str()` wraps it at 80 columns."""

    limiting_stage: str
    """A stage ("fetch", "collate", "encode", "decode", "copy"), or "step", "startup", "straggler", "overhead",
    "prefetch"; "nothing" before the first batch."""
    wait_share: float
    """Waiting time of the loop as a share of the wall time, 0 to 1."""
    headline: str
    explanation: str
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        paragraphs = [fill(self.headline, WIDTH), fill(self.explanation, WIDTH)]
        hints = [fill(hint, WIDTH, initial_indent="→ ", subsequent_indent="  ") for hint in self.advice]
        return "\n".join([paragraph for paragraph in paragraphs if paragraph] + hints)


def diagnose(stats: Stats, context: Context | None = None) -> Verdict:
    """Find the first cause that fits the statistics."""
    if not stats.batches:
        return Verdict("nothing", 0.0, "No batch has been delivered yet.", "", _incidents(stats))
    figures = Figures(stats, context or Context())
    cause = next(cause for find in causes.IN_ORDER if (cause := find(figures)) is not None)
    verdict = Verdict(
        cause.stage,
        stats.wait_share,
        f"The loop waited for data {share(stats.wait_share)} of the time{cause.conclusion}.",
        cause.explanation,
        (*cause.advice, *_incidents(stats)),
    )
    if stats.batches >= FEW:
        return verdict
    caution = f"Only {count(stats.batches, 'batch')} seen: take this as a first impression."
    return replace(verdict, explanation=f"{caution} {cause.explanation}")


def _incidents(stats: Stats) -> tuple[str, ...]:
    notes = []
    if stats.restarts:
        died = "died and was" if stats.restarts == 1 else "died and were"
        notes.append(
            f"{count(stats.restarts, 'worker')} {died} replaced; no sample was lost, but restarts cost time; the "
            "log gives the reasons"
        )
    if stats.skipped:
        were = "was" if stats.skipped == 1 else "were"
        notes.append(
            f"{count(stats.skipped, 'sample')} could not be read and {were} skipped or replaced; "
            "ErrorPolicy(quarantine=...) lists them in a file"
        )
    return tuple(notes)
