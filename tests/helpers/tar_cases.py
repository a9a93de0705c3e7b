"""Tars for the tests of shards, and images to put into them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from image_cases import jpeg

Members = Mapping[str, bytes] | Iterable[tuple[str, bytes]]


def write_tar(path: Path, members: Members, **options: Any) -> Path:
    """A tar of these members; names may occur twice."""
    pairs = members.items() if isinstance(members, Mapping) else members
    with tarfile.open(path, "w", **options) as tar:
        for name, data in pairs:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def entry(path: Path, name: str, kind: bytes, link: str = "") -> Path:
    """A tar of one good member and one of another kind."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        good = tarfile.TarInfo("0000.txt")
        good.size = 4
        tar.addfile(good, io.BytesIO(b"good"))
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, link
        tar.addfile(info)
    return path


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def image_members(count: int, first: int = 0, size: tuple[int, int] = (96, 72)) -> dict[str, bytes]:
    """Samples of a JPEG and a class each; sample i has class i."""
    members = {}
    for number in range(first, first + count):
        members[f"{number:04d}.jpg"] = jpeg(*size, number, quality=85)
        members[f"{number:04d}.cls"] = str(number).encode()
    return members


def image_shards(folder: Path, sizes: Iterable[int]) -> list[Path]:
    """Tars with these numbers of samples, whose classes count through all tars."""
    paths, first = [], 0
    for number, size in enumerate(sizes):
        paths.append(write_tar(folder / f"train-{number:03d}.tar", image_members(size, first)))
        first += size
    return paths
