"""Chunks of Arrow columns as plain NumPy arrays.

Arrays share the memory of Arrow's buffers. Bits, decimals, views and runs are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.tables.types import ColumnType, ListType, NumberType, StructType, TextType, pyarrow

_UNLIMITED = int(np.iinfo(np.int64).max)
"""Row count of a chunk without memory, such as a dict without fields."""


_EXACT_DIGITS = 15
"""Largest number of digits with which every integer is a float64."""


_EXACT_POWER = 22
"""The largest power of ten that is a float64."""


_PLAIN = {"string_view": "large_string", "binary_view": "large_binary"}


_DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
    "halffloat": np.dtype(np.float16),
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
}
"""Dtypes of Arrow's plain numbers, by the name of their type."""


class ItemSpan(NamedTuple):
    """A one-dimensional array and its address in memory."""

    array: NDArray[Any]
    address: int


class NumberChunk(NamedTuple):
    """Rows with a fixed number of items.

    `missing` marks null items; None if there are none.
    """

    items: ItemSpan
    missing: ItemSpan | None

    @property
    def nbytes(self) -> int:
        return sum(part.array.nbytes for part in self if part is not None)


class RaggedChunk(NamedTuple):
    """Rows of variable length, as ranges of `child`.

    Row i is the items `[offsets[i], offsets[i + 1])`. `missing` marks null rows; None if there are none.
    """

    offsets: ItemSpan
    child: ColumnChunk
    missing: ItemSpan | None

    @property
    def nbytes(self) -> int:
        return self.offsets.array.nbytes + self.child.nbytes + (0 if self.missing is None else len(self.missing.array))


class StructChunk(NamedTuple):
    """One chunk for each field."""

    fields: tuple[ColumnChunk, ...]

    @property
    def nbytes(self) -> int:
        return sum(field.nbytes for field in self.fields)


class DictionaryChunk(NamedTuple):
    """Dictionary-encoded rows.

    Row i is row `places[i]` of the `length` rows of `values`. With `has_nulls`, the code -1 is a null.
    """

    places: ItemSpan
    values: ColumnChunk
    length: int
    has_nulls: bool

    @property
    def nbytes(self) -> int:
        return self.places.array.nbytes + self.values.nbytes


class PartedChunk(NamedTuple):
    """Concatenated parts: rows `[bounds[k], bounds[k + 1])` belong to part k."""

    parts: tuple[ColumnChunk, ...]
    bounds: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


ColumnChunk = NumberChunk | RaggedChunk | StructChunk | DictionaryChunk | PartedChunk


def items(array: NDArray[Any]) -> ItemSpan:
    """Wrap a contiguous one-dimensional array."""
    return ItemSpan(array, array.__array_interface__["data"][0])


def table_chunk(kind: StructType, batch: Any) -> StructChunk:
    """Convert the columns of `kind` of a record batch."""
    return StructChunk(tuple(chunk_of(each, batch.column(name)) for name, each in kind.fields))


def table_chunks(kind: StructType, batches: Sequence[Any]) -> list[StructChunk]:
    """Convert record batches that have the columns of `kind`, in its order.

    A table may have thousands of batches: for columns of plain numbers, this takes a third of the time of
    `table_chunk`.
    """
    columns = zip(*(batch.columns for batch in batches), strict=True)
    converted = [_column_chunks(each, arrays) for (_, each), arrays in zip(kind.fields, columns, strict=False)]
    rows = zip(*converted, strict=True) if converted else [()] * len(batches)
    return list(map(StructChunk, rows))


def _column_chunks(kind: ColumnType, arrays: Sequence[Any]) -> list[ColumnChunk]:
    if isinstance(kind, NumberType) and not kind.shape and _DTYPES.get(str(arrays[0].type)) == kind.dtype:
        return [_plain_numbers(kind, each) for each in arrays]
    return [chunk_of(kind, each) for each in arrays]


def _plain_numbers(kind: NumberType, array: Any) -> ColumnChunk:
    """Convert an array that is known to have the type of `kind`."""
    length = len(array)
    if not length or array.null_count:
        return chunk_of(kind, array)
    data, begin = array.buffers()[1], array.offset * kind.dtype.itemsize
    return NumberChunk(ItemSpan(np.frombuffer(data, kind.dtype, length, begin), data.address + begin), None)


