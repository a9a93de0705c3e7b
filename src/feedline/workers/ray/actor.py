"""Program of a Ray actor: opens a builder once, then builds batches."""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from time import monotonic, monotonic_ns, sleep
from typing import Any, NamedTuple

import numpy as np
import torch

from feedline.core import store_metrics
from feedline.core.descriptors import Descriptors, opened
from feedline.core.optional import load
from feedline.workers.process import exceptions
from feedline.workers.process.channels import StatusRow, StatusTable
from feedline.workers.process.settings import LibrarySettings, register_collates
from feedline.workers.process.worker_main import (
    BUILT,
    FAILED,
    STACK_SIGNAL,
    WorkerSetup,
    import_for_workers,
    name_process,
    open_builder,
)
from feedline.workers.process.zygote_main import SharedWork
from feedline.workers.ray.answers import EncodedBatch, encode
from feedline.workers.transport import BufferPool, load_builder
from feedline.workers.transport.views import Bytes

STALE = 2
"""Kind of an answer to `open`: the files of the other actor do not exist any more; arrays are needed."""

_REPLY_S = 2.0


class WorkerPlace(NamedTuple):
    """Node and process of an actor."""

    node_id: str
    host: str
    pid: int
    boot_id: str
    """Identity of the running kernel. Processes under one kernel have the same clock."""
    status_fd: int
    stacks_fd: int


class NodeFile(NamedTuple):
    """Anonymous file of an actor, open to actors of its node."""

    pid: int
    fd: int
    device: int
    inode: int


class ActorStart(NamedTuple):
    """State of the training process that an actor starts with."""

    setup: WorkerSetup
    settings: LibrarySettings
    dtype: torch.dtype
    path: list[str]


class ActorAnswer(NamedTuple):
    """Answer of an actor; Ray stores it as one object."""

    kind: int
    value: Any
    """An `EncodedBatch`, a pickled `RemoteException`, or the files of an opened builder."""
    generators: bytes = b""
    began_ns: int = 0
    ended_ns: int = 0


