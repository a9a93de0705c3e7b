"""The columns of a query's result, packed: some bytes a row instead of Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.packed_bytes import PackedBytes
from feedline.errors import SampleError


class Column(Protocol):
    """One column; its values are Python's own: int, float, bool, str, bytes or None."""

    def __len__(self) -> int: ...
    def __getitem__(self, at: int) -> Any: ...
    def taken(self, places: NDArray[np.int64]) -> Column: ...
    def order(self) -> NDArray[np.int64]: ...
    def repeated(self) -> int | None: ...
    def parts(self) -> list[NDArray[Any]]: ...


class Numbers:
    """Integers, floats or booleans; `nulls` marks those that are not there."""

    def __init__(self, values: NDArray[Any], nulls: NDArray[np.bool_] | None = None) -> None:
        self.values, self.nulls = values, nulls

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, at: int) -> Any:
        return None if self.nulls is not None and self.nulls[at] else self.values[at].item()

    def taken(self, places: NDArray[np.int64]) -> Numbers:
        """The rows at these places."""
        return Numbers(self.values[places], _taken(self.nulls, places))

    def order(self) -> NDArray[np.int64]:
        """The places of the values from the smallest on."""
        return np.argsort(self.values, kind="stable")

    def repeated(self) -> int | None:
        """The place of a value that is null or that of the place before, once they are in order; None without any."""
        return _first(self.values[1:] == self.values[:-1], self.nulls)

    def parts(self) -> list[NDArray[Any]]:
        """The arrays that it is made of."""
        return [self.values] if self.nulls is None else [self.values, self.nulls]


class Texts:
    """Texts, or bytes; `nulls` marks those that are not there."""

    def __init__(self, values: PackedBytes, is_text: bool, nulls: NDArray[np.bool_] | None = None) -> None:
        self.values, self.is_text, self.nulls = values, is_text, nulls

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, at: int) -> Any:
        if self.nulls is not None and self.nulls[at]:
            return None
        value = self.values[at]
        return value.decode() if self.is_text else value

    def taken(self, places: NDArray[np.int64]) -> Texts:
        """The rows at these places."""
        values = PackedBytes.of(self.values[at] for at in places.tolist())
        return Texts(values, self.is_text, _taken(self.nulls, places))

    def order(self) -> NDArray[np.int64]:
        """The places of the values in the order of their bytes, which for UTF-8 is that of the characters."""
        return np.array(sorted(range(len(self)), key=self.values.__getitem__), np.int64)

    def repeated(self) -> int | None:
        """The place of a value that is null or that of the place before, once they are in order; None without any."""
        same = (self.values[at] == self.values[at + 1] for at in range(len(self) - 1))
        return _first(np.fromiter(same, np.bool_, len(self) - 1), self.nulls)

    def parts(self) -> list[NDArray[Any]]:
        """The arrays that it is made of."""
        arrays: list[NDArray[Any]] = [self.values.offsets, self.values.buffer]
        return arrays if self.nulls is None else [*arrays, self.nulls]


def _taken(nulls: NDArray[np.bool_] | None, places: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    return nulls[places] if nulls is not None and nulls[places].any() else None


def _first(same_as_before: NDArray[np.bool_], nulls: NDArray[np.bool_] | None) -> int | None:
    found = np.flatnonzero(np.append(False, same_as_before) | (False if nulls is None else nulls))
    return int(found[0]) if len(found) else None


def packed(name: str, blocks: Sequence[Sequence[Any]]) -> Column:
    """A column out of its values, which come in blocks; SampleError names one that cannot be held."""
    kinds = [_kind(name, values) for values in blocks]
    kind = _common(name, {kind for kind in kinds if kind})
    nulls = _nulls(blocks)
    if kind in ("text", "bytes"):
        encoded = (_encoded(value) for values in blocks for value in values)
        return Texts(PackedBytes.of(encoded), kind == "text", nulls)
    try:
        pieces = [np.array([0 if value is None else value for value in values], kind) for values in blocks]
    except OverflowError as error:
        raise SampleError(f"column {name!r} of the query holds a number beyond 64 bits ({error}); cast it") from error
    return Numbers(np.concatenate(pieces) if pieces else np.empty(0, np.int64), nulls)


def _kind(name: str, values: Sequence[Any]) -> str:
    """What the values of a block are, "" where all are null."""
    found = {_KINDS.get(type(value), "") for value in values} - {"null"}
    if "" in found:
        odd = next(value for value in values if type(value) not in _KINDS)
        raise SampleError(
            f"column {name!r} of the query holds a {type(odd).__name__}, which is neither a number, a text, bytes nor"
            f" null: cast it in the query, as in CAST({name} AS TEXT)"
        )
    return _common(name, found)


def _common(name: str, kinds: set[str]) -> str:
    if kinds == {"int64", "float64"}:
        return "float64"
    if len(kinds) > 1:
        raise SampleError(
            f"column {name!r} of the query holds {' and '.join(sorted(kinds))}: cast it to one of them in the query"
        )
    return kinds.pop() if kinds else "int64"


def _nulls(blocks: Sequence[Sequence[Any]]) -> NDArray[np.bool_] | None:
    marks = np.fromiter((value is None for values in blocks for value in values), np.bool_)
    return marks if marks.any() else None


def _encoded(value: Any) -> bytes:
    if value is None:
        return b""
    return value.encode() if isinstance(value, str) else bytes(value)


_KINDS = {
    type(None): "null",
    bool: "bool",
    int: "int64",
    float: "float64",
    str: "text",
    bytes: "bytes",
    bytearray: "bytes",
    memoryview: "bytes",
}
