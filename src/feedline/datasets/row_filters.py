"""Which rows of Parquet files are wanted: found out from paths, then statistics, and only then from the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import and_, or_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline import extras
from feedline.datasets.hive import Partitions
from feedline.datasets.kinds import pyarrow
from feedline.errors import ArgumentError

Predicate = tuple[str, str, Any]


class Filters:
    """pyarrow's filters: (column, operator, value), all of which must hold; or lists of these, one of which must.

    Unlike there, == and != None are true of what is null, and of what is not.
    """

    def __init__(self, filters: Sequence[Any]) -> None:
        self._alternatives = _alternatives(filters)
        self.names = sorted({name for all_of in self._alternatives for name, _, _ in all_of})

    def files(self, partitions: Partitions, count: int) -> NDArray[np.bool_]:
        """Whether a file may have such rows, by its partition columns."""
        found = np.zeros(count, np.bool_)
        known = set(partitions.names)
        for all_of in self._alternatives:
            told = [predicate for predicate in all_of if predicate[0] in known]
            if not told:
                return np.ones(count, np.bool_)
            with _naming("the folders of the files"):
                found[_numbers(partitions.table(), _expression([told]))] = True
        return found

    def row_groups(self, path: str, footer: Any, schema: Any, values: dict[str, Any]) -> list[int]:
        """The row groups of a file in which a row may match, by its statistics and its partition columns' values."""
        for name in self.names:
            if name not in schema.names:
                raise ArgumentError(f"filters: {name!r} is a member of a column; only whole columns can be compared")
        dataset = extras.load("pyarrow.dataset", "arrow", "datasets.Parquet")
        source = pyarrow("datasets.Parquet").BufferReader(footer)
        told = _told(dataset, values) if values else None
        with _naming(path):
            fragment = dataset.ParquetFileFormat().make_fragment(source, partition_expression=told)
            kept = fragment.subset(filter=_expression(self._alternatives), schema=schema)
            return [group.id for group in kept.row_groups]

    def rows(self, path: str, table: Any) -> NDArray[np.int32]:
        """The numbers of the rows that match."""
        with _naming(path):
            return _numbers(table, _expression(self._alternatives))


_ROW = "\0row"


def _alternatives(filters: Any) -> list[list[Predicate]]:
    if not isinstance(filters, Sequence) or isinstance(filters, str) or not filters:
        raise _no_filters(filters)
    if all(_is_predicate(each) for each in filters):
        return [list(filters)]
    for each in filters:
        if not isinstance(each, Sequence) or isinstance(each, str) or not each:
            raise _no_filters(each)
        for part in each:
            if not _is_predicate(part):
                raise _no_filters(part)
    return [list(each) for each in filters]


def _is_predicate(each: Any) -> bool:
    return isinstance(each, Sequence) and not isinstance(each, str) and len(each) == 3 and isinstance(each[0], str)


def _no_filters(each: Any) -> ArgumentError:
    return ArgumentError(f"filters are (column, operator, value), or lists of these; got {each!r}")


def _expression(alternatives: Sequence[Sequence[Predicate]]) -> Any:
    return reduce(or_, (reduce(and_, map(_condition, all_of)) for all_of in alternatives))


def _condition(predicate: Predicate) -> Any:
    name, operator, value = predicate
    if value is not None:
        parquet = extras.load("pyarrow.parquet", "arrow", "datasets.Parquet")
        try:
            return parquet.filters_to_expression([(name, operator, value)])
        except ValueError as error:
            raise ArgumentError(f"filters: {error}") from error
    field = extras.load("pyarrow.dataset", "arrow", "datasets.Parquet").field(name)
    if operator not in {"=", "==", "!="}:
        raise ArgumentError(f"filters: null is neither less nor more: ({name!r}, {operator!r}, None) needs == or !=")
    return field.is_valid() if operator == "!=" else field.is_null()


def _told(dataset: Any, values: dict[str, Any]) -> Any:
    """What is known of every row, as pyarrow's expression."""
    told = None
    for name, value in values.items():
        field = dataset.field(name)
        each = field.is_null() if value is None else field == value
        told = each if told is None else told & each
    return told


def _numbers(table: Any, condition: Any) -> NDArray[np.int32]:
    arrow = pyarrow("datasets.Parquet")
    dataset = extras.load("pyarrow.dataset", "arrow", "datasets.Parquet")
    numbered = table.append_column(_ROW, arrow.array(np.arange(table.num_rows, dtype=np.int32)))
    # Table.filter would copy all columns, of which one may be larger than Arrow can copy at once.
    matching = dataset.dataset(numbered).to_table(columns=[_ROW], filter=condition)
    found: NDArray[np.int32] = matching.column(_ROW).to_numpy()
    return found


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn what pyarrow raises on values that cannot be compared into an error about the filters."""
    arrow = pyarrow("datasets.Parquet")
    try:
        yield
    except (arrow.ArrowNotImplementedError, arrow.ArrowTypeError, arrow.ArrowInvalid) as error:
        raise ArgumentError(
            f"filters cannot be applied to {what}: {error}; give values of the columns' types"
        ) from error
