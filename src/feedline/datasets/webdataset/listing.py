"""Listing of the samples of tar shards, through their indexes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from feedline.core.threads import WorkAhead
from feedline.datasets.sample_lists import PartKind, Readable, ReportProgress, Sample, SampleList, SamplePart, problem
from feedline.datasets.webdataset.index import TarIndex
from feedline.datasets.webdataset.index_files import build_index, open_index, read_head
from feedline.datasets.webdataset.tar import CLASSES, is_image
from feedline.datasets.webdataset.targets import TarTarget, find_tar_targets, find_tars, has_compressed, has_urls
from feedline.errors import ArgumentError
from feedline.stores import ObjectNotFoundError

_INDEXED_AT_ONCE = 8


_KINDS: dict[str, PartKind] = {"npy": "array", "cls": "class", "json": "attributes"}


def kind_of(field: str) -> PartKind:
    """The kind of a field of WebDataset."""
    return "image" if is_image(field) else _KINDS.get(field, "other")


def list_samples(sources: Sequence[str], progress: ReportProgress) -> SampleList:
    """The samples of all readable tars, and problems of other tars.

    Samples of remote and compressed tars are listed through their indexes.
    """
    if has_urls(sources) or has_compressed(sources):
        return _list_remote(sources, progress)
    tars, groups, unreadable = find_tars(sources), list[SampleList](), list[str]()
    for number, tar in enumerate(tars, 1):
        try:
            groups.append(list_tars([tar]))
        except Exception as error:  # noqa: BLE001 - a broken tar is reported, and the others are surveyed
            unreadable.append(problem(tar, error))
        progress("shards", number, len(tars))
    samples = [sample for group in groups for sample in group.samples]
    shards = [size for group in groups for size in group.shards]
    classes = _common([group.classes for group in groups])
    return SampleList(samples, classes, shards=shards, unreadable=unreadable).with_unique_keys()


def _list_remote(sources: Sequence[str], progress: ReportProgress) -> SampleList:
    """Samples of all readable tars, and problems of other tars."""
    tars, groups, unreadable = find_tar_targets(sources), list[list[Sample]](), list[str]()
    with WorkAhead(_samples_in, tars, _INDEXED_AT_ONCE) as results:
        for number, result in enumerate(results, 1):
            if isinstance(result, str):
                unreadable.append(result)
            else:
                groups.append(result)
            progress("shards", number, len(tars))
    samples = [sample for group in groups for sample in group]
    named: list[list[str] | None] = []
    for tar in {tar.name.rpartition("/")[0]: tar for tar in reversed(tars)}.values():
        try:
            named.append(_parse(_read_adjacent(tar)))
        except Exception as error:  # noqa: BLE001 - as of a tar
            named.append(None)
            unreadable.append(problem(f"{CLASSES} next to {tar.name}", error))
    classes = _common(named)
    return SampleList(samples, classes, shards=list(map(len, groups)), unreadable=unreadable).with_unique_keys()


def _samples_in(tar: TarTarget) -> list[Sample] | str:
    """The samples of a tar, or a line about its problem."""
    try:
        tar.head()  # copies an index next to an object to this machine
        index = tar.index() or tar.make(checksum=False)
        return samples_in(index, tar.file)
    except Exception as error:  # noqa: BLE001 - a broken tar is reported, and the others are surveyed
        return problem(tar.name, error)


def _read_adjacent(tar: TarTarget) -> str | None:
    """The class names next to a remote or compressed tar."""
    file = tar.file
    if "://" not in tar.name:
        return _read_text(Path(tar.name).parent / CLASSES)
    if file is None:
        return None
    try:
        return str(file.read_adjacent(CLASSES), "utf-8")
    except ObjectNotFoundError:
        return None


def list_tars(tars: Sequence[str]) -> SampleList:
    """List the samples of tars, in the order of the tars.

    ShardError for a tar that cannot be read.
    """
    groups = [samples_in(open_index(tar) if read_head(tar) else build_index(tar)) for tar in tars]
    samples = [sample for group in groups for sample in group]
    if not samples:
        raise ArgumentError(f"no samples in {', '.join(tars)}: members must be named KEY.FIELD, such as 0001.jpg")
    return SampleList(samples, _read_classes(tars), shards=list(map(len, groups))).with_unique_keys()


def samples_in(index: TarIndex, file: Readable | None = None) -> list[Sample]:
    """The samples of an indexed tar, or of the object `file`."""
    return [
        Sample(key, None, tuple(_tar_part(index, row, field, file) for field in index.present(row)))
        for row, key in enumerate(index.keys)
    ]


def _tar_part(index: TarIndex, row: int, field: str, file: Readable | None) -> SamplePart:
    column = index.fields.index(field)
    start, size, member = index.start(row, column), int(index.sizes[row, column]), index.member(row, column)
    has_grid = index.has_grids and index.grid(row, column) is not None
    return SamplePart(field, index.tar, start, size, member, has_grid, file, kind_of(field))


def _read_classes(tars: Sequence[str]) -> list[str] | None:
    """Class names of `classes.json` next to the tars.

    None unless the files next to all tars are equal.
    """
    text, *others = {_read_text(Path(tar).parent / CLASSES) for tar in tars}
    return None if others else _parse(text)


def _parse(text: str | None) -> list[str] | None:
    return None if text is None else list(map(str, json.loads(text)))


def _common(named: Sequence[list[str] | None]) -> list[str] | None:
    """The class names of all folders, or None unless they are equal."""
    return named[0] if named and all(each == named[0] for each in named) else None


def _read_text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
