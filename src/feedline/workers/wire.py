"""Messages between processes: each arrives whole or not at all, and may carry descriptors."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress

MESSAGE_NBYTES = 1 << 17
"""No message is longer: transport keeps results, and `spill` everything else, far below it."""
SPILL_NBYTES = 1 << 15
"""What is longer travels in a memfd beside its message, so that one message never fills a socket's buffer."""

_ANCILLARY_NBYTES = socket.CMSG_SPACE(253 * 4)  # the most descriptors that the kernel puts into one message


class Post:
    """A reusable buffer to receive into: a fresh one per message would cost more than the message itself."""

    __slots__ = ("_buffer", "_view")

    def __init__(self) -> None:
        self._buffer = bytearray(MESSAGE_NBYTES)
        self._view = memoryview(self._buffer)

    def receive(self, channel: socket.socket, flags: int = 0) -> tuple[bytes, Sequence[int]]:
        """The next message and its descriptors; b"" when the other side is gone. Raises BlockingIOError as `recv`."""
        try:
            nbytes, ancillary, _, _ = channel.recvmsg_into(
                [self._buffer], _ANCILLARY_NBYTES, flags | socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # the other side left with messages of ours unread
            return b"", ()
        if not ancillary:
            return bytes(self._view[:nbytes]), ()
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data)
        return bytes(self._view[:nbytes]), fds


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends of a socket that keeps messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, parts: Iterable[bytes], fds: Sequence[int] = (), flags: int = 0) -> None:
    """One message of these parts, joined; the caller keeps, and closes, its own copies of the descriptors."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    channel.sendmsg(parts, ancillary, flags | socket.MSG_NOSIGNAL)


def hang_up(channel: socket.socket) -> None:
    """Close for both sides at once, also where another process has inherited a copy of this end."""
    with suppress(OSError):  # the other side was first
        channel.shutdown(socket.SHUT_RDWR)
    channel.close()


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def spill(data: bytes) -> int:
    """A descriptor from which `slurp` reads `data`; it is the caller's."""
    fd = os.memfd_create("feedline-message", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd


def slurp(fd: int) -> bytes:
    """All that the file behind a descriptor holds; closes it."""
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()
