"""Client of the zygote, which forks the workers of one loader.

Workers inherit nothing from the training process.

The zygote is their parent, so the training process observes them by pidfds and messages.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any

from feedline.core.descriptors import Descriptors, opened
from feedline.core.finalizers import deferred_finalizers
from feedline.errors import WorkerError
from feedline.workers.process import channels, exceptions, fork_server
from feedline.workers.process.environment import ProcessEnvironment
from feedline.workers.process.imports import imports_of
from feedline.workers.process.launch import ExitedProcess, InheritedLocks, WorkerProcess
from feedline.workers.process.settings import LibrarySettings, registered_collates
from feedline.workers.process.worker_main import WorkerChannels, WorkerSetup
from feedline.workers.process.zygote_main import (
    Exited,
    Finish,
    KillWorker,
    Launch,
    ProcessContext,
    SharedWork,
    Started,
    StartFailed,
    Wakeup,
    ZygoteStart,
)
from feedline.workers.transport import SharedBuilder, dump_builder

_REPORT_MS = 50


class ZygoteProcessGroup:
    """Process group of a zygote; see `ProcessGroup`.

    One socket carries commands to the zygote and its reports back. `client` is that of the zygote; a group with its own
    forking process has none.
    """

    def __init__(self, zygote: channels.Channel, client: ZygoteClient | None = None) -> None:
        self._zygote, self._client = zygote, client
        self._receive_buffer = channels.ReceiveBuffer()
        self._lock = threading.Lock()  # user threads may read the pid of a process while the pool reads the socket
        self._serial = 0
        self._processes: dict[int, ZygoteProcess] = {}
        self._exited: list[ExitedProcess] = []
        self._finished = False
        self.lost = False

    def fileno(self) -> int:
        """See `ProcessGroup`."""
        return self._zygote.fileno()

    def launch(self, setup: WorkerSetup, worker_channels: WorkerChannels) -> ZygoteProcess:
        """See `ProcessGroup`."""
        # Registered before the command is sent: another thread may read the answer at once.
        process = self._register(setup)
        self._send(Launch(process.serial, setup), worker_channels)
        with deferred_finalizers, self._lock:
            if self.lost:  # another thread has noticed it: no report would come
                self._mark_lost()
        return process

    def pid_of(self, process: WorkerProcess) -> int | None:
        """See `ProcessGroup`."""
        assert isinstance(process, ZygoteProcess)
        # In a signal handler, a frame below may hold the lock. And after `finish`, whatever is read must not be reaped
        # before `close`: until then, the last figures of its members count.
        if not (deferred_finalizers.depth or self._finished):
            with deferred_finalizers, self._lock:
                while self._receive():
                    pass
                self._wake_pool()
        return process.started_pid

    def collect_exited(self) -> list[ExitedProcess]:
        """See `ProcessGroup`."""
        with deferred_finalizers, self._lock:
            while self._receive():
                pass
            exited, self._exited = self._exited, []
        return exited

    def kill(self, process: WorkerProcess) -> None:
        """See `ProcessGroup`."""
        assert isinstance(process, ZygoteProcess)
        self._send(KillWorker(process.serial))

    def abandon(self) -> None:
        """See `ProcessGroup`."""
        with deferred_finalizers, self._lock:
            self._mark_lost()

    def finish(self) -> None:
        """See `ProcessGroup`. The zygote stays for other groups."""
        self._finished = True

    def inherited_locks(self) -> InheritedLocks | None:
        """See `ProcessGroup`: None, because the fork server has no threads."""
        return None

    def close(self) -> None:
        """See `ProcessGroup`."""
        with deferred_finalizers, self._lock:
            self._mark_lost()
            channels.disconnect(self._zygote)

    def wait(self) -> None:
        """Wait up to `_REPORT_MS` for a report; any thread may call it."""
        poll = select.poll()
        with deferred_finalizers, self._lock:
            if self.lost:
                return
            poll.register(self._zygote, select.POLLIN)
        # Without the lock, and not for long: the pool's thread may take the report that this one waits for.
        poll.poll(_REPORT_MS)
        with deferred_finalizers, self._lock:
            self._receive()
            self._wake_pool()

    def _register(self, setup: WorkerSetup) -> ZygoteProcess:
        self._serial += 1
        process = self._processes[self._serial] = ZygoteProcess(self, self._serial, f"feedline-{setup.worker_id}")
        return process

    def _exit_code(self, report: Exited) -> int | None:
        return report.exitcode

    def _wake_pool(self) -> None:
        """Wake the pool if its reports were taken from the socket."""
        if self._exited:
            self._send(Wakeup())

    def _send(self, command: Launch | KillWorker | Wakeup | Finish, worker_channels: Sequence[int] = ()) -> None:
        with suppress(ConnectionError):  # the zygote has ended, as `collect_exited` will notice
            channels.send(self._zygote, [pickle.dumps(command)], worker_channels)

    def _receive(self) -> bool:
        """Receive and record one report; False if there is none."""
        if self.lost:
            return False
        try:
            message, fds = self._receive_buffer.receive(self._zygote, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not message:
            if self._client is not None:
                self._client.has_ended = True
            self._mark_lost()
            return False
        match pickle.loads(message):
            case Started(serial, pid):
                self._processes[serial].mark_started(pid, fds)
            case Exited(serial, _, stderr) as report:
                process, exitcode = self._processes.pop(serial), self._exit_code(report)
                process.mark_exited(exitcode)
                self._exited.append(ExitedProcess(process, exitcode, stderr))
            case StartFailed(serial, failure):
                process = self._processes.pop(serial)
                process.mark_exited(None)
                error = exceptions.rebuild(failure, "in the process that forks the DataLoader workers")
                self._exited.append(ExitedProcess(process, None, error=error))
        return True

    def _mark_lost(self) -> None:
        """Mark all processes as exited: the kernel kills them with their zygote."""
        self.lost = True
        in_vain = self._client is not None and not self._client.has_run()
        for process in self._processes.values():
            process.mark_exited(None)
            self._exited.append(ExitedProcess(process, None, orphaned=True, in_vain=in_vain))
        self._processes.clear()


class ZygoteProcess:
    """Worker process with the public interface of `multiprocessing.Process`."""

    def __init__(self, group: ZygoteProcessGroup, serial: int, name: str) -> None:
        self._group, self.serial, self.name = group, serial, name
        self._pid: int | None = None
        self._pidfd = Descriptors()
        # Guards the pidfd: closed under another thread, its number could name another process. Reentrant for handlers
        # of signals.
        self._lock = threading.RLock()
        self._exitcode: int | None = None
        self._over = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} pid={self._pid} {'ended' if self._over else 'started'}>"

    @property
    def started_pid(self) -> int | None:
        """Process id; None if not known yet. Does not wait."""
        return self._pid

    @property
    def pid(self) -> int | None:
        """Process id; waits for the fork. None if the fork failed."""
        while self._pid is None and not self._over:
            self._group.wait()
        return self._pid

    @property
    def exitcode(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        while not self.is_alive() and not self._over:
            self._group.wait()
        return self._exitcode

    def is_alive(self) -> bool:
        """True while the process runs, and before it has started."""
        return not self._over and not (self._pidfd.fd >= 0 and self._wait(0))

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, for at most `timeout` seconds."""
        if self.pid is not None:
            self._wait(None if timeout is None else timeout * 1000)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._signal(signal.SIGKILL)

    def mark_started(self, pid: int, pidfd: Descriptors) -> None:
        """Record that the process runs; takes ownership of `pidfd`."""
        self._pid, self._pidfd = pid, pidfd

    def mark_exited(self, exitcode: int | None) -> None:
        """Record that the process has ended, or that the pool has closed."""
        with deferred_finalizers, self._lock:
            self._exitcode, self._over = exitcode, True
            self._pidfd.close()

    def _wait(self, timeout_ms: float | None) -> bool:
        """Wait for the end of the process; False after `timeout_ms`."""
        with deferred_finalizers, self._lock:
            if self._over:
                return True
            # A duplicate: the pool may close the original during the wait.
            pidfd = opened(os.dup, self._pidfd.fd)
        with pidfd:
            poll = select.poll()
            poll.register(pidfd.fd, select.POLLIN)
            return bool(poll.poll(timeout_ms))

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is None:
            return
        with deferred_finalizers, self._lock, suppress(ProcessLookupError):
            if not self._over:
                signal.pidfd_send_signal(self._pidfd.fd, number)


