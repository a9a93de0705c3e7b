"""Options of `feedline pack`."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from feedline.core.units import parse_nbytes
from feedline.errors import ArgumentError

_LEAST_NBYTES = 1 << 16


_SAMPLES = re.compile(r"0*[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True)
class ShardSize:
    """Largest size of a shard, in samples or in bytes.

    A shard with a single sample may be larger.
    """

    samples: int | None = None
    nbytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> ShardSize:
        """Read bytes (`256MB`, `1GiB`) or samples (`10000`).

        Raises `ArgumentError` for other texts, and for less than 64 KiB.
        """
        if _SAMPLES.fullmatch(text.strip()):
            return cls(samples=int(text))
        nbytes = parse_nbytes(text) if text.strip().lower().endswith("b") else None
        if nbytes is not None and nbytes >= _LEAST_NBYTES:
            return cls(nbytes=nbytes)
        raise ArgumentError(
            f"--shard-size {text!r} is not a size: pass bytes (256MB, 1GiB; at least 64KiB) or samples (10000)"
        )

    def is_exceeded(self, samples: int, nbytes: int) -> bool:
        """True if a shard of `samples` and `nbytes` is too large."""
        return samples > (self.samples or samples) or nbytes > (self.nbytes or nbytes)


@dataclass(frozen=True, slots=True)
class PackOptions:
    """Everything but the sources that determines the bytes of the shards.

    `shorter_side` shrinks larger images to this shorter side, in pixels. `quality` re-encodes all images as JPEG.
    `grid` rewrites JPEGs losslessly for partial decoding. `decoded` stores pixels. `fields` names the images to change
    in samples with several. `shuffle=None` shuffles class folders, and keeps the order of all other sources. `skip`
    leaves out samples that cannot be read.
    """

    shard_size: ShardSize = ShardSize(nbytes=256 * 10**6)
    shorter_side: int | None = None
    quality: int | None = None
    grid: bool = False
    decoded: bool = False
    fields: tuple[str, ...] = ()
    shuffle: bool | None = None
    seed: int = 0
    skip: bool = False

    def __post_init__(self) -> None:
        if self.decoded and (self.grid or self.quality is not None):
            raise ArgumentError("--decoded stores pixels, and --grid and --quality apply to JPEG: pass only one kind")
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise ArgumentError(f"--quality {self.quality} is out of range; pass 1 to 100")
        if self.shorter_side is not None and self.shorter_side < 1:
            raise ArgumentError(f"--shorter-side {self.shorter_side} is not a number of pixels; pass 1 or more")

    @property
    def changes_pixels(self) -> bool:
        """True if an option changes the pixels of an image."""
        return self.decoded or self.quality is not None or self.shorter_side is not None

    def record(self) -> dict[str, Any]:
        """The options as a JSON object, for the manifest."""
        return {**asdict(self), "fields": list(self.fields)}
