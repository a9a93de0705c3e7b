"""Listing the samples of folders and of WebDataset tar shards.

A folder contains one folder per class, with torchvision's classes and order, or the files themselves: images, sounds,
videos, or text. Tars are listed
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

from feedline.datasets.webdataset import CLASSES, IMAGE_EXTENSIONS, TarIndex, build_index, glance, open_index, split
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


AUDIO_EXTENSIONS = frozenset("aac aif aiff au caf flac m4a mp3 oga ogg opus w64 wav wma".split())  # noqa: SIM905 - reads as a list


VIDEO_EXTENSIONS = frozenset("avi flv m4v mkv mov mp4 mpeg mpg ogv ts webm wmv".split())  # noqa: SIM905


_MEDIA = IMAGE_EXTENSIONS | AUDIO_EXTENSIONS | VIDEO_EXTENSIONS


_SIDE_FIELDS = ("json", "txt", "cls")
"""Extensions of files that belong to the media file of the same name."""


_FIELD_NAMES = {"jpeg": "jpg", "jpe": "jpg", "jfif": "jpg", "tiff": "tif"}
"""One field name per format, so that readers can ask for `jpg`."""


def list_folders(folders: Sequence[str]) -> SampleList:
    """List the samples of folders.

    A sample is an image, a sound or a video, with the files that belong to it. In folders without any of these, all
    files of one name are a sample. ArgumentError for a folder or a class without samples.
    """
    ignored = Counter[str]()
    classes = sorted({name for folder in folders for name in _class_names(folder)})
    labels = {name: label for label, name in enumerate(classes)}
    lister = _Lister(any(map(_has_media, folders)), ignored)
    samples = [sample for folder in folders for sample in lister.folder(Path(folder), labels)]
    notes = [f"left out: {number:,} {what}" for what, number in sorted(ignored.items())]
    return SampleList(samples, classes or None, bool(classes), notes=notes).with_unique_keys()


def _has_media(folder: str) -> bool:
    return any(_kind(name) in _MEDIA for _, _, names in os.walk(folder, followlinks=True) for name in names)


def _kind(name: str) -> str:
    """The extension of a file; "" for hidden files and those without."""
    stem, _, extension = name.rpartition(".")
    return extension.lower() if stem and not name.startswith(".") else ""


def _class_names(folder: str | Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


class _Lister:
    """Lists samples; files that belong to none are counted in `ignored`.

    Without `media`, text and other files are samples.
    """

    def __init__(self, media: bool, ignored: Counter[str]) -> None:
        self._media, self._ignored = media, ignored

    def folder(self, folder: Path, labels: Mapping[str, int]) -> Iterator[Sample]:
        """The samples of class folders, or else those directly in the folder."""
        names = _class_names(folder)
        for name in names:
            inside = list(self._class(folder / name, f"{name}/", labels[name]))
            if not inside:
                wanted = "image, sound or video" if self._media else "file with an extension"
                raise ArgumentError(f"the class folder {folder / name} contains no {wanted}; remove it")
            yield from inside
        loose = list(self._group([entry.name for entry in os.scandir(folder) if entry.is_file()], folder, "", None))
        if names and loose:
            self._ignored["samples next to the class folders"] += len(loose)
        elif not names and not loose:
            raise ArgumentError(f"{folder} contains neither files with an extension nor .tar files")
        yield from () if names else loose

    def _class(self, folder: Path, prefix: str, label: int) -> Iterator[Sample]:
        """Samples below a class folder, in torchvision's order.

        Folders are sorted, then the names in each folder.
        """
        for place, _, names in sorted(os.walk(folder, followlinks=True)):
            inner = Path(place).relative_to(folder).as_posix()
            yield from self._group(names, Path(place), prefix if inner == "." else f"{prefix}{inner}/", label)

    def _group(self, names: Sequence[str], folder: Path, prefix: str, label: int | None) -> Iterator[Sample]:
        """The samples among the files of one folder.

        Each image is one, and so are the sounds and videos of one name. Text of the same name belongs to it.
        """
        present, unused = set(names), set(names)
        by_stem: dict[str, list[str]] = {}
        for name in sorted(names):
            if self._is_sample(name):
                by_stem.setdefault(name.rpartition(".")[0], []).append(name)
        for stem, own in by_stem.items():
            key = prefix + stem.replace(".", "_")
            if split(f"{key}.jpg") != (key, "jpg"):
                continue
            sides = [f"{stem}.{side}" for side in _SIDE_FIELDS if f"{stem}.{side}" in present] if self._media else []
            unused -= {*own, *sides}
            for files in _by_image(own):
                added = [side for side in sides if label is None or not side.endswith(".cls")]
                yield Sample(key, label, tuple(_part(folder / name) for name in [*files, *added]))
        self._ignored.update(_describe_kind(name) for name in unused)

    def _is_sample(self, name: str) -> bool:
        return _kind(name) in _MEDIA if self._media else _kind(name) not in ("", "cls")


def _by_image(names: Sequence[str]) -> list[list[str]]:
    """Divide files of one name: at most one image each."""
    images = [name for name in names if _kind(name) in IMAGE_EXTENSIONS]
    others = [name for name in names if name not in images]
    return [[images[0], *others], *([image] for image in images[1:])] if images else [others]


def _describe_kind(name: str) -> str:
    stem, _, extension = name.rpartition(".")
    return f"files ending in .{extension}" if stem else f"files named {name}"


def _part(path: Path) -> MemberSource:
    kind = path.suffix[1:].lower()
    return MemberSource(_FIELD_NAMES.get(kind, kind), str(path), 0, path.stat().st_size)


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
