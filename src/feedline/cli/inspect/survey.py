"""What is in folders or shards: counted over all samples, and looked at in the headers of some."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from feedline import images
from feedline.cli.inspect import far
from feedline.cli.inspect.problems import problem
from feedline.cli.tars import is_far
from feedline.errors import SampleError
from feedline.images import Header
from feedline.packing import listed, tars_of
from feedline.packing.samples import Listing, Part, Sample
from feedline.packing.tars import listed as tars_listed
from feedline.shards import is_image

Step = Callable[[str, int, int], None]

_HEADER_NBYTES = (far.BEGINNING_NBYTES, 1 << 16)
"""What is read of a picture in a tar at first; headers with large profiles need all of it."""

_MOST_DIGITS = 18
"""No class has a longer number."""


@dataclass(slots=True)
class Pictures:
    """What headers say of those pictures that were looked at; sizes are (width, height) as stored."""

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
    """All samples of the sources; `looked_at` of them, spread evenly, were looked into: their headers and classes."""

    listing: Listing
    unreadable: list[str] = field(default_factory=list)
    fields: Counter[str] = field(default_factory=Counter)
    nbytes: list[int] = field(default_factory=list)
    picture_nbytes: list[int] = field(default_factory=list)
    grids: int = 0
    pictures: Pictures = field(default_factory=Pictures)
    classes: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    """Samples whose class cannot be told."""
    looked_at: int = 0

    @property
    def healthy(self) -> bool:
        """Whether everything that was looked at can be read."""
        return not (self.unreadable or self.broken or self.pictures.broken)


def survey(sources: Sequence[str], limit: int, step: Step) -> Survey:
    """Survey the sources; `limit` is how many samples to look into, 0 for all."""
    found = _counted(sources, step)
    samples = found.listing.samples
    chosen = spread(len(samples), limit or len(samples))
    for number, sample in enumerate(far.fetched([samples[at] for at in chosen]), 1):
        _look(sample, found)
        if number % 64 == 0 or number == len(chosen):
            step("headers", number, len(chosen))
    found.looked_at = len(chosen)
    return found


def spread(length: int, number: int) -> list[int]:
    """`number` places of `range(length)`, as evenly as can be; all of them if there are not more."""
    return list(range(length)) if length <= number else [i * length // number for i in range(number)]


def _counted(sources: Sequence[str], step: Step) -> Survey:
    listing, unreadable = _listing(sources, step)
    found = Survey(listing, unreadable)
    for sample in listing.samples:
        found.fields.update(part.field for part in sample.parts)
        found.nbytes.append(sum(part.size for part in sample.parts))
        pictures = [part for part in sample.parts if is_image(part.field)]
        found.picture_nbytes += [part.size for part in pictures]
        found.grids += sum(part.has_grid for part in pictures)
    return found


def _listing(sources: Sequence[str], step: Step) -> tuple[Listing, list[str]]:
    """The samples of all that can be read, and what is wrong with the tars that cannot."""
    if is_far(sources):
        return far.listed(sources, step)
    tars, groups, unreadable = tars_of(sources), list[Listing](), list[str]()
    if not tars:
        return listed(sources), []
    for number, tar in enumerate(tars, 1):
        try:
            groups.append(tars_listed([tar]))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one is told, and the others are surveyed
            unreadable.append(problem(tar, error))
        step("shards", number, len(tars))
    samples = [sample for group in groups for sample in group.samples]
    named = [group.classes for group in groups if group.classes]
    shards = [size for group in groups for size in group.shards]
    return Listing(samples, named[0] if named else None, shards=shards).with_unique_keys(), unreadable


def _look(sample: Sample, found: Survey) -> None:
    try:
        label = label_of(sample, found.listing.classes)
    except Exception as error:  # noqa: BLE001 - see _listing
        found.broken.append(problem(sample.key, error))
    else:
        found.classes.update([] if label is None else [label])
    for part in sample.parts:
        if is_image(part.field):
            try:
                found.pictures.add(_header(part))
            except Exception as error:  # noqa: BLE001 - see _listing
                found.pictures.broken.append(problem(part.name, error))


def _header(part: Part) -> Header:
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
    """The class of a sample by its folder, its `cls` or a `label` in its `json`; by name where names are known."""
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
                told = json.loads(part.read())
            except (ValueError, RecursionError):
                continue
            if isinstance(told, dict) and "label" in told:
                yield str(told["label"])
