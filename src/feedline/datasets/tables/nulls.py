"""What stands for missing values in the columns of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from feedline.datasets.tables.types import ColumnType, ListType, NumberType, StructType, TextType
from feedline.errors import ArgumentError

Fill = str | bytes | float | list[Any] | None


@dataclass(frozen=True, slots=True)
class Nulls:
    """What stands for missing values: "raise", "nan", a value, `[]` for lists, or a tuple of which the first that fits.

    Or a dict of these by the names of columns, and of members of columns (`"image.path"`); what is given for a struct
    is for all in it that can hold it.
    """

    policy: Any = "raise"
    given: tuple[Any, ...] = ()
    """What a dict has for this column, and for those that it is a member of, nearest first."""

    def within(self, path: str) -> Nulls:
        """The same for a column of this table, or a member of this column."""
        if not isinstance(self.policy, Mapping) or path not in self.policy:
            return self
        return Nulls(self.policy, (self.policy[path], *self.given))

    def check(self, kind: StructType) -> None:
        """Raise `ArgumentError` for what no column can hold, or not the one that it is given for."""
        there = list(_fillable(kind))
        if not isinstance(self.policy, Mapping):
            _check(self.policy, "no column can", there)
            return
        for path, policy in self.policy.items():
            meant = [(paths, each) for paths, each in there if path in paths]
            if not meant:
                names = dict.fromkeys(name for paths, _ in there for name in paths)
                raise ArgumentError(f"nulls names the column {path!r}; there are {', '.join(names)}")
            _check(policy, f"column {path!r} cannot", meant)

    def fill(self, kind: ColumnType) -> Fill:
        """The value for missing ones in a column of this kind; None if they raise."""
        found = next((value for value in (_filling(kind, each) for each in self._values()) if value is not None), None)
        if found is None and isinstance(kind, TextType) and "raise" not in self.given:
            return kind.absent
        return found

    def problem(self, path: str, kind: ColumnType) -> str:
        """What to say of a null that nothing stands for."""
        unfit = " and ".join(f"{_said(value)} is no {_called(kind)}" for value in self._values())
        reason = f", and {unfit}" if unfit else ""
        return (
            f"is null{reason}; give nulls={self._with(path, _example(kind))!r} to fill such values, or leave them out"
        )

    def _values(self) -> list[Any]:
        """What may stand for missing values here, in the order in which it is tried."""
        given = self.given if isinstance(self.policy, Mapping) else (self.policy,)
        flat = [value for each in given for value in _alternatives(each)]
        return list(takewhile(lambda value: value != "raise", flat))

    def _with(self, path: str, example: Any) -> Any:
        """The policy, in which this stands for the missing values of this column, too."""
        if isinstance(self.policy, Mapping):
            return {**self.policy, path: _with(self.policy.get(path, "raise"), example)}
        return {path: example} if self.policy == "raise" else _with(self.policy, example)


def _alternatives(policy: Any) -> tuple[Any, ...]:
    return policy if isinstance(policy, tuple) else (policy,)


def _with(policy: Any, example: Any) -> Any:
    return example if policy == "raise" else (*_alternatives(policy), example)


def _check(policy: Any, nobody: str, there: list[tuple[tuple[str, ...], ColumnType]]) -> None:
    if policy == "raise":
        return
    for value in _alternatives(policy):
        if all(_filling(kind, value) is None for _, kind in there):
            kinds: dict[str, str] = {}
            for paths, kind in there:
                kinds.setdefault(paths[-1], kind.arrow)
            listed = ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
            raise ArgumentError(f"nulls: {nobody} hold {value!r}; {listed}")


def _fillable(kind: ColumnType, paths: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], ColumnType]]:
    """What may be null, with its path behind those of what it is a member of; items have the path of their list."""
    if isinstance(kind, StructType):
        for name, each in kind.fields:
            if name not in kind.left_out:
                yield from _fillable(each, (*paths, ".".join([*paths[-1:], name])))
        return
    yield paths, kind
    if isinstance(kind, ListType):
        yield from _fillable(kind.item, paths)


def _filling(kind: ColumnType, value: Any) -> Fill:
    """The value if the kind can hold it."""
    if isinstance(kind, ListType):
        return value if isinstance(value, list) and not value else None
    if isinstance(kind, TextType):
        return value if isinstance(value, bytes if kind.binary else str) and value != "nan" else None
    value = np.nan if isinstance(value, str) and value == "nan" else value
    if not isinstance(kind, NumberType) or not isinstance(value, (int, float)):
        return None
    return value if kind.dtype.kind == "f" or _fits(value, kind.dtype) else None


def _fits(value: float, dtype: np.dtype[Any]) -> bool:
    if dtype == np.bool_:
        return value in {0, 1}
    bounds = np.iinfo(dtype)
    return value == value // 1 and bounds.min <= value <= bounds.max


def _example(kind: ColumnType) -> Any:
    """A value that this kind can hold."""
    if isinstance(kind, ListType):
        return []
    if isinstance(kind, TextType):
        return b"" if kind.binary else ""
    return "nan" if isinstance(kind, NumberType) and kind.dtype.kind == "f" else 0


def _called(kind: ColumnType) -> str:
    if isinstance(kind, NumberType):
        return kind.counts or str(kind.dtype)
    return "list" if isinstance(kind, ListType) else "bytes" if isinstance(kind, TextType) and kind.binary else "text"


def _said(value: Any) -> str:
    return "NaN" if isinstance(value, str) and value == "nan" else repr(value)
