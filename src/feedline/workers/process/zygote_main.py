"""Program of a zygote, which forks workers around one builder."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import popen_fork, resource_tracker
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, NamedTuple, NoReturn

from feedline.core.descriptors import Descriptors
from feedline.workers.process import channels, exceptions
from feedline.workers.process.channels import Channel
from feedline.workers.process.environment import ProcessEnvironment, die_with_parent
from feedline.workers.process.settings import LibrarySettings, register_collates
from feedline.workers.process.worker_main import (
    WorkerChannels,
    WorkerSetup,
    import_for_workers,
    name_process,
    run_worker,
)
from feedline.workers.transport import load_builder

TAIL_NBYTES = 4096
"""Number of bytes kept of each worker's standard error, for the message about its death."""


SIGN_OF_LIFE = b"runs"
"""First message of a zygote to its launcher: the process that forked it was alive, too."""


_GRACE_S = 0.3


class _UnflushedPopen(popen_fork.Popen):
    """Fork that does not flush the standard streams first.

    When this process was forked, a thread of the training process may have held the lock of a stream.
    """

    def __init__(self, process: BaseProcess) -> None:
        self.returncode: int | None = None
        self.finalizer: Any = None
        self._launch(process)  # type: ignore[attr-defined]


class ForkedWorker(ForkProcess):
    """Worker process, forked by `start`, or by others before `run_here`."""

    @staticmethod
    def _Popen(process: BaseProcess) -> popen_fork.Popen:  # noqa: N802 - the name that multiprocessing calls
        return _UnflushedPopen(process)

    def run_here(self, parent: int, parent_name: str) -> NoReturn:
        """Run in the calling process, which `parent` has forked, and end it."""
        self._parent_pid, self._parent_name = parent, parent_name
        code = 1
        try:
            # A pidfd, as the pipe that multiprocessing uses, is readable once the process has ended.
            code = self._bootstrap(parent_sentinel=os.pidfd_open(parent))  # type: ignore[attr-defined]
        finally:  # at the end, `threading` joins threads of executors: an error if this one was forked by one of them
            os._exit(code)


def new_worker(
    target: Callable[..., None], setup: WorkerSetup, worker_channels: WorkerChannels, stderr: int | None
) -> ForkedWorker:
    """Worker process around `target(setup, worker_channels, stderr)`, not yet started."""
    arguments = setup, worker_channels, stderr
    return ForkedWorker(target=target, args=arguments, name=f"feedline-{setup.worker_id}", daemon=True)


class SharedWork(NamedTuple):
    """Builder and init function, pickled once for the workers of one loader."""

    builder: Any
    worker_init_fn: Callable[[int], object] | None
    collates: dict[Any, Callable[..., Any]] = {}  # noqa: RUF012 - never written
    """Functions registered with torch's `default_collate`, for processes that do not inherit the registrations."""


class ProcessContext(NamedTuple):
    """Environment and settings of the training process."""

    environment: ProcessEnvironment
    settings: LibrarySettings


class ZygoteStart(NamedTuple):
    """Initial state of a zygote; arrays of the builder come as descriptors."""

    process_context: ProcessContext
    skeleton: bytes
    has_tracker: bool
    """True if a descriptor leads to the resource tracker of the training process."""


class Launch(NamedTuple):
    """Command to fork a worker; comes with its channels."""

    serial: int
    setup: WorkerSetup


class KillWorker(NamedTuple):
    """Command to kill a worker."""

    serial: int


class Finish(NamedTuple):
    """Command to end with the last worker: no launch will come."""


class Wakeup(NamedTuple):
    """Message without data that the zygote returns to wake its sender."""


class Started(NamedTuple):
    """Report that a worker runs; comes with its pidfd."""

    serial: int
    pid: int


class Exited(NamedTuple):
    """Report that a worker has ended."""

    serial: int
    exitcode: int | None
    stderr: str


class StartFailed(NamedTuple):
    """Report that a worker could not be started: unpickling or fork failed."""

    serial: int
    failure: exceptions.RemoteException


def main(fork_server: int, fds: Sequence[int]) -> None:
    """Serve until the launcher and all pools have closed their sockets.

    Runs in a fresh child of the fork server. `fds` are the launcher's socket, the pickled `ZygoteStart`, standard
    output and error, the resource tracker, and the files with the arrays of the builder, if any.
    """
    control, start_fd, stdout, stderr, tracker, *arrays = fds
    start: ZygoteStart = pickle.loads(channels.read_all(start_fd))
    take_over(fork_server, start.process_context, stdout, stderr)
    channel = channels.connect(control)
    with suppress(OSError):  # the launcher has closed
        channels.send(channel, [SIGN_OF_LIFE])
    name_process("feedline-zygote")
    if start.has_tracker:
        # Its own tracker would remove the shared memory of the training process when this process ends.
        resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    else:
        os.close(tracker)
    zygote = WorkerForker(_load_target(arrays, start.skeleton))
    zygote.accept_groups(channel)
    channels.close_all(arrays)
    gc.collect()
    gc.freeze()  # collections in workers would write to shared pages, and so copy them
    while zygote.step():
        pass
    zygote.drain()