_ANSWER_S = 0.5


def _process_context() -> ProcessContext:
    return ProcessContext(ProcessEnvironment.capture(), LibrarySettings.capture())


def _plain(settings: LibrarySettings) -> tuple[Any, ...]:
    """The settings as values that can be compared."""
    context = settings.decimal.copy()
    context.clear_flags()  # results of computations, which are no settings
    return tuple(repr(context) if value is settings.decimal else value for value in settings)


class ZygoteLauncher:
    """Launcher of workers that are forked from a zygote.

    The builder is pickled once, and unpickled once by the zygote.

    The zygote is forked for the first process group, and ends when the launcher and all groups are closed. If it or the
    fork server is killed, the next group gets a new zygote. Raises NotPicklableError.
    """

    def __init__(self, builder: Any, init_fn: Callable[[int], object] | None = None) -> None:
        self.builder = builder
        self._dumped = dump_builder(SharedWork(builder, init_fn, registered_collates()), "loader")
        self._context = _process_context()
        self._zygote: ZygoteClient | None = None
        self._groups: weakref.WeakSet[ZygoteProcessGroup] = weakref.WeakSet()
        self._closed = False
        fork_server.close_at_exit(self)

    def matches(self, builder: Any, init_fn: Callable[[int], object] | None = None) -> bool:
        """See `Launcher`. Compares every byte of the pickled builder.

        Also compares the environment and the settings of this process, which a zygote takes over only once.
        """
        now = _process_context()
        is_same = now.environment == self._context.environment and _plain(now.settings) == _plain(
            self._context.settings
        )
        return is_same and self._dumped.matches(SharedWork(builder, init_fn, registered_collates()))

    def new_group(self) -> ZygoteProcessGroup:
        """Create an empty process group; does not wait for the zygote."""
        if self._closed:
            raise WorkerError("the launcher of these workers has been closed: call iter(loader) again")
        if self._zygote is None or not self._zygote.is_ours():
            self._zygote = ZygoteClient(self._dumped)
        try:
            group = self._zygote.new_group()
        except ConnectionError:
            former, self._zygote = self._zygote, None  # it stays None if there can be no other one
            former.close(kill=True)
            self._zygote = ZygoteClient(self._dumped)
            group = self._zygote.new_group(is_first=True)
        self._groups.add(group)
        return group

    def without_inheritance(self) -> ZygoteLauncher:
        """Return this launcher: its workers inherit nothing."""
        return self

    def close(self) -> None:
        """See `Launcher`. Also frees the pickled builder."""
        self._closed = True
        zygote, self._zygote = self._zygote, None
        if zygote is not None and zygote.is_ours():
            zygote.close(kill=all(group.lost for group in self._groups))
        self._dumped.close()


