"""What datasets of single records share: checked indices, many at once.

Records that lie in files or objects, each in one piece: those that are wanted together are read together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import collate
from feedline.core.dataset import READS_SAMPLES, Batch, BatchRead, Keys, Traits, check_reads_batches
from feedline.core.rng import torch_keys
from feedline.core.tensors import Allocator, as_indices, one_within, within
from feedline.datasets.arrays.npy import Transform
from feedline.datasets.decoding import Decoding, SampleTransform, Where
from feedline.stores import CachedStore, ObjectRange
from feedline.stores.files import Extent


class Records(torch.utils.data.Dataset[Any]):
    """A map-style dataset of which a subclass tells its length and how to read the record of a checked index."""

    @property
    def traits(self) -> Traits:
        return READS_SAMPLES

    def __len__(self) -> int:
        raise NotImplementedError

    def _sample(self, at: int, row: int | None) -> Any:
        """Sample `at`, in memory of its own; `row` is its place in a batch that is fetched at once, None alone."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        """Sample `index`; negative indices count from the end."""
        return self._sample(one_within(index, len(self), type(self).__name__), None)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices."""
        places = within(as_indices(indices), len(self), type(self).__name__)
        return [self._sample(at, row) for row, at in enumerate(places.tolist())]


class DecodedRecords(Records):
    """Records that are one thing each, decoded by `_decoding`: pictures can be made as whole batches."""

    _decoding: Decoding

    @property
    def traits(self) -> Traits:
        # A user's subclass may draw in its own methods.
        is_ours = self._decoding.is_ours and type(self).__module__.startswith(f"{__package__}.")
        return Traits(
            thread_safe=True,
            is_random=not is_ours,
            reads_batches=self._decoding.batchable,
            uses_keys=self._decoding.draws,
        )

    def _batch(self, places: NDArray[np.int64], empty: Allocator, keys: Keys | None) -> torch.Tensor:
        """`_decoding.batch` of the records of checked indices."""
        raise NotImplementedError

    def read_batch(self, request: BatchRead) -> torch.Tensor:
        """Images as one batch; TypeError where samples have to be made one by one."""
        check_reads_batches(self)
        places = within(request.indices, len(self), type(self).__name__)
        return self._batch(places, request.allocate, request.keys)


class Decodes(Protocol):
    """Makes values of fields as `Decoding` does; `batchable` only if it is one."""

    @property
    def step(self) -> SampleTransform: ...
    @property
    def batchable(self) -> bool: ...
    @property
    def draws(self) -> bool: ...
    def __call__(self, source: Any, row: int | None, where: Where) -> Any: ...


class Field(NamedTuple):
    """One field of a record: its bytes, how they are decoded, and what an error calls it."""

    decoding: Decodes
    source: Any
    where: Where


class FieldRecords(Records):
    """Records of fields that are decoded each by itself: samples are dicts, unless `_joined` makes something else.

    A subclass says which decodings every record has, and gives the fields of one record in their order.
    """

    def __init__(self, transform: Transform | None) -> None:
        self._step = SampleTransform(transform)

    def _decodings(self) -> Collection[Decodes]:
        raise NotImplementedError

    def _fields(self, at: int) -> Mapping[str, Field]:
        raise NotImplementedError

    def _sample(self, at: int, row: int | None) -> Any:
        return self._made(self._fields(at), row)

    def _made(self, fields: Mapping[str, Field], row: int | None) -> Any:
        """The sample that these fields are."""
        decoded = {name: decoding(source, row, where) for name, (decoding, source, where) in fields.items()}
        return self._step(self._joined(decoded), row)

    def _all_fields(self, places: NDArray[np.int64]) -> Sequence[Mapping[str, Field]]:
        """The fields of checked indices."""
        return [self._fields(at) for at in places.tolist()]

    def _joined(self, values: dict[str, Any]) -> Any:
        """The sample of which these are the values, before its transform."""
        return values

    def _collated(self, columns: dict[str, Any]) -> Any:
        """The batch of which these are the columns: what default collate makes of such samples."""
        return self._joined(columns)

    @property
    def traits(self) -> Traits:
        decodings = self._decodings()
        # A transform of anything but images has to see each sample; without images, a batch is no faster than samples.
        sees_each = self._step.transform or any(each.step.transform and not each.batchable for each in decodings)
        return Traits(
            thread_safe=True,
            reads_batches=not sees_each and any(each.batchable for each in decodings),
            uses_keys=any(each.draws for each in decodings),
        )

    def read_batch(self, request: BatchRead) -> Batch:
        """The collated batch, images decoded in place; TypeError where a transform has to see each sample."""
        check_reads_batches(self)
        records = self._all_fields(within(request.indices, len(self), type(self).__name__))
        names = list(records[0])
        drawing = [name for name in names if records[0][name].decoding.draws]
        keys = _keys_of(request.keys, len(records), drawing)
        return self._collated(
            {name: _column([record[name] for record in records], keys.get(name), request.allocate) for name in names}
        )


def _keys_of(keys: Keys | None, count: int, names: Sequence[str]) -> dict[str, Keys]:
    """The keys of each field: those of the samples, or what one sample after the other would draw without."""
    if keys is not None:
        return dict.fromkeys(names, keys)
    drawn = torch_keys(count * len(names)).reshape(count, -1) if names else np.empty((count, 0), np.uint64)
    return {name: np.ascontiguousarray(drawn[:, number]) for number, name in enumerate(names)}


def _column(fields: Sequence[Field], keys: Keys | None, empty: Allocator) -> Any:
    decoding = fields[0].decoding
    if isinstance(decoding, Decoding) and decoding.batchable:
        return decoding.batch([field.source for field in fields], keys, empty, lambda row: fields[row].where())
    return collate.default([field.decoding(field.source, None, field.where) for field in fields], empty=empty)


class Content(Protocol):
    """What shards hold, by number: `stores.blobs.Blobs` is one."""

    @property
    def is_local(self) -> bool: ...
    def read(self, extents: Sequence[Extent]) -> list[memoryview]: ...
    def ranges(self, extents: Sequence[Extent]) -> list[tuple[CachedStore, ObjectRange]]: ...


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

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """What reading these samples will want from which cache."""
        places = within(indices, len(self), type(self).__name__)
        if self._content.is_local:
            return []
        found = [self._at(at) for at in places.tolist()]
        return self._content.ranges([Extent(shard, *self._span(shard, row)) for shard, row in found])

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
