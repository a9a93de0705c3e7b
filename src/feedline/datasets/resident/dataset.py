"""`DeviceDataset`: samples in the memory of a device, read once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from feedline import collate
from feedline.core.dataset import Batch, BatchRead, Ranges, Traits, traits_of
from feedline.core.dataset_fingerprint import listing_fingerprint_of
from feedline.core.devices import Device, budget_nbytes, free_nbytes, take_rows, usable_device
from feedline.core.kernels import Int64s
from feedline.core.tensors import Allocator, allocate_tensor, as_indices, normalize_index, normalize_indices
from feedline.core.torch_wrappers import ranges_of
from feedline.core.tree import map_leaves
from feedline.datasets.resident.columns import Column, HostColumn, TensorColumn, check_alike, gather, stored_dtype
from feedline.datasets.resident.source_rows import ReadBlocks, SourceRows, number_leaves
from feedline.errors import ArgumentError, NotPicklableError, note

_BLOCK = 256
"""Number of samples that `fill` reads at once."""


@dataclass(frozen=True, slots=True)
class ResidentStatistics:
    """Sizes of a `DeviceDataset`."""

    samples: int
    """Samples of the dataset."""
    stored: int
    """Samples in memory now."""
    resident: int
    """Samples for which the device has memory."""
    resident_nbytes: int
    """Bytes allocated on the device."""
    spilled_nbytes: int
    """Bytes in host memory."""
    read: int
    """Samples that were read from the source."""


class DeviceDataset(torch.utils.data.Dataset[Any]):
    """The samples of `source` in the memory of a device, as tensors.

    `source` is a tensor, an array, a tuple or dict of these with rows for samples, a TensorDataset, or any other
    map-style dataset. Each sample of a dataset is read once: on first access, or by `fill`. Its tensors, arrays and
    numbers become tensors with shape and dtype of the first sample's; text stays on the host. A dataset with a random
    transform that feedline knows raises an ArgumentError, because the first results would be repeated.

    - `device`: where samples and batches are. A shuffled batch is one gather there.
    - `budget`: memory to use there: bytes, an amount ("20 GB"), or a share of the free memory ("80%").
    - `spill`: samples beyond the budget are kept in host memory, which is page-locked for each batch on its way.
      False reads them from the source each time.
    - `dtype`: floating-point tensors are stored and delivered with this dtype, such as torch.bfloat16.

    Tensors that are on the device already, and their rows in host memory, are not copied: they must not change.
    Thread-safe. Data on an accelerator cannot go to worker processes: use num_workers=0, or threads.
    """

    def __init__(
        self,
        source: Any,
        *,
        device: Device = "cuda",
        budget: int | str = "80%",
        spill: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.device = torch.empty(0, device=usable_device(device, 'pass device="cpu"')).device  # with its number
        self._dtype = _floating(dtype)
        self.budget = budget
        tables = _tables(source)
        self.source: Any = source if tables is None else None
        self._length = len(source) if tables is None else _common_length(tables)
        if not self._length:
            raise ArgumentError("the source of a DeviceDataset is empty: give at least one sample")
        self._rows = SourceRows(source, self._dtype) if tables is None else None
        self._lock = _Lock()
        self._read = 0 if tables is not None else 1  # the first sample, for the shapes
        self._template = number_leaves(_rows_of(source)) if self._rows is None else self._rows.template
        self._batch_template = map_leaves(int, collate.default([self._template]))
        values: list[Any] = (tables or []) if self._rows is None else self._rows.first()
        self._names = [f"leaf {number} of the sample" for number in range(len(values))]
        self._is_list = type(self._batch_template) is list and self._batch_template == [*range(len(values))]
        self._resident = self._room(values)
        self._stored = self._length if spill else self._resident
        if tables is None:
            self._check_host(values)
            self._columns = [self._empty_column(value) for value in values]
        else:
            self._stored = self._length
            self._columns = [self._table_column(table) for table in tables]
        self._tables = self._whole_tables()
        self._filled = np.full(self._stored, tables is not None)
        self._missing = 0 if tables is not None else self._length
        if tables is None and self._stored:
            self._put(np.zeros(1, np.int64), values)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        """Sample `index`: its containers, with tensors on the device."""
        at = normalize_index(index, len(self), "DeviceDataset")
        return self._samples(np.array([at], np.int64))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices, gathered together."""
        return self._samples(normalize_indices(as_indices(indices), len(self), "DeviceDataset"))

    def read_batch(self, request: BatchRead) -> Batch:
        """The collated batch, on the device."""
        columns = self._take(normalize_indices(request.indices, len(self), "DeviceDataset"), request.allocate)
        return columns if self._is_list else map_leaves(columns.__getitem__, self._batch_template)

    def fill(self, num_workers: int = 0) -> None:
        """Read the samples that must be stored and are not stored yet.

        `num_workers` processes read them.
        """
        missing = np.flatnonzero(~self._filled)
        if not len(missing):
            return
        assert self._rows is not None
        # torch's own loader: its workers return host tensors, and this class itself delivers to the device.
        blocks = np.array_split(missing, -(-len(missing) // _BLOCK))
        loader = torch.utils.data.DataLoader(
            ReadBlocks(self._rows, blocks),
            batch_size=None,
            num_workers=num_workers,
            generator=torch.Generator(),  # the loop's own generator does not change
        )
        for block, values in zip(blocks, loader, strict=True):
            self._put(block, self._checked(values, len(block)))

    @property
    def traits(self) -> Traits:
        """Traits: whole batches from any thread, without random numbers."""
        has_ranges = bool(self._missing) and ranges_of(self.source) is not None
        return Traits(thread_safe=True, is_random=False, uses_keys=False, has_ranges=has_ranges)

    @property
    def listing_fingerprint(self) -> str | None:
        """The fingerprint of the source."""
        return listing_fingerprint_of(self.source)

    @property
    def shard_sizes(self) -> Int64s:
        """Samples per shard of the source, int64."""
        sizes: Int64s = self.source.shard_sizes
        return sizes

    def ranges(self, indices: Int64s) -> Ranges:
        """Ranges that the source reads for samples that are not in memory."""
        ranges = ranges_of(self.source)
        return [] if ranges is None or not self._missing else ranges(self._absent(indices))

    def address(self, index: int) -> tuple[str, str]:
        """The file of a sample and its position there, from the source."""
        found: tuple[str, str] = self.source.address(index)
        return found

    def statistics(self) -> ResidentStatistics:
        """Samples and bytes in memory."""
        sizes = [column.nbytes for column in self._columns]
        on_device, on_host = (sum(size[side] for size in sizes) for side in (0, 1))
        return ResidentStatistics(len(self), int(self._filled.sum()), self._resident, on_device, on_host, self._read)

    def __getstate__(self) -> dict[str, Any]:
        if self.device.type != "cpu":
            raise NotPicklableError(
                f"a DeviceDataset holds memory of {self.device}, which another process cannot read: pass num_workers=0,"
                " or worker_method='thread'"
            )
        return dict(self.__dict__)

    def _samples(self, places: Int64s) -> list[Any]:
        columns = self._take(places, allocate_tensor)
        return [map_leaves(partial(_row, columns, row), self._template) for row in range(len(places))]

    def _take(self, places: Int64s, allocate: Allocator) -> list[Any]:
        if self._tables and not self._missing:
            if self.device.type != "cpu":
                return take_rows(self._tables, places)
            return [gather(table, places, allocate) for table in self._tables]
        unstored: list[Any] = [None] * len(self._columns)
        if self._missing:
            self._load(places)
            beyond = places[places >= self._stored]
            if len(beyond):
                unstored = self._fetch(beyond)
        return [column.take(places, rest, allocate) for column, rest in zip(self._columns, unstored, strict=True)]

    def _whole_tables(self) -> list[torch.Tensor]:
        """The columns, if the device has all their rows."""
        tables = [each.resident for each in self._columns if isinstance(each, TensorColumn)]
        whole = len(tables) == len(self._columns) and all(len(table) == self._length for table in tables)
        return tables if whole else []

    def _load(self, places: Int64s) -> None:
        """Read the samples that must be stored and are not stored yet."""
        missing = self._absent(places)
        missing = missing[missing < self._stored]
        if len(missing):
            self._put(missing, self._fetch(missing))

    def _absent(self, places: Int64s) -> Int64s:
        stored = places < self._stored
        stored[stored] = self._filled[places[stored]]
        return np.unique(places[~stored])

    def _fetch(self, places: Int64s) -> list[Any]:
        assert self._rows is not None
        with self._source_lock():
            values = self._rows.read(places)
        return self._checked(values, len(places))

    def _source_lock(self) -> AbstractContextManager[Any]:
        # Threads that lack samples at the same time read them concurrently if the source allows it.
        return nullcontext() if traits_of(self.source).thread_safe else self._lock

    def _checked(self, values: list[Any], count: int) -> list[Any]:
        """The values of `count` samples that were read, checked."""
        for name, column, value in zip(self._names, self._columns, values, strict=True):
            check_alike(name, column, value)
        with self._lock:
            self._read += count
        return values

    def _put(self, places: Int64s, values: list[Any]) -> None:
        for column, value in zip(self._columns, values, strict=True):
            column.put(places, value)
        # Only after the rows: a thread that sees the mark reads them. Two threads may store the same rows, with equal
        # values.
        with self._lock:
            self._missing -= int((~self._filled[places]).sum())
            self._filled[places] = True

    def _room(self, values: Sequence[Any]) -> int:
        """Rows that fit into the budget."""
        if all(self._is_stored(value) for value in values if isinstance(value, torch.Tensor)) and self.source is None:
            return self._length  # used in place, for any budget
        each = self._row_nbytes(values)
        return min(self._length, budget_nbytes(self.budget, self.device) // each) if each else self._length

    def _is_stored(self, value: torch.Tensor) -> bool:
        """True if a table needs no copy."""
        return value.device == self.device and value.dtype is stored_dtype(value.dtype, self._dtype)

    def _row_nbytes(self, values: Sequence[Any]) -> int:
        tensors = (value for value in values if isinstance(value, torch.Tensor))
        return sum(value[:1].numel() * stored_dtype(value.dtype, self._dtype).itemsize for value in tensors)

    def _check_host(self, values: Sequence[Any]) -> None:
        """Raise ArgumentError rather than allocate more host memory than is free."""
        rest = self._stored - (0 if self.device.type == "cpu" else self._resident)
        needed, free = rest * self._row_nbytes(values), free_nbytes(torch.device("cpu"))
        if needed > free:
            raise ArgumentError(
                f"{rest} samples in host memory take {needed} bytes, but {free} are free: pass spill=False, which reads"
                " samples beyond the budget from the source each time"
            )

    def _empty_column(self, value: Any) -> Column:
        if not isinstance(value, torch.Tensor):
            return HostColumn(self._stored, type(value))
        shape, dtype = value.shape[1:], stored_dtype(value.dtype, self._dtype)
        resident = self._allocate((self._resident, *shape), dtype)
        return TensorColumn(resident, torch.empty((self._stored - self._resident, *shape), dtype=dtype, device="cpu"))

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device=self.device)
        except RuntimeError as error:  # out of memory is one such error
            note(error, f"feedline: {shape[0]} samples of a DeviceDataset; pass a smaller budget= than {self.budget!r}")
            raise

    def _table_column(self, table: torch.Tensor) -> TensorColumn:
        dtype, on_device = stored_dtype(table.dtype, self._dtype), self._resident
        try:
            resident = table[:on_device].to(self.device, dtype)
        except RuntimeError as error:
            note(error, f"feedline: {on_device} rows of a DeviceDataset; pass a smaller budget= than {self.budget!r}")
            raise
        return TensorColumn(resident, table[on_device:].to("cpu", dtype))


class _Lock:
    """A lock; each copy of the dataset gets its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[_Lock], tuple[()]]:
        return _Lock, ()


def _tables(source: Any) -> list[torch.Tensor] | None:
    """The tensors whose rows are the samples; None for a dataset."""
    if type(source) is TensorDataset:
        source = source.tensors
    parts = source.values() if isinstance(source, dict) else source if isinstance(source, tuple) else (source,)
    if not all(isinstance(part, (torch.Tensor, np.ndarray)) for part in parts):
        return None
    return list(map(_table, parts))


def _table(part: Any) -> torch.Tensor:
    if isinstance(part, np.ndarray):
        part = part.astype(part.dtype.newbyteorder("="), copy=False)
        if part.dtype.kind not in "biufc":
            raise ArgumentError(
                f"an array of {part.dtype} cannot be a table of a DeviceDataset, which has numbers: leave it out, or"
                " pass a dataset of samples, whose other values stay on the host"
            )
    return part.detach() if isinstance(part, torch.Tensor) else torch.as_tensor(part, device="cpu")


def _rows_of(source: Any) -> Any:
    """A sample of tables, with anything for rows."""
    if type(source) is TensorDataset:
        source = source.tensors
    if isinstance(source, dict):
        return dict.fromkeys(source, 0)
    return (0,) * len(source) if isinstance(source, tuple) else 0


def _common_length(tables: Sequence[torch.Tensor]) -> int:
    lengths = [len(table) if table.ndim else None for table in tables]
    if None in lengths or len(set(lengths)) > 1:
        raise ArgumentError(f"tensors of a DeviceDataset must have equally many rows, but have {lengths}")
    return lengths[0] or 0 if lengths else 0


def _floating(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentError(f"dtype={dtype!r}: give a floating-point dtype such as torch.bfloat16, or None")
    return dtype


def _row(columns: Sequence[Any], row: int, number: int) -> Any:
    return columns[number][row]
