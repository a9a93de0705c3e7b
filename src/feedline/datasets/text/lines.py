"""`Lines` and `JSONL`: lines of text files by number, found through an index of where each begins and ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from feedline.core.tensors import one_within
from feedline.datasets.arrays.npy import Transform
from feedline.datasets.arrays.npy_layout import Pathlike
from feedline.datasets.base import Record, ShardedRecords
from feedline.datasets.decoding import SampleTransform
from feedline.datasets.formats import FORMATS
from feedline.datasets.indexes import Columns, IndexRecipe, SideCar, indexes_of
from feedline.datasets.paths import Paths, find
from feedline.datasets.text.line_index import filled_line_bounds, fit, line_bounds, line_encoding
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache
from feedline.stores.files import FileSet, LazyList, LocalFile

MOST_NBYTES = 1 << 26
"""What a record may have unless told otherwise: more is rather a file without lines, or a quote that is missing."""


_COUNTED_NBYTES = 1 << 24


Options = Mapping[str, Any] | None


LINES = IndexRecipe(lambda name: f"{name}.lines-index", line_bounds, fit)


FILLED_LINES = IndexRecipe(lambda name: f"{name}.jsonl-index", filled_line_bounds, fit)


class TextReading(NamedTuple):
    """How text files are read: where their indexes lie, what their bytes mean, how many a record may have."""

    index_dir: Pathlike | None
    encoding: str
    most_nbytes: int


def reading(index_dir: Pathlike | None, encoding: str, most_nbytes: int, delimiter: str = ",") -> TextReading:
    """Checked: ArgumentError names what cannot be."""
    if most_nbytes < 1:
        raise ArgumentError(f"most_nbytes={most_nbytes}: a record has at least one byte")
    return TextReading(index_dir, line_encoding(encoding, delimiter), most_nbytes)


def refuse_text(columns: object) -> None:
    """ArgumentError for one name where several are expected: its letters would be taken for them."""
    if isinstance(columns, str):
        raise ArgumentError(f"columns={columns!r}: give a list of names, such as [{columns!r}]")


def not_in(encoding: str, error: UnicodeDecodeError) -> str:
    """What to say of bytes that are none of an encoding."""
    return f"is not {encoding.upper()} ({error}); if it is of another encoding, name that: encoding='cp1252'"


class TextRecords(ShardedRecords):
    """Pieces of text files as records; a subclass says where they are, and what a piece becomes.

    The index of a file, 16 bytes a record, is written beside it as a side-car when it is first opened (in the folder
    `index_dir`, where one is given), and again when size or time of the file have changed.
    """

    def __init__(self, blobs: FileSet, kind: IndexRecipe, how: TextReading, transform: Transform | None) -> None:
        self.paths = blobs.names
        self._step = SampleTransform(transform)
        self._blobs = blobs
        self._encoding, self._most_nbytes = how.encoding, how.most_nbytes
        self._indexes = indexes_of(blobs, kind, how.index_dir)
        super().__init__((each.shapes["starts"][0] for each in self._indexes), blobs)
        self._bounds = LazyList(partial(_bounds, tuple(self._indexes)), len(self._indexes))

    def address(self, index: int) -> tuple[str, str]:
        """The file of sample `index`, and where in it: `"line 7"`. Of an object, the byte where that line begins."""
        file, at = self._at(one_within(index, len(self), type(self).__name__))
        return self._blobs.name(file), self._line(file, at)

    def _value(self, text: str, file: int, at: int) -> Any:
        """The sample that a piece of text is, before the transform; `_where(file, at)` names it."""
        raise NotImplementedError

    def _span(self, shard: int, row: int) -> tuple[int, int]:
        bounds = self._bounds[shard]
        start, stop = int(bounds["starts"][row]), int(bounds["stops"][row])
        if stop - start > self._most_nbytes:
            raise SampleError(
                f"{self._where(shard, row)} has {stop - start:,} bytes, and most_nbytes= allows {self._most_nbytes:,}:"
                " raise it if this is no damage"
            )
        return start, stop

    def _decoded(self, record: Record, row: int | None) -> Any:
        try:
            text = str(record.data, self._encoding)
        except UnicodeDecodeError as error:
            where = self._where(record.shard, record.row)
            raise SampleError(f"{where} {not_in(self._encoding, error)}") from error
        return self._step(self._value(text, record.shard, record.row), row)

    def _where(self, file: int, at: int) -> str:
        return f"{self._blobs.name(file)}, {self._line(file, at)},"

    def _line(self, file: int, at: int) -> str:
        blob, start = self._blobs[file], int(self._bounds[file]["starts"][at])
        if not isinstance(blob, LocalFile):  # to count its lines is to read it
            return f"the line at byte {start}"
        counted = range(0, start, _COUNTED_NBYTES)
        ends = sum(bytes(blob.data[begin : min(begin + _COUNTED_NBYTES, start)]).count(b"\n") for begin in counted)
        return f"line {ends + 1}"


def _bounds(indexes: tuple[SideCar, ...], number: int) -> Columns:
    return indexes[number].open_arrays()


class Lines(TextRecords):
    """The lines of text files as `str`, without their ends: a path, a folder, a pattern, or a list of these.

    Empty lines count; what follows the last line end counts if it is not empty. `encoding` is any in which lines end
    as in ASCII, such as "latin-1" or "gbk", but not UTF-16; a line of more than `most_nbytes` is refused. Objects of
    stores are kept in the folder `cache`, if one is given; `options` are those of `open_store`.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        transform: Transform | None = None,
        index_dir: Pathlike | None = None,
        inside: str = FORMATS["lines"].pattern,
        encoding: str = "utf-8",
        most_nbytes: int = MOST_NBYTES,
        cache: Cache | Pathlike | None = None,
        options: Options = None,
    ) -> None:
        blobs = find(paths, inside, cache=cache, options=options)
        super().__init__(blobs, LINES, reading(index_dir, encoding, most_nbytes), transform)

    def _value(self, text: str, file: int, at: int) -> Any:  # noqa: ARG002 - a line is what it is
        return text


