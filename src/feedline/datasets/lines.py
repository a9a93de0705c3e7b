"""`Lines` and `JSONL`: lines of text files by number, found through an index of where each begins and ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from feedline.datasets.arrays import Transform
from feedline.datasets.blob_indexes import Kind, indexes_of
from feedline.datasets.decoding import Step
from feedline.datasets.files import Pathlike
from feedline.datasets.lazily import Lazily
from feedline.datasets.paths import Paths, find
from feedline.datasets.sharded_records import Record, ShardedRecords
from feedline.datasets.sidecars import Columns, SideCar
from feedline.datasets.text_bounds import filled_line_bounds, fit, line_bounds
from feedline.errors import SampleError
from feedline.stores import Cache
from feedline.stores.blobs import Blobs, LocalBlob

_COUNTED_NBYTES = 1 << 24

Options = Mapping[str, Any] | None

LINES = Kind(lambda name: f"{name}.lines-index", line_bounds, fit)
FILLED_LINES = Kind(lambda name: f"{name}.jsonl-index", filled_line_bounds, fit)


class TextRecords(ShardedRecords):
    """Pieces of text files as records; a subclass says where they are, and what a piece becomes.

    The index of a file, 16 bytes a record, is written beside it as a side-car when it is first opened (in the folder
    `index`, where one is given), and again when size or time of the file have changed.
    """

    def __init__(self, blobs: Blobs, kind: Kind, index: Pathlike | None, transform: Transform | None) -> None:
        self.paths = blobs.names
        self._step = Step(transform)
        self._blobs = blobs
        self._indexes = indexes_of(blobs, kind, index)
        super().__init__((each.shapes["starts"][0] for each in self._indexes), blobs)
        self._bounds = Lazily(partial(_bounds, tuple(self._indexes)), len(self._indexes))

    def _value(self, text: str, file: int, at: int) -> Any:
        """The sample that a piece of text is, before the transform; `_where(file, at)` names it."""
        raise NotImplementedError

    def _span(self, shard: int, row: int) -> tuple[int, int]:
        bounds = self._bounds[shard]
        return int(bounds["starts"][row]), int(bounds["stops"][row])

    def _decoded(self, record: Record, row: int | None) -> Any:
        try:
            text = str(record.data, "utf-8")
        except UnicodeDecodeError as error:
            where = self._where(record.shard, record.row)
            raise SampleError(f"{where} is not UTF-8 ({error}); write it again") from error
        return self._step(self._value(text, record.shard, record.row), row)

    def _where(self, file: int, at: int) -> str:
        blob, (start, _) = self._blobs[file], self._span(file, at)
        if not isinstance(blob, LocalBlob):  # to count its lines is to read it
            return f"{blob.name}, the line at byte {start},"
        counted = range(0, start, _COUNTED_NBYTES)
        ends = sum(bytes(blob.data[begin : min(begin + _COUNTED_NBYTES, start)]).count(b"\n") for begin in counted)
        return f"{blob.name}, line {ends + 1},"


def _bounds(indexes: tuple[SideCar, ...], number: int) -> Columns:
    return indexes[number].opened()


class Lines(TextRecords):
    """The lines of UTF-8 text files as `str`, without their ends: a path, a folder, a pattern, or a list of these.

    Empty lines count; what follows the last line end counts if it is not empty. Objects of stores are kept in the
    folder `cache`, if one is given; `options` are those of `open_store`.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        transform: Transform | None = None,
        index: Pathlike | None = None,
        inside: str = "**/*.txt",
        cache: Cache | Pathlike | None = None,
        options: Options = None,
    ) -> None:
        super().__init__(find(paths, inside, cache=cache, options=options), LINES, index, transform)

    def _value(self, text: str, file: int, at: int) -> Any:  # noqa: ARG002 - a line is what it is
        return text


class JSONL(TextRecords):
    """JSON values, one a line, such as dicts; lines with nothing but blanks are left out.

    With `columns`, only these keys of each object. Numbers stay Python's, so that default collate makes int64 and
    float64 of them. Objects of stores are kept in the folder `cache`, if one is given; `options` are those of
    `open_store`.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        *,
        transform: Transform | None = None,
        index: Pathlike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Options = None,
    ) -> None:
        super().__init__(find(paths, "**/*.jsonl", cache=cache, options=options), FILLED_LINES, index, transform)
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
