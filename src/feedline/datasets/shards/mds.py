"""`MDS`: the shards that Mosaic's StreamingDataset reads, in any order.

`index.json` of an MDS folder: what its shards hold, read without trust.

The encodings of MDS columns, but pickle: from the bytes of a value to what Mosaic's own reader gives.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from math import prod
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from feedline.datasets.arrays.npy import Transform
from feedline.datasets.arrays.npy_layout import Pathlike
from feedline.datasets.base import Field, FieldRecords, Record
from feedline.datasets.decoding import Decoding, check_names, split_transform, text_of
from feedline.datasets.formats import ShardSummary
from feedline.datasets.paths import Paths, listed
from feedline.datasets.shard_summaries import StoredShard, stored_nbytes, summarize_folders
from feedline.datasets.shards.files import Read, ShardFileFields, ShardFiles, ShardSource, offsets_in
from feedline.datasets.shards.folder import IndexedFolder, count, file_name, refuse_overflow, samples
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache
from feedline.stores.files import LazyList

Decoder = Callable[[memoryview], Any]


_SCALARS = (
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)


_DTYPES = dict(
    zip(
        (8, 9, 16, 17, 18, 32, 33, 34, 64, 65, 66),
        ["uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32", "uint64", "int64", "float64"],
        strict=True,
    )
)
"""The first byte of an array whose column does not say the dtype."""


_SHAPE_DTYPES = ("u1", "<u2", "<u4", "<u8")


_PIXELS_MOST = 1 << 28


def decoder(encoding: str) -> Decoder:
    """What decodes values of a column; ArgumentError for pickle, and for what is not known."""
    if encoding.startswith("ndarray"):
        return _ndarray(encoding)
    if encoding in _SCALARS:
        return partial(_scalar, np.dtype(encoding).newbyteorder("<"))
    if encoding == "pkl":
        raise ArgumentError("pickle, which may run any code and is never read")
    try:
        return _DECODERS[encoding]
    except KeyError:
        raise ArgumentError(f"{encoding!r}, which is not known") from None


def is_picture(encoding: str) -> bool:
    """Whether values are the bytes of one image file."""
    return encoding in ("jpeg", "png")


def fixed_nbytes(encoding: str) -> int | None:
    """How long every value is, or None where each says its own length."""
    if encoding == "int":
        return 8
    if encoding in _SCALARS:
        return np.dtype(encoding).itemsize
    if encoding.count(":") < 2:
        return None
    dtype, shape = _described(encoding)
    return None if dtype is None or shape is None else dtype.itemsize * prod(shape)


def _scalar(dtype: np.dtype[Any], data: memoryview) -> Any:
    return np.frombuffer(data, dtype, 1)[0]


def _ndarray(encoding: str) -> Decoder:
    try:
        return partial(_array, *_described(encoding))
    except (ValueError, TypeError, SyntaxError):
        raise ArgumentError(f"{encoding!r}, which is not known") from None


def _described(encoding: str) -> tuple[np.dtype[Any] | None, tuple[int, ...] | None]:
    """The dtype and shape of all arrays of a column, as far as the encoding says them."""
    name, _, sides = encoding.partition(":")[2].partition(":")
    dtype = np.dtype(name).newbyteorder("<") if name else None
    shape = tuple(map(int, sides.split(","))) if sides else None
    if (dtype is not None and dtype.kind not in "biufc") or min(shape or (), default=0) < 0:
        raise ValueError(f"there are no arrays of {encoding!r}")
    return dtype, shape


def _array(dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, data: memoryview) -> NDArray[Any]:
    """An array of its own memory; dtype and shape stand first in the data where the column does not say them."""
    if dtype is None:
        dtype, data = np.dtype(_DTYPES[data[0]]).newbyteorder("<"), data[1:]
    if shape is None:
        sides = np.frombuffer(data, _SHAPE_DTYPES[data[0] & 3], data[0] >> 2, 1)
        shape, data = tuple(sides.tolist()), data[1 + sides.nbytes :]
    array: NDArray[Any] = np.frombuffer(data, dtype).reshape(shape)
    return array.astype(dtype.newbyteorder("="))


def image(data: memoryview) -> PIL.Image.Image:
    image = PIL.Image.open(io.BytesIO(data))
    image.load()
    return image


def bare_image(data: memoryview) -> PIL.Image.Image:
    width, height, letters = struct.unpack_from("<III", data)
    if width * height > _PIXELS_MOST:
        raise ValueError(f"a picture of {width} x {height} pixels")
    mode, pixels = str(data[12 : 12 + letters], "ascii"), data[12 + letters :]
    return PIL.Image.frombytes(mode, (width, height), bytes(pixels))


def images(data: memoryview) -> list[PIL.Image.Image]:
    """Their number, the size of each, then the files."""
    return _several(image, data)


def _list(each: Decoder, data: memoryview) -> list[Any]:
    """As before, after four bytes that mean nothing yet."""
    return _several(each, data[4:])


def _several(each: Decoder, data: memoryview) -> list[Any]:
    (count,) = struct.unpack_from("<I", data)
    sizes = np.frombuffer(data, "<u4", count, 4)
    stops = 4 + 4 * count + np.cumsum(sizes, dtype=np.int64)
    if count and stops[-1] > len(data):
        raise ValueError(f"{count} values of {stops[-1]} bytes in {len(data)}")
    return [each(data[stop - size : stop]) for size, stop in zip(sizes.tolist(), stops.tolist(), strict=True)]


def _integer(data: memoryview) -> int:
    return int(struct.unpack("<q", data)[0])


def _parsed(kind: Callable[[str], Any], data: memoryview) -> Any:
    return kind(text_of(data))


_DECODERS: dict[str, Decoder] = {
    "bytes": bytes,
    "str": text_of,
    "int": _integer,
    "str_int": partial(_parsed, int),
    "str_float": partial(_parsed, float),
    "str_decimal": partial(_parsed, Decimal),
    "json": partial(_parsed, json.loads),
    "pil": bare_image,
    "jpeg": image,
    "png": image,
    "jpeg_array": images,
    "jpegarray": images,
    "list[pil]": partial(_list, bare_image),
    "list[jpeg]": partial(_list, image),
    "list[png]": partial(_list, image),
}


@dataclass(frozen=True, slots=True)
class File:
    """A file that the index promises."""

    name: str
    nbytes: int
    hashes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MDSColumns:
    """The columns in the order in which they are stored; a size is None where each value has its own."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class MDSShard:
    """One shard; those with equal columns share them."""

    samples: int
    columns: MDSColumns
    raw: File
    zipped: File | None
    codec: str | None


