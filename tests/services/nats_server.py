"""NATS with JetStream on loopback."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from servers import free_port, listens, program, running


@contextmanager
def nats_server(folder: Path, password: str = "") -> Iterator[str]:
    """The address of an empty server: `nats://127.0.0.1:PORT`."""
    port = free_port()
    command = [program("nats-server", "nats-server"), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder)]
    command += ["--user", "me", "--pass", password] if password else []
    with running(command, lambda: listens(port), folder / "nats.out"):
        yield f"nats://127.0.0.1:{port}"


@contextmanager
def guarded_nats(folder: Path) -> Iterator[tuple[Callable[[str], str], Callable[[str], None]]]:
    """A server with a password, which is "old" at first: its address with a password, and a change of it."""
    port, settings, number = free_port(), folder / "nats.conf", folder / "nats.pid"

    def write(password: str) -> None:
        settings.write_text(
            f'host: "127.0.0.1"\nport: {port}\npid_file: "{number}"\njetstream {{ store_dir: "{folder}" }}\n'
            f"authorization {{ user: me, password: {password} }}\n"
        )

    def change(password: str) -> None:
        write(password)
        os.kill(int(number.read_text()), signal.SIGHUP)  # reads the file again, and ends connections that it refuses

    write("old")
    command = [program("nats-server", "nats-server"), "-c", str(settings)]
    with running(command, lambda: listens(port) and number.exists(), folder / "nats.out"):
        yield lambda password: f"nats://me:{password}@127.0.0.1:{port}", change
