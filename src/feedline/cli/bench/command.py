"""`feedline bench`: measurement of a loader under many settings."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from feedline.cli import target as targets
from feedline.cli.bench import show
from feedline.cli.bench.sweep import Sweep, Threshold, recommend
from feedline.cli.bench.trial import Trial
from feedline.cli.doctor.findings import Marks
from feedline.cli.progress import bars
from feedline.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console


class Outcome(NamedTuple):
    """Trials, the recommended one, and the thresholds that were met."""

    trials: list[Trial]
    chosen: Trial | None
    failed: list[str]


def parse_step(text: str) -> float:
    """Seconds of a duration such as `20ms` or `0.02`."""
    found = re.fullmatch(r"([0-9.]+)\s*(ms|s)?", text)
    if found is None:
        raise ArgumentError(f"--step takes a duration such as 20ms; got {text!r}")
    return float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)


def parse_numbers(text: str) -> list[int]:
    """Numbers of a list such as `0,2,4`."""
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise ArgumentError(f"expected numbers separated by commas; got {text!r}") from None


def run(target: str, sweep: Sweep, thresholds: Sequence[Threshold], console: Console) -> Outcome:
    """Measure the loader that `target` names; a progress bar goes to `console`."""
    loader = targets.load(target)
    with bars(console) as step:
        trials = sweep.run(loader, step)
    own = trials[0]  # the first setting is the user's own: thresholds judge it
    failed = [threshold.text for threshold in thresholds if threshold.is_met(own)]
    return Outcome(trials, recommend(trials, sweep.step_s), failed)


def print_outcome(outcome: Outcome, sweep: Sweep, console: Console) -> None:
    """Print table, conclusion and details for the width of the console."""
    marks = Marks.of(console.encoding)
    for line in show.table(outcome.trials, outcome.chosen, sweep.step_s, console.width, marks):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(
        marks.adapt(show.conclusion(outcome.trials, outcome.chosen, sweep.step_s)), style="bold", highlight=False
    )
    if outcome.chosen is not None:
        for line in show.details(outcome.chosen):
            console.print(marks.adapt(line), highlight=False)
    for text in outcome.failed:
        console.print(f"failed: {text}", style="bold red", highlight=False)


def save(outcome: Outcome, sweep: Sweep, svg: Path | None, as_json: Path | None) -> None:
    """Write the chart and the results to files."""
    if svg is not None:
        svg.write_text(show.svg(outcome.trials, outcome.chosen), encoding="utf-8")
    if as_json is not None:
        results = show.summary(outcome.trials, outcome.chosen, sweep.step_s, outcome.failed)
        as_json.write_text(json.dumps(results, indent=2), encoding="utf-8")
