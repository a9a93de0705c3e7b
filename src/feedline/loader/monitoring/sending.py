"""Measured cost of sending a batch between processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from time import monotonic_ns, thread_time_ns
from typing import Any

import torch

from feedline.core.tree import leaves
from feedline.loader.monitoring.heartbeat import NEVER_NS
from feedline.loader.report.context import SendingCost
from feedline.loader.report.replay import Task
from feedline.workers.transport import Arena, Inbox

MOST_NBYTES = 64 << 20
"""Size of the largest batch that a loop copies for a measurement."""


PAUSE_FACTOR = 100
"""A measurement takes at most 1 / `PAUSE_FACTOR` of a loop's time."""


_COPY_NS, _COLLATED_NS, _LEAF_NS, _LEAST_NS = 4.0, 0.5, 10_000.0, 50_000.0
"""Assumed time of a measurement per byte, per byte in memory that is sent, per leaf, and per batch.

To count the leaves takes less than half of the time per leaf.
"""


class SendingMeasurement:
    """Cost of sending a batch, measured once in a long loop."""

    def __init__(self) -> None:
        self.cost: SendingCost | None = None
        self._began_ns: int | None = None
        self._due_ns = 0

    def is_due(self, now_ns: int) -> bool:
        """True if the next batch should be given to `measure`."""
        if self._began_ns is None:
            self._began_ns = now_ns
        return now_ns >= self._due_ns

    def measure(self, batch: Any, now_ns: int, *, collated: bool) -> None:
        """Measure the cost if the loop has run long enough for it.

        A batch that cannot be read has no cost: its error would end a loop that needs no measurement.
        """
        began_ns = now_ns if self._began_ns is None else self._began_ns
        affordable_ns = (now_ns - began_ns) / PAUSE_FACTOR if PAUSE_FACTOR else inf
        try:
            expected_ns = _expected_ns(batch, max(2 * affordable_ns, 4 * _LEAST_NS), collated=collated)
            self._due_ns = began_ns + int(PAUSE_FACTOR * expected_ns)
        except Exception:  # noqa: BLE001 - the containers are the user's
            self._due_ns = NEVER_NS
            return
        if now_ns >= self._due_ns:
            self._due_ns = NEVER_NS
            self.cost = sending_cost(batch, collated=collated)


def sending_cost(batch: Any, *, collated: bool) -> SendingCost | None:
    """Time to pack and to unpack a batch.

    `collated` is True for default collate, which writes its tensors into the memory that is sent. None for a batch that
    cannot be sent, is on a device, or is larger than `MOST_NBYTES`.
    """
    with suppress(Exception), Arena() as arena, Inbox() as inbox:
        if not _is_small(batch):
            return None
        cost = None
        for _ in range(2):  # the first one opens slots
            sent = _in_arena(arena, batch) if collated else batch
            cost = _once(arena, inbox, sent)
        return cost
    return None


def _once(arena: Arena, inbox: Inbox, batch: Any) -> SendingCost:
    message, packing = _timed(lambda: arena.dumps(batch))
    try:
        fds = tuple(map(os.dup, message.fds))  # the inbox closes those that it gets
    finally:
        message.sent()
    _, unpacking = _timed(lambda: inbox.loads(message.payload, fds))
    return SendingCost(packing, unpacking)


def _timed(act: Callable[[], Any]) -> tuple[Any, Task]:
    wall_ns, cpu_ns = monotonic_ns(), thread_time_ns()
    result = act()
    cpu_s = (thread_time_ns() - cpu_ns) / 1e9
    # Time without a CPU is that of other programs here: sending itself does not wait.
    return result, Task(0.0, min(cpu_s, (monotonic_ns() - wall_ns) / 1e9))


def _expected_ns(batch: Any, most_ns: float, *, collated: bool) -> float:
    """Expected time of a measurement, from the size of the batch.

    A batch may have so many leaves that counting them takes long: above `most_ns`, twice the time so far is assumed.
    """
    expected_ns = _LEAST_NS
    for leaf in leaves(batch):
        shared = collated and isinstance(leaf, torch.Tensor)
        expected_ns += _LEAF_NS + _nbytes_of(leaf) * (_COLLATED_NS if shared else _COPY_NS)
        if expected_ns > most_ns:
            return 2 * expected_ns
    return expected_ns


def _is_small(batch: Any) -> bool:
    """True if a batch may be copied for a measurement."""
    nbytes = 0
    for leaf in leaves(batch):
        on_device = isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"
        nbytes += MOST_NBYTES + 1 if on_device else _nbytes_of(leaf)
    return nbytes <= MOST_NBYTES


def _nbytes_of(leaf: Any) -> int:
    """Size of a tensor, array or text; 0 for other values."""
    return len(leaf) if isinstance(leaf, (bytes, str)) else int(getattr(leaf, "nbytes", 0))


def _in_arena(arena: Arena, batch: Any) -> Any:
    """The batch in dicts and lists, with tensors of the arena.

    Other leaves stay unchanged. Containers of the user's own classes are not built again: their constructors may
    change the batch.
    """
    if isinstance(batch, Mapping):
        return {key: _in_arena(arena, value) for key, value in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes, bytearray, range)):
        return [_in_arena(arena, value) for value in batch]
    if type(batch) is torch.Tensor and batch.is_contiguous() and not batch.requires_grad:
        return arena.empty(batch.shape, batch.dtype)
    return batch
