"""Stages that copy batches to a device.

Accelerators with streams get copies on a side stream ahead of delivery, other devices at delivery.
"""

from __future__ import annotations

import warnings
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch

from feedline.core.devices import first_line
from feedline.core.numa import Cpus, on_cpus
from feedline.core.tensors import allocate_tensor
from feedline.core.tree import leaves, map_leaves
from feedline.errors import note
from feedline.loader.device.backend import Backend, Event
from feedline.loader.device.decoding import DecodeThread
from feedline.loader.device.delivery import span
from feedline.loader.device.stage import (
    TWO_BATCHES,
    Closing,
    Depth,
    Flights,
    InFlight,
    StageStatistics,
    host_nbytes,
    is_encoded,
    is_plain,
    moves_itself,
    times_s,
)


@dataclass(slots=True)
class _BatchTensors:
    """Tensors of one batch: on the host, and on the device."""

    host: list[Any] = field(default_factory=list)
    moved: list[Any] = field(default_factory=list)
    decodes: bool = False


@dataclass(slots=True)
class _Copy:
    """The copy of one batch on the side stream.

    Its host tensors stay referenced until `stopped` has passed, because the device reads them until then. `needed`
    marks the point where the loop's stream begins to wait for it.
    """

    nbytes: int
    started: Event
    stopped: Event
    tensors: _BatchTensors
    needed: Event | None = None

    def times_s(self) -> tuple[float, float]:
        """Seconds of the copy, and its part without a waiting loop."""
        return times_s(self.started, self.stopped, self.needed)


class LockedBuffers:
    """Allocator of page-locked memory for batches that this process builds.

    Copies to the device need no staging from there. Tensors are uninitialized; below `smallest_nbytes`, and if the
    driver refuses, they are in ordinary memory. Thread-safe.
    """

    smallest_nbytes = 16 << 10

    def __init__(self, backend: Backend, cpus: Cpus | None) -> None:
        self._backend, self._cpus = backend, cpus

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if prod(shape) * dtype.itemsize >= self.smallest_nbytes:
            with suppress(RuntimeError), on_cpus(self._cpus):  # the stage warns when it is refused, too
                return self._backend.empty_pinned(shape, dtype)
        return allocate_tensor(shape, dtype)


