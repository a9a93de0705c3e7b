"""The program of the fork server: waits for a command, forks a zygote, buries it."""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import socket
import traceback
from time import monotonic
from typing import NamedTuple, NoReturn

from feedline.workers.process import channels, zygote_main
from feedline.workers.process.fork_server import ForkZygote, KillZygote
from feedline.workers.process.worker_main import STACK_SIGNAL, name_process

_FAREWELL_S = 0.5
"""How long zygotes may take to end after the training process has: all must be gone within a second."""


def main(commands: int, parent: int) -> None:
    """Serve until the training process closes its end or ends. Never runs code of the user's."""
    for ignored in (signal.SIGINT, signal.SIGTTOU, STACK_SIGNAL):
        signal.signal(ignored, signal.SIG_IGN)
    name_process("feedline-nurse")
    parent_fd = os.pidfd_open(os.getppid())
    if os.getppid() != parent:  # it ended while this process was importing
        os._exit(0)
    gc.freeze()  # what has been imported will never be garbage: no collection of a zygote need look at it
    gc.enable()
    fork_server = _ForkServer(socket.socket(fileno=commands), parent_fd)
    while fork_server.step():
        pass
    fork_server.farewell()
    os._exit(0)


class _ZygoteChild(NamedTuple):
    number: int
    pid: int


class _ForkServer:
    def __init__(self, commands: socket.socket, parent_fd: int) -> None:
        self._commands, self._parent_fd = commands, parent_fd
        self._zygotes: dict[int, _ZygoteChild] = {}
        self._post = channels.ReceiveBuffer()
        self._poll = select.poll()
        self._poll.register(commands, select.POLLIN)
        self._poll.register(parent_fd, select.POLLIN)

    def step(self) -> bool:
        """Wait for something to happen and see to it; False when the training process is gone."""
        for fd, _ in self._poll.poll():
            if fd == self._commands.fileno():
                message, fds = self._post.receive(self._commands)
                if not message:
                    return False
                self._obey(pickle.loads(message), list(fds))
            elif fd == self._parent_fd:
                return False
            else:
                self._bury(fd)
        return True

    def farewell(self) -> None:
        """Give the zygotes, which notice by themselves, their moment; the kernel kills them when this process ends."""
        self._poll.unregister(self._commands)
        self._poll.unregister(self._parent_fd)
        deadline = monotonic() + _FAREWELL_S
        while self._zygotes and (left := deadline - monotonic()) > 0:
            for fd, _ in self._poll.poll(left * 1000):
                self._bury(fd)

    def _obey(self, order: ForkZygote | KillZygote, fds: list[int]) -> None:
        if isinstance(order, ForkZygote):
            self._fork(order.number, fds)
        else:
            for child in self._zygotes.values():
                if child.number == order.number:
                    os.kill(child.pid, signal.SIGKILL)

    def _fork(self, number: int, fds: list[int]) -> None:
        fork_server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._leave_to(fork_server, fds)
        channels.close_all(fds)
        pidfd = os.pidfd_open(pid)
        self._zygotes[pidfd] = _ZygoteChild(number, pid)
        self._poll.register(pidfd, select.POLLIN)

    def _leave_to(self, fork_server: int, fds: list[int]) -> NoReturn:
        """In the child: become a zygote, with nothing left of the fork server."""
        try:
            self._commands.close()
            channels.close_all([self._parent_fd, *self._zygotes])
            zygote_main.main(fork_server, fds)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - it must not return into the fork server's loop
            traceback.print_exc()
        finally:
            os._exit(1)

    def _bury(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        os.waitpid(self._zygotes.pop(pidfd).pid, 0)
        os.close(pidfd)
