"""Survey of formats whose samples are listed one by one.

All samples are counted; image headers and classes are read from some of them. Headers of objects are fetched in groups.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from feedline import images
from feedline.core.threads import DaemonPool
from feedline.datasets.formats import Format, ShardSummary, load
from feedline.datasets.sample_lists import Readable, ReportProgress, Sample, SampleList, SamplePart, problem
from feedline.errors import SampleError
from feedline.stores.requests import FetchedRanges

BEGINNING_NBYTES = 16 << 10
"""Bytes of an image that are fetched first."""


_SAMPLES_AT_ONCE = 1024


def with_headers(samples: Sequence[Sample]) -> Iterator[Sample]:
    """Yield the samples, with image headers and classes in memory.

    They are fetched in groups of samples.
    """
    for first in range(0, len(samples), _SAMPLES_AT_ONCE):
        yield from _fetch_group(samples[first : first + _SAMPLES_AT_ONCE])


class _PartlyLoaded:
    """An object with some of its bytes in memory."""

    def __init__(self, file: Readable, fetched: FetchedRanges) -> None:
        self._blob, self._fetched = file, fetched

    def read(self, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """A view for each span; spans that were not fetched are read."""
        found = ((span, self._fetched.find(*span)) for span in spans)
        return [self._blob.read([span])[0] if view is None else view for span, view in found]


def _fetch_group(samples: Sequence[Sample]) -> list[Sample]:
    wanted: dict[Readable, list[tuple[int, int]]] = {}
    for sample in samples:
        for part in sample.parts:
            if part.file is not None and _is_examined(part):
                wanted.setdefault(part.file, []).append(_beginning(part))
    with DaemonPool(thread_name_prefix="feedline-inspect") as pool:
        views = dict(zip(wanted, pool.map(_read, wanted.items()), strict=True))
    loaded = {file: _PartlyLoaded(file, fetched) for file, fetched in views.items()}
    return [
        sample._replace(
            parts=tuple(
                part._replace(file=loaded.get(part.file, part.file)) if part.file else part for part in sample.parts
            )
        )
        for sample in samples
    ]


def _read(wanted: tuple[Readable, list[tuple[int, int]]]) -> FetchedRanges:
    """Bytes of spans of an object; none if a read fails.

    Each part raises the error again when it is read.
    """
    file, spans = wanted
    ordered = sorted(set(spans))
    try:
        return FetchedRanges(ordered, file.read(ordered))
    except Exception:  # noqa: BLE001 - each part raises it again when it is read
        return FetchedRanges()


def _is_examined(part: SamplePart) -> bool:
    return part.kind in ("image", "class", "attributes")


def _beginning(part: SamplePart) -> tuple[int, int]:
    return part.start, part.start + (min(part.size, BEGINNING_NBYTES) if part.kind == "image" else part.size)


_HEADER_NBYTES = (BEGINNING_NBYTES, 1 << 16)
"""Bytes of an image in a tar to read at first, and for a header with a large profile."""


_MOST_DIGITS = 18
"""Most digits of a class number."""


@dataclass(slots=True)
class ImageHeaders:
    """Counts over the headers of examined images; sizes are (width, height)."""

    sizes: list[tuple[int, int]] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    jpegs: int = 0
    progressive: int = 0
    turned: int = 0
    broken: list[str] = field(default_factory=list)

    def add(self, header: images.Header) -> None:
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


def survey(format_: Format, sources: Sequence[str], limit: int, step: ReportProgress) -> Survey:
    """Survey sources of a format that lists its samples.

    At most `limit` samples are examined; 0 is for all.
    """
    found = _count(load(format_.list_samples)(sources, step))
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


def _count(listing: SampleList) -> Survey:
    found = Survey(listing, listing.unreadable)
    for sample in listing.samples:
        found.fields.update(part.field for part in sample.parts)
        found.nbytes.append(sum(part.size for part in sample.parts))
        parts = [part for part in sample.parts if part.kind == "image"]
        found.image_nbytes += [part.size for part in parts]
        found.grids += sum(part.has_grid for part in parts)
    return found


def summarize_listing(unit: str, sizes: Sequence[int], sample_nbytes: Sequence[int]) -> ShardSummary:
    """Summary of shards, from the bytes of all samples in order."""
    bounds = [0, *accumulate(sizes)]
    return ShardSummary(unit, sizes, [sum(sample_nbytes[start:stop]) for start, stop in pairwise(bounds)])


def _examine(sample: Sample, found: Survey) -> None:
    try:
        label = label_of(sample, found.listing.classes)
    except Exception as error:  # noqa: BLE001 - the sample is reported, and the others are surveyed
        found.broken.append(problem(sample.key, error))
    else:
        found.classes.update([] if label is None else [label])
    for part in sample.parts:
        if part.kind == "image":
            try:
                found.headers.add(_header(part))
            except Exception as error:  # noqa: BLE001 - the sample is reported, and the others are surveyed
                found.headers.broken.append(problem(part.name, error))


def _header(part: SamplePart) -> images.Header:
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
    """Class of a sample, from its folder, `cls` field, or JSON `label`.

    A number becomes its class name, if `classes` has one. None without a class.
    """
    label = sample.label if sample.label is not None else next(_labels(sample), None)
    number = str(label)
    if classes and number.isdecimal() and len(number) <= _MOST_DIGITS and int(number) < len(classes):
        return classes[int(number)]
    return None if label is None else str(label)


def _labels(sample: Sample) -> Iterator[str]:
    for part in sample.parts:
        if part.kind == "class":
            yield part.read().decode("utf-8", "replace").strip()
    for part in sample.parts:
        if part.kind == "attributes":
            try:
                value = json.loads(part.read())
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict) and "label" in value:
                yield str(value["label"])
