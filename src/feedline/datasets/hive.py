"""Columns that are written into paths: each file in `year=2024/kind=a/` has these two values in every row."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import unquote

from feedline.datasets.kinds import pyarrow
from feedline.errors import SampleError
from feedline.stores.addresses import scheme_of

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
        if scheme_of(each) == "file" and not os.path.isabs(path):  # noqa: PTH117 - a text, and not opened
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
