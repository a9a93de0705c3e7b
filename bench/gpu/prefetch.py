"""Claim: `device="cuda"` copies at the rate of page-locked memory and keeps the GPU as busy as resident batches.

Batches of 256 images (3×224×224, uint8, 38.5 MB) from worker processes feed a ResNet-50 in bfloat16. The peers are
torch's DataLoader with its pin thread and `non_blocking` copies, the same with the prefetcher that tutorials show, DALI
and FFCV where they are installed, and one batch that is already on the device. With "cpu" as its argument the script
runs without a GPU, to check itself: a small model, and no figures of copies.

"GPU busy" is the time between events around the steps, divided by the wall time of the same runs. A step does not
contain the wait for its batch, but it does contain the pauses between its kernels. Each run is therefore printed with
NVML's utilization, and torch's profiler shows the share of time with a kernel. "Copy hidden" is the part of the copying
that the loop did not wait for. Workers run, and memory is page-locked, before the first run.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Self

import torch
from peers import Batches, Contest, dali_memory, ffcv, optional, prefetched, publish
from torch import Tensor, nn

import feedline as fl

ON_CUDA = sys.argv[1:2] != ["cpu"]
DEVICE = "cuda" if ON_CUDA else "cpu"
BATCH_SIZE, IMAGE_COUNT, SIDE = (256, 2048, 224) if ON_CUDA else (4, 32, 32)
NUM_WORKERS = min(8, len(os.sched_getaffinity(0))) if ON_CUDA else 1
FIRST, WARM_UP, STEPS, ROUNDS = (40, 10, 20, 3) if ON_CUDA else (2, 1, 4, 1)
EPOCH, PROFILED, COPIES = 64 * BATCH_SIZE, 6, 20
THERE, OURS, THEIRS, LIMIT = "batch on the device", "feedline", "torch, pin thread", "page-locked memory alone"
TUTORIAL = "torch, pin thread and prefetcher"

Batch = tuple[Tensor, Tensor]


class RandomImages(torch.utils.data.Dataset):
    """Decoded images in memory: loading is cheap, so that the copy to the device is measured."""

    def __init__(self) -> None:
        self.images = torch.randint(0, 256, (IMAGE_COUNT, 3, SIDE, SIDE), dtype=torch.uint8)

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index % IMAGE_COUNT], index % 1000


class Bottleneck(nn.Module):
    """He et al., "Deep residual learning for image recognition" (2015), with the stride on the 3×3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(inputs, width, 1), nn.ReLU(),
            *_convolution(width, width, 3, stride), nn.ReLU(),
            *_convolution(width, 4 * width, 1),
        )  # fmt: skip
        fits = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if fits else nn.Sequential(*_convolution(inputs, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)


def resnet50() -> nn.Module:
    """The layers of ResNet-50: 25.6 million parameters."""
    layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Training:
    """A usual step: normalize on the device, forward, backward, SGD."""

    def __init__(self) -> None:
        model = resnet50() if ON_CUDA else nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 1000))
        self.model = model.to(DEVICE).to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def step(self, images: Tensor, labels: Tensor) -> None:
        self.train(images.to(memory_format=torch.channels_last).float().div(255).sub(0.45).div(0.225), labels)

    def train(self, inputs: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(inputs), labels)
        loss.backward()
        self.optimizer.step()


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one loader."""

    images_per_s: float
    busy_share: float
    nvml_share: float = math.nan
    copied_gb_per_s: float = math.nan
    hidden_share: float = math.nan


class Feed:
    """Batches of one loader, without end, and its figures of copies so far."""

    def __init__(self, batches: Iterator[Batch], stats: Callable[[], Any] | None = None) -> None:
        self.batches, self._stats = batches, stats

    def copies(self) -> tuple[float, float, float]:
        """Bytes copied, seconds of copying, and the part of them that was hidden."""
        if self._stats is None:
            return 0.0, 0.0, 0.0
        now = self._stats()
        return now.copied_nbytes, now.copy_s, now.hidden_copy_s

    def warm_up(self) -> None:
        """Start the workers, and let every buffer between them and the device be used once."""
        for _ in islice(self.batches, FIRST):
            pass
        wait()

    def run(self, training: Training, warm_up: int = WARM_UP, count: int = STEPS) -> Run:
        """`count` steps after those that use up what workers have made ahead."""
        for images, labels in islice(self.batches, warm_up):
            training.step(images, labels)
        wait()
        before, steps = self.copies(), []
        with Utilization() as nvml:
            started = perf_counter()
            for images, labels in islice(self.batches, count):
                begun = mark()
                training.step(images, labels)
                steps.append((begun, mark()))
            wait()
            wall_s = perf_counter() - started
        busy_s = sum(begun.elapsed_time(ended) for begun, ended in steps) / 1e3
        nbytes, copy_s, hidden_s = (now - then for now, then in zip(self.copies(), before, strict=True))
        copied = (nbytes / copy_s / 1e9, hidden_s / copy_s) if copy_s else (math.nan, math.nan)
        return Run(len(steps) * BATCH_SIZE / wall_s, busy_s / wall_s, nvml.share, *copied)

    def rate_alone(self) -> float:
        """GB/s of the copies while the loop does nothing else."""
        before = self.copies()
        for _ in islice(self.batches, STEPS):
            pass
        wait()
        nbytes, copy_s, _ = (now - then for now, then in zip(self.copies(), before, strict=True))
        return nbytes / copy_s / 1e9


class Utilization:
    """Mean of NVML's readings within a block; NaN without NVML."""

    def __init__(self) -> None:
        self.readings = list[float]()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read)

    @property
    def share(self) -> float:
        # A reading is of the time before it: those of the first half have seen what was before the block.
        latest = self.readings[len(self.readings) // 2 :]
        return statistics.mean(latest) if latest else math.nan

    def _read(self) -> None:
        while not self._ends.wait(0.1):
            self.readings.append(torch.cuda.utilization(0) / 100)

    def __enter__(self) -> Self:
        if ON_CUDA and find_spec("pynvml") is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        if self._thread.ident is not None:
            self._thread.join()


def profiled(feed: Feed, training: Training) -> str:
    """Figures of torch's profiler: kernels, and copies by their own durations."""
    for images, labels in islice(feed.batches, WARM_UP):
        training.step(images, labels)
    wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for images, labels in islice(feed.batches, PROFILED):
            training.step(images, labels)
        wait()
    kernels, copies, nbytes = [], [], BATCH_SIZE * 3 * SIDE * SIDE
    for event in profile.events():
        is_range = event.is_user_annotation or event.name.startswith(("feedline.", "enumerate(", "Optimizer."))
        if event.device_type == torch.autograd.DeviceType.CUDA and not is_range:
            span = event.time_range.start, event.time_range.end
            if not event.name.startswith(("Memcpy", "Memset")):
                kernels.append(span)
            elif "HtoD" in event.name and span[1] - span[0] > nbytes / 1e6:  # slower than 1 TB/s: not the labels
                copies.append(span)
    if not kernels:
        return "no kernels"
    kernels.sort()
    first, last = kernels[0][0], max(end for _, end in kernels)
    rates = [nbytes / (end - start) / 1e3 for start, end in copies]
    rate = f"{len(copies)} copies at {statistics.median(rates):.1f} GB/s" if copies else "no copies"
    return f"kernels run for {covered(kernels) / (last - first):.4f} of {(last - first) / 1e3:.0f} ms, {rate}"


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of sorted spans."""
    total, reached = 0.0, -math.inf
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def wait() -> None:
    """Wait for the device."""
    if ON_CUDA:
        torch.cuda.synchronize()


class Moment:
    """An event of the CPU, whose work is done when its call returns."""

    def __init__(self) -> None:
        self.at = perf_counter()

    def elapsed_time(self, later: Moment) -> float:
        return (later.at - self.at) * 1e3


def mark() -> Any:
    """Record the time at which the device reaches this point."""
    if not ON_CUDA:
        return Moment()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def there(_: ExitStack) -> Feed:
    """The limit: the batch is already on the device."""
    images = torch.randint(0, 256, (BATCH_SIZE, 3, SIDE, SIDE), dtype=torch.uint8).to(DEVICE)
    return Feed(repeat((images, torch.arange(BATCH_SIZE).to(DEVICE))))


def ours(data: RandomImages, stack: ExitStack) -> Feed:
    """feedline, batches on the device."""
    loader = stack.enter_context(fl.DataLoader(
        data, BATCH_SIZE, shuffle=True, drop_last=True, seed=0, num_workers=NUM_WORKERS, worker_method="process",
        persistent_workers=True, device=DEVICE,
    ))  # fmt: skip
    return Feed(stack.enter_context(closing(epochs(loader))), loader.stats)


def theirs(data: RandomImages, stack: ExitStack) -> Feed:
    """torch, with its pin thread; the loop copies."""
    return Feed(stack.enter_context(closing(to_device(batch) for batch in epochs(pinning(data)))))


def tutorial(data: RandomImages, stack: ExitStack) -> Feed:
    """torch, with its pin thread and a prefetcher on a stream of its own."""
    return Feed(stack.enter_context(closing(prefetched(epochs(pinning(data))))))


def peer(batches: Batches) -> Feed:
    """A loader of another library, epoch after epoch."""
    return Feed((images, labels.flatten().long()) for _ in iter(int, 1) for images, labels in batches())


def pinning(data: RandomImages) -> torch.utils.data.DataLoader[Batch]:
    return torch.utils.data.DataLoader(
        data, BATCH_SIZE, shuffle=True, drop_last=True, num_workers=NUM_WORKERS, persistent_workers=True,
        pin_memory=ON_CUDA,
    )  # fmt: skip


def to_device(batch: Batch) -> Batch:
    images, labels = batch
    return images.to(DEVICE, non_blocking=True), labels.to(DEVICE, non_blocking=True)


def epochs(loader: torch.utils.data.DataLoader[Batch]) -> Iterator[Any]:
    """One epoch after the other, without end."""
    while True:
        yield from loader


def alone(nbytes: int) -> Callable[[], float]:
    """GB/s of copies of this size from page-locked memory, with nothing else on the bus."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")

    def rate() -> float:
        wait()
        begun = mark()
        for _ in range(COPIES):
            device.copy_(host, non_blocking=True)
        ended = mark()
        wait()
        return COPIES * nbytes / begun.elapsed_time(ended) / 1e6

    return rate


