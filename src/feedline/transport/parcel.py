"""Pickle protocol 5 with the memory of CPU tensors and NumPy arrays left out of the stream.

The stream holds a mark for every such object; a parcel holds what the marks stand for, in the order of the marks.
"""

from __future__ import annotations

import ctypes
import pickle
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.storage import TypedStorage, UntypedStorage

from feedline.transport.views import ArrayView, BufferView, StorageView, TensorView, View, torch_dtypes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

INLINE_NBYTES = 16 * 1024
"""Memory below this size is cheaper inside the message than beside it."""

GRAIN = 16
"""Regions begin at a multiple of this, the largest element of any torch dtype: offsets in elements stay whole."""

_SLACK_NBYTES = 4096
_MARK = pickle.PickleBuffer(bytearray())

Thing = TypeVar("Thing")


class Span(NamedTuple):
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


class Place(NamedTuple):
    """Where a view's first element lies: in which region, and how many bytes from its beginning."""

    region: int
    offset: int


class Layout(NamedTuple):
    """The regions to be sent, none overlapping another, and the place of every view in them."""

    regions: list[Span]
    places: list[Place]


class Parcel:
    """What one pickling leaves out of its stream, kept alive until the parcel is dropped."""

    def __init__(self) -> None:
        self.views: list[View] = []
        self._spans: list[Span] = []
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

    def layout(self, resident: Callable[[Span], bool]) -> Layout:
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
            places.append(Place(number, span.start - region.start + region.pad))
        by_start = dict(zip(starts, merged, strict=True))
        return Layout([by_start[start] for start in numbers], places)

    def _condense(self, resident: Callable[[Span], bool]) -> None:
        travelling = _merged(span for number, span in enumerate(self._spans) if number not in self._scattered)
        for number, tensor in self._scattered.items():
            span = self._spans[number]
            if not resident(span) and not any(r.start <= span.start and span.stop <= r.stop for r in travelling):
                dense = tensor.detach().contiguous()
                self._kept.append(dense)
                self.views[number] = _tensor_view(dense, tensor.requires_grad)
                self._spans[number] = Span(dense.data_ptr(), dense.data_ptr() + dense.nbytes)

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
        self._spans.append(Span(start, start + nbytes) if nbytes else Span(0, 0))
        self._kept.append(owner)
        return arrived, (_MARK,)


_TAKERS: dict[type, Callable[[Parcel, Any], Any]] = {
    torch.Tensor: Parcel._take_tensor,
    np.ndarray: Parcel._take_array,
    np.memmap: Parcel._take_array,
    UntypedStorage: Parcel._take_storage,
    TypedStorage: Parcel._take_typed_storage,
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


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and (span.start < merged[-1].stop or span.start == merged[-1].start):
            merged[-1] = Span(merged[-1].start, max(span.stop, merged[-1].stop))
        else:
            merged.append(span)
    return merged
