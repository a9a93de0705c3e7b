"""Measured cost of sending a batch between processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from time import monotonic_ns, thread_time_ns
from typing import Any

import torch

from feedline.core.tree import map_leaves
from feedline.loader.report.context import SendingCost
from feedline.loader.report.replay import Task
from feedline.workers.transport import Arena, Inbox

MOST_NBYTES = 64 << 20
"""Largest message of which a loop makes a copy to measure it."""


def sending_cost(batch: Any, *, collated: bool) -> SendingCost | None:
    """Time to pack and to unpack a batch.

    `collated` is True for default collate, which writes its tensors into the memory that is sent. None for a batch that
    cannot be sent, lies on a device, or is larger than `MOST_NBYTES`.
    """
    with suppress(Exception), Arena() as arena, Inbox() as inbox:
        if not _is_small(batch):
            return None
        cost = None
        for _ in range(2):  # the first one opens slots
            sent = map_leaves(lambda leaf: _in_arena(arena, leaf), batch) if collated else batch
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


def _is_small(batch: Any) -> bool:
    """True if a batch may be copied for a measurement."""
    nbytes = 0

    def add(leaf: Any) -> Any:
        nonlocal nbytes
        if isinstance(leaf, torch.Tensor):
            nbytes += leaf.nbytes if leaf.device.type == "cpu" else MOST_NBYTES + 1
        return leaf

    map_leaves(add, batch)
    return nbytes <= MOST_NBYTES


def _in_arena(arena: Arena, leaf: Any) -> Any:
    """Tensor of the same shape in memory of the arena.

    Other leaves stay as they are.
    """
    if type(leaf) is torch.Tensor and leaf.is_contiguous() and not leaf.requires_grad:
        return arena.empty(leaf.shape, leaf.dtype)
    return leaf
