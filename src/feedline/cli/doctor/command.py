"""`feedline doctor`: checks of the machine and of a loader."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from feedline.cli import target as targets
from feedline.cli.arguments import AsJson, print_json
from feedline.cli.doctor import loader as loader_checks
from feedline.cli.doctor import machine
from feedline.cli.doctor.findings import Finding, Marks, Severity, closing_line, render
from feedline.core.wrapping import wrap


class Examination(NamedTuple):
    """Findings of the machine, and of a loader if one was named."""

    target: str
    machine: list[Finding]
    loader: list[Finding]

    @property
    def findings(self) -> list[Finding]:
        """All findings."""
        return [*self.machine, *self.loader]

    @property
    def is_healthy(self) -> bool:
        """True if no finding stops or slows a run."""
        return all(finding.severity is not Severity.BAD for finding in self.findings)

    def summary(self) -> dict[str, Any]:
        """All findings as a JSON object."""
        return {
            "machine": [finding.summary() for finding in self.machine],
            "loader": [finding.summary() for finding in self.loader],
        }


def run(target: str | None, *, ranks: int = 1) -> Examination:
    """Examine the machine, and the loader that `target` names.

    A `target` that leads to no loader is a finding. `ranks` is the number of training processes.
    """
    findings = machine.examine()
    on_loader = [] if target is None else _examine_loader(target, ranks)
    # Last: it initializes CUDA, which would be a hazard for the workers of the loader, and a finding.
    return Examination(target or "", [*findings, *machine.cuda()], on_loader)


def _examine_loader(target: str, ranks: int) -> list[Finding]:
    try:
        loader = targets.load(target)
    except targets.TargetError as error:
        return [Finding("loader", str(error), Severity.BAD, error.remedy)]
    return loader_checks.examine(loader, ranks=ranks)


def show(examination: Examination, console: Console) -> None:
    """Print an examination for the width and the encoding of the console."""
    marks = Marks.of(console.encoding)
    console.print("\n".join(wrap(marks.adapt(machine.headline()), console.width)), style="bold")
    console.print(render(examination.machine, console.width, marks), end="")
    if examination.target:
        console.print(f"\n{examination.target}", style="bold", highlight=False)
        console.print(render(examination.loader, console.width, marks), end="")
    console.print(closing_line(examination.findings), style="bold")


def command(
    target: Annotated[
        str | None,
        typer.Argument(metavar="LOADER", help="A loader to check as well: train.py:loader or package.module:loader."),
    ] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Training processes that will share the data.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Check this machine, and a loader if one is named.

    Each finding states its evidence and a remedy.

    The script of a loader runs without its `if __name__ == "__main__"` block, and up to 200 samples are read.

    Exit code 1 if something stops or slows a run.
    """
    examination = run(target, ranks=world_size)
    if as_json:
        print_json(examination.summary())
    else:
        show(examination, Console(highlight=False))
    raise typer.Exit(0 if examination.is_healthy else 1)
