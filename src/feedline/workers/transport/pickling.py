"""Pickling with the memory of tensors and arrays out of band.

The stream holds a mark for every such object; an `OutOfBandPickle` holds the objects, in the order of the marks. Arrays
that are mapped from a file are sent as the file's name and mapped again.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import operator
import pickle
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch.storage import TypedStorage, UntypedStorage

from feedline.workers.transport.special_tensors import reduce_special, typed_storage
from feedline.workers.transport.views import ArrayView, BufferView, StorageView, TensorView, View

INLINE_NBYTES = 16 * 1024
"""Size in bytes below which memory stays inside the message: sending it out of band would cost more."""


GRAIN = 16
"""Alignment of regions in bytes: the largest element size of torch's dtypes, so that offsets are whole elements."""


_SLACK_NBYTES = 4096


_REGISTERED: dict[type, Any] = getattr(ForkingPickler, "_extra_reducers", {})
"""Reducers by type that are registered with `ForkingPickler.register`, which torch's loader sends batches with."""


# One object for all marks: `take_buffer` knows it by identity, and it carries no data.
_MARK = pickle.PickleBuffer(bytearray())


Thing = TypeVar("Thing")


class AddressRange(NamedTuple):
    """Bytes of this process at the addresses [start, stop)."""

    start: int
    stop: int

    @property
    def pad(self) -> int:
        """Bytes between the preceding multiple of `GRAIN` and the start."""
        return self.start % GRAIN

    def copy(self) -> bytearray:
        """Copy the bytes, from the preceding multiple of `GRAIN` on."""
        return bytearray(self.pad) + ctypes.string_at(self.start, self.stop - self.start)


class ViewPlace(NamedTuple):
    """Region and byte offset of the first element of a view."""

    region: int
    offset: int


class RegionLayout(NamedTuple):
    """Disjoint regions to send, and each view's place in them."""

    regions: list[AddressRange]
    places: list[ViewPlace]


