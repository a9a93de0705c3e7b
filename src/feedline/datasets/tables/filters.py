"""Which rows of Parquet files are wanted: found out from paths, then statistics, and only then from the rows.

Columns that are written into paths: each file in `year=2024/kind=a/` has these two values in every row.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import and_, or_
from typing import Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from feedline.core import optional
from feedline.datasets.tables.types import pyarrow
from feedline.errors import ArgumentError, SampleError
from feedline.stores.urls import is_local

_NULL = "__HIVE_DEFAULT_PARTITION__"


_INTEGER = re.compile(r"-?\d{1,18}")


class Partitions:
    """The columns that folders named `name=value` give to files: 64-bit integers where all values are, else texts.

    Folders count below what was given; of a file or a pattern that was given, all that it names.
    """

    def __init__(self, names: Sequence[str], given: Iterable[str]) -> None:
        bases = _bases(given)
        self._files = names
        self._written = [_values(_below(name, bases)) if "=" in name else {} for name in names]
        self._table: Any = None

    def choose(self, stored: Iterable[str], wanted: Iterable[str] | None) -> None:
        """Leave out what the files store themselves, and what is not wanted (None: nothing).

        SampleError names a file that lies in no folder of a wanted name while another does.
        """
        asked = None if wanted is None else set(wanted)
        found: dict[str, None] = {name: None for written in self._written for name in written}
        own = set(stored)
        kept = [name for name in found if name not in own and (asked is None or name in asked)]
        if asked is not None and not asked <= own | found.keys():
            common = [name for name in found if all(name in written for written in self._written)]
            kept = [name for name in common if name not in own]  # whoever names what is not there is told what is
        for name in kept:
            self._refuse_lacking(name)
        if kept:
            columns = {name: _column([written[name] for written in self._written]) for name in kept}
            self._table = pyarrow("datasets.Parquet").table(columns)
        self._files, self._written = [], []

    def _refuse_lacking(self, name: str) -> None:
        has = [name in written for written in self._written]
        if not all(has):
            some, other = self._files[has.index(True)], self._files[has.index(False)]
            raise SampleError(
                f"{some} lies in a folder {name}=..., and {other} does not: is the column {name!r} wanted? Name those"
                " that all files have with columns=[...], or give the files of one kind only"
            )

    @property
    def names(self) -> list[str]:
        """Of the columns that were chosen."""
        return [] if self._table is None else list(self._table.column_names)

    def extended(self, schema: Any) -> Any:
        """The Arrow schema of a file, and behind its own columns these."""
        for field in () if self._table is None else self._table.schema:
            schema = schema.append(field)
        return schema

    def table(self) -> Any:
        """One row for each file."""
        return self._table

    def column(self, name: str, file: int, rows: int) -> Any:
        """The values of so many rows of a file, as an Arrow array."""
        return pyarrow("datasets.Parquet").repeat(self._table.column(name)[file], rows)

    def values(self, file: int) -> dict[str, Any]:
        """By name; None for null."""
        return {name: self._table.column(name)[file].as_py() for name in self.names}


def _bases(given: Iterable[str]) -> list[str]:
    """What paths begin with whose folders do not count, the longest first."""
    found = set()
    for each in given:
        path = each.removeprefix("file://")
        if is_local(each) and not os.path.isabs(path):  # noqa: PTH117 - a text, and not opened
            found.add(os.path.join(os.getcwd(), ""))  # noqa: PTH109, PTH118
            path = os.path.abspath(path)  # noqa: PTH100
        found.add(f"{path.rstrip('/')}/")
    return sorted(found, key=len, reverse=True)


def _below(name: str, bases: Sequence[str]) -> str:
    return next((name[len(base) :] for base in bases if name.startswith(base)), name)


def _values(path: str) -> dict[str, str]:
    parts = (part.partition("=") for part in path.split("/")[:-1])
    return {unquote(name): unquote(value) for name, mark, value in parts if mark and name}


def _column(written: Sequence[str]) -> Any:
    arrow = pyarrow("datasets.Parquet")
    texts = [None if text == _NULL else text for text in written]
    if all(_INTEGER.fullmatch(text) for text in texts if text is not None):
        return arrow.array([None if text is None else int(text) for text in texts], arrow.int64())
    return arrow.array(texts, arrow.string())


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
        dataset = optional.load("pyarrow.dataset", "arrow", "datasets.Parquet")
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
        parquet = optional.load("pyarrow.parquet", "arrow", "datasets.Parquet")
        try:
            return parquet.filters_to_expression([(name, operator, value)])
        except ValueError as error:
            raise ArgumentError(f"filters: {error}") from error
    field = optional.load("pyarrow.dataset", "arrow", "datasets.Parquet").field(name)
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
    dataset = optional.load("pyarrow.dataset", "arrow", "datasets.Parquet")
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
