"""What a window of shards costs and gives: how mixed batches are, and how much is read."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from feedline.errors import ArgumentError
from feedline.samplers import ShardShuffled

_USUAL = (1, 4, 16, 64)


@dataclass(frozen=True, slots=True)
class Mixed:
    """A window: how often neighbours come from one shard, shards in a batch, bytes of the shards in the window."""

    window: int
    same_shard: float
    shards_per_batch: float
    window_nbytes: float


@dataclass(frozen=True, slots=True)
class Ordered:
    """Windows side by side, the last one holding all shards; and what one sample makes the disk read."""

    wanted: int
    batch_size: int
    windows: tuple[Mixed, ...]
    sample_nbytes: float
    read_nbytes: float

    def summary(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def ordered(shards: Sequence[int], nbytes: Sequence[int], window: int, batch_size: int) -> Ordered:
    """Judge windows over shards of so many samples; `nbytes` are the sizes of samples. ArgumentError without shards."""
    if not shards:
        raise ArgumentError("--order is about shards: give .tar files, or a folder of them")
    windows = sorted({window, *(usual for usual in _USUAL if usual < len(shards)), len(shards)})
    mixed = tuple(_mixed(shards, sum(nbytes), each, batch_size) for each in windows)
    return Ordered(window, batch_size, mixed, float(np.mean(nbytes)), float(np.mean(_read(nbytes))))


def _mixed(shards: Sequence[int], nbytes: int, window: int, batch_size: int) -> Mixed:
    mixing = ShardShuffled(shards, 0, window).mixing(batch_size)
    share = min(window, len(shards)) / len(shards)
    return Mixed(window, mixing.same_shard, mixing.shards_per_batch, nbytes * share)


def _read(nbytes: Sequence[int]) -> Any:
    """Bytes that are read for a sample at random: whole pages, and its ends share theirs with its neighbours."""
    return np.asarray(nbytes, np.float64) + mmap.PAGESIZE
