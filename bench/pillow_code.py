"""A user's own dataset that opens JPEGs with Pillow: torch's loader and feedline's, with the import as the only change.

Each `__getitem__` is `Image.open(path).convert("RGB")`, `RandomResizedCrop(224)`, a flip, and normalized float32, once
written by hand with Pillow, NumPy and torch, and with torchvision's transforms on images and on tensors, if they can be
imported. Then the time of one sample is divided among its steps.
"""

from __future__ import annotations

import importlib
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

import feedline as fl

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "demo"))
from harness import Contest
from images.corpus import Corpus, write

SIZE, BATCH, WORKERS = 224, 32, 2
CORPUS = Corpus("500x375-pillow-code", 640, (500, 375), 110_000, (0.55, 1.0))
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def drawn_box(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            x, y = random.randint(0, width - w), random.randint(0, height - h)
            return x, y, x + w, y + h
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, (width + side) // 2, (height + side) // 2


def opened(path: str) -> Image.Image:
    with open(path, "rb") as file:
        return Image.open(file).convert("RGB")


def cropped(image: Image.Image) -> Image.Image:
    image = image.crop(drawn_box(*image.size)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


def to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)


def normalized(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.sub_(MEAN).div_(STD)


STEPS: dict[str, Callable[[Any], Any]] = {
    "Image.open, convert": opened,
    "crop, resize, flip": cropped,
    "to tensor": to_tensor,
    "normalize": normalized,
}


class Photos(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Code of the kind that many projects have."""

    def __init__(self, paths: list[str], steps: list[Callable[[Any], Any]]) -> None:
        self.paths, self.steps = paths, steps

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sample: Any = self.paths[index]
        for step in self.steps:
            sample = step(sample)
        return sample, index % 10


def torchvision_steps() -> dict[str, list[Callable[[Any], Any]]]:
    """The steps by torchvision, on images and on tensors; empty if it cannot be imported."""
    try:
        v1, v2 = (importlib.import_module(f"torchvision.transforms{part}") for part in ("", ".v2"))
    except (ImportError, RuntimeError):
        return {}
    scale = MEAN.flatten().tolist(), STD.flatten().tolist()
    images = [v1.RandomResizedCrop(SIZE), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(*scale)]
    tensors = [v2.ToImage(), v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip()]
    tensors += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(*scale)]
    return {"torchvision": [opened, v1.Compose(images)], "torchvision v2 on tensors": [opened, v2.Compose(tensors)]}


def loaders(name: str, paths: list[str], steps: list[Callable[[Any], Any]]) -> None:
    contest = Contest(f"Pillow code, {name}", unit="images/s", baseline="torch")
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "torch": (torch.utils.data.DataLoader, {}),
        "feedline": (fl.DataLoader, {}),
        "feedline, accelerate=False": (fl.DataLoader, {"accelerate": False}),
    }
    for kind, (loader_type, options) in kinds.items():
        loader = loader_type(
            Photos(paths, steps), BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True, **options
        )
        contest.add(kind, lambda loader=loader: sum(len(labels) for _, labels in loader), len(paths))
    contest.run().publish("pillow")


def profile(paths: list[str]) -> None:
    """CPU milliseconds per image in one process: Pillow's, and accelerated, where pixels are computed when read."""
    figures = [_profile(paths[:200])]
    with fl.images.accelerate_pillow():
        figures.append(_profile(paths[:200]))
    table = Table("step", title="CPU milliseconds per image")
    for heading in ("Pillow", "accelerated"):
        table.add_column(heading, justify="right")
    for step in STEPS:
        table.add_row(step, *(f"{found[step]:.3f}" for found in figures))
    table.add_row("sum", *(f"{sum(found.values()):.3f}" for found in figures))
    Console().print(table)


def _profile(paths: list[str]) -> dict[str, float]:
    least = dict.fromkeys(STEPS, math.inf)
    for _ in range(5):
        random.seed(0)
        spent = dict.fromkeys(STEPS, 0.0)
        for path in paths:
            sample: Any = path
            for name, step in STEPS.items():
                start = process_time()
                sample = step(sample)
                spent[name] += process_time() - start
        least = {name: min(least[name], 1000 * spent[name] / len(paths)) for name in STEPS}
    return least


def main() -> None:
    torch.set_num_threads(1)
    write(CORPUS)
    paths = sorted(map(str, CORPUS.files.rglob("*.jpg")))
    loaders("by hand", paths, list(STEPS.values()))
    for name, steps in torchvision_steps().items():
        loaders(name, paths, steps)
    profile(paths)


if __name__ == "__main__":
    main()
