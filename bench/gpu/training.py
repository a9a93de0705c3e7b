"""Claim: with feedline's import, a training script on JPEGs keeps the GPU busy that it left waiting with torch's.

A ResNet-50 in bfloat16 trains on JPEGs of 500×375 pixels in batches of 256, with a worker process for each CPU. The
script is the usual one: torchvision's `ImageFolder` and transforms, a pin thread, and `non_blocking` copies. It runs
with torch's DataLoader, with the prefetcher that tutorials show, and with feedline's import. Then come feedline's own
datasets, which decode by the CPUs or on the device, DALI where it is installed, and the limit: one batch that is
already on the device. The second table is of the shares of this limit in the same round. With "cpu" as its argument the
script runs without a GPU, to check itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from decode import write
from peers import Contest, dali_jpegs, optional, prefetched, publish
from prefetch import BATCH_SIZE, DEVICE, ON_CUDA, SIDE, Feed, Run, Training, epochs, peer, there, to_device
from torch import Tensor

import feedline as fl
from feedline import transforms

NUM_WORKERS = len(os.sched_getaffinity(0)) if ON_CUDA else 1
IMAGES = 40_960 if ON_CUDA else 32
"""Names of images: an epoch must be longer than a run, as that of ImageNet is."""
WARM_UP, STEPS, ROUNDS = (2 * NUM_WORKERS + 2, NUM_WORKERS, 2) if ON_CUDA else (1, 2, 1)
"""The first steps use up what the workers have made ahead; each worker makes a batch of the others."""
LIMIT, TORCH, TUTORIAL = "batch on the device", "torch", "torch, with a prefetcher"
IMPORT = "feedline, the import alone"

STARTED = perf_counter()

Make = Callable[[ExitStack], Feed]


class AnyBatch(Training):
    """The step on normalized batches, too."""

    def step(self, images: Tensor, labels: Tensor) -> None:
        if images.dtype == torch.uint8:
            super().step(images, labels)
        else:
            self.train(images.to(memory_format=torch.channels_last), labels)


def usual(folder: Path, make: Callable[..., Any]) -> Any:
    """The loader of the script that everybody has; `make` is torch's class or feedline's."""
    from torchvision import datasets
    from torchvision import transforms as tv

    normalize = tv.Normalize(transforms.IMAGENET_MEAN, transforms.IMAGENET_STD)
    steps = tv.Compose([tv.RandomResizedCrop(SIDE), tv.RandomHorizontalFlip(), tv.ToTensor(), normalize])
    return make(
        datasets.ImageFolder(str(folder), steps), batch_size=BATCH_SIZE, shuffle=True, drop_last=True,
        num_workers=NUM_WORKERS, pin_memory=ON_CUDA, persistent_workers=True,
    )  # fmt: skip


def looped(make: Callable[[], Any], stack: ExitStack) -> Feed:
    """The loop copies each batch."""
    return Feed(stack.enter_context(closing(to_device(batch) for batch in epochs(make()))))


def ahead(make: Callable[[], Any], stack: ExitStack) -> Feed:
    """A prefetcher copies each batch on a stream of its own."""
    return Feed(stack.enter_context(closing(prefetched(epochs(make())))))


def own(folder: Path, transform: Any, stack: ExitStack) -> Feed:
    """feedline's `ImageFolder`, batches on the device."""
    data = fl.datasets.ImageFolder(folder, transform)
    loader = stack.enter_context(fl.DataLoader(
        data, BATCH_SIZE, shuffle=True, drop_last=True, seed=0, num_workers=NUM_WORKERS, worker_method="process",
        persistent_workers=True, device=DEVICE,
    ))  # fmt: skip
    return Feed(stack.enter_context(closing(epochs(loader))), loader.stats)


def makers(folder: Path) -> dict[str, Make]:
    """The contestants, by name."""
    steps = transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip(), transforms.ToTensor(torch.uint8)
    levels = transforms.Compose(steps)
    theirs, imported = (partial(usual, folder, each) for each in (torch.utils.data.DataLoader, fl.DataLoader))
    return {
        LIMIT: there,
        TORCH: partial(looped, theirs),
        TUTORIAL: partial(ahead, theirs),
        IMPORT: partial(looped, imported),
        "feedline, uint8 to the device": partial(own, folder, levels),
        "feedline, decoded on the device": partial(own, folder, transforms.DecodeOnDevice(levels)),
        "DALI": lambda _: peer(dali_jpegs(folder, BATCH_SIZE, SIDE, NUM_WORKERS, DEVICE)),
    }


def opened(stack: ExitStack, folder: Path, training: AnyBatch) -> dict[str, Feed]:
    """The contestants that are installed, after a step each."""
    feeds = {}
    for name, make in makers(folder).items():
        feed = optional(name, partial(make, stack))
        kind = feed and optional(name, partial(first_step, feed, training))
        if kind:
            feeds[name] = feed
            print(f"{perf_counter() - STARTED:.0f} s: {name}: first batch {kind}", flush=True)
    return feeds


def first_step(feed: Feed, training: AnyBatch) -> str:
    """Dtype and shape of the first batch, after its step."""
    images, labels = next(feed.batches)
    assert images.shape == (BATCH_SIZE, 3, SIDE, SIDE), f"images of shape {tuple(images.shape)}"
    training.step(images, labels)
    return f"{str(images.dtype).removeprefix('torch.')} {tuple(images.shape)}"


def main() -> None:
    if ON_CUDA and not torch.cuda.is_available():
        print("bench/gpu/training.py: no CUDA device, nothing to measure")
        return
    training = AnyBatch()
    with TemporaryDirectory() as place, ExitStack() as stack:
        write(Path(place), IMAGES)
        feeds = opened(stack, Path(place), training)
        baseline = TORCH if TORCH in feeds else next(iter(feeds))
        runs: dict[str, list[Run]] = {name: [] for name in feeds}

        def recorded(name: str) -> float:
            run = feeds[name].run(training, 2 if name == LIMIT else WARM_UP, STEPS)
            runs[name].append(run)
            print(
                f"{perf_counter() - STARTED:.0f} s: round {len(runs[name])}: {name}: {run.images_per_s:.0f} images/s,"
                f" between the first and last kernel of steps for {run.busy_share:.4f} of the time",
                flush=True,
            )
            return run.images_per_s

        speed = Contest("training on a GPU", unit="images/s", baseline=baseline)
        for name in feeds:
            speed.measure(name, partial(recorded, name))
        publish(speed.run(ROUNDS, warm_up=0), on_cuda=ON_CUDA)
        shares = Contest("training on a GPU, share of the limit", unit="share", baseline=baseline)
        for name in feeds:
            pairs = zip(runs[name], runs[LIMIT], strict=True)
            shares.replay(name, [run.images_per_s / limit.images_per_s for run, limit in pairs])
        publish(shares.run(ROUNDS, warm_up=0), on_cuda=ON_CUDA)


if __name__ == "__main__":
    main()
