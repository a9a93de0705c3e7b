"""Real classes of torchvision, folders of images in all modes, and the pipelines of every tutorial."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from image_cases import photo
from peers import torchvision
from PIL import Image

sys.path.insert(0, str(torchvision()))

from torchvision import datasets, tv_tensors
from torchvision import transforms as v1
from torchvision.transforms import v2

__all__ = [
    "MEAN",
    "PIPELINES",
    "STD",
    "assert_same",
    "cifar",
    "datasets",
    "folder",
    "mnist",
    "seeded",
    "states",
    "tv_tensors",
    "v1",
    "v2",
]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BICUBIC = v1.InterpolationMode.BICUBIC


def turned(image: Image.Image) -> Image.Image:
    """A step of the user's own, which draws from Python's generator."""
    return image.rotate(random.choice([0, 90]))


PIPELINES: dict[str, Callable[[], Any]] = {
    "train": lambda: v1.Compose(
        [v1.RandomResizedCrop(48), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)]
    ),
    "levels": lambda: v1.Compose(
        [v1.RandomResizedCrop(48, interpolation=BICUBIC), v1.RandomHorizontalFlip(), v1.PILToTensor()]
    ),
    "validate": lambda: v1.Compose([v1.Resize(64), v1.CenterCrop(48), v1.ToTensor(), v1.Normalize(MEAN, STD)]),
    "pad in the center": lambda: v1.Compose([v1.Resize(30), v1.CenterCrop((41, 52)), v1.ToTensor()]),
    "random crop": lambda: v1.Compose(
        [
            *(v1.RandomCrop(48, padding=4, pad_if_needed=True), v1.RandomVerticalFlip(), v1.RandomHorizontalFlip()),
            *(v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)),
        ]
    ),
    "crop twice": lambda: v1.Compose(
        [v1.Resize((60, 70)), v1.RandomCrop(60, pad_if_needed=True), v1.CenterCrop(40), v1.Resize(33), v1.ToTensor()]
    ),
    "flip first": lambda: v1.Compose(
        [
            *(v1.RandomHorizontalFlip(), v1.RandomVerticalFlip(), v1.Resize((90, 70)), v1.RandomHorizontalFlip()),
            *(v1.RandomCrop((60, 50)), v1.RandomVerticalFlip(), v1.ToTensor()),
        ]
    ),
    "colors": lambda: v1.Compose(
        [
            *(v1.RandomResizedCrop(48), v1.ColorJitter(0.4, 0.4, 0.4, 0.1), v1.RandomGrayscale(0.3)),
            *(v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD), v1.RandomErasing(0.5)),
        ]
    ),
    "random apply": lambda: v1.Compose(
        [
            v1.RandomResizedCrop(48),
            v1.RandomApply([v1.ColorJitter(0.4, 0.4, 0.4, 0.1), v1.GaussianBlur(3)], 0.5),
            v1.Compose([v1.Grayscale(3), v1.ToTensor()]),
        ]
    ),
    "AutoAugment": lambda: v1.Compose(
        [v1.RandomResizedCrop(48), v1.AutoAugment(), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)]
    ),
    "own step": lambda: v1.Compose(
        [v1.RandomResizedCrop(48), v1.Lambda(turned), v1.RandomHorizontalFlip(), v1.ToTensor()]
    ),
    "own step first": lambda: v1.Compose([turned, v1.RandomResizedCrop(48), v1.ToTensor()]),
    "choice": lambda: v1.Compose(
        [v1.RandomChoice([v1.RandomResizedCrop(48), v1.Resize((48, 48))]), v1.RandomHorizontalFlip(), v1.ToTensor()]
    ),
    "one channel": lambda: v1.Compose([v1.Resize((48, 48)), v1.Grayscale(1), v1.RandomHorizontalFlip(), v1.ToTensor()]),
    "reflected": lambda: v1.Compose(
        [v1.Resize((48, 48)), v1.RandomCrop(48, padding=8, padding_mode="reflect"), v1.ToTensor()]
    ),
    "sequential": lambda: torch.nn.Sequential(v1.Resize((40, 50)), v1.RandomHorizontalFlip(), v2.PILToTensor()),
    "alone": lambda: v1.Compose([v1.Resize((40, 50)), v1.ToTensor()]),
    "v2 train": lambda: v2.Compose(
        [
            *(v2.RandomResizedCrop(48, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()),
            *(v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)),
        ]
    ),
    "v2 erasing": lambda: v2.Compose(
        [
            *(v2.RandomResizedCrop(48), v2.RandomHorizontalFlip(0.5), v2.PILToTensor()),
            *(v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD), v2.RandomErasing(0.5)),
        ]
    ),
    "v2 levels": lambda: v2.Compose([v2.RandomResizedCrop(48), v2.RandomHorizontalFlip(), v2.ToImage()]),
    "v2 validate": lambda: v2.Compose(
        [v2.Resize(64), v2.CenterCrop(48), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()]
    ),
    "v2 colors": lambda: v2.Compose(
        [
            *(v2.RandomCrop(48, padding=4, pad_if_needed=True), v2.ColorJitter(0.4, 0.4, 0.4, 0.1)),
            *(v2.RandomApply([v2.RandomGrayscale(0.3), v2.RandomVerticalFlip()], 0.6), v2.ToImage()),
            v2.ToDtype(torch.float32, scale=True),
        ]
    ),
    "v2 on tensors": lambda: v2.Compose(
        [v2.ToImage(), v2.RandomResizedCrop(48), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
    ),
    "v2 on tensors, documented": lambda: v2.Compose(
        [
            *(v2.ToImage(), v2.ToDtype(torch.uint8, scale=True), v2.RandomResizedCrop((48, 40), antialias=True)),
            *(v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)),
            v2.RandomErasing(0.5),
        ]
    ),
    "v2 on tensors, validate": lambda: v2.Compose(
        [
            *(v2.PILToTensor(), v2.Resize(64, interpolation=BICUBIC), v2.CenterCrop((48, 80)), v2.RandomVerticalFlip()),
            *(v2.RandomCrop(44, padding=2), v2.ToPureTensor()),
        ]
    ),
    "v2 on tensors, nearest": lambda: v2.Compose(
        [
            *(v2.ToImage(), v2.RandomHorizontalFlip(), v2.Resize((50, 50), v2.InterpolationMode.NEAREST)),
            *(v2.Resize((40, 40), antialias=None), v2.ToDtype(torch.float32, scale=True)),
        ]
    ),
    "v2 augment": lambda: v2.Compose(
        [v2.RandomResizedCrop(48), v2.TrivialAugmentWide(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    ),
    "v2 half": lambda: v2.Compose([v2.RandomResizedCrop(48), v2.ToImage(), v2.ToDtype(torch.float16, scale=True)]),
}
"""Common pipelines; each call returns new objects."""


def folder(root: Path, count: int = 24, seed: int = 0) -> Path:
    """Images of two classes, of 20 to 300 pixels, in every mode that Pillow converts to RGB."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        width, height = (int(side) for side in rng.integers(20, 300, 2))
        path = root / ("cats" if number % 3 else "dogs") / f"{number:04}"
        path.parent.mkdir(parents=True, exist_ok=True)
        _save(photo(width, height, number), number % 12, path, int(rng.integers(30, 98)), int(rng.integers(0, 3)))
    return root


