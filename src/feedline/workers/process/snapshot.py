"""Workers forked from a snapshot of the training process.

The snapshot is a forked child of the training process, single-threaded, and runs no code of the user. It forks the
workers of one process group, including later ones. All of them have the objects that the training process had when the
group was created, and nothing is pickled.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import select
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import starmap
from multiprocessing import util
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from feedline.core.descriptors import Descriptors, opened
from feedline.workers.process import channels
from feedline.workers.process.environment import die_with_parent
from feedline.workers.process.launch import InheritedLocks, Launcher
from feedline.workers.process.worker_main import WorkerChannels, WorkerSetup, import_for_workers, name_process
from feedline.workers.process.zygote import ZygoteLauncher, ZygoteProcessGroup
from feedline.workers.process.zygote_main import SharedWork, WorkerForker, serve_forked
from feedline.workers.transport import forks

_EXIT_S = 2.0
"""Seconds that a snapshot has to end by itself once its group is closed."""


_DRAIN_S = 1.5
"""Seconds that workers then have: it takes a while to unmap the memory of a large process."""


Fresh = Callable[[Any, Callable[[int], object] | None], Launcher]
"""Creates the launcher of workers that inherit nothing, for use after an inherited lock."""


class SnapshotLauncher:
    """Launcher that forks, as torch does by default on Linux.

    Each process group gets a new snapshot, so its workers have the objects that this process has at that moment.
    """

    def __init__(
        self, builder: Any, init_fn: Callable[[int], object] | None = None, *, fresh: Fresh = ZygoteLauncher
    ) -> None:
        self.builder = builder
        self._init_fn, self._fresh = init_fn, fresh

    def matches(self, builder: Any, init_fn: Callable[[int], object] | None = None) -> bool:
        """True for the very same objects; a new launcher costs nothing."""
        return builder is self.builder and init_fn is self._init_fn

    def new_group(self) -> SnapshotProcessGroup:
        """Fork a snapshot; OSError if the system cannot."""
        import_for_workers(self.builder)
        return SnapshotProcessGroup(SharedWork(self.builder, self._init_fn))

    def without_inheritance(self) -> Launcher:
        """See `Launcher`."""
        return self._fresh(self.builder, self._init_fn)

    def close(self) -> None:
        """Do nothing: this launcher holds no resources."""


class SnapshotProcessGroup(ZygoteProcessGroup):
    """Process group of a snapshot; see `ProcessGroup`."""

    def __init__(self, work: SharedWork) -> None:
        mine, theirs = channels.pair()
        super().__init__(mine)
        others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
        self._threads = tuple(thread.name for thread in others)
        # Threads of libraries are unknown to Python, but hold locks as well.
        self._native_threads = len(list(Path("/proc/self/task").iterdir())) - 1 - len(others)
        self._snapshot = ForkedProcess()
        with theirs:
            self._snapshot.start(partial(_serve, work, theirs, Origin.capture()))

    def abandon(self) -> None:
        """See `ProcessGroup`."""
        super().abandon()
        self._snapshot.end(0)

    def inherited_locks(self) -> InheritedLocks | None:
        """See `ProcessGroup`."""
        pid = self._snapshot.pid
        return None if pid is None else InheritedLocks(pid, self._threads, self._native_threads)

    def close(self) -> None:
        """See `ProcessGroup`.

        Waits for the end of the snapshot, and kills it if that takes too long.
        """
        super().close()
        self._snapshot.end(_EXIT_S)


_OWN_SIGNALS = {signal.SIGINT, signal.SIGTERM}
"""Signals with handlers of our own in snapshots and workers."""


class Origin(NamedTuple):
    """Facts of the training process that its workers adopt."""

    pid: int
    name: str
    handlers: dict[int, Any]
    """Python functions, and ignored signals, by signal number."""
    collects: bool
    """Whether the garbage collector is on."""
    in_main_thread: bool
    has_stderr: bool
    """False if the process started without standard error: descriptor 2 may then be any file of the user."""

    @classmethod
    def capture(cls) -> Origin:
        """Capture the facts of this process."""
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals() - _OWN_SIGNALS}
        return cls(
            os.getpid(),
            multiprocessing.current_process().name,
            {number: handler for number, handler in handlers.items() if callable(handler) or handler == signal.SIG_IGN},
            gc.isenabled(),
            threading.get_native_id() == os.getpid(),
            sys.__stderr__ is not None,
        )


_unreaped: list[Descriptors] = []
"""Pidfds of killed children: an interrupt ended the wait for them when their object was dropped."""


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
        """Its process id; None before the fork and after the end."""
        return self._pids[0] if self._pids else None

    def start(self, program: Callable[[set[Any]], object]) -> None:
        """Fork a process that runs `program` and then ends.

        The program begins with all signals blocked. Its argument is the set of signals that were blocked here.
        """
        _reap()
        _flush_standard_streams()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        try:
            # Until the child has handlers of its own, a signal would run those of this process there.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            _silence_fork_warning()
            # One call without a step of the interpreter between the fork and the list: no interrupt loses a child.
            with forks.sharing():
                self._pids.extend(starmap(os.fork, [()]))
            if self._pids == [0]:
                _run(program, blocked)
            with suppress(ProcessLookupError):  # it has ended, and the system reaps children by itself
                self._open()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def end(self, within_s: float) -> None:
        """Wait for its end; kill it after that time."""
        if self._owner != os.getpid() or not self._pids:
            return
        with suppress(ProcessLookupError):
            self._open()
        for pidfd in self._pidfd:
            if not _has_ended(pidfd, within_s):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            with suppress(ChildProcessError):  # where SIGCHLD is ignored, the system has reaped it
                os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        self._pids.clear()
        self._pidfd.close()

    def _open(self) -> None:
        """Open its pidfd, unless it is open."""
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


def _has_ended(pidfd: int, within_s: float) -> bool:
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


def _serve(work: SharedWork, group: channels.Channel, origin: Origin, blocked: set[Any]) -> None:
    """Program of the snapshot: serve one process group until its end."""
    gc.disable()  # a collection would copy pages that are shared with the training process, and run its finalizers
    gc.freeze()
    # Ctrl-C reaches the training process, which closes its pools. Handlers of the user belong to that process, too.
    for number in {signal.SIGINT, *origin.handlers}:
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    channels.close_inherited(group)
    name_process("feedline-snap")
    training = os.pidfd_open(origin.pid)
    if os.getppid() != origin.pid:  # it has ended already
        return
    if origin.in_main_thread:  # this kills a stopped snapshot, too
        die_with_parent(origin.pid)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    forker = WorkerForker(partial(_serve_worker, work, os.getpid(), origin))
    forker.serve_group(group)
    forker.end_with(training)
    while forker.step():
        pass
    if _has_ended(training, 0):  # nothing may be left a second after it
        forker.drain()
    else:
        forker.drain(_DRAIN_S)


def _serve_worker(
    work: SharedWork, snapshot: int, origin: Origin, setup: WorkerSetup, worker_channels: WorkerChannels, stderr: int
) -> None:
    for number, handler in origin.handlers.items():
        signal.signal(number, handler)
    if origin.collects:
        gc.enable()
    parent: Any = multiprocessing.parent_process()
    parent._pid, parent._name = origin.pid, origin.name
    serve_forked(work, snapshot, setup, worker_channels, stderr if origin.has_stderr else None)
