"""The servers themselves: a missing one is named, and none outlives its tests."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest
from servers import MissingServerError, free_port, program, running


def test_a_server_that_is_not_installed_is_named() -> None:
    with pytest.raises(MissingServerError, match=r"no-such-server is not installed.*make test.*no-such-package"):
        program("no-such-server", "no-such-package")


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo out of coffee; exit 3"]
    with pytest.raises(RuntimeError, match="out of coffee"), running(command, lambda: False, tmp_path / "log"):
        pass


def test_a_server_ends_with_its_block(tmp_path: Path) -> None:
    with running(["sleep", "1000"], lambda: True, tmp_path / "log") as pid:
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_postgres_speaks(postgres: str) -> None:
    """The first message of its protocol, which requests encryption."""
    host, _, rest = postgres.rpartition("@")[2].partition(":")
    with socket.create_connection((host, int(rest.partition("/")[0])), timeout=60) as client:
        client.sendall((8).to_bytes(4, "big") + (80877103).to_bytes(4, "big"))
        assert client.recv(1) == b"N"


def test_ports_are_free() -> None:
    assert free_port() != free_port()
