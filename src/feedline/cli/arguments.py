"""Arguments that several commands share, and their JSON output."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

Loader = Annotated[str, typer.Argument(metavar="LOADER", help="train.py:loader or package.module:loader.")]


StepOption = Annotated[str, typer.Option(help="Duration of a simulated training step, such as 20ms.")]


Workers = Annotated[int | None, typer.Option(min=1, help="Number of threads. Default: one per CPU.")]


AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object to standard output, and everything else to standard error."),
]


def print_json(value: Any) -> None:
    """Print the result of a command for other programs."""
    typer.echo(json.dumps(value, indent=2))
