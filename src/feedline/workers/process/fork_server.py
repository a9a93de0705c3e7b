"""The process from which all others are forked: a plain interpreter that has imported torch and done nothing else."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import NamedTuple

from feedline.workers.base import Closeable
from feedline.workers.process import channels

# OpenMP, OpenBLAS and MKL start their threads as they are loaded, and a process with threads must not be forked.
_SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


# Hundreds of thousands of objects are made by the imports and none of them is garbage: looking for some took a quarter
# of the time until the fork server serves. It turns collections on again.
_BOOT = (
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[4]); "
    "from feedline.workers.process.fork_server_main import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


_FAREWELL_S = 2.0


class ForkZygote(NamedTuple):
    """To the fork server, with the descriptors of `zygote.main`: fork a zygote."""

    number: int


class KillZygote(NamedTuple):
    """To the fork server: kill a zygote."""

    number: int


class ForkServer:
    """Our end of it. It ends when this object is closed, and when this process ends in whatever way."""

    def __init__(self) -> None:
        self._numbers = count()
        self._socket, theirs = channels.pair()
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        # -P: no module of the user's that lies in the current directory may stand for one of Python's.
        program = [sys.executable, *flags, "-P", "-c", _BOOT, __name__]
        path = json.dumps([str(folder) for folder in sys.path])
        with theirs:
            self._process = subprocess.Popen(
                [*program, str(theirs.fileno()), str(os.getpid()), path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal goes to the group of the training process
                env={**os.environ, **_SINGLE_THREADED},
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it can be asked for anything; it may still be importing."""
        return self._process.poll() is None

    def fork(self, fds: Sequence[int]) -> int:
        """Ask for a zygote with these descriptors. Does not wait; the number that is returned is for `kill`.

        Raises ConnectionError if it has died.
        """
        number = next(self._numbers)
        channels.send(self._socket, [pickle.dumps(ForkZygote(number))], fds)
        return number

    def kill(self, number: int) -> None:
        """SIGKILL for a zygote, if there still is one."""
        with suppress(ConnectionError):  # it is gone itself, and with it all zygotes
            channels.send(self._socket, [pickle.dumps(KillZygote(number))])

    def close(self) -> None:
        """End it, and all that descends from it."""
        channels.hang_up(self._socket)
        try:
            self._process.wait(_FAREWELL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _ForkServers:
    """The fork servers, by process id, as a child of the user's that inherits this needs its own; and what is open."""

    def __init__(self) -> None:
        self._fork_servers: dict[int, ForkServer] = {}
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[Closeable] = weakref.WeakSet()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._unlock)

    def fork_server(self) -> ForkServer:
        with self._lock:
            fork_server = self._fork_servers.get(os.getpid())
            if fork_server is not None and not fork_server.is_alive():
                fork_server.close()
                fork_server = None
            if fork_server is None:
                fork_server = self._fork_servers[os.getpid()] = ForkServer()
            return fork_server

    def close_at_exit(self, thing: Closeable) -> None:
        self._open.add(thing)

    def close(self) -> None:
        for thing in list(self._open):
            thing.close()
        fork_server = self._fork_servers.pop(os.getpid(), None)
        if fork_server is not None:
            fork_server.close()

    def _unlock(self) -> None:
        """In a forked child, where the thread that held the lock is not."""
        self._lock = threading.Lock()


_household = _ForkServers()


def start() -> ForkServer:
    """The fork server of this process; started if there is none, in the background, in about a millisecond."""
    return _household.fork_server()


def fork(fds: Sequence[int]) -> tuple[ForkServer, int]:
    """Ask the fork server, or another one if it has died, for a zygote; see `Fork server.fork`."""
    try:
        fork_server = start()
        return fork_server, fork_server.fork(fds)
    except ConnectionError:
        fork_server.close()
        fork_server = start()
        return fork_server, fork_server.fork(fds)


def stop() -> None:
    """Close every pool that is still open, and end the fork server. Done at exit; `start` may be called again."""
    _household.close()


def close_at_exit(thing: Closeable) -> None:
    """Have a pool closed before the interpreter exits, while its workers can still say goodbye."""
    _household.close_at_exit(thing)