class ZygoteClient:
    """Client of one zygote process.

    `has_ended` is True once a group has noticed the end of the zygote.
    """

    def __init__(self, dumped: SharedBuilder) -> None:
        self.has_ended = False
        self._owner = os.getpid()
        self._control, theirs = channels.pair()
        tracker = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
        process_context = _process_context()
        start = ZygoteStart(process_context, dumped.skeleton, has_tracker=tracker is not None)
        own = [channels.spill(pickle.dumps(start)), *map(_dup_or_null, (1, 2, -1 if tracker is None else tracker))]
        branch = channels.spill(pickle.dumps(process_context))
        try:
            with theirs, branch:
                fds = [each.fd for each in own]
                self._forking, self._number = fork_server.fork(
                    [theirs.fileno(), *fds, *dumped.fds], imports_of(dumped.modules), [branch.fd, *fds[1:3]]
                )
        except BaseException:
            self._control.close()
            raise
        finally:
            for each in own:
                each.close()

    def is_ours(self) -> bool:
        """False in a forked child, which must not use its parent's zygote."""
        return self._owner == os.getpid()

    def has_run(self) -> bool:
        """True if the zygote has begun to run; does not wait."""
        # Not removed from the socket: groups of several threads may ask. Unread messages at the other end are an error
        # that hides this one, but only once.
        for _ in range(2):
            with suppress(OSError):
                return bool(self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        return False

    def new_group(self, *, is_first: bool = False) -> ZygoteProcessGroup:
        """Create a process group. Raises ConnectionError if the zygote has ended.

        The first group reports that end instead.
        """
        # While a process ends, its sockets are closed one by one: this one may still be open.
        if self.has_ended:
            raise ConnectionResetError("the zygote has ended")
        mine, theirs = channels.pair()
        with theirs:
            try:
                channels.send(self._control, [b"group"], [theirs.fileno()])
            except ConnectionError:
                if not is_first:
                    mine.close()
                    raise
        return ZygoteProcessGroup(mine, self)

    def close(self, *, kill: bool) -> None:
        """Let the zygote end once its groups are closed.

        With `kill`, a zygote that does not answer in time is killed: it cannot answer while it unpickles a dataset.
        """
        poll = select.poll()
        poll.register(self._control, 0)  # its end alone: it has sent a sign of life
        with suppress(OSError):
            # Only this direction: that the zygote closes its end is the answer that is waited for.
            self._control.shutdown(socket.SHUT_WR)
        if kill and not poll.poll(_ANSWER_S * 1000):
            self._forking.kill(self._number)
        self._control.close()


def _dup_or_null(fd: int) -> Descriptors:
    """Duplicate a descriptor; /dev/null if this process has closed it."""
    try:
        return opened(os.dup, fd)
    except OSError:
        return opened(os.open, os.devnull, os.O_WRONLY | os.O_CLOEXEC)
