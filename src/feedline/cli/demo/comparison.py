"""One network trained twice over the same pictures: through torch's loader, then through feedline's."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

import feedline as fl
from feedline.cli.demo.observed import Observed
from feedline.cli.demo.pictures import IndexRng, Passes, Pictures, loader_rng
from feedline.cli.demo.resume import Rehearsal, rehearse
from feedline.cli.demo.training import Batch, Run, train, warm_up
from feedline.diagnose import Stats, Verdict, diagnose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from feedline.cli.demo.corpus import Corpus

PIXELS = 96
BATCH_SIZE = 64
REHEARSED = 1_280
"""Pictures of the second act: enough batches to cut in the middle, few enough to read three times in seconds."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the person chose."""

    epochs: int
    workers: int
    seed: int

    def resumed_workers(self) -> int:
        """Another number of workers than the first, and no more than it where that can be."""
        return self.workers - 1 if self.workers > 1 else self.workers + 1


@dataclass(frozen=True, slots=True)
class Side:
    """One loader: the training through it, what its stages took, and what limits it.

    `first_s` is how long the very first loader of its kind in this process took for its first batch.
    """

    first_s: float
    run: Run
    stats: Stats
    verdict: Verdict

    def each_s(self, *stages: str) -> float:
        """Seconds per batch that these stages took together, wherever they ran."""
        times = (self.stats.stages[stage].total_s for stage in stages if stage in self.stats.stages)
        return sum(times) / self.stats.batches

    def summary(self) -> dict[str, Any]:
        """The figures, as JSON would hold them."""
        run = self.run
        return {
            "images_per_s": run.images_per_s,
            "wall_s": run.wall_s,
            "first_batch_of_first_loader_s": self.first_s,
            "first_batch_s": run.first_batch_s,
            "wait_s": run.seconds("wait"),
            "step_s": run.seconds("step"),
            "stages_s": {stage: times.total_s for stage, times in self.stats.stages.items()},
            "losses": run.losses,
            "accuracy": run.accuracy,
            "verdict": asdict(self.verdict),
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """Both trainings and the resumed epoch."""

    torch: Side
    feedline: Side
    rehearsal: Rehearsal

    @property
    def largest_difference(self) -> float:
        """Between the losses of the two trainings, batch by batch; infinite if their numbers differ."""
        theirs, ours = self.torch.run.losses, self.feedline.run.losses
        if len(theirs) != len(ours):
            return float("inf")
        return max(abs(a - b) for a, b in zip(theirs, ours, strict=True))

    @property
    def equal(self) -> bool:
        """Whether both loaders fed the same batches and the resumed epoch was exact."""
        return self.largest_difference == 0 and self.rehearsal.equal

    def summary(self) -> dict[str, Any]:
        """The figures, as JSON would hold them."""
        return {
            "equal": self.equal,
            "largest_loss_difference": self.largest_difference,
            "torch": self.torch.summary(),
            "feedline": self.feedline.summary(),
            "resume": self.rehearsal.summary(),
        }


def steps(corpus: Corpus, settings: Settings) -> int:
    """How many batches one training takes."""
    return -(-len(corpus.pictures) // BATCH_SIZE) * settings.epochs


def with_torch(corpus: Corpus, settings: Settings, tick: Callable[[float], None]) -> Side:
    """Train through torch's loader."""
    first_s = _first_batch_s(Observed(**_arguments(corpus, settings)))
    loader = Observed(**_arguments(corpus, settings))
    run = _train(loader, corpus, settings, tick)
    stats = loader.stats(run.spans, BATCH_SIZE)
    return Side(first_s, run, stats, diagnose(stats, loader.context()))


def with_feedline(corpus: Corpus, settings: Settings, tick: Callable[[float], None]) -> Side:
    """Train through feedline's loader: the same arguments, another class."""
    loader: fl.DataLoader[Batch]
    with fl.DataLoader(**_arguments(corpus, settings)) as loader:
        first_s = _first_batch_s(loader)
    with fl.DataLoader(**_arguments(corpus, settings)) as loader:
        run = _train(loader, corpus, settings, tick)
        return Side(first_s, run, loader.stats(), loader.report())


def cut_and_resume(corpus: Corpus, settings: Settings) -> Rehearsal:
    """Feed a part of the pictures in one go and in two, with random crops drawn from feedline's own seed."""
    some = replace(corpus, pictures=corpus.pictures[:: max(1, len(corpus.pictures) // REHEARSED)])
    pictures = Pictures(some, loader_rng, PIXELS)
    workers = settings.workers, settings.resumed_workers()
    return rehearse(pictures, batch_size=BATCH_SIZE // 2, seed=settings.seed, workers=workers)


def prepare(corpus: Corpus) -> None:
    """Bring the files into the page cache and torch to speed, so that whoever comes first pays for neither."""
    for picture in corpus.pictures:
        (corpus.root / picture.file).read_bytes()
    pictures = Pictures(corpus, IndexRng(0), PIXELS)
    batch = torch.utils.data.default_collate([pictures[i % len(pictures)] for i in range(BATCH_SIZE)])
    warm_up(batch, len(corpus.classes))


def _arguments(corpus: Corpus, settings: Settings) -> dict[str, Any]:
    return {
        "dataset": Pictures(corpus, IndexRng(settings.seed), PIXELS, settings.epochs),
        "batch_size": BATCH_SIZE,
        "sampler": Passes(len(corpus.pictures), settings.seed),
        "num_workers": settings.workers,
        "persistent_workers": settings.workers > 0,
    }


def _first_batch_s(loader: Iterable[Batch]) -> float:
    start = perf_counter()
    next(iter(loader))
    return perf_counter() - start


def _train(loader: Iterable[Batch], corpus: Corpus, settings: Settings, tick: Callable[[float], None]) -> Run:
    return train(loader, epochs=settings.epochs, classes=len(corpus.classes), seed=settings.seed, tick=tick)
