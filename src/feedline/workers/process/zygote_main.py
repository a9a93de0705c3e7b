"""The program of a zygote: holds one builder, ready to work, and forks the workers of its loader's pools from it."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import select
import socket
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, NamedTuple

from feedline.workers.process import channels, exceptions
from feedline.workers.process.environment import ProcessEnvironment, die_with_parent
from feedline.workers.process.worker_main import WorkerChannels, WorkerSetup, name_process, run_worker
from feedline.workers.transport import load_builder

TAIL_NBYTES = 4096
"""How much of each worker's standard error is kept for the error that tells of its death."""


_FAREWELL_S = 0.3


_FORK = multiprocessing.get_context("fork")


class SharedWork(NamedTuple):
    """What is frozen for the workers of one loader."""

    builder: Any
    worker_init_fn: Callable[[int], object] | None


class Origin(NamedTuple):
    """To the fork server: what a zygote begins with. The frozen work's arrays, if any, come as a descriptor."""

    surroundings: ProcessEnvironment
    skeleton: bytes


class Launch(NamedTuple):
    """To a zygote, with a worker's lines: fork it. Its pool knows it by its serial number."""

    serial: int
    setup: WorkerSetup


class KillWorker(NamedTuple):
    """To a zygote: SIGKILL."""

    serial: int


class Wakeup(NamedTuple):
    """To a zygote, and back from it: nothing, but whoever waits at the other end wakes up."""


class Started(NamedTuple):
    """From a zygote, with a pidfd: the worker runs."""

    serial: int
    pid: int


class Exited(NamedTuple):
    """From a zygote: the worker has ended."""

    serial: int
    exitcode: int | None
    stderr: str


class StartFailed(NamedTuple):
    """From a zygote: there is no worker, because the builder could not be thawed, or the fork failed."""

    serial: int
    failure: exceptions.RemoteException


def main(fork_server: int, fds: Sequence[int]) -> None:
    """Serve until the launcher and all pools have closed their ends. Runs as a fresh child of the fork server.

    `fds`: the launcher's socket, the pickled `Origin`, standard output and error, and the frozen arrays, if any.
    """
    die_with_parent(fork_server)
    control, letter, stdout, stderr, *arrays = fds
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    channels.close_all([stdout, stderr])
    faulthandler.enable(2)
    name_process("feedline-zygote")
    origin: Origin = pickle.loads(channels.slurp(letter))
    origin.surroundings.adopt()
    # Threads here are those of a library that the dataset has imported: known, and nothing that its user can change.
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
    zygote = _ZygoteServer(socket.socket(fileno=control), _thawed(arrays, origin.skeleton))
    channels.close_all(arrays)
    gc.collect()
    gc.freeze()  # so that no collection in a worker writes to, and thereby copies, the pages that all share
    while zygote.step():
        pass
    zygote.farewell()


def _thawed(arrays: Sequence[int], skeleton: bytes) -> Callable[..., None] | exceptions.RemoteException:
    """What a worker runs, but for its setup, lines and standard error; or why there can be none."""
    try:
        work: SharedWork = load_builder(arrays, skeleton)
    except BaseException as error:  # noqa: BLE001 - it is raised again in the training process
        error.add_note("feedline: raised while the dataset was unpickled for the worker processes")
        return exceptions.pack(error)
    return partial(_serve, work, os.getpid())


def _serve(work: SharedWork, zygote: int, setup: WorkerSetup, lines: WorkerChannels, stderr: int) -> None:
    die_with_parent(zygote)
    os.dup2(stderr, 2)
    os.close(stderr)
    run_worker(work.builder, work.worker_init_fn, setup, lines)


class _WorkerChild:
    """One living worker, seen from its parent."""

    def __init__(self, serial: int, crew: socket.socket, process: BaseProcess, stderr: int) -> None:
        assert process.pid is not None
        self.serial, self.crew, self.process, self.stderr = serial, crew, process, stderr
        self.pid, self.pidfd = process.pid, os.pidfd_open(process.pid)
        self.tail = b""
        os.set_blocking(stderr, False)

    def relay(self) -> bool:
        """Pass on some of what it wrote to standard error; False if there is nothing."""
        try:
            text = os.read(self.stderr, 1 << 16)
        except BlockingIOError:
            return False
        self.tail = (self.tail + text)[-TAIL_NBYTES:]
        rest = text
        with suppress(OSError):  # whatever read it is gone
            while rest:
                rest = rest[os.write(2, rest) :]
        return bool(text)

    def bury(self) -> Exited:
        """Collect what is left of it."""
        while self.relay():
            pass
        self.process.join()
        exitcode = self.process.exitcode
        self.process.close()
        channels.close_all([self.pidfd, self.stderr])
        return Exited(self.serial, exitcode, self.tail.decode(errors="replace"))