def chunk_of_chunked(kind: ColumnType, column: Any) -> ColumnChunk:
    """Convert a `pyarrow.ChunkedArray`."""
    parts = tuple(chunk_of(kind, part) for part in column.chunks)
    return parts[0] if len(parts) == 1 else PartedChunk(parts, np.cumsum([0, *map(len, column.chunks)]))


def row_count(kind: ColumnType | None, chunk: ColumnChunk) -> int:
    """Number of rows in a chunk; `kind` is None for bytes."""
    if isinstance(chunk, NumberChunk):
        size = prod(kind.shape) if isinstance(kind, NumberType) else 1
        return len(chunk.items.array) // size if size else _UNLIMITED
    if isinstance(chunk, StructChunk):
        fields = kind.fields if isinstance(kind, StructType) else ()
        counts = (row_count(each, part) for (_, each), part in zip(fields, chunk.fields, strict=True))
        return min(counts, default=_UNLIMITED)
    if isinstance(chunk, PartedChunk):
        return int(chunk.bounds[-1])
    return len(chunk.places.array if isinstance(chunk, DictionaryChunk) else chunk.offsets.array[1:])


def null_chunk(kind: ColumnType, rows: int) -> ColumnChunk:
    """A chunk of `rows` nulls."""
    missing = items(np.ones(rows, np.bool_))
    if isinstance(kind, StructType):
        return StructChunk(tuple(null_chunk(each, rows) for _, each in kind.fields))
    if isinstance(kind, NumberType):
        count = rows * prod(kind.shape)
        return NumberChunk(items(np.zeros(count, kind.dtype)), items(np.ones(count, np.bool_)))
    child = null_chunk(kind.item, 0) if isinstance(kind, ListType) else NumberChunk(items(np.empty(0, np.uint8)), None)
    return RaggedChunk(items(np.zeros(rows + 1, np.int32)), child, missing)


def chunk_of(kind: ColumnType, array: Any) -> ColumnChunk:
    """Convert an Arrow array; the chunk keeps references to its buffers."""
    array = _plain(array)
    if str(array.type) == "null":
        return null_chunk(kind, len(array))
    if hasattr(array, "dictionary"):
        return _dictionary(kind, array)
    if isinstance(kind, StructType):
        # flatten() applies the nulls of the struct to its fields. A chunk has no nulls of its own.
        return StructChunk(tuple(chunk_of(each, part) for (_, each), part in _fields(kind, array)))
    if isinstance(kind, TextType):
        return _text(array)
    if isinstance(kind, ListType):
        return _lists(kind, array)
    return _numbers(kind, array)


def _fields(kind: StructType, array: Any) -> zip[tuple[tuple[str, ColumnType], Any]]:
    return zip(kind.fields, array.flatten(), strict=True)


def _plain(array: Any) -> Any:
    """Unwrap extensions and views, and turn runs into a dictionary."""
    if hasattr(array, "storage"):
        return _plain(array.storage)
    if hasattr(array, "run_ends"):
        rows = np.arange(array.offset, array.offset + len(array))
        runs = np.searchsorted(array.run_ends.to_numpy(), rows, side="right").astype(np.int32)
        return pyarrow("a table").DictionaryArray.from_arrays(runs, array.values)
    if hasattr(array, "sizes"):
        return _in_order(array)
    target = _PLAIN.get(str(array.type))
    return array if target is None else array.cast(target)


def _in_order(array: Any) -> Any:
    """Convert a list view to a list, whose rows are in order."""
    arrow = pyarrow("a table")
    sizes = array.sizes.to_numpy().astype(np.int64)
    missing = _missing(array)
    if missing is not None:
        sizes[missing] = 0  # a null may have a size, but flatten() leaves out its items
    mask = None if missing is None else arrow.array(missing)
    return arrow.LargeListArray.from_arrays(np.cumsum([0, *sizes]), array.flatten(), mask=mask)


def _dictionary(kind: ColumnType, array: Any) -> DictionaryChunk:
    dtype, missing = np.dtype(array.indices.type.to_pandas_dtype()), _missing(array.indices)
    places = _items(dtype, array.indices)
    if missing is not None:
        # The code of a null is undefined and may be outside the dictionary. -1 needs a signed dtype.
        signed = np.int64 if dtype == np.uint64 else np.promote_types(dtype, np.int8)
        places = np.where(missing, -1, places.astype(signed, copy=False))
    values = chunk_of(kind, array.dictionary)
    return DictionaryChunk(items(places), values, len(array.dictionary), missing is not None)


