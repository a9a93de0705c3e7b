"""`feedline try`: measured gain of changed arguments, next to the predicted one."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from torch.utils.data import DataLoader as TorchDataLoader

from feedline.cli import target as targets
from feedline.cli.arguments import AsJson, Loader, StepOption, print_json
from feedline.cli.bench.command import parse_step
from feedline.cli.bench.trial import measure
from feedline.cli.progress import bars
from feedline.errors import ArgumentError, FeedlineError
from feedline.loader.dataloader import DataLoader
from feedline.loader.report import Verdict
from feedline.loader.report.advice import predict
from feedline.loader.report.layout import number, printable
from feedline.loader.report.model import Gain, Model

ROUNDS = 3
"""Number of rounds. Each measures the unchanged loader, then the changed one."""


_ARGUMENTS = frozenset(inspect.signature(DataLoader).parameters) - {"dataset"}


class Attempt(NamedTuple):
    """Rates of a loader, unchanged and with changed arguments."""

    arguments: Mapping[str, Any]
    verdict: Verdict
    """Verdict on the unchanged loader."""
    before: tuple[float, ...] = ()
    """Samples per second, by round."""
    after: tuple[float, ...] = ()
    predicted: Gain | None = None

    @property
    def measured(self) -> Gain:
        """Ratio of the medians, with the range over the rounds."""
        ratios = [after / before for before, after in zip(self.before, self.after, strict=True)]
        return Gain(median(self.after) / median(self.before), min(ratios), max(ratios))

    def summary(self) -> dict[str, Any]:
        """The results as a JSON object."""
        return {
            "arguments": dict(self.arguments),
            "samples_per_s_before": self.before,
            "samples_per_s_after": self.after,
            "measured": self.measured._asdict() if self.before else None,
            "predicted": None if self.predicted is None else self.predicted._asdict(),
            "lines": [line._asdict() for line in self.verdict.lines],
        }


def parse_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Arguments such as `num_workers=10`; values are Python literals or plain words."""
    arguments = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or name not in _ARGUMENTS:
            raise ArgumentError(f"--set takes an argument of feedline.DataLoader such as num_workers=4; got {text!r}")
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[name] = value
    return arguments


def run(target: str, arguments: Mapping[str, Any], seconds: float, step_s: float, console: Console) -> Attempt:
    """Measure the loader that `target` names, unchanged and changed.

    Without `arguments`, the first advice of its verdict is tried. Each round reads data with copies of the loader, so
    its own position does not change.
    """
    loader = targets.load(target)
    with bars(console) as step:
        try:
            return attempt(loader, arguments, seconds / (2 * ROUNDS), step_s, step)
        except FeedlineError:
            raise
        except Exception as error:
            raise targets.failure(target, error) from error


def attempt(
    loader: TorchDataLoader[Any],
    arguments: Mapping[str, Any],
    seconds: float,
    step_s: float,
    step: Callable[[str, int, int], None],
) -> Attempt:
    """Measure in turn, for `seconds` each: a slow moment affects both."""
    step("measuring", 0, 2 * ROUNDS)
    before, verdict, model = _measure(loader, {}, seconds, step_s, lines=True)
    if not arguments:
        arguments = next((advice.arguments for advice in verdict.advice if advice.arguments), {})
    if not arguments:
        return Attempt({}, verdict)
    predicted = None if model is None else predict(model, arguments)
    result = Attempt(arguments, verdict, (before,), (), predicted)
    for turn in range(1, 2 * ROUNDS):
        step("measuring", turn, 2 * ROUNDS)
        rate, _, _ = _measure(loader, arguments if turn % 2 else {}, seconds, step_s)
        if turn % 2:
            result = result._replace(after=(*result.after, rate))
        else:
            result = result._replace(before=(*result.before, rate))
    step("measuring", 2 * ROUNDS, 2 * ROUNDS)
    return result


def _measure(
    loader: TorchDataLoader[Any], changes: Mapping[str, Any], seconds: float, step_s: float, *, lines: bool = False
) -> tuple[float, Verdict, Model | None]:
    """Samples per second, verdict and model of a copy of the loader."""
    with warnings.catch_warnings():  # the test may be of more workers than CPUs
        warnings.filterwarnings("ignore", "This DataLoader will create")
        made = targets.as_feedline(loader, **changes)
    with made:
        part = measure(made, seconds, step_s)
        verdict = made.report(lines=lines)
        return part.samples / part.seconds, verdict, verdict.replayed


def show(result: Attempt, console: Console) -> None:
    """Print measured and predicted gain for the width of the console."""
    if not result.before or not result.arguments:
        lines = ["There is no argument to try.", result.verdict.text(console.width)]
    else:
        change = ", ".join(f"{name}={value!r}" for name, value in result.arguments.items())
        lines = [f"{change}: {median(result.before):,.0f} → {median(result.after):,.0f} samples/s"]
        lines.append(f"measured  {_gain(result.measured)}")
        lines.append(f"predicted {_gain(result.predicted)}" if result.predicted else "predicted: not by this model")
        lines.append(result.verdict.lines_text(console.width))
    for line in filter(None, lines):
        console.print(printable(line, console.encoding), markup=False, highlight=False)


def _gain(gain: Gain) -> str:
    return f"{number(gain.gain)} × ({number(gain.low)}–{number(gain.high)})"


def command(
    target: Loader,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="An argument to change, such as num_workers=10. Repeat it for more."),
    ] = None,
    step: StepOption = "0",
    seconds: Annotated[float, typer.Option(min=0.3, help="Seconds of measurement.")] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Measure the gain of changed arguments, next to the predicted one.

    Without --set, the first advice of the loader's verdict is tried.

    The script of the loader runs without its `if __name__ == "__main__"` block. An unchanged and a changed copy of the
    loader read its data in turn. The loader itself does not advance.

    Exit code 1 if there is nothing to try.
    """
    arguments = parse_arguments(changes or ())
    result = run(target, arguments, seconds, parse_step(step), Console(stderr=True))
    if as_json:
        print_json(result.summary())
    else:
        show(result, Console())
    raise typer.Exit(0 if result.arguments else 1)
