"""Fork server: a fresh interpreter with torch that forks zygotes."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing import spawn
from typing import NamedTuple

from feedline.errors import WorkerDiedError, WorkerError, note
from feedline.workers.base import Closeable
from feedline.workers.process import channels
from feedline.workers.process.imports import SINGLE_THREADED, ImportRecord, Imports

# The imports make hundreds of thousands of objects, none of them garbage: collections took a quarter of the start-up
# time. The fork server enables them again.
_BOOT = (
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[4]); "
    "from feedline.workers.process.fork_server_main import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


_GRACE_S = 2.0


_NO_INTERPRETER = (
    "If this program embeds Python, name one by multiprocessing.set_executable('/path/to/python'), or fork workers "
    "with multiprocessing_context='fork'"
)


class ForkZygote(NamedTuple):
    """Command to fork a zygote; comes with the descriptors of `zygote_main.main`."""

    number: int


class KillZygote(NamedTuple):
    """Command to kill a zygote."""

    number: int


class ForkBranch(NamedTuple):
    """Command to fork a branch, which imports modules.

    Comes with its socket and the descriptors of `ZygoteForker.branch`.
    """

    modules: list[str]


class ZygoteForker:
    """Client of a process that forks zygotes."""

    def __init__(self) -> None:
        self._numbers = count()
        self._socket, self._theirs = channels.pair()

    def fork(self, fds: Sequence[int]) -> int:
        """Request a zygote with these descriptors and return its number, for `kill`.

        Does not wait for the fork. Raises ConnectionError if the process has died.
        """
        number = next(self._numbers)
        channels.send(self._socket, [pickle.dumps(ForkZygote(number))], fds)
        return number

    def kill(self, number: int) -> None:
        """Kill a zygote, if it still runs."""
        with suppress(ConnectionError):  # the process has ended, and with it all its zygotes
            channels.send(self._socket, [pickle.dumps(KillZygote(number))])

    def branch(self, modules: Iterable[str], fds: Sequence[int]) -> ZygoteForker:
        """Fork a branch: a process that imports modules, and then forks zygotes.

        The branch ends together with the process that it is forked from. `fds` are the pickled `ProcessContext`,
        standard output and standard error. Raises ConnectionError if the process has died.
        """
        branch = ZygoteForker()
        try:
            with branch._theirs as theirs:
                channels.send(self._socket, [pickle.dumps(ForkBranch(list(modules)))], [theirs.fileno(), *fds])
        except BaseException:  # this process has ended
            branch.close()
            raise
        return branch

    def close(self) -> None:
        """Let the process end."""
        channels.disconnect(self._socket)


class ForkServer(ZygoteForker):
    """Client of the fork server process, and of its branches.

    The processes end when this object is closed, or when this process ends for any reason.
    """

    def __init__(self) -> None:
        super().__init__()
        self._branches: list[ZygoteForker] = []
        self._imported = ImportRecord()
        theirs = self._theirs
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        # -P: a module of the user's in the current directory must not shadow one of Python's.
        self._executable = _find_executable()
        program = [self._executable, *flags, "-P", "-c", _BOOT, __name__]
        path = json.dumps([str(folder) for folder in sys.path])
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*program, str(theirs.fileno()), str(os.getpid()), path],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C in a terminal goes to the group of the training process
                    env={**os.environ, **SINGLE_THREADED},
                )
        except OSError as error:
            super().close()
            note(error, f"feedline: worker processes need a Python interpreter. {_NO_INTERPRETER}")
            raise

    @property
    def pid(self) -> int:
        """Process id of the fork server."""
        return self._process.pid

    def is_alive(self) -> bool:
        """True while the process runs; it may still be importing."""
        return self._process.poll() is None

    def check_exit(self) -> None:
        """Raise `WorkerDiedError` if the process has ended with a positive exit code.

        Python exits with such a code only if it cannot start.
        """
        if (self._process.poll() or 0) > 0:
            raise WorkerDiedError(
                f"the process that forks DataLoader workers, started as {self._executable!r}, has ended with exit code "
                f"{self._process.returncode}; its own message is above. {_NO_INTERPRETER}"
            )

    def with_imports(self, imports: Imports, fds: Sequence[int]) -> ZygoteForker:
        """Client of a process that has imported these modules.

        Forks a new branch if there is none. Raises ConnectionError.
        """
        latest = self._branches[-1] if self._branches else self
        if self._imported.is_outdated(imports):  # earlier branches stay: their zygotes end with them
            latest = self
            self._imported.clear()
        if not self._imported.has(imports):
            latest = latest.branch(imports, fds)
            self._branches.append(latest)
            self._imported.add(imports)
        return latest

    def close_branches(self) -> None:
        """End all branches, and with them their zygotes."""
        while self._branches:
            self._branches.pop().close()
        self._imported.clear()

    def close(self) -> None:
        """End the fork server and all of its descendants."""
        # The process notices the end of its socket, but not while it still imports torch.
        self.close_branches()
        super().close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _find_executable() -> str:
    """Path of the interpreter that multiprocessing starts.

    Raises `WorkerError` if a program that embeds Python names none.
    """
    executable = os.fsdecode(spawn.get_executable() or "")
    if not executable:
        raise WorkerError(f"worker processes need a Python interpreter, and sys.executable is empty. {_NO_INTERPRETER}")
    return executable


class _ForkServers:
    """Fork server of each process, and the pools to close at exit.

    Keyed by process id: a forked child of the user inherits this object but needs a fork server of its own.
    """

    def __init__(self) -> None:
        self._by_pid: dict[int, ForkServer] = {}
        self._lock = threading.Lock()
        # Weak: a pool that a user drops has to end then, not at exit.
        self._open: weakref.WeakSet[Closeable] = weakref.WeakSet()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._unlock)

    def get(self) -> ForkServer:
        with self._lock:
            fork_server = self._by_pid.get(os.getpid())
            if fork_server is not None and not fork_server.is_alive():
                del self._by_pid[os.getpid()]
                fork_server.close()
                fork_server.check_exit()
                fork_server = None
            if fork_server is None:
                fork_server = self._by_pid[os.getpid()] = ForkServer()
            return fork_server

    def close_at_exit(self, thing: Closeable) -> None:
        self._open.add(thing)

    def close(self) -> None:
        for thing in list(self._open):
            thing.close()
        fork_server = self._by_pid.pop(os.getpid(), None)
        if fork_server is not None:
            fork_server.close()

    def _unlock(self) -> None:
        """Replace the lock in a forked child.

        The thread that held it does not exist in the child.
        """
        self._lock = threading.Lock()


_servers = _ForkServers()


def start() -> ForkServer:
    """Return this process's fork server; start one if needed.

    Takes about a millisecond.
    """
    return _servers.get()


def fork(fds: Sequence[int], imports: Imports, process_context: Sequence[int]) -> tuple[ZygoteForker, int]:
    """Request a zygote from a process that has imported modules.

    Returns the client of that process, and the number of the zygote. If the process has died, the fork server, or a
    new one, forks the zygote without the imports. `fds` are those of `ZygoteForker.fork`, and `process_context` those
    of `ZygoteForker.branch`.
    """
    fork_server = start()
    try:
        forking = fork_server.with_imports(imports, process_context)
        return forking, forking.fork(fds)
    except ConnectionError:
        fork_server.close_branches()
    try:
        return fork_server, fork_server.fork(fds)
    except ConnectionError:
        fork_server.close()
        fork_server = start()
        return fork_server, fork_server.fork(fds)


def stop() -> None:
    """Close every open pool and end the fork server.

    Called at exit. `start` may be called again afterwards.
    """
    _servers.close()


def close_at_exit(thing: Closeable) -> None:
    """Close a pool or launcher at exit, while its workers can finish.

    Holds only a weak reference.
    """
    _servers.close_at_exit(thing)
