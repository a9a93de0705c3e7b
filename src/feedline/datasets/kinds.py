"""What the columns of a table become: Arrow types told apart by the tensors, texts, lists and dicts they give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from feedline import extras
from feedline.errors import ArgumentError, SampleError


@dataclass(frozen=True, slots=True)
class Numbers:
    """A tensor of `shape` for each row; `()` is a single number. Times are the integers that Arrow stores."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """A `str` for each row, or `bytes` where `binary`."""

    binary: bool = False


@dataclass(frozen=True, slots=True)
class Lists:
    """Any number of items for each row: one tensor if they are numbers, else a list."""

    item: Kind


@dataclass(frozen=True, slots=True)
class Struct:
    """A dict for each row."""

    fields: tuple[tuple[str, Kind], ...]


Kind = Numbers | Text | Lists | Struct

_TIMES = {
    "date32": np.int32,
    "time32": np.int32,
    "date64": np.int64,
    "time64": np.int64,
    "timestamp": np.int64,
    "duration": np.int64,
}


def pyarrow(what: str) -> Any:
    """The module; MissingExtraError says that `what` needs it."""
    return extras.load("pyarrow", "arrow", what)


def kind_of(arrow_type: Any, column: str) -> Kind:
    """What a column of this Arrow type becomes; ArgumentError names one that becomes nothing."""
    types = pyarrow("a table").types
    if types.is_dictionary(arrow_type):
        return kind_of(arrow_type.value_type, column)
    if types.is_struct(arrow_type):
        fields = [arrow_type.field(i) for i in range(arrow_type.num_fields)]
        return Struct(tuple((field.name, kind_of(field.type, f"{column}.{field.name}")) for field in fields))
    if types.is_list(arrow_type) or types.is_large_list(arrow_type):
        return Lists(kind_of(arrow_type.value_type, column))
    if types.is_fixed_size_list(arrow_type):
        return _fixed_lists(arrow_type, column)
    if hasattr(arrow_type, "storage_type"):
        return _extension(arrow_type, column)
    if _is_text(types, arrow_type):
        return Text()
    if _is_bytes(types, arrow_type):
        return Text(binary=True)
    return _numbers(types, arrow_type, column)


def _is_text(types: Any, arrow_type: Any) -> bool:
    return bool(types.is_string(arrow_type) or types.is_large_string(arrow_type) or types.is_string_view(arrow_type))


def _is_bytes(types: Any, arrow_type: Any) -> bool:
    tests = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    return any(test(arrow_type) for test in tests)


def _fixed_lists(arrow_type: Any, column: str) -> Kind:
    item = kind_of(arrow_type.value_type, column)
    if isinstance(item, Numbers):
        return Numbers(item.dtype, (arrow_type.list_size, *item.shape))
    return Lists(item)


def _extension(arrow_type: Any, column: str) -> Kind:
    """An extension type is read as what it is stored as; a tensor of fixed shape gets that shape."""
    stored = kind_of(arrow_type.storage_type, column)
    if getattr(arrow_type, "extension_name", None) != "arrow.fixed_shape_tensor":
        return stored
    assert isinstance(stored, Numbers)
    permutation = getattr(arrow_type, "permutation", None)
    if permutation is not None and list(permutation) != sorted(permutation):
        raise ArgumentError(f"column {column!r} holds tensors with permuted dimensions; rewrite it in row-major order")
    return Numbers(stored.dtype, tuple(arrow_type.shape))


def _numbers(types: Any, arrow_type: Any, column: str) -> Numbers:
    if types.is_decimal(arrow_type):
        return Numbers(np.dtype(np.float64))
    if types.is_boolean(arrow_type) or types.is_integer(arrow_type) or types.is_floating(arrow_type):
        return Numbers(np.dtype(arrow_type.to_pandas_dtype()))
    stored = _TIMES.get(str(arrow_type).partition("[")[0])
    if stored is None:
        raise ArgumentError(
            f"column {column!r} is of the Arrow type {arrow_type}, of which no tensor, text, list or dict can be made;"
            " leave it out with columns=[...], or cast it before"
        )
    return Numbers(np.dtype(stored))


def kinds_of(schema: Any, columns: Iterable[str] | None, source: str) -> Struct:
    """The kind of a sample: a dict of these columns (None: all); ArgumentError names one that is not there."""
    names = list(schema.names if columns is None else columns)
    for name in names:
        if schema.names.count(name) != 1:
            found = "more than once" if name in schema.names else f"not at all; there are {', '.join(schema.names)}"
            raise ArgumentError(f"column {name!r} is in {source} {found}")
    if not names:
        raise ArgumentError(f"no column is left to read from {source}; it has {', '.join(schema.names) or 'none'}")
    return Struct(tuple((name, kind_of(schema.field(name).type, name)) for name in names))


def refuse_different(kinds: Sequence[Struct], paths: Sequence[str]) -> None:
    """Raise `SampleError` naming both files and the column where files do not have the same columns."""
    for kind, path in zip(kinds, paths, strict=True):
        if [name for name, _ in kind.fields] != [name for name, _ in kinds[0].fields]:
            ours, theirs = ({name for name, _ in each.fields} for each in (kinds[0], kind))
            raise SampleError(
                f"{path} and {paths[0]} do not have the same columns: {', '.join(sorted(ours ^ theirs)) or 'the order'}"
                " differs; name those that all files have with columns=[...]"
            )
        unlike = _difference(kinds[0], kind)
        if unlike is not None:
            name, one, other = unlike
            raise SampleError(
                f"column {name!r} is {one} in {paths[0]}, but {other} in {path}; write one of them again with the"
                " type of the other, or read them as two datasets"
            )


def _difference(expected: Struct, found: Struct) -> tuple[str, Kind, Kind] | None:
    """The first column whose kinds differ, or None; both have the same columns in the same order."""
    for (name, one), (_, other) in zip(expected.fields, found.fields, strict=True):
        if one != other:
            return name, one, other
    return None
