"""Scripts in forks of one interpreter, which has imported torch and feedline once for all of them.

A fork runs its script as `python script.py` does: as `__main__`, with the exit handlers and the last words of an
interpreter that ends. Two things differ from a fresh interpreter: the modules in `PRELOADED` are imported already, and
`/proc/PID/environ` is that of the server.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from huge_pages import use_huge_pages

# feedline imports its lazy modules on access, so importing them here hides no missing import.
PRELOADED = ("torch", "feedline", "feedline.datasets", "feedline.images", "feedline.stores", "feedline.transforms")

IMPORTS_FEEDLINE = """
import sys

for name in [name for name in sys.modules if name.partition(".")[0] == "feedline" and name != "feedline._native"]:
    del sys.modules[name]
"""
"""The beginning of a script whose imports of feedline run its modules again; torch, which takes longer, stays."""


class Script:
    """A running script. It is the leader of a session of its own."""

    def __init__(self, report: int) -> None:
        self._report = open(report, "rb", buffering=0)  # noqa: SIM115 - closed by wait
        self._code: int | None = None
        self.pid = int(self._line())

    def wait(self, timeout_s: float) -> int:
        """The exit code, negative for a signal. Raises TimeoutError, and may be called again then."""
        if self._code is not None:
            return self._code
        if not select.select([self._report], [], [], timeout_s)[0]:
            raise TimeoutError(f"process {self.pid} has not ended within {timeout_s} s")
        self._code = int(self._line())
        self._report.close()
        return self._code

    def kill(self) -> None:
        """Kill it if it has not ended, and wait."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):  # it is ending
                os.kill(self.pid, signal.SIGKILL)
            self.wait(60.0)

    def _line(self) -> bytes:
        line = self._report.readline()
        assert line, "the server has died"
        return line


class Preloaded:
    """Our end of the server; a context manager. `flags` are the interpreter's; `more` are modules to import, too.

    With `ends_quickly`, a script that reaches its end runs its exit handlers, but keeps its modules: dropping them
    takes longer than most scripts, because the memory of each is copied first.

    With `trunk`, the server is a script of that server, whose modules it has at once. In place of flags, it runs the
    statements `setup` before it imports `more`.
    """

    def __init__(
        self,
        *flags: str,
        ends_quickly: bool = False,
        more: Sequence[str] = (),
        trunk: Preloaded | None = None,
        setup: str = "",
    ) -> None:
        assert not (trunk and flags), "a fork keeps the flags of its interpreter"
        self._ends_quickly = ends_quickly
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(sys.path)  # also for what scripts spawn
        with theirs:
            if trunk is not None:
                lasting = f"os.environ['PYTHONPATH'], sys.path[1:] = {path!r}, {sys.path!r}\n{setup}"
                options = ["0", lasting, *more]
                script = trunk.start(__file__, *options, stdin=theirs.fileno(), stdout=1, stderr=2)
                self._wait: Callable[[], int] = lambda: script.wait(60.0)
            else:
                server = subprocess.Popen(
                    [sys.executable, *flags, __file__, str(theirs.fileno()), setup, *more],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "random"},
                )
                self._wait = server.wait

    def start(self, *command: str, stdin: int, stdout: int, stderr: int, cwd: Path | None = None) -> Script:
        """Run a script with its arguments on copies of these descriptors."""
        reading, writing = os.pipe()
        folder = os.fspath(cwd or Path.cwd())
        request = json.dumps({"command": command, "cwd": folder, "ends_quickly": self._ends_quickly})
        try:
            socket.send_fds(self._socket, [request.encode()], [stdin, stdout, stderr, writing])
        finally:
            os.close(writing)
        return Script(reading)

    def run(self, script: Path, output: Path, timeout_s: float, *arguments: str) -> int:
        """Run a script in its folder, without input, and return its exit code. `output` takes stdout and stderr."""
        running = self.start_quietly(script, output, *arguments)
        try:
            return running.wait(timeout_s)
        finally:
            running.kill()

    def run_code(self, code: str, folder: Path, *arguments: str, timeout_s: float = 250.0) -> tuple[int, str]:
        """Run a script that is written to a folder; returns its exit code and its output."""
        script, output = folder / "script.py", folder / "script.log"
        script.write_text(code, encoding="utf-8")
        return self.run(script, output, timeout_s, *arguments), output.read_text(encoding="utf-8")

    def start_quietly(self, script: Path, output: Path, *arguments: str) -> Script:
        """Start a script in its folder, without input. `output` takes stdout and stderr."""
        with open(os.devnull) as nothing, open(output, "w") as log:
            streams = {"stdin": nothing.fileno(), "stdout": log.fileno(), "stderr": log.fileno()}
            return self.start(str(script), *arguments, **streams, cwd=script.parent)

    def ending_quickly(self) -> Preloaded:
        """The same server, for scripts whose end is not what is tested."""
        server = copy.copy(self)
        server._ends_quickly = True
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._wait()


def serve(requests: socket.socket) -> None:
    """Fork a keeper for every request until the other end is closed; returns in the scripts, once they have ended."""
    while True:
        request, fds, _, _ = socket.recv_fds(requests, 1 << 16, 4)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            keep(json.loads(request), fds)
            return
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def keep(request: dict[str, Any], fds: Sequence[int]) -> None:
    """Fork the script, report its pid and its exit code; returns in the script only, once it has ended."""
    *streams, report = fds
    pid = os.fork()
    if pid == 0:
        os.close(report)
        become(request["command"], request["cwd"], streams)
        if request["ends_quickly"]:
            end_quickly()
        return
    for fd in streams:
        os.close(fd)
    os.write(report, f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def become(command: list[str], cwd: str, streams: Sequence[int]) -> None:
    """Run the script in this process."""
    os.setsid()
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(cwd)
    script = Path(command[0])
    sys.argv, sys.path[0] = command, str(script.parent)
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    sys.modules["__main__"] = main  # lives on until the interpreter ends, as a script's module does
    exec(compile(script.read_bytes(), script, "exec"), main.__dict__)


def end_quickly() -> None:
    """End a script that raised nothing."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    gc.disable()  # nothing imported is garbage
    exec(sys.argv[2])
    for module in (*PRELOADED, *sys.argv[3:]):
        importlib.import_module(module)
    # The collector would write to each imported object, and each fork would copy nearly all memory at its end.
    gc.collect()
    gc.freeze()
    gc.enable()
    use_huge_pages()
    serve(socket.socket(fileno=int(sys.argv[1])))
