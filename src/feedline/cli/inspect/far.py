"""Samples of tars in stores: listed through their indexes, and what is looked at of many of them fetched at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from feedline.cancelling import DaemonPool
from feedline.cli.inspect.problems import problem
from feedline.cli.tars import Far, Tar, tars_at
from feedline.packing.ahead import Ahead
from feedline.packing.samples import Listing, Part, Readable, Sample
from feedline.packing.tars import CLASSES, samples_in
from feedline.shards import is_image
from feedline.stores import AccessDeniedError, ObjectNotFoundError

Step = Callable[[str, int, int], None]

BEGINNING_NBYTES = 16 << 10
"""What is fetched of a picture at first."""
_INDEXED_AT_ONCE = 8
_READ_AT_ONCE = 32
_SAMPLES_AT_ONCE = 1024


def listed(sources: Sequence[str], step: Step) -> tuple[Listing, list[str]]:
    """The samples of the tars that can be read, and what is wrong with those that cannot."""
    tars, groups, unreadable = tars_at(sources), list[list[Sample]](), list[str]()
    with Ahead(_samples_in, tars, _INDEXED_AT_ONCE) as results:
        for number, result in enumerate(results, 1):
            if isinstance(result, str):
                unreadable.append(result)
            else:
                groups.append(result)
            step("shards", number, len(tars))
    samples = [sample for group in groups for sample in group]
    try:
        classes = _classes(tars[0])
    except Exception as error:  # noqa: BLE001 - as of a tar
        classes = None
        unreadable.append(problem(f"{CLASSES} beside {tars[0].name}", error))
    return Listing(samples, classes, shards=list(map(len, groups))).with_unique_keys(), unreadable


def fetched(samples: Sequence[Sample]) -> Iterator[Sample]:
    """The samples, with what tells of their pictures and classes in memory, of many at a time."""
    for first in range(0, len(samples), _SAMPLES_AT_ONCE):
        yield from _held(samples[first : first + _SAMPLES_AT_ONCE])


class _Held:
    """A blob of which some bytes are in memory."""

    def __init__(self, blob: Readable, start: int, data: memoryview) -> None:
        self._blob, self._start, self._data = blob, start, data

    def read(self, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """One view for each span."""
        return [
            self._data[start - self._start : stop - self._start]
            if self._start <= start and stop <= self._start + len(self._data)
            else self._blob.read([(start, stop)])[0]
            for start, stop in spans
        ]


def _samples_in(tar: Tar) -> list[Sample] | str:
    """The samples of a tar, or what is wrong with it."""
    try:
        tar.head()  # which brings the index here from beside an object, for the next time too
        index = tar.index() or tar.make(checksum=False)
        return samples_in(index, tar.blob if isinstance(tar, Far) else None)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with one is told, and the others are surveyed
        return problem(tar.name, error)


def _classes(tar: Tar) -> list[str] | None:
    """The class names that lie beside a tar."""
    if not isinstance(tar, Far):
        return None
    folder = tar.blob.path.rpartition("/")[0]
    try:
        return list(map(str, json.loads(bytes(tar.blob.store.read(f"{folder}/{CLASSES}".lstrip("/"))))))
    except (ObjectNotFoundError, AccessDeniedError):
        return None


def _held(samples: Sequence[Sample]) -> list[Sample]:
    wanted: dict[Readable, list[tuple[int, int]]] = {}
    for sample in samples:
        for part in sample.parts:
            if part.blob is not None and _looked_at(part):
                wanted.setdefault(part.blob, []).append(_beginning(part))
    with DaemonPool(_READ_AT_ONCE, "feedline-inspect") as pool:
        views = dict(zip(wanted, pool.map(_read, wanted.items()), strict=True))
    held = {
        (blob, *span): _Held(blob, span[0], view)
        for blob, spans in wanted.items()
        for span, view in zip(spans, views[blob], strict=bool(views[blob]))
    }
    return [
        sample._replace(
            parts=tuple(
                part._replace(blob=held.get((part.blob, *_beginning(part)), part.blob)) if part.blob else part
                for part in sample.parts
            )
        )
        for sample in samples
    ]


def _read(wanted: tuple[Readable, list[tuple[int, int]]]) -> list[memoryview]:
    """One view for each span of a blob, or none if it cannot be read: each part tells of that when it is looked at."""
    blob, spans = wanted
    try:
        return blob.read(spans)
    except Exception:  # noqa: BLE001 - the same comes again, and is told then
        return []


def _looked_at(part: Part) -> bool:
    return is_image(part.field) or part.field in ("cls", "json")


def _beginning(part: Part) -> tuple[int, int]:
    return part.start, part.start + (min(part.size, BEGINNING_NBYTES) if is_image(part.field) else part.size)
