"""The workers that a zygote has forked, seen from the training process, which is not their parent."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from feedline.workers import failures, wire
from feedline.workers.launch import Ended, Process
from feedline.workers.serve import Lines, Setup
from feedline.workers.zygote import Born, Gone, Kill, Launch, Nudge, Stillborn


class ZygoteCrew:
    """See `Crew`. Orders go to the zygote through one socket, which also brings the news of births and deaths."""

    def __init__(self, zygote: socket.socket) -> None:
        self._zygote = zygote
        self._post = wire.Post()
        self._lock = threading.Lock()  # a user may ask a process for its pid while the pool is at work
        self._serial = 0
        self._living: dict[int, ZygoteProcess] = {}
        self._ended: list[Ended] = []
        self.lost = False

    def fileno(self) -> int:
        """See `Crew`."""
        return self._zygote.fileno()

    def launch(self, setup: Setup, lines: Lines) -> ZygoteProcess:
        """See `Crew`."""
        self._serial += 1
        process = self._living[self._serial] = ZygoteProcess(self, self._serial, f"feedline-{setup.worker_id}")
        self._order(Launch(self._serial, setup), lines)
        return process

    def ended(self) -> list[Ended]:
        """See `Crew`."""
        with self._lock:
            while self._hear():
                pass
            ended, self._ended = self._ended, []
        return ended

    def kill(self, process: Process) -> None:
        """See `Crew`."""
        assert isinstance(process, ZygoteProcess)
        self._order(Kill(process.serial))

    def close(self) -> None:
        """See `Crew`."""
        with self._lock:
            self._lose()
            wire.hang_up(self._zygote)

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
                self._order(Nudge())  # news that the pool would not wake up for, as it has been taken already

    def _order(self, order: Launch | Kill | Nudge, lines: Sequence[int] = ()) -> None:
        with suppress(ConnectionError):  # the zygote is gone, as `ended` will find out
            wire.send(self._zygote, [pickle.dumps(order)], lines)

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
            case Born(serial, pid):
                self._living[serial].begin(pid, fds[0])
            case Gone(serial, exitcode, stderr):
                process = self._living.pop(serial)
                process.end(exitcode)
                self._ended.append(Ended(process, exitcode, stderr))
            case Stillborn(serial, failure):
                process = self._living.pop(serial)
                process.end(None)
                error = failures.revive(failure, "in the process that forks the DataLoader workers")
                self._ended.append(Ended(process, None, error=error))
        return True

    def _lose(self) -> None:
        """Without their zygote all are dead: the kernel has killed them, or does so at this moment."""
        self.lost = True
        for process in self._living.values():
            process.end(None)
            self._ended.append(Ended(process, None, orphaned=True))
        self._living.clear()


class ZygoteProcess:
    """A worker process, with as much of the interface of `multiprocessing.Process` as is asked of workers."""

    def __init__(self, crew: ZygoteCrew, serial: int, name: str) -> None:
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