def take_over(fork_server: int, process_context: ProcessContext, stdout: int, stderr: int) -> None:
    """Prepare a child of the fork server for the user's code.

    From then on, the calling process dies with the fork server. `stdout` and `stderr` replace its own streams, and are
    closed.
    """
    # First of all: unpickling a dataset may take minutes, in which the training process may end.
    die_with_parent(fork_server)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    channels.close_all([stdout, stderr])
    faulthandler.enable(2)
    process_context.environment.apply()
    process_context.settings.apply()
    # Threads in this process belong to libraries that the dataset imports: the user cannot change that.
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)


def _load_target(arrays: Sequence[int], skeleton: bytes) -> Callable[..., None] | exceptions.RemoteException:
    """Unpickle the builder; return a worker's program, or the error."""
    try:
        work: SharedWork = load_builder(arrays, skeleton)
        register_collates(work.collates)
        import_for_workers(work.builder)
    except BaseException as error:  # noqa: BLE001 - it is raised again in the training process
        error.add_note("feedline: raised while the dataset was unpickled for the worker processes")
        return exceptions.pack(error)
    return partial(serve_forked, work, os.getpid())


def serve_forked(
    work: SharedWork, parent: int | None, setup: WorkerSetup, worker_channels: WorkerChannels, stderr: int | None
) -> None:
    """Program of a forked worker, which dies with process `parent`.

    If `parent` is None, the caller arranges for that death. `stderr` is a pipe for standard error, and is closed; None
    leaves descriptor 2 as it is.
    """
    if parent is not None:
        die_with_parent(parent)
    if stderr is not None:
        os.dup2(stderr, 2)
        os.close(stderr)
    try:
        run_worker(work.builder, work.worker_init_fn, setup, worker_channels)
    except (Exception, KeyboardInterrupt):  # noqa: BLE001 - any end of a worker is reported
        # multiprocessing would write it to `sys.stderr`, which notebooks and test runners replace: not to the pipe.
        traceback.print_exc(file=sys.__stderr__)
        raise SystemExit(1) from None


class _WatchedWorker:
    """One live worker of a group: its pidfd and standard error."""

    def __init__(self, serial: int, group: Channel, pidfd: int, stderr: int) -> None:
        self.serial, self.group, self.pidfd, self.stderr = serial, group, pidfd, stderr
        self.tail = b""
        # A process that the worker has started may keep the pipe open: `reap` must not wait for its end.
        os.set_blocking(stderr, False)

    def relay(self) -> bool:
        """Forward pending standard error; False if there is none."""
        try:
            text = os.read(self.stderr, 1 << 16)
        except BlockingIOError:
            return False
        self.tail = (self.tail + text)[-TAIL_NBYTES:]
        rest = text
        with suppress(OSError):  # the reader has closed it
            while rest:
                rest = rest[os.write(2, rest) :]
        return bool(text)

    def kill(self) -> None:
        """Send SIGKILL."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> Exited:
        """Close the worker's descriptors; return the report of its end."""
        while self.relay():
            pass
        exitcode = self.exit_code()
        channels.close_all([self.pidfd, self.stderr])
        return Exited(self.serial, exitcode, self.tail.decode(errors="replace"))

    def exit_code(self) -> int | None:
        """Exit code; None if only the worker's parent knows it."""
        return None


class _WorkerChild(_WatchedWorker):
    """One live worker that this process has forked."""

    def __init__(self, serial: int, group: Channel, process: BaseProcess, stderr: int) -> None:
        assert process.pid is not None
        super().__init__(serial, group, os.pidfd_open(process.pid), stderr)
        self.process, self.pid = process, process.pid

    def exit_code(self) -> int | None:
        """Wait for the exit code of the child, and reap it."""
        self.process.join()
        exitcode = self.process.exitcode
        self.process.close()
        return exitcode


