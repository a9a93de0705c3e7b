"""Columns of tar samples: decoding of members into values and batches.

`DECODERS` decode members by extension; there is no decoder that unpickles.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from feedline import collate
from feedline.core.dataset import Keys, TransformFunction
from feedline.core.rng import SampleRng, sample_rng
from feedline.core.stage_parts import DECODING
from feedline.core.tensors import Allocator
from feedline.datasets import array_container
from feedline.datasets.compression import is_bomb, largest_nbytes
from feedline.datasets.decoding import (
    BAD_DATA,
    DAMAGE,
    DecodeFunction,
    Decoder,
    ImageDecoder,
    Where,
    naming_images,
    rgb,
    undecodable_error,
)
from feedline.datasets.webdataset import MemberSpan, Shard
from feedline.datasets.webdataset.tar import extension, is_image
from feedline.errors import ArgumentError
from feedline.images import ImageError
from feedline.images.decode import Grid
from feedline.stores.cache import MissingPieceError
from feedline.stores.files import FileBytes

Own = Mapping[str, Callable[[bytes], Any]]
"""A user's decoders, by field (`seg.png`) or extension (`png`)."""


def integer(data: memoryview) -> int:
    return int(bytes(data))


def text(data: memoryview) -> str:
    return str(data, "utf-8")


def json_value(data: memoryview) -> Any:
    return json.loads(bytes(data))


def json_lines(data: memoryview) -> list[Any]:
    """Parse one JSON value from each non-blank line."""
    return [json.loads(line) for line in bytes(data).splitlines() if line.strip()]


def array(data: memoryview) -> NDArray[Any]:
    """Copy the array of a `.npy` member."""
    return array_container.array(data).copy()


def arrays(data: memoryview) -> dict[str, NDArray[Any] | bytes]:
    """The arrays of a `.npz` member by name; other entries as bytes.

    ValueError if the archive directory claims implausibly large entries.
    """
    with ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        nbytes = sum(entry.file_size for entry in entries)
        if is_bomb(nbytes, len(data)):
            raise ValueError(f"{len(data):,} bytes claim to hold {nbytes:,}, like a decompression bomb")
        return {entry.filename.removesuffix(".npy"): _array_in(archive.read(entry)) for entry in entries}


def _array_in(content: bytes) -> NDArray[Any] | bytes:
    return array(memoryview(content)) if array_container.is_array(content) else content


DECODERS: dict[str, DecodeFunction] = {
    "cls": integer,
    "cls2": integer,
    "class": integer,
    "count": integer,
    "index": integer,
    "inx": integer,
    "id": integer,
    "txt": text,
    "text": text,
    "transcript": text,
    "json": json_value,
    "jsn": json_value,
    "jsonl": json_lines,
    "npy": array,
    "npz": arrays,
}
"""Decoders by extension. Images (`IMAGE_EXTENSIONS`) become PIL images in RGB, other extensions bytes."""


PICKLES = frozenset({"pickle", "pkl", "pyd", "pt", "pth"})
"""Extensions of pickled data, which can run code of the author when it is read."""


def decode_function(field: str, own: Own, load_image: DecodeFunction = bytes) -> DecodeFunction | None:
    """The decoder of a field; None for an image.

    A field such as `json.gz` is decompressed, and decoded as the field without `.gz`. `load_image` decodes compressed
    images. ArgumentError refuses fields that would have to be unpickled.
    """
    function = own.get(field, own.get(extension(field)))
    if function is not None:
        return partial(_from_bytes, function)
    if extension(field) == "gz":
        return partial(_unpack, decode_function(field.rpartition(".")[0], own, load_image) or load_image)
    if is_image(field):
        return None
    if extension(field) in PICKLES:
        raise ArgumentError(
            f"field {field!r} would have to be unpickled, which can run any code of its author. Store it as "
            f"npy, npz or json, leave it out with columns=, or pass decode={{{field!r}: function_of_the_bytes}} if "
            f"you trust it"
        )
    decode = DECODERS.get(extension(field), bytes)
    return _integer if decode is integer else decode


