"""Workers started by a multiprocessing context: fork, spawn or forkserver."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from feedline.core.descriptors import Descriptors, opened
from feedline.workers.process.environment import die_with_starter
from feedline.workers.process.launch import ExitedProcess, WorkerProcess
from feedline.workers.process.worker_main import WorkerChannels, WorkerSetup, run_worker

_EXIT_CODE_S = 2.0
"""Longest wait for the exit code of a process that has ended, in seconds."""


class ContextLauncher:
    """Launcher that starts a `multiprocessing.Process` of `context` per worker.

    `note` is added to the error of a failed start.
    """

    def __init__(
        self, builder: Any, init_fn: Callable[[int], object] | None = None, *, context: BaseContext, note: str = ""
    ) -> None:
        self.builder = builder
        self._init_fn, self._context, self._note = init_fn, context, note

    def matches(self, builder: Any, init_fn: Callable[[int], object] | None = None) -> bool:
        """True for the identical objects; a new launcher costs nothing."""
        return builder is self.builder and init_fn is self._init_fn

    def new_group(self) -> ContextProcessGroup:
        """Create an empty process group."""
        return ContextProcessGroup(self._context, self.builder, self._init_fn, self._note)

    def without_inheritance(self) -> ContextLauncher:
        """Return this launcher: the context is the user's choice."""
        return self

    def close(self) -> None:
        """Do nothing: this launcher holds no resources."""


class ContextProcessGroup:
    """See `ProcessGroup`. Children of the training process or of its forkserver."""

    lost = False

    def __init__(self, context: BaseContext, builder: Any, init_fn: Callable[[int], object] | None, note: str) -> None:
        self._context, self._builder, self._init_fn, self._note = context, builder, init_fn, note
        self._poll = select.epoll()
        self._watched: dict[int, tuple[BaseProcess, Descriptors]] = {}

    def fileno(self) -> int:
        """See `ProcessGroup`."""
        return self._poll.fileno()

    def launch(self, setup: WorkerSetup, worker_channels: WorkerChannels) -> WorkerProcess:
        """See `ProcessGroup`."""
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            target=_serve,
            args=(self._builder, self._init_fn, setup, _PicklableChannels(worker_channels)),
            name=f"feedline-{setup.worker_id}",
            daemon=True,
        )
        try:
            process.start()
        except Exception as error:
            if self._note:
                error.add_note(self._note)
            raise
        pidfd = _pidfd_of(process)
        # The sentinel of multiprocessing is a pipe, which children of the worker may hold open after its end.
        watched = pidfd.fd if pidfd else process.sentinel
        self._watched[watched] = process, pidfd
        self._poll.register(watched, select.EPOLLIN)
        return process

    def pid_of(self, process: WorkerProcess) -> int | None:
        """See `ProcessGroup`."""
        return process.pid

    def collect_exited(self) -> list[ExitedProcess]:
        """See `ProcessGroup`."""
        exited = []
        for descriptor, _ in self._poll.poll(0):
            self._poll.unregister(descriptor)
            process, pidfd = self._watched.pop(descriptor)
            pidfd.close()
            process.join(_EXIT_CODE_S)
            exited.append(ExitedProcess(process, process.exitcode))
        return exited

    def kill(self, process: WorkerProcess) -> None:
        """See `ProcessGroup`."""
        process.kill()

    def abandon(self) -> None:
        """See `ProcessGroup`."""
        for process, _ in self._watched.values():
            process.kill()

    def finish(self) -> None:
        """See `ProcessGroup`: no process exists only to launch workers."""

    def inherited_locks(self) -> None:
        """See `ProcessGroup`: None, because workers of a context are not checked."""

    def close(self) -> None:
        """See `ProcessGroup`."""
        self._poll.close()
        self._watched.clear()


def _pidfd_of(process: BaseProcess) -> Descriptors:
    """Descriptor that becomes readable when the process ends.

    Empty if the system has no pidfds, or the process was already reaped.
    """
    with suppress(OSError):  # the system has no pidfds, or the process has already been reaped
        return opened(os.pidfd_open, process.pid)
    return Descriptors()


class _PicklableChannels:
    """Channels that can be pickled as arguments of a `multiprocessing.Process`.

    multiprocessing passes the descriptors on.
    """

    def __init__(self, worker_channels: WorkerChannels) -> None:
        self.worker_channels = worker_channels

    def __reduce__(self) -> Any:
        return _restore_channels, tuple(reduction.DupFd(fd) for fd in self.worker_channels)


def _restore_channels(*passed: Any) -> _PicklableChannels:
    return _PicklableChannels(WorkerChannels(*(duplicate.detach() for duplicate in passed)))


def _serve(
    builder: Any, init_fn: Callable[[int], object] | None, setup: WorkerSetup, passed: _PicklableChannels
) -> None:
    die_with_starter()
    run_worker(builder, init_fn, setup, passed.worker_channels)
