"""PostgreSQL on loopback, without passwords, with its data in a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers import done, free_port, program, running

_USER = "postgres"


@contextmanager
def postgres() -> Iterator[str]:
    """The address of an empty database: `postgresql://postgres@127.0.0.1:PORT/postgres`."""
    folder = Path(tempfile.mkdtemp(prefix="feedline-postgres-"))  # pytest's own folders are closed to other users
    try:
        # The server refuses to run as root. Root starts it as the user that Debian creates for it.
        become = _become(folder) if os.geteuid() == 0 else []
        binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
        tools = {name: program(name, "postgresql", *binaries) for name in ("initdb", "postgres", "pg_isready")}
        data, port = str(folder / "data"), free_port()
        done(*become, tools["initdb"], "-D", data, "-U", _USER, "-A", "trust", "-E", "UTF8", "--no-sync")
        settings = [f"--{name}" for name in ("fsync=off", "listen_addresses=127.0.0.1", f"port={port}")]
        command = [*become, tools["postgres"], "-D", data, *settings, f"--unix_socket_directories={folder}"]
        ready = [tools["pg_isready"], "-q", "-h", "127.0.0.1", "-p", str(port)]
        with running(command, lambda: os.spawnv(os.P_WAIT, ready[0], ready) == 0, folder / "server.out", "INT"):
            yield f"postgresql://{_USER}@127.0.0.1:{port}/{_USER}"
    finally:
        shutil.rmtree(folder)


def _become(folder: Path) -> list[str]:
    try:
        user = pwd.getpwnam(_USER)
    except KeyError:
        program("initdb", "postgresql")  # says what is missing
        raise
    os.chown(folder, user.pw_uid, user.pw_gid)
    # Repeated in the inner call, because a change of user clears the signal at the death of this process.
    user_and_group = [f"--reuid={_USER}", f"--regid={_USER}", "--init-groups"]
    return [program("setpriv", "util-linux"), *user_and_group, "--pdeathsig=INT"]