class _ZygoteServer:
    def __init__(self, control: socket.socket, target: Callable[..., None] | exceptions.RemoteException) -> None:
        self._control, self._target = control, target
        self._post = channels.ReceiveBuffer()
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._workers: dict[tuple[socket.socket, int], _WorkerChild] = {}
        self._doors = 1
        self._on(control.fileno(), self._meet)

    def step(self, timeout_ms: float | None = None) -> bool:
        """Wait for something to happen and see to it; False when launcher and pools have closed."""
        for fd, _ in self._poll.poll(timeout_ms):
            if fd in self._handlers:  # not closed by the one before
                self._handlers[fd]()
        return self._doors > 0

    def farewell(self) -> None:
        """Give the workers, whose requests have ended too, their moment; the kernel kills those that are left."""
        deadline = monotonic() + _FAREWELL_S
        while self._workers and (left := deadline - monotonic()) > 0:
            self.step(left * 1000)

    def _on(self, fd: int, handler: Callable[[], object]) -> None:
        self._poll.register(fd, select.POLLIN)
        self._handlers[fd] = handler

    def _off(self, fd: int) -> None:
        self._poll.unregister(fd)
        del self._handlers[fd]

    def _meet(self) -> None:
        """A pool hands in the socket of its crew."""
        message, fds = self._post.receive(self._control)
        if not message:
            self._off(self._control.fileno())
            self._control.close()
            self._doors -= 1
            return
        crew = socket.socket(fileno=fds[0])
        self._on(crew.fileno(), partial(self._obey, crew))
        self._doors += 1

    def _obey(self, crew: socket.socket) -> None:
        message, fds = self._post.receive(crew)
        if not message:  # its workers see that their requests have ended too, and leave by themselves
            self._off(crew.fileno())
            crew.close()
            self._doors -= 1
            return
        order = pickle.loads(message)
        if isinstance(order, Launch):
            self._launch(crew, order, fds)
        elif isinstance(order, Wakeup):
            _tell(crew, order)
        elif (crew, order.serial) in self._workers:
            self._workers[crew, order.serial].process.kill()

    def _launch(self, crew: socket.socket, order: Launch, fds: Sequence[int]) -> None:
        try:
            if isinstance(self._target, exceptions.RemoteException):
                _tell(crew, StartFailed(order.serial, self._target))
                return
            worker = _forked(crew, order, self._target, WorkerChannels(*fds))
        except OSError as error:
            _tell(crew, StartFailed(order.serial, exceptions.pack(error)))
            return
        finally:
            channels.close_all(fds)
        self._workers[crew, order.serial] = worker
        self._on(worker.pidfd, partial(self._bury, worker))
        self._on(worker.stderr, partial(self._relay, worker))
        _tell(crew, Started(order.serial, worker.pid), [worker.pidfd])

    def _relay(self, worker: _WorkerChild) -> None:
        if not worker.relay():
            self._off(worker.stderr)

    def _bury(self, worker: _WorkerChild) -> None:
        self._off(worker.pidfd)
        if worker.stderr in self._handlers:
            self._off(worker.stderr)
        _tell(worker.crew, worker.bury())
        del self._workers[worker.crew, worker.serial]


def _forked(crew: socket.socket, order: Launch, target: Callable[..., None], lines: WorkerChannels) -> _WorkerChild:
    stderr, theirs = os.pipe()
    process = _FORK.Process(
        target=target, args=(order.setup, lines, theirs), name=f"feedline-{order.setup.worker_id}", daemon=True
    )
    try:
        process.start()
    except OSError:
        os.close(stderr)
        raise
    finally:
        os.close(theirs)
    return _WorkerChild(order.serial, crew, process, stderr)


def _tell(crew: socket.socket, word: Started | Exited | StartFailed | Wakeup, fds: Sequence[int] = ()) -> None:
    with suppress(OSError):  # the pool has closed
        channels.send(crew, [pickle.dumps(word)], fds)
