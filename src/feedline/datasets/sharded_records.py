"""Records that lie in files or objects, each in one piece: those that are wanted together are read together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.records import Field, FieldRecords, Records
from feedline.rows import as_indices, within
from feedline.stores import CachedStore, Want
from feedline.stores.blobs import Extent


class Content(Protocol):
    """What shards hold, by number: `stores.blobs.Blobs` is one."""

    @property
    def is_local(self) -> bool: ...
    def read(self, extents: Sequence[Extent]) -> list[memoryview]: ...
    def wants(self, extents: Sequence[Extent]) -> list[tuple[CachedStore, Want]]: ...


class Record(NamedTuple):
    """Record `row` of a shard, as it was read."""

    shard: int
    row: int
    data: memoryview


class ShardedRecords(Records):
    """Records of shards, of which a subclass tells where in its shard each lies, and what sample it is.

    However many records are asked for at once: what they need of objects is read concurrently.
    """

    def __init__(self, sizes: Iterable[int], content: Content) -> None:
        self.shard_sizes: NDArray[np.int64] = np.array([*sizes], np.int64)
        """The samples of each shard, for `samplers.ShardShuffled`."""
        self._firsts: list[int] = [0, *accumulate(self.shard_sizes.tolist())]
        self._content = content

    def _span(self, shard: int, row: int) -> tuple[int, int]:
        """Where in its shard a record begins and ends."""
        raise NotImplementedError

    def _decoded(self, record: Record, row: int | None) -> Any:
        """The sample that a record is; `row` as in `_sample`."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices, read all at once."""
        places = within(as_indices(indices), len(self), type(self).__name__)
        return [self._decoded(record, row) for row, record in enumerate(self._read(places.tolist()))]

    def wants(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, Want]]:
        """What reading these samples will want from which cache."""
        places = within(indices, len(self), type(self).__name__)
        if self._content.is_local:
            return []
        found = [self._at(at) for at in places.tolist()]
        return self._content.wants([Extent(shard, *self._span(shard, row)) for shard, row in found])

    def _at(self, at: int) -> tuple[int, int]:
        """The shard of a sample, and its place therein."""
        shard = bisect_right(self._firsts, at) - 1
        return shard, at - self._firsts[shard]

    def _read(self, places: Iterable[int]) -> list[Record]:
        found = [self._at(at) for at in places]
        views = self._content.read([Extent(shard, *self._span(shard, row)) for shard, row in found])
        return [Record(shard, row, view) for (shard, row), view in zip(found, views, strict=True)]

    def _sample(self, at: int, row: int | None) -> Any:
        shard, place = self._at(at)
        (view,) = self._content.read([Extent(shard, *self._span(shard, place))])
        return self._decoded(Record(shard, place, view), row)


class ShardedFields(ShardedRecords, FieldRecords):
    """Records of shards that consist of fields: pictures among them can be made as whole batches."""

    def _fields_in(self, record: Record) -> Mapping[str, Field]:
        """The fields of a record that was read."""
        raise NotImplementedError

    def _decoded(self, record: Record, row: int | None) -> Any:
        return self._made(self._fields_in(record), row)

    def _all_fields(self, places: NDArray[np.int64]) -> Sequence[Mapping[str, Field]]:
        return [self._fields_in(record) for record in self._read(places.tolist())]
