"""A small convolutional network, trained over any loader, with each wait and step timed."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic_ns
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from feedline.loader.monitoring.resources import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Batch = tuple[torch.Tensor, torch.Tensor]

MAIN_PROCESS = -1


class Span(NamedTuple):
    """One timed stage, in nanoseconds of the monotonic clock, and the worker that ran it."""

    stage: str
    start_ns: int
    stop_ns: int
    worker: int = MAIN_PROCESS


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Results and times of one training. `spans` alternate between "wait" and "step"."""

    losses: tuple[float, ...]
    accuracy: float
    images: int
    spans: tuple[Span, ...]

    def seconds(self, stage: str) -> float:
        """Total time of all spans of `stage`."""
        return sum(span.stop_ns - span.start_ns for span in self.spans if span.stage == stage) / 1e9

    @property
    def wall_s(self) -> float:
        """Time from the request for the first batch to the end of the last step."""
        return (self.spans[-1].stop_ns - self.spans[0].start_ns) / 1e9

    @property
    def first_batch_s(self) -> float:
        """Wait for the first batch, which includes the start of the workers."""
        return (self.spans[0].stop_ns - self.spans[0].start_ns) / 1e9

    @property
    def images_per_s(self) -> float:
        """Training throughput."""
        return self.images / self.wall_s


def train(
    loader: Iterable[Batch], *, epochs: int, classes: int, seed: int, tick: Callable[[float], None]
) -> TrainingRun:
    """Train a new network, whose weights `seed` fixes, and call `tick(loss)` after each batch.

    `accuracy` covers the last quarter of the batches, measured before each step.
    """
    step = TrainingStep(classes, seed)
    losses, hits, sizes, spans = [], [], [], []
    for _ in range(epochs):
        requested = monotonic_ns()  # before iter(), because the start of the workers is part of the wait
        for images, labels in loader:
            received = monotonic_ns()
            loss, hit = step(images, labels)
            done = monotonic_ns()
            spans += [Span("wait", requested, received), Span("step", received, done)]
            losses.append(loss)
            hits.append(hit)
            sizes.append(len(labels))
            tick(loss)
            requested = monotonic_ns()
    last = max(1, len(sizes) // 4)
    return TrainingRun(tuple(losses), sum(hits[-last:]) / sum(sizes[-last:]), sum(sizes), tuple(spans))


class TrainingStep:
    """One optimizer step. Initial weights depend on `seed` alone."""

    def __init__(self, classes: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.network = make_network(classes)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=2e-3)

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
        """The loss and the number of correct predictions, both before the update."""
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.network(images)
        loss = nn.functional.cross_entropy(logits, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item(), int((logits.argmax(1) == labels).sum())


def make_network(classes: int) -> nn.Module:
    """Three convolutions and global average pooling, for images of about 100×100 pixels."""
    return nn.Sequential(
        *_layer(3, 32, kernel=7, stride=4),
        *_layer(32, 64, kernel=3, stride=2),
        *_layer(64, 128, kernel=3, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, classes),
    )


def _layer(channels_in: int, channels_out: int, kernel: int, stride: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(channels_out), nn.ReLU()


@contextmanager
def leave_cpus_to(workers: int) -> Iterator[None]:
    """Within the block, limit torch's threads to the CPUs that the workers leave, at least one."""
    # With more threads, every operation waits for the thread whose CPU a worker occupies.
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, usable_cpus() - workers))
    try:
        yield
    finally:
        torch.set_num_threads(before)
