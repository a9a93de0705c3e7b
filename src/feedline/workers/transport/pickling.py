"""Pickle protocol 5 with the memory of CPU tensors and NumPy arrays left out of the stream.

The stream holds a mark for every such object; a parcel holds what the marks stand for, in the order of the marks.

The C pickler with a parcel for what it leaves out; by value where nothing else helps.

Arrays that are mapped from a file travel as the file's name, and are mapped again.

Memory that processes share because one has inherited it from the other: nothing that is pickled can stand for it.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import operator
import pickle
import sys
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch.storage import TypedStorage, UntypedStorage

from feedline.workers.transport.views import ArrayView, BufferView, StorageView, TensorView, View, torch_dtypes

if TYPE_CHECKING:
    from collections.abc import Iterable


INLINE_NBYTES = 16 * 1024
"""Memory below this size is cheaper inside the message than beside it."""


GRAIN = 16
"""Regions begin at a multiple of this, the largest element of any torch dtype: offsets in elements stay whole."""


_SLACK_NBYTES = 4096


_MARK = pickle.PickleBuffer(bytearray())


Thing = TypeVar("Thing")


class AddressRange(NamedTuple):
    """Bytes of this process, from address `start` up to but not including `stop`."""

    start: int
    stop: int

    @property
    def pad(self) -> int:
        """Bytes between the last grain boundary and the start."""
        return self.start % GRAIN

    def copy(self) -> bytearray:
        """The bytes, from the last grain boundary on."""
        return bytearray(self.pad) + ctypes.string_at(self.start, self.stop - self.start)


class ViewPlace(NamedTuple):
    """Where a view's first element lies: in which region, and how many bytes from its beginning."""

    region: int
    offset: int


class RegionLayout(NamedTuple):
    """The regions to be sent, none overlapping another, and the place of every view in them."""

    regions: list[AddressRange]
    places: list[ViewPlace]


class OutOfBandPickle:
    """What one pickling leaves out of its stream, kept alive until the parcel is dropped."""

    def __init__(self) -> None:
        self.views: list[View] = []
        self._spans: list[AddressRange] = []
        self._kept: list[object] = []
        self._scattered: dict[int, torch.Tensor] = {}

    def reduce(self, obj: object) -> Any:
        """For `reducer_override`: take the memory of what is plain CPU memory, decline all else."""
        take = _TAKERS.get(type(obj))
        return NotImplemented if take is None else take(self, obj)

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """For `buffer_callback`: large buffers of foreign objects are left out too; True lets a small one stay."""
        if buffer is _MARK:
            return False
        raw = buffer.raw()
        if raw.nbytes < INLINE_NBYTES:
            return True
        self._add(BufferView(raw.nbytes), _address(np.frombuffer(raw, np.uint8)), raw.nbytes, raw)
        return False

    def layout(self, resident: Callable[[AddressRange], bool]) -> RegionLayout:
        """Where everything goes. Views that overlap share a region, so they still overlap on the other side.

        A tensor that shows only a small part of its memory is made contiguous, unless `resident` says that the memory
        is already shared, or all of it travels anyway.
        """
        if self._scattered:
            self._condense(resident)
        merged = _merged(self._spans)
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
        traveling = _merged(span for number, span in enumerate(self._spans) if number not in self._scattered)
        for number, tensor in self._scattered.items():
            span = self._spans[number]
            if not resident(span) and not any(r.start <= span.start and span.stop <= r.stop for r in traveling):
                dense = tensor.detach().contiguous()
                self._kept.append(dense)
                self.views[number] = _tensor_view(dense, tensor.requires_grad)
                self._spans[number] = AddressRange(dense.data_ptr(), dense.data_ptr() + dense.nbytes)

    def _take_tensor(self, tensor: torch.Tensor) -> Any:
        if not is_plain(tensor):
            return NotImplemented
        if tensor.requires_grad and not tensor.is_leaf:
            raise pickle.PicklingError("it is part of an autograd graph, which cannot leave its process; detach() it")
        itemsize, start = tensor.itemsize, tensor.data_ptr()
        if start % itemsize:
            return self._take_tensor(tensor.detach().clone().requires_grad_(tensor.requires_grad))
        nbytes = tensor.nbytes
        extent = nbytes if tensor.is_contiguous() else _extent(tensor)
        if extent > 2 * nbytes + _SLACK_NBYTES:
            self._scattered[len(self.views)] = tensor
        return self._add(_tensor_view(tensor, tensor.requires_grad), start, extent, tensor)

    def _take_array(self, array: NDArray[Any]) -> Any:
        dtype = array.dtype
        if dtype.kind not in "biufcmM" or dtype.metadata is not None:
            return NotImplemented
        flags = array.flags
        if not (flags.c_contiguous or flags.f_contiguous):
            # As pickling does; torch, for one, refuses arrays with negative strides.
            array = np.array(array, order="C")
        return self._add(ArrayView(dtype.str, array.shape, array.strides), _address(array), array.nbytes, array)

    def _take_storage(self, storage: UntypedStorage) -> Any:
        if storage.device.type != "cpu":
            return NotImplemented
        return self._add(StorageView(storage.nbytes()), storage.data_ptr(), storage.nbytes(), storage)

    def _take_typed_storage(self, storage: TypedStorage) -> Any:
        if storage.device.type != "cpu":
            return NotImplemented
        return typed_storage, (storage._untyped_storage, str(storage.dtype))

    def _add(self, view: View, start: int, nbytes: int, owner: object) -> Any:
        self.views.append(view)
        self._spans.append(AddressRange(start, start + nbytes) if nbytes else AddressRange(0, 0))
        self._kept.append(owner)
        return arrived, (_MARK,)


