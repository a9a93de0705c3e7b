"""Packing of sequences into rows of a fixed number of tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.collate.base import Collator, Fill, as_rows, check_fill, concatenate, cut, fill_for, put
from feedline.collate.default import KeyPath, format_path
from feedline.core.tensors import Allocator, allocate_tensor
from feedline.errors import ArgumentError, CollateError


class Packed(NamedTuple):
    """Several sequences per row of `values` (R, max_tokens).

    `values` is a dict of such tensors if the samples are dicts.

    `positions` int64 (R, max_tokens): place of a token within its sequence, 0 on padding.

    `segments` int64 (R, max_tokens): number of the sequence within its row, from 1; 0 on padding.

    `cu_seqlens` int32: bounds of the segments in `values.flatten()`, as variable-length attention expects them. The
    padding at the end of a row is a segment of its own, so the last bound is R * max_tokens. Empty sequences have no
    bound.

    `order` int64 (B,): the sample number of each sequence, in the order of the rows.
    """

    values: Any
    positions: torch.Tensor
    segments: torch.Tensor
    cu_seqlens: torch.Tensor
    order: torch.Tensor


def token_budget(max_tokens: int, *, value: Fill = 0, truncate: bool = False) -> PackCollator:
    """A collate function that packs 1-D sequences into rows of `max_tokens`.

    Rows are filled by best fit, longest sequence first. Samples are sequences, or dicts of sequences of equal length
    (`input_ids`, `labels`), packed alike. `value` fills the rest of a row, and may be a mapping from field to value. A
    sequence longer than a row raises CollateError, or is cut at its end with `truncate`.
    """
    if max_tokens < 1:
        raise ArgumentError(f"max_tokens must be at least 1, not {max_tokens}")
    return PackCollator(max_tokens, value, truncate)


@dataclass(frozen=True, slots=True)
class PackCollator(Collator):
    """The collate function that `token_budget` returns."""

    max_tokens: int
    value: Fill
    truncate: bool

    def __call__(self, samples: Sequence[Any], *, allocate: Allocator | None = None) -> Packed:
        """All samples, in as few rows as best fit finds."""
        whole = {path: self._checked(column, path) for path, column in _fields(samples).items()}
        lengths = [min(length, self.max_tokens) for length in _common_lengths(whole)]
        plan = _PackPlan(lengths, self.max_tokens, allocate or allocate_tensor)
        fields = {path: cut(rows, self.max_tokens) for path, rows in whole.items()}
        check_fill(self.value, [path[-1] for path in fields if path])
        values = {path: plan.pack(rows, path, self.value) for path, rows in fields.items()}
        packed = values[()] if () in values else {path[-1]: value for path, value in values.items()}
        return Packed(packed, plan.positions(), plan.segments(), plan.bounds(), plan.order)

    def _checked(self, column: Sequence[Any], path: KeyPath) -> Sequence[torch.Tensor]:
        rows = as_rows(column, path)
        for number, row in enumerate(rows):
            if row.ndim != 1:
                raise CollateError(
                    f"{format_path(path)}: token_budget packs 1-D sequences, not shape {tuple(row.shape)}"
                )
            if not self.truncate and row.size(0) > self.max_tokens:
                raise CollateError(
                    f"{format_path(path)}: sample {number} of the batch has {row.size(0)} tokens, more than max_tokens="
                    f"{self.max_tokens}. Raise it, split such sequences, or pass truncate=True to cut them at the end."
                )
        return rows


def _fields(samples: Sequence[Any]) -> dict[KeyPath, Sequence[Any]]:
    """The columns to pack alike.

    One per key, or the samples themselves at the path ().
    """
    elem = samples[0]
    if not isinstance(elem, Mapping):
        return {(): samples}
    if not elem:
        raise CollateError("token_budget needs samples with at least one field")
    for number, sample in enumerate(samples):
        if lacking := [key for key in elem if key not in sample]:
            raise CollateError(f"sample {number} of the batch lacks the field {lacking[0]!r}, sample 0 has it")
    return {(key,): [sample[key] for sample in samples] for key in elem}


def _common_lengths(fields: Mapping[KeyPath, Sequence[torch.Tensor]]) -> list[int]:
    (first, rows), *others = fields.items()
    lengths = [row.size(0) for row in rows]
    for path, column in others:
        number = next((i for i, row in enumerate(column) if row.size(0) != lengths[i]), None)
        if number is not None:
            raise CollateError(
                f"sample {number} of the batch has {lengths[number]} tokens in {format_path(first)}, but "
                f"{column[number].size(0)} in {format_path(path)}; fields that are packed together need equal lengths"
            )
    return lengths


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign sequences to rows: longest first, into the fullest row with room.

    Returns the sample numbers of each row. Best fit decreasing needs at most 11/9 of the fewest possible rows (Johnson,
    "Near-optimal bin packing algorithms", 1973). Ties keep the order of the samples, so the result is a function of the
    lengths.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(room, (lengths[sample], -1))
        free, row = room.pop(at) if at < len(room) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
        insort(room, (free - lengths[sample], row))
    return rows


class _PackPlan:
    """The layout of packed sequences.

    Rows are filled from the left, without gaps.
    """

    def __init__(self, lengths: Sequence[int], width: int, allocate: Allocator) -> None:
        rows = best_fit(lengths, width)
        self._allocate = allocate
        self._shape = (len(rows), width)
        self._segment_of = np.array([i + 1 for row in rows for i in range(len(row))], np.int64)
        order = np.array([sample for row in rows for sample in row], np.int64)
        self._lengths = np.array(lengths, np.int64)[order]
        used = np.array([sum(lengths[sample] for sample in row) for row in rows])
        self._mask = np.arange(width) < used[:, None]
        self.order = torch.from_numpy(order)

    def pack(self, sequences: Sequence[torch.Tensor], path: KeyPath, fill: Fill) -> torch.Tensor:
        flat = concatenate([sequences[sample] for sample in self.order.tolist()], path)
        values = self._allocate(self._shape, flat.dtype).fill_(fill_for(fill, path, flat.dtype))
        put(values, torch.from_numpy(self._mask), flat, path)
        return values

    def positions(self) -> torch.Tensor:
        starts = np.cumsum(self._lengths) - self._lengths
        return self._lay_out(np.arange(self._lengths.sum()) - np.repeat(starts, self._lengths))

    def segments(self) -> torch.Tensor:
        return self._lay_out(np.repeat(self._segment_of, self._lengths))

    def _lay_out(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        out = self._allocate(self._shape, torch.int64).zero_()
        out.numpy()[self._mask] = numbers
        return out

    def bounds(self) -> torch.Tensor:
        rows, width = self._shape
        stops = np.flatnonzero(self._mask)[np.cumsum(self._lengths[self._lengths > 0]) - 1] + 1
        ends = np.arange(rows + 1) * width
        return torch.from_numpy(np.union1d(stops, ends).astype(np.int32))
