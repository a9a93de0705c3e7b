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


class Examination(NamedTuple):
    """Findings of the machine, and of a loader if one was named."""

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


def run(target: str | None, *, ranks: int = 1, console: Console | None = None) -> Examination:
    """Examine the machine, and the loader that `target` names.

    A `target` that leads to no loader is a finding. `ranks` is the number of training processes. Each section is
    printed to `console` as soon as it is complete.
    """
    findings = machine.examine()
    if target is None:
        findings += machine.cuda()
    _show(machine.headline(), findings, console)
    if target is None:
        return Examination(findings, [])
    on_loader = _examine_loader(target, ranks)
    _show(f"\n{target}", on_loader, console)
    # Last: it initializes CUDA, which would be a hazard for the workers of the loader, and a finding.
    devices = list(machine.cuda())
    _show("\ndevices", devices, console)
    return Examination([*findings, *devices], on_loader)


def _examine_loader(target: str, ranks: int) -> list[Finding]:
    try:
        loader = targets.load(target)
    except targets.TargetError as error:
        return [Finding("loader", str(error), Severity.BAD, error.remedy)]
    return loader_checks.examine(loader, ranks=ranks)


def _show(title: str, findings: list[Finding], console: Console | None) -> None:
    """Print a section for the width and the encoding of the console."""
    if console is not None:
        marks = Marks.of(console.encoding)
        console.print(marks.adapt(title), style="bold", highlight=False)
        console.print(render(findings, console.width, marks), end="")
        console.file.flush()


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
    console = None if as_json else Console(highlight=False)
    examination = run(target, ranks=world_size, console=console)
    if console is None:
        print_json(examination.summary())
    else:
        console.print(closing_line(examination.findings), style="bold")
    raise typer.Exit(0 if examination.is_healthy else 1)
