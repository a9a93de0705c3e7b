"""Whole batches: what can be done for many rows in one native call, and the rest row by row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import images
from feedline.core.tensors import numpy_view
from feedline.errors import SampleError
from feedline.images.errors import ImageError, named
from feedline.transforms.native_steps import Conversion, Window
from feedline.transforms.steps import Keys, PlannedStep, first_form, run

Grids = Sequence[NDArray[np.uint16] | None] | None


_TURN = 16
"""Rows that are worked on at a time, so that their levels are still in the cache when the next step takes them."""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """The rows that are to be made: their sources, the samples' keys, and how many threads may decode."""

    sources: Sequence[images.Source]
    keys: Keys
    grids: Grids
    threads: int

    def turns(self, size: int) -> Iterator[tuple[slice, BatchJob]]:
        for start in range(0, len(self.sources), size):
            rows = range(start, min(start + size, len(self.sources)))
            grids = None if self.grids is None else [self.grids[row] for row in rows]
            turn = slice(rows.start, rows.stop)
            yield turn, BatchJob([self.sources[row] for row in rows], self.keys[turn], grids, self.threads)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The steps of a plan, in the order in which a batch goes through them."""

    head: Window | None
    """One call for all sources, with the keys of `place`."""
    place: PlannedStep
    each: tuple[PlannedStep, ...]
    """Row by row, on levels."""
    finish: Conversion | None
    """Levels to numbers, one call for all."""
    tail: tuple[PlannedStep, ...]
    """Row by row, on what has been written."""

    @classmethod
    def of(cls, steps: tuple[PlannedStep, ...]) -> BatchPlan:
        place = steps[0]
        head = place.step if isinstance(place.step, Window) else None
        rest = steps if head is None else steps[1:]
        converted = head is not None and head.conversion is not None
        each, finish, tail = ((), None, rest) if converted else _parted(rest)
        if any(isinstance(placed.step, Conversion) for placed in tail):  # rows that change their dtype once more
            return cls(None, place, steps, None, ())
        return cls(head, place, each, finish, tail)

    @property
    def is_one_call(self) -> bool:
        """Whether there is nothing to do row by row."""
        return self.head is not None and not self.each and self.finish is None and not self.tail

    def write(self, work: BatchJob, out: torch.Tensor) -> None:
        """Make the rows of `out`. An ImageError tells the row of the first sample that failed."""
        if not self.each and self.finish is None:
            self._read(work, out)
        else:
            for rows, turn in work.turns(max(_TURN, work.threads)):
                with _counted_from(rows.start):
                    self._finish(list(self._levels(turn)), out[rows], work.threads)
        if self.tail:
            for row, changed in zip(out, _each(self.tail, out, work), strict=True):
                _store(changed, row)

    def _read(self, work: BatchJob, out: torch.Tensor) -> None:
        assert self.head is not None
        keys = self.place.keys(work.keys) if self.head.draws else None
        recipe = self.head.recipe
        images.read_batch(work.sources, recipe, numpy_view(out), keys, grids=work.grids, threads=work.threads)

    def _levels(self, work: BatchJob) -> Iterable[Any]:
        """The rows before they become numbers."""
        if self.head is None:
            return _each(self.each, work.sources, work, raw=True)
        scratch = torch.empty((len(work.sources), *self.head.recipe.shape), dtype=torch.uint8)
        self._read(work, scratch)
        return _each(self.each, scratch.numpy(), work)

    def _finish(self, levels: Sequence[Any], out: torch.Tensor, threads: int) -> None:
        if self.finish is not None and levels[0].shape[2] == 3:
            recipe = self.finish.recipe(levels[0].shape[:2])
            images.read_batch(levels, recipe, numpy_view(out), threads=threads)
            return
        for row, sample in zip(out, levels, strict=True):
            _store(sample if self.finish is None else self.finish.apply(sample, 0), row)


def _parted(
    steps: tuple[PlannedStep, ...],
) -> tuple[tuple[PlannedStep, ...], Conversion | None, tuple[PlannedStep, ...]]:
    """Before, at and after the first conversion."""
    for at, placed in enumerate(steps):
        if isinstance(placed.step, Conversion):
            return steps[:at], placed.step, steps[at + 1 :]
    return steps, None, ()


def _each(steps: tuple[PlannedStep, ...], samples: Iterable[Any], work: BatchJob, raw: bool = False) -> Iterator[Any]:
    """Every sample after the steps; whatever is wrong with one comes out as an ImageError with its row.

    `raw` samples are sources that have not been opened.
    """
    keys = [placed.keys(work.keys) if placed.step.draws else np.zeros_like(work.keys) for placed in steps]
    own = np.stack(keys, axis=1).tolist() if steps else [()] * len(work.keys)
    for row, sample in enumerate(samples):
        try:
            yield run(steps, first_form(steps, sample) if raw else sample, own[row])
        except ImageError as error:
            error.row = row
            raise
        except SampleError as error:
            raise ImageError(f"{named(work.sources[row], row)}: {error}", row) from error


def _store(sample: Any, row: torch.Tensor) -> None:
    sample = sample if isinstance(sample, torch.Tensor) else torch.from_numpy(sample)
    if sample.data_ptr() != row.data_ptr():
        row.copy_(sample)


@contextmanager
def _counted_from(start: int) -> Iterator[None]:
    """Errors of a turn tell rows of the batch."""
    try:
        yield
    except ImageError as error:
        if not start or error.row is None:
            raise
        text = str(error).replace(f"row {error.row}", f"row {error.row + start}", 1)
        raise ImageError(text, error.row + start) from error
