"""Arrays shared between the training process and its workers (`feedline.share`)."""

from __future__ import annotations

import mmap
import os
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.descriptors import Descriptors
from feedline.errors import ArgumentError
from feedline.workers.transport.memory import fixed_file
from feedline.workers.transport.pickling import bounds_of, is_plain
from feedline.workers.transport.slots import SlotMemoryError
from feedline.workers.transport.views import tensor_over

Array = TypeVar("Array", NDArray[Any], torch.Tensor)


class SharedFile:
    """Mapped file that processes share by its descriptor.

    `np.asarray` gives its bytes. Mapping and descriptor live as long as any array over the bytes.
    """

    def __init__(self, file: Descriptors, nbytes: int) -> None:
        self._file, self.nbytes, self._pid = file, nbytes, os.getpid()
        self._mapped = mmap.mmap(file.fd, nbytes)
        self.address: int = np.frombuffer(self._mapped, np.uint8).__array_interface__["data"][0]
        status = os.fstat(file.fd)
        self.identity = status.st_dev, status.st_ino  # unique while the file is open
        _files[self.address] = self  # weakly: only arrays keep a file

    @property
    def fd(self) -> int:
        """Descriptor of the file; this object owns it."""
        return self._file.fd

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        # A forked child may have closed the inherited descriptor and reused its number for another file.
        if self._pid != os.getpid():
            self._file.disown()


_files: WeakValueDictionary[int, SharedFile] = WeakValueDictionary()


def share(array: Array) -> Array:
    """Copy an array or CPU tensor into memory that worker processes share.

    The copy has the same shape, dtype and values, in C order. Worker processes receive its file descriptor and no
    bytes: there is one copy for any number of workers, also if they get views of it. All processes see what one of them
    writes; concurrent writes are not synchronized. The memory is freed with the last array, loader or worker that uses
    it. Processes of a `spawn` or `forkserver` context, and other uses of pickle, copy the array as usual.

    Accepts NumPy arrays, `np.memmap` included, and dense CPU tensors. Raises ArgumentError for other objects and for
    dtypes that hold Python objects, and SlotMemoryError if there is not enough memory.
    """
    source: Any = array
    if type(source) in (np.ndarray, np.memmap):
        if source.dtype.hasobject:
            raise ArgumentError(f"share: dtype {source.dtype} refers to Python objects, which processes cannot share")
        copy: Any = np.ndarray(source.shape, source.dtype, _allocate(source.nbytes))
        copy[...] = source
    elif type(source) is torch.Tensor and is_plain(source):
        copy = tensor_over(_allocate(source.nbytes), tuple(source.shape), source.dtype)
        copy.copy_(source.detach()).requires_grad_(source.requires_grad)
    else:
        raise ArgumentError(
            f"share: {type(source).__name__} is neither a numpy.ndarray nor a dense CPU tensor; convert it first "
            "(numpy.asarray, tensor.detach().cpu())"
        )
    shared: Array = copy
    return shared


def file_at(address: int) -> SharedFile | None:
    """Shared file whose mapping contains the address, or None."""
    files = (reference() for reference in _files.valuerefs())
    return next((file for file in files if file and 0 <= address - file.address < file.nbytes), None)


def reduce_shared(array: NDArray[Any]) -> Any:
    """Reduce an array over a shared file to a view, for `reducer_override`.

    Otherwise `OutOfBandPickle` would copy arrays that are not contiguous, and NumPy some dtypes. Returns None for other
    arrays, and for contiguous uint8 arrays of one dimension, which need no view.
    """
    if array.size == 0 or (array.dtype == np.uint8 and array.ndim == 1 and array.flags.c_contiguous):
        return None
    low, high = bounds_of(array)
    if (file := file_at(low)) is None:
        return None
    memory = np.asarray(file)[low - file.address : high - file.address]
    offset = array.__array_interface__["data"][0] - low
    return np.ndarray, (array.shape, array.dtype, memory, offset, array.strides)


def allocation_error(nbytes: int, what: str, error: OSError) -> SlotMemoryError:
    """Error for shared memory that the system cannot allocate."""
    return SlotMemoryError(
        f"{nbytes} bytes of shared memory for {what} could not be allocated: {error.strerror}. "
        "Map them from a file (numpy.memmap), or allow the process more memory."
    )


def _allocate(nbytes: int) -> NDArray[np.uint8]:
    nbytes = max(nbytes, 1)  # no mapping is empty
    try:
        return np.asarray(SharedFile(fixed_file(nbytes), nbytes))
    except OSError as error:
        raise allocation_error(nbytes, "an array", error) from error
