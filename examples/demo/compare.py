"""One network trained twice over the same images: through torch's loader, then through feedline's."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from time import monotonic_ns, perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

import feedline as fl
from dataset import CroppedImages, EpochSampler, IndexRng, Sample, loader_rng, tutorial_folder
from feedline.loader.monitoring.resources import usable_cpus
from feedline.loader.report import Context, Stats, Totals, Verdict, diagnose
from feedline.workers.registry import INLINE, PROCESSES
from resume import ResumeTest, run_resume_test
from training import MAIN_PROCESS, Batch, Span, TrainingRun, TrainingStep, train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from image_files import ImageSet

PIXELS = 96
RESUME_IMAGES = 1_280
"""Images of the resume test: enough batches to stop in the middle, few enough to read three times in seconds."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The command-line options that both trainings share."""

    epochs: int
    workers: int
    seed: int
    batch_size: int = 64

    def resumed_workers(self) -> int:
        """Another number of workers, smaller where possible."""
        return self.workers - 1 if self.workers > 1 else self.workers + 1


@dataclass(frozen=True, slots=True)
class Side:
    """Results of one loader. `first_s` is the wait for the first batch of the first such loader in this process."""

    first_s: float
    run: TrainingRun
    stats: Stats
    verdict: Verdict

    def seconds_per_batch(self, *stages: str) -> float:
        """Total time of these stages per batch, summed over all workers."""
        times = (self.stats.stages[stage].total_s for stage in stages if stage in self.stats.stages)
        return sum(times) / self.stats.batches

    def summary(self) -> dict[str, Any]:
        """The results as a JSON object."""
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
    """Both trainings and the resume test."""

    torch: Side
    feedline: Side
    resumed: ResumeTest

    @property
    def largest_difference(self) -> float:
        """Largest difference between the losses of a batch; infinite if the numbers of batches differ."""
        theirs, ours = self.torch.run.losses, self.feedline.run.losses
        if len(theirs) != len(ours):
            return float("inf")
        return max(abs(a - b) for a, b in zip(theirs, ours, strict=True))

    @property
    def equal(self) -> bool:
        """True if all losses are equal and the resumed epoch is exact."""
        return self.largest_difference == 0 and self.resumed.equal

    def summary(self) -> dict[str, Any]:
        """The results as a JSON object."""
        return {
            "equal": self.equal,
            "largest_loss_difference": self.largest_difference,
            "torch": self.torch.summary(),
            "feedline": self.feedline.summary(),
            "resume": self.resumed.summary(),
        }


