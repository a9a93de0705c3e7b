"""Mixing and read costs of shuffle windows over shards."""

from __future__ import annotations

import mmap
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from feedline.datasets.formats import ShardSummary
from feedline.samplers import ShardShuffled

_USUAL = (1, 4, 16, 64)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Mixing and read costs of one window.

    `same_shard_pairs` is the share of pairs in a batch that come from one shard. `window_nbytes` are bytes in memory if
    shards are kept there, else stored bytes. `nbytes_per_sample` is the number of bytes that an epoch reads from the
    store, divided by its samples.
    """

    window: int
    same_shard_pairs: float
    shards_per_batch: float
    window_nbytes: float
    nbytes_per_sample: float


@dataclass(frozen=True, slots=True)
class Ordered:
    """Candidate windows compared; the last one spans all shards.

    `kept_nbytes` and `keeper` are the limit and the place for shards that are read whole. If samples are read one by
    one, `page_nbytes` is the average number of bytes that a disk reads for one.
    """

    wanted: int
    batch_size: int
    windows: tuple[Mixed, ...]
    unit: str
    kept_nbytes: int | None
    keeper: str | None
    page_nbytes: float | None

    def summary(self) -> dict[str, Any]:
        """A JSON-serializable dict."""
        return asdict(self)


def ordered(shards: ShardSummary, window: int, batch_size: int) -> Ordered | None:
    """Compare windows over the shards; None without shards."""
    if not shards.unit or not sum(shards.sizes):
        return None
    number = len(shards.sizes)
    windows = sorted({min(window, number), *(usual for usual in _USUAL if usual < number), number})
    mixed = tuple(_mixed(shards, each, batch_size) for each in windows)
    judged = partial(Ordered, min(window, number), batch_size, mixed, shards.unit)
    if shards.kept is not None:
        return judged(shards.kept.limit_nbytes, shards.kept.keeper, None)
    if shards.note is not None:
        return judged(None, None, None)
    # A disk reads whole pages, and a sample rarely begins or ends at a page boundary.
    return judged(None, None, _mean(shards) + mmap.PAGESIZE)


def _mixed(shards: ShardSummary, window: int, batch_size: int) -> Mixed:
    order = ShardShuffled(shards.sizes, 0, window)
    mixing = order.mixing(batch_size)
    share, kept = window / len(shards.sizes), shards.kept
    if kept is None:
        window_nbytes, read = sum(shards.nbytes) * share, _mean(shards)
    else:
        window_nbytes = sum(kept.nbytes) * share
        kept_shards = kept.limit_nbytes * len(shards.sizes) / max(sum(kept.nbytes), 1)
        read = order.nbytes_per_sample(shards.nbytes, batch_size, kept_shards=kept_shards)
    return Mixed(window, mixing.same_shard_pairs, mixing.shards_per_batch, window_nbytes, read)


def _mean(shards: ShardSummary) -> float:
    return sum(shards.nbytes) / sum(shards.sizes)
