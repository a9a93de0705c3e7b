"""`TFRecord`: the records of TFRecord files, in any order, without TensorFlow.

Where the records of a TFRecord file lie: found in one pass, checked on the way, kept in a side-car.

A record is its length (uint64), the masked CRC-32C of that, its bytes, and their masked CRC-32C; all little endian.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.core import optional
from feedline.core.dataset import digest_of
from feedline.datasets.arrays.npy import Transform
from feedline.datasets.arrays.npy_layout import Pathlike
from feedline.datasets.base import Decodes, Field, FieldRecords, Record, ShardedFields
from feedline.datasets.decoding import Decode, Decoding, split_transform
from feedline.datasets.file_objects import Stream, parts
from feedline.datasets.formats import FORMATS
from feedline.datasets.indexes import Columns, IndexRecipe, SideCar, indexes_of
from feedline.datasets.paths import Paths, find
from feedline.datasets.shards.tf_example import ChosenFeatures, EveryFeature, Feature
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache
from feedline.stores.files import Blob, FileSet, LazyList

HEAD_NBYTES, TAIL_NBYTES = 12, 4


_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x78\x01": "zlib", b"\x78\x9c": "zlib", b"\x78\xda": "zlib"}


_LOOKS = 16


_CHECKED = "checked"
"""An array of the index, without content: it is there if all checksums were compared."""


def indexed(blobs: FileSet, check: bool, folder: Pathlike | None) -> list[SideCar]:
    """Of each file `starts`: where each record begins, and where the last one ends.

    SampleError names the first damaged record. Indexes of files that were not checked are made again to `check` them.
    """
    # A hidden file: patterns for the records must not match it.
    kind = IndexRecipe(lambda name: f".{name}.index", partial(_scanned, check), partial(_fits, check))
    indexes = indexes_of(blobs, kind, folder)
    for index in indexes:
        if check and _CHECKED not in index.shapes:
            index.renew()
    return indexes


def _scanned(check: bool, blob: Blob) -> Columns:
    stream, starts, at = Stream(parts(blob)), [0], 0
    checksum = optional.load("google_crc32c", "tfrecord", "datasets.TFRecord(check=True)").value if check else None
    while at < blob.nbytes:
        at = _after(blob, stream, at, len(starts) - 1, checksum)
        starts.append(at)
    checked = {_CHECKED: np.empty(0, np.uint8)} if check else {}
    return {"starts": np.array(starts, np.int64), **checked}


def _after(blob: Blob, stream: Stream, at: int, number: int, checksum: Any) -> int:
    """Where the record that begins here ends."""
    where = f"record {number} of {blob.name}, at byte {at},"
    left = blob.nbytes - at - HEAD_NBYTES
    if left < TAIL_NBYTES:
        raise SampleError(f"{where} is cut off after {blob.nbytes - at} bytes; was the file copied whole?")
    head = stream.take(HEAD_NBYTES)
    if not at:
        _refuse_compressed(blob.name, head)
    length, length_crc = struct.unpack("<QI", head)
    if checksum and _masked(checksum(bytes(head[:8]))) != length_crc:
        raise SampleError(
            f"{where} has a damaged length (checksum mismatch): this is no TFRecord file, or a broken one"
        )
    if length + TAIL_NBYTES > left:
        raise SampleError(f"{where} wants {length} bytes of the {left} left; was the file copied whole?")
    data, tail = stream.take(length), stream.take(TAIL_NBYTES)
    if checksum and _masked(checksum(np.frombuffer(data, np.uint8))) != struct.unpack("<I", tail)[0]:
        raise SampleError(
            f"{where} is damaged (checksum mismatch): copy the file again, or give check=False to keep it"
        )
    return int(at + HEAD_NBYTES + length + TAIL_NBYTES)


def _masked(crc: int) -> int:
    """As TensorFlow stores checksums, so that the checksum of data that hold checksums stays a good one."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _refuse_compressed(name: str, head: memoryview) -> None:
    kind = _COMPRESSED.get(bytes(head[:2]))
    # The length of a record may begin with these bytes, too; then it has five more bytes of zeros.
    if kind and any(head[2:8]):
        raise SampleError(
            f"{name} is compressed with {kind}, and there is no way to one record of it: decompress it once"
            " (gunzip --keep, or zlib-flate), then give the result"
        )


def _fits(check: bool, blob: Blob, arrays: Columns) -> bool:
    """Whether some records are as long as the arrays say, and were checked if they must be."""
    starts = arrays.get("starts")
    if check and _CHECKED not in arrays:
        return False
    if starts is None or starts.ndim != 1 or not len(starts) or starts[0] or starts[-1] != blob.nbytes:
        return False
    lengths = np.diff(starts.astype(np.int64)) - HEAD_NBYTES - TAIL_NBYTES
    if (lengths < 0).any():
        return False
    some = np.unique(np.linspace(0, max(0, len(lengths) - 1), _LOOKS).astype(np.int64))[: len(lengths)]
    heads = blob.read([(at, at + 8) for at in starts[some].tolist()])
    return bool([int.from_bytes(head, "little") for head in heads] == lengths[some].tolist())


_WHOLE = ""
"""The name of the one field of records that are no examples, or are taken as they are."""


class TFRecord(ShardedFields):
    """The records of TFRecord files and objects: `tf.train.Example` messages as dicts.

    `columns` says what to take and as what, by name: a dtype for one number; `(dtype, shape)` for a tensor, of which
    one side may be -1; "bytes", "text", "npy", "image" or a function of the bytes for what one `bytes` value holds.
    None takes every feature: numbers as 1-D tensors, `bytes` as lists. `transform` is a function of the sample, or
    functions by feature. With `decode`, records are not examples: it is "bytes" or another of these words.

    A side-car beside each file (in the folder `index_dir` where given) says where records lie; `check` compares the
    checksums of all of them when it is made, and makes anew one that was made without. Objects are kept in the folder
    `cache`, if one is given; `options` are those of `open_store`.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Mapping[str, Feature] | None = None,
        *,
        decode: Decode | None = None,
        transform: Transform | Mapping[str, Transform] | None = None,
        check: bool = True,
        index_dir: Pathlike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        by_feature, whole = split_transform(transform, columns)
        if decode is not None and columns is not None:
            raise ArgumentError("columns= describes examples, and with decode= the records are none")
        self._chosen = None if columns is None else ChosenFeatures(columns, by_feature)
        # A picture and its transform are one step.
        self._decoding: Decodes = EveryFeature() if decode is None else Decoding(decode, whole)
        blobs = find(paths, FORMATS["tfrecord"].pattern, cache=cache, options=options)
        self.paths = blobs.names
        indexes = indexed(blobs, check, index_dir)
        super().__init__((each.shapes["starts"][0] - 1 for each in indexes), blobs)
        FieldRecords.__init__(self, whole if decode is None else None)
        self._starts = LazyList(partial(_starts, tuple(indexes)), len(indexes))

    @property
    def listing_fingerprint(self) -> str:
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
    return indexes[number].open_arrays()["starts"]