def number_of_batches(images: ImageSet, settings: Settings) -> int:
    """Batches of one training, over all epochs."""
    return -(-len(images.files) // settings.batch_size) * settings.epochs


def with_torch(images: ImageSet, settings: Settings, tick: Callable[[float], None]) -> Side:
    """Train through torch's loader."""
    first_s = _first_batch_s(TimedTorchLoader(**_loader_arguments(images, settings)))
    loader = TimedTorchLoader(**_loader_arguments(images, settings))
    run = _train(loader, images, settings, tick)
    stats = loader.stats(run.spans, settings.batch_size)
    return Side(first_s, run, stats, diagnose(stats, loader.context()))


def with_feedline(images: ImageSet, settings: Settings, tick: Callable[[float], None]) -> Side:
    """Train through feedline's loader, with the same arguments."""
    loader: fl.DataLoader[Batch]
    with fl.DataLoader(**_loader_arguments(images, settings)) as loader:
        first_s = _first_batch_s(loader)
    with fl.DataLoader(**_loader_arguments(images, settings)) as loader:
        run = _train(loader, images, settings, tick)
        return Side(first_s, run, loader.stats(), loader.report())


def stop_and_resume(images: ImageSet, settings: Settings) -> ResumeTest:
    """Run the resume test on a part of the images, with crops that feedline's loader seeds."""
    some = replace(images, files=images.files[:: max(1, len(images.files) // RESUME_IMAGES)])
    dataset = CroppedImages(some, loader_rng, PIXELS)
    workers = settings.workers, settings.resumed_workers()
    return run_resume_test(dataset, batch_size=settings.batch_size // 2, seed=settings.seed, workers=workers)


def warm_up(images: ImageSet, settings: Settings) -> None:
    """Read all files into the page cache and run three training steps, untimed."""
    # Otherwise the loader that comes first would pay for both.
    for file in images.files:
        (images.root / file.path).read_bytes()
    dataset = CroppedImages(images, IndexRng(0), PIXELS)
    batch = default_collate([dataset[i % len(dataset)] for i in range(settings.batch_size)])
    step = TrainingStep(len(images.classes), seed=0)
    for _ in range(3):
        step(*batch)


def _loader_arguments(images: ImageSet, settings: Settings) -> dict[str, Any]:
    arguments = {
        "batch_size": settings.batch_size,
        "num_workers": settings.workers,
        "persistent_workers": settings.workers > 0,
    }
    folder = tutorial_folder(images, PIXELS)
    if folder is not None:  # torch's generator decides order and crops
        return {"dataset": folder, "shuffle": True, **arguments}
    by_hand = CroppedImages(images, IndexRng(settings.seed), PIXELS, settings.epochs)
    return {"dataset": by_hand, "sampler": EpochSampler(len(images.files), settings.seed), **arguments}


def reading_plan(images: ImageSet, settings: Settings) -> str:
    """The plan of feedline's loader, and why the dataset is written by hand if it is."""
    plan = str(fl.DataLoader(**_loader_arguments(images, settings)).plan())
    if tutorial_folder(images, PIXELS) is None:
        return f"torchvision cannot be imported here, so the dataset is written by hand.\n{plan}"
    return plan


def _first_batch_s(loader: Iterable[Batch]) -> float:
    start = perf_counter()
    next(iter(loader))
    return perf_counter() - start


def _train(loader: Iterable[Batch], images: ImageSet, settings: Settings, tick: Callable[[float], None]) -> TrainingRun:
    return train(loader, epochs=settings.epochs, classes=len(images.classes), seed=settings.seed, tick=tick)


class TimedDataset(Dataset[Any]):
    """A dataset and its collate function, which behave as torch's do and return their times with the batch."""

    def __init__(self, dataset: Dataset[Sample]) -> None:
        self.dataset = dataset
        self.fetched: Span | None = None

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Fetch the samples one by one."""
        start = monotonic_ns()
        samples = [self.dataset[index] for index in indices]
        self.fetched = _finish("fetch", start)
        return samples

    def collate(self, samples: list[Sample]) -> tuple[Batch, list[Span]]:
        """The batch of torch's default collate function, and the times of fetching and collating."""
        assert self.fetched is not None
        start = monotonic_ns()
        batch: Batch = default_collate(samples)
        return batch, [self.fetched, _finish("collate", start)]


def _finish(stage: str, start_ns: int) -> Span:
    worker = get_worker_info()
    return Span(stage, start_ns, monotonic_ns(), MAIN_PROCESS if worker is None else worker.id)


class TimedTorchLoader:
    """torch's DataLoader, with the statistics and the verdict that feedline's loader has."""

    def __init__(self, dataset: Dataset[Sample], **arguments: Any) -> None:
        self.timed = TimedDataset(dataset)
        self.loader = torch.utils.data.DataLoader(self.timed, collate_fn=self.timed.collate, **arguments)
        self.spans: list[list[Span]] = []

    def __iter__(self) -> Iterator[Batch]:
        for batch, spans in self.loader:
            self.spans.append(spans)
            yield batch

    def stats(self, loop: Sequence[Span], batch_size: int) -> Stats:
        """Statistics from the loop's alternating waits and steps."""
        totals = Totals()
        before = [loop[0]._replace(stage="step"), *loop[1::2]]  # the step before each wait; the first wait has none
        for step, wait, made in zip(before, loop[::2], self.spans, strict=False):
            totals.add([step, wait, *made], batch_size)
        return totals.stats()

    def context(self) -> Context:
        """The configuration of the loader, as feedline's diagnosis expects it."""
        workers = self.loader.num_workers
        return Context(
            dataset=type(self.timed.dataset).__name__,
            pool=PROCESSES if workers else INLINE,
            num_workers=workers,
            prefetch_factor=self.loader.prefetch_factor or 0,
            cpus=usable_cpus(),
        )
