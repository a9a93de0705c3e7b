"""Column types: the tensors, texts, lists and dicts that Arrow types become.

Every type has its Arrow type in `arrow`, for messages only: several Arrow types are read in the same way and compare
equal.
"""

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
    """A tensor of `shape` per row; times are integers as stored."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    counts: str = ""
    """The Arrow type of times. It is compared, because unit and zone determine the meaning of the integers."""
    arrow: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class TextType:
    """A `str` for each row, or `bytes` where `binary`."""

    binary: bool = False
    absent: str | None = field(default=None, compare=False)
    """Default fill value of a column where nulls are normal; None if nulls raise."""
    arrow: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ListType:
    """Items of variable number: a tensor of numbers, or a list."""

    item: ColumnType
    arrow: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class StructType:
    """A dict for each row: the stored `fields` except those `left_out`."""

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
    """Import pyarrow. MissingExtraError names `what`, the feature that needs pyarrow."""
    return optional.load("pyarrow", "arrow", what)


def kind_of(arrow_type: Any, column: str) -> ColumnType:
    """The type of a column; ArgumentError if its Arrow type is unsupported."""
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
    """The storage type of an extension type, with a tensor's fixed shape."""
    stored = kind_of(arrow_type.storage_type, column)
    if getattr(arrow_type, "extension_name", None) != "arrow.fixed_shape_tensor":
        return stored
    assert isinstance(stored, NumberType)
    permutation = getattr(arrow_type, "permutation", None)
    if permutation is not None and list(permutation) != sorted(permutation):
        raise ArgumentError(f"column {column!r} holds tensors with permuted dimensions; rewrite it in row-major order")
    return replace(stored, shape=tuple(arrow_type.shape))


def _numbers(types: Any, arrow_type: Any, column: str) -> NumberType:
    # float64 for decimals, because torch has no decimals. Integers in units of the scale would hide the scale.
    if types.is_decimal(arrow_type) or types.is_null(arrow_type):  # pandas also reads the null type as floats
        return NumberType(np.dtype(np.float64))
    if types.is_boolean(arrow_type) or types.is_integer(arrow_type) or types.is_floating(arrow_type):
        return NumberType(np.dtype(arrow_type.to_pandas_dtype()))
    stored = _TIMES.get(str(arrow_type).partition("[")[0])
    if stored is None:
        raise ArgumentError(
            f"column {column!r} has the Arrow type {arrow_type}, which cannot become a tensor, text, list or dict;"
            " leave it out with columns=[...], or cast it first"
        )
    return NumberType(np.dtype(stored), counts=str(arrow_type))


def kinds_of(schema: Any, columns: Iterable[str] | None, source: str) -> StructType:
    """The type of a sample with these columns of a schema.

    `columns` may name members of columns (`"image.bytes"`); None means all columns. `source` is the file, for errors.
    ArgumentError for an unknown, ambiguous or unsupported column; SampleError for a damaged schema.
    """
    try:
        return _kinds_of(schema, columns, source)
    except UnicodeDecodeError as error:  # pyarrow decodes names on access
        raise SampleError(f"{source} is damaged: text of its schema is not UTF-8 ({error}); write it again") from error


def _kinds_of(schema: Any, columns: Iterable[str] | None, source: str) -> StructType:
    chosen = _members_by_column(schema.names, schema.names if columns is None else columns, source)
    if not chosen:
        raise ArgumentError(f"no column is left to read from {source}; it has {', '.join(schema.names) or 'none'}")
    features = _features(schema)
    fields = []
    for name, members in chosen.items():
        kind = _with_absent_paths(kind_of(schema.field(name).type, name), features.get(name))
        fields.append((name, _select_members(kind, members, name, source)))
    return StructType(tuple(fields))


def _members_by_column(names: Sequence[str], columns: Iterable[str], source: str) -> dict[str, list[str]]:
    """The requested member paths of each column; "" is the whole column."""
    chosen: dict[str, list[str]] = {}
    for column in columns:
        name = _longest_prefix(column, names)
        if name is None:
            raise ArgumentError(f"column {column!r} is not in {source}; there are {', '.join(names)}")
        if names.count(name) != 1:
            raise ArgumentError(f"column {column!r} is in {source} more than once")
        chosen.setdefault(name, []).append(column[len(name) + 1 :])
    return chosen


def _longest_prefix(path: str, names: Iterable[str]) -> str | None:
    """The longest name, possibly dotted, at the beginning of a path."""
    fitting = [name for name in names if path == name or path.startswith(f"{name}.")]
    return max(fitting, key=len, default=None)


