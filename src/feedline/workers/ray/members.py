"""Actors of one pool: placed, opened, watched and ended."""

from __future__ import annotations

import os
import pickle
import select
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import monotonic, monotonic_ns
from typing import Any

import numpy as np
import torch

from feedline.core.optional import load
from feedline.errors import ArgumentError, WorkerError
from feedline.workers.process import deaths, exceptions
from feedline.workers.process.futures import ProcessFuture
from feedline.workers.process.settings import LibrarySettings, registered_collates
from feedline.workers.process.worker_main import FAILED, WorkerSetup
from feedline.workers.process.zygote_main import SharedWork
from feedline.workers.ray.actor import STALE, ActorAnswer, ActorStart, NodeFile, WorkerPlace, actor_class, boot_id
from feedline.workers.ray.actor import inspect as inspect_actor
from feedline.workers.transport import dump_builder
from feedline.workers.transport.memory import attach_private

END_S = 5.0
"""Longest wait for the end of a killed actor of this machine."""

_STACKS_S = 20.0


@dataclass(eq=False)
class RayMember:
    """One actor, as the pool holds it."""

    setup: WorkerSetup
    handle: Any
    ref: Any
    """Reference of the answer that the start waits for.

    None once the actor is ready, and while another actor of its node opens the arrays.
    """
    node_id: str | None = None
    """Id of its node; None while it has no place in the cluster."""
    place: WorkerPlace | None = None
    """None until its process has imported feedline."""
    files: list[NodeFile] = field(default_factory=list)
    is_ready: bool = False
    stopping: bool = False
    queue: deque[tuple[ProcessFuture, Any]] = field(default_factory=deque)
    """Requests sent to the actor, in order, each with the reference of its answer."""
    began: float = field(default_factory=monotonic)
    _ahead_ns: float | None = None

    @property
    def worker_id(self) -> int:
        """Number of the worker."""
        return self.setup.worker_id

    @property
    def pid(self) -> int | None:
        """Process id on its node."""
        return None if self.place is None else self.place.pid

    def is_alive(self) -> bool:
        """True while the actor is ready, and is not being stopped."""
        return self.is_ready and not self.stopping

    def shift_ns(self, ended_ns: int, *, here: bool) -> int:
        """Nanoseconds to subtract from the actor's clock; 0 if it is `here`.

        The clock of another machine is compared with the arrival of the actor's answers. The fastest answer gives the
        best estimate.
        """
        if here:
            return 0
        ahead = ended_ns - monotonic_ns()
        self._ahead_ns = ahead if self._ahead_ns is None else max(self._ahead_ns, ahead)
        return int(self._ahead_ns)

    def __str__(self) -> str:
        if self.place is None:
            return f"worker {self.worker_id}"
        return f"worker {self.worker_id} (pid {self.place.pid} on {self.place.host}, node {self.place.node_id[:8]})"


