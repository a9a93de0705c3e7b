"""Readers of whole batches, for torch's array datasets and for `read_batch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from feedline.collate.default import default, is_standard
from feedline.core.dataset import Batch, BatchRead, Keys, has_read_batch, traits_of
from feedline.core.devices import synchronize_in_thread, take_rows
from feedline.core.kernels import Int64s, check_int64, gather_rows
from feedline.core.rng import addressed, torch_keys
from feedline.core.shard_offsets import ShardOffsets
from feedline.core.tensors import Allocator, allocate_tensor, normalize_indices, numpy_view, torch_dtype
from feedline.core.torch_wrappers import is_torchs
from feedline.errors import ArgumentError


class BatchReader(NamedTuple):
    """A function that reads whole batches, and the request fields it uses."""

    read: Callable[[BatchRead], Batch]
    uses_keys: bool = False
    supports_threads: bool = False

    def __call__(self, request: BatchRead) -> Batch:
        """The batch that default collate makes of `[dataset[i] for i in request.indices]`."""
        return self.read(request)


def reader_of(dataset: Any) -> BatchReader | None:
    """The reader of whole batches of `dataset`, or None without one.

    Tensors, arrays, TensorDataset, and wrappers whose parts all have a reader are known by their exact type, with
    torch's own members, because a subclass may override anything. Other datasets need a method `read_batch`. None if a
    collate function that is registered with torch may apply to plain values, because a reader would bypass it.
    """
    if not is_standard():
        return None
    kind = type(dataset)
    build = READERS.get(kind)
    if build is not None and kind.__module__.startswith("torch.utils.") and not is_torchs(dataset, kind):
        return None
    return _own_reader(dataset) if build is None else build(dataset)


def _own_reader(dataset: Any) -> BatchReader | None:
    if not has_read_batch(dataset):
        return None
    traits = traits_of(dataset)
    return BatchReader(dataset.read_batch, traits.is_random and traits.uses_keys, traits.supports_threads)


def _of_tensor(dataset: torch.Tensor) -> BatchReader | None:
    if dataset.ndim == 0 or not _is_plain(dataset):
        return None
    return BatchReader(lambda request: _tensor_rows(dataset, request, "the tensor"))


def _tensor_rows(tensor: torch.Tensor, request: BatchRead, name: str) -> torch.Tensor:
    """Rows of a tensor, in memory of its own device."""
    if tensor.is_cpu:
        return _rows(numpy_view(tensor), tensor.dtype, request)
    return take_rows([tensor], normalize_indices(request.indices, len(tensor), name))[0]


def _of_array(dataset: NDArray[Any]) -> BatchReader | None:
    dtype = torch_dtype(dataset.dtype)
    if dataset.ndim < 2 or dtype is None:  # items of a 1-D array are scalars, which collate by rules of their own
        return None
    return BatchReader(lambda request: _rows(dataset, dtype, request))


def _rows(array: NDArray[Any], dtype: torch.dtype, request: BatchRead) -> torch.Tensor:
    out = request.allocate((len(request.indices), *array.shape[1:]), dtype)
    gather_rows(array, request.indices, numpy_view(out), threads=torch.get_num_threads())
    return out


def _of_tensors(dataset: TensorDataset) -> BatchReader | None:
    if not all(map(_is_plain, dataset.tensors)):
        return None

    def read(request: BatchRead) -> list[torch.Tensor]:
        tensors = dataset.tensors
        if not tensors[0].is_cpu and len({tensor.device for tensor in tensors}) == 1:
            return take_rows(tensors, normalize_indices(request.indices, len(dataset), "TensorDataset"))
        return [_tensor_rows(tensor, request, "TensorDataset") for tensor in tensors]

    return BatchReader(read)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def subset_reader(dataset: Any) -> BatchReader | None:
    """The reader of the samples at `dataset.indices` of `dataset.dataset`."""
    inner = reader_of(dataset.dataset)
    if inner is None:
        return None
    name = type(dataset).__name__

    def read(request: BatchRead) -> Batch:
        chosen = _map_indices(dataset.indices, normalize_indices(request.indices, len(dataset), name))
        if chosen is None:
            return default(dataset.__getitems__(request.indices.tolist()), allocate=request.allocate)
        return inner(replace(request, indices=chosen))

    return inner._replace(read=read)


def _map_indices(choice: Any, indices: Int64s) -> Int64s | None:
    """Indices of the inner dataset; None where they are no integers.

    Slices and lists of integers select windows.
    """
    # Converted for each batch, because the user may change the list.
    if isinstance(choice, (np.ndarray, torch.Tensor)):
        chosen = np.asarray(choice)[indices]
    else:
        values = [choice[index] for index in indices.tolist()]
        try:
            chosen = np.asarray(values)
        except ValueError:  # lists of different lengths
            return None
    if chosen.dtype.kind == "b":
        raise ArgumentError(
            "the indices of a Subset are a mask, which torch would take for the numbers 0 and 1:"
            " pass np.flatnonzero(mask).tolist()"
        )
    if chosen.ndim != 1 or (chosen.dtype.kind not in "iu" and len(chosen)):
        return None
    check_int64(chosen)
    return chosen.astype(np.int64, copy=False)


def stack_reader(dataset: StackDataset[Any]) -> BatchReader | None:
    """The reader of a StackDataset: a list or a dict of batches."""
    parts = dataset.datasets
    names = list(parts) if isinstance(parts, dict) else None
    readers = _all_readers(parts.values() if isinstance(parts, dict) else parts)
    if readers is None or sum(each.uses_keys for each in readers) > 1:  # without keys, parts draw in turns for each row
        return None

    def read(request: BatchRead) -> Batch:
        columns = [each(request) for each in readers]
        return columns if names is None else dict(zip(names, columns, strict=True))

    return BatchReader(read, *_needs(readers))


def _all_readers(parts: Iterable[Any]) -> list[BatchReader] | None:
    readers = [reader for reader in map(reader_of, parts) if reader is not None]
    return readers if len(readers) == len(list(parts)) else None


def _needs(readers: Sequence[BatchReader]) -> tuple[bool, bool]:
    """Fields `uses_keys` and `supports_threads` of a reader that calls these."""
    return any(each.uses_keys for each in readers), any(each.supports_threads for each in readers)


def _of_concat(dataset: ConcatDataset[Any]) -> BatchReader | None:
    readers = _all_readers(dataset.datasets)
    if readers is None:
        return None
    offsets = ShardOffsets(np.diff(dataset.cumulative_sizes, prepend=0))
    drawing = np.array([each.uses_keys for each in readers])

    def read(request: BatchRead) -> Batch:
        inside, keys = _normalize_for_concat(request.indices, len(dataset)), request.keys
        part_of, local = offsets.locate(inside)
        if keys is None and drawing.any():
            keys = _draw_keys(drawing[part_of])
        parts = np.unique(part_of).tolist()
        if len(parts) == 1:
            return readers[parts[0]](replace(request, indices=local, keys=keys))
        places = [np.flatnonzero(part_of == part) for part in parts]
        batches = [
            readers[part](BatchRead(local[at], allocate_tensor, None if keys is None else keys[at], request.threads))
            for part, at in zip(parts, places, strict=True)
        ]
        if _are_alike(batches):
            return _interleave(batches, places, request.allocate)
        return default(_one_by_one(dataset, request.indices, keys), allocate=request.allocate)

    return BatchReader(read, *_needs(readers))


def _draw_keys(rows: NDArray[np.bool_]) -> Keys:
    """Keys from torch's global generator, in the order of single samples."""
    keys = np.zeros(len(rows), np.uint64)
    keys[rows] = torch_keys(int(rows.sum()))
    return keys


