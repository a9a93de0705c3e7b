"""Forked children of this process, which interrupts cannot lose."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import re
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import starmap
from multiprocessing import util
from typing import Any, NoReturn

from feedline.core.descriptors import Descriptors, opened
from feedline.workers.transport import forks

ALL_SIGNALS = tuple(map(int, signal.valid_signals()))


_KILLED_S = 5.0
"""Longest wait for the end of a killed child, in seconds."""


_unreaped: list[Descriptors] = []
"""Pidfds of killed children that were not awaited, because of an interrupt or a time limit."""


def _reap() -> None:
    """Reap killed children that have ended."""
    for pidfd in list(_unreaped):
        ended: object = True
        with suppress(ChildProcessError):  # reaped before
            ended = os.waitid(os.P_PIDFD, pidfd.fd, os.WEXITED | os.WNOHANG) if pidfd else True
        if ended is not None:
            _unreaped.remove(pidfd)
            pidfd.close()


class ForkedProcess:
    """Forked child of this process.

    Dropping the object kills the child.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._pids: list[int] = []
        self._pidfd = Descriptors()

    @property
    def pid(self) -> int | None:
        """Process id; None before the fork and once it was reaped."""
        return self._pids[0] if self._pids else None

    def start(self, program: Callable[[set[Any]], object]) -> None:
        """Fork a process that runs `program` and then ends.

        The program begins with all signals blocked. Its argument is the set of signals that the parent had blocked.
        """
        _reap()
        _flush_standard_streams()
        # `_signal` is called by `signal`, which would make an enum member of each of 64 numbers, several times.
        blocked = _signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            # Until the child has handlers of its own, a signal would run those of this process there.
            _signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
            _silence_fork_warning()
            # One call without a step of the interpreter between the fork and the list: no interrupt loses a child.
            with forks.sharing():
                self._pids.extend(starmap(os.fork, [()]))
            if self._pids == [0]:
                _run(program, blocked)
            with suppress(ProcessLookupError):  # it has ended, and the system reaps children by itself
                self._open()
        finally:
            _signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    @property
    def pidfds(self) -> list[int]:
        """List with the pidfd; empty before the fork and after reaping."""
        return list(self._pidfd)

    def reap(self) -> int | None:
        """Reap the child if it has ended, and return its exit code.

        The code is negative for a signal; None while the child runs, and if unknown.
        """
        with suppress(ChildProcessError):  # the system, or the user, has reaped it
            ended = os.waitid(os.P_PIDFD, self._pidfd.fd, os.WEXITED | os.WNOHANG) if self._pidfd else None
            if ended is None:
                return None
            self._forget()
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self._forget()
        return None

    def end(self, within_s: float) -> None:
        """Wait for the end of the child; kill it after `within_s` seconds.

        A killed child that the kernel cannot end at once, as in a read from a lost file server, is reaped later.
        """
        if self._owner != os.getpid() or not self._pids:
            return
        with suppress(ProcessLookupError):
            self._open()
        for pidfd in self._pidfd:
            if not has_ended(pidfd, within_s):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                if not has_ended(pidfd, _KILLED_S):
                    _unreaped.append(self._pidfd.take(1))
                    break
            with suppress(ChildProcessError):  # where SIGCHLD is ignored, the system has reaped it
                os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        self._forget()

    def _forget(self) -> None:
        self._pids.clear()
        self._pidfd.close()

    def _open(self) -> None:
        """Open the child's pidfd, unless it is open."""
        if not self._pidfd:  # an interrupt may have come after the fork
            self._pidfd = opened(os.pidfd_open, self._pids[0])

    def __del__(self) -> None:
        if getattr(self, "_pids", None):  # an interrupt may have ended the constructor
            try:
                self.end(0)
            except BaseException:  # another interrupt
                if self._pidfd:
                    _unreaped.append(self._pidfd)
                    with suppress(ProcessLookupError):  # the interrupt may have come before the kill
                        signal.pidfd_send_signal(self._pidfd.fd, signal.SIGKILL)
                raise


def has_ended(pidfd: int, within_s: float) -> bool:
    """Wait up to `within_s` seconds; True if the process has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def _flush_standard_streams() -> None:
    """Flush buffers that both processes would otherwise write."""
    with suppress(OSError):  # the reader of a pipe has closed it
        util._flush_std_streams()  # type: ignore[attr-defined]


_THIS_MODULE = re.escape(__name__)


def _silence_fork_warning() -> None:
    """Ignore Python's warning about forks with threads, in this module.

    Python 3.12 and later warn.
    """
    # Not `catch_warnings`, which changes the filters of other threads. The entry stays, and affects this module only.
    if sys.version_info >= (3, 12):
        if any(getattr(entry[3], "pattern", None) == _THIS_MODULE for entry in warnings.filters[:1]):
            return
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=_THIS_MODULE)


def _run(program: Callable[[set[Any]], object], blocked: set[Any]) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)  # the socket of the parent's event loop
        program(blocked)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the child must not return into the parent's code
        traceback.print_exc()
    finally:
        os._exit(1)
