"""NATS with JetStream on loopback."""

from __future__ import annotations

from collections.abc import Iterator
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
