"""Foreign samplers and batch samplers, taken as they are.

What a foreign sampler has yielded so far.

Any sampler as one that has random access, or that lists itself where it has not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, Sampler, SequentialSampler

from feedline.errors import ArgumentError, StateError
from feedline.samplers.base import BatchIndexSampler, IndexSampler, Indices, clipped
from feedline.samplers.basic import Sequential
from feedline.samplers.distributed import TorchDistributed
from feedline.samplers.order_state import Drawn, Seeded, seedable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class ItemBuffer:
    """Items by position: an int64 array that grows, or a list from the first item on that is no integer."""

    def __init__(self) -> None:
        self._numbers: Indices = np.empty(1024, np.int64)
        self._objects: list[Any] | None = None
        self._first = 0  # position of the first item still kept
        self._stop = 0

    def __len__(self) -> int:
        """Items listed so far, those forgotten included."""
        return self._stop

    @property
    def first(self) -> int:
        """Position of the first item that is still kept."""
        return self._first

    def extend(self, items: list[Any] | Indices) -> None:
        """Add items at the end."""
        numbers = items if isinstance(items, np.ndarray) else as_integers(items)
        if self._objects is None and numbers is None:
            self._objects = self._numbers[: self._stop - self._first].tolist()
        if self._objects is not None:
            self._objects.extend(items)
        elif numbers is not None:
            self._append(numbers)
        self._stop += len(items)

    def _append(self, numbers: Indices) -> None:
        kept = self._stop - self._first
        if kept + len(numbers) > len(self._numbers):
            grown = np.empty(max(2 * len(self._numbers), kept + len(numbers)), np.int64)
            grown[:kept] = self._numbers[:kept]
            self._numbers = grown
        self._numbers[kept : kept + len(numbers)] = numbers

    def span(self, start: int, stop: int) -> Indices | list[Any]:
        """A copy of the items at [start, stop); `start` must not have been forgotten."""
        low, high = start - self._first, max(min(stop, self._stop), start) - self._first
        return self._numbers[low:high].copy() if self._objects is None else self._objects[low:high]

    def forget(self, before: int) -> None:
        """Free what lies before that position; cheap, because memory moves only when most of it is free."""
        count = min(before, self._stop) - self._first
        if count < 1024 or 2 * count < self._stop - self._first:
            return
        if self._objects is None:
            self._numbers = np.concatenate([self._numbers[count : self._stop - self._first], np.empty(1024, np.int64)])
        else:
            del self._objects[:count]
        self._first += count


def as_batch(item: Iterable[Any]) -> Indices | list[Any]:
    """A copy of one batch, as int64 where all of it is integers; the sampler may fill the same list again."""
    indices = list(item)
    numbers = as_integers(indices)
    return indices if numbers is None else numbers


def as_integers(items: list[Any]) -> Indices | None:
    """The items as int64, if every one is an integer: Python's, NumPy's, a torch scalar, or a bool of these."""
    if not set(map(type, items)) <= {int, bool}:
        if not all(map(_is_integer, items)):
            return None
        items = [int(item) for item in items]
    try:
        return np.array(items, np.int64)
    except OverflowError:
        return None


def _is_integer(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        return item.ndim == 0 and not item.is_floating_point() and not item.is_complex()
    return isinstance(item, (int, np.integer, np.bool_))


class MaterializedSampler(Sampler[Any]):
    """Positions over anything that can be iterated: one epoch is listed as far as it has been asked for.

    Nothing is pulled before a position needs it, so endless samplers and samplers that react to the training work, and
    random numbers are drawn when torch would draw them. To give a following epoch what torch gives, ask until a take
    comes back short: some samplers draw once more at their end.
    Not thread-safe: `iter(sampler)` runs in the thread that takes.
    """

    def __init__(self, sampler: Iterable[Any], batches: bool = False) -> None:
        self.sampler = sampler
        self.batches = batches
        self.epoch = 0
        self._script: dict[str, Any] = {}
        self._run = self._new_run({})
        self._listing = ItemBuffer()
        self._ended = False

    def begin(self, epoch: int, now: bool = False) -> int:
        """Begin a new listing, which counts as `epoch`; gives `epoch` back.

        `now`: call `iter(sampler)` at once, as torch does for a batch sampler and for `batch_size=None`, and not with
        the first item, as it does for a sampler that it batches itself.
        """
        self._run, self._script = self._new_run(self._script), {}
        self._listing, self._ended, self.epoch = ItemBuffer(), False, epoch
        if now:
            self._run.start()
        return epoch

    def take(self, epoch: int, start: int, stop: int) -> Indices | list[Any]:
        """The items at positions [start, stop), shorter past the end: int64, or a list once an item was no integer.

        Integers are Python's, NumPy's and torch's scalars, bools included. Only the epoch begun last can be taken.
        """
        start, stop = clipped(start, stop, None)
        self._check(epoch, start)
        missing = stop - len(self._listing)
        if missing > 0 and not self._ended:
            items = self._run.pull(missing)
            self._ended = len(items) < missing
            self._listing.extend(items)
        return self._listing.span(start, stop)

    def take_batches(self, epoch: int, start: int, stop: int) -> list[Any]:
        """As `take`, for a sampler of batches: each an int64 array, or a list where an index is no integer."""
        return list(self.take(epoch, start, stop))

    def _check(self, epoch: int, start: int) -> None:
        if epoch != self.epoch:
            raise ArgumentError(
                f"epoch {epoch} of {type(self.sampler).__name__} cannot be taken while epoch {self.epoch} is listed: "
                f"a foreign sampler has no random access over epochs; call begin({epoch}) first"
            )
        if start < self._listing.first:
            raise ArgumentError(f"position {start} was forgotten: positions from {self._listing.first} on are kept")

    def forget(self, before: int) -> None:
        """Free the memory of positions below `before`; they cannot be taken any more."""
        self._listing.forget(before)

    def recorded(self) -> dict[str, Any]:
        """JSON that makes `restore` repeat this listing: {} before the first item and where nothing was drawn."""
        return self._script or self._run.recorded()

    def restore(self, recorded: dict[str, Any]) -> None:
        """Make the listing that `begin` begins next repeat the recorded one; StateError if it cannot."""
        if not isinstance(recorded, dict):
            raise StateError(f"a damaged state: {recorded!r} is no record of a sampler's order")
        self._new_run(recorded)
        self._script = recorded

    def _new_run(self, script: dict[str, Any]) -> Seeded | Drawn:
        kind = Seeded if seedable(self.sampler) else Drawn
        return kind(self.sampler, script, as_batch if self.batches else None)

    def fingerprint(self) -> str:
        """The class and, where it has one, the length."""
        return f"Listed({type(self.sampler).__name__}{_length(self.sampler)})"

    def set_epoch(self, epoch: int) -> None:
        """Passed on, where the sampler has `set_epoch`."""
        if callable(getattr(self.sampler, "set_epoch", None)):
            self.sampler.set_epoch(epoch)  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


def _length(sampler: Any) -> str:
    try:
        return f" of {len(sampler)}"
    except (TypeError, NotImplementedError):
        return ""


def as_index_sampler(
    sampler: Iterable[Any], batches: bool = False
) -> IndexSampler | BatchIndexSampler | MaterializedSampler:
    """Adapt any sampler to the protocol of index samplers.

    Ours stay as they are; torch's sequential and distributed ones get random access; all others are materialized.

    `batches`: the sampler was given as `batch_sampler`. A subclass that changes what it yields is listed.
    """
    if isinstance(sampler, MaterializedSampler) or (
        isinstance(sampler, (IndexSampler, BatchIndexSampler)) and _keeps(sampler)
    ):
        return sampler
    if type(sampler) is SequentialSampler and not batches:
        return Sequential(len(sampler))
    if isinstance(sampler, DistributedSampler) and _distributed_as_torch(sampler) and not batches:
        return TorchDistributed(sampler)
    return MaterializedSampler(sampler, batches)


def _keeps(sampler: IndexSampler | BatchIndexSampler) -> bool:
    base = IndexSampler if isinstance(sampler, IndexSampler) else BatchIndexSampler
    return type(sampler).__iter__ is base.__iter__


def _distributed_as_torch(sampler: object) -> bool:
    deciding = ("__iter__", "__len__", "set_epoch")
    return all(getattr(type(sampler), name) is getattr(DistributedSampler, name) for name in deciding)
