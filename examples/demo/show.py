"""Results as rich text that fits terminals of 60 to 200 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from feedline.loader.report.layout import gain_of
from resume import checksum

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from compare import Outcome, Settings, Side
    from feedline.loader.report import Verdict
    from image_files import ImageSet
    from resume import ResumeTest
    from training import TrainingRun


def progress(console: Console) -> Progress:
    """A progress bar with name, count, elapsed time and a note."""
    return Progress(
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
        console=console,
    )


def heading(text: str) -> RenderableType:
    """The title of a section."""
    return Text(f"\n{text}", style="bold")


def image_set(images: ImageSet) -> RenderableType:
    """Number, size, classes and origin of the images."""
    return Text(
        f"{len(images.files):,} JPEG files, {images.nbytes() / 1e6:.0f} MB, {len(images.classes)} classes: "
        "random crops of a few real photographs, and enlarged handwritten digits. Good for timing, not for judging "
        f"what a model learns. Whose they are: {images.root}/ATTRIBUTION.md"
    )


def trainings(outcome: Outcome, settings: Settings) -> RenderableType:
    """A table of both trainings, followed by the two verdicts."""
    table = Table(box=box.ROUNDED, width=None, expand=False)
    table.add_column("", no_wrap=True)
    table.add_column("torch", justify="right")
    table.add_column("feedline", justify="right", style="bold")
    for row in _rows(outcome):
        table.add_row(*row)
    return Group(table, _losses_line(outcome), _workers_line(settings), verdicts(outcome))


def verdicts(outcome: Outcome) -> RenderableType:
    """The verdict on each loop, side by side."""
    table = Table(box=box.ROUNDED, title="What limits it?", title_justify="left", title_style="bold")
    table.add_column("torch", ratio=1, overflow="fold")
    table.add_column("feedline", ratio=1, overflow="fold")
    table.add_row(_words(outcome.torch.verdict), _words(outcome.feedline.verdict))
    return table


def resumed(test: ResumeTest) -> RenderableType:
    """The results of the resume test."""
    first, second = test.workers
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("cut", f"after {len(test.before)} of {len(test.uninterrupted)} batches, {_workers(first)}")
    table.add_row("state", Text(f"{len(test.state.encode())} bytes of JSON: {test.state}"))
    table.add_row("resumed", f"with {_workers(second)}: {len(test.after)} batches")
    table.add_row("in one go", checksum(test.uninterrupted))
    table.add_row("in two", checksum(test.before + test.after))
    return Group(table, _check_line(test.equal, "The same batches, bit for bit.", "The batches differ."))


def _rows(outcome: Outcome) -> list[tuple[str, str, str]]:
    cells: dict[str, Callable[[Side], str]] = {
        "images per second": lambda side: f"{side.run.images_per_s:.0f}",
        "whole training": lambda side: f"{side.run.wall_s:.1f} s",
        "first batch ever": lambda side: f"{side.first_s * 1e3:.0f} ms",
        "  of this loader": lambda side: f"{side.run.first_batch_s * 1e3:.0f} ms",
        "waited for data": lambda side: _share(side.run, "wait"),
        "trained": lambda side: _share(side.run, "step"),
        "a batch: fetch": lambda side: _milliseconds(side, "fetch"),
        "  collate": lambda side: _milliseconds(side, "collate"),
        "  send, receive": lambda side: _milliseconds(side, "serialize", "receive"),
        "loss, first to last": lambda side: f"{side.run.losses[0]:.3f} → {side.run.losses[-1]:.3f}",
        "accuracy at the end": lambda side: f"{side.run.accuracy:.0%}",
    }
    return [(name, cell(outcome.torch), cell(outcome.feedline)) for name, cell in cells.items()]


def _share(run: TrainingRun, stage: str) -> str:
    return f"{run.seconds(stage):.1f} s ({run.seconds(stage) / run.wall_s:.0%})"


def _milliseconds(side: Side, *stages: str) -> str:
    seconds = side.seconds_per_batch(*stages)
    return f"{seconds * 1e3:.1f} ms" if seconds else "not seen"


def _words(verdict: Verdict) -> Text:
    advice = (f"→ {advice} ({gain_of(advice)})" for advice in verdict.advice)
    return Text("\n".join([verdict.headline, verdict.explanation, *advice]).replace(" %", "%"))


def _losses_line(outcome: Outcome) -> Text:
    number, difference = len(outcome.feedline.run.losses), outcome.largest_difference
    return _check_line(
        difference == 0,
        f"All {number} losses are equal (largest difference {difference:g}): both loaders fed the same batches.",
        f"The losses differ by up to {difference:g}: the loaders fed different batches.",
    )


def _workers_line(settings: Settings) -> Text:
    text = f"Same arguments, same seed {settings.seed}, {_workers(settings.workers)}; one import changed."
    return Text(text, style="dim")


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number or 'no'} workers"


def _check_line(good: bool, yes: str, no: str) -> Text:
    return Text(f"✓ {yes}", style="green") if good else Text(f"✗ {no}", style="bold red")