def _one_by_one(dataset: Any, indices: Int64s, keys: Keys | None) -> list[Any]:
    with addressed(None if keys is None else keys.tolist()) as address:
        samples = []
        for address.row, index in enumerate(indices.tolist()):
            samples.append(dataset[index])
    return samples


def _normalize_for_concat(indices: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    # As in ConcatDataset: ValueError below the first index, IndexError above the last.
    if len(indices) and indices.min() < -length:
        raise ValueError(
            f"index {indices.min()} of a ConcatDataset with {length} samples: absolute value exceeds length"
        )
    return normalize_indices(indices, length, "ConcatDataset")


def _are_alike(batches: Sequence[Any]) -> bool:
    """True if the batches have equal containers, dtypes, devices and row shapes."""
    first = batches[0]
    if any(type(batch) is not type(first) for batch in batches):
        return False
    if isinstance(first, torch.Tensor):
        return len({(batch.dtype, batch.device, batch.shape[1:]) for batch in batches}) == 1
    if type(first) is dict:
        return all(list(batch) == list(first) for batch in batches) and all(
            _are_alike([batch[key] for batch in batches]) for key in first
        )
    if type(first) is list:
        return len(set(map(len, batches))) == 1 and all(map(_are_alike, zip(*batches, strict=True)))
    return False


def _interleave(batches: Sequence[Any], places: Sequence[NDArray[np.int64]], allocate: Allocator) -> Any:
    """One batch whose rows `places[k]` are the rows of `batches[k]`."""
    first = batches[0]
    if type(first) is dict:
        return {key: _interleave([batch[key] for batch in batches], places, allocate) for key in first}
    if type(first) is list:
        return [_interleave(parts, places, allocate) for parts in zip(*batches, strict=True)]
    shape = (sum(map(len, places)), *first.shape[1:])
    if not first.is_cpu:
        return _interleave_on_device(batches, places, first.new_empty(shape))
    out = allocate(shape, first.dtype)
    rows = numpy_view(out)
    for batch, at in zip(batches, places, strict=True):
        rows[at] = numpy_view(batch)
    return out


def _interleave_on_device(
    batches: Sequence[torch.Tensor], places: Sequence[NDArray[np.int64]], out: torch.Tensor
) -> torch.Tensor:
    for batch, at in zip(batches, places, strict=True):
        out.index_copy_(0, torch.from_numpy(at).to(out.device), batch)
    synchronize_in_thread(out.device)
    return out


READERS: dict[type, Callable[[Any], BatchReader | None]] = {
    torch.Tensor: _of_tensor,
    np.ndarray: _of_array,
    TensorDataset: _of_tensors,
    Subset: subset_reader,
    StackDataset: stack_reader,
    ConcatDataset: _of_concat,
}
"""Builders of readers, by the exact type of the dataset."""
