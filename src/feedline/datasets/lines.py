"""`Lines` and `JSONL`: lines of text files by number, found through an index of where each begins and ends."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.arrays import Transform
from feedline.datasets.decoding import Step
from feedline.datasets.files import Pathlike
from feedline.datasets.once import OnceCache
from feedline.datasets.paths import Paths, matching, refuse_changed, version
from feedline.datasets.records import Records
from feedline.datasets.sidecars import Columns, SideCar
from feedline.errors import SampleError
from feedline.per_process import PerProcess

_BLOCK_NBYTES = 1 << 24
_BOM = b"\xef\xbb\xbf"

_MOST_OPEN = 256

Bounds = Callable[[str], Columns]


class _Open(NamedTuple):
    """The content of a file; counts as one, because a process may have only so many files open."""

    content: memoryview
    nbytes: int = 1


class TextRecords(Records):
    """Pieces of text files as records; a subclass says where they are, and what a piece becomes.

    The index of a file, 16 bytes a record, is written beside it as a side-car when it is first opened (in the folder
    `index`, where one is given), and again when size or time of the file have changed.
    """

    def __init__(
        self, paths: Sequence[str], bounds: Bounds, kind: str, index: Pathlike | None, transform: Transform | None
    ) -> None:
        self.paths = list(paths)
        self._step = Step(transform)
        self._versions = [version(path) for path in self.paths]
        self._indices = [SideCar(_beside(path, kind, index), path, partial(bounds, path)) for path in self.paths]
        sizes = [len(each.arrays["starts"]) for each in self._indices]
        self.shard_sizes: NDArray[np.int64] = np.array(sizes, np.int64)
        self._first = np.array([0, *accumulate(sizes)], np.int64)
        self._opened: PerProcess[OnceCache[int, _Open]] = PerProcess(partial(OnceCache, _MOST_OPEN))

    def _value(self, text: str, file: int, at: int) -> Any:
        """The sample that a piece of text is, before the transform; `_where(file, at)` names it."""
        raise NotImplementedError

    def __len__(self) -> int:
        return int(self._first[-1])

    def _sample(self, at: int, row: int | None) -> Any:
        file = int(np.searchsorted(self._first, at, side="right")) - 1
        local = at - int(self._first[file])
        bounds = self._indices[file].arrays
        piece = self._content(file)[int(bounds["starts"][local]) : int(bounds["stops"][local])]
        try:
            text = str(piece, "utf-8")
        except UnicodeDecodeError as error:
            raise SampleError(f"{self._where(file, local)} is not UTF-8 ({error}); write it again") from error
        return self._step(self._value(text, file, local), row)

    def _content(self, file: int) -> memoryview:
        return self._opened().get(file, partial(self._open, file)).content

    def _open(self, file: int) -> _Open:
        refuse_changed(self.paths[file], self._versions[file], version(self.paths[file]))
        return _Open(mapped(self.paths[file]))

    def _where(self, file: int, at: int) -> str:
        start = int(self._indices[file].arrays["starts"][at])
        line = sum(bytes(block).count(b"\n") for block in blocks(self._content(file)[:start])) + 1
        return f"{self.paths[file]}, line {line},"


class Lines(TextRecords):
    """The lines of UTF-8 text files as `str`, without their ends: a path, a folder, a pattern, or a list of these.

    Empty lines count; what follows the last line end counts if it is not empty.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        transform: Transform | None = None,
        index: Pathlike | None = None,
        inside: str = "**/*.txt",
    ) -> None:
        super().__init__(matching(paths, inside), line_bounds, "lines", index, transform)

    def _value(self, text: str, file: int, at: int) -> Any:  # noqa: ARG002 - a line is what it is
        return text


class JSONL(TextRecords):
    """JSON values, one a line, such as dicts; lines with nothing but blanks are left out.

    With `columns`, only these keys of each object. Numbers stay Python's, so that default collate makes int64 and
    float64 of them.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        *,
        transform: Transform | None = None,
        index: Pathlike | None = None,
    ) -> None:
        super().__init__(matching(paths, "**/*.jsonl"), filled_line_bounds, "jsonl", index, transform)
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


def mapped(path: str) -> memoryview:
    """The bytes of a file, memory-mapped read-only."""
    if not Path(path).stat().st_size:
        return memoryview(b"")
    view: NDArray[np.uint8] = np.memmap(path, np.uint8, "r").view(np.ndarray)
    return view.data


def blocks(content: memoryview) -> list[memoryview]:
    """The content in pieces that are small enough to work on in memory."""
    return [content[at : at + _BLOCK_NBYTES] for at in range(0, len(content), _BLOCK_NBYTES)]


def line_bounds(path: str) -> Columns:
    """Where each line begins and ends, its line end left out."""
    content = mapped(path)
    found = [np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) for block in blocks(content)]
    ends = np.concatenate([np.empty(0, np.uint64), *(_counted(i, places) for i, places in enumerate(found))])
    starts = np.concatenate([[np.uint64(first_byte(content))], ends + np.uint64(1)])
    stops = np.concatenate([ends, [np.uint64(len(content))]])
    if starts[-1] >= stops[-1]:  # the last line has an end: nothing follows
        starts, stops = starts[:-1], stops[:-1]
    return {"starts": starts, "stops": stops - _carriage_returns(content, starts, stops)}


def _counted(block: int, places: NDArray[np.int64]) -> NDArray[np.uint64]:
    return places.astype(np.uint64) + np.uint64(block * _BLOCK_NBYTES)


def _carriage_returns(content: memoryview, starts: NDArray[np.uint64], stops: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """1 for each line that ends in CR LF."""
    if not len(stops):
        return stops
    last = np.frombuffer(content, np.uint8)[np.maximum(stops, np.uint64(1)) - np.uint64(1)]
    found: NDArray[np.uint64] = ((last == ord("\r")) & (stops > starts)).astype(np.uint64)
    return found


def filled_line_bounds(path: str) -> Columns:
    """As `line_bounds`, without the lines that hold nothing but blanks."""
    bounds, content = line_bounds(path), mapped(path)
    starts, stops = bounds["starts"], bounds["stops"]
    # only short lines can be blank, but for oddities: look at those, and at all that begin with a blank
    first = np.frombuffer(content, np.uint8)[starts] if len(starts) else np.empty(0, np.uint8)
    suspects = np.flatnonzero((starts == stops) | np.isin(first, np.frombuffer(b" \t\r\n", np.uint8)))
    blank = [row for row in suspects.tolist() if not bytes(content[int(starts[row]) : int(stops[row])]).strip()]
    return {name: np.delete(array, blank) for name, array in bounds.items()}


def first_byte(content: memoryview) -> int:
    """Where the text begins: behind the byte order mark, if there is one."""
    return len(_BOM) if content[: len(_BOM)] == _BOM else 0


def _beside(path: str, kind: str, index: Pathlike | None) -> str:
    """Where the side-car of a file goes; in a folder of its own, files of one name are told apart by their paths."""
    name = f"{Path(path).name}.{kind}-index"
    if index is None:
        return str(Path(path).with_name(name))
    return str(Path(os.fspath(index), f"{hashlib.blake2b(path.encode(), digest_size=6).hexdigest()}-{name}"))
