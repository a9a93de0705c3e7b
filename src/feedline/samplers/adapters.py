"""Adapters for samplers without random access."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, Sampler, SequentialSampler

from feedline.core.dataset import declared
from feedline.core.tensors import as_integers, as_yielded, with_container
from feedline.core.torch_wrappers import is_member_of_torch, is_torchs
from feedline.errors import ArgumentError, StateError
from feedline.samplers.base import BatchIndexSampler, IndexSampler, Indices, clip_span
from feedline.samplers.basic import Sequential
from feedline.samplers.distributed import TorchDistributed
from feedline.samplers.generator_state import generators_of, select_states
from feedline.samplers.order_state import RecordedRun, SeededRun, is_seedable

_NO_NUMBERS: Indices = np.empty(0, np.int64)


class ItemBuffer:
    """A growing buffer of items by position; a prefix can be freed.

    Holds an int64 array, or a list once an item is not an integer, or of another type than the first.
    """

    def __init__(self) -> None:
        self._numbers: Indices = _NO_NUMBERS
        self._kind: type[Indices] | None = None  # of the items; their memory is a plain array
        self._objects: list[Any] | None = None
        self._first = 0  # position of the first item in memory
        self._stop = 0

    def __len__(self) -> int:
        """Number of added items, including freed ones."""
        return self._stop

    @property
    def first(self) -> int:
        """Position of the first item still in memory."""
        return self._first

    def extend(self, items: list[Any] | Indices) -> None:
        numbers = items if isinstance(items, np.ndarray) else as_integers(items)
        if numbers is not None and len(numbers):
            self._kind = self._kind or type(numbers)
        if self._objects is None and (numbers is None or (len(numbers) and type(numbers) is not self._kind)):
            self._objects = as_yielded(self.span(self._first, self._stop))
        if self._objects is not None:
            self._objects.extend(as_yielded(items))
        elif numbers is not None:
            self._append(numbers)
        self._stop += len(items)

    def _append(self, numbers: Indices) -> None:
        size = self._stop - self._first
        if not size:  # a whole order stays where it is
            self._numbers = numbers.view(np.ndarray)
            return
        if size + len(numbers) > len(self._numbers):
            grown = np.empty(max(1024, 2 * len(self._numbers), size + len(numbers)), np.int64)
            grown[:size] = self._numbers[:size]
            self._numbers = grown
        self._numbers[size : size + len(numbers)] = numbers

    def span(self, start: int, stop: int) -> Indices | list[Any]:
        """A copy of the items at [start, stop), all in memory."""
        low, high = start - self._first, max(min(stop, self._stop), start) - self._first
        if self._objects is not None:
            return self._objects[low:high]
        numbers = self._numbers[low:high].copy()
        return numbers if self._kind in (None, np.ndarray) else numbers.view(self._kind)

    def forget(self, before: int) -> None:
        """Free the items below position `before`.

        Amortized O(1): memory moves only when most of it is free.
        """
        count = min(before, self._stop) - self._first
        if count < 1024 or 2 * count < self._stop - self._first:
            return
        if self._objects is None:
            self._numbers = np.concatenate([self._numbers[count : self._stop - self._first], np.empty(1024, np.int64)])
        else:
            del self._objects[:count]
        self._first += count


def as_batch(item: Iterable[Any]) -> Indices | list[Any]:
    """A copy of one batch, as int64 if all are integers.

    A copy, because a sampler may yield the same list again with other items. It keeps the type of other sequences for
    `as_container`.
    """
    if type(item) is not list and isinstance(item, (Sequence, np.ndarray, torch.Tensor)):
        return with_container(item.clone() if isinstance(item, torch.Tensor) else copy.copy(item))
    indices = list(item)
    numbers = as_integers(indices)
    return indices if numbers is None else numbers


class MaterializedSampler(Sampler[Any]):
    """Random access to any iterable of indices or batches, epoch by epoch.

    Items are drawn only when a position is needed. Endless samplers, and samplers that react to the training loop,
    therefore work, and random numbers are drawn when torch would draw them. Read each epoch until `take` returns fewer
    items than requested, as torch does: some samplers draw once more at their end, and the next epoch would otherwise
    differ from torch's.

    Not thread-safe: `iter(sampler)` runs in the thread that calls `take`.
    """

    def __init__(self, sampler: Iterable[Any], batches: bool = False) -> None:
        self.sampler = sampler
        self.batches = batches
        self.epoch = 0
        self._script: dict[str, Any] = {}
        self._run = self._open_run({})
        self._items = ItemBuffer()
        self._ended = False

    def begin(self, epoch: int, now: bool = False, twice: bool = False) -> int:
        """Start a new epoch, and return its number.

        `now`: call `iter(sampler)` at once, as torch does for a batch sampler and for `batch_size=None`. Otherwise it
        is called with the first item, as torch does for a sampler of indices. `twice`: call it now, drop the result,
        and call it again with the first item, as torch does when it starts workers.
        """
        script, self._script = self._script, {}
        if "ended" in script:  # the sampler is moved to the end of the previous epoch
            self._open_run(script).pull(sys.maxsize)
            script = {}
        elif "generators" in script:
            for source, state in select_states(generators_of(self.sampler), script["generators"]).items():
                source.write(state)
            script = {}
        self._run = self._open_run(script)
        self._items, self._ended, self.epoch = ItemBuffer(), False, epoch
        if now and twice and not script:  # draws of the first call affect the order of the second one
            iter(self.sampler)
        elif now:
            self._run.start()
        return epoch

    def end(self) -> None:
        """End an epoch that is not read any more.

        torch drops the sampler's iterator before the next epoch draws.
        """
        self._run.close()

    def take(self, epoch: int, start: int, stop: int) -> Indices | list[Any]:
        """The items at positions [start, stop), fewer past the end.

        The result is an int64 array. It is a list once an item was not an integer, or had another type than the items
        before it. Only the current epoch can be read.
        """
        start, stop = clip_span(start, stop, None)
        self._check(epoch, start)
        missing = stop - len(self._items)
        if missing > 0 and not self._ended:
            try:
                items = self._run.pull(missing)
            except Exception:
                raise
            except BaseException:
                # An interrupt has ended the sampler's iterator: a new iterator repeats its items.
                self.restore(self._run.record(len(self._items)))
                self.begin(epoch)
                raise
            self._ended = len(items) < missing
            self._items.extend(items)
        return self._items.span(start, stop)

    def take_batches(self, epoch: int, start: int, stop: int) -> list[Any]:
        """The batches [start, stop) of a sampler of batches.

        Each is an int64 array, or a list if an index is not an integer.
        """
        return list(self.take(epoch, start, stop))

    def _check(self, epoch: int, start: int) -> None:
        if epoch != self.epoch:
            raise ArgumentError(
                f"epoch {epoch} of {type(self.sampler).__name__} cannot be read during epoch {self.epoch}: "
                f"this sampler has no random access over epochs; call begin({epoch}) first"
            )
        if start < self._items.first:
            raise ArgumentError(f"position {start} was freed: positions from {self._items.first} on are in memory")

    def forget(self, before: int) -> None:
        """Free the positions below `before`; they cannot be read any more."""
        self._items.forget(before)

    def record(self, position: int | None = None) -> dict[str, Any]:
        """JSON from which `restore` repeats this epoch, at least from `position` on.

        It is {} before the first item, and if nothing random was drawn. A sampler's state that only pickle can store is
        an `OpaqueState` inside.
        """
        return self._script or self._run.record(position)

    def record_end(self) -> dict[str, Any]:
        """JSON from which `restore` starts the next epoch after a complete one."""
        return self._script or self._run.record_end()

    def draw_first(self) -> None:
        """Draw the first item of this epoch, unless that is done."""
        if not len(self._items):
            self.take(self.epoch, 0, 1)

    def restore(self, recorded: dict[str, Any]) -> None:
        """Make the next `begin` repeat a recorded epoch.

        StateError if the sampler cannot repeat it.
        """
        if not isinstance(recorded, dict):
            raise StateError(f"a damaged state: {recorded!r} is not the record of an order; load an earlier state")
        self._open_run(recorded)
        self._script = recorded

    def _open_run(self, script: dict[str, Any]) -> SeededRun | RecordedRun:
        kind = SeededRun if is_seedable(self.sampler) else RecordedRun
        return kind(self.sampler, script, as_batch if self.batches else None)

    def fingerprint(self) -> str:
        """The class of the sampler and, if it has one, the length."""
        return f"MaterializedSampler({type(self.sampler).__name__}{_describe_length(self.sampler)})"

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the sampler, if it has one."""
        if callable(declared(self.sampler, "set_epoch")):
            self.sampler.set_epoch(epoch)  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


