"""The stage protocol, and parts shared by all stages."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar
from weakref import ref

import torch

from feedline.core.tree import leaves
from feedline.loader.device.backend import Event


class Stage(Protocol):
    """A step between workers and loop, in two calls per batch.

    Not thread-safe. It may be used again after `close`.
    """

    def start(self, batch: Any) -> Any:
        """Start to move a batch without waiting; the caller may drop `batch`."""

    def finish(self, moving: Any) -> Any:
        """The moved batch, ready for work enqueued by the calling thread."""

    def has_room(self) -> bool:
        """True if another batch may be started before the next delivery."""

    def statistics(self) -> StageStatistics:
        """Batches and bytes as of the last call; callable from any thread."""

    def close(self) -> None:
        """Wait for batches in flight and release them; may be called repeatedly."""


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """Current figures of a stage."""

    in_flight: int = 0
    """Batches started and not yet delivered."""
    in_flight_nbytes: int = 0
    """Bytes of these batches, as far as they are in host memory."""
    peak_nbytes: int = 0
    """Maximum of `in_flight_nbytes` so far."""
    copied_nbytes: int = 0
    """Bytes moved so far; on a device, only those of finished copies."""
    staged_nbytes: int = 0
    """Bytes first copied on the host, because they were not page-locked."""
    registered_nbytes: int = 0
    """Bytes of transport memory that are page-locked now."""
    copy_s: float = 0.0
    """Seconds the device spent on finished copies."""
    hidden_copy_s: float = 0.0
    """Part of `copy_s` in which the loop's stream did not wait for copies."""
    decode_s: float = 0.0
    """Seconds of decoding delivered images on the device."""
    hidden_decode_s: float = 0.0
    """Part of `decode_s` in which the loop did not wait for images."""


@dataclass(frozen=True, slots=True)
class Depth:
    """Limit of data in flight: `nbytes`, or `batches` if None.

    One batch is always allowed. With two, one is due, and one is copied while the loop computes.
    """

    nbytes: int | None = None
    batches: int = 2

    def allows(self, batches: int, nbytes: int, more: int) -> bool:
        """True if `more` bytes fit in after `batches` of `nbytes` in total."""
        if batches == 0:
            return True
        return batches < self.batches if self.nbytes is None else nbytes + more <= self.nbytes


TWO_BATCHES = Depth()


Moving = TypeVar("Moving")


class InFlight(Generic[Moving]):
    """A batch between `start` and `finish`; dropping it abandons the batch.

    `decodes` is True if images are decoded on the device meanwhile.
    """

    # Not a dataclass with `weakref_slot`: Python 3.12 leaves that slot out of subclasses of Generic.
    __slots__ = ("__weakref__", "decodes", "moving", "nbytes")

    def __init__(self, moving: Moving, nbytes: int, *, decodes: bool) -> None:
        self.moving, self.nbytes, self.decodes = moving, nbytes, decodes


class Flights(Generic[Moving]):
    """Batches in flight in one stage.

    Held by weak references: a batch dropped before `finish` no longer counts.
    """

    def __init__(self, depth: Depth) -> None:
        self._depth = depth
        self._flights: set[ref[InFlight[Moving]]] = set()
        self.last_nbytes = 0
        self.peak_nbytes = 0

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def nbytes(self) -> int:
        """Bytes in flight."""
        alive = (flight() for flight in self._flights.copy())  # a copy: other threads read statistics
        return sum(flight.nbytes for flight in alive if flight is not None)

    def enter(self, moving: Moving, nbytes: int, *, decodes: bool = False) -> InFlight[Moving]:
        """Add a batch."""
        flight = InFlight(moving, nbytes, decodes=decodes)
        self._flights.add(ref(flight, self._flights.discard))
        self.last_nbytes = nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        return flight

    def leave(self, flight: InFlight[Moving]) -> Moving:
        """Remove a batch and return its content."""
        self._flights.discard(ref(flight))
        return flight.moving

    def has_room(self) -> bool:
        """True if the depth allows another batch as large as the last."""
        return self._depth.allows(len(self), self.nbytes, self.last_nbytes)


class Closing:
    """A stage as a context manager."""

    def close(self) -> None:
        """See `Stage`."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def moves_itself(node: Any) -> bool:
    """True for objects moved as a whole by their own `to`.

    Examples are PackedSequence and TensorDict. Dictionaries with a `to` but no `record_stream`, such as batches of
    Hugging Face's tokenizers, are traversed like any other.
    """
    return hasattr(node, "to") and (hasattr(node, "record_stream") or not isinstance(node, (dict, UserDict)))


def is_encoded(leaf: Any) -> bool:
    """True for images that `to(device)` decodes there."""
    return getattr(leaf, "decodes_on_device", False) is True


def times_s(started: Event, stopped: Event, needed: Event | None) -> tuple[float, float]:
    """Seconds of ended work, and its part without a waiting loop.

    `needed` is the event where the loop begins to wait.
    """
    total = started.elapsed_time(stopped)
    if needed is None or not needed.query():  # it has stopped before the loop came to it
        return total / 1e3, total / 1e3
    waited = min(max(needed.elapsed_time(stopped), 0.0), total)
    return total / 1e3, (total - waited) / 1e3


def is_plain(leaf: Any) -> bool:
    """True for plain strided CPU tensors: no subclass, not sparse, not nested."""
    return (
        type(leaf) in (torch.Tensor, torch.nn.Parameter)
        and leaf.is_cpu
        and leaf.layout is torch.strided
        and not leaf.is_nested
    )


def host_nbytes(batch: Any) -> int:
    """Bytes of plain CPU tensors and encoded images in a batch."""
    return sum(leaf.nbytes if is_plain(leaf) else getattr(leaf, "host_nbytes", 0) for leaf in leaves(batch))
