"""A worker process: takes requests, builds them, sends what it built or why it could not."""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import signal
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker

from feedline.core import store_metrics, telemetry
from feedline.workers.process import channels, exceptions
from feedline.workers.process.channels import LEAVE, RequestReader, StatusRow, StatusTable
from feedline.workers.transport import Arena, Message

STACK_SIGNAL = signal.SIGRTMAX - 7
"""Makes a worker write its Python stacks; not one of the signals that users' code takes."""


HEADER = struct.Struct("<bqqq")
"""Of an answer: its kind, the task, and when its encoding began and ended, in ns on CLOCK_MONOTONIC."""


BUILT, FAILED, LEFT = range(3)


class WorkerSetup(NamedTuple):
    """What a worker is told at its start; picklable."""

    worker_id: int
    num_workers: int
    base_seed: int


class WorkerChannels(NamedTuple):
    """A worker's descriptors: an outlet, a socket for its answers, its pool's board, a pipe for its stacks."""

    outlet: int
    answers: int
    board: int
    stacks: int


def run_worker(
    builder: Any, init_fn: Callable[[int], object] | None, setup: WorkerSetup, lines: WorkerChannels
) -> None:
    """Answer requests until the pool closes. Takes over the process: signals, random generators, threads of torch."""
    line = StatusRow(StatusTable(lines.board), setup.worker_id)
    _obey(lines.stacks)
    line.be_ready()
    name_process(f"feedline-{setup.worker_id}")
    _seed(setup)
    builder.progress = line.progress
    telemetry.work_as(setup.worker_id)
    dataset = builder.dataset
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=setup.worker_id, num_workers=setup.num_workers, seed=setup.base_seed + setup.worker_id, dataset=dataset
    )
    build = builder if init_fn is None else _initialized(builder, init_fn, setup.worker_id)
    # A copy, so that the end of the process, and nothing else, is what closes the line for the pool.
    answers = socket.socket(fileno=os.dup(lines.answers))
    with (
        answers,
        RequestReader(lines.outlet) as intake,
        suppress(ConnectionError),
    ):  # closed while a batch was being built
        _answer_all(build, line, intake, answers)


def name_process(name: str) -> None:
    """What `top` and `ps` show; at most 15 characters."""
    with suppress(OSError):  # a sandbox without it
        Path("/proc/self/comm").write_text(name)


def _answer_all(build: Callable[..., Any], line: StatusRow, intake: RequestReader, answers: socket.socket) -> None:
    arena = Arena()
    while (order := intake.take()) is not None:
        if order.task == LEAVE:
            answers.send(HEADER.pack(LEFT, LEAVE, 0, 0))
            return
        line.begin(order.task)
        kind, message, began_ns = _answer(build, order.payload, arena)
        header = HEADER.pack(kind, order.task, began_ns, monotonic_ns())
        channels.send(answers, [header, message.payload], message.fds)
        message.sent()
        line.end()
        del order, message


def _answer(build: Callable[..., Any], payload: bytes, arena: Arena) -> tuple[int, Message, int]:
    try:
        built = build(pickle.loads(payload), arena.empty)
        if counted := store_metrics.take():
            built = built._replace(store_counts=counted)
        began_ns = monotonic_ns()
        return BUILT, arena.dumps(built), began_ns
    except Exception as error:  # noqa: BLE001 - it is raised again in the training process
        began_ns = monotonic_ns()
        return FAILED, arena.dumps(exceptions.pack(error)), began_ns


def _initialized(builder: Callable[..., Any], init_fn: Callable[[int], object], worker_id: int) -> Callable[..., Any]:
    """The builder once `init_fn` has run; if it raised, a builder that raises the same for every request."""
    try:
        init_fn(worker_id)
    except Exception as error:  # noqa: BLE001 - it is raised again for every request
        error.add_note("feedline: raised by worker_init_fn")
        return _Raising(error)
    return builder


class _Raising:
    def __init__(self, error: Exception) -> None:
        self._error, self._traceback = error, error.__traceback__

    def __call__(self, *_: object) -> Any:
        raise self._error.with_traceback(self._traceback)


def _obey(stacks: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process, which then closes its pools
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, stacks)


def _seed(setup: WorkerSetup) -> None:
    """As torch's workers are seeded, so that a worker's own draws are the same."""
    torch.set_num_threads(1)
    random.seed(setup.base_seed + setup.worker_id)
    torch.manual_seed(setup.base_seed + setup.worker_id)
    seeds: list[int] = torch_worker._generate_state(setup.base_seed, setup.worker_id)  # type: ignore[no-untyped-call]
    np.random.seed(seeds)  # noqa: NPY002 - the generator that users' transforms draw from