class OutOfBandPickle:
    """Views left out of one pickle stream, with their memory."""

    def __init__(self) -> None:
        self.views: list[View] = []
        self._spans: list[AddressRange] = []
        self._owners: list[object] = []
        self._scattered: dict[int, torch.Tensor] = {}

    def reduce(self, obj: object) -> Any:
        """Take the memory of a tensor, array or storage, for `reducer_override`.

        Returns NotImplemented for objects that are not plain or not on the CPU. Raises PicklingError for a tensor that
        is part of an autograd graph.
        """
        take = _TAKERS.get(type(obj))
        if take is not None:
            return take(self, obj)
        reducer = _REGISTERED.get(type(obj))
        # Those of torch and of multiprocessing itself share descriptors by name or by another process.
        if reducer is None or str(getattr(reducer, "__module__", "")).startswith(("torch.", "multiprocessing.")):
            return NotImplemented
        return reducer(obj)

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Take the memory of another object's large buffer, for `buffer_callback`.

        Returns True for a small buffer, which stays inline.
        """
        if buffer is _MARK:
            return False
        raw = buffer.raw()
        if raw.nbytes < INLINE_NBYTES:
            return True
        self._add(BufferView(raw.nbytes), _address(np.frombuffer(raw, np.uint8)), raw.nbytes, raw)
        return False

    def layout(self, resident: Callable[[AddressRange], bool], *, as_torch: bool) -> RegionLayout:
        """Merge the memory of all views into regions.

        Views that overlap share a region, so they overlap at the receiver too. With `as_torch`, only tensors of the
        same storage do: torch sends each storage once, and copies each array. A tensor that covers only a small part of
        its memory is made contiguous, unless `resident` reports that the memory is already shared, or all of it is sent
        anyway.
        """
        if self._scattered:
            self._condense(resident)
        merged = _merge(self._spans)
        if as_torch and len(merged) < len(self._spans) and self._part(merged):
            merged = _merge(self._spans)
        starts = [span.start for span in merged]
        numbers: dict[int, int] = {}
        places = []
        for span in self._spans:
            region = merged[bisect_right(starts, span.start) - 1]
            number = numbers.setdefault(region.start, len(numbers))
            places.append(ViewPlace(number, span.start - region.start + region.pad))
        by_start = dict(zip(starts, merged, strict=True))
        return RegionLayout([by_start[start] for start in numbers], places)

    def _condense(self, resident: Callable[[AddressRange], bool]) -> None:
        traveling = _merge(span for number, span in enumerate(self._spans) if number not in self._scattered)
        for number, tensor in self._scattered.items():
            span = self._spans[number]
            if not resident(span) and not any(r.start <= span.start and span.stop <= r.stop for r in traveling):
                dense = tensor.detach().contiguous()
                self._owners.append(dense)
                self.views[number] = _tensor_view(dense, tensor.requires_grad)
                self._spans[number] = AddressRange(dense.data_ptr(), dense.data_ptr() + dense.nbytes)

    def _part(self, merged: list[AddressRange]) -> bool:
        """Copy memory that objects share by chance; False if there is none.

        The first of them keeps it.
        """
        starts = [span.start for span in merged]
        sharers: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for number, (span, owner) in enumerate(zip(self._spans, self._owners, strict=False)):
            if span.stop:
                sharers[bisect_right(starts, span.start) - 1][_memory_id(owner)].append(number)
        others = [numbers for by_memory in sharers.values() for numbers in list(by_memory.values())[1:]]
        for numbers in others:
            spans = [self._spans[number] for number in numbers]
            whole = AddressRange(min(span.start for span in spans), max(span.stop for span in spans))
            copy = np.empty(whole.stop - whole.start + 2 * GRAIN, np.uint8)
            first = -(-_address(copy) // GRAIN) * GRAIN + whole.pad
            ctypes.memmove(first, whole.start, whole.stop - whole.start)
            self._owners.append(copy)
            for number, span in zip(numbers, spans, strict=True):
                self._spans[number] = AddressRange(*(first + address - whole.start for address in span))
        return bool(others)

    def _take_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.requires_grad and not tensor.is_leaf:
            raise pickle.PicklingError(
                "it is part of an autograd graph, which cannot leave its process; call detach() on it"
            )
        if not is_plain(tensor):
            return reduce_special(tensor)
        itemsize, start = tensor.itemsize, tensor.data_ptr()
        # The receiver counts offsets in elements, so a tensor over unaligned bytes has to be copied.
        if start % itemsize:
            return self._take_tensor(tensor.detach().clone().requires_grad_(tensor.requires_grad))
        nbytes = tensor.nbytes
        extent = nbytes if tensor.is_contiguous() else _extent(tensor)
        if extent > 2 * nbytes + _SLACK_NBYTES:
            self._scattered[len(self.views)] = tensor
        return self._add(_tensor_view(tensor, tensor.requires_grad), start, extent, tensor)

    def _take_memmap(self, array: np.memmap[Any, Any]) -> Any:
        return as_memmap, (array.view(np.ndarray),)

    def _take_array(self, array: NDArray[Any]) -> Any:
        dtype = array.dtype
        if dtype.kind not in "biufcmM" or dtype.metadata is not None:
            return NotImplemented
        flags = array.flags
        if not (flags.c_contiguous or flags.f_contiguous):
            # As pickling does; torch, for one, refuses arrays with negative strides.
            array = np.array(array, order="C")
        if not dtype.isnative:  # as pickling does; torch refuses the other byte order, too
            array = array.astype(dtype.newbyteorder("="))
            dtype = array.dtype
        return self._add(ArrayView(dtype.str, array.shape, array.strides), _address(array), array.nbytes, array)

    def _take_storage(self, storage: UntypedStorage) -> Any:
        if storage.device.type != "cpu":
            return NotImplemented
        return self._add(StorageView(storage.nbytes()), storage.data_ptr(), storage.nbytes(), storage)

    def _take_typed_storage(self, storage: TypedStorage) -> Any:
        untyped = storage._untyped_storage  # public methods of a typed storage warn that it is deprecated
        if untyped.device.type != "cpu":
            return NotImplemented
        return typed_storage, (untyped, str(storage.dtype))

    def _add(self, view: View, start: int, nbytes: int, owner: object) -> Any:
        self.views.append(view)
        # The address of empty memory is meaningless: it may be within other memory, and must not join it.
        self._spans.append(AddressRange(start, start + nbytes) if nbytes else AddressRange(0, 0))
        self._owners.append(owner)
        return restore, (_MARK,)


_TAKERS: dict[type, Callable[[OutOfBandPickle, Any], Any]] = {
    torch.Tensor: OutOfBandPickle._take_tensor,
    np.ndarray: OutOfBandPickle._take_array,
    np.memmap: OutOfBandPickle._take_memmap,
    UntypedStorage: OutOfBandPickle._take_storage,
    TypedStorage: OutOfBandPickle._take_typed_storage,
}


def restore(thing: Thing) -> Thing:
    """Return the object that replaces a mark; called from pickle streams."""
    return thing


def as_memmap(array: NDArray[Any]) -> np.memmap[Any, Any]:
    """An array in memory as memmap without a file, like pickled ones."""
    return array.view(np.memmap)


def is_plain(tensor: torch.Tensor) -> bool:
    """True if strided CPU memory is all the state of the tensor."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
        and tensor._backward_hooks is None
        and (tensor.data_ptr() != 0 or tensor.numel() == 0)
    )


