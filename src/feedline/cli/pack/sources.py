"""What there is to pack: samples, where their parts lie, and what was passed over.

The samples of folders: one folder per class, or files beside each other; torchvision's classes and order.

The samples of tar shards in WebDataset's layout, through the same index that reads them.

What sources hold: folders of files, or tar shards, given one by one or by their folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from feedline.datasets.webdataset import IMAGE_EXTENSIONS, TarIndex, build_index, glance, open_index, split
from feedline.errors import ArgumentError, SampleError


class Readable(Protocol):
    """An object of a store."""

    def read(self, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """One view for each `(start, stop)`."""
        ...


class MemberSource(NamedTuple):
    """One member to be: bytes `[start, start + size)` of a file or an object, which may be the member of a tar."""

    field: str
    path: str
    start: int
    size: int
    member: str | None = None
    has_grid: bool = False
    blob: Readable | None = None

    @property
    def name(self) -> str:
        """What messages call it: the file, and the member of it, if it is a tar."""
        return self.path if self.member is None else f"{self.path}: member {self.member!r}"

    def read(self) -> bytes:
        """The contents; SampleError if the file has become shorter."""
        if self.blob is not None:
            return bytes(self.blob.read([(self.start, self.start + self.size)])[0])
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.start)
            data = file.read(self.size)
        if len(data) != self.size:
            raise SampleError(f"{self.name} became shorter while it was packed. Wait until its writer is done")
        return data


class Sample(NamedTuple):
    """What comes under one key; `label` is the index of its class, if its folder says so."""

    key: str
    label: int | None
    parts: tuple[MemberSource, ...]


@dataclass(slots=True)
class SampleList:
    """The samples of all sources, in the order of the sources.

    `classes` are the names that labels index, None where there are none; `shards` are the numbers of samples in each
    tar; `renamed` are the keys that came more than once; `notes` are what else the user should hear of.
    """

    samples: list[Sample]
    classes: list[str] | None = None
    in_classes: bool = False
    shards: list[int] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def fingerprint(self) -> str:
        """Names and sizes of everything, in one number; the same for a copy of the sources elsewhere."""
        digest = hashlib.sha256(json.dumps(self.classes).encode())
        for sample in self.samples:
            parts = [(part.field, part.start, part.size) for part in sample.parts]
            digest.update(json.dumps([sample.key, sample.label, parts]).encode())
        return digest.hexdigest()

    def with_unique_keys(self) -> SampleList:
        """The same, with `-2`, `-3` … behind a key that has come before: two files of one name, or two tars."""
        seen, samples, renamed = Counter[str](), list[Sample](), list[str]()
        for sample in self.samples:
            key = sample.key
            while seen[key]:
                seen[sample.key] += 1
                key = f"{sample.key}-{seen[sample.key]}"
            seen[key] += 1
            samples.append(sample if key == sample.key else sample._replace(key=key))
            renamed += [] if key == sample.key else [sample.key]
        return replace(self, samples=samples, renamed=renamed)


_SIDE_FIELDS = ("json", "txt", "cls")
"""Files that belong to the picture of the same name."""


_ONE_NAME = {"jpeg": "jpg", "jpe": "jpg", "jfif": "jpg", "tiff": "tif"}
"""One field for one format, so that a reader can ask for `jpg`."""


def list_folders(folders: Sequence[str]) -> SampleList:
    """The samples of folders; ArgumentError for one without pictures, or with a class without any."""
    passed_over = Counter[str]()
    classes = sorted({name for folder in folders for name in _class_names(folder)})
    labels = {name: label for label, name in enumerate(classes)}
    found = [sample for folder in folders for sample in _of_folder(Path(folder), labels, passed_over)]
    notes = [f"left out: {number:,} {what}" for what, number in sorted(passed_over.items())]
    return SampleList(found, classes or None, bool(classes), notes=notes).with_unique_keys()


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


def _part(path: Path, field: str) -> MemberSource:
    return MemberSource(field, str(path), 0, path.stat().st_size)


CLASSES = "classes.json"


def list_tars(tars: Sequence[str]) -> SampleList:
    """The samples of tars, tar after tar; ShardError for one that cannot be read."""
    groups = [samples_in(open_index(tar) if glance(tar) else build_index(tar)) for tar in tars]
    found = [sample for group in groups for sample in group]
    if not found:
        raise ArgumentError(f"{', '.join(tars)} hold no samples: members are named KEY.FIELD, such as 0001.jpg")
    return SampleList(found, _classes(tars), shards=list(map(len, groups))).with_unique_keys()


def samples_in(index: TarIndex, blob: Readable | None = None) -> list[Sample]:
    """The samples of the tar that an index is of, which is a file or this object."""
    return [
        Sample(key, None, tuple(_tar_part(index, row, field, blob) for field in index.present(row)))
        for row, key in enumerate(index.keys)
    ]


def _tar_part(index: TarIndex, row: int, field: str, blob: Readable | None) -> MemberSource:
    column = index.fields.index(field)
    place = index.start(row, column), int(index.sizes[row, column]), index.member(row, column)
    return MemberSource(field, index.tar, *place, index.has_grids and index.grid(row, column) is not None, blob)


def _classes(tars: Sequence[str]) -> list[str] | None:
    """The class names that lie beside the tars, if those beside all of them are the same."""
    found = {_text(Path(tar).parent / CLASSES) for tar in tars}
    text = found.pop()
    return None if found or text is None else list(map(str, json.loads(text)))


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def listed(sources: Sequence[str]) -> SampleList:
    """The samples of all sources; ArgumentError for what is neither tars nor folders, or both."""
    found = tars_of(sources)
    return list_tars(found) if found else list_folders(sources)


def tars_of(sources: Sequence[str]) -> list[str]:
    """The tars that the sources are or hold; none if all are folders of files."""
    found = [_tars(source) for source in sources]
    if any(found) and not all(found):
        raise ArgumentError("the sources are partly tar shards, partly folders of files; take one kind after the other")
    return [tar for group in found for tar in group]


def _tars(source: str) -> list[str]:
    if "://" in source:
        raise ArgumentError(f"{source} is an address, and this reads files of this machine: copy what it names first")
    path = Path(source)
    if path.is_dir():
        return sorted(str(entry) for entry in path.iterdir() if entry.suffix == ".tar" and entry.is_file())
    if not path.exists():
        raise ArgumentError(f"{source} does not exist")
    if path.suffix != ".tar":
        raise ArgumentError(f"{source} is neither a folder nor a .tar file")
    return [source]
