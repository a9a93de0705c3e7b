"""Foreign samplers and batch samplers, taken as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

from feedline.errors import ArgumentError, StateError
from feedline.samplers.drawn import Drawn
from feedline.samplers.listing import Listing, as_batch
from feedline.samplers.order import Indices, clipped
from feedline.samplers.seeded import Seeded, seedable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Listed(Sampler[Any]):
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
        self._listing = Listing()
        self._ended = False

    def begin(self, epoch: int, now: bool = False) -> int:
        """Begin a new listing, which counts as `epoch`; gives `epoch` back.

        `now`: call `iter(sampler)` at once, as torch does for a batch sampler and for `batch_size=None`, and not with
        the first item, as it does for a sampler that it batches itself.
        """
        self._run, self._script = self._new_run(self._script), {}
        self._listing, self._ended, self.epoch = Listing(), False, epoch
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