def shards_of(folder: IndexedFolder, known: dict[MDSColumns, MDSColumns]) -> list[MDSShard]:
    """The shards that the index in this folder names; SampleError tells what is wrong with it.

    Columns that are in `known` are given as they are there; others are added.
    """
    data, path = folder.index("MDS data set"), folder.where("index.json")
    try:
        shards = [_shard(each, known) for each in json.loads(data)["shards"]]
        refuse_overflow(shard.samples for shard in shards)
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise ArgumentError(f"{path}: {error}") from None
        raise SampleError(f"{path} is no index of MDS shards ({type(error).__name__}: {error})") from error
    return shards


def _shard(told: dict[str, Any], known: dict[MDSColumns, MDSColumns]) -> MDSShard:
    if told["format"] != "mds" or told["version"] != 2:
        raise ArgumentError(f"shards of format {told['format']} version {told['version']}; MDS reads mds version 2")
    encodings, sizes = tuple(told["column_encodings"]), tuple(told["column_sizes"])
    names = tuple(told["column_names"])
    if not len(names) == len(encodings) == len(sizes) or sizes != tuple(map(fixed_nbytes, encodings)):
        raise ValueError("column names, encodings and sizes do not agree")
    zipped = told["zip_data"] and _file(told["zip_data"])
    codec = told["compression"] and str(told["compression"]).partition(":")[0]
    columns = MDSColumns(names, encodings, sizes)
    columns = known.setdefault(columns, columns)
    raw = _file(told["raw_data"])
    number = samples(told["samples"], raw.nbytes, f"the number of samples in {raw.name}")
    return MDSShard(number, columns, raw, zipped or None, codec or None)


def _file(told: dict[str, Any]) -> File:
    name = file_name(told["basename"])  # with folders, if Mosaic merged the indexes of several
    return File(name, count(told["bytes"], f"the size of {name}"), dict(told["hashes"]))


