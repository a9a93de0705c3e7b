"""What the demo shows: values in, rich text out; it reads in 60 columns as in 200."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from feedline.cli.demo.resume import checksum

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from feedline.cli.demo.comparison import Outcome, Settings, Side
    from feedline.cli.demo.corpus import Corpus
    from feedline.cli.demo.resume import Rehearsal
    from feedline.cli.demo.training import Run
    from feedline.diagnose import Verdict


def progress(console: Console) -> Progress:
    """A bar that says what, how far, how long, and a note."""
    return Progress(
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
        console=console,
    )


def heading(text: str) -> RenderableType:
    """The title of one part."""
    return Text(f"\n{text}", style="bold")


def corpus(pictures: Corpus) -> RenderableType:
    """What is trained on, and what it is not."""
    return Text(
        f"{len(pictures.pictures):,} JPEG files, {pictures.nbytes() / 1e6:.0f} MB, {len(pictures.classes)} classes: "
        "random crops of a few real photographs, and enlarged handwritten digits. Good for timing, not for judging "
        f"what a model learns. Whose they are: {pictures.root}/ATTRIBUTION.md"
    )


def trainings(outcome: Outcome, settings: Settings) -> RenderableType:
    """Both trainings side by side, ending with the two verdicts."""
    table = Table(box=box.ROUNDED, width=None, expand=False)
    table.add_column("", no_wrap=True)
    table.add_column("torch", justify="right")
    table.add_column("feedline", justify="right", style="bold")
    for row in _rows(outcome):
        table.add_row(*row)
    return Group(table, _losses_line(outcome), _workers_line(settings), verdicts(outcome))


def verdicts(outcome: Outcome) -> RenderableType:
    """What limits each run, in words."""
    table = Table(box=box.ROUNDED, title="What limits it?", title_justify="left", title_style="bold")
    table.add_column("torch", ratio=1, overflow="fold")
    table.add_column("feedline", ratio=1, overflow="fold")
    table.add_row(_words(outcome.torch.verdict), _words(outcome.feedline.verdict))
    return table


def resumed(rehearsal: Rehearsal) -> RenderableType:
    """The second act."""
    first, second = rehearsal.workers
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("cut", f"after {len(rehearsal.before)} of {len(rehearsal.uninterrupted)} batches, {_workers(first)}")
    table.add_row("state", Text(f"{len(rehearsal.state.encode())} bytes of JSON: {rehearsal.state}"))
    table.add_row("resumed", f"with {_workers(second)}: {len(rehearsal.after)} batches")
    table.add_row("in one go", checksum(rehearsal.uninterrupted))
    table.add_row("in two", checksum(rehearsal.before + rehearsal.after))
    return Group(table, _judged(rehearsal.equal, "The same batches, bit for bit.", "The batches differ."))


def _rows(outcome: Outcome) -> list[tuple[str, str, str]]:
    cells: dict[str, Callable[[Side], str]] = {
        "pictures per second": lambda side: f"{side.run.images_per_s:.0f}",
        "whole training": lambda side: f"{side.run.wall_s:.1f} s",
        "first batch ever": lambda side: f"{side.first_s * 1e3:.0f} ms",
        "  of this loader": lambda side: f"{side.run.first_batch_s * 1e3:.0f} ms",
        "waited for data": lambda side: _share(side.run, "wait"),
        "trained": lambda side: _share(side.run, "step"),
        "a batch: fetch": lambda side: _milliseconds(side, "fetch"),
        "  collate": lambda side: _milliseconds(side, "collate"),
        "  send, receive": lambda side: _milliseconds(side, "encode", "decode"),
        "loss, first to last": lambda side: f"{side.run.losses[0]:.3f} → {side.run.losses[-1]:.3f}",
        "accuracy at the end": lambda side: f"{side.run.accuracy:.0%}",
    }
    return [(name, told(outcome.torch), told(outcome.feedline)) for name, told in cells.items()]


def _share(run: Run, stage: str) -> str:
    return f"{run.seconds(stage):.1f} s ({run.seconds(stage) / run.wall_s:.0%})"


def _milliseconds(side: Side, *stages: str) -> str:
    return f"{side.each_s(*stages) * 1e3:.1f} ms" if side.each_s(*stages) else "not seen"


def _words(verdict: Verdict) -> Text:
    advice = (f"→ {hint}" for hint in verdict.advice)
    return Text("\n".join([verdict.headline, verdict.explanation, *advice]).replace(" %", "%"))


def _losses_line(outcome: Outcome) -> Text:
    number, difference = len(outcome.feedline.run.losses), outcome.largest_difference
    return _judged(
        difference == 0,
        f"All {number} losses are equal (largest difference {difference:g}): both loaders fed the same batches.",
        f"The losses differ by up to {difference:g}: the loaders fed different batches.",
    )


def _workers_line(settings: Settings) -> Text:
    told = f"Same arguments, same seed {settings.seed}, {_workers(settings.workers)}; one import changed."
    return Text(told, style="dim")


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number or 'no'} workers"


def _judged(good: bool, yes: str, no: str) -> Text:
    return Text(f"✓ {yes}", style="green") if good else Text(f"✗ {no}", style="bold red")
