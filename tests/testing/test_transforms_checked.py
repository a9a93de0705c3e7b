"""check_transform passes feedline's transforms and names the faults of others."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

import feedline as fl
from feedline import transforms
from feedline.testing import check_transform


def mirrored(image: Image.Image) -> Image.Image:
    return ImageOps.mirror(image)


def shifted(array: Any, rng: Any) -> Any:
    return array + np.uint8(rng.integers(10))


def careless(array: Any) -> Any:
    return array + np.uint8(np.random.default_rng().integers(100))


def writing(array: Any) -> Any:
    array[0, 0] ^= 1
    return array


class Counting:
    def __init__(self) -> None:
        self.count = itertools.count()

    def __call__(self, image: Image.Image) -> Any:
        return np.asarray(image) + np.uint8(next(self.count))


class OtherSingles(transforms.Resize):
    def __call__(self, image: Any, rng: Any = None) -> Any:
        return super().__call__(image, rng) ^ 1


class OtherImages(transforms.Resize):
    def __call__(self, image: Any, rng: Any = None) -> Any:
        sample = super().__call__(image, rng)
        return sample ^ 1 if isinstance(image, Image.Image) else sample


class Lending(transforms.Resize):
    def __call__(self, image: Any, rng: Any = None) -> Any:
        return image


@pytest.mark.parametrize(
    "transform",
    [
        transforms.imagenet_train(),
        transforms.imagenet_eval(),
        transforms.Compose([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1), transforms.RandomCrop(64)]),
        transforms.RandomChoice([transforms.GaussianBlur(3), transforms.RandomGrayscale()]),
        transforms.Compose([transforms.OnArray(shifted), transforms.ToTensor()]),
        mirrored,
    ],
    ids=lambda value: type(value).__name__,
)
def test_good_transforms_pass(transform: Any) -> None:
    check_transform(transform)


@pytest.mark.parametrize(
    ("transform", "complaint"),
    [
        (transforms.OnArray(careless), "the same image and the same key"),
        (Counting(), "the same image and the same key"),
        (transforms.OnArray(writing), "left unchanged"),
        (Lending(40), "share memory"),
        (lambda image: image, "survive pickling"),
        (OtherImages((40, 30)), "PIL images must give the same samples as arrays"),
        (OtherSingles((40, 30)), "a batch made by 1 thread"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_wrong_with_a_transform_is_named(transform: Any, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_transform(transform)


def test_the_checks_are_public() -> None:
    assert fl.testing.check_transform is check_transform