class WorkerForker:
    """Forks workers on command, reports their ends, and relays their standard error.

    `target(setup, channels, stderr)` is the program of a worker, or the error to report for every start.
    """

    def __init__(self, target: Callable[..., None] | exceptions.RemoteException) -> None:
        self._target = target
        self._receive_buffer = channels.ReceiveBuffer()
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._workers: dict[tuple[Channel, int], _WatchedWorker] = {}
        self._open_sockets = 0
        self._finishes = False

    def accept_groups(self, control: Channel) -> None:
        """Serve the groups whose sockets come through `control`."""
        self._register(control.fileno(), partial(self._accept_group, control))
        self._open_sockets += 1

    def serve_group(self, group: Channel) -> None:
        """Serve the process group at the other end of a socket."""
        self._register(group.fileno(), partial(self._execute, group))
        self._open_sockets += 1

    def adopt(self, group: Channel, serial: int, pidfds: Sequence[int], stderr: int) -> None:
        """Watch a worker that another process has forked.

        Its standard error is relayed. Only its parent knows its exit code. Empty `pidfds` mean that it has ended.
        """
        if pidfds:
            self._watch(_WatchedWorker(serial, group, pidfds[0], stderr))
        else:
            _reply(group, Exited(serial, None, ""))

    def end_with(self, pidfd: int) -> None:
        """End when the process of a pidfd ends.

        The end of its sockets would not suffice, because other processes may hold copies of them.
        """
        self._register(pidfd, partial(self._stop, pidfd))

    def step(self, timeout_ms: float | None = None) -> bool:
        """Handle the next events; False when no more will come."""
        for fd, _ in self._poll.poll(timeout_ms):
            if fd in self._handlers:  # an earlier handler may have removed it
                self._handlers[fd]()
        return self._open_sockets > 0 and not (self._finishes and not self._workers)

    def drain(self, within_s: float = _GRACE_S) -> None:
        """Wait up to `within_s` seconds for the workers, then kill the rest.

        Workers end by themselves, because their queues are closed, too.
        """
        deadline = monotonic() + within_s
        while self._workers and (left := deadline - monotonic()) > 0:
            self.step(left * 1000)
        for worker in self._workers.values():  # those that are not its children, too
            worker.kill()

    def _register(self, fd: int, handler: Callable[[], object]) -> None:
        self._poll.register(fd, select.POLLIN)
        self._handlers[fd] = handler

    def _unregister(self, fd: int) -> None:
        self._poll.unregister(fd)
        del self._handlers[fd]

    def _stop(self, pidfd: int) -> None:
        self._unregister(pidfd)
        self._open_sockets = 0

    def _disconnect(self, channel: Channel) -> None:
        self._unregister(channel.fileno())
        channel.close()
        self._open_sockets -= 1

    def _accept_group(self, control: Channel) -> None:
        """Accept the socket of a new process group."""
        message, fds = self._receive_buffer.receive(control)
        if not message:
            self._disconnect(control)
            return
        self.serve_group(channels.connect(fds.disown()[0]))

    def _execute(self, group: Channel) -> None:
        message, fds = self._receive_buffer.receive(group)
        if not message:  # the pool has closed its queues too, so its workers end by themselves
            self._disconnect(group)
            return
        command = pickle.loads(message)
        if isinstance(command, Launch):
            self._launch(group, command, fds)
        elif isinstance(command, Wakeup):
            _reply(group, command)
        elif isinstance(command, Finish):
            self._finishes = True
        elif (group, command.serial) in self._workers:
            self._workers[group, command.serial].kill()

    def _launch(self, group: Channel, command: Launch, fds: Descriptors) -> None:
        try:
            if isinstance(self._target, exceptions.RemoteException):
                _reply(group, StartFailed(command.serial, self._target))
                return
            worker = _fork_worker(group, command, self._target, WorkerChannels(*fds))
        except OSError as error:
            _reply(group, StartFailed(command.serial, exceptions.pack(error)))
            return
        finally:
            fds.close()  # the worker has its own copies; with these, its pipes and sockets would outlive it
        self._watch(worker)
        _reply(group, Started(command.serial, worker.pid), [worker.pidfd])

    def _watch(self, worker: _WatchedWorker) -> None:
        self._workers[worker.group, worker.serial] = worker
        self._register(worker.pidfd, partial(self._reap, worker))
        self._register(worker.stderr, partial(self._relay, worker))

    def _relay(self, worker: _WatchedWorker) -> None:
        if not worker.relay():
            self._unregister(worker.stderr)

    def _reap(self, worker: _WatchedWorker) -> None:
        self._unregister(worker.pidfd)
        if worker.stderr in self._handlers:
            self._unregister(worker.stderr)
        _reply(worker.group, worker.reap())
        del self._workers[worker.group, worker.serial]


def _fork_worker(
    group: Channel, command: Launch, target: Callable[..., None], worker_channels: WorkerChannels
) -> _WorkerChild:
    stderr, theirs = os.pipe()
    process = new_worker(target, command.setup, worker_channels, theirs)
    try:
        process.start()
    except OSError:
        os.close(stderr)
        raise
    finally:
        os.close(theirs)  # with a copy in this process, the pipe would not end with the worker
    return _WorkerChild(command.serial, group, process, stderr)


def _reply(group: Channel, message: Started | Exited | StartFailed | Wakeup, fds: Sequence[int] = ()) -> None:
    with suppress(OSError):  # the pool has closed
        channels.send(group, [pickle.dumps(message)], fds)
