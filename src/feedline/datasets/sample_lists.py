"""Lists of samples and targets of indexes, for the command line."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from feedline.errors import FeedlineError, SampleError

PartKind = Literal["image", "array", "class", "attributes", "other"]
"""An encoded image, pixels in a `.npy` file, the text of a class, JSON that may have a "label", or anything else."""


ReportProgress = Callable[[str, int, int], None]
"""`report(phase, done, total)`: the progress of one phase."""


class Readable(Protocol):
    """An object in a store."""

    def read(self, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Read byte ranges; one view for each `(start, stop)`."""
        ...


class SamplePart(NamedTuple):
    """A part of a sample: bytes of a file or object.

    `feedline inspect` reads them by their `kind`. `member` is their name in an archive, None for a separate file.
    `file` is None for local files. `has_grid` is True if an index has the lengths of a JPEG's intervals.
    """

    field: str
    path: str
    start: int
    size: int
    member: str | None = None
    has_grid: bool = False
    file: Readable | None = None
    kind: PartKind = "other"

    @property
    def name(self) -> str:
        """Name for messages: the file, and the member of a tar."""
        return self.path if self.member is None else f"{self.path}: member {self.member!r}"

    def read(self) -> bytes:
        """Read the contents; SampleError if the file has become shorter."""
        if self.file is not None:
            return bytes(self.file.read([(self.start, self.start + self.size)])[0])
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
    parts: tuple[SamplePart, ...]


@dataclass(slots=True)
class SampleList:
    """The samples of all sources, in the order of the sources.

    `classes` are the names that labels index, or None; `in_classes` is true for class folders. `shards` are the numbers
    of samples in each shard. `renamed` are the repeated keys. `notes` are further remarks for the user. `unreadable`
    are lines about shards that cannot be read.
    """

    samples: list[Sample]
    classes: list[str] | None = None
    in_classes: bool = False
    shards: list[int] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def fingerprint(self) -> str:
        """SHA-256 of all names and sizes.

        It is equal for a copy of the sources in another place.
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


def problem(name: str, error: Exception) -> str:
    """One line about an error, with the name of its subject."""
    text = str(error) if isinstance(error, FeedlineError) else f"{type(error).__name__}: {error}"
    return text if name in text else f"{name}: {text}"


class IndexTarget(Protocol):
    """A shard whose index `feedline index` builds or checks."""

    @property
    def name(self) -> str:
        """Path or URL of the shard."""
        ...

    @property
    def place(self) -> str:
        """Path of the index."""
        ...

    def known(self, *, checksum: bool) -> int | None:
        """The number of samples by a valid index; None without one.

        With `checksum`, the index must have one.
        """
        ...

    def write(self, *, checksum: bool) -> int:
        """Build the index; returns the number of samples."""
        ...

    def check(self) -> tuple[int, str]:
        """Compare shard and index.

        Returns the number of samples, and the path of the index. SampleError if they differ, or without an index.
        """
        ...


FindTargets = Callable[[Sequence[str], Path | None, bool], Sequence[IndexTarget]]
"""A function of paths, the folder for indexes, and permission to index the complete samples of truncated shards."""
