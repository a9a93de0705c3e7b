"""Stage named and gain predicted, on sixteen loops with a known bottleneck each.

Each loop runs unchanged, then with the first remedy of its verdict, both in turns, for whole epochs. Prints a
table, with the mean absolute error of the predicted gains; `--write` keeps it in bench/results/diagnosis.json, from
which `bench/docs_tables.py` makes the table of the docs. `--only TEXT` runs the loops whose names contain it, and
`--fields` eighteen others: ten as users of ten fields write them, and eight whose workers disturb each other.

Idle machines only: where other programs use the CPUs, the true gains change from run to run.
"""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from operator import truediv
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

from diagnosis_fields import fields, write_field_files
from diagnosis_further import further, write_further_files
from diagnosis_pipelines import Pipeline, real, server, synthetic, temporary_folder, write_files
from feedline.loader.dataloader import DataLoader
from feedline.loader.report import Advice, Verdict
from feedline.loader.report.advice import predict
from feedline.loader.report.model import Gain, Model
from harness import RESULTS, machine

ROUNDS = 5
"""Pairs of runs: the gain is the median of their ratios, because the speed of a machine drifts."""

LARGE = 0.3
"""Error of a predicted gain from which it is counted as large."""

HEAD = (
    "| loop | limit | first remedy | predicted | measured | error | preempted |",
    "|---|---|---|---:|---:|---:|---:|",
)


@dataclass(frozen=True)
class Outcome:
    """Verdict on one loop, and its measured gain."""

    name: str
    expected: str
    named: str
    remedy: str
    predicted: float
    low: float
    high: float
    measured: float
    preempted: float
    """Run delay as a share of the working time."""

    @property
    def is_right(self) -> bool:
        """True if the stage was named."""
        return self.named in self.expected.split(" or ")

    @property
    def error(self) -> float:
        """Error of the predicted gain, as a share of the true one."""
        return abs(self.predicted / self.measured - 1)


