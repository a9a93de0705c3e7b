"""Base classes and helpers of collate functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from feedline.collate.default import BatchWalk, KeyPath, format_path
from feedline.core.tensors import Allocator, numpy_view
from feedline.errors import CollateError

Key = str | int


_ndim_of = attrgetter("ndim")


Fill = float | Mapping[Key, float]


class Collator:
    """A picklable, comparable collate function.

    `collator(samples, allocate=...)` takes its memory from `allocate`, as `default` does.
    """

    __slots__ = ()

    def __call__(self, samples: Sequence[Any], *, allocate: Allocator | None = None) -> Any:
        raise NotImplementedError


class FieldWalk(BatchWalk):
    """Default collate with special treatment of some fields.

    `collate_field` collates the fields named by `keys`, or those that `is_field` accepts if `keys` is None. The name of
    a field is the innermost key on its path: a key of a dict, a name in a named tuple, or a place in a tuple.
    """

    __slots__ = ("_keys", "_matched", "_seen")

    def __init__(self, keys: frozenset[Key] | None, allocate: Allocator | None) -> None:
        super().__init__(allocate)
        self._keys = keys
        self._matched: set[Key] = set()
        self._seen: list[Key] = []

    def is_field(self, batch: Sequence[Any]) -> bool:
        """True if these values are a field, for a collator without keys.

        The result must not depend on their lengths, which differ between batches.
        """
        raise NotImplementedError

    def collate_field(self, batch: Sequence[Any], path: KeyPath) -> Any:
        """The batch's value of a treated field."""
        raise NotImplementedError

    def __call__(self, batch: Sequence[Any], path: KeyPath = ()) -> Any:
        """Collate the values at `path` of each sample.

        The root call raises CollateError for keys that no sample has.
        """
        if self._is_treated(batch, path):
            return self.collate_field(batch, path)
        collated = super().__call__(batch, path)
        if not path and self._keys is not None and self._matched != self._keys:
            missing = sorted(map(repr, self._keys - self._matched))
            raise CollateError(f"the samples have no field {', '.join(missing)}; they have {self._seen}")
        return collated

    def _is_treated(self, batch: Sequence[Any], path: KeyPath) -> bool:
        if self._keys is None:
            return self.is_field(batch)
        if not path:
            return False
        self._seen.append(path[-1])
        if path[-1] in self._keys:
            self._matched.add(path[-1])
            return True
        return False


def as_key_set(keys: Key | Sequence[Key] | None) -> frozenset[Key] | None:
    """`keys` as a set; a single key stands for itself."""
    if keys is None:
        return None
    return frozenset([keys] if isinstance(keys, str | int) else keys)


def is_numbers(values: Any) -> bool:
    """True for a list of plain numbers, such as token ids."""
    return type(values) is list and set(map(type, values)) <= {int, float, bool}


def is_sequence(values: Any) -> bool:
    """True for a list of numbers, or an array with dimensions."""
    if isinstance(values, (torch.Tensor, np.ndarray)):
        return values.ndim > 0
    return is_numbers(values)


def are_sequences(batch: Sequence[Any]) -> bool:
    """True if all values are sequences; fast for plain tensors."""
    if _are_tensors(batch):
        return bool(min(map(_ndim_of, batch)) > 0)
    return all(map(is_sequence, batch))


def _are_tensors(batch: Sequence[Any]) -> bool:
    return set(map(type, batch)) == {torch.Tensor}


def as_rows(batch: Sequence[Any], path: KeyPath) -> Sequence[torch.Tensor]:
    """The sequences of a batch as tensors; CollateError names other values."""
    if not are_sequences(batch):
        wrong = next(i for i, values in enumerate(batch) if not is_sequence(values))
        raise CollateError(
            f"{format_path(path)}: sample {wrong} of the batch holds {type(batch[wrong]).__name__}, not a tensor or an "
            "array with at least one dimension, or a list of numbers"
        )
    if _are_tensors(batch):
        return batch
    rows = [_as_tensor(values) for values in batch]
    if not any(isinstance(values, list) for values in batch):
        return rows
    dtype = next((row.dtype for row in rows if len(row)), rows[0].dtype)  # an empty list has no dtype
    return [row if len(row) else row.to(dtype) for row in rows]


def cut(rows: Sequence[torch.Tensor], max_length: int | None) -> Sequence[torch.Tensor]:
    """The rows without the elements beyond `max_length`."""
    if max_length is None:
        return rows
    return [row if row.size(0) <= max_length else row[:max_length] for row in rows]


def concatenate(rows: Sequence[torch.Tensor], path: KeyPath) -> torch.Tensor:
    """The rows concatenated, with torch's promotion of dtypes."""
    try:
        return torch.cat(rows)  # type: ignore[arg-type]
    except RuntimeError as error:
        number = next((i for i, row in enumerate(rows) if row.shape[1:] != rows[0].shape[1:]), None)
        if number is None:
            raise
        raise CollateError(
            f"{format_path(path)}: only the first dimension may differ, but sample 0 of the batch has shape "
            f"{tuple(rows[0].shape)} and sample {number} has {tuple(rows[number].shape)}"
        ) from error


def _as_tensor(values: Any) -> torch.Tensor:
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        return torch.from_numpy(values.copy())  # torch warns about views that could write to read-only memory
    return values if isinstance(values, torch.Tensor) else torch.as_tensor(values, device="cpu")


def fill_for(fill: Fill, path: KeyPath, dtype: torch.dtype) -> float:
    """The padding value of the field at `path`; by default 0.

    Raises CollateError for a value that the dtype cannot hold.
    """
    value = (fill.get(path[-1], 0) if path else 0) if isinstance(fill, Mapping) else fill
    if dtype.is_floating_point or dtype.is_complex:
        return value
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not (low <= value <= high and value == int(value)):
        name = path[-1] if path else "name"
        raise CollateError(
            f"{format_path(path)}: {dtype} cannot hold the padding value {value!r}: pass value={{{name!r}: ...}} with"
            " one for each field, or convert the samples"
        )
    return value


def check_fill(fill: Fill, names: Iterable[Any]) -> None:
    """Raise CollateError for padding values of fields that were not padded."""
    if isinstance(fill, Mapping) and (unknown := set(fill).difference(found := list(names))):
        missing = ", ".join(sorted(map(repr, unknown)))
        raise CollateError(f"value= names {missing}, but the fields that are padded are {found}: correct the name")


def put(values: torch.Tensor, mask: torch.Tensor, flat: torch.Tensor, path: KeyPath) -> None:
    """Write rows where a mask is true; CollateError for a gradient."""
    if flat.requires_grad:
        raise CollateError(
            f"{format_path(path)}: a sequence requires grad, which a padded batch would lose: pass x.detach()"
        )
    # One scatter of all rows is several times faster than a copy per row.
    numpy_view(values)[mask.numpy()] = numpy_view(flat)