def _select_members(kind: ColumnType, members: Sequence[str], column: str, source: str) -> ColumnType:
    """The type with only the members on these paths."""
    if "" in members:
        return kind
    if isinstance(kind, ListType):
        return replace(kind, item=_select_members(kind.item, members, column, source))
    fields = dict(kind.fields) if isinstance(kind, StructType) else {}
    chosen: dict[str, list[str]] = {}
    for member in members:
        name = _longest_prefix(member, fields)
        if name is None:
            known = ", ".join(f"{column}.{name}" for name in fields) or f"{column}, which has no members"
            raise ArgumentError(f"column {f'{column}.{member}'!r} is not in {source}; there are {known}")
        chosen.setdefault(name, []).append(member[len(name) + 1 :])
    assert isinstance(kind, StructType)
    narrowed = {name: _select_members(fields[name], each, f"{column}.{name}", source) for name, each in chosen.items()}
    return replace(kind, fields=tuple((fields | narrowed).items()), left_out=frozenset(fields.keys() - chosen.keys()))


_WITH_PATHS = {"Image", "Audio", "Video"}
"""Features of `datasets` stored as a struct of `bytes` and `path`, either of which may be null."""


def _features(schema: Any) -> Mapping[str, Any]:
    """Features by column, as `datasets` stores them in the schema's metadata.

    Empty if another library wrote the file.
    """
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return features if isinstance(features, Mapping) else {}


def strip_metadata(schema: Any) -> Any:
    """The schema without metadata, except the features that `kinds_of` reads."""
    features = _features(schema)
    return schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})} if features else None)


def _with_absent_paths(kind: ColumnType, feature: Any) -> ColumnType:
    """Fill null paths of images, audio and video with ""."""
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


def check_same_columns(kinds: Sequence[StructType], paths: Sequence[str]) -> None:
    """Raise SampleError if columns or their types differ between files.

    Columns may have another order, because files are read by name. Members of structs must have the same order.
    """
    for kind, path in zip(kinds, paths, strict=True):
        by_name = dict(kind.fields)
        if set(by_name) != set(_names(kinds[0])):
            differing = ", ".join(sorted(set(by_name) ^ set(_names(kinds[0]))))
            raise SampleError(
                f"{path} and {paths[0]} do not have the same columns: {differing} differs; choose columns that all"
                " files have with columns=[...]"
            )
        kind = replace(kind, fields=tuple((name, by_name[name]) for name in _names(kinds[0])))  # noqa: PLW2901
        difference = _difference("", kinds[0], kind)
        if difference is not None:
            name, one, other = difference
            raise SampleError(
                f"column {name!r} is {one.arrow} in {paths[0]}, but {other.arrow} in {path}; rewrite one of them"
                " with the type of the other, or read them as two datasets"
            )


def merge_columns(kinds: Sequence[StructType], paths: Sequence[str], columns: Sequence[str]) -> StructType:
    """Merge files that may lack columns; SampleError if types differ."""
    merged: dict[str, tuple[ColumnType, str]] = {}
    for kind, path in zip(kinds, paths, strict=True):
        for name, each in kind.fields:
            one, first = merged.setdefault(name, (each, path))
            check_same_columns([StructType(((name, one),)), StructType(((name, each),))], [first, path])
    return StructType(tuple((name, merged[name][0]) for name in columns if name in merged))


def column_names(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The columns, without the members on their paths, each once."""
    found = (_longest_prefix(column, names) for column in columns)
    return list(dict.fromkeys(name for name in found if name is not None))


def present(columns: Sequence[str], schema: Any) -> list[str]:
    """The columns and members of columns that a schema has."""
    return [column for column in columns if _longest_prefix(column, schema.names) is not None]


def _names(kind: StructType) -> list[str]:
    return [name for name, _ in kind.fields]


def _difference(path: str, expected: ColumnType, found: ColumnType) -> tuple[str, ColumnType, ColumnType] | None:
    """Path and both types of the first differing column or member."""
    if isinstance(expected, ListType) and isinstance(found, ListType):
        return _difference(path, expected.item, found.item)
    if isinstance(expected, StructType) and isinstance(found, StructType) and _names(expected) == _names(found):
        for (name, one), (_, other) in zip(expected.fields, found.fields, strict=True):
            difference = _difference(f"{path}.{name}" if path else name, one, other)
            if difference is not None:
                return difference
        return None
    return None if expected == found else (path, expected, found)
