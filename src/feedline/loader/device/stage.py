"""What every stage ahead of delivery has in common: two acts per batch, a bound, and numbers."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar
from weakref import ref

import torch

from feedline.core.tree import leaves

DEFAULT_BATCHES = 2
"""Batches under way where no bound in bytes is given: one that is copied while the loop computes, and the one due."""


class Stage(Protocol):
    """What happens to a finished batch before the loop gets it. For one thread; it may be used again after `close`."""

    def start(self, batch: Any) -> Any:
        """Begin to move the batch, without waiting for the end of it; the caller may drop `batch`."""

    def finish(self, moving: Any) -> Any:
        """The moved batch, ready for the work that the calling thread enqueues from now on."""

    def has_room(self) -> bool:
        """Whether another batch may be started before the one that is due is delivered."""

    def statistics(self) -> StageStatistics:
        """Batches and bytes, as of the last call; any thread may ask."""

    def close(self) -> None:
        """Wait for what is under way and let go of it. May be called more than once."""


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """A moment's picture of a stage."""

    in_flight: int = 0
    """Batches started and not delivered yet."""
    in_flight_nbytes: int = 0
    """Their bytes."""
    peak_nbytes: int = 0
    """The most bytes that were ever in flight."""
    copied_nbytes: int = 0
    """Bytes moved since the stage was made; on a device, those of copies that have ended."""
    staged_nbytes: int = 0
    """Bytes that were not page-locked and had to be copied once more on the host."""
    registered_nbytes: int = 0
    """Transport memory that is page-locked at the moment."""
    copy_s: float = 0.0
    """Seconds that the device spent on copies that have ended."""


@dataclass(frozen=True, slots=True)
class Depth:
    """How much may be under way at once: `nbytes`, or two batches where that is None; one batch always may."""

    nbytes: int | None = None

    def allows(self, batches: int, nbytes: int, more: int) -> bool:
        """Whether `more` bytes may join `batches` batches of `nbytes` bytes together."""
        if batches == 0:
            return True
        return batches < DEFAULT_BATCHES if self.nbytes is None else nbytes + more <= self.nbytes


Moving = TypeVar("Moving")


@dataclass(slots=True, eq=False, weakref_slot=True)
class InFlight(Generic[Moving]):
    """A batch between `start` and `finish`. Dropping it abandons the batch."""

    moving: Moving
    nbytes: int


class Flights(Generic[Moving]):
    """The batches of one stage that are under way; one that is dropped before `finish` leaves by itself."""

    def __init__(self, depth: Depth) -> None:
        self._depth = depth
        self._flights: set[ref[InFlight[Moving]]] = set()
        self.last_nbytes = 0
        self.peak_nbytes = 0

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def nbytes(self) -> int:
        """Bytes under way."""
        alive = (flight() for flight in self._flights.copy())  # a copy: other threads may ask
        return sum(flight.nbytes for flight in alive if flight is not None)

    def enter(self, moving: Moving, nbytes: int) -> InFlight[Moving]:
        """Count a batch in."""
        flight = InFlight(moving, nbytes)
        self._flights.add(ref(flight, self._flights.discard))
        self.last_nbytes = nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        return flight

    def leave(self, flight: InFlight[Moving]) -> Moving:
        """Count it out."""
        self._flights.discard(ref(flight))
        return flight.moving

    def has_room(self) -> bool:
        """Whether the depth allows one more batch, if it is as large as the last one."""
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
    """Whether this is to be moved by its own `to`, container or not: a PackedSequence, a TensorDict.

    Dictionaries with a `to`, such as the batches of Hugging Face's tokenizers, are walked like any other.
    """
    return hasattr(node, "to") and (hasattr(node, "record_stream") or not isinstance(node, (dict, UserDict)))


def is_plain(leaf: Any) -> bool:
    """Whether this is a CPU tensor that is one block of memory: no subclass, not sparse, not nested."""
    return (
        type(leaf) in (torch.Tensor, torch.nn.Parameter)
        and leaf.is_cpu
        and leaf.layout is torch.strided
        and not leaf.is_nested
    )


def host_nbytes(batch: Any) -> int:
    """Bytes of the plain CPU tensors of a batch."""
    return sum(leaf.nbytes for leaf in leaves(batch) if is_plain(leaf))
