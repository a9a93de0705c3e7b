"""Partition columns and row filters of Parquet files.

Folders such as `year=2024/kind=a/` add columns to the files below them. `Filters` are applied to these first, then to
the statistics of row groups, and only then to rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import and_, or_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.core import optional
from feedline.datasets.tables.snapshots import PartitionValues
from feedline.datasets.tables.types import pyarrow
from feedline.errors import ArgumentError, SampleError

_NULL = "__HIVE_DEFAULT_PARTITION__"


_ZONE = re.compile(r"(?:Z|[+-]\d\d:?\d\d)$")


_INTEGER = re.compile(r"-?\d{1,18}")


class Partitions:
    """Columns with one value per file, from folders or tables.

    `values` are the texts of each file by column. Columns have the Arrow `types` of a table; columns of folders are
    int64 if all values are integers, else texts.
    """

    def __init__(
        self, names: Sequence[str], values: Sequence[PartitionValues], types: Mapping[str, Any] | None = None
    ) -> None:
        self._files, self._values, self._types = names, values, types or {}
        self._table: Any = None
        self._of_some: dict[str, tuple[Any, Sequence[bool]]] = {}

    def choose(self, stored: Iterable[str], wanted: Iterable[str] | None) -> None:
        """Keep the wanted columns that folders or a table define.

        Columns that files store themselves are kept only if they are partitions of a table. `wanted` is None for all
        columns. SampleError if only some files have a wanted column. Call this method once.
        """
        requested = None if wanted is None else set(wanted)
        available: dict[str, None] = {name: None for values in self._values for name in values}
        # A table has the values of its partitions, whether or not its files store them.
        own = set(stored) - {name for name in self._types if all(name in values for values in self._values)}
        chosen = [name for name in available if name not in own and (requested is None or name in requested)]
        if requested is not None and not requested <= own | available.keys():
            # A requested column does not exist. The error for it lists the columns, so keep the columns of all files.
            common = [name for name in available if all(name in values for values in self._values)]
            chosen = [name for name in common if name not in own]
        for name in chosen:
            self._check_in_all_files(name)
        if chosen:
            columns = {
                name: _column(name, [values[name] for values in self._values], self._types.get(name)) for name in chosen
            }
            self._table = pyarrow("datasets.Parquet").table(columns)
        for name in (own & available.keys() & self._types.keys()) - set(chosen):
            texts = [values.get(name) for values in self._values]
            self._of_some[name] = _column(name, texts, self._types[name]), [name in values for values in self._values]
        self._files, self._values = [], []

    def _check_in_all_files(self, name: str) -> None:
        has = [name in values for values in self._values]
        if not all(has):
            some, other = self._files[has.index(True)], self._files[has.index(False)]
            raise SampleError(
                f"{some} is in a folder {name}=..., but {other} is not, so it has no column {name!r}; choose"
                " columns that all files have with columns=[...], or pass only the files of one layout"
            )

    @property
    def names(self) -> list[str]:
        """The chosen columns."""
        return [] if self._table is None else list(self._table.column_names)

    def extended(self, schema: Any) -> Any:
        """Set the chosen columns in the Arrow schema of a file."""
        for field in () if self._table is None else self._table.schema:
            at = schema.get_field_index(field.name)
            schema = schema.append(field) if at < 0 else schema.set(at, field)
        return schema

    def table(self) -> Any:
        """An Arrow table, one row per file; None without columns."""
        return self._table

    def column(self, name: str, file: int, rows: int) -> Any:
        """The column of a file: an Arrow array of `rows` equal values."""
        return pyarrow("datasets.Parquet").repeat(self._table.column(name)[file], rows)

    def absent(self, name: str, file: int, rows: int) -> Any:
        """Rows of a column that a file does not store.

        They have the value of the file's partition of a table, or are null.
        """
        arrow = pyarrow("datasets.Parquet")
        column, known = self._of_some.get(name, (None, []))
        return arrow.repeat(column[file], rows) if column is not None and known[file] else arrow.nulls(rows)

    def values(self, file: int) -> dict[str, Any]:
        """The values of a file by column; None for null."""
        return {name: self._table.column(name)[file].as_py() for name in self.names}


def _column(name: str, written: Sequence[str | None], kind: Any) -> Any:
    """One value per file; SampleError for an invalid text."""
    arrow = pyarrow("datasets.Parquet")
    texts = [None if text == _NULL else text for text in written]
    if kind is not None:
        return _cast(name, texts, kind)
    if all(_INTEGER.fullmatch(text) for text in texts if text is not None):
        return arrow.array([None if text is None else int(text) for text in texts], arrow.int64())
    return arrow.array(texts, arrow.string())


def _cast(name: str, texts: Sequence[str | None], kind: Any) -> Any:
    arrow = pyarrow("datasets.Parquet")
    if arrow.types.is_timestamp(kind) and kind.tz is not None:  # a time without a zone is in UTC
        texts = [text and (text if _ZONE.search(text) else f"{text}Z") for text in texts]
    try:
        return arrow.array(texts, arrow.string()).cast(kind)
    except arrow.ArrowException as error:
        raise SampleError(
            f"partition column {name!r} cannot be read as {kind} ({error}); leave it out with columns=[...]"
        ) from error


ColumnCondition = tuple[str, str, Any]


class Filters:
    """Row filters in the notation of pyarrow.

    They are a list of (column, operator, value), or a list of such lists. All tuples of a list have to match, and any
    of several lists. Unlike in pyarrow, `== None` matches nulls, and `!= None` everything else.
    """

    def __init__(self, filters: Sequence[Any]) -> None:
        self.given = filters
        """The filters as written by the user, for messages."""
        self._alternatives = _alternatives(filters)
        self.names = sorted({name for all_of in self._alternatives for name, _, _ in all_of})

    def files(self, partitions: Partitions, count: int) -> NDArray[np.bool_]:
        """A mask of files whose partition values may match."""
        candidates = np.zeros(count, np.bool_)
        known = set(partitions.names)
        for all_of in self._alternatives:
            decidable = [predicate for predicate in all_of if predicate[0] in known]
            if not decidable:
                return np.ones(count, np.bool_)
            with _filter_errors("the folders of the files"):
                candidates[_matching_rows(partitions.table(), _expression([decidable]))] = True
        return candidates

    def row_groups(self, path: str, footer: Any, schema: Any, values: dict[str, Any]) -> list[int]:
        """The row groups of a file that may have matching rows.

        This depends on their statistics and on the `values` of the partition columns. `footer` is the end of the file
        from the footer on, `schema` includes the partition columns.
        """
        for name in self.names:
            if name not in schema.names:
                raise ArgumentError(f"filters: {name!r} is a member of a column; only whole columns can be compared")
        dataset = optional.load("pyarrow.dataset", "arrow", "datasets.Parquet")
        source = pyarrow("datasets.Parquet").BufferReader(footer)
        known = _equals(dataset, values) if values else None
        with _filter_errors(path):
            fragment = dataset.ParquetFileFormat().make_fragment(source, partition_expression=known)
            subset = fragment.subset(filter=_expression(self._alternatives), schema=schema)
            return [group.id for group in subset.row_groups]

    def rows(self, path: str, table: Any) -> NDArray[np.int32]:
        """The numbers of the matching rows."""
        with _filter_errors(path):
            return _matching_rows(table, _expression(self._alternatives))


_ROW = "\0row"
"""Name of an added column with row numbers, which no file uses."""


def _alternatives(filters: Any) -> list[list[ColumnCondition]]:
    if not isinstance(filters, Sequence) or isinstance(filters, str) or not filters:
        raise _malformed_error(filters)
    if all(_is_predicate(each) for each in filters):
        return [list(filters)]
    for each in filters:
        if not isinstance(each, Sequence) or isinstance(each, str) or not each:
            raise _malformed_error(each)
        for part in each:
            if not _is_predicate(part):
                raise _malformed_error(part)
    return [list(each) for each in filters]


def _is_predicate(each: Any) -> bool:
    return isinstance(each, Sequence) and not isinstance(each, str) and len(each) == 3 and isinstance(each[0], str)


def _malformed_error(filters: Any) -> ArgumentError:
    return ArgumentError(
        f"filters= takes a list of (column, operator, value) tuples, or a list of such lists; got {filters!r}"
    )


def _expression(alternatives: Sequence[Sequence[ColumnCondition]]) -> Any:
    return reduce(or_, (reduce(and_, map(_condition, all_of)) for all_of in alternatives))


def _condition(predicate: ColumnCondition) -> Any:
    name, operator, value = predicate
    if value is not None:
        parquet = optional.load("pyarrow.parquet", "arrow", "datasets.Parquet")
        try:
            return parquet.filters_to_expression([(name, operator, value)])
        except ValueError as error:
            raise ArgumentError(f"filters: {error}") from error
    field = optional.load("pyarrow.dataset", "arrow", "datasets.Parquet").field(name)
    if operator not in {"=", "==", "!="}:
        raise ArgumentError(
            f"filters: ({name!r}, {operator!r}, None) is invalid: nulls have no order; use == or != with None"
        )
    return field.is_valid() if operator == "!=" else field.is_null()


def _equals(dataset: Any, values: dict[str, Any]) -> Any:
    """A pyarrow expression: every column has its value."""
    expression = None
    for name, value in values.items():
        field = dataset.field(name)
        each = field.is_null() if value is None else field == value
        expression = each if expression is None else expression & each
    return expression


def _matching_rows(table: Any, condition: Any) -> NDArray[np.int32]:
    arrow = pyarrow("datasets.Parquet")
    dataset = optional.load("pyarrow.dataset", "arrow", "datasets.Parquet")
    numbered = table.append_column(_ROW, arrow.array(np.arange(table.num_rows, dtype=np.int32)))
    # Not Table.filter: it copies all columns, and fails for a column that is too large for one copy of Arrow.
    matching = dataset.dataset(numbered).to_table(columns=[_ROW], filter=condition)
    rows: NDArray[np.int32] = matching.column(_ROW).to_numpy()
    return rows


@contextmanager
def _filter_errors(target: str) -> Iterator[None]:
    """Turn pyarrow's comparison errors into an ArgumentError about the filters."""
    arrow = pyarrow("datasets.Parquet")
    try:
        yield
    except (arrow.ArrowNotImplementedError, arrow.ArrowTypeError, arrow.ArrowInvalid) as error:
        raise ArgumentError(
            f"filters cannot be applied to {target}: {error}; use values of the columns' types"
        ) from error
