"""Redis on loopback, in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers import free_port, listens, program, running


@contextmanager
def redis_server(folder: Path, password: str = "") -> Iterator[str]:
    """The address of an empty server: `redis://127.0.0.1:PORT`."""
    port = free_port()
    command = [program("redis-server", "redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--requirepass", password] if password else []
    with running(command, lambda: listens(port), folder / "redis.out"):
        yield f"redis://127.0.0.1:{port}"
