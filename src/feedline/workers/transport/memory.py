"""Memory that two processes can map: an anonymous file, or a named segment where anonymous files do not exist."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import tempfile
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


if sys.platform == "linux":
    import fcntl


Handle = int | str
"""What another process needs to map the same memory: a descriptor to be sent, or a name."""


_NAME = "feedline"


class Mapping:
    """A writable stretch of mapped memory; it is unmapped when this object and every array made from it are gone.

    `np.asarray(mapping)` is its memory, as bytes. `on_unmap`, if set, is called once with the address, just before the
    memory goes, in whichever thread drops the last reference.
    """

    __slots__ = ("_pid", "_unmap", "address", "nbytes", "on_unmap")

    def __init__(self, address: int, nbytes: int, unmap: Callable[[], object]) -> None:
        self.address = address
        self.nbytes = nbytes
        self.on_unmap: Callable[[int], object] | None = None
        self._unmap = unmap
        self._pid = os.getpid()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        # A forked child inherits the mapping but not what the parent registered it with.
        if self.on_unmap is not None and self._pid == os.getpid():
            self.on_unmap(self.address)
        self._unmap()


class Backing(Protocol):
    """Where new shared memory comes from."""

    def create(self, nbytes: int) -> tuple[Mapping, Handle]:
        """New memory, all of it committed: what the machine cannot hold is an OSError here and no SIGBUS later.

        A descriptor belongs to the caller, who closes it once it is sent.
        """
        ...


class AnonymousFiles:
    """memfd: no name, no entry in /dev/shm, gone with the last process that maps it."""

    def create(self, nbytes: int) -> tuple[Mapping, Handle]:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            return attach(fd, nbytes), fd
        except BaseException:
            os.close(fd)
            raise


class NamedSegments:
    """multiprocessing.shared_memory, for macOS and Windows; the name goes as soon as the other side has mapped it."""

    def create(self, nbytes: int) -> tuple[Mapping, Handle]:
        segment = SharedMemory(create=True, size=nbytes)
        if sys.platform != "win32":
            # The receiver removes the name; this process's tracker would complain that it is gone.
            resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
        return _of_segment(segment, nbytes), segment.name


def has_anonymous_files() -> bool:
    """Whether this system has memfd."""
    return hasattr(os, "memfd_create")


def default_backing() -> Backing:
    """Anonymous files where the system has them."""
    return AnonymousFiles() if has_anonymous_files() else NamedSegments()


def attach(handle: Handle, nbytes: int) -> Mapping:
    """The memory behind a handle, seen and written by both sides. A descriptor stays open, a name is used up."""
    if isinstance(handle, int):
        return _map_descriptor(handle, nbytes, _MAP_SHARED)
    segment = SharedMemory(name=handle)
    segment.unlink()
    return _of_segment(segment, nbytes)


def attach_private(fd: int, nbytes: int) -> Mapping:
    """The memory behind a descriptor, copied page by page where this process writes; nobody else sees the writes."""
    return _map_descriptor(fd, nbytes, _MAP_PRIVATE)


def fixed_file(nbytes: int) -> int:
    """The descriptor of a new file of zeros, committed; it has no name, and where memfd exists a fixed size."""
    if has_anonymous_files():
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.truncate(fd, nbytes)
        if has_anonymous_files():
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd
    except BaseException:
        os.close(fd)
        raise


class MemoryPiece(NamedTuple):
    """`nbytes` bytes at an address of this process, and where in a file they belong."""

    offset: int
    address: int
    nbytes: int


def sealed_file(nbytes: int, pieces: Iterable[MemoryPiece]) -> int:
    """The descriptor of an anonymous file with the given content that nobody can change any more."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        for piece in pieces:
            _write(fd, piece)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd
    except BaseException:
        os.close(fd)
        raise


def _write(fd: int, piece: MemoryPiece) -> None:
    source = memoryview((ctypes.c_char * piece.nbytes).from_address(piece.address))
    done = 0
    while done < piece.nbytes:  # Linux writes at most 2 GiB at once
        done += os.pwrite(fd, source[done:], piece.offset + done)


def equal_memory(address: int, other: int, nbytes: int) -> bool:
    """Whether `nbytes` bytes at two addresses of this process are the same."""
    return nbytes == 0 or _c_library().memcmp(address, other, nbytes) == 0


def _of_segment(segment: SharedMemory, nbytes: int) -> Mapping:
    address = np.asarray(segment.buf).__array_interface__["data"][0]
    return Mapping(address, nbytes, segment.close)


# Python's own mmap keeps a duplicate of the descriptor for as long as it lives (optional only since 3.13), so a user
# who keeps many batches would run out of descriptors. The C call does not.
_PROT_READ_WRITE = 0x1 | 0x2


_MAP_SHARED = 0x1


_MAP_PRIVATE = 0x2


class _CLibrary:
    """mmap, munmap and memcmp of the C library; other Python threads run meanwhile."""

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


def _map_descriptor(fd: int, nbytes: int, sharing: int) -> Mapping:
    library = _c_library()
    address: int = library.mmap(None, nbytes, _PROT_READ_WRITE, sharing, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}: {nbytes} bytes of shared memory could not be mapped")
    return Mapping(address, nbytes, functools.partial(library.munmap, address, nbytes))
