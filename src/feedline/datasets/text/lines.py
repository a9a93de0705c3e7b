"""Lines of text files and JSON lines, with random access."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from feedline.core.dataset import TransformFunction
from feedline.core.paths import Pathlike
from feedline.core.sample_transform import SampleTransform
from feedline.core.tensors import normalize_index
from feedline.datasets.base import Record, RecordFiles
from feedline.datasets.formats import FORMATS
from feedline.datasets.indexes import IndexRecipe
from feedline.datasets.paths import Paths, find
from feedline.datasets.text.line_index import bounds_match, filled_line_bounds, line_bounds
from feedline.datasets.text.plain_text import plain_text
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache
from feedline.stores.files import FileSet

MAX_RECORD_NBYTES = 1 << 26
"""Default size limit of a record. A longer one suggests a file without lines, or a missing quote."""


_COUNTED_NBYTES = 1 << 24
"""Number of bytes in which line ends are counted at a time."""


_RECORD_SEPARATOR = "\x1e"


Options = Mapping[str, Any] | None


LINES = IndexRecipe(lambda name: f".{name}.lines-index", line_bounds, bounds_match)


FILLED_LINES = IndexRecipe(lambda name: f".{name}.jsonl-index", filled_line_bounds, bounds_match)


class TextReading(NamedTuple):
    """Reading options of text files; `max_record_nbytes` limits the size of a record."""

    index_dir: Pathlike | None
    encoding: str
    max_record_nbytes: int


def text_reading(index_dir: Pathlike | None, encoding: str, max_record_nbytes: int) -> TextReading:
    """Check reading options. ArgumentError if one is invalid."""
    if max_record_nbytes < 1:
        raise ArgumentError(f"max_record_nbytes={max_record_nbytes} must be at least 1")
    return TextReading(index_dir, encoding, max_record_nbytes)


def check_columns(columns: object) -> None:
    """Raise ArgumentError for a single name."""
    # A str would count as a sequence of names, its letters.
    if isinstance(columns, str):
        raise ArgumentError(f"columns={columns!r}: pass a list of names, such as [{columns!r}]")


def describe_undecodable(encoding: str, error: UnicodeDecodeError) -> str:
    """Describe bytes that are invalid in an encoding, with a remedy."""
    return f"is not {encoding.upper()} ({error}); if it has another encoding, pass it, such as encoding='cp1252'"


class TextRecords(RecordFiles):
    """Base of datasets of texts.

    A subclass gives the index recipe and converts texts.

    The index of a file takes 16 bytes per record. It is written when the file is first opened, next to the file or into
    the folder `index_dir`, and again when the size or modification time of the file has changed.
    """

    def __init__(
        self, files: FileSet, recipe: IndexRecipe, options: TextReading, transform: TransformFunction | None
    ) -> None:
        super().__init__(files, recipe, options.index_dir)
        self._step = SampleTransform(transform)
        self._encoding, self._max_record_nbytes = options.encoding, options.max_record_nbytes

    def address(self, index: int) -> tuple[str, str]:
        """The file of sample `index`, and its position there: `"line 7"`.

        For objects of stores, the position is the byte at which the line begins.
        """
        file, at = self._at(normalize_index(index, len(self), type(self).__name__))
        return self.paths[file], self._line(file, at)

    def _value(self, text: str, file: int, at: int) -> Any:
        """Convert a text to a sample, before the transform.

        `file` and `at` are the numbers of the file and of the record there, for `_describe`.
        """
        raise NotImplementedError

    def _span(self, shard: int, row: int) -> tuple[int, int]:
        start, stop = super()._span(shard, row)
        if stop - start > self._max_record_nbytes:
            raise SampleError(
                f"{self._describe(shard, row)} has {stop - start:,} bytes, and max_record_nbytes= allows"
                f" {self._max_record_nbytes:,}; raise the limit unless the file is damaged"
            )
        return start, stop

    def _decode_record(self, record: Record, row: int | None) -> Any:
        try:
            text = str(record.data, self._encoding)
        except UnicodeDecodeError as error:
            position = self._describe(record.shard, record.row)
            raise SampleError(f"{position} {describe_undecodable(self._encoding, error)}") from error
        return self._step(self._value(text, record.shard, record.row), row)

    def _describe(self, file: int, at: int) -> str:
        return f"{self.paths[file]}, {self._line(file, at)},"

    def _line(self, file: int, at: int) -> str:
        content, start = self._files[file], int(self._bounds[file]["starts"][at])
        data = content.data
        if data is None:  # a count of its lines would read the object from the beginning
            return f"the line at byte {start}"
        counted = range(0, start, _COUNTED_NBYTES)
        ends = sum(bytes(data[begin : min(begin + _COUNTED_NBYTES, start)]).count(b"\n") for begin in counted)
        return f"line {ends + 1}"


class Lines(TextRecords):
    """The lines of text files as `str`, without line ends.

    `paths` is a path or URL, a folder, a pattern, or a list of these; `inside` is the pattern of files in a folder.
    Empty lines are samples. Text after the last line end is a sample if it is not empty. A line of more than
    `max_record_nbytes` bytes raises SampleError. Objects of stores are cached in the folder `cache`, if given;
    `options` are passed to `open_store`.

    Files that end in `.gz`, `.bz2`, `.xz` or `.zst` are decompressed once, into `cache` or the user's cache folder.
    Files whose `encoding` does not end lines as ASCII does, such as "utf-16", are converted in the same way. The
    positions of the lines are kept in `index_dir`. `transform(line)` or `transform(line, rng)` is applied to each line.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        transform: TransformFunction | None = None,
        inside: str = FORMATS["lines"].pattern,
        encoding: str = "utf-8",
        max_record_nbytes: int = MAX_RECORD_NBYTES,
        index_dir: Pathlike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Options = None,
    ) -> None:
        files, encoding = plain_text(find(paths, inside, cache=cache, options=options), encoding, cache)
        super().__init__(files, LINES, text_reading(index_dir, encoding, max_record_nbytes), transform)

    def _value(self, text: str, file: int, at: int) -> Any:  # noqa: ARG002 - a line needs no conversion
        return text


