"""Shards and folders: the costs of indexing and addressing, compared with decoding and with alternatives.

`listing` walks a tree of empty files with `os.walk`, like torchvision, and with ImageFolder. `thumbnails` reads 64 × 64
JPEGs in random batches from files and from tars, compared with one bare call of the kernel on bytes in memory.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import feedline as fl
from feedline.core.tensors import allocate_tensor
from feedline.datasets import ImageFolder, TarShards
from feedline.datasets.webdataset import build_index, members
from harness import Contest

THUMBNAILS, BATCH, PER_SHARD = 8192, 256, 1024
CROP = fl.transforms.Compose([fl.transforms.RandomResizedCrop(48), fl.transforms.RandomHorizontalFlip()])


def thumbnail(seed: int) -> bytes:
    small = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((64, 64)).save(file, "JPEG", quality=90)
    return file.getvalue()


def put(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def thumbnails(folder: Path) -> tuple[Path, list[bytes]]:
    """The same images as files of 16 classes and as tars."""
    held = [thumbnail(number) for number in range(512)]
    data = [held[number % 512] for number in range(THUMBNAILS)]
    for number, image in enumerate(data):
        path = folder / "files" / f"{number % 16:02d}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    (folder / "tars").mkdir()
    for first in range(0, THUMBNAILS, PER_SHARD):
        with tarfile.open(folder / "tars" / f"{first:06d}.tar", "w") as tar:
            for number in range(first, first + PER_SHARD):
                put(tar, f"{number:06d}.jpg", data[number])
                put(tar, f"{number:06d}.cls", b"%d" % (number % 16))
    return folder, data


def epoch(read: Callable[[fl.BatchRead], Any]) -> Callable[[], None]:
    order = np.random.default_rng(0).permutation(THUMBNAILS)
    keys = order.astype(np.uint64)

    def run() -> None:
        for start in range(0, THUMBNAILS, BATCH):
            rows = slice(start, start + BATCH)
            read(fl.BatchRead(order[rows], allocate_tensor, keys[rows]))

    return run


def reading(folder: Path) -> None:
    folder, data = thumbnails(folder)
    plan = fl.transforms.plan(CROP)
    race = Contest("thumbnails of 64 x 64, one thread", unit="images/s", baseline="bare kernel, bytes in memory")
    bare = epoch(lambda request: plan.batch([data[at] for at in request.indices], request.keys, request.allocate))
    race.add("bare kernel, bytes in memory", bare, THUMBNAILS)
    race.add("ImageFolder", epoch(ImageFolder(folder / "files", CROP).read_batch), THUMBNAILS)
    race.add("TarShards", epoch(TarShards(folder / "tars", ("jpg", "cls"), transform=CROP).read_batch), THUMBNAILS)
    few = TarShards(folder / "tars", ("jpg", "cls"), transform=CROP, open_files=1)
    race.add("TarShards, 1 of 8 tars open", epoch(few.read_batch), THUMBNAILS)
    race.run(rounds=5).publish("pillow")


def list_members(tar: str) -> list[tarfile.TarInfo]:
    with tarfile.open(tar) as opened:
        return opened.getmembers()


def indexing(folder: Path) -> None:
    tar = str(folder / "tars" / "000000.tar")
    race = Contest("indexing a tar of 1024 samples", unit="members/s", baseline="tarfile")
    race.add("tarfile", lambda: list_members(tar), 2 * PER_SHARD)
    race.add("headers alone", lambda: list(members(tar)), 2 * PER_SHARD)
    race.add("index with dimensions", lambda: build_index(tar), 2 * PER_SHARD)
    race.run(rounds=5).publish()


def walk_files(root: str) -> list[tuple[str, int]]:
    """Find the files as torchvision does."""
    found = []
    for target, name in enumerate(sorted(entry.name for entry in os.scandir(root) if entry.is_dir())):
        for folder, _, names in sorted(os.walk(f"{root}/{name}", followlinks=True)):
            found += [(f"{folder}/{each}", target) for each in sorted(names) if each.lower().endswith(".jpg")]
    return found


def listing(folder: Path, count: int) -> None:
    for number in range(count):
        path = folder / f"{number % 100:03d}" / f"n{number:09d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    kept = folder.with_suffix(".listings")
    ImageFolder(folder, index_dir=kept)
    race = Contest("listing a folder of images", unit="files/s", baseline="os.walk, as torchvision")
    race.add("os.walk, as torchvision", lambda: walk_files(str(folder)), count)
    race.add("ImageFolder", lambda: ImageFolder(folder), count)
    race.add("ImageFolder, kept listing", lambda: ImageFolder(folder, index_dir=kept), count)
    race.run(rounds=3).publish()


def main() -> None:
    scale = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reading(folder)
        indexing(folder)
        (folder / "tree").mkdir()
        listing(folder / "tree", int(100_000 * scale))


if __name__ == "__main__":
    main()