class BatchActor:
    """Worker of a `RayPool`; its methods run one at a time."""

    def __init__(self) -> None:
        self._status = StatusTable()
        self._row = StatusRow(self._status, 0)
        self._stacks = opened(os.memfd_create, "feedline-stacks", os.MFD_CLOEXEC)
        faulthandler.register(STACK_SIGNAL, self._stacks.fd)
        self._row.set_ready()
        self._files: list[Descriptors] = []
        self._allocate = BufferPool()
        self._sent: Any = None
        self._build: Callable[..., Any] | None = None
        self._take_changes: Callable[[], bytes] = bytes

    def place(self) -> WorkerPlace:
        """Node and process of this actor."""
        node_id = load("ray", "ray", "a Ray actor").get_runtime_context().get_node_id()
        return WorkerPlace(
            node_id, socket.gethostname(), os.getpid(), boot_id(), self._status.fd, self._stacks.fd
        )  # fmt: skip

    def open(
        self, start: ActorStart, skeleton: bytes, contents: Sequence[Bytes], peer: Sequence[NodeFile]
    ) -> ActorAnswer:
        """Load the builder; answer with the files of its arrays.

        The arrays come from the files of `peer`, an actor of this node, or else from `contents`. The answer is `STALE`
        if files of `peer` no longer exist.
        """
        try:
            try:
                self._files = [_open_peer(file) for file in peer] or [_new_file(part) for part in contents]
            except OSError:
                if peer:
                    return ActorAnswer(STALE, None)
                raise
            work = self._load(start, skeleton)
            self._build, self._take_changes = open_builder(
                work.builder, work.worker_init_fn, start.setup, self._row.progress
            )
            return ActorAnswer(BUILT, [_describe(file.fd) for file in self._files], ended_ns=monotonic_ns())
        except Exception as error:  # noqa: BLE001 - it is raised again in the training process
            return ActorAnswer(FAILED, pickle.dumps(exceptions.pack(error)))

    def build(self, task: int, payload: bytes) -> ActorAnswer:
        """Build the batch of a pickled request."""
        self._sent = None
        self._row.begin(task)
        value: Any
        try:
            value, began_ns = self._encode(payload)
            kind = BUILT
        except Exception as error:  # noqa: BLE001 - it is raised again in the training process
            began_ns = monotonic_ns()
            kind, value = FAILED, pickle.dumps(exceptions.pack(error))
        changed = self._take_changes()
        self._row.end()
        return ActorAnswer(kind, value, changed, began_ns, monotonic_ns())

    def _load(self, start: ActorStart, skeleton: bytes) -> SharedWork:
        key = multiprocessing.current_process().authkey  # the training process keeps its own
        start.settings._replace(authkey=bytes(key)).apply()
        torch.set_default_dtype(start.dtype)
        sys.path += [entry for entry in start.path if entry not in sys.path]
        with suppress(OSError, ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the training process, which closes its pools
        name_process(f"feedline-{start.setup.worker_id}")
        try:
            work: SharedWork = load_builder([file.fd for file in self._files], skeleton)
        except Exception as error:
            error.add_note(
                f"feedline: raised while the dataset was unpickled by a Ray actor on {socket.gethostname()}. Its"
                " modules and files must exist on every node: ship modules with ray.init(runtime_env=...), and keep"
                " files in a store or on shared storage"
            )
            raise
        register_collates(work.collates)
        import_for_workers(work.builder)
        return work

    def _encode(self, payload: bytes) -> tuple[EncodedBatch, int]:
        assert self._build is not None
        request = pickle.loads(payload)
        self._row.set_request(request)
        built = self._build(request, self._allocate)
        if counted := store_metrics.take():
            built = built._replace(store_counts=counted)
        began_ns = monotonic_ns()
        encoded, self._sent = encode(built)  # until Ray has copied the memory of its regions
        return encoded, began_ns


def actor_class() -> type[Any]:
    """Class of an actor that names its node, then imports feedline.

    The class is pickled with its code. The import takes seconds, and minutes on a busy machine. During the import, the
    actor already has its place in the cluster, and must not count as an actor without one.
    """

    class FeedlineWorker:
        """A `BatchActor`, made by `place`."""

        actor: BatchActor

        def node(self) -> str:
            """Id of the actor's node."""
            import ray

            node_id: str = ray.get_runtime_context().get_node_id()
            return node_id

        def place(self) -> WorkerPlace:
            self.actor = import_module("feedline.workers.ray.actor").BatchActor()
            return self.actor.place()

        def open(self, *arguments: Any) -> ActorAnswer:
            return self.actor.open(*arguments)

        def build(self, *arguments: Any) -> ActorAnswer:
            return self.actor.build(*arguments)

    return FeedlineWorker


def boot_id() -> str:
    """Identity of the running kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def inspect(place: WorkerPlace) -> tuple[int, int, float, str]:
    """Task, row, busy seconds and Python stacks of an actor.

    Must run on the actor's node. The task is 0 if the actor is idle.
    """
    with io.FileIO(f"/proc/{place.pid}/fd/{place.stacks_fd}") as stacks:
        status = StatusTable(os.open(f"/proc/{place.pid}/fd/{place.status_fd}", os.O_RDWR))
        stacks.seek(0, os.SEEK_END)
        os.kill(place.pid, STACK_SIGNAL)
        text, deadline = b"", monotonic() + _REPLY_S
        while monotonic() < deadline:
            part = stacks.read()
            if text and not part:  # stacks have no end mark: a pause counts as the end
                break
            text += part
            sleep(0.02)
        seconds = (monotonic_ns() - status.task_start_ns(0)) / 1e9
        found = status.task(0) or 0, status.row(0), seconds, text.decode(errors="replace")
    status.close()
    return found


def _open_peer(file: NodeFile) -> Descriptors:
    """Open the file of another actor; OSError if it no longer exists."""
    own = opened(os.open, f"/proc/{file.pid}/fd/{file.fd}", os.O_RDWR)  # maps of feedline.share are writable
    found = os.fstat(own.fd)
    if (found.st_dev, found.st_ino) != (file.device, file.inode):
        raise FileNotFoundError(f"process {file.pid} has another file {file.fd} now")
    return own


def _new_file(part: Bytes) -> Descriptors:
    """Create an anonymous file with this content."""
    file = opened(os.memfd_create, "feedline", os.MFD_CLOEXEC)
    view, done = np.ascontiguousarray(part).data, 0
    while done < len(view):  # Linux writes at most 2 GiB at once
        done += os.pwrite(file.fd, view[done:], done)
    return file


def _describe(fd: int) -> NodeFile:
    found = os.fstat(fd)
    return NodeFile(os.getpid(), fd, found.st_dev, found.st_ino)
