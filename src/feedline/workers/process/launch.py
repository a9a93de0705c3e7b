"""The seam between a pool and the ways to start its worker processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from feedline.workers.process.worker_main import WorkerChannels, WorkerSetup


class WorkerProcess(Protocol):
    """A worker process, as far as a `multiprocessing.Process` is looked at from outside."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class ExitedProcess(NamedTuple):
    """A worker process is gone."""

    process: WorkerProcess
    exitcode: int | None
    """As `multiprocessing` has it: negative for a signal. None if nobody is left who could tell."""
    stderr: str = ""
    """The last lines that the process wrote to its standard error, where that is known."""
    orphaned: bool = False
    """What it was launched from was killed, and with it the whole crew: this worker is not to blame."""
    error: BaseException | None = None
    """Why it could not be started at all; no other worker of this launcher can."""


class ProcessGroup(Protocol):
    """The worker processes of one pool."""

    lost: bool
    """Whether it can launch no more, because what it launched from is gone. Its members have then ended too."""

    def fileno(self) -> int:
        """Readable when `ended()` may have something to tell."""

    def launch(self, setup: WorkerSetup, lines: WorkerChannels) -> WorkerProcess:
        """Start a worker. It may not run yet on return, but the caller may close its copies of the lines."""

    def ended(self) -> list[ExitedProcess]:
        """The processes that are gone since the last call; does not wait."""

    def kill(self, process: WorkerProcess) -> None:
        """SIGKILL; `ended` will tell."""

    def close(self) -> None:
        """Let go of processes that have all ended, or that nobody will wait for."""


class Launcher(Protocol):
    """Starts workers over one builder; may serve several pools, one after the other or at once."""

    builder: Any

    def serves(self, builder: Any, init_fn: Callable[[int], object] | None = None) -> bool:
        """Whether workers started now are what those of a new launcher would be, with all state of the builder."""

    def crew(self) -> ProcessGroup:
        """A new, empty crew."""

    def close(self) -> None:
        """End what is kept to start workers from; once the last crew is closed, if there are any."""
