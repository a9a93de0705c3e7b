"""Interface to accelerators: streams, events, copies and page locks.

`current`, `index` and `select` use torch.accelerator. Before torch 2.6, which introduced it, they know CUDA only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any, Protocol

import torch

PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device of the process."""


UNLOADING = 4
"""cudaErrorCudartUnloading: the process is ending, and the driver has released everything."""


class Event(Protocol):
    """A mark in a stream, passed after all earlier work there."""

    def query(self) -> bool:
        """True if the event has passed."""

    def synchronize(self) -> None:
        """Block the calling thread until the event has passed."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds on the device to a later event; both must have passed."""


class Backend(Protocol):
    """Operations of an accelerator. None waits for the device."""

    @property
    def device(self) -> torch.device:
        """The device of delivered batches."""

    def side_stream(self) -> Any:
        """The stream for copies.

        Always the same one, because torch's allocator keeps memory per stream.
        """

    def decode_stream(self) -> Any:
        """The stream for decoding; always the same one, too."""

    def current_stream(self) -> Any:
        """The current stream of the calling thread."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make `stream` the current one within the block."""

    def record(self, stream: Any) -> Event:
        """Enqueue a new event with a timestamp on `stream`."""

    def wait(self, stream: Any, event: Event) -> None:
        """Let work enqueued on `stream` from now on run after `event`."""

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        """Enqueue a copy on the current stream.

        Page-locked memory is read later and must stay unchanged; other memory is read before this returns.
        """

    def record_stream(self, tensor: Any, stream: Any) -> None:
        """Delay the reuse of a tensor's memory until `stream` has finished.

        Only work enqueued before the tensor is freed is waited for.
        """

    def is_pinned(self, host: torch.Tensor) -> bool:
        """True if the tensor is in page-locked memory, registered or torch's."""

    def pin(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to torch's page-locked memory; waits for this copy.

        torch reuses that memory only after copies from it have ended.
        """

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor in torch's page-locked memory; RuntimeError if the driver refuses.

        May be called from any thread. torch reuses the memory of a dropped tensor only after copies from it have ended.
        """

    def host_register(self, address: int, nbytes: int) -> None:
        """Page-lock memory; RuntimeError if the driver refuses."""

    def host_unregister(self, address: int) -> None:
        """Unlock memory registered at this address."""


class StreamCopies:
    """Methods of `Backend` that all streams of torch share."""

    device: torch.device

    def wait(self, stream: Any, event: Any) -> None:
        """See `Backend`."""
        stream.wait_event(event)

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        """See `Backend`."""
        return host.to(self.device, non_blocking=True)

    def record_stream(self, tensor: Any, stream: Any) -> None:
        """See `Backend`."""
        tensor.record_stream(stream)

    def is_pinned(self, host: torch.Tensor) -> bool:
        """The driver's answer, for registered memory and for torch's."""
        return host.is_pinned()

    def pin(self, host: torch.Tensor) -> torch.Tensor:
        """See `Backend`."""
        # Not Tensor.pin_memory, which fails on expanded tensors.
        return torch.empty_like(host, pin_memory=True).copy_(host)

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `Backend`."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


class CudaBackend(StreamCopies):
    """`Backend` over torch.cuda (CUDA and ROCm)."""

    def __init__(self, device: torch.device) -> None:
        bare = device.index is None
        index = torch.cuda.current_device() if bare else device.index
        self.device = torch.device(device.type, index)

    def side_stream(self) -> torch.cuda.Stream:
        """One stream per device and process."""
        return _side_stream(self.device, "copies")

    def decode_stream(self) -> torch.cuda.Stream:
        """One stream per device and process."""
        return _side_stream(self.device, "decoding")

    def current_stream(self) -> torch.cuda.Stream:
        """See `Backend`."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """See `Backend`."""
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream) -> Event:
        """See `Backend`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `Backend`."""
        with torch.cuda.device(self.device):  # a worker thread would create a context on device 0
            return super().empty_pinned(shape, dtype)

    def host_register(self, address: int, nbytes: int) -> None:
        """See `Backend`."""
        with torch.cuda.device(self.device):
            code = int(_cudart().cudaHostRegister(address, nbytes, PORTABLE))
        if code:
            self._forget_error()
            torch.cuda.check_error(code)

    def host_unregister(self, address: int) -> None:
        """See `Backend`."""
        try:
            with torch.cuda.device(self.device):  # a finalizer's thread would create a context on device 0
                code = int(_cudart().cudaHostUnregister(address))
        except RuntimeError:
            if sys.is_finalizing():  # see UNLOADING
                return
            raise
        if code not in (0, UNLOADING):
            self._forget_error()
            torch.cuda.check_error(code)

    def _forget_error(self) -> None:
        # CUDA remembers the last error of a thread, and the next kernel launch would report it as its own.
        with suppress(RuntimeError):
            torch.ones(1, device=self.device)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@cache
def _side_stream(device: torch.device, work: str) -> torch.cuda.Stream:  # noqa: ARG001 - a stream for each kind of work
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class AcceleratorBackend(StreamCopies):
    """`Backend` over torch's own streams and events, for XPU.

    Transport memory is not page-locked in place: torch offers no such call of the driver.
    """

    def __init__(self, device: torch.device) -> None:
        bare = device.index is None
        number = torch.accelerator.current_device_index() if bare else device.index
        self.device = torch.device(device.type, number)

    def side_stream(self) -> Any:
        """One stream per device and process."""
        return _other_stream(self.device, "copies")

    def decode_stream(self) -> Any:
        """One stream per device and process."""
        return _other_stream(self.device, "decoding")

    def current_stream(self) -> Any:
        """See `Backend`."""
        return torch.accelerator.current_stream(self.device)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """See `Backend`."""
        outer = self.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(outer)

    def record(self, stream: Any) -> Event:
        """See `Backend`."""
        event: Any = torch.Event(self.device, enable_timing=True)
        event.record(stream)
        return event  # type: ignore[no-any-return]

    def host_register(self, address: int, nbytes: int) -> None:
        """Do nothing: batches are staged."""

    def host_unregister(self, address: int) -> None:
        """Do nothing."""


@cache
def _other_stream(device: torch.device, work: str) -> Any:  # noqa: ARG001 - a stream for each kind of work
    return torch.Stream(device)


_ACCELERATOR: Any = getattr(torch, "accelerator", None)


def has_accelerator_streams() -> bool:
    """True if this version of torch has streams for all accelerators."""
    return hasattr(_ACCELERATOR, "set_stream") and hasattr(torch, "Event")


def current() -> str | None:
    """The type of the current accelerator ("cuda", "mps", "xpu", ...), or None."""
    if _ACCELERATOR is None:
        return "cuda" if torch.cuda.is_available() else None
    return _ACCELERATOR.current_accelerator().type if _ACCELERATOR.is_available() else None


def index() -> int | None:
    """The number of the current device; None without an accelerator."""
    if current() is None:
        return None
    return int(torch.cuda.current_device() if _ACCELERATOR is None else _ACCELERATOR.current_device_index())


def select(number: int) -> None:
    """Make this device the current one of the calling thread."""
    if _ACCELERATOR is None:
        torch.cuda.set_device(number)
    else:
        _ACCELERATOR.set_device_index(number)