class JSONL(TextRecords):
    """JSON values, one a line, such as dicts; lines with nothing but blanks are left out.

    With `columns`, only these keys of each object. Numbers stay Python's, so that default collate makes int64 and
    float64 of them. `encoding` and `most_nbytes` are as in `Lines`. Objects of stores are kept in the folder `cache`,
    if one is given; `options` are those of `open_store`.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        *,
        transform: Transform | None = None,
        index_dir: Pathlike | None = None,
        encoding: str = "utf-8",
        most_nbytes: int = MOST_NBYTES,
        cache: Cache | Pathlike | None = None,
        options: Options = None,
    ) -> None:
        refuse_text(columns)
        blobs = find(paths, FORMATS["jsonl"].pattern, cache=cache, options=options)
        super().__init__(blobs, FILLED_LINES, reading(index_dir, encoding, most_nbytes), transform)
        self._columns = None if columns is None else tuple(columns)

    def _value(self, text: str, file: int, at: int) -> Any:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SampleError(
                f"{self._where(file, at)} is not JSON ({error}); repair the line, or pass on_error='skip' to the loader"
            ) from error
        return value if self._columns is None else self._chosen(value, file, at)

    def _chosen(self, value: Any, file: int, at: int) -> dict[str, Any]:
        assert self._columns is not None
        if not isinstance(value, dict):
            raise SampleError(f"{self._where(file, at)} is a {type(value).__name__}; columns= needs objects")
        for name in self._columns:
            if name not in value:
                raise SampleError(f"{self._where(file, at)} has no key {name!r}; it has {', '.join(value)}")
        return {name: value[name] for name in self._columns}
