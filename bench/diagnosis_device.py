"""A device without a GPU, for diagnosis: streams are threads, and copies take the time that a bus would.

It replaces `CudaBackend`, with the same interface, `feedline.loader.device.Backend`. It shows whether the verdict reads
events and stages correctly, and nothing about a real bus.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from feedline.loader import pools
from feedline.loader.device import DeviceStage, PinStage


class Event:
    """An event of a stream, in order with its work."""

    def __init__(self, passed: Future[float]) -> None:
        self._passed = passed

    def query(self) -> bool:
        """True once it has passed."""
        return self._passed.done()

    def synchronize(self) -> None:
        """Wait for it."""
        self._passed.result()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds between two events."""
        return (end_event._passed.result() - self._passed.result()) * 1e3


class SlowBus:
    """Copies at `rate` bytes per second on a stream of its own, and `pin_rate` for staging on the host."""

    device = torch.device("cpu")

    def __init__(self, rate: float, pin_rate: float = float("inf")) -> None:
        self.rate, self.pin_rate = rate, pin_rate
        self.side, self.loop = (ThreadPoolExecutor(1, name) for name in ("copies", "kernels"))
        self._current = self.loop

    def side_stream(self) -> Any:
        """The stream for copies."""
        return self.side

    def current_stream(self) -> Any:
        """The stream of the loop, or that of the block."""
        return self._current

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Make a stream the current one."""
        outer, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = outer

    def record(self, stream: Any) -> Event:
        """Enqueue an event."""
        return Event(stream.submit(time.perf_counter))

    def wait(self, stream: Any, event: Event) -> None:
        """Let later work of a stream wait for an event."""
        stream.submit(event.synchronize)

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        """Enqueue a copy."""
        self._current.submit(time.sleep, host.nbytes / self.rate)
        return host.clone()

    def record_stream(self, tensor: Any, stream: Any) -> None:
        """Do nothing: memory is the host's."""

    def is_pinned(self, host: torch.Tensor) -> bool:
        """True where staging costs nothing."""
        return not host.is_sparse and self.pin_rate == float("inf")

    def pin(self, host: torch.Tensor) -> torch.Tensor:
        """Copy on the host."""
        time.sleep(host.nbytes / self.pin_rate)
        return host

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Ordinary memory; refused where staging takes time, so that batches are staged."""
        if self.pin_rate != float("inf"):
            raise RuntimeError("this bus has no page-locked memory to give")
        return torch.empty(shape, dtype=dtype)

    def host_register(self, address: int, nbytes: int) -> None:
        """Do nothing."""

    def host_unregister(self, address: int) -> None:
        """Do nothing."""

    def step(self, seconds: float) -> Callable[[Any], None]:
        """A step of kernels on the loop's stream, whose loss is then read."""
        return lambda _: self.loop.submit(time.sleep, seconds).result()


@contextmanager
def on_bus(bus: SlowBus) -> Iterator[None]:
    """Loaders with a `device` deliver over this bus."""
    with patch.object(pools, "open_stage", lambda *_, **__: DeviceStage(bus)):
        yield


@contextmanager
def with_slow_pins(seconds: float) -> Iterator[None]:
    """Loaders with `pin_memory=True` take this long to page-lock a batch."""

    def pin(batch: Any) -> Any:
        time.sleep(seconds)
        return batch

    with patch.object(pools, "open_stage", lambda *_, **__: PinStage(pin=pin)):
        yield
