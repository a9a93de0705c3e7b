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
from feedline.core.wrapping import printable, wrap

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
    console.print(_screens(readings, console, None))


def follow(pid: int | None, console: Console, interval_s: float) -> None:
    """Update the screen until the key q, or until all loaders end."""
    before: dict[tuple[int, str], LoaderReading] = {}
    now: list[LoaderReading] = read_all(pid)
    with keyboard() as keys, Live(console=console, auto_refresh=False, screen=False) as live:
        view = ScreenState(has_keyboard=keys.is_available)
        while True:
            pairs = [(before.get(each.key), each) for each in now]
            live.update(_screens(pairs, console, console.height, view), refresh=True)
            if not now and before:
                return
            key = keys.wait(interval_s)
            if key == "q":
                return
            view = view.after(key)
            if not key and not view.is_paused:
                before, now = {each.key: each for each in now}, read_all(pid)


_LEAST_LINES = 6
"""Least height of a further loader: the place, the loop, and a worker."""


_WIDER_IN_ASCII = 2
"""Columns by which the sign of a line that was cut is wider in ASCII."""


def _screens(
    readings: Sequence[tuple[LoaderReading | None, LoaderReading]],
    console: Console,
    height: int | None,
    view: ScreenState | None = None,
) -> Group:
    """Screens of all loaders, within the height of a terminal."""
    view = view or ScreenState()
    width = console.width - (printable("…", console.encoding) != "…") * _WIDER_IN_ASCII
    lines: list[Text] = [] if readings else [Text(line) for line in wrap(_NOTHING, width)]
    left = None if height is None else height - view.has_keyboard
    shown = readings if left is None else readings[: max(1, left // _LEAST_LINES)]
    hidden = len(readings) - len(shown)
    if left is not None:
        left -= (hidden > 0) + len(shown) - 1
    for number, (before, now) in enumerate(shown):
        share = None if left is None else left // (len(shown) - number)
        of_loader = screen(before, now, width, view, share)
        left = None if left is None else left - len(of_loader)
        lines += [*([Text()] if lines else []), *of_loader]
    if hidden:
        lines.append(Text(f"and {hidden} more: feedline top PID shows one"[:width], style="dim"))
    if view.has_keyboard:
        lines.append(Text(view.help(width), style="dim"))
    for line in lines:
        line.plain = printable(line.plain, console.encoding)
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
