"""The code of every tutorial with only the import changed: torchvision, Hugging Face, OpenCV with albumentations.

All loaders have two worker processes and their defaults, and give equal batches. Arguments choose the contests whose
names contain them.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader

import feedline as fl
from harness import Contest
from loaders import rate

sys.path.insert(1, str(Path(__file__).parents[1] / "tests/helpers"))
from peers import albumentations as installed_albumentations
from peers import torchvision

sys.path.insert(1, str(torchvision()))
sys.path.append(str(installed_albumentations()))
os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # it would check the network for its newest version

import albumentations
import cv2
from torchvision import datasets, transforms
from torchvision.transforms import v2

import datasets as hugging_face

SEED = 0
IMAGES, SIZE = 2_000, (500, 375)
SMALL, ROWS = 50_000, 1_000_000
WORKERS = 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def photographs() -> list[bytes]:
    """JPEGs of 500 × 375 pixels, cut from photographs."""
    rng = np.random.default_rng(SEED)
    whole = [Image.fromarray(each) for each in load_sample_images().images]
    files = []
    for number in range(IMAGES):
        image = whole[number % len(whole)]
        x, y = int(rng.integers(0, image.width - SIZE[0] + 1)), int(rng.integers(0, image.height - SIZE[1] + 1))
        file = io.BytesIO()
        image.crop((x, y, x + SIZE[0], y + SIZE[1])).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def folder(root: Path, files: list[bytes]) -> Path:
    for number, content in enumerate(files):
        path = root / f"class {number % 10}" / f"{number:06}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return root


def crop(*last: Any) -> Any:
    return transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), *last])


def on_tensors() -> Any:
    """The pipeline of torchvision's guide to transforms, which resizes tensors."""
    steps = (v2.ToImage(), v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip())
    return v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def cifar() -> Any:
    """CIFAR10 with random images, without its archive."""
    rng = np.random.default_rng(SEED)
    dataset = datasets.CIFAR10.__new__(datasets.CIFAR10)
    dataset.data = rng.integers(0, 256, (SMALL, 32, 32, 3), np.uint8)
    dataset.targets = rng.integers(0, 10, SMALL).tolist()
    dataset.target_transform = None
    dataset.transform = transforms.Compose(
        [
            *(transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()),
            *(transforms.ToTensor(), transforms.Normalize(MEAN, STD)),
        ]
    )
    return dataset


def table(root: Path, kind: str | None) -> Any:
    rng = np.random.default_rng(SEED)
    columns = {f"x{number}": rng.random(ROWS, np.float32) for number in range(8)}
    hugging_face.Dataset.from_dict({**columns, "label": rng.integers(0, 10, ROWS)}).save_to_disk(root / "table")
    return hugging_face.load_from_disk(root / "table").with_format(kind)


def image_table(files: list[bytes]) -> Any:
    """Images of a table with a transform that the user wrote."""
    features = hugging_face.Features({"image": hugging_face.Image(), "label": hugging_face.Value("int64")})
    rows = {"image": [{"bytes": content, "path": None} for content in files], "label": list(range(len(files)))}
    pipeline = crop(transforms.ToTensor(), transforms.Normalize(MEAN, STD))

    def prepared(batch: dict[str, Any]) -> dict[str, Any]:
        images = [pipeline(image.convert("RGB")) for image in batch["image"]]
        return {"pixel_values": images, "label": batch["label"]}

    return hugging_face.Dataset.from_dict(rows, features).with_transform(prepared)


class ByOpenCV:
    """A dataset that the user wrote, with OpenCV and albumentations, which nothing accelerates."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        steps = (
            albumentations.RandomResizedCrop((224, 224)),
            albumentations.HorizontalFlip(),
            albumentations.Normalize(),
        )
        self.pipeline = albumentations.Compose(steps)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = cv2.cvtColor(cv2.imread(self.paths[index]), cv2.COLOR_BGR2RGB)
        return torch.from_numpy(self.pipeline(image=image)["image"].transpose(2, 0, 1).copy()), index % 10


def compare(name: str, unit: str, make: Callable[[], Any], batch: int) -> None:
    if not all(word in name for word in sys.argv[1:]):
        return
    dataset = make()
    race = Contest(f"existing code, {name}", unit=f"{unit}/s", baseline="torch")
    arguments: Any = {"batch_size": batch, "shuffle": True, "num_workers": WORKERS}

    def made(loader: Callable[..., Any]) -> Callable[[], float]:
        return rate(lambda: loader(dataset, **arguments), batch)

    race.measure("torch", made(DataLoader))
    race.measure("feedline", made(fl.DataLoader))
    race.run(rounds=5).publish("datasets", "pillow")


def main() -> None:
    torch.set_num_threads(1)
    hugging_face.disable_progress_bars()
    files = photographs()
    with tempfile.TemporaryDirectory() as name:
        root = folder(Path(name), files)
        compare("ImageFolder, uint8", "images", lambda: datasets.ImageFolder(root, crop(transforms.PILToTensor())), 64)
        normalized = crop(transforms.ToTensor(), transforms.Normalize(MEAN, STD))
        compare("ImageFolder, normalized float32", "images", lambda: datasets.ImageFolder(root, normalized), 64)
        compare("ImageFolder, v2 on tensors", "images", lambda: datasets.ImageFolder(root, on_tensors()), 64)
        paths = sorted(map(str, root.rglob("*.jpg")))
        compare("OpenCV and albumentations", "images", lambda: ByOpenCV(paths), 64)
    compare("CIFAR10, padded crop and flip", "images", cifar, 128)
    with tempfile.TemporaryDirectory() as name:
        compare("Hugging Face table, rows", "rows", lambda: table(Path(name), "torch"), 1_024)
    with tempfile.TemporaryDirectory() as name:
        compare("Hugging Face table without a format, rows", "rows", lambda: table(Path(name), None), 1_024)
    compare("Hugging Face images, with_transform", "images", lambda: image_table(files), 64)


if __name__ == "__main__":
    main()
