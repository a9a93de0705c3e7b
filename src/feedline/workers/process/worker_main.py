"""Program of a worker process: reads requests, builds batches, sends answers."""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker

from feedline.core import store_metrics, telemetry
from feedline.core.optional import after_import
from feedline.core.rng_globals import GlobalStateChanges, restore_globals
from feedline.workers.object_changes import ObjectChanges, pack_changes, restore_objects
from feedline.workers.process import channels, exceptions
from feedline.workers.process.channels import STOP, RequestReader, StatusRow, StatusTable
from feedline.workers.process.environment import is_allocator_set, keep_freed_memory
from feedline.workers.transport import Arena, Message

STACK_SIGNAL = signal.SIGRTMAX - 7
"""Signal on which a worker writes its Python stacks; unlikely to be used by user code."""


HEADER = struct.Struct("<bqqqi")
"""Header of an answer: kind, task, start and end of its encoding (ns, CLOCK_MONOTONIC), bytes of generator states."""


BUILT, FAILED, STOPPED = range(3)


class PartitionReplay(NamedTuple):
    """Needs of a replacement beyond the states at the epoch's start."""

    epoch: tuple[int, int]
    """Run and epoch to replay. If the first request is of another epoch, the latest states are restored instead."""
    generators: bytes
    """Generator states after the last answered batch, to restore after the replay."""
    objects_at_start: bytes
    objects: bytes


class WorkerSetup(NamedTuple):
    """Picklable parameters of a new worker."""

    worker_id: int
    num_workers: int
    base_seed: int
    reports_generators: bool = False
    """True if answers carry the states of the worker's random generators."""
    initial_generators: bytes | None = None
    """Generator states to start from, instead of those that `base_seed` and `worker_init_fn` set."""
    initial_objects: bytes = b""
    """Changes of dataset and `collate_fn` to start from."""
    replay: PartitionReplay | None = None
    """Given for a replacement that reads partitions: the builder of partitions restores objects itself."""


class WorkerChannels(NamedTuple):
    """Descriptors of a worker: request queue, answer socket, status table, stack pipe."""

    queue: int
    answers: int
    status: int
    stacks: int


def run_worker(
    builder: Any, init_fn: Callable[[int], object] | None, setup: WorkerSetup, worker_channels: WorkerChannels
) -> None:
    """Answer requests until the pool closes the queue or stops this worker.

    Takes over the process: signals, global random generators, torch's threads.
    """
    status_row = StatusRow(StatusTable(worker_channels.status), setup.worker_id)
    _install_signal_handlers(worker_channels.stacks)
    status_row.set_ready()
    name_process(f"feedline-{setup.worker_id}")
    build, take_changes = open_builder(builder, init_fn, setup, status_row.progress)
    # A copy: the original descriptor stays open until the process ends, so the pool sees the end of the process.
    answers = channels.connect(os.dup(worker_channels.answers))
    # ConnectionError: the pool was closed while a batch was being built
    with answers, RequestReader(worker_channels.queue) as reader, suppress(ConnectionError):
        _answer_all(build, status_row, reader, answers, take_changes)
    close: Any = getattr(builder, "close", None)  # builders of streams have it
    if close is not None:
        close()


def open_builder(
    builder: Any, init_fn: Callable[[int], object] | None, setup: WorkerSetup, progress: Callable[[int], None]
) -> tuple[Callable[..., Any], Callable[[], bytes]]:
    """Make this process a worker as torch does, and return its builder.

    Seeds the global generators, sets torch's worker information, and runs `init_fn`. If `init_fn` raises, the returned
    builder raises that error for every request. Also returns a function that packs changed states, for
    `WorkerGenerators.add`.
    """
    keep_freed_memory()
    _seed(setup)
    builder.progress = progress
    if setup.replay is not None:
        builder.replay = setup.replay
    telemetry.set_worker(setup.worker_id, own_process=True)
    dataset = builder.dataset
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=setup.worker_id, num_workers=setup.num_workers, seed=setup.base_seed + setup.worker_id, dataset=dataset
    )
    if getattr(builder, "accelerate", False):
        for accelerated, (module, function) in _ACCELERATIONS.items():
            after_import(accelerated, partial(_accelerate, module, function))
    elif (accelerated_pillow := sys.modules.get("feedline.images.accelerate")) is not None:
        accelerated_pillow.restore_pillow()  # this process may have been forked from an accelerated one
    build = builder if init_fn is None else _run_init_fn(builder, init_fn, setup.worker_id)
    take_changes = _changes_of(builder) if setup.reports_generators else bytes
    restore_objects(builder, setup.initial_objects)
    if setup.initial_generators is not None:
        getattr(builder, "restore", restore_globals)(setup.initial_generators)
    return build, take_changes


