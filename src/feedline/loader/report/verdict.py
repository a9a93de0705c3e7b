"""From the sums to one verdict: what limits the loop, and what to change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from textwrap import fill

from feedline.loader.report import causes
from feedline.loader.report.stats import Context, Figures, Stats, count, share

WIDTH = 80


FEW = 10
"""Below so many batches a verdict is a first impression, and says so."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits a loop; `str()` is a note of at most 80 columns."""

    limiting_stage: str
    """A stage ("fetch", "collate", "encode", "decode", "copy"), or "step", "startup", "straggler", "overhead",
    "prefetch"; "nothing" before the first batch."""
    wait_share: float
    """The share of the wall time in which the loop waited, 0 to 1."""
    headline: str
    explanation: str
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        paragraphs = [fill(self.headline, WIDTH), fill(self.explanation, WIDTH)]
        hints = [fill(hint, WIDTH, initial_indent="→ ", subsequent_indent="  ") for hint in self.advice]
        return "\n".join([paragraph for paragraph in paragraphs if paragraph] + hints)


def diagnose(stats: Stats, context: Context | None = None) -> Verdict:
    """The verdict on what a loader has done so far."""
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
            f"{count(stats.restarts, 'worker')} {died} replaced; no sample was lost, but the log says why and it "
            "costs time"
        )
    if stats.skipped:
        were = "was" if stats.skipped == 1 else "were"
        notes.append(
            f"{count(stats.skipped, 'sample')} could not be read and {were} skipped or replaced: see the quarantine "
            "file of ErrorPolicy(quarantine=...)"
        )
    return tuple(notes)
