"""The demo from the first picture to the last verdict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from feedline.cli.demo import comparison, show
from feedline.cli.demo.corpus import plan, write
from feedline.cli.demo.training import spared_threads
from feedline.user_cache import user_cache

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from feedline.cli.demo.comparison import Outcome, Settings, Side
    from feedline.cli.demo.corpus import Corpus


def cache_directory() -> Path:
    """Where pictures are kept when nobody says otherwise: `~/.cache/feedline/demo`, or below `XDG_CACHE_HOME`."""
    return Path(user_cache("demo"))


def run(directory: Path, images: int, settings: Settings, console: Console) -> Outcome:
    """Make the pictures, train twice, resume once, and show all of it on `console`."""
    pictures = make_pictures(plan(directory, images), console)
    console.print(show.heading("One network, trained twice"))
    with spared_threads(settings.workers):
        comparison.prepare(pictures)
        theirs = _shown(console, "torch", comparison.with_torch, pictures, settings)
        ours = _shown(console, "feedline", comparison.with_feedline, pictures, settings)
    rehearsal = comparison.cut_and_resume(pictures, settings)
    outcome = comparison.Outcome(theirs, ours, rehearsal)
    console.print(show.trainings(outcome, settings))
    console.print(show.heading("Stopped in the middle of an epoch, resumed elsewhere"))
    console.print(show.resumed(rehearsal))
    return outcome


def make_pictures(pictures: Corpus, console: Console) -> Corpus:
    """The corpus, with whatever was missing of it written."""
    missing = pictures.missing()
    console.print(show.heading("Pictures"))
    if missing:
        with show.progress(console) as bar:
            task = bar.add_task("cutting", total=len(missing), note="")
            try:
                write(pictures, missing, lambda: bar.advance(task))
            except OSError as error:
                error.add_note("Choose another folder for the pictures with --dir.")
                raise
    console.print(show.corpus(pictures))
    return pictures


def _shown(
    console: Console,
    name: str,
    train: Callable[[Corpus, Settings, Callable[[float], None]], Side],
    pictures: Corpus,
    settings: Settings,
) -> Side:
    with show.progress(console) as bar:
        task = bar.add_task(name, total=comparison.steps(pictures, settings), note="")
        return train(pictures, settings, lambda loss: bar.update(task, advance=1, note=f"loss {loss:.3f}"))
