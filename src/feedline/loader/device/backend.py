"""The seam to the accelerator: streams, events, copies and page locks; torch.cuda behind it.

The accelerator of this machine, whatever its kind; before torch 2.6, which named it first, that is CUDA or none.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import Any, Protocol

import torch

PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device of the process."""


UNLOADING = 4
"""cudaErrorCudartUnloading: the process is ending, and the driver has let go of everything already."""


class Event(Protocol):
    """A mark in a stream; it passes once everything enqueued there before it is done."""

    def query(self) -> bool:
        """Whether it has passed."""

    def synchronize(self) -> None:
        """Wait on the host until it has passed."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds of the device from this event to a later one; both have passed."""


class Backend(Protocol):
    """What a stage asks of an accelerator. Nothing here waits for the device, `pinned` for the host's copy only."""

    @property
    def device(self) -> torch.device:
        """Where batches go."""

    def side_stream(self) -> Any:
        """The stream for copies: always the same one, because the allocator keeps memory per stream."""

    def current_stream(self) -> Any:
        """The stream on which the calling thread enqueues its work."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Within the block `stream` is the current one."""

    def record(self, stream: Any) -> Event:
        """A new event at the end of what is enqueued on `stream`; it can measure time."""

    def wait(self, stream: Any, event: Event) -> None:
        """What is enqueued on `stream` from now on runs after `event`."""

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        """A copy enqueued on the current stream. Page-locked memory is read later, other memory before this returns."""

    def record_stream(self, tensor: Any, stream: Any) -> None:
        """When `tensor` dies, its memory is reused only after what `stream` holds by then."""

    def is_pinned(self, host: torch.Tensor) -> bool:
        """Whether the tensor lies in page-locked memory, ours or torch's."""

    def pinned(self, host: torch.Tensor) -> torch.Tensor:
        """A copy in torch's page-locked memory, which torch reuses only after copies from it have ended."""

    def host_register(self, address: int, nbytes: int) -> None:
        """Lock the pages. RuntimeError when the driver refuses."""

    def host_unregister(self, address: int) -> None:
        """Unlock what was registered at this address."""


class CudaBackend:
    """`Backend` over torch.cuda (CUDA and ROCm)."""

    def __init__(self, device: torch.device) -> None:
        bare = device.index is None
        index = torch.cuda.current_device() if bare else device.index
        self.device = torch.device(device.type, index)

    def side_stream(self) -> torch.cuda.Stream:
        """One stream per device of the process."""
        return _side_stream(self.device)

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

    def wait(self, stream: torch.cuda.Stream, event: Any) -> None:
        """See `Backend`."""
        stream.wait_event(event)

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        """See `Backend`."""
        return host.to(self.device, non_blocking=True)

    def record_stream(self, tensor: Any, stream: torch.cuda.Stream) -> None:
        """See `Backend`."""
        tensor.record_stream(stream)

    def is_pinned(self, host: torch.Tensor) -> bool:
        """The driver's answer: memory that we registered and memory of torch's allocator alike."""
        return host.is_pinned()

    def pinned(self, host: torch.Tensor) -> torch.Tensor:
        """`empty_like` and not `Tensor.pin_memory`: that one fails on expanded tensors."""
        return torch.empty_like(host, pin_memory=True).copy_(host)

    def host_register(self, address: int, nbytes: int) -> None:
        """See `Backend`."""
        with torch.cuda.device(self.device):
            code = int(_cudart().cudaHostRegister(address, nbytes, PORTABLE))
        if code:
            self._forget_error()
            torch.cuda.check_error(code)

    def host_unregister(self, address: int) -> None:
        """See `Backend`."""
        code = int(_cudart().cudaHostUnregister(address))
        if code not in (0, UNLOADING):
            torch.cuda.check_error(code)

    def _forget_error(self) -> None:
        # CUDA remembers the last error of a thread, and the next kernel launch would report it as its own.
        with suppress(RuntimeError):
            torch.ones(1, device=self.device)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_NAMED: Any = getattr(torch, "accelerator", None)


def current() -> str | None:
    """The type of the current accelerator ("cuda", "mps", "xpu", ...); None without one."""
    if _NAMED is None:
        return "cuda" if torch.cuda.is_available() else None
    return _NAMED.current_accelerator().type if _NAMED.is_available() else None


def index() -> int | None:
    """The number of the current device; None without an accelerator."""
    if current() is None:
        return None
    return int(torch.cuda.current_device() if _NAMED is None else _NAMED.current_device_index())


def select(number: int) -> None:
    """Make this device the current one of the calling thread."""
    if _NAMED is None:
        torch.cuda.set_device(number)
    else:
        _NAMED.set_device_index(number)
