"""Listing the samples of folders and of WebDataset tar shards.

A folder contains one folder per class, with torchvision's classes and order, or the files themselves. Tars are listed
through the index that also reads them.
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
    """An object in a store."""

    def read(self, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Read byte ranges; one view for each `(start, stop)`."""
        ...


class MemberSource(NamedTuple):
    """A part of a sample: bytes of a file or object.

    `member` is its name in a tar, None for a file of its own. `blob` is None for local files.
    """

    field: str
    path: str
    start: int
    size: int
    member: str | None = None
    has_grid: bool = False
    blob: Readable | None = None

    @property
    def name(self) -> str:
        """Name for messages: the file, and the member of a tar."""
        return self.path if self.member is None else f"{self.path}: member {self.member!r}"

    def read(self) -> bytes:
        """Read the contents; SampleError if the file has become shorter."""
        if self.blob is not None:
            return bytes(self.blob.read([(self.start, self.start + self.size)])[0])
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.start)
            data = file.read(self.size)
        if len(data) != self.size:
            raise SampleError(f"{self.name} became shorter while it was packed. Wait until it is completely written")
        return data


class Sample(NamedTuple):
    """The parts of one key.

    `label` is the index of its class folder, or None.
    """

    key: str
    label: int | None
    parts: tuple[MemberSource, ...]


@dataclass(slots=True)
class SampleList:
    """The samples of all sources, in the order of the sources.

    `classes` are the names that labels index, or None; `in_classes` is true for class folders. `shards` are the numbers
    of samples in each tar. `renamed` are the repeated keys. `notes` are further remarks for the user.
    """

    samples: list[Sample]
    classes: list[str] | None = None
    in_classes: bool = False
    shards: list[int] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def fingerprint(self) -> str:
        """SHA-256 of all names and sizes.

        Equal for a copy of the sources in another place.
        """
        digest = hashlib.sha256(json.dumps(self.classes).encode())
        for sample in self.samples:
            parts = [(part.field, part.start, part.size) for part in sample.parts]
            digest.update(json.dumps([sample.key, sample.label, parts]).encode())
        return digest.hexdigest()

    def with_unique_keys(self) -> SampleList:
        """A copy in which repeated keys end in a number.

        The second sample of a key gets `-2`, and so on.
        """
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
"""Extensions of files that belong to the image of the same name."""


_FIELD_NAMES = {"jpeg": "jpg", "jpe": "jpg", "jfif": "jpg", "tiff": "tif"}
"""One field name per format, so that readers can ask for `jpg`."""


def list_folders(folders: Sequence[str]) -> SampleList:
    """List the samples of folders.

    ArgumentError for a folder or a class without images.
    """
    ignored = Counter[str]()
    classes = sorted({name for folder in folders for name in _class_names(folder)})
    labels = {name: label for label, name in enumerate(classes)}
    samples = [sample for folder in folders for sample in _list_folder(Path(folder), labels, ignored)]
    notes = [f"left out: {number:,} {what}" for what, number in sorted(ignored.items())]
    return SampleList(samples, classes or None, bool(classes), notes=notes).with_unique_keys()


def _list_folder(folder: Path, labels: Mapping[str, int], ignored: Counter[str]) -> Iterator[Sample]:
    names = _class_names(folder)
    for name in names:
        inside = list(_list_class(folder / name, f"{name}/", labels[name], ignored))
        if not inside:
            raise ArgumentError(f"the class folder {folder / name} contains no image; remove it")
        yield from inside
    loose = list(_list_files(folder, ignored))
    if names and loose:
        ignored["images next to the class folders"] += len(loose)
    elif not names and not loose:
        known = " ".join(sorted(IMAGE_EXTENSIONS))
        raise ArgumentError(f"{folder} contains neither images (file names that end in one of: {known}) nor .tar files")
    yield from () if names else loose


