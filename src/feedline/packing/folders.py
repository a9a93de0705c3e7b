"""The samples of folders: one folder per class, or files beside each other; torchvision's classes and order."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from feedline.errors import ArgumentError
from feedline.packing.samples import Listing, Part, Sample
from feedline.shards import IMAGE_EXTENSIONS, split

_SIDE_FIELDS = ("json", "txt", "cls")
"""Files that belong to the picture of the same name."""

_ONE_NAME = {"jpeg": "jpg", "jpe": "jpg", "jfif": "jpg", "tiff": "tif"}
"""One field for one format, so that a reader can ask for `jpg`."""


def listed(folders: Sequence[str]) -> Listing:
    """The samples of folders; ArgumentError for one without pictures, or with a class without any."""
    passed_over = Counter[str]()
    classes = sorted({name for folder in folders for name in _class_names(folder)})
    labels = {name: label for label, name in enumerate(classes)}
    found = [sample for folder in folders for sample in _of_folder(Path(folder), labels, passed_over)]
    notes = [f"left out: {number:,} {what}" for what, number in sorted(passed_over.items())]
    return Listing(found, classes or None, bool(classes), notes=notes).with_unique_keys()


def _of_folder(folder: Path, labels: Mapping[str, int], passed_over: Counter[str]) -> Iterator[Sample]:
    names = _class_names(folder)
    for name in names:
        inside = list(_samples(folder / name, f"{name}/", labels[name], passed_over))
        if not inside:
            raise ArgumentError(f"the class folder {folder / name} holds no picture; remove it")
        yield from inside
    loose = list(_beside(folder, passed_over))
    if names and loose:
        passed_over["pictures beside the class folders"] += len(loose)
    elif not names and not loose:
        known = " ".join(sorted(IMAGE_EXTENSIONS))
        raise ArgumentError(f"{folder} holds neither pictures (their names end in one of: {known}) nor .tar files")
    yield from () if names else loose


def _class_names(folder: str | Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def _samples(folder: Path, prefix: str, label: int, passed_over: Counter[str]) -> Iterator[Sample]:
    """The pictures below a class folder in torchvision's order: folders sorted, then the names in each."""
    for place, _, names in sorted(os.walk(folder, followlinks=True)):
        inner = Path(place).relative_to(folder).as_posix()
        yield from _group(Path(place), names, prefix if inner == "." else f"{prefix}{inner}/", label, passed_over)


def _beside(folder: Path, passed_over: Counter[str]) -> Iterator[Sample]:
    """The pictures of a folder itself."""
    names = [entry.name for entry in os.scandir(folder) if entry.is_file()]
    return _group(folder, names, "", None, passed_over)


def _group(
    folder: Path, names: Sequence[str], prefix: str, label: int | None, passed_over: Counter[str]
) -> Iterator[Sample]:
    """A sample for each picture, with the files that belong to it."""
    present, left = set(names), set(names)
    for name in sorted(names):
        stem, _, extension = name.rpartition(".")
        key = prefix + stem.replace(".", "_")
        is_picture = extension.lower() in IMAGE_EXTENSIONS and not name.startswith(".")
        if not is_picture or split(f"{key}.jpg") != (key, "jpg"):
            continue
        sides = [side for side in _SIDE_FIELDS if f"{stem}.{side}" in present]
        left -= {name, *(f"{stem}.{side}" for side in sides)}
        kind = extension.lower()
        parts = [_part(folder / name, _ONE_NAME.get(kind, kind))]
        parts += [_part(folder / f"{stem}.{side}", side) for side in sides if side != "cls" or label is None]
        yield Sample(key, label, tuple(parts))
    passed_over.update(_kind_of(name) for name in left)


def _kind_of(name: str) -> str:
    stem, _, extension = name.rpartition(".")
    return f"files ending in .{extension}" if stem else f"files named {name}"


def _part(path: Path, field: str) -> Part:
    return Part(field, str(path), 0, path.stat().st_size)
