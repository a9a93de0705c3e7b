"""A small convolutional network, trained over whatever loader it is given, each stage timed from outside."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic_ns
from typing import TYPE_CHECKING

import torch
from torch import nn

from feedline.cpus import usable_cpus
from feedline.telemetry import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Run:
    """One training: what it computed, and where its time went. `spans` alternate between "wait" and "step"."""

    losses: tuple[float, ...]
    accuracy: float
    images: int
    spans: tuple[Span, ...]

    def seconds(self, stage: str) -> float:
        """The time spent in all spans of `stage`."""
        return sum(span.stop_ns - span.start_ns for span in self.spans if span.stage == stage) / 1e9

    @property
    def wall_s(self) -> float:
        """From asking for the first batch to the end of the last step."""
        return (self.spans[-1].stop_ns - self.spans[0].start_ns) / 1e9

    @property
    def first_batch_s(self) -> float:
        """How long the loop waited for its first batch: workers start in it."""
        return (self.spans[0].stop_ns - self.spans[0].start_ns) / 1e9

    @property
    def images_per_s(self) -> float:
        """Pictures trained on per second."""
        return self.images / self.wall_s


def train(loader: Iterable[Batch], *, epochs: int, classes: int, seed: int, tick: Callable[[float], None]) -> Run:
    """Train a fresh network, equal for equal `seed`; `tick(loss)` after each batch.

    `accuracy` is that of the last quarter of the batches, each seen for the first time.
    """
    step = Step(classes, seed)
    losses, hits, sizes, spans = [], [], [], []
    for _ in range(epochs):
        asked = monotonic_ns()  # before iter(): starting the workers is waiting, too
        for images, labels in loader:
            received = monotonic_ns()
            loss, hit = step(images, labels)
            done = monotonic_ns()
            spans += [Span("wait", asked, received), Span("step", received, done)]
            losses.append(loss)
            hits.append(hit)
            sizes.append(len(labels))
            tick(loss)
            asked = monotonic_ns()
    last = max(1, len(sizes) // 4)
    return Run(tuple(losses), sum(hits[-last:]) / sum(sizes[-last:]), sum(sizes), tuple(spans))


class Step:
    """One optimisation step; the network and optimiser it holds depend on `seed` alone."""

    def __init__(self, classes: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.network = network(classes)
        self.optimiser = torch.optim.AdamW(self.network.parameters(), lr=2e-3)

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
        """The loss, and how many labels were guessed right before the step."""
        self.optimiser.zero_grad(set_to_none=True)
        guesses = self.network(images)
        loss = nn.functional.cross_entropy(guesses, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        return loss.item(), int((guesses.argmax(1) == labels).sum())


def network(classes: int) -> nn.Module:
    """Three convolutions and a mean over what they leave: for pictures of about 100×100."""
    return nn.Sequential(
        *_layer(3, 32, kernel=7, stride=4),
        *_layer(32, 64, kernel=3, stride=2),
        *_layer(64, 128, kernel=3, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, classes),
    )


def _layer(narrow: int, wide: int, kernel: int, stride: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(narrow, wide, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(wide), nn.ReLU()


@contextmanager
def spared_threads(workers: int) -> Iterator[None]:
    """Within the block, torch computes with the CPUs that the workers leave, at least one.

    More threads than that wait for each other at every operation while a worker has their CPU.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, usable_cpus() - workers))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def warm_up(batch: Batch, classes: int) -> None:
    """Three steps nobody times, so that what torch prepares at first use is charged to neither loader."""
    step = Step(classes, seed=0)
    for _ in range(3):
        step(*batch)
