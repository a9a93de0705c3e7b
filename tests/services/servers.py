"""Real servers as children of this process: started on free ports, and ended with it in every case."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

READY_S = 200
_LOOK_EVERY_S = 0.05


class MissingServerError(Exception):
    """A server that the tests need is not installed."""


def program(name: str, package: str, *folders: Path) -> str:
    """The path of a program; MissingServerError names the package that brings it."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", os.defpath), "/usr/sbin"])
    found = shutil.which(name, path=path)
    if found is None:
        raise MissingServerError(
            f"{name} is not installed, and these tests run against the real one. `make test` installs it as root on "
            f"Debian; elsewhere install what Debian calls {package}"
        )
    return found


def free_port() -> int:
    """A free port, which the kernel gives to no other socket meanwhile.

    By default, those that it gives begin at 32,768.
    """
    dice = random.SystemRandom()  # other processes of tests draw, too
    while True:
        port = dice.randrange(10_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def listens(port: int) -> bool:
    """True if a process accepts connections there."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def answers(address: str) -> bool:
    """True if a web server answers there with a status below 500."""
    try:
        with urlopen(address, timeout=5):
            return True
    except HTTPError as error:
        error.close()
        return error.code < 500
    except (URLError, OSError):
        return False


def done(*command: str, **more: str) -> str:
    """The output of a command; an error with its error output if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **more})
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


@contextmanager
def running(command: Sequence[str], ready: Callable[[], bool], log: Path, stop: str = "TERM") -> Iterator[int]:
    """The process id of a server that is ready; it gets the signal `stop` when the block ends or this process dies."""
    tied = [program("setpriv", "util-linux"), f"--pdeathsig={stop}"]
    with log.open("wb") as output, subprocess.Popen([*tied, *command], stdout=output, stderr=output) as process:
        try:
            _await(process, ready, log)
            yield process.pid
        finally:
            process.send_signal(signal.Signals[f"SIG{stop}"])
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _await(process: subprocess.Popen[bytes], ready: Callable[[], bool], log: Path) -> None:
    for _ in range(int(READY_S / _LOOK_EVERY_S)):
        try:
            process.wait(_LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            if ready():
                return
        else:
            break
    raise RuntimeError(f"{process.args!r} did not become ready:\n{log.read_text(errors='replace')[-4000:]}")
