"""Mixing and read costs of shuffle windows over shards."""

from __future__ import annotations

import mmap
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from feedline.datasets.formats import ShardSummary
from feedline.errors import ArgumentError
from feedline.samplers import ShardShuffled

_USUAL_WINDOWS = (1, 4, 16, 64)


@dataclass(frozen=True, slots=True)
class WindowMixing:
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


class RankLayout(NamedTuple):
    """Training processes that share the data: `world` ranks on `nodes` machines."""

    world: int
    nodes: int


@dataclass(frozen=True, slots=True)
class RankShares:
    """Reads of ranks and nodes where partitions of shards belong to ranks.

    Bytes and shards per node are those of the node that reads most in the first epoch. `same_shard_pairs` counts the
    batches of single ranks.
    """

    world: int
    nodes: int
    partitions: int
    global_batch_size: int
    shards_per_node: int
    nbytes_per_node: int
    nbytes: int
    open_shards: int
    same_shard_pairs: float


@dataclass(frozen=True, slots=True)
class WindowComparison:
    """Candidate windows compared; the last one spans all shards.

    `kept_nbytes` and `keeper` are the limit and the place for shards that are read whole. If samples are read one by
    one, `page_nbytes` is the average number of bytes that a disk reads per sample.
    """

    wanted: int
    batch_size: int
    windows: tuple[WindowMixing, ...]
    unit: str
    kept_nbytes: int | None
    keeper: str | None
    page_nbytes: float | None
    ranks: RankShares | None = None

    def summary(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        return asdict(self)


def compare_windows(
    shards: ShardSummary, window: int, batch_size: int, ranks: RankLayout | None = None
) -> WindowComparison | None:
    """Compare windows over the shards; None without shards.

    The windows are `window`, a few usual ones, and all shards. With `ranks`, the shards are also divided among ranks.
    """
    if not shards.unit or not sum(shards.sizes):
        return None
    number = len(shards.sizes)
    windows = sorted({min(window, number), *(usual for usual in _USUAL_WINDOWS if usual < number), number})
    mixed = tuple(_measure_mixing(shards, each, batch_size) for each in windows)
    shares = None if ranks is None else shares_of(shards, min(window, number), batch_size, ranks)
    judged = partial(WindowComparison, min(window, number), batch_size, mixed, shards.unit, ranks=shares)
    if shards.kept is not None:
        return judged(shards.kept.limit_nbytes, shards.kept.keeper, None)
    if shards.note is not None:
        return judged(None, None, None)
    # A disk reads whole pages, and a sample rarely begins or ends at a page boundary.
    return judged(None, None, _mean(shards) + mmap.PAGESIZE)


def shares_of(shards: ShardSummary, window: int, batch_size: int, ranks: RankLayout) -> RankShares:
    """Reads of the nodes, with one partition per rank.

    `batch_size` is that of a rank. Raises `ArgumentError` if the nodes cannot have equal numbers of ranks.
    """
    world, nodes = ranks
    if world % nodes:
        raise ArgumentError(f"--world-size {world}: these ranks cannot be divided equally among --nodes {nodes}")
    order = ShardShuffled(shards.sizes, 0, window, partitions=world, global_batch_size=world * batch_size)
    nbytes = np.asarray(shards.nbytes, np.int64)
    own = [order.shards_of(node, nodes) for node in range(nodes)]
    return RankShares(
        world, nodes, order.partitions, world * batch_size,
        shards_per_node=max(map(len, own)),
        nbytes_per_node=max(int(nbytes[numbers].sum()) for numbers in own),
        nbytes=int(nbytes.sum()),
        open_shards=min(window, len(nbytes)),
        same_shard_pairs=order.mixing(batch_size).same_shard_pairs,
    )  # fmt: skip


def _measure_mixing(shards: ShardSummary, window: int, batch_size: int) -> WindowMixing:
    order = ShardShuffled(shards.sizes, 0, window)
    mixing = order.mixing(batch_size)
    share, kept = window / len(shards.sizes), shards.kept
    if kept is None:
        window_nbytes, read = sum(shards.nbytes) * share, _mean(shards)
    else:
        window_nbytes = sum(kept.nbytes) * share
        kept_shards = kept.limit_nbytes * len(shards.sizes) / max(sum(kept.nbytes), 1)
        read = order.nbytes_per_sample(shards.nbytes, batch_size, kept_shards=kept_shards)
    return WindowMixing(window, mixing.same_shard_pairs, mixing.shards_per_batch, window_nbytes, read)


def _mean(shards: ShardSummary) -> float:
    return sum(shards.nbytes) / sum(shards.sizes)
