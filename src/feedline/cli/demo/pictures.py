"""An ordinary torch-style dataset of JPEG files with random crops; any loader can read it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, Sampler

from feedline.rng import SampleRng, derive, permuted, sample_rng

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from feedline.cli.demo.corpus import Corpus

Sample = tuple[torch.Tensor, int]
Box = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class IndexRng:
    """Randomness as a pure function of the index: whatever loader asks, an index gives the same crop."""

    seed: int

    def __call__(self, index: int) -> SampleRng:
        return SampleRng(derive(self.seed, index, "augmentation"))


def loader_rng(_: int) -> SampleRng:
    """Randomness given by feedline's loader, fixed by its seed, the epoch and the position."""
    return sample_rng()


class Pictures(Dataset[Sample]):
    """JPEG files as (float32 (3, size, size), class): a random crop, resized, flipped half of the time.

    Indices beyond the number of files name later passes over them: index `pass * len(files) + file`. So a crop can
    depend on the epoch while the dataset stays a pure function of the index.
    """

    def __init__(self, corpus: Corpus, rng: Callable[[int], SampleRng], size: int, passes: int = 1) -> None:
        number = {label: i for i, label in enumerate(corpus.classes)}
        self.files = [str(corpus.root / picture.file) for picture in corpus.pictures]
        self.labels = [number[picture.label] for picture in corpus.pictures]
        self.rng, self.size, self.passes = rng, size, passes

    def __len__(self) -> int:
        return len(self.files) * self.passes

    def __getitem__(self, index: int) -> Sample:
        rng, file = self.rng(index), index % len(self.files)
        with Image.open(self.files[file]) as opened:
            image = opened.convert("RGB")
        box = random_box(image.width, image.height, rng)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = np.asarray(image)[:, ::-1] if rng.random() < 0.5 else np.asarray(image)
        chw = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
        return chw.float().sub_(127.5).div_(64), self.labels[file]


class Passes(Sampler[int]):
    """Another shuffled pass over `count` files each time it is iterated: one epoch of a dataset with passes."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed, self.epoch = count, seed, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        order = permuted(derive(self.seed, self.epoch, "order"), self.count, 0, self.count)
        first = self.epoch * self.count
        self.epoch += 1
        return iter((order + first).tolist())


def random_box(width: int, height: int, rng: SampleRng) -> Box:
    """A box (left, top, right, bottom) of 25 to 100 % of the area and an aspect ratio of 3/4 to 4/3.

    The law of "random resized crop" (Szegedy et al., "Going deeper with convolutions", 2014), cut at the borders.
    """
    area = width * height * rng.uniform(0.25, 1)
    ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    w = min(width, max(1, round(math.sqrt(area * ratio))))
    h = min(height, max(1, round(math.sqrt(area / ratio))))
    left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
    return left, top, left + w, top + h
