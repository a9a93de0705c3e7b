"""Workers started by a multiprocessing context: fork, spawn or forkserver, each with its own merits and dangers."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from feedline.workers.process.environment import die_with_starter
from feedline.workers.process.launch import ExitedProcess, WorkerProcess
from feedline.workers.process.worker_main import WorkerChannels, WorkerSetup, run_worker

_EXIT_CODE_S = 2.0


class ContextLauncher:
    """Starts a `multiprocessing.Process` of `context` per worker, which gets the builder as its argument."""

    def __init__(self, builder: Any, init_fn: Callable[[int], object] | None = None, *, context: BaseContext) -> None:
        self.builder = builder
        self._init_fn, self._context = init_fn, context

    def serves(self, builder: Any, init_fn: Callable[[int], object] | None = None) -> bool:
        """Never mind: a new launcher costs nothing."""
        return builder is self.builder and init_fn is self._init_fn

    def crew(self) -> ContextProcessGroup:
        """A new, empty crew."""
        return ContextProcessGroup(self._context, self.builder, self._init_fn)

    def close(self) -> None:
        """Nothing is kept between workers."""


class ContextProcessGroup:
    """See `Crew`. The processes are children of the training process, or of its forkserver."""

    lost = False

    def __init__(self, context: BaseContext, builder: Any, init_fn: Callable[[int], object] | None) -> None:
        self._context, self._builder, self._init_fn = context, builder, init_fn
        self._poll = select.epoll()
        self._watched: dict[int, BaseProcess] = {}

    def fileno(self) -> int:
        """See `Crew`."""
        return self._poll.fileno()

    def launch(self, setup: WorkerSetup, lines: WorkerChannels) -> WorkerProcess:
        """See `Crew`."""
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            target=_serve,
            args=(self._builder, self._init_fn, setup, _Passed(lines)),
            name=f"feedline-{setup.worker_id}",
            daemon=True,
        )
        process.start()
        descriptor = _exit_descriptor(process)
        self._watched[descriptor] = process
        self._poll.register(descriptor, select.EPOLLIN)
        return process

    def ended(self) -> list[ExitedProcess]:
        """See `Crew`."""
        ended = []
        for descriptor, _ in self._poll.poll(0):
            process = self._watched.pop(descriptor)
            self._forget(process, descriptor)
            process.join(_EXIT_CODE_S)
            ended.append(ExitedProcess(process, process.exitcode))
        return ended

    def kill(self, process: WorkerProcess) -> None:
        """See `Crew`."""
        process.kill()

    def close(self) -> None:
        """See `Crew`."""
        for descriptor, process in self._watched.items():
            self._forget(process, descriptor)
        self._watched.clear()
        self._poll.close()

    def _forget(self, process: BaseProcess, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        if descriptor != process.sentinel:
            os.close(descriptor)


def _exit_descriptor(process: BaseProcess) -> int:
    """Readable when the process has ended: its pidfd. Its sentinel is a pipe, which its own children may hold."""
    assert process.pid is not None
    with suppress(OSError):  # no pidfds here, or it has ended and been reaped already
        return os.pidfd_open(process.pid)
    return process.sentinel


class _Passed:
    """Lines that survive the pickling of a process's arguments: multiprocessing hands the descriptors on."""

    def __init__(self, lines: WorkerChannels) -> None:
        self.lines = lines

    def __reduce__(self) -> Any:
        return _arrived, tuple(reduction.DupFd(fd) for fd in self.lines)


def _arrived(*passed: Any) -> _Passed:
    return _Passed(WorkerChannels(*(duplicate.detach() for duplicate in passed)))


def _serve(builder: Any, init_fn: Callable[[int], object] | None, setup: WorkerSetup, passed: _Passed) -> None:
    die_with_starter()
    run_worker(builder, init_fn, setup, passed.lines)
