"""Whole batches at once: the gather of torch's own array datasets, and of any dataset that offers one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from feedline import collate
from feedline.core import kernels
from feedline.core.rng import addressed, torch_keys
from feedline.core.tensors import Allocator, allocate_tensor, numpy_view, torch_dtype, within

ReadBatch = Callable[..., Any]


Keys = NDArray[np.uint64] | None
"""The random key of each row; None where the loader has no seed, and torch's global generator decides."""


class BatchReader(NamedTuple):
    """`gather(indices, empty)`; with `keys` behind it where samples are random and it `draws`.

    One that `splits` takes `threads` by name, and lets so many native threads work on one batch.
    """

    gather: ReadBatch
    draws: bool = False
    splits: bool = False

    def __call__(self, indices: NDArray[np.int64], empty: Allocator, keys: Keys = None, threads: int = 1) -> Any:
        """What default-collating `[dataset[i] for i in indices]` gives, at once, in memory from `empty`."""
        more = {"threads": threads} if self.splits else {}
        return self.gather(indices, empty, keys, **more) if self.draws else self.gather(indices, empty, **more)


def gathering(dataset: Any) -> BatchReader | None:
    """How whole batches of `dataset` are gathered, or None where they must be fetched one by one.

    Known are tensors, arrays, TensorDataset, and Subset, ConcatDataset and StackDataset over parts that can all be
    gathered (these very types: a subclass may do anything); and any object with a method `gather(indices, empty)`, or
    `gather(indices, empty, keys)` if its samples are random, to which `threads=1` may be added. None also when the user
    has registered collate functions with torch, which a gather would pass by.
    """
    if not collate.is_standard():
        return None
    build = _BUILDERS.get(type(dataset))
    return _own_gather(dataset) if build is None else build(dataset)


