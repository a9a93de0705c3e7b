"""Files in memory, without a descriptor for each: as many as the system maps, for as long as anybody looks at them."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref

if sys.platform != "win32":
    _C = ctypes.CDLL(None, use_errno=True)
    _C.mmap.restype = ctypes.c_void_p
    _C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
    _C.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_FAILED = ctypes.c_void_p(-1).value


def mapped(fd: int, nbytes: int) -> memoryview:
    """The first bytes of a file, read-only; unmapped when the last view of them is gone.

    The file may be closed and removed meanwhile: Python's own mapping keeps a descriptor. OSError where the process has
    too many mappings.
    """
    if nbytes == 0:
        return memoryview(b"")
    address = _C.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, _C.munmap, address, nbytes).atexit = False
    return memoryview(memory).cast("B").toreadonly()
