"""Survey of image folders and tar shards.

All samples are counted; image headers and classes are read from some of them. Samples of remote tars are listed
through their indexes, and their headers are fetched in groups.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from feedline import images
from feedline.cli.index import TarTarget, find_tar_targets, has_compressed, has_urls
from feedline.cli.pack import find_tars, list_samples
from feedline.cli.pack.sources import CLASSES, MemberSource, Readable, Sample, SampleList, samples_in
from feedline.cli.pack.sources import list_tars as tars_listed
from feedline.core.threads import INDEX_THREADS, DaemonPool, WorkAhead
from feedline.datasets.formats import ShardSummary
from feedline.datasets.webdataset import is_image
from feedline.errors import FeedlineError, SampleError
from feedline.images import Header
from feedline.stores import ObjectNotFoundError


def problem(name: str, error: Exception) -> str:
    """One line about an error that names its subject."""
    text = str(error) if isinstance(error, FeedlineError) else f"{type(error).__name__}: {error}"
    return text if name in text else f"{name}: {text}"


Step = Callable[[str, int, int], None]


BEGINNING_NBYTES = 16 << 10
"""Bytes of an image that are fetched first."""


_SAMPLES_AT_ONCE = 1024


def list_remote_tars(sources: Sequence[str], step: Step) -> tuple[SampleList, list[str]]:
    """Samples of all readable tars, and problems of the others."""
    tars, groups, unreadable = find_tar_targets(sources), list[list[Sample]](), list[str]()
    with WorkAhead(_samples_in, tars, INDEX_THREADS) as results:
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
        unreadable.append(problem(f"{CLASSES} next to {tars[0].name}", error))
    return SampleList(samples, classes, shards=list(map(len, groups))).with_unique_keys(), unreadable


def with_headers(samples: Sequence[Sample]) -> Iterator[Sample]:
    """Yield the samples with image headers and classes in memory.

    Samples are fetched in groups.
    """
    for first in range(0, len(samples), _SAMPLES_AT_ONCE):
        yield from _fetch_group(samples[first : first + _SAMPLES_AT_ONCE])


class _PartlyLoaded:
    """A blob with some of its bytes in memory."""

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


def _samples_in(tar: TarTarget) -> list[Sample] | str:
    """The samples of a tar, or a line about its problem."""
    try:
        tar.head()  # copies an index that lies next to an object to this machine
        index = tar.index() or tar.make(checksum=False)
        return samples_in(index, tar.blob)
    except Exception as error:  # noqa: BLE001 - a broken tar is reported, and the others are surveyed
        return problem(tar.name, error)


def _classes(tar: TarTarget) -> list[str] | None:
    """Class names from the file next to a remote tar."""
    blob = tar.blob
    if blob is None:
        return None
    try:
        return list(map(str, json.loads(bytes(blob.read_adjacent(CLASSES)))))
    except ObjectNotFoundError:
        return None


def _fetch_group(samples: Sequence[Sample]) -> list[Sample]:
    wanted: dict[Readable, list[tuple[int, int]]] = {}
    for sample in samples:
        for part in sample.parts:
            if part.blob is not None and _is_examined(part):
                wanted.setdefault(part.blob, []).append(_beginning(part))
    with DaemonPool(thread_name_prefix="feedline-inspect") as pool:
        views = dict(zip(wanted, pool.map(_read, wanted.items()), strict=True))
    held = {
        (blob, *span): _PartlyLoaded(blob, span[0], view)
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
    """One view for each span of a blob; empty if unreadable.

    The error is reported for each part when the part is read.
    """
    blob, spans = wanted
    try:
        return blob.read(spans)
    except Exception:  # noqa: BLE001 - each part raises it again when it is read
        return []


def _is_examined(part: MemberSource) -> bool:
    return is_image(part.field) or part.field in ("cls", "json")


def _beginning(part: MemberSource) -> tuple[int, int]:
    return part.start, part.start + (min(part.size, BEGINNING_NBYTES) if is_image(part.field) else part.size)


_HEADER_NBYTES = (BEGINNING_NBYTES, 1 << 16)
"""Bytes of an image in a tar that are read first: headers with large profiles need all of them."""


_MOST_DIGITS = 18
"""Limit for digits of a class number."""


@dataclass(slots=True)
class ImageHeaders:
    """Counts over the headers of examined images; sizes are (width, height)."""

    sizes: list[tuple[int, int]] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    jpegs: int = 0
    progressive: int = 0
    turned: int = 0
    broken: list[str] = field(default_factory=list)

    def add(self, header: Header) -> None:
        self.sizes.append((header.width, header.height))
        self.formats[header.format] += 1
        self.jpegs += header.format == "JPEG"
        self.progressive += header.progressive
        self.turned += header.orientation != 1


@dataclass(slots=True)
class Survey:
    """Counts over all samples, and headers and classes of some.

    `examined` samples, spread evenly, were examined.
    """

    listing: SampleList
    unreadable: list[str] = field(default_factory=list)
    fields: Counter[str] = field(default_factory=Counter)
    nbytes: list[int] = field(default_factory=list)
    image_nbytes: list[int] = field(default_factory=list)
    grids: int = 0
    headers: ImageHeaders = field(default_factory=ImageHeaders)
    classes: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    """Samples whose class is unreadable."""
    examined: int = 0

    @property
    def healthy(self) -> bool:
        """True if everything that was examined is readable."""
        return not (self.unreadable or self.broken or self.headers.broken)


def survey(sources: Sequence[str], limit: int, step: Step) -> Survey:
    """Survey the sources; `limit` samples are examined, 0 for all."""
    found = _count(sources, step)
    samples = found.listing.samples
    chosen = spread(len(samples), limit or len(samples))
    for number, sample in enumerate(with_headers([samples[at] for at in chosen]), 1):
        _examine(sample, found)
        if number % 64 == 0 or number == len(chosen):
            step("headers", number, len(chosen))
    found.examined = len(chosen)
    return found


def spread(length: int, number: int) -> list[int]:
    """`number` evenly spaced indices of `range(length)`, or all of them."""
    return list(range(length)) if length <= number else [i * length // number for i in range(number)]


def _count(sources: Sequence[str], step: Step) -> Survey:
    listing, unreadable = _listing(sources, step)
    found = Survey(listing, unreadable)
    for sample in listing.samples:
        found.fields.update(part.field for part in sample.parts)
        found.nbytes.append(sum(part.size for part in sample.parts))
        parts = [part for part in sample.parts if is_image(part.field)]
        found.image_nbytes += [part.size for part in parts]
        found.grids += sum(part.has_grid for part in parts)
    return found


def _listing(sources: Sequence[str], step: Step) -> tuple[SampleList, list[str]]:
    """Samples of all readable sources, and problems of the other tars."""
    if has_urls(sources) or has_compressed(sources):
        return list_remote_tars(sources, step)
    tars, groups, unreadable = find_tars(sources), list[SampleList](), list[str]()
    if not tars:
        return list_samples(sources), []
    for number, tar in enumerate(tars, 1):
        try:
            groups.append(tars_listed([tar]))
        except Exception as error:  # noqa: BLE001 - a broken tar is reported, and the others are surveyed
            unreadable.append(problem(tar, error))
        step("shards", number, len(tars))
    samples = [sample for group in groups for sample in group.samples]
    named = [group.classes for group in groups if group.classes]
    shards = [size for group in groups for size in group.shards]
    return SampleList(samples, named[0] if named else None, shards=shards).with_unique_keys(), unreadable


def tar_summary(sizes: Sequence[int], sample_nbytes: Sequence[int]) -> ShardSummary:
    """Sizes and bytes of tars, from those of their samples in order."""
    bounds = [0, *accumulate(sizes)]
    return ShardSummary("tar", sizes, [sum(sample_nbytes[start:stop]) for start, stop in pairwise(bounds)])


def _examine(sample: Sample, found: Survey) -> None:
    try:
        label = label_of(sample, found.listing.classes)
    except Exception as error:  # noqa: BLE001 - see _listing
        found.broken.append(problem(sample.key, error))
    else:
        found.classes.update([] if label is None else [label])
    for part in sample.parts:
        if is_image(part.field):
            try:
                found.headers.add(_header(part))
            except Exception as error:  # noqa: BLE001 - see _listing
                found.headers.broken.append(problem(part.name, error))


def _header(part: MemberSource) -> Header:
    if part.member is None:
        return images.probe(part.path)
    for nbytes in _HEADER_NBYTES:
        try:
            return images.probe(part._replace(size=min(part.size, nbytes)).read())
        except SampleError:
            if part.size <= nbytes:
                raise
    return images.probe(part.read())


def label_of(sample: Sample, classes: Sequence[str] | None) -> str | None:
    """Class of a sample by its folder, `cls` or `label` in `json`.

    A number is replaced by its class name if names are known.
    """
    label = sample.label if sample.label is not None else next(_labels(sample), None)
    number = str(label)
    if classes and number.isdecimal() and len(number) <= _MOST_DIGITS and int(number) < len(classes):
        return classes[int(number)]
    return None if label is None else str(label)


def _labels(sample: Sample) -> Iterator[str]:
    for part in sample.parts:
        if part.field == "cls":
            yield part.read().decode("utf-8", "replace").strip()
    for part in sample.parts:
        if part.field == "json":
            try:
                value = json.loads(part.read())
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict) and "label" in value:
                yield str(value["label"])