class MDS(ShardFileFields):
    """The samples of an MDS folder (with its `index.json`) as dicts of what Mosaic's own reader gives.

    `path` is a folder of this machine or the address of one in a store, or several, whose samples follow one another.
    `columns` picks some; those encoded as pickle are never read. `transform` is a function of the sample, or functions
    by column.

    What a store gives is kept in the folder `cache`, if there is one, and so are compressed shards, which are
    decompressed on first use (by default into the user's cache folder), and their hashes compared where the index has
    some; `check_hashes` compares those of the others now. `options` are those of `open_store`.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        columns: Sequence[str] | None = None,
        transform: Transform | Mapping[str, Transform] | None = None,
        cache: Cache | Pathlike | None = None,
        check_hashes: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if columns is not None:
            check_names(columns, "columns", "('image', 'label')")
        folders = [IndexedFolder(each, cache=cache, options=options) for each in listed(paths)]
        self.paths = [folder.name for folder in folders]
        _refuse_twice(self.paths)
        known: dict[MDSColumns, MDSColumns] = {}
        told = [(folder, each) for folder in folders for each in shards_of(folder, known)]
        names = tuple(columns) if columns is not None else tuple(dict.fromkeys(n for kind in known for n in kind.names))
        by_column, whole = split_transform(transform, names)
        super().__init__(ShardFiles([(folder, _open_shard(each)) for folder, each in told], _ends, "mds", cache))
        FieldRecords.__init__(self, whole)
        layouts = {kind: _layout(kind, names, by_column, ", ".join(self.paths)) for kind in known}
        self._layouts = tuple(layouts.values())
        places = {kind: number for number, kind in enumerate(layouts)}
        self._kinds = [places[each.columns] for _, each in told]
        self._offsets = LazyList(partial(_offsets, self._files), len(told))
        if check_hashes:
            self._files.check()

    def _span(self, shard: int, row: int) -> tuple[int, int]:
        offsets = self._offsets[shard]
        return offsets[row], offsets[row + 1]

    def _decodings(self) -> list[Decoding]:
        """Of all shards: a column that is encoded otherwise in some of them has no one decoding."""
        return [decoding for layout in self._layouts for _, _, decoding in layout.wanted]

    def _fields_in(self, record: Record) -> dict[str, Field]:
        layout, (shard, row, data) = self._layouts[self._kinds[record.shard]], record
        try:
            spans = layout.spans(data)
        except (ValueError, struct.error) as error:
            raise SampleError(f"{self._where(shard, row)} is damaged ({error}); copy the shard again") from error
        fields = {}
        for number, name, decoding in layout.wanted:
            start, stop = spans[number]
            fields[name] = Field(decoding, data[start:stop], partial(self._where, shard, row, name))
        return fields

    def _where(self, shard: int, row: int, name: str | None = None) -> str:
        return f"{'' if name is None else f'column {name!r} of '}sample {row} of {self._files.where(shard)}"


@dataclass(frozen=True, slots=True)
class _MDSLayout:
    """How samples of some shards are laid out, and what decodes the columns that are wanted."""

    heads: str
    sizes: tuple[int | None, ...]
    wanted: tuple[tuple[int, str, Decoding], ...]

    def spans(self, data: memoryview) -> list[tuple[int, int]]:
        """From where to where each column goes; ValueError if it goes too far."""
        lengths = iter(struct.unpack_from(self.heads, data))
        at, found = struct.calcsize(self.heads), []
        for size in self.sizes:
            start, at = at, at + (next(lengths) if size is None else size)
            found.append((start, at))
        if at != len(data):
            raise ValueError(f"its columns take {at} bytes of {len(data)}")
        return found


def _refuse_twice(paths: Sequence[str]) -> None:
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise ArgumentError(f"{path} is named twice, so that its samples would be, too")


def _open_shard(told: MDSShard) -> ShardSource:
    forms: dict[str, str | None] = {told.raw.name: None}
    if told.zipped is not None and told.codec is not None:
        forms[told.zipped.name] = told.codec
    return ShardSource(forms, told.raw.nbytes, told.samples, told.raw.hashes)


def _ends(read: Read, nbytes: int, samples: int) -> tuple[memoryview, memoryview]:
    """The number of samples, and where each begins: nothing at the end is needed."""
    return read(0, min(nbytes, 4 * (samples + 2))), memoryview(b"")


def _offsets(files: ShardFiles, number: int) -> memoryview:
    begin, shard = files.ends(number).begin, files.shards[number]
    return offsets_in(begin, shard.samples, shard.nbytes, files.where(number))


def _layout(columns: MDSColumns, names: Sequence[str], by_column: Mapping[str, Transform], path: str) -> _MDSLayout:
    wanted = []
    for name in names:
        if name not in columns.names:
            raise ArgumentError(f"{path} has shards without a column {name!r}; they have {', '.join(columns.names)}")
        number = columns.names.index(name)
        wanted.append((number, name, _decoding(name, columns.encodings[number], by_column.get(name), path)))
    return _MDSLayout(f"<{columns.sizes.count(None)}I", columns.sizes, tuple(wanted))


def _decoding(name: str, encoding: str, transform: Transform | None, path: str) -> Decoding:
    if is_picture(encoding) and transform is not None:
        return Decoding("image", transform)
    try:
        return Decoding(decoder(encoding), transform, kind=encoding.partition(":")[0])
    except ArgumentError as error:
        raise ArgumentError(f"column {name!r} of {path} is encoded as {error}; leave it out with columns=") from None


def summarize_shards(paths: Sequence[str]) -> ShardSummary:
    """The shards of MDS folders."""
    return summarize_folders("shard", (shard for folder in map(IndexedFolder, paths) for shard in _stored(folder)))


def _stored(folder: IndexedFolder) -> Iterator[StoredShard]:
    shards = shards_of(folder, {})
    files = folder.files([[each.name for each in (shard.raw, shard.zipped) if each] for shard in shards])
    for shard, file in zip(shards, files, strict=True):
        is_compressed = file.name != shard.raw.name
        yield StoredShard(shard.samples, stored_nbytes(folder, file), shard.raw.nbytes, is_compressed)
