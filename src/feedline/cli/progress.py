"""The bars of long work, and sizes as people read them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console


Step = Callable[[str, int, int], None]
"""`step(phase, done, total)`: a bar for each phase."""


@contextmanager
def bars(console: Console) -> Iterator[Step]:
    """One bar for each phase that is told of, in the order in which they are; nothing is drawn before that."""
    columns = (
        TextColumn("{task.description:<8}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
    )
    tasks = dict[str, int]()
    with Progress(*columns, console=console) as progress:

        def step(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=total)
            progress.update(progress.task_ids[tasks[phase]], completed=done, total=total)

        yield step


def told_bytes(nbytes: float) -> str:
    """`1.5 GB`; decimal units, as `ls --si` and shops have them."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
