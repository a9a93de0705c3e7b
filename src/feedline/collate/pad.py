"""Padding of sequences of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from feedline.collate.base import (
    Collator,
    FieldWalk,
    Fill,
    Key,
    are_sequences,
    as_key_set,
    as_rows,
    check_fill,
    concatenate,
    cut,
    fill_for,
    put,
)
from feedline.collate.default import KeyPath, format_path
from feedline.core.tensors import Allocator, allocate_tensor
from feedline.errors import ArgumentError, CollateError

Side = Literal["right", "left"]


class Padded(NamedTuple):
    """Sequences as rows of one tensor.

    `values` (B, T, ...), or with `dim=-1` (B, ..., T); `lengths` int64 (B,); `mask` bool (B, T), True on data, or None
    with `mask=False`.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor | None


def pad(
    value: Fill = 0,
    *,
    side: Side = "right",
    multiple_of: int = 1,
    max_length: int | None = None,
    keys: Key | Sequence[Key] | None = None,
    mask: bool = True,
    dim: int = 0,
) -> PadCollator:
    """A collate function that pads sequences along one dimension.

    Every tensor or array with a first dimension, and every list of plain numbers, becomes a `Padded`; all other values
    are collated as by `default`. `keys` restricts padding to the fields of those names. Which fields are padded never
    depends on the lengths in a batch.

    `value` may be a mapping from field to value, such as `{"input_ids": 50256, "labels": -100}`. Sequences longer than
    `max_length` are cut at their end. The padded length is a multiple of `multiple_of`. `side` is the end at which
    values are added. Without `mask`, `Padded.mask` is None. `dim` is the dimension of a sequence that is padded: -1 for
    waveforms (channels, samples). `Padded.values` keeps the order of dimensions. The collate function raises
    CollateError if the sequences of a batch differ in another dimension, and for a padding value that no field has or
    that its dtype cannot hold.
    """
    if side not in ("right", "left"):
        raise ArgumentError(f"side must be 'right' or 'left', not {side!r}")
    if multiple_of < 1:
        raise ArgumentError(f"multiple_of must be at least 1, not {multiple_of}")
    if max_length is not None and (max_length < 1 or max_length % multiple_of):
        raise ArgumentError(f"max_length={max_length} must be positive and a multiple of multiple_of={multiple_of}")
    return PadCollator(value, side, multiple_of, max_length, as_key_set(keys), mask, dim)


@dataclass(frozen=True, slots=True)
class PadCollator(Collator):
    """The collate function that `pad` returns."""

    value: Fill
    side: Side
    multiple_of: int
    max_length: int | None
    keys: frozenset[Key] | None
    mask: bool
    dim: int = 0

    def __call__(self, samples: Sequence[Any], *, allocate: Allocator | None = None) -> Any:
        """The batch, with a `Padded` for every padded field."""
        walk = _PadWalk(self, allocate)
        batch = walk(samples)
        check_fill(self.value, walk.padded)
        return batch

    def padded_length(self, longest: int) -> int:
        """The length of the rows if the longest sequence has this length."""
        return -(-longest // self.multiple_of) * self.multiple_of


class _PadWalk(FieldWalk):
    """Walk over the fields of a batch that pads sequences."""

    __slots__ = ("_recipe", "padded")

    def __init__(self, recipe: PadCollator, allocate: Allocator | None) -> None:
        super().__init__(recipe.keys, allocate)
        self._recipe = recipe
        self.padded: dict[Key, None] = {}
        """Names of the fields that were padded, in their order."""

    def is_field(self, batch: Sequence[Any]) -> bool:
        return are_sequences(batch)

    def collate_field(self, batch: Sequence[Any], path: KeyPath) -> Padded:
        self.padded.update(dict.fromkeys(path[-1:]))
        recipe, empty = self._recipe, self.empty or allocate_tensor
        rows = cut(_time_first(as_rows(batch, path), recipe.dim, path), recipe.max_length)
        flat = concatenate(rows, path)
        lengths = empty((len(rows),), torch.int64).copy_(torch.tensor([row.size(0) for row in rows], device="cpu"))
        longest = recipe.padded_length(int(lengths.max()))
        mask = _mask(lengths, longest, recipe.side, empty if recipe.mask else allocate_tensor)
        values = empty((*mask.shape, *flat.shape[1:]), flat.dtype).fill_(fill_for(recipe.value, path, flat.dtype))
        put(values, mask, flat, path)
        if recipe.dim:
            values = values.movedim(1, recipe.dim + 1 if recipe.dim > 0 else recipe.dim)
        return Padded(values, lengths, mask if recipe.mask else None)


def _time_first(rows: Sequence[torch.Tensor], dim: int, path: KeyPath) -> Sequence[torch.Tensor]:
    if not dim:
        return rows
    few = next((row for row in rows if not -row.ndim <= dim < row.ndim), None)
    if few is not None:
        raise CollateError(f"{format_path(path)}: dim={dim} is out of range for a sequence of shape {tuple(few.shape)}")
    return [row.movedim(dim, 0) for row in rows]


def _mask(lengths: torch.Tensor, longest: int, side: Side, allocate: Allocator) -> torch.Tensor:
    places = torch.arange(longest, device="cpu")
    out = allocate((len(lengths), longest), torch.bool)
    if side == "right":
        return torch.lt(places, lengths[:, None], out=out)
    return torch.ge(places, longest - lengths[:, None], out=out)
