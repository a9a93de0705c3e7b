"""`MDS`: samples of the shards that Mosaic's StreamingDataset reads.

`index.json` lists the shards and the encodings of their columns, and is not trusted. Values are decoded to what
Mosaic's own reader returns; columns encoded as pickle are never read.
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

from feedline.core.dataset import Transform
from feedline.core.paths import Pathlike
from feedline.datasets.base import Field, FieldRecords, Record
from feedline.datasets.decoding import (
    DecodeFunction,
    Decoder,
    ValueDecoder,
    check_names,
    decoder_of,
    split_transform,
    text_of,
)
from feedline.datasets.formats import ShardSummary
from feedline.datasets.paths import Paths, listed
from feedline.datasets.shard_summaries import StoredShard, summarize_folders
from feedline.datasets.shards.files import Read, ShardFileFields, ShardFiles, ShardSource, offsets_in
from feedline.datasets.shards.folder import IndexedFolder, check_count, check_file_name, check_samples, check_total
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache
from feedline.stores.files import LazyList

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
"""Dtypes of arrays whose column does not name one, by their first byte."""


_SHAPE_DTYPES = ("u1", "<u2", "<u4", "<u8")


_MAX_PIXELS = 1 << 28


_OTHER_READERS = {
    "json": (
        "; read these by fl.datasets.JSONL with the pattern 'shard.*.json' of that folder, or 'shard.*.json.zstd' (or"
        " .gz, .bz2) if they are compressed"
    )
}
"""Remedies for formats of Mosaic's other writers. JSON shards are files of JSON lines."""


def decode_function(encoding: str) -> DecodeFunction:
    """Function for a column's values; ArgumentError for pickle and unknown encodings."""
    if encoding.startswith("ndarray"):
        return _ndarray(encoding)
    if encoding in _SCALARS:
        return partial(_scalar, np.dtype(encoding).newbyteorder("<"))
    if encoding == "pkl":
        raise ArgumentError("pickle, which can run arbitrary code and is never read")
    try:
        return _DECODERS[encoding]
    except KeyError:
        raise ArgumentError(f"{encoding!r}, which is not known") from None


def is_image(encoding: str) -> bool:
    """True if values are encoded image files."""
    return encoding in ("jpeg", "png")


def fixed_nbytes(encoding: str) -> int | None:
    """Size of each value in bytes; None if values have individual sizes."""
    if encoding == "int":
        return 8
    if encoding in _SCALARS:
        return np.dtype(encoding).itemsize
    if encoding.count(":") < 2:
        return None
    dtype, shape = _parse_ndarray(encoding)
    return None if dtype is None or shape is None else dtype.itemsize * prod(shape)


def _scalar(dtype: np.dtype[Any], data: memoryview) -> Any:
    return np.frombuffer(data, dtype, 1)[0]


def _ndarray(encoding: str) -> DecodeFunction:
    try:
        return partial(_array, *_parse_ndarray(encoding))
    except (ValueError, TypeError, SyntaxError):
        raise ArgumentError(f"{encoding!r}, which is not known") from None


def _parse_ndarray(encoding: str) -> tuple[np.dtype[Any] | None, tuple[int, ...] | None]:
    """Dtype and shape of a column's arrays; None where not fixed."""
    name, _, sides = encoding.partition(":")[2].partition(":")
    dtype = np.dtype(name).newbyteorder("<") if name else None
    shape = tuple(map(int, sides.split(","))) if sides else None
    if (dtype is not None and dtype.kind not in "biufc") or min(shape or (), default=0) < 0:
        raise ValueError(f"there are no arrays of {encoding!r}")
    return dtype, shape


def _array(dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, data: memoryview) -> NDArray[Any]:
    """Decode an array into its own memory.

    Dtype and shape are at the front of the data if the column does not fix them.
    """
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
    if width * height > _MAX_PIXELS:
        raise ValueError(f"an image of {width} x {height} pixels")
    mode, pixels = str(data[12 : 12 + letters], "ascii"), data[12 + letters :]
    return PIL.Image.frombytes(mode, (width, height), bytes(pixels))


def images(data: memoryview) -> list[PIL.Image.Image]:
    """Decode a list of images: their number, their sizes, then the files."""
    return _decode_several(image, data)


def _list(each: DecodeFunction, data: memoryview) -> list[Any]:
    """Decode a list, stored like `images` after four reserved bytes."""
    return _decode_several(each, data[4:])


