"""A format from outside, `examples/extending/recordio_dataset.py`: the suite's corpora of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import extensions  # noqa: F401 - so that importing the format leaves it unregistered
import torch
from recordio_files import MAGIC, file_of, packed
from writers.values import jpeg

from feedline import transforms as T
from formats.format import Format
from recordio_dataset import RecordIO

SIZES = (10, 1, 13)
CROP = T.Compose([T.RandomResizedCrop(16), T.ToTensor()])
_CUT = ("2.rec", -3, r"{} claims \d+ bytes at byte \d+, but \d+ are left; was the file copied completely")


def _data(i: int) -> bytes:
    """Bytes of any length; in some records, the magic number is at a place where it divides them."""
    return b"ab" * i + (bytes(-2 * i % 4) + MAGIC + b"x" + MAGIC if i % 3 == 0 else b"")


def _write(folder: Path, image: Any, labels: Any) -> None:
    records = [packed(i, labels(i), image(i)) for i in range(sum(SIZES))]
    for number, size in enumerate(SIZES):
        (folder / f"{number}.rec").write_bytes(file_of([records.pop(0) for _ in range(size)]))


def write_bytes(folder: Path) -> None:
    _write(folder, _data, lambda i: [i, i + 1])


def write_images(folder: Path) -> None:
    _write(folder, lambda i: jpeg(i, (24, 18)), lambda i: [i])


FORMATS = {
    "recordio": Format(
        write_bytes,
        lambda root, **store: RecordIO(f"{root}/{{0..2}}.rec", decode="bytes", **store),
        lambda i: {"id": i, "label": torch.tensor([float(i), i + 1]), "image": _data(i)},
        sum(SIZES),
        cut=_CUT,
        together=3,
        lists=False,
    ),
    "recordio, images": Format(
        write_images,
        lambda root, **store: RecordIO(root, transform={"image": CROP}, **store),
        count=sum(SIZES),
        cut=_CUT,
        random=True,
    ),
}