def _unpack(decode: DecodeFunction, data: memoryview) -> Any:
    """Decode the content of a gzip file.

    ValueError for a decompression bomb.
    """
    limit = largest_nbytes(len(data))
    with gzip.open(io.BytesIO(data)) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{len(data):,} bytes hold more than {limit:,}, like a decompression bomb")
    return decode(memoryview(content))


def _from_bytes(function: Callable[[bytes], Any], data: memoryview) -> Any:
    return function(bytes(data))


PSEUDO = ("__key__", "__shard__")
"""Fields of every sample that are not members."""


_EMPTY = memoryview(b"")


_MIN_INT64 = -(1 << 63)


class ShardPart(NamedTuple):
    """The rows of a batch from one shard.

    `places` are their rows in the batch, `rows` those in the index of the shard. `loaded` has the bytes of their
    members, if they are in memory.
    """

    shard: Shard
    places: NDArray[np.int64]
    rows: NDArray[np.int64]
    loaded: FileBytes | None

    def cells(self, rows: NDArray[np.int64], fields: Sequence[str]) -> list[MemberSpan]:
        """The members of some of these rows.

        MissingPieceError if they are not in memory.
        """
        if self.loaded is None:
            raise MissingPieceError
        return self.shard.cells(rows, fields, self.loaded)


class MemberPlace(NamedTuple):
    """A member of an open shard."""

    shard: Shard
    cell: MemberSpan

    @property
    def field(self) -> str:
        return self.shard.index.fields[self.cell.column]

    def __str__(self) -> str:
        return f"{self.shard.tar}: member {self.shard.index.member(self.cell.row, self.cell.column)!r}"


class TarDecoding(NamedTuple):
    """Decoding options of a dataset.

    `decode=False` leaves members as bytes; `own` are the user's decoders.
    """

    decode: bool
    own: Own
    apply_exif_orientation: bool


class TarColumn(Decoder):
    """One field of samples, or the first present of alternatives, as `jpg;png`.

    Its sources are the places of members, which errors describe.

    `__key__` and `__shard__` are the sample's key and the path of its tar. Thread-safe.
    """

    def __init__(self, spec: str, transform: TransformFunction | None, settings: TarDecoding) -> None:
        self.spec = spec
        self.names = tuple(name.strip().lower() for name in spec.split(";"))
        if not all(self.names):
            raise ArgumentError(f"field {spec!r} has an empty name; write alternatives as 'jpg;png'")
        self._settings = settings
        load = self._load_image if settings.decode else bytes
        self._images = ImageDecoder(transform, load, apply_exif_orientation=settings.apply_exif_orientation)
        self.step = self._images.step
        self._decoders = {name: self._decoder(name) for name in self.names}
        encoded = [decode is None for decode in self._decoders.values()]
        self.has_images = any(encoded)
        """True if an alternative is an encoded image."""
        stored = [decode is array for decode in self._decoders.values()]
        self._fused = (
            settings.decode and self._images.fused and all(a or b for a, b in zip(encoded, stored, strict=True))
        )

    def _decoder(self, name: str) -> DecodeFunction | None:
        if not self._settings.decode or name in PSEUDO:
            return bytes
        return decode_function(name, self._settings.own, self._load_image)

    @property
    def batchable(self) -> bool:
        """True if `batch` equals default collation of the values."""
        if self._fused:
            return self._images.batchable
        return not self.has_images and self.step.transform is None

    @property
    def uses_keys(self) -> bool:
        return self._images.uses_keys if self._fused else self.step.takes_rng

    @property
    def members(self) -> tuple[str, ...]:
        """The alternative fields; the first that a sample has is read."""
        return () if self.spec in PSEUDO else self.names

    def places(self, part: ShardPart, rows: NDArray[np.int64]) -> list[MemberPlace]:
        """Locate the members of these rows; SampleError names a row without one."""
        if self.spec in PSEUDO:
            return [MemberPlace(part.shard, MemberSpan(_EMPTY, 0, row, -1)) for row in rows.tolist()]
        return [MemberPlace(part.shard, cell) for cell in part.cells(rows, self.names)]

    def __call__(self, source: MemberPlace, row: int | None, where: Where | None = None) -> Any:  # noqa: ARG002
        return self.value(source, sample_rng(row) if self.uses_keys else None)

    def value(self, place: MemberPlace, rng: SampleRng | None) -> Any:
        """The value of one sample; SampleError names tar and member."""
        shard, cell = place
        if self.spec in PSEUDO:
            return self.step.apply(self._pseudo_value(place), rng)
        if self._fused:
            with naming_images(lambda _: str(place)):
                return self._images.value(_source(place), rng, shard.index.grid(cell.row, cell.column))
        return self.step.apply(self._decode(place), rng)

    def _pseudo_value(self, place: MemberPlace) -> str:
        shard, cell = place
        return shard.index.key(cell.row) if self.spec == "__key__" else shard.tar

    @property
    def supports_threads(self) -> bool:
        return self._fused and self._images.supports_threads

    def batch(
        self,
        sources: Sequence[MemberPlace],
        keys: Keys | None,
        allocate: Allocator,
        where: Callable[[int], str] | None = None,  # noqa: ARG002 - places describe themselves
        threads: int = 1,
    ) -> Any:
        """The default-collated values at these places, in memory from `allocate`."""
        if self.spec in PSEUDO:
            return tuple(self.value(place, None) for place in sources)
        if not self._fused:
            return collate.default(tuple(map(self._decode, sources)), allocate=allocate)
        grids = _grids(sources) if any(place.shard.index.has_grids for place in sources) else None
        with naming_images(lambda row: str(sources[row])):
            return self._images.decode_batch(list(_sources(sources)), keys, allocate, grids, threads)

    def all_places(self, parts: Sequence[ShardPart], count: int) -> list[MemberPlace]:
        """The members of a whole batch, in batch order."""
        found: list[Any] = [None] * count
        for part in parts:
            for number, place in zip(part.places.tolist(), self.places(part, part.rows), strict=True):
                found[number] = place
        return found

    def _decode(self, place: MemberPlace) -> Any:
        decode = self._decoders[place.field] or self._load_image
        try:
            with DECODING:
                return decode(place.cell.data)
        except DAMAGE as error:
            if self._is_own(place.field) and not isinstance(error, BAD_DATA):
                raise  # a bug in the user's decoder, not bad data
            what = f"{place} cannot be decoded as {extension(place.field)}"
            raise undecodable_error(what, error, "repair it") from error

    def _is_own(self, field: str) -> bool:
        return field in self._settings.own or extension(field) in self._settings.own

    def _load_image(self, data: memoryview) -> Any:
        return rgb(io.BytesIO(data), apply_exif_orientation=self._settings.apply_exif_orientation)


