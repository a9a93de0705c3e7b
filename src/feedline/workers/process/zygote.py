"""Workers forked from a zygote: nothing is inherited from the training process, and a new one takes milliseconds.

The workers that a zygote has forked, seen from the training process, which is not their parent.
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
from typing import Any

from feedline.errors import WorkerError
from feedline.workers.process import channels, exceptions, fork_server
from feedline.workers.process.environment import ProcessEnvironment
from feedline.workers.process.launch import ExitedProcess, WorkerProcess
from feedline.workers.process.worker_main import WorkerChannels, WorkerSetup
from feedline.workers.process.zygote_main import (
    Exited,
    KillWorker,
    Launch,
    Origin,
    SharedWork,
    Started,
    StartFailed,
    Wakeup,
)
from feedline.workers.transport import SharedBuilder, dump_builder


class ZygoteProcessGroup:
    """See `Crew`. Orders go to the zygote through one socket, which also brings the news of births and deaths."""

    def __init__(self, zygote: socket.socket) -> None:
        self._zygote = zygote
        self._post = channels.ReceiveBuffer()
        self._lock = threading.Lock()  # a user may ask a process for its pid while the pool is at work
        self._serial = 0
        self._living: dict[int, ZygoteProcess] = {}
        self._ended: list[ExitedProcess] = []
        self.lost = False

    def fileno(self) -> int:
        """See `Crew`."""
        return self._zygote.fileno()

    def launch(self, setup: WorkerSetup, lines: WorkerChannels) -> ZygoteProcess:
        """See `Crew`."""
        self._serial += 1
        process = self._living[self._serial] = ZygoteProcess(self, self._serial, f"feedline-{setup.worker_id}")
        self._order(Launch(self._serial, setup), lines)
        return process

    def ended(self) -> list[ExitedProcess]:
        """See `Crew`."""
        with self._lock:
            while self._hear():
                pass
            ended, self._ended = self._ended, []
        return ended

    def kill(self, process: WorkerProcess) -> None:
        """See `Crew`."""
        assert isinstance(process, ZygoteProcess)
        self._order(KillWorker(process.serial))

    def close(self) -> None:
        """See `Crew`."""
        with self._lock:
            self._lose()
            channels.hang_up(self._zygote)

    def wait(self) -> None:
        """Wait for news of any of the processes. For others than the pool, which waits on `fileno`."""
        poll = select.poll()
        with self._lock:
            if self.lost:
                return
            poll.register(self._zygote, select.POLLIN)
        poll.poll()
        with self._lock:
            self._hear()
            if self._ended:
                self._order(Wakeup())  # news that the pool would not wake up for, as it has been taken already

    def _order(self, order: Launch | KillWorker | Wakeup, lines: Sequence[int] = ()) -> None:
        with suppress(ConnectionError):  # the zygote is gone, as `ended` will find out
            channels.send(self._zygote, [pickle.dumps(order)], lines)

    def _hear(self) -> bool:
        """Take one piece of news; False if there is none."""
        if self.lost:
            return False
        try:
            message, fds = self._post.receive(self._zygote, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not message:
            self._lose()
            return False
        match pickle.loads(message):
            case Started(serial, pid):
                self._living[serial].begin(pid, fds[0])
            case Exited(serial, exitcode, stderr):
                process = self._living.pop(serial)
                process.end(exitcode)
                self._ended.append(ExitedProcess(process, exitcode, stderr))
            case StartFailed(serial, failure):
                process = self._living.pop(serial)
                process.end(None)
                error = exceptions.revive(failure, "in the process that forks the DataLoader workers")
                self._ended.append(ExitedProcess(process, None, error=error))
        return True

    def _lose(self) -> None:
        """Without their zygote all are dead: the kernel has killed them, or does so at this moment."""
        self.lost = True
        for process in self._living.values():
            process.end(None)
            self._ended.append(ExitedProcess(process, None, orphaned=True))
        self._living.clear()


class ZygoteProcess:
    """A worker process, with as much of the interface of `multiprocessing.Process` as is asked of workers."""

    def __init__(self, crew: ZygoteProcessGroup, serial: int, name: str) -> None:
        self._crew, self.serial, self.name = crew, serial, name
        self._pid: int | None = None
        self._pidfd = -1
        self._lock = threading.Lock()  # so that the descriptor is not closed while another thread is about to use it
        self._exitcode: int | None = None
        self._over = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} pid={self._pid} {'ended' if self._over else 'started'}>"

    @property
    def pid(self) -> int | None:
        """Its process id; waits for the zygote if that is still busy. None if it was never forked."""
        while self._pid is None and not self._over:
            self._crew.wait()
        return self._pid

    @property
    def exitcode(self) -> int | None:
        """As `multiprocessing` has it: None while it runs, negative for a signal."""
        while not self.is_alive() and not self._over:
            self._crew.wait()
        return self._exitcode

    def is_alive(self) -> bool:
        """Whether it runs, or is about to."""
        return not self._over and not (self._pidfd >= 0 and self._wait(0))

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        if self.pid is not None:
            self._wait(None if timeout is None else timeout * 1000)

    def terminate(self) -> None:
        """SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)

    def begin(self, pid: int, pidfd: int) -> None:
        """News: it runs."""
        self._pid, self._pidfd = pid, pidfd

    def end(self, exitcode: int | None) -> None:
        """News: it has ended, or the pool has closed and will hear no more of it."""
        with self._lock:
            self._exitcode, self._over = exitcode, True
            if self._pidfd >= 0:
                os.close(self._pidfd)

    def _wait(self, timeout_ms: float | None) -> bool:
        """Wait for the end; whether it came in time."""
        with self._lock:
            if self._over:
                return True
            pidfd = os.dup(self._pidfd)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return bool(poll.poll(timeout_ms))
        finally:
            os.close(pidfd)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is None:
            return
        with self._lock, suppress(ProcessLookupError):
            if not self._over:
                signal.pidfd_send_signal(self._pidfd, number)


