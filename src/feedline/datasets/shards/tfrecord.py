"""`TFRecord`: records of TFRecord files, in any order, without TensorFlow.

One pass over a file finds its records and checks them; the offsets are kept in an index file.

A record is its length (uint64), the masked CRC-32C of the length, the data, and their masked CRC-32C; all little
endian.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import numpy as np

from feedline.core import optional
from feedline.core.dataset import TransformFunction
from feedline.core.paths import Pathlike
from feedline.datasets.base import Field, FieldRecords, Record, RecordFiles, ShardedFields
from feedline.datasets.decoding import Decode, Decoder, decoder_of, split_transform
from feedline.datasets.file_objects import Stream
from feedline.datasets.formats import FORMATS
from feedline.datasets.indexes import Columns, IndexRecipe, Shapes
from feedline.datasets.inflated import OPENERS, Opener, inflated, opener_of
from feedline.datasets.paths import Paths, find
from feedline.datasets.shards.tf_example import ChosenFeatures, EveryFeature, Feature
from feedline.datasets.signatures import begin_of, check_format
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache
from feedline.stores.files import File, FileSet
from feedline.stores.urls import is_local

HEAD_NBYTES, TAIL_NBYTES = 12, 4


_COMPRESSED = {b"\x1f\x8b": "GZIP", b"\x78\x01": "ZLIB", b"\x78\x9c": "ZLIB", b"\x78\xda": "ZLIB"}
"""Compressions of TFRecordOptions, by the first bytes of a file."""


_OPENERS = {"GZIP": OPENERS[".gz"], "ZLIB": OPENERS[".zlib"], "": None}


_SPOT_CHECKS = 16


_CHECKED = "checked"
"""Name of an empty array in the index, which means that all checksums were verified."""


def _recipe(check_crc: bool) -> IndexRecipe:
    """The recipe of an index: starts of records, and the last end."""
    # The name begins with a dot, so that globs for the records do not match it.
    return IndexRecipe(
        lambda name: f".{name}.index", partial(_scan, check_crc), partial(_is_valid_index, check_crc), _count, _payload
    )


def _count(shapes: Shapes) -> int:
    return shapes["starts"][0] - 1


def _payload(arrays: Columns, row: int) -> tuple[int, int]:
    start, stop = arrays["starts"][row : row + 2].tolist()
    return start + HEAD_NBYTES, stop - TAIL_NBYTES


def _scan(check_crc: bool, file: File) -> Columns:
    stream, starts, at = Stream(file), [0], 0
    checksum = (
        optional.load("google_crc32c", "tfrecord", "datasets.TFRecord(check_crc=True)").value if check_crc else None
    )
    while at < file.nbytes:
        at = _skip_record(file, stream, at, len(starts) - 1, checksum)
        starts.append(at)
    checked = {_CHECKED: np.empty(0, np.uint8)} if check_crc else {}
    return {"starts": np.array(starts, np.int64), **checked}


def _skip_record(file: File, stream: Stream, at: int, number: int, checksum: Any) -> int:
    """Read past one record; returns the start of the next one."""
    where = f"record {number} of {file.name}, at byte {at},"
    left = file.nbytes - at - HEAD_NBYTES
    if left < TAIL_NBYTES:
        raise SampleError(f"{where} is truncated after {file.nbytes - at} bytes; was the file copied completely?")
    head = stream.take(HEAD_NBYTES)
    if not at:
        _check_not_compressed(file.name, head)
    length, length_crc = struct.unpack("<QI", head)
    is_wrong = checksum and _mask(checksum(bytes(head[:8]))) != length_crc
    if not at and (is_wrong or length + TAIL_NBYTES > left):
        check_format(file.name, "TFRecord", begin_of(file))
    if is_wrong:
        raise SampleError(
            f"{where} has a damaged length (checksum mismatch): this is not a TFRecord file, or a damaged one; copy it"
            " again"
        )
    if length + TAIL_NBYTES > left:
        raise SampleError(f"{where} claims {length} bytes, but {left} are left; was the file copied completely?")
    data, tail = stream.take(length), stream.take(TAIL_NBYTES)
    if checksum and _mask(checksum(np.frombuffer(data, np.uint8))) != struct.unpack("<I", tail)[0]:
        raise SampleError(
            f"{where} is damaged (checksum mismatch): copy the file again, or pass check_crc=False to keep the record"
        )
    return int(at + HEAD_NBYTES + length + TAIL_NBYTES)


def _mask(crc: int) -> int:
    """Mask a CRC as TensorFlow stores it.

    Masks keep the CRC of data that contain CRCs meaningful.
    """
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _check_not_compressed(name: str, head: memoryview) -> None:
    kind = _compression(bytes(head))
    if kind:
        raise SampleError(
            f"{name} is compressed with {kind}, although its name does not say so; pass compression={kind!r}"
        )


def _compression(head: bytes) -> str:
    """Compression of a file with these first bytes; "" for none."""
    # A length may begin with the same bytes. Its upper bytes are then zero, because no record is that large.
    return _COMPRESSED.get(head[:2], "") if any(head[2:8]) else ""


def _openers(files: FileSet, compression: str | None) -> list[Opener | None]:
    """Openers of compressed files, by argument, name or first bytes."""
    if compression is None:
        return [opener_of(name) or _local_opener(files, number) for number, name in enumerate(files.names)]
    if compression.upper() not in _OPENERS:
        raise ArgumentError(f"compression={compression!r} is neither 'GZIP', nor 'ZLIB', nor '' for none")
    return [_OPENERS[compression.upper()]] * len(files)


def _local_opener(files: FileSet, number: int) -> Opener | None:
    # The first bytes would cost a request for each object, and most objects already have an index.
    if files.info(number).size < HEAD_NBYTES or not is_local(files.name(number)):
        return None
    with open(files.name(number), "rb", buffering=0) as file:
        return _OPENERS[_compression(file.read(HEAD_NBYTES))]


def _is_valid_index(check_crc: bool, file: File, arrays: Columns) -> bool:
    """True if an index fits its file, judged by a few records.

    With `check_crc`, the index must have been built with verified checksums.
    """
    starts = arrays.get("starts")
    if check_crc and _CHECKED not in arrays:
        return False
    if starts is None or starts.ndim != 1 or not len(starts) or starts[0] or starts[-1] != file.nbytes:
        return False
    lengths = np.diff(starts.astype(np.int64)) - HEAD_NBYTES - TAIL_NBYTES
    if (lengths < 0).any():
        return False
    some = np.unique(np.linspace(0, max(0, len(lengths) - 1), _SPOT_CHECKS).astype(np.int64))[: len(lengths)]
    heads = file.read([(at, at + 8) for at in starts[some].tolist()])
    return bool([int.from_bytes(head, "little") for head in heads] == lengths[some].tolist())


_WHOLE = ""
"""Name of the single field of records that are not decoded by features."""


class TFRecord(RecordFiles, ShardedFields):
    """Records of TFRecord files, as dicts of their `tf.train.Example` features.

    `columns` maps names of features to types: a dtype for a single number; `(dtype, shape)` for a tensor, where one
    side may be -1; "bytes", "text", "npy", "image" or a function of the bytes for a single bytes value; and
    `("text", (-1,))` for a list of these. None takes every feature: numbers as 1-D tensors, bytes as lists. `defaults`
    has values of optional features, as a record would hold them. `transform` is a function of the sample, or a dict of
    functions by feature. With `decode`, records are not examples; `decode` is "bytes", another of these words, or a
    function.

    The feature lists of a `tf.train.SequenceExample` are features, too. Their type is the type of each step, and
    tensors are stacked, or in a list if a side is -1; bytes values, one for each step, have the type of a list.

    Files compressed as a whole are decompressed once, into `cache` or the user's cache folder: those that end in
    `.gz` or `.zlib`, and files of this machine that begin so. For objects with other names, `compression` is "GZIP" or
    "ZLIB", as in TFRecordOptions; "" reads all files without decompression.

    An index file next to each file, or in the folder `index_dir`, holds the offsets of records. With `check_crc`, all
    checksums are verified when it is built, and an index built without is built again. Objects are kept in the folder
    `cache` if one is given; `options` are passed to `open_store`.

    SampleError names file and record of a value that is damaged, or does not have the type in `columns`.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Mapping[str, Feature] | None = None,
        *,
        defaults: Mapping[str, Any] | None = None,
        decode: Decode | None = None,
        transform: TransformFunction | Mapping[str, TransformFunction] | None = None,
        compression: str | None = None,
        check_crc: bool = True,
        index_dir: Pathlike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        by_feature, whole = split_transform(transform, columns)
        if decode is not None and columns is not None:
            raise ArgumentError("columns= reads records as examples, but decode= does not; leave out one of the two")
        if defaults and columns is None:
            raise ArgumentError("defaults= needs columns=, the types of the features")
        self._chosen = None if columns is None else ChosenFeatures(columns, by_feature, defaults or {})
        # An image is decoded and transformed in one step.
        self._decoder: Decoder = EveryFeature() if decode is None else decoder_of(decode, whole)
        files = find(paths, FORMATS["tfrecord"].pattern, cache=cache, options=options)
        super().__init__(inflated(files, _openers(files, compression), cache), _recipe(check_crc), index_dir)
        FieldRecords.__init__(self, whole if decode is None else None)
        for index in self._indexes:
            if check_crc and _CHECKED not in index.shapes:  # built without verified checksums
                index.renew()

    def _decoders(self) -> Collection[Decoder]:
        return [self._decoder] if self._chosen is None else self._chosen.decoders

    def _fields_in(self, record: Record) -> dict[str, Field]:
        where = partial(self._where, record.shard, record.row)
        if self._chosen is None:
            return {_WHOLE: Field(self._decoder, record.data, where)}
        return self._chosen.fields(record.data, where)

    def _assemble(self, values: dict[str, Any]) -> Any:
        return values[_WHOLE] if self._chosen is None else values

    def _where(self, shard: int, row: int) -> str:
        return f"record {row} of {self.paths[shard]}"
