"""Processes that die with the process that started them, whatever they are doing and however it ends."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1
_F_SETSIG = 10


def die_with_parent(parent: int) -> None:
    """Be killed when the parent process ends. Only for children of a single-threaded parent.

    The kernel sends the signal when the *thread* that forked ends, which for a parent with threads may be any time.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_starter() -> None:
    """Be killed when the process that called `multiprocessing.Process.start` ends, from whichever thread it did so.

    multiprocessing gives each process a pipe that its starter holds open; the kernel is asked for SIGKILL, in place of
    its usual SIGIO, when the other end closes. Unlike a thread that waits, this reaches code that never releases the
    GIL, and stopped processes too.
    """
    starter = multiprocessing.parent_process()
    assert starter is not None, "only in a multiprocessing.Process"
    pipe: int = starter.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not starter.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)