def _tensor_view(tensor: torch.Tensor, requires_grad: bool) -> TensorView:
    return TensorView(str(tensor.dtype), tuple(tensor.shape), tensor.stride(), requires_grad)


def _extent(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _memory_id(owner: object) -> int:
    """The same number for all views of one storage."""
    storage = owner.untyped_storage() if isinstance(owner, torch.Tensor) else owner
    return storage._cdata if isinstance(storage, UntypedStorage) else id(owner)


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _merge(spans: Iterable[AddressRange]) -> list[AddressRange]:
    merged: list[AddressRange] = []
    for span in sorted(spans):
        if merged and (span.start < merged[-1].stop or span.start == merged[-1].start):
            merged[-1] = AddressRange(merged[-1].start, max(span.stop, merged[-1].stop))
        else:
            merged.append(span)
    return merged


Pickling = tuple[bytes, OutOfBandPickle]
"""Pickle stream, and the memory that was left out of it."""


class ReferencePickler(pickle.Pickler):
    """Pickler of functions and classes by name, as usual."""

    def __init__(self, file: io.BytesIO, oob: OutOfBandPickle) -> None:
        super().__init__(file, 5, buffer_callback=oob.take_buffer)
        self._oob = oob

    def reducer_override(self, obj: Any) -> Any:
        return self._oob.reduce(obj)


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler of functions and classes by value if they cannot be imported.

    Definitions of `__main__` are pickled by value too: a worker's `__main__` is another module.
    """

    def __init__(self, file: io.BytesIO, oob: OutOfBandPickle) -> None:
        super().__init__(file, 5, buffer_callback=oob.take_buffer)
        self._oob = oob

    def reducer_override(self, obj: Any) -> Any:
        reduced = self._oob.reduce(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


class MixedPickler(ValuePickler):
    """Pickler by name where the name can be found, else by value.

    Names in `__main__` can be found, too.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and find_definition(obj.__module__, obj.__qualname__) is obj:
            return NotImplemented
        return super().reducer_override(obj)


def dump_out_of_band(obj: Any, pickler: Callable[[io.BytesIO, OutOfBandPickle], pickle.Pickler]) -> Pickling:
    oob = OutOfBandPickle()
    stream = io.BytesIO()
    pickler(stream, oob).dump(obj)
    return stream.getvalue(), oob


def find_definition(module: str | None, name: str) -> object:
    """Object of that name in an imported module, or None."""
    try:
        return operator.attrgetter(name)(sys.modules[module or "__main__"])
    except (KeyError, AttributeError):
        return None


class MappedArray(NamedTuple):
    """Array in the `nbytes` bytes of a file from `position` on.

    `offset` is the byte offset of its first element in them.
    """

    filename: str | Path
    mode: str
    position: int
    nbytes: int
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    plain: bool

    def open(self) -> NDArray[Any]:
        """Map the array; a plain `ndarray` stays one."""
        file = np.memmap(self.filename, np.uint8, self.mode, self.position, (self.nbytes,))  # type: ignore[call-overload]
        first = file[self.offset : self.offset + self.dtype.itemsize].view(self.dtype)
        array = as_strided(first, self.shape, self.strides, subok=True)
        return array.view(np.ndarray) if self.plain else array


def reduce_file(array: NDArray[Any]) -> Any:
    """Reduce a file-mapped array to a call that maps the file again.

    For `reducer_override`. Returns None for other arrays, and if the file has become too short. An array of mode "c" is
    reopened with mode "c", without the data written to it.
    """
    if array.size == 0 or type(array) not in (np.ndarray, np.memmap) or (file := file_of(array)) is None:
        return None
    low, high = bounds_of(array)
    start = np.frombuffer(file._mmap, np.uint8).__array_interface__["data"][0]  # type: ignore[attr-defined]
    position = file.offset - file.offset % mmap.ALLOCATIONGRANULARITY + low - start
    filename = file.filename
    if filename is None or not _has_bytes(filename, position + high - low):
        return None
    address = array.__array_interface__["data"][0]
    mapped = MappedArray(
        filename,
        "r+" if file.mode == "w+" else file.mode,
        position,
        high - low,
        address - low,
        array.dtype,
        array.shape,
        array.strides,
        type(array) is np.ndarray,
    )
    return MappedArray.open, (mapped,)


def file_of(array: NDArray[Any]) -> np.memmap[Any, Any] | None:
    """Memmap that the array is or views, or None."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        if isinstance(owner, np.memmap) and owner._mmap is not None:  # type: ignore[attr-defined]
            return owner
        owner = owner.base
    return None


def bounds_of(array: NDArray[Any]) -> tuple[int, int]:
    """Addresses of the first byte and after the last byte."""
    reach = [(size - 1) * step for size, step in zip(array.shape, array.strides, strict=True)]
    address: int = array.__array_interface__["data"][0]
    return address + sum(r for r in reach if r < 0), address + sum(r for r in reach if r > 0) + array.itemsize


def _has_bytes(filename: str | Path, nbytes: int) -> bool:
    try:
        return Path(filename).stat().st_size >= nbytes
    except OSError:
        return False


def check_not_shared(obj: object) -> None:
    """Raise PicklingError for a tensor or array in inherited shared memory.

    A pickled copy would silently stop being shared.
    """
    if isinstance(obj, np.ndarray):
        shared = obj.flags.writeable and _is_shared(obj)
    elif type(obj) is torch.Tensor:
        shared = obj.is_cpu and obj.layout is torch.strided and obj.untyped_storage().is_shared()
    else:
        return
    if shared:
        raise pickle.PicklingError("its memory is shared between processes, and a worker can only inherit it by a fork")


def _is_shared(array: NDArray[Any]) -> bool:
    if (file := file_of(array)) is not None and file.mode == "c":
        return False
    owner: object = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    # What multiprocessing.Array and Value hand out is a ctypes object with the shared block as its `_wrapper`.
    return isinstance(owner, mmap.mmap) or hasattr(owner, "_wrapper")
