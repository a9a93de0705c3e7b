"""Arrays whose bytes also lie in a sealed file get the file's pages for their own: the machine holds both once.

Only an optimisation, on Linux alone: an array stays as it is unless every condition holds. What this process writes to
it afterwards is copied page by page, and stays its own.
"""

from __future__ import annotations

import concurrent.futures.thread
import ctypes
import selectors
import socket
import sys
import threading
from bisect import bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from feedline.transport.memory import Piece, take_place
from feedline.transport.pages import PAGE_NBYTES, Stretches, plain_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

LARGE_NBYTES = 1 << 20
"""Smaller pieces are not worth the two or three mappings that each costs, of the 65,530 that a process may have."""

_AT_MOST = 8192
_STEP_NBYTES = 32 << 20


class Owner(NamedTuple):
    """Memory that an array or a storage has allocated, and will free."""

    address: int
    nbytes: int
    read_only: bool
    keeper: object

    @property
    def end(self) -> int:
        return self.address + self.nbytes


def owner_of(obj: object) -> Owner | None:
    """Whose memory a tensor, an array or a storage shows; None for what is no such thing, or small."""
    root = obj
    while isinstance(root, np.ndarray) and root.base is not None:
        root = root.base
    if type(root) is torch.Tensor and root.is_cpu and root.layout is torch.strided:
        root = root.untyped_storage()
    if isinstance(root, np.ndarray):
        owner = Owner(root.__array_interface__["data"][0], root.nbytes, not root.flags.writeable, root)
    elif isinstance(root, torch.UntypedStorage) and root.device.type == "cpu":
        owner = Owner(root.data_ptr(), root.nbytes(), read_only=False, keeper=root)
    else:
        return None
    return owner if owner.nbytes >= LARGE_NBYTES else None


def remap(fd: int, pieces: Iterable[Piece], owners: Iterable[Owner]) -> None:
    """Where that is safe, give the pieces' own pages back to the system and let the file's stand in their place.

    Takes from each piece the pages that lie wholly in it. Its place in the file must be congruent to its address,
    modulo the size of a page. Never fails.

    What native code or a device, unknown to Python, writes to an array between the comparison of some megabytes and
    their exchange, milliseconds later, is lost. It would write to a dataset that is being copied for workers.
    """
    large = sorted((piece for piece in pieces if piece.nbytes >= LARGE_NBYTES), key=attrgetter("nbytes"), reverse=True)
    if sys.platform != "linux" or not large:
        return
    try:
        plain = plain_memory()
    except OSError:
        return
    blocks = sorted((owner for owner in owners if _is_unmapped_when_freed(owner, plain)), key=attrgetter("address"))
    for piece in large[:_AT_MOST]:
        at = bisect_right(blocks, piece.address, key=attrgetter("address")) - 1
        if at >= 0 and piece.address + piece.nbytes <= blocks[at].end:
            _remap_piece(fd, piece, blocks[at])


def _remap_piece(fd: int, piece: Piece, owner: Owner) -> None:
    start = -(-piece.address // PAGE_NBYTES) * PAGE_NBYTES
    stop = (piece.address + piece.nbytes) // PAGE_NBYTES * PAGE_NBYTES
    for address in range(start, stop, _STEP_NBYTES):
        part = Piece(piece.offset + address - piece.address, address, min(_STEP_NBYTES, stop - address))
        # A thread that is awake may be in native code that writes to the array, the interpreter unlocked: what it
        # writes after the comparison would be lost. One that waits would have to wake, and lock the interpreter, first.
        if _is_pinned(part) or not (owner.read_only or _others_wait()) or not take_place(fd, part):
            return


def _is_unmapped_when_freed(owner: Owner, plain: Stretches) -> bool:
    """Whether glibc's malloc has given the memory a mapping of its own, which ends when the memory is freed.

    Other memory is used again, and an allocator may trust that pages which it gave back come again as zeros; pages of a
    file come again as they are in the file.

    The two words in front of the memory tell: how far in front of them the mapping begins; how far behind them it ends,
    with a flag for such mappings (glibc, malloc/malloc.c: malloc_chunk, munmap_chunk). The memory of other allocators
    does not look like this by chance: both ends are those of pages, and the length is that of the array.
    """
    word = ctypes.sizeof(ctypes.c_size_t)
    chunk = owner.address - 2 * word
    if owner.address % word or not plain.cover(chunk, owner.end):
        return False
    before, behind = (ctypes.c_size_t * 2).from_address(chunk)
    start, stop = chunk - before, chunk + behind - behind % 8
    return (
        behind % 8 == 2
        and start % PAGE_NBYTES == stop % PAGE_NBYTES == 0
        and owner.end <= stop < owner.end + 2 * PAGE_NBYTES
        and plain.cover(start, stop)
    )


_WAITS = frozenset(
    wait.__code__
    for wait in (
        threading.Condition.wait,
        concurrent.futures.thread._worker,
        selectors.DefaultSelector.select,
        socket.socket.accept,
    )
)


def _others_wait() -> bool:
    """Whether all other Python threads are seen to wait: for a condition, an event, a queue, a descriptor."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    is_locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    return not frames or (is_locked and all(frame.f_code in _WAITS for frame in frames.values()))


def _is_pinned(piece: Piece) -> bool:
    """Whether a GPU knows the memory by its pages: it would go on with those that it knows."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    memory = (ctypes.c_uint8 * piece.nbytes).from_address(piece.address)
    return torch.frombuffer(memory, dtype=torch.uint8).is_pinned()