def main() -> None:
    """Run all loops, or those of `--only`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--write", action="store_true", help="write the results file")
    parser.add_argument("--fields", action="store_true", help="run eighteen other loops")
    options = parser.parse_args()
    if (options.only or options.fields) and options.write:
        parser.error("--write keeps a whole run: leave out --only and --fields")
    warnings.filterwarnings("ignore", "This DataLoader will create")
    outcomes = []
    with server() as url, temporary_folder() as folder:
        known = pipelines(Path(folder), url, of_fields=options.fields)
        try:
            chosen = choose(known, options.only)
        except ValueError as error:
            parser.error(str(error))
        for pipeline in chosen:
            outcomes.append(examine(pipeline, options.rounds))
            print(line(outcomes[-1]), flush=True)
    print("\n".join(summary(outcomes)), flush=True)
    if options.write:
        write(outcomes)


def choose(known: list[Pipeline], text: str) -> list[Pipeline]:
    """The loops whose names contain `text`; ValueError, with all names, if there are none."""
    chosen = [pipeline for pipeline in known if text in pipeline.name]
    if not chosen:
        raise ValueError(f"no name contains {text!r}: {'; '.join(pipeline.name for pipeline in known)}")
    return chosen


def pipelines(folder: Path, url: str, *, of_fields: bool) -> list[Pipeline]:
    """The loops, with their files below `folder`."""
    if of_fields:
        write_field_files(folder)
        write_further_files(folder)
        return [*fields(folder, url), *further(folder)]
    write_files(folder)
    return [*synthetic(), *real(folder, url)]


def write(outcomes: list[Outcome], folder: Path = RESULTS) -> None:
    """Keep a run, with the lines of its table."""
    where = machine()
    lines = [*HEAD, *map(line, outcomes), *summary(outcomes)]
    lines[-1] += f" {where['cores']} cores of {where['cpu']}, {datetime.now(UTC):%Y-%m-%d}."
    result = {"machine": where, "lines": lines, "outcomes": [asdict(outcome) for outcome in outcomes]}
    (folder / "diagnosis.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def examine(pipeline: Pipeline, rounds: int) -> Outcome:
    """Verdict on a loop, and the gain of its first remedy in interleaved rounds."""
    seconds, verdict, model = run(pipeline, {})
    first = first_remedy(verdict)
    befores, afters, preempted = [seconds], list[float](), [model.measured.preempted_share]
    gains = [Gain(first.gain, first.low, first.high)]
    for turn in range(rounds):
        if turn:
            seconds, _, model = run(pipeline, {})
            befores.append(seconds)
            preempted.append(model.measured.preempted_share)
            gain = predict(model, first.arguments)
            gains += [] if gain is None else [gain]
        taken = dict(first.arguments) or dict(pipeline.fixed)
        afters.append(free(pipeline) if first.text == FREE else run(pipeline, taken)[0])
    remedy = ", ".join(f"{name}={value!r}" for name, value in first.arguments.items()) or first.text.partition(":")[0]
    expected = " or ".join(pipeline.stages)
    return Outcome(
        pipeline.name, expected, verdict.limiting_stage, remedy, *sorted(gains)[len(gains) // 2],
        median(map(truediv, befores, afters)), median(preempted),
    )  # fmt: skip


FREE = "data for free"


def first_remedy(verdict: Verdict) -> Advice:
    """The first advice that this machine can take: it cannot get other CPUs."""
    possible = [advice for advice in verdict.advice if "CPUs without other programs" not in advice.text]
    gain = verdict.free_gain
    return possible[0] if possible else Advice(FREE, {}, gain, gain, gain)


def run(pipeline: Pipeline, changes: dict[str, Any]) -> tuple[float, Verdict, Model]:
    """Seconds a batch, verdict and model of one epoch.

    With persistent workers, of the second epoch.
    """
    with pipeline.make(**changes) as loader:
        seconds = [one_epoch(loader, pipeline) for _ in range(2 if loader.persistent_workers else 1)][-1]
        verdict = loader.report()
        assert verdict.replayed is not None
        return seconds, verdict, verdict.replayed


def one_epoch(loader: DataLoader[Any], pipeline: Pipeline) -> float:
    """Seconds a batch of a whole epoch, its start included."""
    began, number = perf_counter(), 0
    for number, batch in enumerate(loader, 1):  # noqa: B007 - the last number is used
        pipeline.step(batch)
    return (perf_counter() - began) / number


def free(pipeline: Pipeline) -> float:
    """Seconds a batch of the loop over data that takes no time."""
    number = 100
    began = perf_counter()
    for _ in range(number):
        pipeline.step(None)
    return (perf_counter() - began) / number


def line(outcome: Outcome) -> str:
    """A row of the table."""
    named = outcome.named if outcome.is_right else f"**{outcome.named}**, not {outcome.expected}"
    predicted = f"{outcome.predicted:.2f} ({outcome.low:.2f}–{outcome.high:.2f})"
    return (
        f"| {outcome.name} | {named} | {outcome.remedy} | {predicted} | {outcome.measured:.2f} | "
        f"{percent(outcome.error)} | {percent(outcome.preempted)} |"
    )


def percent(value: float) -> str:
    """A share as all screens of feedline print it."""
    return f"{100 * value:.0f} %"


def summary(outcomes: list[Outcome]) -> list[str]:
    """The figures below the table."""
    errors = [outcome.error for outcome in outcomes]
    right = sum(outcome.is_right for outcome in outcomes)
    large = sum(error > LARGE for error in errors)
    figures = (
        f"{right} of {len(outcomes)} limits named; the mean absolute error of the gains is {percent(fmean(errors))},"
        f" the largest {percent(max(errors))}; {large} are off by more than {percent(LARGE)}."
    )
    return ["", figures]


if __name__ == "__main__":
    main()
