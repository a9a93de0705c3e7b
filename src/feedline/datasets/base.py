"""Base classes of datasets that read single records.

`Records` checks indices, `GroupedRecords` reads several samples at once. `DecodedRecords` decodes records of one
value, `FieldRecords` records of several fields. `ShardedRecords` reads the records of a batch from files or objects in
one request, and `RecordFiles` finds them by a scan of each file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import collate
from feedline.core.dataset import READS_SAMPLES, Batch, BatchRead, Keys, Traits, TransformFunction, check_reads_batches
from feedline.core.dataset_fingerprint import digest_of
from feedline.core.paths import Pathlike
from feedline.core.rng import torch_keys
from feedline.core.sample_transform import SampleTransform
from feedline.core.shard_offsets import ShardOffsets
from feedline.core.stage_parts import DECODING
from feedline.core.tensors import Allocator, as_indices, normalize_index, normalize_indices
from feedline.datasets.decoding import Decoder, Where
from feedline.datasets.indexes import BuiltIndex, Columns, IndexRecipe, indexes_of
from feedline.stores import CachedStore, ObjectRange
from feedline.stores.files import Extent, FileSet, LazyList


class Records(torch.utils.data.Dataset[Any]):
    """A map-style dataset of records; subclasses define length and `_sample`."""

    @property
    def traits(self) -> Traits:
        return READS_SAMPLES

    def __len__(self) -> int:
        raise NotImplementedError

    def _sample(self, at: int, row: int | None) -> Any:
        """Sample `at`, in memory of its own.

        `at` is a checked index. `row` is the sample's row in a batch read at once, or None.
        """
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        """Sample `index`; negative indices count from the end."""
        return self._sample(normalize_index(index, len(self), type(self).__name__), None)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices."""
        places = normalize_indices(as_indices(indices), len(self), type(self).__name__)
        return [self._sample(at, row) for row, at in enumerate(places.tolist())]


