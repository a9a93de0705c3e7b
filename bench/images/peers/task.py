"""The task of a contestant. Every environment reads this file, so it uses the standard library only."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SHORTER = 256
"""The shorter side that the validation recipe resizes to before it crops."""


@dataclass(frozen=True, slots=True)
class Task:
    """`images` images per epoch of the corpus in `root`, in batches of `batch`, by `workers` workers.

    `recipe` is "random" (random resized crop of `scale` of the area, flipped half of the time) or "center" (shorter
    side to 256, center crop); both give `size` x `size` pixels. `output` is "uint8" (HWC) or "float32" (CHW,
    normalized with `MEAN` and `STD`).
    """

    root: str
    image_count: int
    recipe: str
    size: int
    scale: tuple[float, float]
    output: str
    batch: int
    images: int
    workers: int

    @classmethod
    def loads(cls, text: str) -> Task:
        record = json.loads(text)
        return cls(**{**record, "scale": tuple(record["scale"])})

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one image."""
        return (self.size, self.size, 3) if self.output == "uint8" else (3, self.size, self.size)

    def form(self, name: str) -> Path:
        """Path of the corpus as `name`: "files", "tar", "mds", ..."""
        return Path(self.root) / name

    def files(self) -> tuple[list[str], list[int]]:
        """All files and their class numbers, in the order of torchvision's ImageFolder."""
        paths, labels = zip(*_list_files(self.form("files")), strict=True)
        return list(paths), list(labels)

    def drawn(self, rng: random.Random) -> list[int]:
        """The images of one epoch, each once unless the corpus is too small."""
        chosen: list[int] = []
        while len(chosen) < self.images:
            chosen += rng.sample(range(self.image_count), min(self.image_count, self.images - len(chosen)))
        return chosen


def in_random_order(files: str | Path) -> list[tuple[str, int]]:
    """Every file below `files` and its class number, shuffled once, as a shard should be written."""
    found = _list_files(Path(files))
    random.Random(0).shuffle(found)
    return found


def _list_files(files: Path) -> list[tuple[str, int]]:
    folders = sorted(path for path in files.iterdir() if path.is_dir())
    return [(str(file), label) for label, folder in enumerate(folders) for file in sorted(folder.iterdir())]
