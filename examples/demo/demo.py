"""Train a small network on real images, through torch's DataLoader and through feedline's, and compare.

Shows where the time went, that all losses are equal, and what limits each loop. Then stops an epoch in the middle and
resumes it with another number of workers. Nothing is downloaded.

The images are random crops of photographs, and handwritten digits, that scikit-learn, scikit-image and matplotlib
ship; ATTRIBUTION.md next to them names their authors. They are made once. An interrupted run continues.

Exit code: 0 when everything is equal, 1 when a loss or a resumed batch differs, 2 when the demo cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

import compare
import feedline as fl
import show
from compare import Outcome, Settings, Side
from feedline.loader.monitoring.resources import usable_cpus
from image_files import ImageSet, plan_images, write_images
from training import leave_cpus_to

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code."""
    options = _parser().parse_args(arguments)
    settings = Settings(options.epochs, options.workers, options.seed)
    try:
        outcome = run(options.dir, options.images, settings, Console(stderr=options.json))
    except (fl.errors.FeedlineError, OSError) as error:
        message = "\n".join([str(error), *getattr(error, "__notes__", ())])
        Console(stderr=True).print(Text.assemble(("demo: ", "bold red"), message), soft_wrap=True)
        return 2
    if options.json:
        print(json.dumps(outcome.summary(), indent=2))
    return 0 if outcome.equal else 1


def run(directory: Path, count: int, settings: Settings, console: Console) -> Outcome:
    """Make the images, train twice, resume once, and show the results on `console`."""
    images = make_images(plan_images(directory, count), console)
    console.print(show.heading("One network, trained twice"))
    with leave_cpus_to(settings.workers):
        compare.warm_up(images, settings)
        torch_side = _train_with_bar(console, "torch", compare.with_torch, images, settings)
        feedline_side = _train_with_bar(console, "feedline", compare.with_feedline, images, settings)
    resumed = compare.stop_and_resume(images, settings)
    outcome = Outcome(torch_side, feedline_side, resumed)
    console.print(show.trainings(outcome, settings))
    console.print(show.heading("How feedline read the images: print(loader.plan())"))
    console.print(compare.reading_plan(images, settings), markup=False, highlight=False)
    console.print(show.heading("Stopped in the middle of an epoch, resumed elsewhere"))
    console.print(show.resumed(resumed))
    return outcome


def make_images(images: ImageSet, console: Console) -> ImageSet:
    """Write the image files that are missing, and return `images`."""
    missing = images.missing()
    console.print(show.heading("Images"))
    if missing:
        with show.progress(console) as bar:
            task = bar.add_task("cutting", total=len(missing), note="")
            try:
                write_images(images, missing, lambda: bar.advance(task))
            except OSError as error:
                error.add_note("Choose another folder for the images with --dir.")
                raise
    console.print(show.image_set(images))
    return images


def _train_with_bar(
    console: Console,
    name: str,
    train: Callable[[ImageSet, Settings, Callable[[float], None]], Side],
    images: ImageSet,
    settings: Settings,
) -> Side:
    with show.progress(console) as bar:
        task = bar.add_task(name, total=compare.number_of_batches(images, settings), note="")
        return train(images, settings, lambda loss: bar.update(task, advance=1, note=f"loss {loss:.3f}"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "feedline", "demo")
    add = parser.add_argument
    add("--dir", type=Path, default=cache, help="folder of the images (default: %(default)s)")
    add("--images", type=_integer(200, 100_000), default=6000, help="number of images (default: %(default)s)")
    add("--epochs", type=_integer(1), default=1, help="epochs of each training (default: %(default)s)")
    add(
        "--workers",
        type=_integer(0),
        default=min(4, usable_cpus()),
        help="worker processes (default: one per CPU, at most 4)",
    )
    add("--seed", type=_integer(0), default=0, help="fixes network, order and crops (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object to standard output, and the rest to standard error")
    return parser


def _integer(least: int, most: int | None = None) -> Callable[[str], int]:
    def integer(text: str) -> int:
        number = int(text)
        if number < least or (most is not None and number > most):
            limits = f"at least {least}" if most is None else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"{number} is out of range; expected {limits}")
        return number

    return integer


if __name__ == "__main__":
    sys.exit(main())