class GroupedRecords(Records):
    """Records that are read several at once; subclasses define `_read_samples`.

    If a user's subclass overrides only `__getitem__`, all samples are read by it.
    """

    def _read_samples(self, places: NDArray[np.int64], rows: Sequence[int | None]) -> list[Any]:
        """The samples of checked indices.

        `rows` are their rows in a batch, as in `_sample`.
        """
        raise NotImplementedError

    @property
    def _is_overridden(self) -> bool:
        return type(self).__getitem__ is not GroupedRecords.__getitem__

    def __getitem__(self, index: int) -> Any:
        """Sample `index`; negative indices count from the end."""
        return self._read_samples(np.array([normalize_index(index, len(self), type(self).__name__)]), [None])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices, read together."""
        if self._is_overridden:
            return [self[index] for index in indices]
        places = normalize_indices(as_indices(indices), len(self), type(self).__name__)
        return self._read_samples(places, range(len(places)))


class DecodedRecords(Records):
    """Records of a single value, decoded by `_decoder`; images support whole batches."""

    _decoder: Decoder

    @property
    def traits(self) -> Traits:
        # A user's subclass may draw random numbers in its own methods.
        is_ours = self._decoder.is_ours and type(self).__module__.startswith(f"{__package__}.")
        return Traits(
            thread_safe=True,
            is_random=not is_ours,
            reads_batches=self._decoder.batchable,
            uses_keys=self._decoder.uses_keys,
        )

    def _batch(self, places: NDArray[np.int64], allocate: Allocator, keys: Keys | None) -> torch.Tensor:
        """Decode the records of checked indices as one batch."""
        raise NotImplementedError

    def read_batch(self, request: BatchRead) -> torch.Tensor:
        """Read images as one batch.

        TypeError if samples must be read one by one.
        """
        check_reads_batches(self)
        places = normalize_indices(request.indices, len(self), type(self).__name__)
        return self._batch(places, request.allocate, request.keys)


class Field(NamedTuple):
    """One field of a record: decoder, encoded bytes and description for errors."""

    decoder: Decoder
    source: Any
    where: Where


class FieldRecords(Records):
    """Records of fields, each decoded separately.

    Samples are dicts, unless a subclass overrides `_assemble`. A subclass defines the decoders of its fields
    (`_decoders`) and the fields of a record in order (`_fields`).
    """

    def __init__(self, transform: TransformFunction | None) -> None:
        self._step = SampleTransform(transform)

    def _decoders(self) -> Collection[Decoder]:
        raise NotImplementedError

    def _fields(self, at: int) -> Mapping[str, Field]:
        raise NotImplementedError

    def _sample(self, at: int, row: int | None) -> Any:
        return self._decode_fields(self._fields(at), row)

    def _decode_fields(self, fields: Mapping[str, Field], row: int | None) -> Any:
        """Decode the fields of one record into a sample."""
        decoded = {name: decoder(source, row, where) for name, (decoder, source, where) in fields.items()}
        return self._step(self._assemble(decoded), row)

    def _all_fields(self, places: NDArray[np.int64]) -> Sequence[Mapping[str, Field]]:
        """The fields of checked indices."""
        return [self._fields(at) for at in places.tolist()]

    def _assemble(self, values: dict[str, Any]) -> Any:
        """Build a sample from decoded values, before the transform."""
        return values

    def _assemble_batch(self, columns: dict[str, Any]) -> Any:
        """Build a batch from columns, as default collate would from such samples."""
        return self._assemble(columns)

    @property
    def traits(self) -> Traits:
        decoders = self._decoders()
        # A transform of other values than images has to see each sample; without images, a batch is not faster than
        # samples.
        sees_each = self._step.transform or any(each.step.transform and not each.batchable for each in decoders)
        return Traits(
            thread_safe=True,
            reads_batches=not sees_each and any(each.batchable for each in decoders),
            uses_keys=any(each.uses_keys for each in decoders),
        )

    def read_batch(self, request: BatchRead) -> Batch:
        """The collated batch, whose images are decoded in place.

        TypeError if a transform needs single samples.
        """
        check_reads_batches(self)
        records = self._all_fields(normalize_indices(request.indices, len(self), type(self).__name__))
        names = list(records[0])
        drawing = [name for name in names if records[0][name].decoder.uses_keys]
        keys = _keys_of(request.keys, len(records), drawing)
        return self._assemble_batch(
            {name: _column([record[name] for record in records], keys.get(name), request.allocate) for name in names}
        )


def _keys_of(keys: Keys | None, count: int, names: Sequence[str]) -> dict[str, Keys]:
    """Random keys by field.

    Without keys of the samples, they are drawn in the order in which single samples would draw them.
    """
    if keys is not None:
        return dict.fromkeys(names, keys)
    drawn = torch_keys(count * len(names)).reshape(count, -1) if names else np.empty((count, 0), np.uint64)
    return {name: np.ascontiguousarray(drawn[:, number]) for number, name in enumerate(names)}


def _column(fields: Sequence[Field], keys: Keys | None, allocate: Allocator) -> Any:
    decoder = fields[0].decoder
    if decoder.batchable:
        return decoder.batch([field.source for field in fields], keys, allocate, lambda row: fields[row].where())
    return collate.default([field.decoder(field.source, None, field.where) for field in fields], allocate=allocate)


class Content(Protocol):
    """Byte access to numbered shards, as by `stores.files.FileSet`."""

    @property
    def is_local(self) -> bool: ...
    def read(self, extents: Sequence[Extent]) -> list[memoryview]: ...
    def ranges(self, extents: Sequence[Extent]) -> list[tuple[CachedStore, ObjectRange]]: ...


class Record(NamedTuple):
    """The bytes of record `row` of a shard."""

    shard: int
    row: int
    data: memoryview


class ShardedRecords(Records):
    """Records in shards; subclasses define `_span` and `_decode_record`.

    The byte ranges of all requested records are read concurrently from object stores.
    """

    def __init__(self, sizes: Iterable[int], content: Content) -> None:
        self._shard_offsets = ShardOffsets(sizes)
        self._content = content

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """Samples per shard, int64, for `samplers.ShardShuffled`."""
        return self._shard_offsets.sizes

    def _span(self, shard: int, row: int) -> tuple[int, int]:
        """Byte range of a record within its shard."""
        raise NotImplementedError

    def _decode_record(self, record: Record, row: int | None) -> Any:
        """Decode a record into a sample; `row` as in `_sample`."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._shard_offsets)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices, read concurrently."""
        places = normalize_indices(as_indices(indices), len(self), type(self).__name__)
        records = self._read(places.tolist())
        with DECODING:
            return [self._decode_record(record, row) for row, record in enumerate(records)]

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Cache and byte range of every read for these samples."""
        places = normalize_indices(indices, len(self), type(self).__name__)
        if self._content.is_local:
            return []
        found = [self._at(at) for at in places.tolist()]
        return self._content.ranges([Extent(shard, *self._span(shard, row)) for shard, row in found])

    def _at(self, at: int) -> tuple[int, int]:
        """Shard of a sample, and the sample's row in it."""
        return self._shard_offsets.one(at)

    def _read(self, places: Iterable[int]) -> list[Record]:
        found = [self._at(at) for at in places]
        views = self._content.read([Extent(shard, *self._span(shard, row)) for shard, row in found])
        return [Record(shard, row, view) for (shard, row), view in zip(found, views, strict=True)]

    def _sample(self, at: int, row: int | None) -> Any:
        shard, place = self._at(at)
        (view,) = self._content.read([Extent(shard, *self._span(shard, place))])
        with DECODING:
            return self._decode_record(Record(shard, place, view), row)


class RecordFiles(ShardedRecords):
    """Records of files that are scanned once, by a recipe.

    The positions of the records are kept in an index of each file.
    """

    def __init__(self, files: FileSet, recipe: IndexRecipe, index_dir: Pathlike | None) -> None:
        self.paths = files.names
        """Paths or addresses of the files, as they were given."""
        self._files = files
        self._indexes = tuple(indexes_of(files, recipe, index_dir))
        super().__init__((recipe.count(index.shapes) for index in self._indexes), files)
        self._bounds = LazyList(partial(_open_arrays, self._indexes), len(self._indexes))
        self._record_span = recipe.span

    @property
    def listing_fingerprint(self) -> str:
        """Digest of file names and record counts, checked by saved loader states."""
        return digest_of(self.paths, self.shard_sizes)

    def _span(self, shard: int, row: int) -> tuple[int, int]:
        return self._record_span(self._bounds[shard], row)


def _open_arrays(indexes: Sequence[BuiltIndex], number: int) -> Columns:
    return indexes[number].open_arrays()


class ShardedFields(ShardedRecords, FieldRecords):
    """Sharded records of several fields; images support whole batches."""

    def _fields_in(self, record: Record) -> Mapping[str, Field]:
        """The fields of a record."""
        raise NotImplementedError

    def _decode_record(self, record: Record, row: int | None) -> Any:
        return self._decode_fields(self._fields_in(record), row)

    def _all_fields(self, places: NDArray[np.int64]) -> Sequence[Mapping[str, Field]]:
        return [self._fields_in(record) for record in self._read(places.tolist())]
