"""What a folder of shards holds, and how far its making has come."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from feedline.cli.pack.writer import partial
from feedline.errors import StateError

MANIFEST = "manifest.json"


_FORMAT = 1


_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """One finished shard: positions `[start, stop)` of the listing went into it, but for those that were skipped."""

    name: str
    samples: int
    nbytes: int
    sha256: str
    start: int
    stop: int
    plain: dict[str, int] = field(default_factory=dict)
    skipped: list[dict[str, str]] = field(default_factory=list)

    def is_intact(self, folder: Path) -> bool:
        """Whether the tar in `folder` is the one that was written; reads all of it."""
        path = folder / self.name
        return path.is_file() and path.stat().st_size == self.nbytes and checksum(path) == self.sha256


@dataclass(frozen=True, slots=True)
class Manifest:
    """`options` and `sources` (a fingerprint of the listing) decide on the bytes of `shards`, which are in order."""

    options: dict[str, Any]
    sources: str
    positions: int
    shards: tuple[FinishedShard, ...] = ()
    finished: bool = False

    @property
    def done(self) -> int:
        """How many positions of the listing are behind us."""
        return self.shards[-1].stop if self.shards else 0

    def with_shard(self, shard: FinishedShard) -> Manifest:
        return replace(self, shards=(*self.shards, shard))

    def cut(self, shards: int) -> Manifest:
        """As it was after so many shards."""
        return replace(self, shards=self.shards[:shards], finished=self.finished and shards == len(self.shards))

    def refuse_others(self, wanted: Manifest, folder: Path) -> None:
        """StateError if the folder was begun with other options or other sources."""
        differing = [
            f"{name} was {self.options.get(name)!r} and is {value!r}"
            for name, value in wanted.options.items()
            if self.options.get(name) != value
        ]
        if differing:
            raise StateError(
                f"{folder} was begun with other options: {'; '.join(differing)}. Give the same options to go on, or "
                f"choose another folder"
            )
        if self.sources != wanted.sources:
            raise StateError(
                f"{folder} was begun from other files: then {self.positions:,} samples, now {wanted.positions:,}, or "
                f"others of them. Choose another folder, or remove this one to begin anew"
            )

    def save(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        told = {"feedline": _FORMAT, **asdict(self)}
        place = folder / MANIFEST
        with partial(place).open("w", encoding="utf-8") as file:
            json.dump(told, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial(place).replace(place)

    @classmethod
    def load(cls, folder: Path) -> Manifest | None:
        """That of a folder, None if it has none; StateError for one that cannot be read."""
        place = folder / MANIFEST
        if not place.is_file():
            return None
        try:
            told = json.loads(place.read_text(encoding="utf-8"))
            if told.pop("feedline") != _FORMAT:
                raise ValueError("it is of another version of feedline")
            return cls(**{**told, "shards": tuple(FinishedShard(**shard) for shard in told["shards"])})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StateError(f"{place} cannot be read ({error}); choose another folder, or remove this one") from error


def checksum(path: Path) -> str:
    """The SHA-256 of a file, in hex, as `sha256sum` prints it."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def intact(manifest: Manifest, folder: Path) -> int:
    """How many shards, from the first on, are as they were written."""
    return next((i for i, shard in enumerate(manifest.shards) if not shard.is_intact(folder)), len(manifest.shards))


def strangers(folder: Path, known: Sequence[str]) -> list[str]:
    """What lies in the folder besides these names and what an interrupted run may leave."""
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.name not in known and not (entry.name.startswith(".") and entry.name.endswith(".part"))
    )