class RayMembers:
    """Starts and ends the actors of one pool.

    The builder is pickled and stored once. Actors of one node share the memory of its arrays.
    """

    def __init__(
        self,
        builder: Any,
        init_fn: Callable[[int], object] | None,
        of_worker: Callable[[int], dict[str, Any]],
        start_timeout_s: float,
    ) -> None:
        self.ray: Any = load("ray", "ray", "worker_method='ray'")
        if not self.ray.is_initialized():
            self.ray.init()
        self._of_worker, self.start_timeout_s = of_worker, start_timeout_s
        self._boot_id = boot_id()
        self._settings = LibrarySettings.capture()._replace(authkey=b"")
        self._dtype, self._path = torch.get_default_dtype(), [entry for entry in sys.path if entry]
        with dump_builder(SharedWork(builder, init_fn, registered_collates()), "loader") as dumped:
            parts = [np.asarray(attach_private(fd, os.fstat(fd).st_size)) for fd in dumped.fds]
            self._skeleton = self.ray.put(dumped.skeleton)
            self._contents = self.ray.put(parts) if parts else None
        self._actor = self.ray.remote(max_restarts=0, max_task_retries=0)(actor_class())
        self.all: dict[int, RayMember] = {}
        self._lost: dict[str, float] = {}
        """Time at which each dead node was first noticed, by `monotonic`; -inf if that was before the pool."""
        self._note_lost(-inf)

    def start(self, setup: WorkerSetup) -> RayMember:
        """Ask Ray for an actor; does not wait.

        Raises ArgumentError if Ray refuses the options of the worker.
        """
        try:
            handle = self._actor.options(**self._of_worker(setup.worker_id)).remote()
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"Ray refuses the options of worker {setup.worker_id}: {error}") from error
        return RayMember(setup, handle, handle.node.remote())

    def add(self, setup: WorkerSetup) -> None:
        """Start a worker of the pool."""
        self.all[setup.worker_id] = self.start(setup)

    def advance(self, member: RayMember, value: Any) -> BaseException | None:
        """Take the next step of a start with the latest answer.

        Returns the error of a failed start, else None.
        """
        if member.node_id is None:
            member.node_id, member.ref = value, member.handle.place.remote()
            return None
        if member.place is None:
            member.place, member.ref = WorkerPlace(*value), None
            self._open(member)
            return None
        answer = ActorAnswer(*value)
        member.ref = None
        if answer.kind == FAILED:
            return exceptions.rebuild(pickle.loads(answer.value), f"in Ray actor {member.worker_id}")
        if answer.kind == STALE:
            self._open(member, alone=True)
            return None
        member.files, member.is_ready = answer.value, True
        member.shift_ns(answer.ended_ns, here=self.is_on_this_machine(member))
        self.open_waiting()
        return None

    def open_waiting(self) -> None:
        """Open the members that wait for another actor of their node."""
        for member in self.all.values():
            if member.place is not None and member.ref is None and not member.is_ready:
                self._open(member)

    def _open(self, member: RayMember, *, alone: bool = False) -> None:
        peer: list[NodeFile] = []
        contents = self._contents
        if contents is not None and not alone:
            placed = [other for other in self.all.values() if other.place is not None and other is not member]
            others = [other for other in placed if other.node_id == member.node_id]
            if ready := [other for other in others if other.is_ready]:
                peer, contents = ready[0].files, None
            elif any(other.ref is not None for other in others):
                return
        start = ActorStart(member.setup, self._settings, self._dtype, self._path)
        member.ref = member.handle.open.remote(start, self._skeleton, contents or (), peer)

    def send(self, member: RayMember, future: ProcessFuture) -> None:
        """Send a request to a member; raises errors of pickling the request."""
        payload = pickle.dumps(future.work, 5)
        member.queue.append((future, member.handle.build.remote(future.task, payload)))

    def pull_ahead(self) -> None:
        """Let Ray fetch the answers of other nodes early."""
        far = [ref for member in self.all.values() if not self.is_on_this_machine(member) for _, ref in member.queue]
        if far:
            self.ray.wait(far, num_returns=len(far), timeout=0)

    def is_on_this_machine(self, member: RayMember) -> bool:
        """True if the actor runs under this process's kernel."""
        return member.place is not None and member.place.boot_id == self._boot_id

    def own_capacity(self) -> float:
        """Bytes of the object store of this node; 0 if unknown."""
        own = self.ray.get_runtime_context().get_node_id()
        nodes = [node["Resources"] for node in self.ray.nodes() if node["NodeID"] == own]
        return float(nodes[0].get("object_store_memory", 0)) if nodes else 0.0

    def is_node_dead(self, node_id: str | None) -> bool:
        """True if Ray has found the node dead."""
        return any(node["NodeID"] == node_id and not node["Alive"] for node in self.ray.nodes())

    def has_lost_node(self, since: float) -> bool:
        """True if a node was found dead since then, by `monotonic()`."""
        self._note_lost(monotonic())
        return any(at >= since for at in self._lost.values())

    def _note_lost(self, now: float) -> None:
        for node in self.ray.nodes():
            if not node["Alive"]:
                self._lost.setdefault(node["NodeID"], now)

    def end(self, members: Iterable[RayMember], *, wait: bool = False) -> None:
        """Kill actors; with `wait`, wait until those of this machine have ended."""
        members = list(members)
        watched = [fd for member in members if wait and (fd := self._pidfd(member)) is not None]
        try:
            for member in members:
                member.stopping = True
                if self.ray.is_initialized():  # not after ray.shutdown(), which ends them
                    with suppress(self.ray.exceptions.RayError, ValueError):
                        self.ray.kill(member.handle, no_restart=True)
            _await_ends(watched)
        finally:
            for fd in watched:
                os.close(fd)
        if wait:
            for member in members:
                _await_reaped(member.pid if self.is_on_this_machine(member) else None)

    def _pidfd(self, member: RayMember) -> int | None:
        if not self.is_on_this_machine(member) or member.pid is None:
            return None
        with suppress(OSError):
            return os.pidfd_open(member.pid)
        return None

    def no_place_error(self, member: RayMember) -> WorkerError:
        """Error about a worker that Ray cannot place."""
        demands = self._of_worker(member.worker_id)
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        total, free = self.ray.cluster_resources(), self.ray.available_resources()
        asked = {"CPU": demands.get("num_cpus"), "GPU": demands.get("num_gpus"), **demands.get("resources", {})}
        figures = ", ".join(
            f"{name} {value:g} (free {free.get(name, 0):g} of {total.get(name, 0):g})"
            for name, value in asked.items()
            if value
        )
        rest = {name: value for name, value in demands.items() if name not in {"num_cpus", "num_gpus", "resources"}}
        return WorkerError(
            f"Ray has had no place for worker {member.worker_id} for {self.start_timeout_s:g} s. It asks for"
            f" {figures or 'no resources'}{f' with {rest}' if rest else ''}; the cluster has {len(nodes)}"
            f" live {'node' if len(nodes) == 1 else 'nodes'}. Add nodes, lower num_workers, or ask for less with"
            " feedline.workers.register_pool(name, feedline.workers.ray_pool(num_cpus=...)); start_timeout_s= waits"
            " longer for an autoscaling cluster."
        )

    def describe(self, requests: dict[int, Any]) -> str:
        """Describe each worker: place, request, sample, duration, Python stacks."""
        asked = {member: self._inspect(member) for member in self.all.values() if member.is_ready}
        if asked:
            self.ray.wait(list(asked.values()), num_returns=len(asked), timeout=_STACKS_S)
        return "\n".join(self._describe(member, asked.get(member), requests) for member in self.all.values())

    def _inspect(self, member: RayMember) -> Any:
        strategies = load("ray.util.scheduling_strategies", "ray", "worker_method='ray'")
        there = strategies.NodeAffinitySchedulingStrategy(member.node_id, soft=False)
        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
        if environment := self._of_worker(member.worker_id).get("runtime_env"):
            options["runtime_env"] = environment
        return self.ray.remote(**options)(inspect_actor).remote(member.place)

    def _describe(self, member: RayMember, ref: Any, requests: dict[int, Any]) -> str:
        if ref is None:
            where = "waits for a place in the cluster" if member.node_id is None else "has not opened the dataset yet"
            return f"{member} {where}"
        try:
            task, row, seconds, stacks = self.ray.get(ref, timeout=0)
        except self.ray.exceptions.RayError as error:
            return f"{member} does not answer ({type(error).__name__})"
        if not task:
            return f"{member} is idle"
        request = requests.get(task)
        doing = deaths.describe_work(request, row) if request is not None else " with a canceled request"
        return f"{member} has been busy for {seconds:.1f} s{doing}\n{deaths.strip_own_frames(stacks)}"


def _await_ends(pidfds: list[int]) -> None:
    """Wait until processes have ended, for at most `END_S` seconds."""
    poll, left = select.poll(), set(pidfds)
    for fd in left:
        poll.register(fd, select.POLLIN)
    deadline = monotonic() + END_S
    while left and (rest := deadline - monotonic()) > 0:
        for fd, _ in poll.poll(1000 * rest):
            poll.unregister(fd)
            left.discard(fd)


def _await_reaped(pid: int | None) -> None:
    """Wait until the raylet has reaped an ended process.

    For at most `END_S` seconds.
    """
    deadline = monotonic() + END_S
    with suppress(ProcessLookupError, PermissionError):
        while pid is not None and monotonic() < deadline:
            os.kill(pid, 0)
            select.select([], [], [], 0.005)
