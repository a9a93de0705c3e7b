"""Tars: the suite's corpora of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from image_cases import encoded, jpeg, photo
from tar_cases import image_shards, npy, write_tar

from feedline import transforms as T
from feedline.datasets import TarShards
from formats.format import Format

CROP = T.Compose([T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.ToTensor()])
CENTER = T.Compose([T.Resize(40), T.CenterCrop(32)])
PAIR = ("jpg;png;jpeg", "cls")
COUNT = 24
_SHARDS = "train-{000..002}.tar"


def write_shards(folder: Path) -> None:
    """24 samples in shards of 10, 1 and 13."""
    image_shards(folder, [10, 1, 13])


def write_kinds(folder: Path) -> None:
    """A shard of two samples with all kinds of fields, whose members alternate."""
    members = {
        "s/0.jpg": jpeg(64, 48),
        "s/0.seg.PNG": encoded(photo(64, 48), "PNG"),
        "s/1.json": b'{"a": [1, 2.5, null]}',
        "s/0.cls": b"17",
        "s/1.txt": "größe".encode(),
        "s/0.npy": npy(np.arange(6, dtype=np.float32)),
        "s/0.bin": b"",
        "s/1.cls": b"3",
    }
    write_tar(folder / "kinds.tar", members)


def numbered(sample: Any, rng: Any) -> Any:
    return (*sample, rng.key)


def _shards(
    sample: Any = None, fields: Any = None, transform: Any = None, *, pattern: str = _SHARDS, **more: Any
) -> Format:
    settings = {name: more.pop(name) for name in ("open_files",) if name in more}
    return Format(
        write_shards,
        lambda root, **store: TarShards(f"{root}/{pattern}", fields, transform=transform, **settings, **store),
        sample,
        COUNT,
        cut=("train-002.tar", 0.5, "{} is truncated: member .*allow_truncated=True"),
        **{"lists": "*" in pattern, **more},
    )


FORMATS = {
    "tar": _shards(pattern="*.tar", collates=False),
    "tar of all kinds": Format(
        write_kinds,
        lambda root, **store: TarShards(f"{root}/kinds.tar", **store),
        count=2,
        cut=("kinds.tar", 0.5, "{} is truncated: member .*allow_truncated=True"),
        collates=False,
        lists=False,
    ),
    "tar, tuples": _shards(None, ("__key__", "cls", "jpg"), collates=False, own_layout=False),
    "tar, numbers": _shards(lambda i: (f"{i:04}", i), ("__key__", "cls"), pattern="train-*.tar", together=3),
    "tar, crops": _shards(None, PAIR, CROP, random=True, own_layout=False),
    "tar, crops of all": _shards(None, None, CROP, collates=False, random=True, own_layout=False),
    "tar, one open": _shards(None, PAIR, CENTER, open_files=1),
    "tar, whole samples": _shards(None, ("cls",), numbered, collates=False, random=True),
}