class DeviceStage(Closing):
    """Copies batches to an accelerator on a side stream, ahead of delivery.

    Containers keep their types. CPU tensors are copied from page-locked memory; others are first copied into it.
    Objects with `to` and `record_stream` use the side stream too. Objects with `to` alone, sparse tensors and tensor
    subclasses are copied on the loop's own stream at `start`. Encoded images are decoded by a thread, on a stream of
    its own. Other objects are left unchanged. References to host tensors are dropped by the first call after their copy
    has ended. Page-locked memory for staging is allocated and written on `cpus`, if they are given.
    """

    def __init__(self, backend: Backend, depth: Depth = TWO_BATCHES, cpus: Cpus | None = None) -> None:
        self.buffers = LockedBuffers(backend, cpus)
        self._backend = backend
        self._cpus = cpus
        self._depth = depth
        self._flights: Flights[tuple[Any, _Copy]] = Flights(self._depth)
        self._decoder = DecodeThread(backend.device, backend)
        self._held: deque[_Copy] = deque()
        self._locked: dict[int, int] = {}
        self._copied_nbytes = self._staged_nbytes = 0
        self._copy_s = self._hidden_copy_s = 0.0

    def start(self, batch: Any) -> InFlight[tuple[Any, _Copy]]:
        """Enqueue the copies; waits only while the depth is used up."""
        nbytes = host_nbytes(batch)
        self._make_room(nbytes)
        backend = self._backend
        loop, side = backend.current_stream(), backend.side_stream()
        tensors = _BatchTensors()
        with span("feedline.copy"), backend.on(side):
            started = backend.record(side)
            try:
                moved = map_leaves(partial(self._move, tensors, loop), batch, moves_itself)
            except torch.OutOfMemoryError as error:
                note(error, self._explain_memory(nbytes))
                raise
            finally:  # also if a leaf cannot be moved: earlier copies already run
                copy = _Copy(nbytes, started, backend.record(side), tensors)
                self._held.append(copy)
        return self._flights.enter((moved, copy), nbytes, decodes=tensors.decodes)

    def finish(self, moving: InFlight[tuple[Any, _Copy]]) -> Any:
        """The batch on the device; only the current stream waits for it."""
        batch, copy = self._flights.leave(moving)
        backend = self._backend
        current = backend.current_stream()
        copy.needed = backend.record(current)
        backend.wait(current, copy.stopped)
        # The memory belongs to the side stream: unmarked, its allocator could reuse it while the loop still reads it.
        for tensor in copy.tensors.moved:
            backend.record_stream(tensor, current)
        copy.tensors.moved.clear()
        if not copy.tensors.decodes:
            return batch
        try:
            return self._decoder.finish(batch)
        except torch.OutOfMemoryError as error:
            note(error, self._explain_memory(copy.nbytes))
            raise

    def has_room(self) -> bool:
        """True if undelivered batches and unfinished copies leave room for a batch."""
        self._release()
        flights = self._flights
        return flights.has_room() and self._depth.allows(len(self._held), self._held_nbytes, flights.last_nbytes)

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock transport memory, so that copies from it need no staging.

        May be called from any thread. If the driver refuses, a warning is given and the memory is staged.
        """
        try:
            self._backend.host_register(address, nbytes)
        except RuntimeError as error:
            warnings.warn(
                f"{nbytes} bytes of transport memory could not be page-locked ({first_line(error)}); batches need "
                "another copy on the host. Raise the limit of locked memory: ulimit -l, docker run --ulimit memlock=-1",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            self._locked[address] = nbytes

    def unregister(self, address: int) -> None:
        """Undo `register`, from any thread or finalizer, before the memory is unmapped."""
        # Memory that the driver refused to lock is absent, and unlocking it would be an error.
        if self._locked.pop(address, None) is not None:
            self._backend.host_unregister(address)

    def statistics(self) -> StageStatistics:
        """See `Stage`."""
        return StageStatistics(
            in_flight=len(self._flights),
            in_flight_nbytes=self._flights.nbytes,
            peak_nbytes=self._flights.peak_nbytes,
            copied_nbytes=self._copied_nbytes,
            staged_nbytes=self._staged_nbytes,
            registered_nbytes=sum(self._locked.copy().values()),
            copy_s=self._copy_s,
            hidden_copy_s=self._hidden_copy_s,
            decode_s=self._decoder.decode_s,
            hidden_decode_s=self._decoder.hidden_s,
        )

    def close(self) -> None:
        """Wait for copies and decoder, and drop the references to host memory.

        Registered memory stays registered until `unregister`.
        """
        self._decoder.close()
        while self._held:
            self._release_oldest()

    @property
    def _held_nbytes(self) -> int:
        return sum(copy.nbytes for copy in self._held)

    def _move(self, tensors: _BatchTensors, loop: Any, leaf: Any) -> Any:
        backend = self._backend
        if is_plain(leaf):
            source = leaf if leaf.nbytes == 0 or backend.is_pinned(leaf) else self._stage(leaf)
            moved = backend.copy(source)
        elif is_encoded(leaf):
            tensors.decodes = True
            return self._decoder.start(leaf)
        elif not hasattr(leaf, "to"):
            return leaf
        elif hasattr(leaf, "record_stream") and not isinstance(leaf, torch.Tensor):
            moved = leaf.to(backend.device, non_blocking=True)
        else:
            if type(leaf) is torch.Tensor and leaf.device == backend.device and not leaf.is_cpu:
                backend.record_stream(leaf, loop)  # a worker thread has made it on another stream
            with backend.on(loop):
                return leaf.to(backend.device)
        tensors.host.append(leaf)
        tensors.moved.append(moved)
        return moved

    def _stage(self, host: torch.Tensor) -> torch.Tensor:
        try:
            with on_cpus(self._cpus):  # memory comes from the node of the CPU that first writes to it
                pinned = self._backend.pin(host)
        except RuntimeError as error:
            warnings.warn(
                f"{host.nbytes} bytes could not be copied to page-locked memory ({first_line(error)}); the loop waits "
                "while they are copied to the device. Raise the limit of locked memory: ulimit -l, docker run --ulimit "
                "memlock=-1",
                RuntimeWarning,
                stacklevel=2,
            )
            return host
        self._staged_nbytes += host.nbytes
        return pinned

    def _explain_memory(self, nbytes: int) -> str:
        flying = len(self._flights)
        fits = f"pass device=Delivery(..., prefetch={flying})" if flying else "make the batch smaller"
        return (
            f"feedline: while a batch of {nbytes} bytes was copied to {self._backend.device}, with {flying} more on"
            f" their way ({self._flights.nbytes} bytes): {fits}, or free memory there"
        )

    def _make_room(self, nbytes: int) -> None:
        self._release()
        while not self._depth.allows(len(self._held), self._held_nbytes, nbytes):
            self._release_oldest()

    def _release(self) -> None:
        # Copies of one stream end in order, so the oldest one decides; asking the others would cost a call each.
        while self._held and self._held[0].stopped.query():
            self._release_oldest()

    def _release_oldest(self) -> None:
        copy = self._held.popleft()
        copy.stopped.synchronize()
        self._copied_nbytes += copy.nbytes
        total_s, hidden_s = copy.times_s()
        self._copy_s += total_s
        self._hidden_copy_s += hidden_s
        copy.tensors.host.clear()


class PlainStage(Closing):
    """Copies at delivery by `to(device)`, for CPU, MPS, XPU and others.

    Encoded images are decoded by a thread ahead of delivery.
    """

    def __init__(self, device: torch.device, depth: Depth = TWO_BATCHES) -> None:
        self._device = device
        self._decoder = DecodeThread(device)
        self._flights: Flights[Any] = Flights(depth)
        self._decodes = False
        self._copied_nbytes = 0

    def start(self, batch: Any) -> Any:
        """Return the batch itself, or with encoded images one in flight."""
        self._decodes = any(map(is_encoded, leaves(batch)))
        if not self._decodes:
            return batch
        moving = map_leaves(self._decode, batch, moves_itself)
        return self._flights.enter(moving, host_nbytes(batch), decodes=True)

    def finish(self, moving: Any) -> Any:
        """Move all objects with `to`, and wait for the decoder."""
        in_flight = isinstance(moving, InFlight)
        batch = self._flights.leave(moving) if in_flight else moving
        try:
            with span("feedline.copy"):
                moved = map_leaves(self._to, batch, moves_itself)
                return self._decoder.finish(moved) if in_flight else moved
        except torch.OutOfMemoryError as error:
            nbytes = moving.nbytes if in_flight else host_nbytes(batch)
            note(error, f"feedline: while a batch of {nbytes} bytes was copied to {self._device}: make batches smaller")
            raise

    def has_room(self) -> bool:
        """True if another batch may be decoded; other batches gain nothing."""
        return self._decodes and self._flights.has_room()

    def statistics(self) -> StageStatistics:
        """See `Stage`."""
        flights, decoder = self._flights, self._decoder
        return StageStatistics(
            in_flight=len(flights),
            in_flight_nbytes=flights.nbytes,
            peak_nbytes=flights.peak_nbytes,
            copied_nbytes=self._copied_nbytes,
            decode_s=decoder.decode_s,
            hidden_decode_s=decoder.hidden_s,
        )

    def close(self) -> None:
        """Wait for the decoder."""
        self._decoder.close()

    def _decode(self, leaf: Any) -> Any:
        if not is_encoded(leaf):
            return leaf
        self._copied_nbytes += host_nbytes(leaf)
        return self._decoder.start(leaf)

    def _to(self, leaf: Any) -> Any:
        if not hasattr(leaf, "to"):
            return leaf
        moved = leaf.to(self._device)
        if moved is not leaf:
            self._copied_nbytes += host_nbytes(leaf)
        return moved
