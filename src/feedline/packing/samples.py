"""What there is to pack: samples, where their parts lie, and what was passed over."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from feedline.errors import SampleError


class Readable(Protocol):
    """An object of a store."""

    def read(self, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """One view for each `(start, stop)`."""
        ...


class Part(NamedTuple):
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
    parts: tuple[Part, ...]


@dataclass(slots=True)
class Listing:
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

    def with_unique_keys(self) -> Listing:
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
