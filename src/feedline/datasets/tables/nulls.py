"""Fill values for nulls in the columns of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from feedline.datasets.tables.types import ColumnType, ListType, NumberType, StructType, TextType
from feedline.errors import ArgumentError

NullValue = str | bytes | float | list[Any] | None


@dataclass(frozen=True, slots=True)
class Nulls:
    """Policy for nulls: raise an error, or fill them.

    `policy` is "raise", "nan", a fill value, `[]` for lists, a tuple of alternatives, of which the first suitable one
    is used, or a dict of these by column or member of a column (`"image.path"`). An entry for a struct applies to all
    its members that can hold the value.
    """

    policy: Any = "raise"
    given: tuple[Any, ...] = ()
    """Entries of a dict for this column and the structs around it, the innermost first."""

    def within(self, path: str) -> Nulls:
        """The policy for a column, or for a member of this column."""
        if not isinstance(self.policy, Mapping) or path not in self.policy:
            return self
        return Nulls(self.policy, (self.policy[path], *self.given))

    def check(self, kind: StructType) -> None:
        """Raise ArgumentError for unknown columns and for values that do not fit."""
        columns = list(_fillable(kind))
        if not isinstance(self.policy, Mapping):
            _check_fits(self.policy, "no column can", columns)
            return
        for path, policy in self.policy.items():
            named = [(paths, each) for paths, each in columns if path in paths]
            if not named:
                names = dict.fromkeys(name for paths, _ in columns for name in paths)
                raise ArgumentError(f"nulls names the column {path!r}, which is not read; there are {', '.join(names)}")
            _check_fits(policy, f"column {path!r} cannot", named)

    def fill(self, kind: ColumnType) -> NullValue:
        """The fill value for a column; None if nulls raise."""
        value = next((value for value in (_as_fill(kind, each) for each in self._values()) if value is not None), None)
        if value is None and isinstance(kind, TextType) and "raise" not in self.given:
            return kind.absent
        return value

    def problem(self, path: str, kind: ColumnType) -> str:
        """Describe a null without a fill value, with a remedy."""
        unfit = " and ".join(f"{_show(value)} does not fit {_type_name(kind)}" for value in self._values())
        reason = f", and {unfit}" if unfit else ""
        return f"is null{reason}; pass nulls={self._with(path, _example(kind))!r} to fill nulls, or leave such rows out"

    def _values(self) -> list[Any]:
        """Candidate fill values, in the order of preference."""
        given = self.given if isinstance(self.policy, Mapping) else (self.policy,)
        flat = [value for each in given for value in _alternatives(each)]
        # "raise" for a member ends the search: an entry for the struct around the member must not fill its nulls.
        return list(takewhile(lambda value: value != "raise", flat))

    def _with(self, path: str, example: Any) -> Any:
        """The policy extended by a fill value for this column."""
        if isinstance(self.policy, Mapping):
            return {**self.policy, path: _with(self.policy.get(path, "raise"), example)}
        return {path: example} if self.policy == "raise" else _with(self.policy, example)


def _alternatives(policy: Any) -> tuple[Any, ...]:
    return policy if isinstance(policy, tuple) else (policy,)


def _with(policy: Any, example: Any) -> Any:
    return example if policy == "raise" else (*_alternatives(policy), example)


def _check_fits(policy: Any, subject: str, columns: list[tuple[tuple[str, ...], ColumnType]]) -> None:
    if policy == "raise":
        return
    for value in _alternatives(policy):
        if all(_as_fill(kind, value) is None for _, kind in columns):
            kinds: dict[str, str] = {}
            for paths, kind in columns:
                kinds.setdefault(paths[-1], kind.arrow)
            listed = ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
            raise ArgumentError(f"nulls: {subject} hold {value!r}; {listed}")


def _fillable(kind: ColumnType, paths: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], ColumnType]]:
    """Every fillable column and member, with its paths.

    The paths are ordered from the outermost column to the member itself. Items of a list have the paths of the list.
    """
    if isinstance(kind, StructType):
        for name, each in kind.fields:
            if name not in kind.left_out:
                yield from _fillable(each, (*paths, ".".join([*paths[-1:], name])))
        return
    yield paths, kind
    if isinstance(kind, ListType):
        yield from _fillable(kind.item, paths)


def _as_fill(kind: ColumnType, value: Any) -> NullValue:
    """The value for a column of this type; None if invalid."""
    if isinstance(kind, ListType):
        return value if isinstance(value, list) and not value else None
    if isinstance(kind, TextType):
        return value if isinstance(value, bytes if kind.binary else str) and value != "nan" else None
    value = np.nan if isinstance(value, str) and value == "nan" else value
    if not isinstance(kind, NumberType) or not isinstance(value, (int, float)):
        return None
    return value if _fits(value, kind.dtype) else None


def _fits(value: float, dtype: np.dtype[Any]) -> bool:
    if dtype == np.bool_:
        return value in {0, 1}
    if dtype.kind == "f":
        return not float(np.finfo(dtype).max) < abs(value) < np.inf
    bounds = np.iinfo(dtype)
    return value == value // 1 and bounds.min <= value <= bounds.max


def _example(kind: ColumnType) -> Any:
    """A value that fits a column of this type."""
    if isinstance(kind, ListType):
        return []
    if isinstance(kind, TextType):
        return b"" if kind.binary else ""
    return "nan" if isinstance(kind, NumberType) and kind.dtype.kind == "f" else 0


def _type_name(kind: ColumnType) -> str:
    if isinstance(kind, NumberType):
        return kind.counts or str(kind.dtype)
    return "list" if isinstance(kind, ListType) else "bytes" if isinstance(kind, TextType) and kind.binary else "text"


def _show(value: Any) -> str:
    return "NaN" if isinstance(value, str) and value == "nan" else repr(value)
