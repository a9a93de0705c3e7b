"""The manifest of a folder of shards: options, finished shards, and progress."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from feedline.core.paths import replacing
from feedline.errors import StateError

MANIFEST = "manifest.json"


_FORMAT = 1


_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """A finished shard.

    It contains samples `[start, stop)` of the sample list, except the skipped ones. `without_grid` counts images
    without a grid, by reason.
    """

    name: str
    samples: int
    nbytes: int
    sha256: str
    start: int
    stop: int
    without_grid: dict[str, int] = field(default_factory=dict)
    skipped: list[dict[str, str]] = field(default_factory=list)

    def is_intact(self, folder: Path) -> bool:
        """True if the tar in `folder` still has its size and checksum.

        Reads the whole tar.
        """
        path = folder / self.name
        return path.is_file() and path.stat().st_size == self.nbytes and checksum(path) == self.sha256


@dataclass(frozen=True, slots=True)
class Manifest:
    """Progress of a run. `options` and `sources` determine the bytes of `shards`.

    `sources` is the fingerprint of the sample list, `positions` its length. `shards` are in the order of the list.
    """

    options: dict[str, Any]
    sources: str
    positions: int
    shards: tuple[FinishedShard, ...] = ()
    finished: bool = False

    @property
    def done(self) -> int:
        """Number of listed samples in finished shards, including skipped ones."""
        return self.shards[-1].stop if self.shards else 0

    def with_shard(self, shard: FinishedShard) -> Manifest:
        """A copy with one more finished shard."""
        return replace(self, shards=(*self.shards, shard))

    def truncate(self, shards: int) -> Manifest:
        """A copy with the first `shards` shards only."""
        return replace(self, shards=self.shards[:shards], finished=self.finished and shards == len(self.shards))

    def check_same_run(self, other: Manifest, folder: Path) -> None:
        """Raise `StateError` if `other` has other options or other sources."""
        differing = [
            f"{name} was {self.options.get(name)!r} and is {value!r}"
            for name, value in other.options.items()
            if self.options.get(name) != value
        ]
        if differing:
            raise StateError(
                f"{folder} was started with other options: {'; '.join(differing)}. Pass the same options to continue, "
                f"or choose another folder"
            )
        if self.sources != other.sources:
            raise StateError(
                f"{folder} was started from other files: {self.positions:,} samples then, {other.positions:,} now, or "
                f"samples of other names or sizes. Choose another folder, or remove this one to start over"
            )

    def save(self, folder: Path) -> None:
        """Write the manifest atomically and durably."""
        text = json.dumps({"feedline": _FORMAT, **asdict(self)}, indent=1) + "\n"
        with replacing(folder / MANIFEST, durable=True) as file:
            file.write(text.encode())

    @classmethod
    def load(cls, folder: Path) -> Manifest | None:
        """Read the manifest of a folder, or return None without one.

        Raises `StateError` if it is damaged or of another version.
        """
        place = folder / MANIFEST
        if not place.is_file():
            return None
        try:
            record = json.loads(place.read_text(encoding="utf-8"))
            if record.pop("feedline") != _FORMAT:
                raise ValueError("written by another version of feedline")
            return cls(**{**record, "shards": tuple(FinishedShard(**shard) for shard in record["shards"])})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StateError(f"{place} cannot be read ({error}); choose another folder, or remove this one") from error


def checksum(path: Path) -> str:
    """SHA-256 of a file in hex, as `sha256sum` prints it."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
