"""Protocols between a process pool and the launchers of its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from feedline.workers.process.worker_main import WorkerChannels, WorkerSetup


class WorkerProcess(Protocol):
    """Worker process with the public interface of `multiprocessing.Process`."""

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
    """Worker process that has ended."""

    process: WorkerProcess
    exitcode: int | None
    """As in `multiprocessing`: negative for a signal. None if unknown."""
    stderr: str = ""
    """Last lines written to standard error, if known."""
    orphaned: bool = False
    """True if the process that had forked it has ended, and the whole group with it: this worker is not the cause."""
    in_vain: bool = False
    """True if the process that was to fork it had ended before it began to run."""
    error: BaseException | None = None
    """Error that prevented its start; the same holds for all workers of this launcher."""


class InheritedLocks(NamedTuple):
    """Forked process, and the threads of its parent during the fork."""

    pid: int
    threads: tuple[str, ...]
    native_threads: int


class ProcessGroup(Protocol):
    """Worker processes of one pool."""

    lost: bool
    """True once the process that forks the members has ended; all members have then ended, too."""

    def fileno(self) -> int:
        """Descriptor that is readable when `collect_exited()` may return something."""

    def launch(self, setup: WorkerSetup, worker_channels: WorkerChannels) -> WorkerProcess:
        """Start a worker, without waiting until it runs.

        The caller may close its copies of the channels afterwards.
        """

    def pid_of(self, process: WorkerProcess) -> int | None:
        """Process id of a member; None before it has started.

        Thread-safe; does not wait.
        """

    def collect_exited(self) -> list[ExitedProcess]:
        """Processes that have ended since the last call; does not wait."""

    def kill(self, process: WorkerProcess) -> None:
        """Send SIGKILL; `collect_exited` reports the end."""

    def abandon(self) -> None:
        """Give up all members, and the process that forks them.

        With such a process, all members count as ended, and `lost` is True. Otherwise the members are killed.
        """

    def finish(self) -> None:
        """Record that no worker will be launched any more.

        A process that forks the members may end with the last of them. Does not wait.
        """

    def inherited_locks(self) -> InheritedLocks | None:
        """Facts for the search for locks that were held during the fork.

        None if the training process was not forked.
        """

    def close(self) -> None:
        """Stop watching the processes; nothing waits for those that still run."""


class Launcher(Protocol):
    """Starts workers over one builder, for one pool or several."""

    builder: Any

    def matches(self, builder: Any, init_fn: Callable[[int], object] | None = None) -> bool:
        """True if a new launcher with these arguments would start identical workers.

        Launchers that pickle the builder compare its whole state; others compare by identity.
        """

    def new_group(self) -> ProcessGroup:
        """Create an empty process group."""

    def without_inheritance(self) -> Launcher:
        """Launcher to use after an inherited lock. Raises NotPicklableError."""

    def close(self) -> None:
        """Release the launcher's resources once its last group is closed."""