def _save(image: Image.Image, kind: int, path: Path, quality: int, subsampling: int) -> None:
    if kind < 4:
        image.save(f"{path}.jpg", quality=quality, subsampling=subsampling, progressive=kind == 3)
    elif kind < 6:
        image.convert(("L", "CMYK")[kind - 4]).save(f"{path}.jpg", quality=quality)
    elif kind == 6:
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(f"{path}.jpg", quality=quality, exif=exif)
    elif kind == 7:
        image.quantize(50).save(f"{path}.png")
    elif kind < 11:
        image.convert(("RGB", "RGBA", "1")[kind - 8]).save(f"{path}.png")
    else:
        image.save(f"{path}.webp")


def cifar(transform: Any, count: int = 40) -> Any:
    """CIFAR10 with random images, without its archive."""
    rng = np.random.default_rng(0)
    dataset = datasets.CIFAR10.__new__(datasets.CIFAR10)
    dataset.data = rng.integers(0, 256, (count, 32, 32, 3), np.uint8)
    dataset.targets = rng.integers(0, 10, count).tolist()
    dataset.transform, dataset.target_transform = transform, None
    return dataset


def mnist(transform: Any, count: int = 40) -> Any:
    """FashionMNIST with random images, without its files."""
    dataset = datasets.FashionMNIST.__new__(datasets.FashionMNIST)
    dataset.data = torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    dataset.targets = torch.arange(count) % 10
    dataset.transform, dataset.target_transform = transform, None
    return dataset


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what such code draws from


def states() -> list[Any]:
    """The next number of each global generator."""
    return [torch.rand(1).item(), random.random(), np.random.rand()]  # noqa: NPY002


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal containers, classes, dtypes, strides and values."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key])
    else:
        assert ours == theirs
