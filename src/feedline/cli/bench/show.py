"""Results of a sweep as text, SVG and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from feedline.cli.bench.sweep import GOOD_WAIT_SHARE, Threshold
from feedline.cli.bench.trial import Trial
from feedline.cli.doctor.findings import Marks
from feedline.core.histogram import quantile_s
from feedline.loader.report.stats import seconds, share, size

BAR = 20
"""Columns of the longest bar."""


NARROW = 60
"""Terminal width below which each setting takes two lines."""


def table(trials: Sequence[Trial], chosen: Trial | None, step_s: float, width: int, marks: Marks) -> list[str]:
    """One line per setting, or two in a narrow terminal."""
    is_wide = width >= NARROW and _bar_columns(trials, step_s, width) >= 0
    rows = _wide_rows(trials, chosen, step_s, width, marks) if is_wide else _narrow_rows(trials, chosen, width)
    return [marks.adapt(row).rstrip() for row in rows]


ENOUGH_MARK = " < enough"


def _narrow_rows(trials: Sequence[Trial], chosen: Trial | None, width: int) -> Iterator[str]:
    for trial in trials:
        yield trial.label[:width]
        yield f"  {trial.error or _rate(trial) + ' samples/s'}{ENOUGH_MARK if trial is chosen else ''}"[:width]


def _wide_rows(trials: Sequence[Trial], chosen: Trial | None, step_s: float, width: int, marks: Marks) -> Iterator[str]:
    longest = max(len(trial.label) for trial in trials)
    best = max(trial.samples_per_s for trial in trials) or 1.0
    room = _bar_columns(trials, step_s, width)
    yield f"{'':<{longest}} {'samples/s':>16} {'':<{room}}{_tail(None, step_s)}"
    for trial in trials:
        if trial.error:
            yield f"{trial.label:<{longest}} {trial.error}"[:width]
            continue
        column = bar(trial.samples_per_s / best, room, marks)
        mark = ENOUGH_MARK if trial is chosen else ""
        yield f"{trial.label:<{longest}} {_rate(trial):>16} {column}{_tail(trial, step_s)}{mark}"


def _bar_columns(trials: Sequence[Trial], step_s: float, width: int) -> int:
    """Columns left for bars; negative if not even the figures fit."""
    longest = max(len(trial.label) for trial in trials)
    return min(BAR, width - longest - 19 - len(_tail(None, step_s)) - len(ENOUGH_MARK))


def _tail(trial: Trial | None, step_s: float) -> str:
    """Last columns of a row; their titles for None.

    Without a simulated step, there is no column for the wait share.
    """
    if trial is None:
        return f"{'waits' if step_s else '':>{8 if step_s else 0}}{'first':>8}{'memory':>9}"
    figures = trial.figures()
    waits = f"{share(figures['wait_share']):>8}" if step_s else ""
    return f"{waits}{seconds(figures['first_batch_s']):>8}{size(figures['memory_nbytes']):>9}"


def _rate(trial: Trial) -> str:
    return f"{trial.samples_per_s:,.0f} ± {trial.spread:,.0f}"


def bar(part: float, columns: int, marks: Marks) -> str:
    """A bar for a share of the columns, padded with blanks."""
    sign = "█" if marks is Marks.UNICODE else "#"
    return f"{sign * max(1, round(part * columns)) if columns else '':<{columns}}"


def conclusion(trials: Sequence[Trial], chosen: Trial | None, step_s: float) -> str:
    """Recommended setting with its gain over the user's own, and the reason."""
    if chosen is None:
        error = next((trial.error for trial in trials), "")  # the table cuts it
        return f"No setting ran: {error or 'there was none'}."
    own = next((trial for trial in trials if trial.setting.describe() == "as is" and not trial.setting.is_torch), None)
    if chosen is own or own is None or not own.rounds:
        return f"{chosen.label}: {chosen.samples_per_s:,.0f} samples/s; no other setting is worth a change."
    gain = chosen.samples_per_s / own.samples_per_s
    if gain < 1.05 and not step_s:
        return f"No other setting is worth a change: {chosen.label} gives {gain:.2f} × today's rate."
    reason = (
        f"the loop waits {share(chosen.figures()['wait_share'])} of its time (at most {share(GOOD_WAIT_SHARE)} is good)"
        if step_s
        else "more would gain under 3 %"
    )
    return f"{chosen.label}: {gain:.1f} × today's rate; {reason}."


