"""What the columns of a table become: Arrow types told apart by the tensors, texts, lists and dicts they give."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from feedline.core import optional
from feedline.errors import ArgumentError, SampleError


@dataclass(frozen=True, slots=True)
class NumberType:
    """A tensor of `shape` for each row; `()` is a single number. Times are the integers that Arrow stores."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    counts: str = ""
    """Of times: their Arrow type, because the same integers of another unit or zone are another time."""
    arrow: str = field(default="", compare=False)
    """The Arrow type, of which some are read alike."""


@dataclass(frozen=True, slots=True)
class TextType:
    """A `str` for each row, or `bytes` where `binary`."""

    binary: bool = False
    absent: str | None = field(default=None, compare=False)
    """What stands for null unless something else is given, where null is nothing out of the ordinary."""
    arrow: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ListType:
    """Any number of items for each row: one tensor if they are numbers, else a list."""

    item: ColumnType
    arrow: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class StructType:
    """A dict for each row, without those of the stored `fields` that are `left_out`."""

    fields: tuple[tuple[str, ColumnType], ...]
    left_out: frozenset[str] = frozenset()
    arrow: str = field(default="", compare=False)


ColumnType = NumberType | TextType | ListType | StructType


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
    return optional.load("pyarrow", "arrow", what)


def kind_of(arrow_type: Any, column: str) -> ColumnType:
    """What a column of this Arrow type becomes; ArgumentError names one that becomes nothing."""
    return replace(_kind_of(arrow_type, column), arrow=str(arrow_type))


def _kind_of(arrow_type: Any, column: str) -> ColumnType:
    types = pyarrow("a table").types
    if types.is_dictionary(arrow_type) or types.is_run_end_encoded(arrow_type):
        return kind_of(arrow_type.value_type, column)
    if types.is_struct(arrow_type):
        fields = [arrow_type.field(i) for i in range(arrow_type.num_fields)]
        return StructType(tuple((field.name, kind_of(field.type, f"{column}.{field.name}")) for field in fields))
    if types.is_map(arrow_type):
        pair = (("key", arrow_type.key_type), ("value", arrow_type.item_type))
        return ListType(StructType(tuple((name, kind_of(each, f"{column}.{name}")) for name, each in pair)))
    if _is_list(types, arrow_type):
        return ListType(kind_of(arrow_type.value_type, column))
    if types.is_fixed_size_list(arrow_type):
        return _fixed_lists(arrow_type, column)
    if hasattr(arrow_type, "storage_type"):
        return _extension(arrow_type, column)
    if _is_text(types, arrow_type) or _is_bytes(types, arrow_type):
        return TextType(binary=_is_bytes(types, arrow_type))
    return _numbers(types, arrow_type, column)


def _is_list(types: Any, arrow_type: Any) -> bool:
    tests = (types.is_list, types.is_large_list, types.is_list_view, types.is_large_list_view)
    return any(test(arrow_type) for test in tests)


def _is_text(types: Any, arrow_type: Any) -> bool:
    return bool(types.is_string(arrow_type) or types.is_large_string(arrow_type) or types.is_string_view(arrow_type))


def _is_bytes(types: Any, arrow_type: Any) -> bool:
    tests = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    return any(test(arrow_type) for test in tests)


def _fixed_lists(arrow_type: Any, column: str) -> ColumnType:
    item = kind_of(arrow_type.value_type, column)
    if isinstance(item, NumberType):
        return replace(item, shape=(arrow_type.list_size, *item.shape))
    return ListType(item)


def _extension(arrow_type: Any, column: str) -> ColumnType:
    """An extension type is read as what it is stored as; a tensor of fixed shape gets that shape."""
    stored = kind_of(arrow_type.storage_type, column)
    if getattr(arrow_type, "extension_name", None) != "arrow.fixed_shape_tensor":
        return stored
    assert isinstance(stored, NumberType)
    permutation = getattr(arrow_type, "permutation", None)
    if permutation is not None and list(permutation) != sorted(permutation):
        raise ArgumentError(f"column {column!r} holds tensors with permuted dimensions; rewrite it in row-major order")
    return replace(stored, shape=tuple(arrow_type.shape))


def _numbers(types: Any, arrow_type: Any, column: str) -> NumberType:
    if types.is_decimal(arrow_type) or types.is_null(arrow_type):  # of nothing but nulls, floats are what pandas makes
        return NumberType(np.dtype(np.float64))
    if types.is_boolean(arrow_type) or types.is_integer(arrow_type) or types.is_floating(arrow_type):
        return NumberType(np.dtype(arrow_type.to_pandas_dtype()))
    stored = _TIMES.get(str(arrow_type).partition("[")[0])
    if stored is None:
        raise ArgumentError(
            f"column {column!r} is of the Arrow type {arrow_type}, of which no tensor, text, list or dict can be made;"
            " leave it out with columns=[...], or cast it before"
        )
    return NumberType(np.dtype(stored), counts=str(arrow_type))


