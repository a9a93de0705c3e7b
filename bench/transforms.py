"""Augmentation compared with torchvision's PIL backend: one Pillow call per step, with equally drawn factors."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance
from skimage import data

from feedline import images
from feedline.core.rng import Draws
from feedline.core.tensors import allocate_tensor
from feedline.transforms import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ColorJitter,
    Compose,
    GaussianBlur,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Transform,
    color,
    imagenet_eval,
    imagenet_train,
)
from harness import Contest

SIZE, BATCH, SEED = 224, 64, 0
Photo = NDArray[np.uint8]

PHOTOS = [np.ascontiguousarray(photo) for photo in (data.astronaut(), data.coffee(), data.chelsea(), data.rocket())]
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))


def file_of(photo: Photo) -> bytes:
    file = io.BytesIO()
    Image.fromarray(photo).save(file, "JPEG", quality=90)
    return file.getvalue()


FILES = [file_of(PHOTOS[i % len(PHOTOS)]) for i in range(BATCH)]
SMALL = [np.ascontiguousarray(PHOTOS[i % len(PHOTOS)][i : i + 32, :32]) for i in range(BATCH)]
ROWS = [np.asarray(Image.fromarray(photo).resize((SIZE, SIZE))) for photo in PHOTOS]
KEYS = np.random.default_rng(SEED).integers(0, 2**64, BATCH, np.uint64)


def numbers(image: Image.Image) -> torch.Tensor:
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return (pixels.contiguous().float() / 255).sub_(MEAN).div_(STD)


def jittered(image: Image.Image, adjustments: Sequence[tuple[int, float]]) -> Image.Image:
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for which, factor in adjustments:
        if which < 3:
            image = enhancers[which](image).enhance(factor)
            continue
        hue, saturation, value = image.convert("HSV").split()
        turned = Image.fromarray(np.asarray(hue) + np.uint8(int(factor * 255) % 256))
        image = Image.merge("HSV", (turned, saturation, value)).convert("RGB")
    return image


def window(source: bytes, transform: Transform, key: int) -> Image.Image:
    """The plan's own box with Pillow: decoded whole, cropped, resized, flipped."""
    image = Image.open(io.BytesIO(source)).convert("RGB")
    placed = transform.plan.steps[0]
    shown = images.geometry(placed.step.recipe, placed.key(key), image.width, image.height)  # type: ignore[attr-defined]
    x, y, width, height = shown.box
    left, top, wide, tall = shown.window
    image = image.crop((x, y, x + width, y + height)).resize(shown.full[::-1], Image.Resampling.BILINEAR)
    image = image.crop((left, top, left + wide, top + tall))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if shown.flip else image


def pipelines() -> None:
    """Whole batches of normalized float32 from JPEG bytes, one thread."""
    jitter = ColorJitter(0.4, 0.4, 0.4, 0.1)
    head = [RandomResizedCrop(SIZE), RandomHorizontalFlip()]
    cases: dict[str, tuple[Transform, Callable[[Image.Image, int], Image.Image]]] = {
        "train": (imagenet_train(SIZE), lambda image, _: image),
        "validation": (imagenet_eval(SIZE), lambda image, _: image),
        "train with color jitter": (
            Compose([*head, jitter, Normalize(IMAGENET_MEAN, IMAGENET_STD)]),
            lambda image, key: jittered(image, jitter.adjustments(Draws(key))),
        ),
    }
    for name, (transform, more) in cases.items():

        def through_pillow(transform: Transform = transform, more: Callable[..., Image.Image] = more) -> torch.Tensor:
            pairs = zip(FILES, KEYS.tolist(), strict=True)
            return torch.stack([numbers(more(window(file, transform, key), key)) for file, key in pairs])

        def batch(transform: Transform = transform) -> torch.Tensor:
            return transform.plan.batch(FILES, KEYS, allocate_tensor)

        def one_by_one(transform: Transform = transform) -> torch.Tensor:
            pairs = zip(FILES, KEYS.tolist(), strict=True)
            return torch.stack([transform.plan.run(file, key) for file, key in pairs])

        contest = Contest(f"transforms {name}", unit="images/s", baseline="Pillow, step by step")
        contest.add("Pillow, step by step", through_pillow, BATCH)
        contest.add("feedline, sample by sample", one_by_one, BATCH)
        contest.add("feedline, batch", batch, BATCH)
        contest.run().publish("pillow")


def single_steps() -> None:
    """One step on 224 x 224 pixels."""
    bell = np.exp(-0.5 * (np.arange(-11, 12) / 1.0) ** 2).astype(np.float32)
    kernel = torch.from_numpy(np.outer(bell, bell) / bell.sum() ** 2).expand(3, 1, 23, 23)
    blur = GaussianBlur(23, 1.0)

    def convolved(row: Photo) -> torch.Tensor:
        bordered = torch.nn.functional.pad(torch.from_numpy(row).permute(2, 0, 1).float()[None], [11] * 4, "reflect")
        return torch.nn.functional.conv2d(bordered, kernel, groups=3).round_().to(torch.uint8)

    names = ("brightness", "contrast", "saturation", "hue")
    cases: dict[str, tuple[Callable[[Photo], object], Callable[[Photo], object]]] = {
        name: (
            lambda row, which=which: np.asarray(jittered(Image.fromarray(row), [(which, 0.3)])),
            lambda row, which=which: color.adjust(row, [(which, 0.3)]),
        )
        for which, name in enumerate(names)
    }
    cases["blur 23 x 23"] = (convolved, lambda row: blur.plan.run(row, 0))
    for name, (theirs, ours) in cases.items():
        other = "torch conv2d" if name.startswith("blur") else "Pillow"
        contest = Contest(f"transforms {name}", unit="images/s", baseline=other)
        contest.add(other, lambda theirs=theirs: [theirs(row) for row in ROWS], len(ROWS))
        contest.add("feedline", lambda ours=ours: [ours(row) for row in ROWS], len(ROWS))
        contest.run().publish("pillow")


def thumbnails() -> None:
    """32 x 32 pixels in memory: the cost of a step apart from its arithmetic."""
    transform = Compose(
        [RandomCrop(32, padding=4), RandomHorizontalFlip(), RandomVerticalFlip(), Normalize([0.5], [0.25])]
    )
    contest = Contest("transforms 32 x 32", unit="images/s", baseline="sample by sample")
    contest.add("sample by sample", lambda: [transform.plan.run(row, 1) for row in SMALL], BATCH)
    contest.add("batch", lambda: transform.plan.batch(SMALL, KEYS, allocate_tensor), BATCH)
    contest.run().publish()


if __name__ == "__main__":
    torch.set_num_threads(1)
    pipelines()
    single_steps()
    thumbnails()