def _describe_length(sampler: Any) -> str:
    # Foreign samplers may raise anything for an unknown length, which torch reads only in len(loader).
    try:
        return f" of {len(sampler)}"
    except Exception:  # noqa: BLE001 - whatever it raises, the text does without
        return ""


def as_index_sampler(
    sampler: Iterable[Any], batches: bool = False
) -> IndexSampler | BatchIndexSampler | MaterializedSampler:
    """Adapt any sampler to the protocol of index samplers.

    feedline's samplers are returned unchanged. torch's sequential and distributed samplers get random access. All
    others become a `MaterializedSampler`, including subclasses that override the order. `batches`: the sampler was
    passed as `batch_sampler`.
    """
    if isinstance(sampler, MaterializedSampler) or (
        isinstance(sampler, (IndexSampler, BatchIndexSampler)) and _has_own_order(sampler)
    ):
        return sampler
    if is_torchs(sampler, SequentialSampler) and not batches:
        with suppress(Exception):  # a dataset without a length: as in torch, the first batch raises its error
            return Sequential(len(sampler))
    if isinstance(sampler, DistributedSampler) and _is_unchanged(sampler) and not batches:
        return TorchDistributed(sampler)
    return MaterializedSampler(sampler, batches)


def _has_own_order(sampler: IndexSampler | BatchIndexSampler) -> bool:
    base = IndexSampler if isinstance(sampler, IndexSampler) else BatchIndexSampler
    return type(sampler).__iter__ is base.__iter__


def _is_unchanged(sampler: object) -> bool:
    methods = ("__iter__", "__len__", "set_epoch")
    return all(
        getattr(type(sampler), name) is getattr(DistributedSampler, name)
        and is_member_of_torch(DistributedSampler, name)
        for name in methods
    )