_TAKERS: dict[type, Callable[[OutOfBandPickle, Any], Any]] = {
    torch.Tensor: OutOfBandPickle._take_tensor,
    np.ndarray: OutOfBandPickle._take_array,
    np.memmap: OutOfBandPickle._take_array,
    UntypedStorage: OutOfBandPickle._take_storage,
    TypedStorage: OutOfBandPickle._take_typed_storage,
}


def arrived(thing: Thing) -> Thing:
    """In the stream: what stands behind a mark is already the object itself."""
    return thing


def typed_storage(untyped: UntypedStorage, dtype: str) -> TypedStorage:
    """In the stream: the storage that torch's own reductions of tensor subclasses refer to."""
    return TypedStorage(wrap_storage=untyped, dtype=torch_dtypes()[dtype], _internal=True)  # type: ignore[no-untyped-call]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether strided CPU memory is all that there is to the tensor."""
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


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _merged(spans: Iterable[AddressRange]) -> list[AddressRange]:
    merged: list[AddressRange] = []
    for span in sorted(spans):
        if merged and (span.start < merged[-1].stop or span.start == merged[-1].start):
            merged[-1] = AddressRange(merged[-1].start, max(span.stop, merged[-1].stop))
        else:
            merged.append(span)
    return merged


Pickling = tuple[bytes, OutOfBandPickle]
"""A stream, and what was left out of it."""


class ReferencePickler(pickle.Pickler):
    """Functions and classes travel by name, as is usual."""

    def __init__(self, file: io.BytesIO, parcel: OutOfBandPickle) -> None:
        super().__init__(file, 5, buffer_callback=parcel.take_buffer)
        self._parcel = parcel

    def reducer_override(self, obj: Any) -> Any:
        return self._parcel.reduce(obj)


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Functions and classes travel by value if they cannot be imported, or come from `__main__`."""

    def __init__(self, file: io.BytesIO, parcel: OutOfBandPickle) -> None:
        super().__init__(file, 5, buffer_callback=parcel.take_buffer)
        self._parcel = parcel

    def reducer_override(self, obj: Any) -> Any:
        reduced = self._parcel.reduce(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


class MixedPickler(ValuePickler):
    """By name what can be found by its name, be it in `__main__`, and only the rest by value."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and find_definition(obj.__module__, obj.__qualname__) is obj:
            return NotImplemented
        return super().reducer_override(obj)


def pickled(obj: Any, pickler: Callable[[io.BytesIO, OutOfBandPickle], pickle.Pickler]) -> Pickling:
    parcel = OutOfBandPickle()
    stream = io.BytesIO()
    pickler(stream, parcel).dump(obj)
    return stream.getvalue(), parcel


def find_definition(module: str | None, name: str) -> object:
    """What a module that is imported already calls by that qualified name, or None."""
    try:
        return operator.attrgetter(name)(sys.modules[module or "__main__"])
    except (KeyError, AttributeError):
        return None


class MappedArray(NamedTuple):
    """An array within the `nbytes` bytes of a file from `position` on; its first element is `offset` bytes in."""

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
        """The array, mapped anew: a memmap, or, if it was a plain array over one, a plain array."""
        file = np.memmap(self.filename, np.uint8, self.mode, self.position, (self.nbytes,))  # type: ignore[call-overload]
        first = file[self.offset : self.offset + self.dtype.itemsize].view(self.dtype)
        array = as_strided(first, self.shape, self.strides, subok=True)
        return array.view(np.ndarray) if self.plain else array


def reduce_file(array: NDArray[Any]) -> Any:
    """For `reducer_override`: how to map the array again, or None if it is not mapped from a file that still has it.

    An array opened with mode "c" is reopened so, without what was written to it.
    """
    if array.size == 0 or type(array) not in (np.ndarray, np.memmap) or (file := file_of(array)) is None:
        return None
    low, high = bounds_of(array)
    start = np.frombuffer(file._mmap, np.uint8).__array_interface__["data"][0]  # type: ignore[attr-defined]
    position = file.offset - file.offset % mmap.ALLOCATIONGRANULARITY + low - start
    filename = file.filename
    if filename is None or not _reaches(filename, position + high - low):
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
    """The memmap that the array is, or is a view of."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        if isinstance(owner, np.memmap) and owner._mmap is not None:  # type: ignore[attr-defined]
            return owner
        owner = owner.base
    return None


def bounds_of(array: NDArray[Any]) -> tuple[int, int]:
    """The addresses of its first byte and of the one after its last."""
    reach = [(size - 1) * step for size, step in zip(array.shape, array.strides, strict=True)]
    address: int = array.__array_interface__["data"][0]
    return address + sum(r for r in reach if r < 0), address + sum(r for r in reach if r > 0) + array.itemsize


def _reaches(filename: str | Path, nbytes: int) -> bool:
    try:
        return Path(filename).stat().st_size >= nbytes
    except OSError:
        return False


def refuse_shared(obj: object) -> None:
    """Raises PicklingError for a tensor or array whose memory other processes are meant to see when it changes.

    A copy of it would quietly part them.
    """
    if isinstance(obj, np.ndarray):
        shared = obj.flags.writeable and _is_shared(obj)
    elif type(obj) is torch.Tensor:
        shared = obj.is_cpu and obj.layout is torch.strided and obj.untyped_storage().is_shared()
    else:
        return
    if shared:
        raise pickle.PicklingError("its memory is shared between processes, which a worker can only inherit (fork)")


def _is_shared(array: NDArray[Any]) -> bool:
    if (file := file_of(array)) is not None and file.mode == "c":
        return False
    owner: object = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    # What multiprocessing.Array and Value hand out is a ctypes object with the shared block as its `_wrapper`.
    return isinstance(owner, mmap.mmap) or hasattr(owner, "_wrapper")
