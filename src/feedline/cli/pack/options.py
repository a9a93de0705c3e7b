"""What is wanted of the shards."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from feedline.core.units import nbytes_of
from feedline.errors import ArgumentError

_LEAST_NBYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ShardSize:
    """How large a shard may become: in samples, or in bytes of its tar; one sample is always allowed."""

    samples: int | None = None
    nbytes: int | None = None

    @classmethod
    def parsed(cls, text: str) -> ShardSize:
        """`256MB`, `1GiB` (bytes) or `10000` (samples)."""
        if text.strip().isdecimal() and int(text) >= 1:
            return cls(samples=int(text))
        nbytes = nbytes_of(text) if text.strip().lower().endswith("b") else None
        if nbytes is not None and nbytes >= _LEAST_NBYTES:
            return cls(nbytes=nbytes)
        raise ArgumentError(
            f"--shard-size {text!r} is no size: give bytes (256MB, 1GiB; at least 64KiB) or a number of samples (10000)"
        )

    def exceeded(self, samples: int, nbytes: int) -> bool:
        """Whether a shard of so much is too large."""
        return samples > (self.samples or samples) or nbytes > (self.nbytes or nbytes)


@dataclass(frozen=True, slots=True)
class PackOptions:
    """Everything but the sources that decides on the bytes of the shards.

    `shorter_side` shrinks pictures whose shorter side is longer; `quality` re-encodes all as JPEG; `grid` rewrites
    JPEGs losslessly for decoding in part; `decoded` stores pixels. `fields` names the pictures to change where a sample
    has several. `shuffle` None: folders of classes are shuffled, all else keeps its order.
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
            raise ArgumentError("--decoded stores pixels, so --grid and --quality, which are about JPEG, do not apply")
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise ArgumentError(f"--quality {self.quality} is not between 1 and 100")
        if self.shorter_side is not None and self.shorter_side < 1:
            raise ArgumentError(f"--shorter-side {self.shorter_side} is not a number of pixels")

    @property
    def changes_pixels(self) -> bool:
        """Whether pictures come out as other than they were."""
        return self.decoded or self.quality is not None or self.shorter_side is not None

    def record(self) -> dict[str, Any]:
        """As the manifest holds them."""
        return {**asdict(self), "fields": list(self.fields)}