def _decode_several(each: DecodeFunction, data: memoryview) -> list[Any]:
    (count,) = struct.unpack_from("<I", data)
    sizes = np.frombuffer(data, "<u4", count, 4)
    stops = 4 + 4 * count + np.cumsum(sizes, dtype=np.int64)
    if count and stops[-1] > len(data):
        raise ValueError(f"{count} values of {stops[-1]} bytes in {len(data)}")
    return [each(data[stop - size : stop]) for size, stop in zip(sizes.tolist(), stops.tolist(), strict=True)]


def _integer(data: memoryview) -> int:
    return int(struct.unpack("<q", data)[0])


def _parse_text(kind: Callable[[str], Any], data: memoryview) -> Any:
    return kind(text_of(data))


_DECODERS: dict[str, DecodeFunction] = {
    "bytes": bytes,
    "str": text_of,
    "int": _integer,
    "str_int": partial(_parse_text, int),
    "str_float": partial(_parse_text, float),
    "str_decimal": partial(_parse_text, Decimal),
    "json": partial(_parse_text, json.loads),
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
class MDSFile:
    """File listed in the index."""

    name: str
    nbytes: int
    hashes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MDSColumns:
    """Columns in stored order; sizes are None for variable-size values."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class MDSShard:
    """One shard; shards with equal columns share one `MDSColumns`."""

    samples: int
    columns: MDSColumns
    raw: MDSFile
    zipped: MDSFile | None
    codec: str | None


def read_shards(folder: IndexedFolder, known: dict[MDSColumns, MDSColumns]) -> list[MDSShard]:
    """Read the shards listed in the index of a folder.

    Columns equal to those in `known` are replaced by them; new ones are added. SampleError for a damaged index,
    ArgumentError for unsupported content.
    """
    data, path = folder.index("MDS data set"), folder.where("index.json")
    try:
        shards = [_parse_shard(each, known) for each in json.loads(data)["shards"]]
        check_total(shard.samples for shard in shards)
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise ArgumentError(f"{path}: {error}") from None
        raise SampleError(f"{path} is not an index of MDS shards ({type(error).__name__}: {error})") from error
    return shards


def _parse_shard(entry: dict[str, Any], known: dict[MDSColumns, MDSColumns]) -> MDSShard:
    if entry["format"] != "mds" or entry["version"] != 2:
        raise ArgumentError(
            f"shards of format {entry['format']} version {entry['version']}; MDS reads mds version 2"
            + _OTHER_READERS.get(entry["format"], "; rewrite them with MDSWriter")
        )
    encodings, sizes = tuple(entry["column_encodings"]), tuple(entry["column_sizes"])
    names = tuple(entry["column_names"])
    if not len(names) == len(encodings) == len(sizes) or sizes != tuple(map(fixed_nbytes, encodings)):
        raise ValueError("column names, encodings and sizes do not agree")
    zipped = entry["zip_data"] and _parse_file(entry["zip_data"])
    codec = entry["compression"] and str(entry["compression"]).partition(":")[0]
    columns = MDSColumns(names, encodings, sizes)
    columns = known.setdefault(columns, columns)
    raw = _parse_file(entry["raw_data"])
    number = check_samples(entry["samples"], raw.nbytes, f"the number of samples in {raw.name}")
    return MDSShard(number, columns, raw, zipped or None, codec or None)


def _parse_file(entry: dict[str, Any]) -> MDSFile:
    name = check_file_name(entry["basename"])  # includes folders if Mosaic merged several indexes
    return MDSFile(name, check_count(entry["bytes"], f"the size of {name}"), dict(entry["hashes"]))


class MDS(ShardFileFields):
    """Samples of MDS folders, as dicts of what Mosaic's own reader returns.

    `paths` is a local folder, with its `index.json`, the address of one in a store, or several of these, whose samples
    are concatenated. `columns` chooses columns; those encoded as pickle are never read. `transform` is a function of
    the sample, or a dict of functions by column.

    Objects are kept in the folder `cache` if one is given. Compressed shards are decompressed on first use, into
    `cache` or the user's cache folder, and checked against the hashes in the index. With `check_hashes`, the
    constructor checks all other shards, too. `options` are those of `open_store`.
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
        _check_distinct(self.paths)
        known: dict[MDSColumns, MDSColumns] = {}
        shards = [(folder, each) for folder in folders for each in read_shards(folder, known)]
        names = tuple(columns) if columns is not None else tuple(dict.fromkeys(n for kind in known for n in kind.names))
        by_column, whole = split_transform(transform, names)
        super().__init__(ShardFiles([(folder, _shard_source(each)) for folder, each in shards], _ends, "mds", cache))
        FieldRecords.__init__(self, whole)
        layouts = {kind: _build_layout(kind, names, by_column, ", ".join(self.paths)) for kind in known}
        self._layouts = tuple(layouts.values())
        places = {kind: number for number, kind in enumerate(layouts)}
        self._kinds = [places[each.columns] for _, each in shards]
        self._offsets = LazyList(partial(_read_offsets, self._files), len(shards))
        if check_hashes:
            self._files.check()

    def _span(self, shard: int, row: int) -> tuple[int, int]:
        self._files.check_unchanged(shard)
        offsets = self._offsets[shard]
        return offsets[row], offsets[row + 1]

    def _decoders(self) -> list[Decoder]:
        """Decodings of all shards.

        A column whose encoding differs between shards appears several times.
        """
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
    """Layout of the samples of shards with equal columns, and their decoders."""

    heads: str
    sizes: tuple[int | None, ...]
    wanted: tuple[tuple[int, str, Decoder], ...]

    def spans(self, data: memoryview) -> list[tuple[int, int]]:
        """Byte range of each column; ValueError unless they fill the sample."""
        lengths = iter(struct.unpack_from(self.heads, data))
        at, spans = struct.calcsize(self.heads), []
        for size in self.sizes:
            start, at = at, at + (next(lengths) if size is None else size)
            spans.append((start, at))
        if at != len(data):
            raise ValueError(f"its columns take {at} bytes of {len(data)}")
        return spans


def _check_distinct(paths: Sequence[str]) -> None:
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise ArgumentError(f"{path} is listed twice; its samples would be duplicated")


def _shard_source(shard: MDSShard) -> ShardSource:
    forms: dict[str, str | None] = {shard.raw.name: None}
    if shard.zipped is not None and shard.codec is not None:
        forms[shard.zipped.name] = shard.codec
    return ShardSource(forms, shard.raw.nbytes, shard.samples, shard.raw.hashes)


def _ends(read: Read, nbytes: int, samples: int) -> tuple[memoryview, memoryview]:
    """Ends of a shard: the number of samples, their offsets; nothing else."""
    return read(0, min(nbytes, 4 * (samples + 2))), memoryview(b"")


def _read_offsets(files: ShardFiles, number: int) -> memoryview:
    begin, shard = files.ends(number).begin, files.shards[number]
    return offsets_in(begin, shard.samples, shard.nbytes, files.where(number))


def _build_layout(
    columns: MDSColumns, names: Sequence[str], by_column: Mapping[str, Transform], path: str
) -> _MDSLayout:
    wanted = []
    for name in names:
        if name not in columns.names:
            raise ArgumentError(f"shards of {path} have no column {name!r}; they have {', '.join(columns.names)}")
        number = columns.names.index(name)
        wanted.append((number, name, _build_decoder(name, columns.encodings[number], by_column.get(name), path)))
    return _MDSLayout(f"<{columns.sizes.count(None)}I", columns.sizes, tuple(wanted))


def _build_decoder(name: str, encoding: str, transform: Transform | None, path: str) -> Decoder:
    if is_image(encoding) and transform is not None:
        return decoder_of("image", transform)
    try:
        return ValueDecoder(decode_function(encoding), transform, kind=encoding.partition(":")[0])
    except ArgumentError as error:
        raise ArgumentError(f"column {name!r} of {path} is encoded as {error}; leave it out with columns=") from None


def summarize_shards(paths: Sequence[str]) -> ShardSummary:
    """Shards of MDS folders."""
    return summarize_folders(
        "shard", (shard for folder in map(IndexedFolder, paths) for shard in _stored_shards(folder))
    )


def _stored_shards(folder: IndexedFolder) -> Iterator[StoredShard]:
    shards = read_shards(folder, {})
    files = folder.files([[each.name for each in (shard.raw, shard.zipped) if each] for shard in shards])
    for shard, file in zip(shards, files, strict=True):
        is_compressed = file.name != shard.raw.name
        yield StoredShard(shard.samples, folder.nbytes(file), shard.raw.nbytes, is_compressed)
