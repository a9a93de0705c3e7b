"""Listing of the samples of folders, with torchvision's classes and order."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from feedline.datasets.formats import IMAGE_EXTENSIONS
from feedline.datasets.sample_lists import ReportProgress, Sample, SampleList, SamplePart
from feedline.datasets.webdataset.listing import kind_of
from feedline.datasets.webdataset.tar import split
from feedline.errors import ArgumentError
from feedline.stores.urls import is_local

AUDIO_EXTENSIONS = frozenset("aac aif aiff au caf flac m4a mp3 oga ogg opus w64 wav wma".split())  # noqa: SIM905 - reads as a list


VIDEO_EXTENSIONS = frozenset("avi flv m4v mkv mov mp4 mpeg mpg ogv ts webm wmv".split())  # noqa: SIM905


_MEDIA = IMAGE_EXTENSIONS | AUDIO_EXTENSIONS | VIDEO_EXTENSIONS


_SIDE_FIELDS = ("json", "txt", "cls")
"""Extensions of files that belong to the media file of the same name."""


_FIELD_NAMES = {"jpeg": "jpg", "jpe": "jpg", "jfif": "jpg", "tiff": "tif"}
"""One field name per format, so that readers can request `jpg`."""


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
    """The extension of a file; "" for hidden files, or without one."""
    stem, _, extension = name.rpartition(".")
    return extension.lower() if stem and not name.startswith(".") else ""


def _class_names(folder: str | Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


class _Lister:
    """Lists samples; files that belong to no sample are counted in `ignored`.

    Without `media`, text and other files are samples.
    """

    def __init__(self, media: bool, ignored: Counter[str]) -> None:
        self._media, self._ignored = media, ignored

    def folder(self, folder: Path, labels: Mapping[str, int]) -> Iterator[Sample]:
        """The samples of class folders, or else directly in the folder."""
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

        Each image is a sample. The sounds and videos of one name are a sample, too. Text of the same name belongs to
        the sample.
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


def _part(path: Path) -> SamplePart:
    kind = path.suffix[1:].lower()
    name = _FIELD_NAMES.get(kind, kind)
    return SamplePart(name, str(path), 0, path.stat().st_size, kind=kind_of(name))


def list_samples(sources: Sequence[str], progress: ReportProgress) -> SampleList:  # noqa: ARG001 - folders are listed quickly
    """The samples of folders, for `feedline inspect`."""
    for source in sources:
        if not is_local(source):
            raise ArgumentError(f"{source} is a URL, but folders of samples are listed on this machine: copy it first")
        if not Path(source).is_dir():
            raise ArgumentError(f"{source} is a file: give its folder")
    return list_folders(sources)