def details(trial: Trial) -> list[str]:
    """Lines with latency percentiles, CPU time and rate of one setting."""
    figures = trial.figures()
    latencies = {"wait for a batch": [figures[f"wait_p{part}_s"] for part in PERCENTILES], **stage_percentiles(trial)}
    sent = share(figures["serialization_share"])
    tax = f"; packing and unpacking {sent} of the work" if trial.rounds[0].stages else ""
    return [
        *(f"{stage}: {_in_words(values)}" for stage, values in latencies.items()),
        f"CPU: {seconds(figures['cpu_s_per_1000'])} for 1,000 samples; {size(figures['mb_per_s'] * 1e6)}/s{tax}",
    ]


PERCENTILES = (50, 95, 99)


def _in_words(values: Sequence[float]) -> str:
    return ", ".join(f"p{part} {seconds(value)}" for part, value in zip(PERCENTILES, values, strict=True))


def stage_percentiles(trial: Trial) -> dict[str, list[float]]:
    """Seconds per batch in each stage, at `PERCENTILES`."""
    return {
        stage: [quantile_s(counts, part / 100) for part in PERCENTILES] for stage, counts in trial.histograms().items()
    }


def measured(trial: Trial, threshold: str) -> str:
    """The figure that a threshold compares, in words.

    Empty if the trial did not run.
    """
    name = Threshold.parse(threshold).name
    value = trial.figures().get(name)
    if value is None:
        return ""
    if name.endswith("_share"):
        return f": it is {share(value)}"
    if name.endswith("_nbytes"):
        return f": it is {size(int(value))}"
    return f": it is {seconds(value) if name.endswith('_s') and 'per' not in name else f'{value:,.4g}'}"


def summary(trials: Sequence[Trial], chosen: Trial | None, step_s: float, failed: Sequence[str]) -> dict[str, Any]:
    """All results as a JSON object."""
    return {
        "step_s": step_s,
        "trials": [
            {
                "library": "torch" if trial.setting.is_torch else "feedline",
                "arguments": trial.setting.arguments,
                "error": trial.error,
                "samples_per_s_by_round": [part.samples / part.seconds for part in trial.rounds],
                **trial.figures(),
                "stages": {
                    stage: {f"p{part}_s": value for part, value in zip(PERCENTILES, values, strict=True)}
                    for stage, values in stage_percentiles(trial).items()
                },
            }
            for trial in trials
        ],
        "recommended": None if chosen is None else chosen.setting.arguments,
        "failed_thresholds": list(failed),
    }


_ROW, _LEFT, _WIDE, _RIGHT = 26, 250, 420, 130


def svg(trials: Sequence[Trial], chosen: Trial | None) -> str:
    """Bar chart of the rates, for light and dark pages."""
    ran = [trial for trial in trials if trial.rounds]
    best = max((trial.samples_per_s + trial.spread for trial in ran), default=1.0)
    rows = "".join(_bar_row(trial, number, best, chosen) for number, trial in enumerate(ran))
    width, height = _LEFT + _WIDE + _RIGHT, _ROW * (len(ran) + 1) + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="13">'
        "<style>text{fill:#222}.bar{fill:#8aa}.chosen{fill:#2a7}.torch{fill:#c95}line{stroke:#222}"
        "@media (prefers-color-scheme:dark){text{fill:#ddd}line{stroke:#ddd}}</style>"
        f'<text x="{_LEFT}" y="18">samples per second</text>{rows}</svg>\n'
    )


def _bar_row(trial: Trial, number: int, best: float, chosen: Trial | None) -> str:
    top, rate, spread = _ROW * (number + 1), trial.samples_per_s, trial.spread
    kind = "torch" if trial.setting.is_torch else "chosen" if trial is chosen else "bar"
    right = _LEFT + _WIDE * rate / best
    low, high = (_LEFT + _WIDE * max(0.0, edge) / best for edge in (rate - spread, rate + spread))
    return (
        f'<text x="{_LEFT - 8}" y="{top + 16}" text-anchor="end">{escape(trial.label)}</text>'
        f'<rect class="{kind}" x="{_LEFT}" y="{top + 4}" width="{right - _LEFT:.1f}" height="{_ROW - 8}" rx="2"/>'
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{top + _ROW / 2}" y2="{top + _ROW / 2}"/>'
        f'<text x="{high + 6:.1f}" y="{top + 16}">{rate:,.0f}</text>'
    )
