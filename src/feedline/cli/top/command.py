"""`feedline top`: a screen that follows the loaders of other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from feedline.cli.top.reading import LoaderReading, read_all
from feedline.cli.top.screen import screen

FIRST_S = 0.3
"""Time between the two readings of a single report: CPU shares need two."""


_NOTHING = (
    "No loop of feedline runs that you may look at. A loader is shown from its first iteration until it is closed; "
    "those of other users are shown to root only."
)


def report(pid: int | None, pause: Callable[[float], None] = time.sleep) -> list[tuple[LoaderReading, LoaderReading]]:
    """Two readings of each loader, a moment apart."""
    before = {reading.key: reading for reading in read_all(pid)}
    pause(FIRST_S)
    return [(before.get(reading.key, reading), reading) for reading in read_all(pid)]


def summary(readings: Sequence[tuple[LoaderReading, LoaderReading]]) -> list[dict[str, Any]]:
    """The readings as JSON values."""
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
    """Renew the screen until Ctrl-C, or until the process has ended."""
    before: dict[tuple[int, str], LoaderReading] = {}
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            now = read_all(pid)
            live.update(_screens([(before.get(each.key), each) for each in now], console.width), refresh=True)
            if not now and before:
                return
            before = {each.key: each for each in now}
            time.sleep(interval_s)


def _screens(readings: Sequence[tuple[LoaderReading | None, LoaderReading]], width: int) -> Group:
    if not readings:
        return Group(Text(_NOTHING))
    lines: list[Text] = []
    for before, now in readings:
        lines += [*([Text()] if lines else []), *screen(before, now, width)]
    return Group(*lines)
