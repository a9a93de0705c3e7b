"""Peers of the GPU scripts, as functions that make their batches.

None of them is required: `optional` leaves a missing peer out by name, with the reason. FFCV writes its file of images
before the contest.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from feedline import transforms

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import Contest, Outcome

Batches = Callable[[], Iterator[Any]]
"""Makes the batches of one epoch, pairs of images and labels on the device."""

_DALI = ("nvidia-dali-cuda120", "nvidia-dali-cuda130")


_NVIMGCODEC = ("nvidia-nvimgcodec-cu12", "nvidia-nvimgcodec-cu13", "nvidia-nvjpeg")

DISTRIBUTIONS = ("torchvision", "torchcodec", *_NVIMGCODEC, *_DALI, "ffcv", "kornia")

Make = Callable[[], Any]


def optional(name: str, make: Make) -> Any:
    """The result of `make`; None, with a line that names the peer and the reason, if it fails."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - a peer that is missing, or of another build, fails in many ways
        print(f"{name} is left out: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.120}")
        return None


def add_optional(
    contest: Contest, name: str, make: Make, run: Callable[[Batches], Callable[[], object]], work: float
) -> None:
    """Add a peer to a contest of rates, unless it is left out; its first epoch is tried here.

    A peer that fails later has no figure.
    """
    batches = optional(name, make)

    def rate() -> float:
        started = perf_counter()
        done = optional(name, lambda: (run(batches)(), True)[1])
        return work / (perf_counter() - started) if done else math.nan

    if batches is not None and not math.isnan(rate()):
        contest.measure(name, rate)


def installed() -> list[str]:
    """The distributions of peers and decoders that are installed."""
    found = []
    for name in DISTRIBUTIONS:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        found.append(name)
    return found


def publish(outcome: Outcome, *, on_cuda: bool) -> None:
    """Print the table with date and versions; figures of a GPU are also stored."""
    versions = {name: metadata.version(name) for name in ("feedline", "torch", *installed())}
    print(datetime.now(UTC).isoformat(timespec="seconds"), *(f"{name} {each}" for name, each in versions.items()))
    if on_cuda:
        outcome.publish(*installed())
    else:
        outcome.show()


def prefetched(batches: Iterator[Any]) -> Iterator[Any]:
    """The prefetcher of tutorials: the copy of the next batch runs on a stream of its own while the loop computes."""
    on_cuda = torch.cuda.is_available()
    side = torch.cuda.Stream() if on_cuda else None
    device = "cuda" if on_cuda else "cpu"
    upcoming: Any = None
    for batch in batches:
        with torch.cuda.stream(side):
            copied = [tensor.to(device, non_blocking=True) for tensor in batch]
        if upcoming is not None:
            yield upcoming
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
            for tensor in copied:
                tensor.record_stream(torch.cuda.current_stream())
        upcoming = copied
    if upcoming is not None:
        yield upcoming


def dali_jpegs(folder: Path, batch: int, size: int, threads: int, device: str) -> Batches:
    """DALI's own pipeline for the training on ImageNet, with mixed decoding on a GPU."""
    from nvidia.dali import fn, types

    mean, std = ([255 * value for value in each] for each in (transforms.IMAGENET_MEAN, transforms.IMAGENET_STD))

    def graph() -> Any:
        files, labels = fn.readers.file(file_root=str(folder), random_shuffle=True, name="reader")
        kind = "mixed" if device == "cuda" else "cpu"
        images = fn.decoders.image_random_crop(files, device=kind, output_type=types.RGB)
        images = fn.resize(images, size=(size, size))
        flip = fn.random.coin_flip()
        images = fn.crop_mirror_normalize(images, mean=mean, std=std, mirror=flip, output_layout="CHW")
        return images, labels.gpu() if kind == "mixed" else labels

    return _dali(graph, batch, threads, device, reader_name="reader", auto_reset=True)


def dali_memory(images: np.ndarray, labels: np.ndarray, batch: int, threads: int, device: str) -> Batches:
    """DALI on arrays in memory, gathered by NumPy batch by batch; without an end."""
    from nvidia.dali import fn

    rng = np.random.default_rng(0)

    def gathered() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = rng.permutation(len(images))
        for start in range(0, len(images) - batch + 1, batch):
            places = order[start : start + batch]
            yield images[places], labels[places, None]

    def graph() -> Any:
        outputs = fn.external_source(source=gathered, num_outputs=2, batch=True, cycle="raise")
        return tuple(each.gpu() for each in outputs) if device == "cuda" else tuple(outputs)

    epochs = _dali(graph, batch, threads, device, auto_reset=True)
    # An iterator of DALI that is left early continues there: from an endless one, each call takes the batches it needs.
    endless = (each for _ in iter(int, 1) for each in epochs())
    return lambda: endless


def _dali(graph: Callable[[], Any], batch: int, threads: int, device: str, **arguments: Any) -> Batches:
    from nvidia.dali import pipeline_def
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    make = pipeline_def(batch_size=batch, num_threads=threads, device_id=0 if device == "cuda" else None)(graph)
    policy = LastBatchPolicy.DROP
    iterator = DALIGenericIterator([make()], ["images", "labels"], last_batch_policy=policy, **arguments)
    return lambda: ((each[0]["images"], each[0]["labels"]) for each in iterator)


def ffcv(data: Any, file: Path, batch: int, workers: int, device: str, size: int | None = None) -> Batches:
    """FFCV on a file of its own: unchanged levels, or with `size` JPEGs by random resized crops and flips."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, Squeeze, ToDevice, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField(write_mode="raw" if size is None else "jpg"), "label": IntField()}
    DatasetWriter(str(file), fields, num_workers=workers).from_indexed_dataset(data)
    there = ToDevice(torch.device(device), non_blocking=True)
    steps: list[Any] = [SimpleRGBImageDecoder(), ToTensor(), there, ToTorchImage()]
    if size is not None:
        mean, std = (255 * np.array(each) for each in (transforms.IMAGENET_MEAN, transforms.IMAGENET_STD))
        normalize = NormalizeImage(mean, std, np.float32)
        steps = [RandomResizedCropRGBImageDecoder((size, size)), RandomHorizontalFlip(), *steps[1:], normalize]
    loader = Loader(
        str(file), batch_size=batch, num_workers=workers, order=OrderOption.RANDOM, drop_last=True,
        pipelines={"image": steps, "label": [IntDecoder(), ToTensor(), there, Squeeze()]},
    )  # fmt: skip
    return lambda: iter(loader)
