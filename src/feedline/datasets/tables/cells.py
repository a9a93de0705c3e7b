"""Decoding and transforms of single columns of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from feedline.core.dataset import Keys, TransformFunction
from feedline.core.sample_transform import SampleTransform
from feedline.core.tensors import Allocator
from feedline.datasets.base import _keys_of
from feedline.datasets.decoding import Decode, Decoder, decoder_of, split_transform
from feedline.datasets.tables.types import ColumnType, StructType, TextType
from feedline.errors import ArgumentError
from feedline.transforms import plan

_BYTES = "bytes"
"""Member of a struct with an encoded image, as `datasets` stores it."""


DescribeRow = Callable[[int], str]
"""Describes a row of a request, for errors."""


class _EncodedColumn(NamedTuple):
    """A column of encoded bytes, or their member of a struct."""

    decoder: Decoder
    is_struct: bool

    def source(self, value: Any) -> Any:
        return value[_BYTES] if self.is_struct else value


class Cells:
    """Decoders and transforms of columns, and the transform of whole samples.

    `transform` is a function of samples, or a dict of functions by column. `decode` names decoders by column, as for
    `decoder_of`; a column of bytes with one of feedline's transforms is an image. Images may be in the member `bytes`
    of a struct, as `datasets` stores them.
    """

    def __init__(
        self,
        kind: StructType,
        transform: TransformFunction | Mapping[str, TransformFunction] | None,
        decode: Mapping[str, Decode] | None,
    ) -> None:
        kinds = {name: each for name, each in kind.fields if name not in kind.left_out}
        by_column, self.whole = split_transform(transform, kinds)
        decoders = dict(_check_decoders(decode, kinds))
        for name, each in by_column.items():
            if name not in decoders and _holds_bytes(kinds[name]) and plan(each) is not None:
                decoders[name] = "image"
        self._cells = {
            name: _EncodedColumn(decoder_of(decoder, by_column.get(name)), isinstance(kinds[name], StructType))
            for name, decoder in decoders.items()
        }
        self.kind = replace(kind, fields=tuple((name, _narrow(each, name in decoders)) for name, each in kind.fields))
        """The type of a row without members that no decoder reads."""
        self._steps = {name: SampleTransform(each) for name, each in by_column.items() if name not in decoders}
        self._step = SampleTransform(self.whole)

    @property
    def are_plain(self) -> bool:
        """True if samples are the stored rows."""
        return not (self._cells or self._steps or self.whole)

    @property
    def batchable(self) -> bool:
        """True if `batch` is supported."""
        steps = self._steps or self.whole is not None
        return not steps and all(each.decoder.batchable for each in self._cells.values())

    @property
    def uses_keys(self) -> bool:
        """True if `batch` depends on keys."""
        return any(each.decoder.uses_keys for each in self._cells.values())

    def sample(self, stored: dict[str, Any], row: int | None, locate: Callable[[], str]) -> Any:
        """Decode and transform a stored row.

        `row` is its row in a batch, or None.
        """
        for name, cell in self._cells.items():
            stored[name] = cell.decoder(cell.source(stored[name]), row, partial(_describe, locate, name))
        for name, step in self._steps.items():
            stored[name] = step(stored[name], row)
        return self._step(stored, row)

    def batch(
        self, stored: dict[str, Any], keys: Keys | None, rows: int, allocate: Allocator, locate: DescribeRow
    ) -> Any:
        """Decode the columns of a collated batch."""
        # Columns share the keys of a sample, so that two images of one sample get the same crop.
        keys_by_name = _keys_of(keys, rows, [name for name, each in self._cells.items() if each.decoder.uses_keys])
        for name, cell in self._cells.items():
            where = partial(_describe_row, locate, name)
            stored[name] = cell.decoder.batch(cell.source(stored[name]), keys_by_name.get(name), allocate, where)
        return stored


def _narrow(kind: ColumnType, is_decoded: bool) -> ColumnType:
    if not is_decoded or not isinstance(kind, StructType):
        return kind
    # `path` next to the bytes is usually null, which would be an error of a column that samples do not contain.
    return replace(kind, left_out=frozenset(name for name, _ in kind.fields) - {_BYTES})


def _describe(locate: Callable[[], str], column: str) -> str:
    return f"{locate()}: column {column!r}"


def _describe_row(locate: DescribeRow, column: str, row: int) -> str:
    return f"{locate(row)}: column {column!r}"


def _check_decoders(decode: Mapping[str, Decode] | None, kinds: Mapping[str, ColumnType]) -> Mapping[str, Decode]:
    if decode is not None and not isinstance(decode, Mapping):
        raise ArgumentError(f"decode={decode!r}: give a dict of decoders by column, such as {{'image': 'image'}}")
    for name in decode or ():
        if name not in kinds:
            raise ArgumentError(f"decode= names {name!r}; known fields of a sample are {', '.join(kinds)}")
        if not _holds_bytes(kinds[name]):
            raise ArgumentError(
                f"column {name!r} is {kinds[name].arrow}, which cannot be decoded: decoders take a column of bytes or"
                " text, or a struct with a member `bytes`"
            )
    return decode or {}


def _holds_bytes(kind: ColumnType) -> bool:
    if isinstance(kind, StructType):
        return _BYTES not in kind.left_out and isinstance(dict(kind.fields).get(_BYTES), TextType)
    return isinstance(kind, TextType)
