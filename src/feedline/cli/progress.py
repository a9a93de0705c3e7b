"""Progress bars of long work, one for each phase."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from feedline.datasets.sample_lists import ReportProgress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console


@contextmanager
def bars(console: Console) -> Iterator[ReportProgress]:
    """Yield a function that draws one progress bar per phase."""
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