def compare(feeds: dict[str, Feed], training: Training) -> None:
    """Three tables of the same runs: images per second, GPU busy, and rate of copies."""
    runs: dict[str, list[Run]] = {name: [] for name in feeds}

    def recorded(name: str) -> float:
        run = feeds[name].run(training)
        runs[name].append(run)
        print(
            f"round {len(runs[name])}: {name}: {run.images_per_s:.0f} images/s, GPU busy {run.busy_share:.4f} by events"
            f" and {run.nvml_share:.2f} by NVML, copies {run.copied_gb_per_s:.1f} GB/s, {run.hidden_share:.4f} hidden",
            flush=True,
        )
        return run.images_per_s

    speed = Contest("gpu_prefetch", unit="images/s", baseline=THEIRS)
    for name in feeds:
        speed.measure(name, lambda name=name: recorded(name))
    publish(speed.run(ROUNDS, warm_up=0), on_cuda=ON_CUDA)

    busy = Contest("gpu_busy", unit="share", baseline=THEIRS)
    for name in feeds:
        busy.replay(name, [run.busy_share for run in runs[name]])
    publish(busy.run(ROUNDS, warm_up=0), on_cuda=ON_CUDA)
    if not ON_CUDA:
        return

    copies = Contest("gpu_copies", unit="GB/s", baseline=LIMIT)
    copies.measure(LIMIT, alone(BATCH_SIZE * 3 * SIDE * SIDE))
    copies.measure(f"{LIMIT}, 1 GiB", alone(1 << 30))
    copies.replay(f"{OURS}, during steps", [run.copied_gb_per_s for run in runs[OURS]])
    copies.measure(f"{OURS}, without steps", feeds[OURS].rate_alone)
    publish(copies.run(ROUNDS, warm_up=0), on_cuda=True)

    hidden = Contest("gpu_copy_hidden", unit="share", baseline=OURS)
    hidden.replay(OURS, [run.hidden_share for run in runs[OURS]])
    publish(hidden.run(ROUNDS, warm_up=0), on_cuda=True)

    for name, feed in feeds.items():  # at the end: the profiler slows the steps that it records
        print(f"profiler: {name}: {optional(name, lambda feed=feed: profiled(feed, training))}", flush=True)


