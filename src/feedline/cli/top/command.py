"""`feedline top`: a screen that follows the loaders of other processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from feedline.cli.arguments import AsJson, print_json
from feedline.cli.top.keys import ScreenState, keyboard
from feedline.cli.top.reading import LoaderReading, read_all
from feedline.cli.top.screen import screen

READING_INTERVAL_S = 0.3
"""Time between the two readings of a single report: CPU shares need two."""


_NOTHING = (
    "There is no running feedline loop that you may watch. A loader is shown from its first iteration until it is "
    "closed. Only root sees the loaders of other users."
)


def report(pid: int | None) -> list[tuple[LoaderReading, LoaderReading]]:
    """Two readings of each loader, `READING_INTERVAL_S` apart."""
    before = {reading.key: reading for reading in read_all(pid)}
    time.sleep(READING_INTERVAL_S)
    return [(before.get(reading.key, reading), reading) for reading in read_all(pid)]


def summary(readings: Sequence[tuple[LoaderReading, LoaderReading]]) -> list[dict[str, Any]]:
    """The later readings as JSON objects."""
    return [
        {
            **now.figures,
            "batches": now.batches,
            "waiting_s": now.waiting_s,
            "worker_processes": [
                {
                    name: getattr(worker, name)
                    for name in ("worker", "pid", "state", "nbytes", "busy_s", "batch", "index")
                }
                for worker in now.workers
            ],
        }
        for _, now in readings
    ]


def show(readings: Sequence[tuple[LoaderReading, LoaderReading]], console: Console) -> None:
    """Print one screen."""
    console.print(_screens(readings, console.width))


def follow(pid: int | None, console: Console, interval_s: float) -> None:
    """Update the screen until the key q, or until all loaders end."""
    before: dict[tuple[int, str], LoaderReading] = {}
    now: list[LoaderReading] = read_all(pid)
    with keyboard() as keys, Live(console=console, auto_refresh=False, screen=False) as live:
        view = ScreenState(has_keyboard=keys.is_available)
        while True:
            live.update(_screens([(before.get(each.key), each) for each in now], console.width, view), refresh=True)
            if not now and before:
                return
            key = keys.wait(interval_s)
            if key == "q":
                return
            view = view.after(key)
            if not key and not view.is_paused:
                before, now = {each.key: each for each in now}, read_all(pid)


def _screens(
    readings: Sequence[tuple[LoaderReading | None, LoaderReading]], width: int, view: ScreenState | None = None
) -> Group:
    view = view or ScreenState()
    lines: list[Text] = [] if readings else [Text(_NOTHING)]
    for before, now in readings:
        lines += [*([Text()] if lines else []), *screen(before, now, width, view)]
    if view.has_keyboard:
        lines.append(Text(view.help(width), style="dim"))
    return Group(*lines)


def command(
    pid: Annotated[int | None, typer.Argument(metavar="PID", help="A training process. Default: all.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two screens.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one screen and exit. The default where there is no terminal.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Watch the loaders of training processes.

    No lock is taken and no signal is sent: a loop that hangs can be watched, with the current sample of each worker.

    Exit code 1 if no loader is found.
    """
    console = Console(highlight=False)
    if not (once or as_json) and console.is_terminal:
        try:
            follow(pid, console, interval)
        except KeyboardInterrupt:
            raise typer.Exit from None
    readings = report(pid)
    if as_json:
        print_json(summary(readings))
    else:
        show(readings, console)
    raise typer.Exit(0 if readings else 1)
