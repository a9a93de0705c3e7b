"""Program of the fork server: forks zygotes on command and reaps them."""

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

_GRACE_S = 0.5
"""Seconds that zygotes get to end after the training process has ended; all must be gone within a second."""


def main(commands: int, parent: int) -> None:
    """Serve until the training process closes its socket or ends.

    Runs no code of the user, so the process stays single-threaded and safe to fork.
    """
    # Ctrl-C is for the training process. SIGTTOU would stop this background group when it writes to a terminal, and a
    # real-time signal without a handler ends a process.
    for ignored in (signal.SIGINT, signal.SIGTTOU, STACK_SIGNAL):
        signal.signal(ignored, signal.SIG_IGN)
    name_process("feedline-forks")
    # Opened before the comparison: a number that still is the parent's afterwards was the parent's all the time.
    parent_fd = os.pidfd_open(os.getppid())
    if os.getppid() != parent:  # it ended during the imports
        os._exit(0)
    gc.freeze()  # imported objects are never garbage: collections in zygotes need not visit them
    gc.enable()
    fork_server = _ForkServer(socket.socket(fileno=commands), parent_fd)
    while fork_server.step():
        pass
    fork_server.drain()
    os._exit(0)


class _ZygoteChild(NamedTuple):
    number: int
    pid: int


class _ForkServer:
    def __init__(self, commands: socket.socket, parent_fd: int) -> None:
        self._commands, self._parent_fd = commands, parent_fd
        self._zygotes: dict[int, _ZygoteChild] = {}
        self._receive_buffer = channels.ReceiveBuffer()
        self._poll = select.poll()
        self._poll.register(commands, select.POLLIN)
        self._poll.register(parent_fd, select.POLLIN)

    def step(self) -> bool:
        """Handle the next events; False when the training process has ended."""
        for fd, _ in self._poll.poll():
            if fd == self._commands.fileno():
                message, fds = self._receive_buffer.receive(self._commands)
                if not message:
                    return False
                self._execute(pickle.loads(message), list(fds))
            elif fd == self._parent_fd:
                return False
            else:
                self._reap(fd)
        return True

    def drain(self) -> None:
        """Wait briefly for the zygotes, which end by themselves.

        The kernel kills those that are left when this process ends (see `die_with_parent`).
        """
        # Once the training process has ended, both are readable forever, and no poll would wait.
        self._poll.unregister(self._commands)
        self._poll.unregister(self._parent_fd)
        deadline = monotonic() + _GRACE_S
        while self._zygotes and (left := deadline - monotonic()) > 0:
            for fd, _ in self._poll.poll(left * 1000):
                self._reap(fd)

    def _execute(self, command: ForkZygote | KillZygote, fds: list[int]) -> None:
        if isinstance(command, ForkZygote):
            self._fork(command.number, fds)
        else:
            for child in self._zygotes.values():
                if child.number == command.number:
                    os.kill(child.pid, signal.SIGKILL)

    def _fork(self, number: int, fds: list[int]) -> None:
        fork_server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_zygote(fork_server, fds)
        channels.close_all(fds)
        # Safe even if the zygote has ended: its number is not given to another process before `_reap` waits for it.
        pidfd = os.pidfd_open(pid)
        self._zygotes[pidfd] = _ZygoteChild(number, pid)
        self._poll.register(pidfd, select.POLLIN)

    def _become_zygote(self, fork_server: int, fds: list[int]) -> NoReturn:
        """Run as a zygote, without the fork server's descriptors."""
        try:
            # With a copy of the socket in a zygote, commands to a dead fork server would seem to arrive.
            self._commands.close()
            channels.close_all([self._parent_fd, *self._zygotes])
            zygote_main.main(fork_server, fds)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the child must not return into the fork server's loop
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        os.waitpid(self._zygotes.pop(pidfd).pid, 0)
        os.close(pidfd)