class JSONL(TextRecords):
    """JSON values of files with one value per line.

    Blank lines are skipped. `transform(value)` or `transform(value, rng)` is applied to each value.

    With `columns`, samples are dicts of these keys, and every value has to be an object. Numbers are Python's, which
    default collate turns into int64 and float64. `paths`, `encoding`, `max_record_nbytes`, `index_dir` and compressed
    files are as in `Lines`. Objects of stores are cached in the folder `cache`, if given; `options` are passed to
    `open_store`.

    SampleError names file and line of a value that is not JSON.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        *,
        transform: TransformFunction | None = None,
        encoding: str = "utf-8",
        max_record_nbytes: int = MAX_RECORD_NBYTES,
        index_dir: Pathlike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Options = None,
    ) -> None:
        check_columns(columns)
        found = find(paths, FORMATS["jsonl"].pattern, cache=cache, options=options)
        files, encoding = plain_text(found, encoding, cache)
        super().__init__(files, FILLED_LINES, text_reading(index_dir, encoding, max_record_nbytes), transform)
        self._columns = None if columns is None else tuple(columns)

    def _value(self, text: str, file: int, at: int) -> Any:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            if text.startswith(_RECORD_SEPARATOR):
                raise SampleError(
                    f"{self.paths[file]} is a JSON text sequence (RFC 7464), whose values follow the character RS, not"
                    " one value per line; convert it once: jq --seq -c . OLD | tr -d '\\036' > NEW"
                ) from error
            # A shuffled loader may read any line first. Other damage of the first line is that of a line.
            broken_after = ("[", "{", ",", ":") if at == 0 and text.lstrip()[:1] in ("[", "{") else ("},", "],")
            if text.rstrip().endswith(broken_after):
                raise self._array_error(file) from error
            raise SampleError(
                f"{self._describe(file, at)} is not JSON ({error}); repair the line, or pass on_error='skip' to the"
                " loader"
            ) from error
        if isinstance(value, list) and self.shard_sizes[file] == 1 and any(isinstance(each, dict) for each in value):
            raise self._array_error(file)
        return value if self._columns is None else self._select(value, file, at)

    def _array_error(self, file: int) -> SampleError:
        return SampleError(
            f"{self.paths[file]} is a single JSON value over several lines, or an array of objects, not one value per"
            " line; convert it once, such as with `jq -c '.[]' OLD > NEW`"
        )

    def _select(self, value: Any, file: int, at: int) -> dict[str, Any]:
        assert self._columns is not None
        if not isinstance(value, dict):
            raise SampleError(f"{self._describe(file, at)} is a {type(value).__name__}; columns= needs objects")
        for name in self._columns:
            if name not in value:
                raise SampleError(f"{self._describe(file, at)} has no key {name!r}; it has {', '.join(value)}")
        return {name: value[name] for name in self._columns}
