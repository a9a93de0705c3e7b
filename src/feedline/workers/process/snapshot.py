"""Workers forked from the training process, and from a snapshot of it.

The snapshot is a forked child of the training process, single-threaded, and runs no code of the user. It forks the
workers of one process group, including later ones. The first one alone is forked by the training process, just before
the snapshot. All of them have the objects that the training process had then, and nothing is pickled.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

from feedline.core.descriptors import Descriptors, pipe
from feedline.core.openmp import end_openmp_threads
from feedline.workers.process import channels
from feedline.workers.process.environment import die_with_parent
from feedline.workers.process.forked import ALL_SIGNALS, ForkedProcess, has_ended
from feedline.workers.process.launch import InheritedLocks, Launcher
from feedline.workers.process.worker_main import WorkerChannels, WorkerSetup, import_for_workers, name_process
from feedline.workers.process.zygote import ZygoteLauncher, ZygoteProcess, ZygoteProcessGroup
from feedline.workers.process.zygote_main import Exited, Finish, SharedWork, WorkerForker, new_worker, serve_forked

_EXIT_S = 2.0
"""Seconds that a snapshot has to end by itself once its group is closed."""


_DRAIN_S = 1.5
"""Seconds that workers have to end after their group is closed: unmapping the memory of a large process takes time."""


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
        """True for the identical objects; a new launcher costs nothing."""
        return builder is self.builder and init_fn is self._init_fn

    def new_group(self) -> SnapshotProcessGroup:
        """Create a group that forks at its first launch."""
        import_for_workers(self.builder)
        return SnapshotProcessGroup(SharedWork(self.builder, self._init_fn))

    def without_inheritance(self) -> Launcher:
        """Create a launcher of workers that inherit nothing; see `Launcher`."""
        return self._fresh(self.builder, self._init_fn)

    def close(self) -> None:
        """Do nothing: this launcher holds no resources."""


class SnapshotProcessGroup(ZygoteProcessGroup):
    """Process group of a snapshot; see `ProcessGroup`.

    The first launch forks twice: the first worker, which need not wait for a snapshot, and the snapshot. The snapshot
    forks all other workers, and watches the first one with them.
    """

    def __init__(self, work: SharedWork) -> None:
        mine, self._theirs = channels.pair()
        super().__init__(mine)
        self._work = work
        self._has_forked = False
        self._threads: tuple[str, ...] = ()
        self._native_threads = 0
        self._first_serial = 0
        self._first, self._snapshot = ForkedProcess(), ForkedProcess()

    def launch(self, setup: WorkerSetup, worker_channels: WorkerChannels) -> ZygoteProcess:
        """See `ProcessGroup`; OSError if the system cannot fork."""
        if self._has_forked:
            return super().launch(setup, worker_channels)
        try:
            # Before the fork: after a later interrupt, the handler below checks if there is a snapshot.
            self._has_forked = True
            end_openmp_threads()
            # Where the system reaps children, only the snapshot learns exit codes: it sets that right for itself.
            if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
                self._fork_snapshot(Origin.capture())
                return super().launch(setup, worker_channels)
            return self._launch_first(setup, worker_channels)
        except BaseException:
            if self._snapshot.pid is None:
                self._has_forked = False
                self._first.end(0)
            raise
        finally:
            if self._has_forked:  # the snapshot's copy must be the only one: its end then shows on ours
                self._theirs.close()

    def abandon(self) -> None:
        """See `ProcessGroup`."""
        super().abandon()
        self._snapshot.end(0)

    def finish(self) -> None:
        """See `ProcessGroup`. The snapshot ends with its last worker."""
        super().finish()
        self._send(Finish())

    def inherited_locks(self) -> InheritedLocks | None:
        """See `ProcessGroup`."""
        pid = self._snapshot.pid
        return None if pid is None else InheritedLocks(pid, self._threads, self._native_threads)

    def close(self) -> None:
        """See `ProcessGroup`.

        Waits for the snapshot to end, and kills it after `_EXIT_S` seconds.
        """
        super().close()
        self._theirs.close()
        self._snapshot.end(_EXIT_S)

    def _launch_first(self, setup: WorkerSetup, worker_channels: WorkerChannels) -> ZygoteProcess:
        origin = Origin.capture()
        stderr, their_stderr = pipe()
        with stderr, their_stderr:
            self._first.start(partial(_run_first, self._work, origin, setup, worker_channels, their_stderr.fd))
            process = self._register(setup)
            not_mine = their_stderr.fd, worker_channels.stacks
            self._fork_snapshot(origin, FirstWorker(process.serial, self._first.pidfds, stderr.fd, not_mine))
        assert self._first.pid is not None
        process.mark_started(self._first.pid, Descriptors(map(os.dup, self._first.pidfds)))
        self._first_serial = process.serial
        return process

    def _fork_snapshot(self, origin: Origin, first: FirstWorker | None = None) -> None:
        others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
        self._threads = tuple(thread.name for thread in others)
        # Threads of libraries are unknown to Python, but hold locks as well.
        tasks = os.listdir("/proc/self/task")  # noqa: PTH208 - each line of Python delays the first batch
        self._native_threads = len(tasks) - 1 - len(others)
        self._snapshot.start(partial(_serve, self._work, self._theirs, origin, first))

    def _exit_code(self, report: Exited) -> int | None:
        return self._first.reap() if report.serial == self._first_serial else report.exitcode

    def _mark_lost(self) -> None:
        super()._mark_lost()
        self._first.end(0)  # the others die with the snapshot


class FirstWorker(NamedTuple):
    """Worker that the training process has forked, as the snapshot watches it."""

    serial: int
    pidfds: list[int]
    """Pidfd of the worker, in a list; empty if it was reaped already."""
    stderr: int
    not_mine: tuple[int, ...]
    """Inherited descriptors that only the worker may hold."""


_OWN_SIGNALS = {signal.SIGINT, signal.SIGTERM}
"""Signals with handlers of our own in snapshots and workers."""


class Origin(NamedTuple):
    """Facts of the training process that its workers adopt."""

    pid: int
    name: str
    handlers: dict[int, Any]
    """Handlers by signal number: Python functions, and `SIG_IGN`."""
    collects: bool
    """True if the garbage collector is on."""
    in_main_thread: bool
    has_stderr: bool
    """False if the process started without standard error: descriptor 2 may then be any file of the user."""

    @classmethod
    def capture(cls) -> Origin:
        """Capture the facts of this process."""
        handlers = {number: _signal.getsignal(number) for number in ALL_SIGNALS if number not in _OWN_SIGNALS}
        return cls(
            os.getpid(),
            multiprocessing.current_process().name,
            {number: handler for number, handler in handlers.items() if callable(handler) or handler == signal.SIG_IGN},
            gc.isenabled(),
            threading.get_native_id() == os.getpid(),
            sys.__stderr__ is not None,
        )


def _run_first(
    work: SharedWork,
    origin: Origin,
    setup: WorkerSetup,
    worker_channels: WorkerChannels,
    stderr: int,
    blocked: set[int],
) -> NoReturn:
    """Program of the first worker."""
    gc.freeze()  # a collection would copy pages that are shared with the training process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    channels.close_inherited(worker_channels[:2])
    if origin.in_main_thread:  # otherwise, the snapshot kills it
        die_with_parent(origin.pid)
    target = partial(serve_forked, work, None)
    new_worker(target, setup, worker_channels, stderr if origin.has_stderr else None).run_here(origin.pid, origin.name)


def _serve(
    work: SharedWork, group: channels.Channel, origin: Origin, first: FirstWorker | None, blocked: set[int]
) -> None:
    """Program of the snapshot: serve one process group until its end."""
    gc.disable()  # a collection would copy pages that are shared with the training process, and run its finalizers
    gc.freeze()
    # Ctrl-C reaches the training process, which closes its pools. Handlers of the user belong to that process, too.
    for number in {signal.SIGINT, *origin.handlers}:
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    _signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    channels.close_inherited([group.fileno()])
    training = os.pidfd_open(origin.pid)
    if os.getppid() != origin.pid:  # it has ended already
        return
    if origin.in_main_thread:  # this kills a stopped snapshot, too
        die_with_parent(origin.pid)
    name_process("feedline-snap")
    # multiprocessing lets no daemonic process have children, and the training process may be one.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    forker = WorkerForker(partial(_serve_worker, work, os.getpid(), origin))
    forker.serve_group(group)
    forker.end_with(training)
    if first is not None:
        channels.close_all(first.not_mine)
        next(multiprocessing.process._process_counter)  # type: ignore[attr-defined] # its number is taken
        forker.adopt(group, first.serial, first.pidfds, first.stderr)
    while forker.step():
        pass
    if has_ended(training, 0):  # nothing may be left a second after it
        forker.drain()
    else:
        forker.drain(_DRAIN_S)


def _serve_worker(
    work: SharedWork, snapshot: int, origin: Origin, setup: WorkerSetup, worker_channels: WorkerChannels, stderr: int
) -> None:
    # The snapshot ignores these signals. A worker has the user's handlers, as a fork of the training process would.
    for number, handler in origin.handlers.items():
        signal.signal(number, handler)
    if origin.collects:
        gc.enable()
    # For the user's code, the parent is the process that iterates the loader, not the snapshot.
    parent: Any = multiprocessing.parent_process()
    parent._pid, parent._name = origin.pid, origin.name
    serve_forked(work, snapshot, setup, worker_channels, stderr if origin.has_stderr else None)