def _class_names(folder: str | Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def _list_class(folder: Path, prefix: str, label: int, ignored: Counter[str]) -> Iterator[Sample]:
    """Images below a class folder, in torchvision's order.

    Folders are sorted, then the names in each folder.
    """
    for place, _, names in sorted(os.walk(folder, followlinks=True)):
        inner = Path(place).relative_to(folder).as_posix()
        yield from _group_files(Path(place), names, prefix if inner == "." else f"{prefix}{inner}/", label, ignored)


def _list_files(folder: Path, ignored: Counter[str]) -> Iterator[Sample]:
    """Images directly in a folder."""
    names = [entry.name for entry in os.scandir(folder) if entry.is_file()]
    return _group_files(folder, names, "", None, ignored)


def _group_files(
    folder: Path, names: Sequence[str], prefix: str, label: int | None, ignored: Counter[str]
) -> Iterator[Sample]:
    """One sample per image, with the files that belong to it.

    All other files are counted in `ignored`.
    """
    present, unused = set(names), set(names)
    for name in sorted(names):
        stem, _, extension = name.rpartition(".")
        key = prefix + stem.replace(".", "_")
        is_image_file = extension.lower() in IMAGE_EXTENSIONS and not name.startswith(".")
        if not is_image_file or split(f"{key}.jpg") != (key, "jpg"):
            continue
        sides = [side for side in _SIDE_FIELDS if f"{stem}.{side}" in present]
        unused -= {name, *(f"{stem}.{side}" for side in sides)}
        kind = extension.lower()
        parts = [_part(folder / name, _FIELD_NAMES.get(kind, kind))]
        parts += [_part(folder / f"{stem}.{side}", side) for side in sides if side != "cls" or label is None]
        yield Sample(key, label, tuple(parts))
    ignored.update(_describe_kind(name) for name in unused)


def _describe_kind(name: str) -> str:
    stem, _, extension = name.rpartition(".")
    return f"files ending in .{extension}" if stem else f"files named {name}"


def _part(path: Path, field: str) -> MemberSource:
    return MemberSource(field, str(path), 0, path.stat().st_size)


CLASSES = "classes.json"


def list_tars(tars: Sequence[str]) -> SampleList:
    """List the samples of tars, in the order of the tars.

    ShardError for a tar that cannot be read.
    """
    groups = [samples_in(open_index(tar) if glance(tar) else build_index(tar)) for tar in tars]
    samples = [sample for group in groups for sample in group]
    if not samples:
        raise ArgumentError(f"no samples in {', '.join(tars)}: members must be named KEY.FIELD, such as 0001.jpg")
    return SampleList(samples, _read_classes(tars), shards=list(map(len, groups))).with_unique_keys()


def samples_in(index: TarIndex, blob: Readable | None = None) -> list[Sample]:
    """The samples of an indexed tar, or of the object `blob`."""
    return [
        Sample(key, None, tuple(_tar_part(index, row, field, blob) for field in index.present(row)))
        for row, key in enumerate(index.keys)
    ]


def _tar_part(index: TarIndex, row: int, field: str, blob: Readable | None) -> MemberSource:
    column = index.fields.index(field)
    start, size, member = index.start(row, column), int(index.sizes[row, column]), index.member(row, column)
    return MemberSource(
        field, index.tar, start, size, member, index.has_grids and index.grid(row, column) is not None, blob
    )


def _read_classes(tars: Sequence[str]) -> list[str] | None:
    """Class names of `classes.json` next to the tars.

    None unless the files next to all tars are the same.
    """
    texts = {_read_text(Path(tar).parent / CLASSES) for tar in tars}
    text = texts.pop()
    return None if texts or text is None else list(map(str, json.loads(text)))


def _read_text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def list_samples(sources: Sequence[str]) -> SampleList:
    """List the samples of tars, or of folders of files."""
    tars = find_tars(sources)
    return list_tars(tars) if tars else list_folders(sources)


def find_tars(sources: Sequence[str]) -> list[str]:
    """Tars among the sources or in their folders.

    Empty if all sources are folders of files; ArgumentError for other sources, and for a mixture.
    """
    groups = [_find_tars(source) for source in sources]
    if any(groups) and not all(groups):
        raise ArgumentError("some sources are tar shards, others folders of files; pass them separately")
    return [tar for group in groups for tar in group]


def _find_tars(source: str) -> list[str]:
    if "://" in source:
        raise ArgumentError(f"{source} is a URL, but this command reads local files only: copy the data first")
    path = Path(source)
    if path.is_dir():
        return sorted(str(entry) for entry in path.iterdir() if entry.suffix == ".tar" and entry.is_file())
    if not path.exists():
        raise ArgumentError(f"{source} does not exist")
    if path.suffix != ".tar":
        raise ArgumentError(f"{source} is neither a folder nor a .tar file")
    return [source]