def _own_gather(dataset: Any) -> BatchReader | None:
    """The dataset's method; told by its parameters from the other things that `gather` may mean on tensors."""
    method = getattr(dataset, "gather", None)
    try:
        names = list(inspect.signature(method).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # there is none, or it is built in
        return None
    splits = names[-1] == "threads"
    if names[1 : len(names) - splits] not in (["empty"], ["empty", "keys"]):
        return None
    return BatchReader(method, "keys" in names, splits)  # type: ignore[arg-type]


def _of_tensor(dataset: torch.Tensor) -> BatchReader | None:
    if dataset.ndim == 0 or not _is_plain(dataset):
        return None
    return BatchReader(lambda indices, empty: _rows(numpy_view(dataset), dataset.dtype, indices, empty))


def _of_array(dataset: NDArray[Any]) -> BatchReader | None:
    dtype = torch_dtype(dataset.dtype)
    if dataset.ndim < 2 or dtype is None:  # items of a 1-D array are scalars, which collate by rules of their own
        return None
    return BatchReader(lambda indices, empty: _rows(dataset, dtype, indices, empty))


def _rows(array: NDArray[Any], dtype: torch.dtype, indices: NDArray[np.int64], empty: Allocator) -> torch.Tensor:
    out = empty((len(indices), *array.shape[1:]), dtype)
    kernels.gather_rows(array, indices, out=numpy_view(out))
    return out


def _of_tensors(dataset: TensorDataset) -> BatchReader | None:
    if not all(map(_is_plain, dataset.tensors)):
        return None

    def gather(indices: NDArray[np.int64], empty: Allocator) -> list[torch.Tensor]:
        return [_rows(numpy_view(tensor), tensor.dtype, indices, empty) for tensor in dataset.tensors]

    return BatchReader(gather)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def _of_subset(dataset: Subset[Any]) -> BatchReader | None:
    inner = gathering(dataset.dataset)
    if inner is None:
        return None

    def gather(indices: NDArray[np.int64], empty: Allocator, keys: Keys = None, threads: int = 1) -> Any:
        return inner(_chosen(dataset.indices, within(indices, len(dataset), "Subset")), empty, keys, threads)

    return BatchReader(gather, inner.draws, inner.splits)


def _chosen(choice: Any, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """The items of `Subset.indices`; read anew for each batch, because the list is the user's to change."""
    if isinstance(choice, (np.ndarray, torch.Tensor)):
        return np.asarray(choice)[indices].astype(np.int64, copy=False)
    return np.fromiter(map(choice.__getitem__, indices.tolist()), np.int64, len(indices))


def _of_stack(dataset: StackDataset[Any]) -> BatchReader | None:
    parts = dataset.datasets
    names = list(parts) if isinstance(parts, dict) else None
    gathers = _all_gathering(parts.values() if isinstance(parts, dict) else parts)
    if gathers is None or sum(each.draws for each in gathers) > 1:  # without keys, parts draw by turns, row by row
        return None

    def gather(indices: NDArray[np.int64], empty: Allocator, keys: Keys = None, threads: int = 1) -> Any:
        columns = [each(indices, empty, keys, threads) for each in gathers]
        return columns if names is None else dict(zip(names, columns, strict=True))

    return BatchReader(gather, any(each.draws for each in gathers), any(each.splits for each in gathers))


def _all_gathering(parts: Iterable[Any]) -> list[BatchReader] | None:
    gathers = [gather for gather in map(gathering, parts) if gather is not None]
    return gathers if len(gathers) == len(list(parts)) else None


def _of_concat(dataset: ConcatDataset[Any]) -> BatchReader | None:
    gathers = _all_gathering(dataset.datasets)
    if gathers is None:
        return None
    stops = np.array(dataset.cumulative_sizes, np.int64)

    drawing = np.array([each.draws for each in gathers])

    def gather(indices: NDArray[np.int64], empty: Allocator, keys: Keys = None, threads: int = 1) -> Any:
        inside = _within_concat(indices, len(dataset))
        part_of = np.searchsorted(stops, inside, side="right")
        local = inside - np.concatenate(([0], stops))[part_of]
        if keys is None and drawing.any():
            keys = _drawn(drawing[part_of])
        parts = np.unique(part_of).tolist()
        if len(parts) == 1:
            return gathers[parts[0]](local, empty, keys, threads)
        places = [np.flatnonzero(part_of == part) for part in parts]
        batches = [
            gathers[part](local[at], allocate_tensor, None if keys is None else keys[at], threads)
            for part, at in zip(parts, places, strict=True)
        ]
        if _are_alike(batches):
            return _interleaved(batches, places, empty)
        return collate.default(_one_by_one(dataset, indices, keys), empty=empty)

    return BatchReader(gather, bool(drawing.any()), any(each.splits for each in gathers))


def _drawn(rows: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Keys for these rows from torch's global generator, in the order in which single samples would draw them."""
    keys = np.zeros(len(rows), np.uint64)
    keys[rows] = torch_keys(int(rows.sum()))
    return keys


def _one_by_one(dataset: Any, indices: NDArray[np.int64], keys: Keys) -> list[Any]:
    with addressed(None if keys is None else keys.tolist()) as address:
        samples = []
        for address.row, index in enumerate(indices.tolist()):
            samples.append(dataset[index])
    return samples


def _within_concat(indices: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    if (
        len(indices) and indices.min() < -length
    ):  # ConcatDataset raises ValueError here, and IndexError at the other end
        raise ValueError(
            f"index {indices.min()} of a ConcatDataset with {length} samples: absolute value exceeds length"
        )
    return within(indices, length, "ConcatDataset")


def _are_alike(batches: Sequence[Any]) -> bool:
    """Whether rows of these batches may stand in one: the same containers, dtypes and row shapes."""
    first = batches[0]
    if any(type(batch) is not type(first) for batch in batches):
        return False
    if isinstance(first, torch.Tensor):
        return len({(batch.dtype, batch.shape[1:]) for batch in batches}) == 1
    if type(first) is dict:
        return all(list(batch) == list(first) for batch in batches) and all(
            _are_alike([batch[key] for batch in batches]) for key in first
        )
    if type(first) is list:
        return len(set(map(len, batches))) == 1 and all(map(_are_alike, zip(*batches, strict=True)))
    return False


def _interleaved(batches: Sequence[Any], places: Sequence[NDArray[np.int64]], empty: Allocator) -> Any:
    """One batch whose rows `places[k]` are the rows of `batches[k]`."""
    first = batches[0]
    if type(first) is dict:
        return {key: _interleaved([batch[key] for batch in batches], places, empty) for key in first}
    if type(first) is list:
        return [_interleaved(parts, places, empty) for parts in zip(*batches, strict=True)]
    out = empty((sum(map(len, places)), *first.shape[1:]), first.dtype)
    rows = numpy_view(out)
    for batch, at in zip(batches, places, strict=True):
        rows[at] = numpy_view(batch)
    return out


_BUILDERS: dict[type, Callable[[Any], BatchReader | None]] = {
    torch.Tensor: _of_tensor,
    np.ndarray: _of_array,
    TensorDataset: _of_tensors,
    Subset: _of_subset,
    StackDataset: _of_stack,
    ConcatDataset: _of_concat,
}