class TransformedAlternatives(TarColumn):
    """The first present of alternatives, each with its transform.

    Samples are read one by one.
    """

    def __init__(self, spec: str, transforms: Mapping[str, TransformFunction | None], settings: TarDecoding) -> None:
        super().__init__(spec, None, settings)
        self._each = {name: TarColumn(name, transforms[name], settings) for name in self.names}

    @property
    def batchable(self) -> bool:
        return False

    @property
    def uses_keys(self) -> bool:
        return any(column.uses_keys for column in self._each.values())

    @property
    def supports_threads(self) -> bool:
        return any(column.supports_threads for column in self._each.values())

    def value(self, place: MemberPlace, rng: SampleRng | None) -> Any:
        """The value of one sample, by the column of the member's field."""
        return self._each[place.field].value(place, rng)


def _integer(data: memoryview) -> int:
    value = integer(data)
    if not _MIN_INT64 <= value <= -_MIN_INT64 - 1:
        raise ValueError(f"a number of {len(str(value))} digits does not fit into int64")
    return value


def _source(place: MemberPlace) -> Any:
    """Encoded bytes or `.npy` pixels, as views of the tar."""
    if extension(place.field) != "npy":
        return place.cell.data
    try:
        pixels = array_container.array(place.cell.data)
    except ValueError as error:
        raise ImageError(str(error)) from error
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise ImageError(f"{pixels.dtype} of shape {pixels.shape} is not an image, which is uint8 (height, width, 3)")
    return pixels


def _sources(places: Iterable[MemberPlace]) -> Iterator[Any]:
    for row, place in enumerate(places):
        try:
            yield _source(place)
        except ImageError as error:
            error.row = row
            raise


def _grids(places: Sequence[MemberPlace]) -> list[Grid | None]:
    return [shard.index.grid(cell.row, cell.column) for shard, cell in places]
