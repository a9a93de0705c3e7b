"""The datasets of the demo: torchvision's ImageFolder, as in every tutorial, and one written by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, Sampler

import feedline as fl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from image_files import ImageSet

Sample = tuple[torch.Tensor, int]


@dataclass(frozen=True, slots=True)
class IndexRng:
    """Random generators fixed by seed and index: every loader gets the same crop for an index."""

    seed: int

    def __call__(self, index: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, index])


def loader_rng(_: int) -> np.random.Generator:
    """The generator of feedline's loader, fixed by its seed, the epoch and the position."""
    return fl.sample_rng().generator


def tutorial_folder(images: ImageSet, size: int) -> Dataset[Sample] | None:
    """Torchvision's ImageFolder with the transforms of every tutorial; None where torchvision cannot be imported.

    A wheel of torchvision made for another build of torch raises RuntimeError.
    """
    try:
        from torchvision import datasets, transforms
    except (ImportError, RuntimeError):
        return None
    steps = [
        *(transforms.RandomResizedCrop(size, scale=(0.25, 1)), transforms.RandomHorizontalFlip()),
        *(transforms.ToTensor(), transforms.Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))),
    ]
    folder: Any = datasets.ImageFolder(images.root, transforms.Compose(steps))
    wanted = {str(images.root / file.path) for file in images.files}  # an earlier run may have made more
    number = {label: i for i, label in enumerate(images.classes)}
    folder.samples = [(path, number[Path(path).parent.name]) for path, _ in folder.samples if path in wanted]
    return folder  # type: ignore[no-any-return]


class CroppedImages(Dataset[Sample]):
    """JPEG files as (float32 (3, size, size), class): a random crop, resized, flipped half of the time.

    The index is `epoch * len(files) + file` for `epochs` epochs. A crop can thus depend on the epoch although a sample
    is a pure function of its index.
    """

    def __init__(self, images: ImageSet, rng: Callable[[int], np.random.Generator], size: int, epochs: int = 1) -> None:
        number = {label: i for i, label in enumerate(images.classes)}
        self.files = [str(images.root / file.path) for file in images.files]
        self.labels = [number[file.label] for file in images.files]
        self.rng, self.size, self.epochs = rng, size, epochs

    def __len__(self) -> int:
        return len(self.files) * self.epochs

    def __getitem__(self, index: int) -> Sample:
        rng, file = self.rng(index), index % len(self.files)
        with Image.open(self.files[file]) as opened:
            image = opened.convert("RGB")
        box = random_box(image.width, image.height, rng)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = np.asarray(image)[:, ::-1] if rng.random() < 0.5 else np.asarray(image)
        channels_first = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
        return channels_first.float().sub_(127.5).div_(64), self.labels[file]


class EpochSampler(Sampler[int]):
    """A shuffled order of the `count` indices of one epoch; each iteration is the next epoch."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed, self.epoch = count, seed, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.count)
        first = self.epoch * self.count
        self.epoch += 1
        return iter((order + first).tolist())


def random_box(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """A box (left, top, right, bottom) for a random resized crop.

    25 to 100 % of the area, aspect ratio 3/4 to 4/3, clipped at the borders. Source: Szegedy et al., "Going deeper
    with convolutions", 2014.
    """
    area = width * height * rng.uniform(0.25, 1)
    ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    w = min(width, max(1, round(math.sqrt(area * ratio))))
    h = min(height, max(1, round(math.sqrt(area / ratio))))
    left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
    return left, top, left + w, top + h
