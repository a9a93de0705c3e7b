"""`feedline try`: measured gain of changed arguments, next to the predicted one."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf
from statistics import median
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from torch.utils.data import DataLoader as TorchDataLoader

from feedline.cli import target as targets
from feedline.cli.arguments import AsJson, Loader, StepOption, print_json
from feedline.cli.bench.command import parse_step
from feedline.cli.bench.trial import measure
from feedline.cli.progress import bars
from feedline.core.wrapping import printable
from feedline.errors import ArgumentError, FeedlineError
from feedline.loader.dataloader import DataLoader
from feedline.loader.monitoring.diagnosis import with_lines
from feedline.loader.report import Verdict
from feedline.loader.report.advice import predict
from feedline.loader.report.layout import number, paragraph
from feedline.loader.report.model import Gain
from feedline.loader.report.stats import seconds as duration

ROUNDS = 3
"""Most rounds. Each measures the unchanged loader, then the changed one."""


LINES_SHARE = 0.1
"""Share of the budget that is kept for finding the user's costly lines."""


_ARGUMENTS = frozenset(inspect.signature(DataLoader).parameters) - {"dataset"}


class Budget:
    """Time of an attempt: start of workers, rounds and verdict."""

    def __init__(self, total_s: float, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self.total_s = clock, total_s
        self.over_s = clock() + total_s
        """End of the budget, by the clock."""
        self.first_over_s = self.over_s + total_s
        """End of the first round: a result that is late is better than none."""

    def now_s(self) -> float:
        """Current time of the clock."""
        return self._clock()

    def left_s(self) -> float:
        """Seconds left; 0 after the end."""
        return max(self.over_s - self._clock(), 0.0)


class MeasuredTurn(NamedTuple):
    """Measurement of one loader in one round."""

    rate: float | None
    """Samples per second; None if the budget ended before a rate was known."""
    least_s: float
    """Least time of such a turn: start, warm-up and one batch of each worker. Without a rate, it is a guess."""
    first_s: float
    """Time to the first batch."""
    verdict: Verdict | None = None
    verdict_s: float = 0.0
    """Time spent on the verdict."""


class Attempt(NamedTuple):
    """Rates of a loader, unchanged and with changed arguments."""

    arguments: Mapping[str, Any]
    verdict: Verdict
    """Verdict on the unchanged loader."""
    before: tuple[float, ...] = ()
    """Samples per second, by round."""
    after: tuple[float, ...] = ()
    predicted: Gain | None = None
    unfinished: str = ""
    """Rounds for which there was no time, in words; empty for none."""

    @property
    def measured(self) -> Gain | None:
        """Ratio of the medians, with the range over rounds; None without rounds."""
        ratios = [after / before for before, after in zip(self.before, self.after, strict=False)]
        return Gain(median(self.after) / median(self.before), min(ratios), max(ratios)) if ratios else None

    def summary(self) -> dict[str, Any]:
        """The results as a JSON object."""
        return {
            "arguments": dict(self.arguments),
            "samples_per_s_before": self.before,
            "samples_per_s_after": self.after,
            "measured": None if self.measured is None else self.measured._asdict(),
            "predicted": None if self.predicted is None else self.predicted._asdict(),
            "unfinished": self.unfinished,
            "lines": [line._asdict() for line in self.verdict.lines],
        }


def parse_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Arguments such as `num_workers=10`; values are literals or plain words.

    Raises `ArgumentError` without `=`, and for a name that `DataLoader` does not have.
    """
    arguments = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or name not in _ARGUMENTS:
            raise ArgumentError(f"--set takes an argument of feedline.DataLoader such as num_workers=4; got {text!r}")
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # no literal, or one of no value
            arguments[name] = value
    return arguments


def run(target: str, arguments: Mapping[str, Any], seconds: float, step_s: float, console: Console) -> Attempt:
    """Measure the loader that `target` names, unchanged and changed.

    Without `arguments`, the first advice of the loader's verdict is tried. Copies of the loader read the data, so the
    position of the loader does not change. Raises `TargetError` for an error of the loader.
    """
    loader = targets.load(target)
    with bars(console) as step:
        try:
            return attempt(loader, arguments, Budget(seconds), step_s, step)
        except FeedlineError:
            raise
        except Exception as error:
            raise targets.loader_error(target, error) from error


def attempt(
    loader: TorchDataLoader[Any],
    arguments: Mapping[str, Any],
    budget: Budget,
    step_s: float,
    step: Callable[[str, int, int], None],
) -> Attempt:
    """Measure the unchanged and the changed loader in turn, within the budget.

    A slow moment of the machine thus affects both. Each turn gets an equal part of the time left. At the end of the
    budget, a turn ends with the batch that is being read; the first round may take twice as long. A further round
    begins only if the time left is enough for a round like the previous one.
    """
    step("measuring", 0, 2 * ROUNDS)
    turns = [_turn(loader, {}, budget, 2 * ROUNDS, step_s, judges=True)]
    verdict = turns[0].verdict
    assert verdict is not None
    if not arguments:
        arguments = next((advice.arguments for advice in verdict.advice if advice.arguments), {})
    if not arguments:
        missing = "" if turns[0].rate is not None else _describe_missing(turns, budget, 0.0)
        return Attempt({}, _with_lines(verdict, loader, budget), unfinished=missing)
    measured_s = budget.now_s()
    predicted = None if verdict.replayed is None else predict(verdict.replayed, arguments)
    verdict_s = turns[0].verdict_s + budget.now_s() - measured_s
    while turns[-1].rate is not None and len(turns) < 2 * ROUNDS and _fits(turns, budget):
        step("measuring", len(turns), 2 * ROUNDS)
        changes = arguments if len(turns) % 2 else {}
        turns.append(_turn(loader, changes, budget, 2 * ROUNDS - len(turns), step_s))
    step("measuring", 2 * ROUNDS, 2 * ROUNDS)
    rates = [turn.rate for turn in turns if turn.rate is not None]
    verdict = _with_lines(verdict, loader, budget)
    missing = _describe_missing(turns, budget, verdict_s)
    return Attempt(arguments, verdict, tuple(rates[::2]), tuple(rates[1::2]), predicted, missing)


def _turn(
    loader: TorchDataLoader[Any],
    changes: Mapping[str, Any],
    budget: Budget,
    turns: int,
    step_s: float,
    *,
    judges: bool = False,
) -> MeasuredTurn:
    """Measure a copy of the loader; `turns` are left, including this one."""
    is_first_round = turns > 2 * (ROUNDS - 1)
    began_s = budget.now_s()
    due_s = began_s + max(budget.left_s() - LINES_SHARE * budget.total_s, 0.0) / turns
    with warnings.catch_warnings():  # the test may be of more workers than CPUs
        warnings.filterwarnings("ignore", "This DataLoader will create")
        made = targets.as_feedline(loader, **changes)
    with made:
        over_s = budget.first_over_s if is_first_round else budget.over_s
        part = measure(made, inf, step_s, due_s=due_s, over_s=over_s)
        measured_s = budget.now_s()
        verdict = made.report() if judges else None
        verdict_s = budget.now_s() - measured_s
    took_s = budget.now_s() - began_s - verdict_s
    if not part.waits_s:
        return MeasuredTurn(None, 2 * took_s, part.first_s, verdict, verdict_s)
    cluster_s = part.seconds / len(part.waits_s) * max(1, made.num_workers)
    least_s = took_s - part.seconds + cluster_s
    return MeasuredTurn(part.samples / part.seconds, least_s, part.first_s, verdict, verdict_s)


def _fits(turns: Sequence[MeasuredTurn], budget: Budget) -> bool:
    """True if there is time for the next turn.

    Before a round, the time must be enough for both of its turns.
    """
    if len(turns) == 1:
        return budget.now_s() < budget.first_over_s
    if len(turns) % 2:
        return budget.left_s() > 0
    return budget.left_s() > turns[-1].least_s + turns[-2].least_s


def _describe_missing(turns: Sequence[MeasuredTurn], budget: Budget, verdict_s: float) -> str:
    """Text on rounds that did not fit, with sufficient seconds, or empty."""
    rounds = sum(turn.rate is not None for turn in turns) // 2
    if rounds == ROUNDS:
        return ""
    if turns[-1].rate is None:
        which = "unchanged" if len(turns) % 2 else "changed"
        why = f"the first batch of the {which} loader took {duration(turns[-1].first_s)}"
    else:
        least_s = sum(turn.least_s for turn in turns[-2:])
        why = f"one takes {duration(least_s)} or more, the verdict {duration(verdict_s)}"
    enough_s = (2 * ROUNDS * max(turn.least_s for turn in turns) + verdict_s) / (1 - LINES_SHARE)
    return (
        f"{rounds} of {ROUNDS} rounds fitted into {budget.total_s:g} s: {why}. "
        f"All may fit into --seconds {ceil(max(enough_s, 2 * budget.total_s))}."
    )


def _with_lines(verdict: Verdict, loader: TorchDataLoader[Any], budget: Budget) -> Verdict:
    """The verdict with the user's costly lines, if time is left."""
    limit_s = min(LINES_SHARE * budget.total_s, budget.left_s())
    return with_lines(verdict, loader, limit_s) if limit_s else verdict


def show(result: Attempt, console: Console) -> None:
    """Print measured and predicted gain for the width of the console."""
    measured, width = result.measured, console.width
    if not result.arguments:
        texts = ["There is no argument to try.", paragraph(result.unfinished, width), result.verdict.text(width)]
    else:
        title = _words(result.arguments)
        if measured is not None:
            title += f": {median(result.before):,.0f} → {median(result.after):,.0f} samples/s"
        lines = [title, "not measured" if measured is None else f"measured  {_gain(measured)}"]
        lines.append(f"predicted {_gain(result.predicted)}" if result.predicted else "predicted: not by this model")
        lines.append(result.unfinished)
        texts = [*(paragraph(line, width) for line in lines), result.verdict.lines_text(width)]
    for text in filter(None, texts):
        console.print(printable(text, console.encoding), markup=False, highlight=False)


def _words(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _gain(gain: Gain) -> str:
    plain = f"{number(gain.gain)} ×"
    return plain if gain.low == gain.high else f"{plain} ({number(gain.low)}–{number(gain.high)})"


def command(
    target: Loader,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="An argument to change, such as num_workers=10. Repeat it for more."),
    ] = None,
    step: StepOption = "0",
    seconds: Annotated[
        float,
        typer.Option(
            min=0.3, max=86400, help="Seconds in all, with the start of workers; one round may take twice as long."
        ),
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Measure the gain of changed arguments, next to the predicted one.

    Without --set, the first advice of the loader's verdict is tried.

    The script of the loader runs without its `if __name__ == "__main__"` block. An unchanged and a changed copy of the
    loader read its data in turn, up to three times, as often as the time allows; the first round may take twice as
    long. The output names the rounds that did not fit, and the time that they need. The loader itself does not advance.

    Exit code 1 if there is nothing to try, or no time to measure it.
    """
    arguments = parse_arguments(changes or ())
    result = run(target, arguments, seconds, parse_step(step), Console(stderr=True))
    if as_json:
        print_json(result.summary())
    else:
        show(result, Console())
    raise typer.Exit(0 if result.measured else 1)