def _changes_of(builder: Any) -> Callable[[], bytes]:
    """Function that packs the states that a batch has changed, if any."""
    take_generators, take_objects = _generators_of(builder), ObjectChanges(builder).take
    reported = b""

    def take() -> bytes:
        nonlocal reported
        generators, objects = take_generators(), take_objects()
        if not generators and objects == reported:
            return b""
        reported = objects
        return pack_changes(generators, objects)

    return take


def _generators_of(builder: Any) -> Callable[[], bytes]:
    if not getattr(builder, "is_stateful", False):
        return GlobalStateChanges().take
    reported = b""

    def take() -> bytes:
        nonlocal reported
        captured: bytes = builder.capture()
        changed, reported = (b"" if captured == reported else captured), captured
        return changed

    return take


def name_process(name: str) -> None:
    """Set the name that `top` and `ps` show; at most 15 characters."""
    # Not `Path`: right after a fork, each line of Python touches pages that are then copied.
    with suppress(OSError):  # a sandbox without /proc
        comm = os.open("/proc/self/comm", os.O_WRONLY)
        try:
            os.write(comm, name.encode())
        finally:
            os.close(comm)


_ACCELERATIONS = {
    "PIL.Image": ("feedline.images.accelerate", "accelerate_pillow"),
    "torchvision": ("feedline.transforms.recognized.calls", "accelerate_compose"),
}
"""Module and function that accelerate a library. The module is slow to import, so it is imported only for users of the
library.
"""


def _accelerate(module: str, function: str) -> None:
    getattr(import_module(module), function)()


def import_for_workers(builder: Any) -> None:
    """Import and look up everything that each forked worker would need.

    Accelerates nothing in the calling process.
    """
    is_allocator_set()
    if getattr(builder, "accelerate", False):
        for accelerated, (module, _) in _ACCELERATIONS.items():
            if accelerated in sys.modules:
                import_module(module)


def _answer_all(
    build: Callable[..., Any],
    status_row: StatusRow,
    reader: RequestReader,
    answers: channels.Channel,
    take_changes: Callable[[], bytes],
) -> None:
    arena = Arena()
    while (request := reader.take()) is not None:
        if request.task == STOP:
            answers.send(HEADER.pack(STOPPED, STOP, 0, 0, 0))
            return
        status_row.begin(request.task)
        kind, message, began_ns = _answer(build, request.payload, arena, status_row)
        changed = take_changes()
        header = HEADER.pack(kind, request.task, began_ns, monotonic_ns(), len(changed))
        channels.send(answers, [header, changed, message.payload], message.fds)
        message.sent()
        status_row.end()
        # Now, and not when the next request arrives: both may hold a large batch.
        del request, message


def _answer(build: Callable[..., Any], payload: bytes, arena: Arena, status_row: StatusRow) -> tuple[int, Message, int]:
    try:
        request = pickle.loads(payload)
        status_row.set_request(request)
        built = build(request, arena.empty)
        if counted := store_metrics.take():
            built = built._replace(store_counts=counted)
        began_ns = monotonic_ns()
        return BUILT, arena.dumps(built), began_ns
    except Exception as error:  # noqa: BLE001 - it is raised again in the training process
        began_ns = monotonic_ns()
        return FAILED, arena.dumps(exceptions.pack(error)), began_ns


def _run_init_fn(builder: Callable[..., Any], init_fn: Callable[[int], object], worker_id: int) -> Callable[..., Any]:
    """Run `init_fn`; return the builder, or one that raises its error."""
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


def _install_signal_handlers(stacks: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the training process, which closes its pools
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, stacks)


@contextmanager
def _without_stacks() -> Iterator[None]:
    """Let `traceback.format_stack` return nothing, in a process with one thread.

    torch formats the stack of a call that seeds, with source lines, once for each kind of device. In a forked worker,
    this is the stack of the training process. Its formatting takes longer than all other work before the first batch.
    """
    former = traceback.format_stack
    traceback.format_stack = lambda *_, **__: []
    try:
        yield
    finally:
        traceback.format_stack = former


def _seed(setup: WorkerSetup) -> None:
    """Seed the global generators as torch's workers do; use one thread."""
    torch.set_num_threads(1)
    random.seed(setup.base_seed + setup.worker_id)
    with _without_stacks():
        torch.manual_seed(setup.base_seed + setup.worker_id)
    seeds: list[int] = torch_worker._generate_state(setup.base_seed, setup.worker_id)  # type: ignore[no-untyped-call]
    np.random.seed(seeds)  # noqa: NPY002 - the generator that users' transforms draw from
