"""Shared memory: anonymous files, or named segments where these do not exist."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from itertools import starmap
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from feedline.core.descriptors import Descriptors, opened, releaser

if sys.platform == "linux":
    import fcntl


Handle = int | str
"""Descriptor or name by which another process maps the same memory."""


_NAME = "feedline"


class Mapping:
    """Writable mapped memory, unmapped with the last array made from it.

    `owner` unmaps it when it is dropped. `np.asarray(mapping)` is the memory, as bytes. `on_unmap`, if set, is called
    once with the address just before that, in the thread that drops the last reference.
    """

    __slots__ = ("_owner", "_pid", "address", "nbytes", "on_unmap")

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.on_unmap: Callable[[int], object] | None = None
        self._pid = os.getpid()
        self.address = address
        self.nbytes = nbytes
        self._owner = owner

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        # A forked child inherits the mapping, but not its registration in the parent.
        on_unmap = getattr(self, "on_unmap", None)  # an interrupt may have ended the constructor
        if on_unmap is not None and self._pid == os.getpid():
            on_unmap(self.address)


class Backing(Protocol):
    """Source of new shared memory."""

    def create(self, nbytes: int) -> tuple[Mapping, Handle]:
        """Allocate and commit memory; raise OSError if the machine cannot hold it.

        Uncommitted memory would raise SIGBUS on a later write. If the handle is a descriptor, the caller owns it.
        """
        ...


class AnonymousFiles:
    """Memory from memfd, freed with the last process that maps it."""

    def create(self, nbytes: int) -> tuple[Mapping, Handle]:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            return attach(fd, nbytes), fd
        except BaseException:
            os.close(fd)
            raise


class NamedSegments:
    """Memory from multiprocessing.shared_memory, for macOS and Windows.

    The receiver removes the name as soon as it has mapped the segment.
    """

    def create(self, nbytes: int) -> tuple[Mapping, Handle]:
        segment = SharedMemory(create=True, size=nbytes)
        if sys.platform != "win32":
            # The receiver removes the name; the resource tracker of this process would report it as leaked.
            resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
        return _map_segment(segment, nbytes), segment.name


def has_anonymous_files() -> bool:
    """True if this system has memfd."""
    return hasattr(os, "memfd_create")


def default_backing() -> Backing:
    """Anonymous files where the system has them, else named segments."""
    return AnonymousFiles() if has_anonymous_files() else NamedSegments()


def attach(handle: Handle, nbytes: int) -> Mapping:
    """Map the memory of a handle, shared by both sides.

    A descriptor stays open, and the caller still owns it. A name is removed.
    """
    if isinstance(handle, int):
        return _map_descriptor(handle, nbytes, _MAP_SHARED)
    segment = SharedMemory(name=handle)
    segment.unlink()
    return _map_segment(segment, nbytes)


def attach_private(fd: int, nbytes: int) -> Mapping:
    """Map the memory of a descriptor copy-on-write: writes stay in this process."""
    return _map_descriptor(fd, nbytes, _MAP_PRIVATE)


def fixed_file(nbytes: int) -> Descriptors:
    """Create an anonymous, committed file of zeros.

    Where memfd exists, the size is sealed: no process can shrink the file under a mapping of another process, whose
    access would raise SIGBUS.
    """
    if has_anonymous_files():
        memory = opened(os.memfd_create, _NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            memory = opened(os.dup, file.fileno())
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(memory.fd, 0, nbytes)
    else:
        os.truncate(memory.fd, nbytes)
    if has_anonymous_files():
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return memory


class MemoryPiece(NamedTuple):
    """Bytes at an address, with their offset in a file."""

    offset: int
    address: int
    nbytes: int


def sealed_file(nbytes: int, pieces: Iterable[MemoryPiece]) -> Descriptors:
    """Create an anonymous file of `nbytes` bytes with these pieces.

    All seals are set: no process can change the memory that workers share.
    """
    memory = opened(os.memfd_create, _NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory.fd, nbytes)
    for piece in pieces:
        _write(memory.fd, piece)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, seals)
    return memory


def _write(fd: int, piece: MemoryPiece) -> None:
    source = memoryview((ctypes.c_char * piece.nbytes).from_address(piece.address))
    done = 0
    while done < piece.nbytes:  # Linux writes at most 2 GiB at once
        done += os.pwrite(fd, source[done:], piece.offset + done)


def make_private(memory: NDArray[np.uint8]) -> None:
    """Replace mapped pages by a private copy at the same address.

    `memory` is a whole mapping. After an OSError, nothing has changed.
    """
    library = _c_library()
    address, nbytes = memory.ctypes.data, memory.nbytes
    copy = _check_mapped(library.mmap(None, nbytes, _PROT_READ_WRITE, _MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0), nbytes)
    ctypes.memmove(copy, address, nbytes)
    _check_mapped(
        library.mmap(address, nbytes, _PROT_READ_WRITE, _MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, 0), nbytes
    )
    ctypes.memmove(address, copy, nbytes)
    library.munmap(copy, nbytes)


def equal_memory(address: int, other: int, nbytes: int) -> bool:
    """True if the bytes at two addresses of this process are equal."""
    return nbytes == 0 or _c_library().memcmp(address, other, nbytes) == 0


def _map_segment(segment: SharedMemory, nbytes: int) -> Mapping:
    address = np.asarray(segment.buf).__array_interface__["data"][0]
    return Mapping(address, nbytes, segment)


# Python's mmap keeps a duplicate of the descriptor as long as it lives (optional since 3.13), so a user who keeps many
# batches would run out of descriptors. The C call does not.
_PROT_READ_WRITE = 0x1 | 0x2


_MAP_SHARED = 0x1


_MAP_PRIVATE = 0x2


_MAP_FIXED = 0x10


class _CLibrary:
    """mmap, munmap and memcmp of the C library; calls release the GIL."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self.mmap = library.mmap
        self.mmap.restype = ctypes.c_void_p
        self.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self.munmap = library.munmap
        self.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.memcmp = library.memcmp
        self.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


_c_library = functools.cache(_CLibrary)


class _MappedPages:
    """Mapped pages of a file, unmapped with this object; see `Descriptors`."""

    __slots__ = ("_addresses", "_unmap")

    def __init__(self, fd: int, nbytes: int, sharing: int) -> None:
        library = _c_library()
        addresses = self._addresses = list[int]()
        self._unmap = releaser(library.munmap, addresses, nbytes)
        addresses.extend(starmap(library.mmap, [(None, nbytes, _PROT_READ_WRITE, sharing, fd, 0)]))

    __del__ = property(attrgetter("_unmap"))

    @property
    def address(self) -> int:
        return self._addresses[0]


def _map_descriptor(fd: int, nbytes: int, sharing: int) -> Mapping:
    pages = _MappedPages(fd, nbytes, sharing)
    return Mapping(_check_mapped(pages.address, nbytes), nbytes, pages)


def _check_mapped(address: int, nbytes: int) -> int:
    """Return the address; raise OSError if mapping has failed."""
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}: {nbytes} bytes of shared memory could not be mapped")
    return address
