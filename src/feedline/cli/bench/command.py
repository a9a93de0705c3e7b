"""`feedline bench`: measurement of a loader under many settings."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from feedline.cli import target as targets
from feedline.cli.arguments import AsJson, Loader, StepOption, print_json
from feedline.cli.bench import show
from feedline.cli.bench.sweep import Sweep, Threshold, default_workers, recommend, settings_of
from feedline.cli.bench.trial import Trial
from feedline.cli.doctor.findings import Marks
from feedline.cli.progress import bars
from feedline.core.units import DECIMAL
from feedline.core.wrapping import wrap
from feedline.errors import ArgumentError
from feedline.workers.registry import AUTO, find_pool


class Outcome(NamedTuple):
    """Trials, the recommended one, and the thresholds that were met."""

    trials: list[Trial]
    chosen: Trial | None
    failed: list[str]


_LONGEST_STEP_S = 3600.0


def parse_step(text: str) -> float:
    """Seconds of a duration such as `20ms` or `0.02`; otherwise `ArgumentError`."""
    found = re.fullmatch(rf"({DECIMAL})\s*(ms|s)?", text)
    step_s = float(found[1]) * (1e-3 if found[2] == "ms" else 1.0) if found else inf
    if step_s > _LONGEST_STEP_S:
        raise ArgumentError(f"--step takes a duration such as 20ms, of at most an hour; got {text!r}")
    return step_s


def parse_numbers(text: str, option: str, least: int) -> list[int]:
    """Integers of a list such as `0,2,4`, from `least` on; otherwise `ArgumentError`."""
    try:
        numbers = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        numbers = [least - 1]
    if any(number < least for number in numbers):
        raise ArgumentError(f"{option} takes numbers from {least} on, such as 2,4; got {text!r}")
    return numbers


def run(target: str, sweep: Sweep, thresholds: Sequence[Threshold], console: Console) -> Outcome:
    """Measure the loader that `target` names, and apply the thresholds.

    Thresholds apply to the unchanged loader. `console` shows a progress bar. Raises `ArgumentError` for an unknown
    worker method.
    """
    loader = targets.load(target)  # first: its script may register a pool
    for method in {setting.worker_method for setting in sweep.settings} - {None, AUTO}:
        find_pool(str(method))
    with bars(console) as step:
        trials = sweep.run(loader, step)
    own = trials[0]  # the first setting is the user's own: thresholds judge it
    failed = [threshold.text for threshold in thresholds if threshold.is_met(own)]
    return Outcome(trials, recommend(trials, sweep.step_s), failed)


def print_outcome(outcome: Outcome, sweep: Sweep, console: Console) -> None:
    """Print table, conclusion and details for the width of the console."""
    marks = Marks.of(console.encoding)
    for line in show.table(outcome.trials, outcome.chosen, sweep.step_s, console.width, marks):
        _print(console, line)
    conclusion = marks.adapt(show.conclusion(outcome.trials, outcome.chosen, sweep.step_s))
    _print(console, *wrap(conclusion, console.width), style="bold")
    for line in () if outcome.chosen is None else show.details(outcome.chosen):
        _print(console, *wrap(marks.adapt(line), console.width))
    for text in outcome.failed:
        words = marks.adapt(f"failed: {text}{show.measured(outcome.trials[0], text)}")
        _print(console, *wrap(words, console.width), style="bold red")


def _print(console: Console, *lines: str, style: str | None = None) -> None:
    """Print lines without rich's wrapping, which adds blanks at their ends."""
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def save(outcome: Outcome, sweep: Sweep, svg: Path | None, as_json: Path | None) -> None:
    """Write the chart and the results to files."""
    if svg is not None:
        svg.write_text(show.svg(outcome.trials, outcome.chosen), encoding="utf-8")
    if as_json is not None:
        results = show.summary(outcome.trials, outcome.chosen, sweep.step_s, outcome.failed)
        as_json.write_text(json.dumps(results, indent=2), encoding="utf-8")


def command(
    target: Loader,
    workers: Annotated[
        str | None,
        typer.Option(help="Worker counts, such as 0,2,4. Default: up to twice the CPUs, or as many as help."),
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="A worker_method to try. Repeat it for more.")] = None,
    prefetch: Annotated[str, typer.Option(help="Values of prefetch_factor, such as 2,4.")] = "",
    batch_size: Annotated[str, typer.Option(help="Batch sizes, such as 32,64.")] = "",
    step: StepOption = "0",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds through all settings.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.05, max=86400, help="Seconds per round and setting.")] = 2.0,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="Exit with 1 if this holds for the unchanged loader: 'wait_share > 5%'."),
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a chart into this file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write all figures into this JSON file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a loader under many settings, and recommend one.

    torch's own loader is one of the settings.

    The script of the loader runs without its `if __name__ == "__main__"` block. Settings are measured in turn, round by
    round: other load on the machine then affects all of them.
    """
    counts = default_workers() if workers is None else parse_numbers(workers, "--workers", 0)
    sizes = parse_numbers(prefetch, "--prefetch", 1), parse_numbers(batch_size, "--batch-size", 1)
    thresholds = [Threshold.parse(text) for text in fail_if or ()]
    settings = settings_of(counts, method or (), *sizes)
    sweep = Sweep(settings, rounds, seconds, parse_step(step), extends=workers is None)
    outcome = run(target, sweep, thresholds, Console(stderr=True))
    save(outcome, sweep, svg, out)
    if as_json:
        print_json(show.summary(outcome.trials, outcome.chosen, sweep.step_s, outcome.failed))
    else:
        print_outcome(outcome, sweep, Console())
    raise typer.Exit(1 if outcome.failed or outcome.chosen is None else 0)
