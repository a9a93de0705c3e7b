"""`CachedMap`: results of a function over each sample, cached on disk.

`encode` and `decode` serialize samples of tensors, arrays, numbers, str and bytes in dicts, lists and tuples, without
pickle. `RecordStore` keeps numbered records in a folder that several processes write to without locks.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch

from feedline.core.caches import PerProcess
from feedline.core.dataset import Ranges
from feedline.core.kernels import Int64s
from feedline.core.paths import Pathlike, folder_path
from feedline.core.rng import addressed, takes_rng
from feedline.core.tensors import as_indices, normalize_index, normalize_indices, numpy_view, torch_dtype
from feedline.datasets.fingerprints import fingerprint
from feedline.datasets.wrappers import WrappedDataset, samples_of
from feedline.errors import ArgumentError, SampleError

_LENGTH_NBYTES = 8


_ALIGNMENT = 64


_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def encode(sample: Any) -> bytes:
    """Serialize a sample; SampleError names an unsupported type."""
    buffers: list[bytes] = []
    head = json.dumps(_describe(sample, buffers, "sample")).encode()
    head = head.ljust(-(-(len(head) + _LENGTH_NBYTES) // _ALIGNMENT) * _ALIGNMENT - _LENGTH_NBYTES)
    return b"".join([len(head).to_bytes(_LENGTH_NBYTES, "little"), head, *buffers])


def decode(data: bytes) -> Any:
    """Deserialize a sample, equal in values, dtypes and containers.

    Its memory is independent of `data`.
    """
    start = _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES], "little")
    return _restore(json.loads(data[_LENGTH_NBYTES:start]), memoryview(data)[start:])


def _describe(value: Any, buffers: list[bytes], where: str) -> Any:
    """Describe a value as JSON; raw bytes are appended to `buffers`.

    The description refers to them by offset and length.
    """
    kind = type(value)
    if kind in {bool, int, str} or value is None:
        return {"v": value}
    if kind is float:
        return {"f": value.hex()}
    if kind is dict and all(type(key) in {str, int} for key in value):
        return {"d": [[key, _describe(each, buffers, f"{where}[{key!r}]")] for key, each in value.items()]}
    if kind in {list, tuple}:
        return {kind.__name__[0]: [_describe(each, buffers, f"{where}[{i}]") for i, each in enumerate(value)]}
    if kind is bytes:
        return {"b": _append(value, buffers)}
    if kind is torch.Tensor and value.layout is torch.strided and not value.is_quantized:
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return {"T": [str(value.dtype), list(value.shape), *_append(numpy_view(plain).tobytes(), buffers)]}
    if isinstance(value, np.ndarray) and kind is np.ndarray and torch_dtype(value.dtype) is not None:
        return {"A": [value.dtype.str, list(value.shape), *_append(value.tobytes(), buffers)]}
    if isinstance(value, np.generic) and torch_dtype(value.dtype) is not None:
        return {"S": [value.dtype.str, [], *_append(value.tobytes(), buffers)]}
    raise SampleError(
        f"{where} is of type {kind.__name__}, which cannot be cached on disk; supported are tensors, arrays,"
        " numbers, str, bytes, None, and dicts (with keys of str or int), lists and tuples of these"
    )


def _append(data: bytes, buffers: list[bytes]) -> list[int]:
    start = sum(map(len, buffers))
    padding = -start % 16
    buffers.append(b"\0" * padding)
    buffers.append(data)
    return [start + padding, len(data)]


def _restore(described: Any, buffers: memoryview) -> Any:
    ((kind, value),) = described.items()
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](_restore(each, buffers) for each in value)
    if kind == "d":
        return {key: _restore(each, buffers) for key, each in value}
    if kind == "v":
        return value
    if kind == "f":
        return float.fromhex(value)
    *form, start, length = value
    piece = bytearray(buffers[start : start + length])
    if kind == "b":
        return bytes(piece)
    dtype, shape = form
    if kind == "T":
        flat = (
            torch.frombuffer(piece, dtype=_DTYPES[dtype])
            if piece
            else torch.empty(0, dtype=_DTYPES[dtype], device="cpu")
        )
        return flat.reshape(shape)
    array = np.frombuffer(piece, dtype).reshape(shape)
    return array if kind == "A" else array[()]


_CONTAINERS: dict[str, Any] = {"l": list, "t": tuple}


_ENTRY = struct.Struct("<IIQ")
"""Index entry: segment number from 1, record length, position in the segment. Segment 0 means no record."""


_HEADER = struct.Struct("<QII")
"""Record header: number, length, and CRC-32 of the number and the record."""


class RecordStore:
    """Records numbered below `length`, stored in a folder.

    Each process appends to its own segment file. The shared index gets the position after the record is written, so a
    process killed in between leaves only unreferenced bytes. A record that fails its checksum counts as missing. No
    locks between processes are needed: if two write the same number, one of the two is read.
    """

    def __init__(self, folder: str, length: int) -> None:
        self._folder, self._length = Path(folder), length
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / "index", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(
                descriptor, length * _ENTRY.size
            )  # zeros mean no record; concurrent calls have the same effect
        finally:
            os.close(descriptor)
        self._files = PerProcess(partial(_OpenRecords, self._folder))

    def get(self, number: int) -> bytes | None:
        """The record, or None if it is missing or damaged."""
        segment, nbytes, place = _ENTRY.unpack(self._files().index_entry(number))
        return self._files().record(number, segment, nbytes, place) if segment else None

    def has(self, number: int) -> bool:
        """True if a record was put; its checksum is not verified."""
        segment, _, _ = _ENTRY.unpack(self._files().index_entry(number))
        return bool(segment)

    def put(self, number: int, data: bytes) -> None:
        """Store a record; OSError if the folder is full or read-only."""
        self._files().append(number, data)

    def count(self) -> int:
        """Number of intact records."""
        return sum(self.get(number) is not None for number in range(self._length))


class _OpenRecords:
    """Open files of one process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = self._close_later(os.open(folder / "index", os.O_RDWR))
        self._segments: dict[int, mmap.mmap] = {}
        self._lock = Lock()
        self._own: tuple[int, int] | None = None

    def _close_later(self, descriptor: int) -> int:
        """Close the descriptor when this object is garbage-collected."""
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def index_entry(self, number: int) -> bytes:
        return os.pread(self._index, _ENTRY.size, number * _ENTRY.size)

    def record(self, number: int, segment: int, nbytes: int, place: int) -> bytes | None:
        stop = place + _HEADER.size + nbytes
        mapped = self._map(segment, stop)
        if mapped is None:
            return None
        whole = mapped[place:stop]
        data = whole[_HEADER.size :]
        return data if whole[: _HEADER.size] == _header(number, data) else None

    def _map(self, segment: int, stop: int) -> mmap.mmap | None:
        """Map the segment to at least `stop`; None if shorter."""
        mapped = self._segments.get(segment)
        if mapped is None or len(mapped) < stop:
            try:
                with open(self._folder / _segment_name(segment), "rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            except (OSError, ValueError):  # removed, or empty
                return None
            self._segments[segment] = mapped
        return mapped if len(mapped) >= stop else None

    def append(self, number: int, data: bytes) -> None:
        with self._lock:
            if self._own is None:
                segment, descriptor = _new_segment(self._folder)
                self._own = segment, self._close_later(descriptor)
            segment, descriptor = self._own
            place = os.lseek(descriptor, 0, os.SEEK_END)
            _write(descriptor, _header(number, data) + data)
            # Only after the record: the index must never refer to an unwritten one.
            os.pwrite(self._index, _ENTRY.pack(segment, len(data), place), number * _ENTRY.size)


def _header(number: int, data: bytes) -> bytes:
    return _HEADER.pack(number, len(data), zlib.crc32(data, zlib.crc32(number.to_bytes(8, "little"))))


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _new_segment(folder: Path) -> tuple[int, int]:
    """Create a segment for this process; returns number and descriptor."""
    for segment in count(1 + sum(1 for _ in folder.glob("segment-*"))):
        try:
            return segment, os.open(folder / _segment_name(segment), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            continue
    raise AssertionError


def _segment_name(segment: int) -> str:
    return f"segment-{segment:08d}"


_BATCH = 64


class CacheWriteWarning(RuntimeWarning):
    """A result could not be stored, and will be computed again."""


class CachedMap(WrappedDataset):
    """`fn(sample)` of each sample, cached in `folder` on first access.

    Results are stored in a subfolder named by a fingerprint of the function, of all objects that the function refers
    to, and of the dataset. When one of them changes, results are computed again in a new subfolder. ArgumentError if
    changes of the dataset cannot be detected, as for objects of a store without versions. Several workers and jobs may
    share a folder; if a process is killed, only the sample that it was computing is lost. `fn` returns tensors, arrays,
    numbers, str, bytes, and dicts, lists and tuples of these. A function or a dataset that draws from the generator of
    the sample raises an ArgumentError, because its results vary.
    """

    def __init__(self, dataset: Any, fn: Any, folder: Pathlike) -> None:
        if not callable(fn) or takes_rng(fn):
            raise ArgumentError("fn must be callable with only a sample; use Map for random functions")
        root = folder_path(folder, "folder")
        super().__init__(dataset)
        self.fn = fn
        self.folder = str(root / fingerprint("map", fn, dataset, len(dataset)))
        self._store = RecordStore(self.folder, len(dataset))

    def ranges(self, indices: Int64s) -> Ranges:
        """Ranges that the wrapped dataset reads for missing results."""
        return super().ranges(np.array([at for at in indices.tolist() if not self._store.has(at)], np.int64))

    def fill(self, num_workers: int = 0) -> None:
        """Compute all missing results now, in `num_workers` processes."""
        if len(self):
            loader = torch.utils.data.DataLoader(
                _FillingPass(self),
                _BATCH,
                num_workers=num_workers,
                collate_fn=len,
                generator=torch.Generator(),  # the global generator does not change
            )
            for _ in loader:
                pass

    def __getitem__(self, index: int) -> Any:
        """The result for sample `index`."""
        at = normalize_index(index, len(self), "CachedMap")
        data = self._store.get(at)
        return decode(self._computed([at], lambda _: [self.dataset[at]])[at] if data is None else data)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The results for these samples.

        The samples of missing results are fetched together if the dataset supports it.
        """
        places = normalize_indices(as_indices(indices), len(self), "CachedMap").tolist()
        found = {at: self._store.get(at) for at in places}
        missing = [at for at, data in found.items() if data is None]
        computed = self._computed(missing, partial(samples_of, self.dataset)) if missing else {}
        # Decoded for each place, not for each index: a loop may write into its samples.
        return [decode(computed[at] if data is None else data) for at, data in ((at, found[at]) for at in places)]

    def _computed(self, missing: list[int], fetch: Callable[[list[int]], list[Any]]) -> dict[int, bytes]:
        """Results that were missing, encoded; each is stored at once."""
        results = {}
        with addressed(_RefusedKeys(self.dataset)):
            for at, sample in zip(missing, fetch(missing), strict=True):
                results[at] = encode(self.fn(sample))
                self._keep(at, results[at])
        return results

    def _keep(self, at: int, data: bytes) -> None:
        try:
            self._store.put(at, data)
        except OSError as error:
            warnings.warn(
                f"results cannot be stored in {self.folder} ({error.strerror}), and are computed each time: free space"
                " there, or give another folder",
                CacheWriteWarning,
                stacklevel=4,
            )


class _RefusedKeys(Sequence[int]):
    """Keys of samples whose random numbers would be stored."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: Any) -> Any:
        raise ArgumentError(
            f"samples of this {type(self._dataset).__name__}, or the results of fn, are random, and a CachedMap would"
            " repeat the first ones: leave out what is random, and apply it to the stored results (Map)"
        )


class _FillingPass(torch.utils.data.Dataset[None]):
    """Computes and stores missing results; its samples are None."""

    def __init__(self, cached: CachedMap) -> None:
        self._cached = cached

    def __len__(self) -> int:
        return len(self._cached)

    def __getitem__(self, index: int) -> None:
        self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> list[None]:
        self._cached.__getitems__(indices)
        return [None] * len(indices)
