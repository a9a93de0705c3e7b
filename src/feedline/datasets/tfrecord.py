"""`TFRecord`: the records of TFRecord files, in any order, without TensorFlow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.arrays import Transform
from feedline.datasets.decoding import Decode, Decoding, split_transform
from feedline.datasets.files import Pathlike
from feedline.datasets.lazily import Lazily
from feedline.datasets.paths import Paths, find
from feedline.datasets.records import Decodes, Field, FieldRecords
from feedline.datasets.sharded_records import Record, ShardedFields
from feedline.datasets.sidecars import SideCar
from feedline.datasets.tfrecord_features import ChosenFeatures, EveryFeature, Feature
from feedline.datasets.tfrecord_index import HEAD_NBYTES, TAIL_NBYTES, indexed
from feedline.errors import ArgumentError
from feedline.listings import digest_of
from feedline.stores import Cache

_WHOLE = ""
"""The name of the one field of records that are no examples, or are taken as they are."""


class TFRecord(ShardedFields):
    """The records of TFRecord files and objects: `tf.train.Example` messages as dicts.

    `features` says what to take and as what, by name: a dtype for one number; `(dtype, shape)` for a tensor, of which
    one side may be -1; "bytes", "text", "npy", "image" or a function of the bytes for what one `bytes` value holds.
    None takes every feature: numbers as 1-D tensors, `bytes` as lists. `transform` is a function of the sample, or
    functions by feature. With `decode`, records are not examples: it is "bytes" or another of these words.

    A side-car beside each file (in the folder `index` where given) says where records lie; `check` compares the
    checksums of all of them when it is made, and makes anew one that was made without. Objects are kept in the folder
    `cache`, if one is given; `options` are those of `open_store`.
    """

    def __init__(
        self,
        paths: Paths,
        features: Mapping[str, Feature] | None = None,
        *,
        decode: Decode | None = None,
        transform: Transform | Mapping[str, Transform] | None = None,
        check: bool = True,
        index: Pathlike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        by_feature, whole = split_transform(transform, features)
        if decode is not None and features is not None:
            raise ArgumentError("features= describes examples, and with decode= the records are none")
        self._chosen = None if features is None else ChosenFeatures(features, by_feature)
        # A picture and its transform are one step.
        self._decoding: Decodes = EveryFeature() if decode is None else Decoding(decode, whole)
        blobs = find(paths, "*.tfrecord*", cache=cache, options=options)
        self.paths = blobs.names
        indexes = indexed(blobs, check, index)
        super().__init__((each.shapes["starts"][0] - 1 for each in indexes), blobs)
        FieldRecords.__init__(self, whole if decode is None else None)
        self._starts = Lazily(partial(_starts, tuple(indexes)), len(indexes))

    @property
    def listing_digest(self) -> str:
        """Of the names of the files in their order, and the records of each: what a loader's state must find again."""
        return digest_of(self.paths, self.shard_sizes)

    def _span(self, shard: int, row: int) -> tuple[int, int]:
        start, stop = self._starts[shard][row : row + 2].tolist()
        return start + HEAD_NBYTES, stop - TAIL_NBYTES

    def _decodings(self) -> Collection[Decodes]:
        return [self._decoding] if self._chosen is None else self._chosen.decodings

    def _fields_in(self, record: Record) -> dict[str, Field]:
        where = partial(self._where, record.shard, record.row)
        if self._chosen is None:
            return {_WHOLE: Field(self._decoding, record.data, where)}
        return self._chosen.fields(record.data, where)

    def _joined(self, values: dict[str, Any]) -> Any:
        return values[_WHOLE] if self._chosen is None else values

    def _where(self, shard: int, row: int) -> str:
        return f"record {row} of {self.paths[shard]}"


def _starts(indexes: tuple[SideCar, ...], number: int) -> NDArray[np.integer[Any]]:
    return indexes[number].opened()["starts"]