def kinds_of(schema: Any, columns: Iterable[str] | None, source: str) -> StructType:
    """The kind of a sample: a dict of these columns, or members of columns (`"image.bytes"`); None means all.

    ArgumentError names one that is not there.
    """
    asked = _asked(schema.names, schema.names if columns is None else columns, source)
    if not asked:
        raise ArgumentError(f"no column is left to read from {source}; it has {', '.join(schema.names) or 'none'}")
    features = _features(schema)
    found = []
    for name, members in asked.items():
        kind = _with_absent_paths(kind_of(schema.field(name).type, name), features.get(name))
        found.append((name, _narrowed(kind, members, name, source)))
    return StructType(tuple(found))


def _asked(names: Sequence[str], columns: Iterable[str], source: str) -> dict[str, list[str]]:
    """By column, the paths therein that are asked for; "" is the column itself."""
    asked: dict[str, list[str]] = {}
    for column in columns:
        name = _beginning(column, names)
        if name is None or names.count(name) != 1:
            found = f"not at all; there are {', '.join(names)}" if name is None else "more than once"
            raise ArgumentError(f"column {column!r} is in {source} {found}")
        asked.setdefault(name, []).append(column[len(name) + 1 :])
    return asked


def _beginning(path: str, names: Iterable[str]) -> str | None:
    """The name, which may itself have dots, that a path is or begins with."""
    fitting = [name for name in names if path == name or path.startswith(f"{name}.")]
    return max(fitting, key=len, default=None)


def _narrowed(kind: ColumnType, members: Sequence[str], column: str, source: str) -> ColumnType:
    """Without what is on none of these paths."""
    if "" in members:
        return kind
    if isinstance(kind, ListType):
        return replace(kind, item=_narrowed(kind.item, members, column, source))
    fields = dict(kind.fields) if isinstance(kind, StructType) else {}
    asked: dict[str, list[str]] = {}
    for member in members:
        name = _beginning(member, fields)
        if name is None:
            there = ", ".join(f"{column}.{name}" for name in fields) or f"{column}, which has no members"
            raise ArgumentError(f"column {f'{column}.{member}'!r} is in {source} not at all; there are {there}")
        asked.setdefault(name, []).append(member[len(name) + 1 :])
    assert isinstance(kind, StructType)
    narrowed = {name: _narrowed(fields[name], each, f"{column}.{name}", source) for name, each in asked.items()}
    return replace(kind, fields=tuple((fields | narrowed).items()), left_out=frozenset(fields.keys() - asked.keys()))


_WITH_PATHS = {"Image", "Audio", "Video"}
"""Features of `datasets` that are stored as a struct of `bytes` and a `path`, one of which suffices."""


def _features(schema: Any) -> Mapping[str, Any]:
    """What `datasets` has noted of the columns; nothing if another library wrote them."""
    try:
        noted = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return noted if isinstance(noted, Mapping) else {}


def bare(schema: Any) -> Any:
    """The schema without metadata, but for those that `kinds_of` looks into."""
    features = _features(schema)
    return schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})} if features else None)


def _with_absent_paths(kind: ColumnType, feature: Any) -> ColumnType:
    """With "" for paths that are null, if this feature has some."""
    if isinstance(kind, ListType):
        return replace(kind, item=_with_absent_paths(kind.item, feature))
    while isinstance(feature, list) or (isinstance(feature, Mapping) and "feature" in feature and "_type" in feature):
        feature = feature[0] if isinstance(feature, list) else feature["feature"]
    if not isinstance(kind, StructType) or not isinstance(feature, Mapping):
        return kind
    if feature.get("_type") in _WITH_PATHS:
        fields = [(name, _absent(each) if name == "path" else each) for name, each in kind.fields]
    else:
        fields = [(name, _with_absent_paths(each, feature.get(name))) for name, each in kind.fields]
    return replace(kind, fields=tuple(fields))


def _absent(kind: ColumnType) -> ColumnType:
    return replace(kind, absent="") if isinstance(kind, TextType) and not kind.binary else kind


def refuse_different(kinds: Sequence[StructType], paths: Sequence[str]) -> None:
    """Raise `SampleError` naming both files and the column where files do not have the same columns."""
    for kind, path in zip(kinds, paths, strict=True):
        if _names(kind) != _names(kinds[0]):
            ours, theirs = set(_names(kinds[0])), set(_names(kind))
            raise SampleError(
                f"{path} and {paths[0]} do not have the same columns: {', '.join(sorted(ours ^ theirs)) or 'the order'}"
                " differs; name those that all files have with columns=[...]"
            )
        unlike = _difference("", kinds[0], kind)
        if unlike is not None:
            name, one, other = unlike
            raise SampleError(
                f"column {name!r} is {one.arrow} in {paths[0]}, but {other.arrow} in {path}; write one of them again"
                " with the type of the other, or read them as two datasets"
            )


def _names(kind: StructType) -> list[str]:
    return [name for name, _ in kind.fields]


def _difference(path: str, expected: ColumnType, found: ColumnType) -> tuple[str, ColumnType, ColumnType] | None:
    """The path of the first column, or member of one, whose kinds differ, and these; None if all are the same."""
    if isinstance(expected, ListType) and isinstance(found, ListType):
        return _difference(path, expected.item, found.item)
    if isinstance(expected, StructType) and isinstance(found, StructType) and _names(expected) == _names(found):
        for (name, one), (_, other) in zip(expected.fields, found.fields, strict=True):
            unlike = _difference(f"{path}.{name}" if path else name, one, other)
            if unlike is not None:
                return unlike
        return None
    return None if expected == found else (path, expected, found)
