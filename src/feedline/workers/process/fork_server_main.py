"""Program of the fork server: forks zygotes on command and reaps them."""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import traceback
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import NamedTuple, NoReturn

from feedline.workers.process import channels, zygote_main
from feedline.workers.process.fork_server import ForkBranch, ForkZygote, KillZygote
from feedline.workers.process.imports import import_all
from feedline.workers.process.worker_main import STACK_SIGNAL, name_process

_GRACE_S = 0.5
"""Seconds that zygotes have to end after the training process ends. All processes must end within a second."""


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
    _serve(commands, parent_fd)
    os._exit(0)


def _serve(commands: int, parent_fd: int) -> None:
    fork_server = _ForkServerLoop(channels.connect(commands), parent_fd)
    while fork_server.step():
        pass
    fork_server.drain()


def _serve_branch(modules: list[str], fork_server: int, fds: list[int]) -> None:
    """Program of a branch: import modules, then serve as a fork server."""
    commands, process_context, stdout, stderr = fds
    parent_fd = os.pidfd_open(fork_server)
    zygote_main.take_over(fork_server, pickle.loads(channels.read_all(process_context)), stdout, stderr)
    import_all(modules)
    _serve(commands, parent_fd)


_NO_ZYGOTE = -1
"""Number of a branch, which no command kills."""


class _ZygoteChild(NamedTuple):
    number: int
    pid: int


class _ForkServerLoop:
    """Handler of commands, and of the ends of zygotes."""

    def __init__(self, commands: channels.Channel, parent_fd: int) -> None:
        self._commands, self._parent_fd = commands, parent_fd
        self._zygotes: dict[int, _ZygoteChild] = {}
        self._receive_buffer = channels.ReceiveBuffer()
        self._poll = select.poll()
        self._poll.register(commands, select.POLLIN)
        self._poll.register(parent_fd, select.POLLIN)

    def step(self) -> bool:
        """Handle the next events; False when the training process has ended.

        Also False when the client has closed its socket.
        """
        for fd, _ in self._poll.poll():
            if fd == self._commands.fileno():
                message, fds = self._receive_buffer.receive(self._commands)
                if not message:
                    return False
                self._execute(pickle.loads(message), fds.disown())
            elif fd == self._parent_fd:
                return False
            else:
                self._reap(fd)
        return True

    def drain(self) -> None:
        """Wait briefly for the zygotes, which end by themselves.

        The kernel kills the remaining ones when this process ends (see `die_with_parent`).
        """
        # Once the training process has ended, both are readable forever, and no poll would wait.
        self._poll.unregister(self._commands)
        self._poll.unregister(self._parent_fd)
        deadline = monotonic() + _GRACE_S
        while self._zygotes and (left := deadline - monotonic()) > 0:
            for fd, _ in self._poll.poll(left * 1000):
                self._reap(fd)

    def _execute(self, command: ForkZygote | ForkBranch | KillZygote, fds: list[int]) -> None:
        if isinstance(command, ForkZygote):
            self._fork(command.number, zygote_main.main, fds)
        elif isinstance(command, ForkBranch):
            self._fork(_NO_ZYGOTE, partial(_serve_branch, command.modules), fds)
        else:
            for child in self._zygotes.values():
                if child.number == command.number:
                    # Children here are not reaped yet, so the kernel has given this pid to no other process.
                    os.kill(child.pid, signal.SIGKILL)

    def _fork(self, number: int, program: Callable[[int, list[int]], object], fds: list[int]) -> None:
        fork_server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(partial(program, fork_server, fds))
        channels.close_all(fds)
        # Safe even if the zygote has ended: its number is not given to another process before `_reap` waits for it.
        pidfd = os.pidfd_open(pid)
        self._zygotes[pidfd] = _ZygoteChild(number, pid)
        self._poll.register(pidfd, select.POLLIN)

    def _become(self, program: Callable[[], object]) -> NoReturn:
        """Run a program without the fork server's descriptors."""
        try:
            # With a copy of the socket in a zygote, commands to a dead fork server would seem to arrive.
            self._commands.close()
            channels.close_all([self._parent_fd, *self._zygotes])
            program()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the child must not return into the fork server's loop
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        os.waitpid(self._zygotes.pop(pidfd).pid, 0)
        os.close(pidfd)