def _decode(array: Any, missing: NDArray[np.bool_] | None) -> Any:
    """Resolve dictionary codes to their values.

    Codes below the nulls `missing` become nulls.
    """
    array = _plain(array)
    if not hasattr(array, "dictionary"):
        return array
    codes = array.indices
    if missing is not None:  # below a null, the code is undefined and may be outside the dictionary
        inner = _missing(codes)
        numbers = _items(np.dtype(codes.type.to_pandas_dtype()), codes)
        codes = pyarrow("a table").array(numbers, mask=missing if inner is None else missing | inner)
    return _decode(array.dictionary.take(codes), missing)


def _numbers(kind: NumberType, array: Any) -> NumberChunk:
    rows, missing = len(array), _missing(array)
    while hasattr(array.type, "list_size"):
        size = array.type.list_size
        if missing is not None:
            missing = missing.repeat(size)
        array = _decode(array.values.slice(array.offset * size, len(array) * size), missing)
        inner = _missing(array)
        if inner is not None:
            missing = inner if missing is None else inner | missing
    assert len(array) == rows * prod(kind.shape)
    return NumberChunk(items(_items(kind.dtype, array)), None if missing is None else items(missing))


def _items(dtype: np.dtype[Any], array: Any) -> NDArray[Any]:
    if str(array.type).startswith("decimal"):
        return _decimals(array)
    _, data = array.buffers() if array.type.num_buffers == 2 else (None, None)  # the type `null` has only one
    if data is None:  # no rows, or only nulls
        return np.zeros(len(array), dtype)
    if dtype == np.bool_:
        return _bits(data, array.offset, len(array))
    return np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)


def _decimals(array: Any) -> NDArray[np.float64]:
    """The float64 nearest to each decimal; undefined for nulls."""
    # Arrow's own cast to float64 multiplies by a power of ten, which is wrong in the last place for one value in eight.
    kind = array.type
    if kind.precision > _EXACT_DIGITS or not 0 <= kind.scale <= _EXACT_POWER:
        return np.asarray(array.cast("string").cast("float64").to_numpy(zero_copy_only=False))
    # Both numbers are exact in float64, so only the division rounds.
    step, dtype = (1, "<i4") if kind.bit_width == 32 else (kind.bit_width // 64, "<i8")
    data = array.buffers()[1] if len(array) else b""
    words = np.frombuffer(data, dtype, len(array) * step, array.offset * kind.bit_width // 8)
    return words[::step] / np.float64(10**kind.scale)


def _missing(array: Any) -> NDArray[np.bool_] | None:
    """A mask of the nulls; None if there are none."""
    if array.null_count == 0:
        return None
    valid = array.buffers()[0]
    if valid is None:  # the type `null` inside a dictionary or a list
        return np.ones(len(array), np.bool_)
    return ~_bits(valid, array.offset, len(array))


def _bits(buffer: Any, offset: int, length: int) -> NDArray[np.bool_]:
    first, shift = divmod(offset, 8)
    packed = np.frombuffer(buffer, np.uint8, (shift + length + 7) // 8, first)
    return np.unpackbits(packed, count=shift + length, bitorder="little")[shift:].view(np.bool_)


def _text(array: Any) -> RaggedChunk:
    if str(array.type).startswith("fixed_size_binary"):
        array = array.cast("large_binary")
    _, offsets, data = array.buffers()
    characters = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return RaggedChunk(_offsets(array, offsets), NumberChunk(items(characters), None), _row_missing(array))


def _lists(kind: ListType, array: Any) -> RaggedChunk:
    if hasattr(array.type, "list_size"):  # fixed length, but items are not numbers
        array = array.cast(pyarrow("a table").large_list(array.type.value_type))
    # The tensor of a row is one slice of the values, so the values must be contiguous numbers, not codes.
    values = _decode(array.values, None) if isinstance(kind.item, NumberType) else array.values
    return RaggedChunk(_offsets(array, array.buffers()[1]), chunk_of(kind.item, values), _row_missing(array))


def _offsets(array: Any, buffer: Any) -> ItemSpan:
    dtype = np.dtype(np.int64 if str(array.type).startswith("large_") else np.int32)
    if buffer is None or not len(array):
        return items(np.zeros(len(array) + 1, dtype))
    return items(np.frombuffer(buffer, dtype, len(array) + 1, array.offset * dtype.itemsize))


def _row_missing(array: Any) -> ItemSpan | None:
    missing = _missing(array)
    return None if missing is None else items(missing)