_ANSWER_S = 0.5


class ZygoteLauncher:
    """Freezes the builder once, and has a zygote that thaws it once. Raises NotPicklableError.

    The zygote is forked when the first crew is asked for, and ends when this and all of its crews are closed. If it, or
    the fork server, is killed, the next crew gets a new one.
    """

    def __init__(self, builder: Any, init_fn: Callable[[int], object] | None = None) -> None:
        self.builder = builder
        self._frozen = dump_builder(SharedWork(builder, init_fn), "loader")
        self._zygote: ZygoteClient | None = None
        self._crews: weakref.WeakSet[ZygoteProcessGroup] = weakref.WeakSet()
        self._closed = False
        fork_server.close_at_exit(self)

    def serves(self, builder: Any, init_fn: Callable[[int], object] | None = None) -> bool:
        """Whether workers of this launcher are what workers of a new one would be: every byte is compared."""
        return self._frozen.matches(SharedWork(builder, init_fn))

    def crew(self) -> ZygoteProcessGroup:
        """A new, empty crew. Does not wait for the zygote."""
        if self._closed:
            raise WorkerError("the process that forked these workers is gone, and the loader has begun anew since")
        if self._zygote is None or not self._zygote.is_ours():
            self._zygote = ZygoteClient(self._frozen)
        try:
            crew = self._zygote.crew()
        except ConnectionError:
            self._zygote.close(kill=True)
            self._zygote = ZygoteClient(self._frozen)
            crew = self._zygote.crew()
        self._crews.add(crew)
        return crew

    def close(self) -> None:
        """See `Launcher`; forgets the frozen builder."""
        self._closed = True
        zygote, self._zygote = self._zygote, None
        if zygote is not None and zygote.is_ours():
            zygote.close(kill=all(crew.lost for crew in self._crews))
        self._frozen.close()


class ZygoteClient:
    """A zygote, from its launcher's point of view."""

    def __init__(self, frozen: SharedBuilder) -> None:
        self._owner = os.getpid()
        self._control, theirs = channels.pair()
        letter = channels.spill(pickle.dumps(Origin(ProcessEnvironment.here(), frozen.skeleton)))
        own = [letter, _standard_stream(1), _standard_stream(2)]
        try:
            self._fork_server, self._number = fork_server.fork([theirs.fileno(), *own, *frozen.fds])
        finally:
            channels.close_all(own)
            theirs.close()

    def is_ours(self) -> bool:
        """False in a child of the user's, which must not talk to its parent's zygote."""
        return self._owner == os.getpid()

    def crew(self) -> ZygoteProcessGroup:
        mine, theirs = channels.pair()
        with theirs:
            try:
                channels.send(self._control, [b"crew"], [theirs.fileno()])
            except ConnectionError:
                mine.close()
                raise
        return ZygoteProcessGroup(mine)

    def close(self, *, kill: bool) -> None:
        """Have it end once its crews are closed; at once, by force, if it is not to be waited for and gives no sign.

        It gives none while it unpickles a dataset, which may take long.
        """
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        if kill and not poll.poll(_ANSWER_S * 1000):
            self._fork_server.kill(self._number)
        self._control.close()


def _standard_stream(fd: int) -> int:
    """A copy of standard output or error; where this process has closed it, a hole."""
    try:
        return os.dup(fd)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
