"""Tars of a set, opened when they are first read from, and a bounded number of them at a time."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence

from feedline.shards.tar import ShardError
from feedline.shards.tars import Shard, Tars


class OpenShards:
    """`shards[number]`: the tar of that number, opened on first use; beyond `most`, the one not used for longest goes.

    Pickles without them. Each process opens the tars anew, and refuses one that is not the tar that was indexed:
    `fingerprints` are those of the indexes by number.
    """

    def __init__(self, tars: Tars, fingerprints: Sequence[str], most: int) -> None:
        self._tars, self._fingerprints, self._most = tars, fingerprints, most
        self._begin()

    def _begin(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._open: OrderedDict[int, Shard] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tars.names)

    @property
    def open_count(self) -> int:
        """How many are held open now."""
        return len(self._open)

    def __getitem__(self, number: int) -> Shard:
        if self._process != os.getpid():  # a fork may have happened while another thread held the lock
            self._begin()
        with self._lock:
            shard = self._open.get(number)
            if shard is not None:
                self._open.move_to_end(number)
        if shard is not None:
            shard.refuse_changed()
            return shard
        return self._keep(number, self._opened(number))

    def _opened(self, number: int) -> Shard:
        index = self._tars.index(number)
        if index.head.fingerprint != self._fingerprints[number]:
            raise ShardError(
                f"{index.tar} is not the tar that was indexed when this dataset was made. Put that one back, or make "
                f"the dataset anew"
            )
        return self._tars.shard(number, index)

    def _keep(self, number: int, shard: Shard) -> Shard:
        with self._lock:
            self._open[number] = shard
            while len(self._open) > self._most:
                self._open.popitem(last=False)  # its views keep the mapping alive for as long as they are in use
        return shard

    def __getstate__(self) -> tuple[Tars, Sequence[str], int]:
        return self._tars, self._fingerprints, self._most

    def __setstate__(self, state: tuple[Tars, Sequence[str], int]) -> None:
        self._tars, self._fingerprints, self._most = state
        self._begin()