def main() -> None:
    if ON_CUDA and not torch.cuda.is_available():
        print("bench/gpu/prefetch.py: no CUDA device, nothing to measure")
        return
    data, training = RandomImages(), Training()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        images, labels = data.images.numpy(), torch.arange(IMAGE_COUNT).remainder(1000).numpy()
        rows = [(image.transpose(1, 2, 0), int(label)) for image, label in zip(images, labels, strict=True)]
        file = Path(folder) / "images.beton"
        makes = {
            THERE: lambda: there(stack),
            THEIRS: lambda: theirs(data, stack),
            TUTORIAL: lambda: tutorial(data, stack),
            OURS: lambda: ours(data, stack),
            "DALI": lambda: peer(dali_memory(images, labels, BATCH_SIZE, NUM_WORKERS, DEVICE)),
            "FFCV": lambda: peer(ffcv(rows, file, BATCH_SIZE, NUM_WORKERS, DEVICE)),
        }
        feeds = {}
        for name, make in makes.items():
            started = perf_counter()
            feed = optional(name, make)
            if feed is not None and optional(name, lambda feed=feed: (feed.warm_up(), True)[1]):
                feeds[name] = feed
                print(f"{name}: {FIRST} batches after {perf_counter() - started:.1f} s", flush=True)
        for _ in range(WARM_UP):
            training.step(*next(feeds[THERE].batches))
        compare(feeds, training)


if __name__ == "__main__":
    main()
