"""Whole batches: one native call for many rows where steps allow it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from feedline import images
from feedline.core.dataset import Keys
from feedline.errors import ArgumentError, SampleError
from feedline.images.decode import Grid
from feedline.images.errors import ImageError, describe_source
from feedline.transforms.steps import ImageSpec, PlannedStep, infer_spec, run, run_source

BatchGrids = Sequence[Grid | None] | None


_CHUNK = 16
"""Rows per chunk: few enough that their pixels stay in the CPU cache from one step to the next."""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """Sources, keys and grids of the rows to write."""

    sources: Sequence[images.ImageSource]
    keys: Keys
    grids: BatchGrids
    threads: int

    def chunks(self, size: int) -> Iterator[tuple[slice, BatchJob]]:
        for start in range(0, len(self.sources), size):
            rows = range(start, min(start + size, len(self.sources)))
            grids = None if self.grids is None else [self.grids[row] for row in rows]
            chunk = slice(rows.start, rows.stop)
            yield chunk, BatchJob([self.sources[row] for row in rows], self.keys[chunk], grids, self.threads)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Steps of a plan, grouped as a batch executes them.

    `head` and `finish` are one call for all rows each.
    """

    head: PlannedStep | None
    """Step that reads the sources."""
    head_spec: ImageSpec
    """Spec of the images after `head`."""
    each: tuple[PlannedStep, ...]
    """Steps applied row by row: to images, or to sources if there is no head."""
    finish: PlannedStep | None
    """Step that converts images to numbers."""
    tail: tuple[PlannedStep, ...]
    """Steps applied row by row, in place on the rows that were written."""

    @classmethod
    def of(cls, steps: tuple[PlannedStep, ...]) -> BatchPlan:
        """Group the steps of a plan that is `batchable`."""
        specs = _specs(steps)
        first = steps[0] if steps[0].step.applies_to_batches and specs[0].shape is not None else None
        split = _conversion(steps, specs)
        if split == 0 and first is not None:
            return cls(first, specs[0], (), None, steps[1:])
        # A head whose rows are numbers already has nowhere to put them if a later step changes their dtype or shape.
        head = None if specs[0].converted else first
        begin = 0 if head is None else 1
        if not split:
            return cls(head, specs[0], steps[begin:], None, ())
        return cls(head, specs[0], steps[begin:split], steps[split], steps[split + 1 :])

    @property
    def is_one_call(self) -> bool:
        """True if no step works row by row."""
        return self.head is not None and not self.each and self.finish is None and not self.tail

    def write(self, job: BatchJob, out: torch.Tensor) -> None:
        """Write the rows of `out`; an ImageError carries the failed `row`."""
        if self.head is not None and not self.each and self.finish is None:
            _apply_batch(self.head, job, job.sources, out)
        else:
            for rows, chunk in job.chunks(max(_CHUNK, job.threads)):
                with _shift_row(rows.start):
                    self._finish(list(self._images(chunk)), chunk, out[rows])
        if self.tail:
            for row, sample in zip(out, _run_each(self.tail, out, job), strict=True):
                _store(sample, row)

    def _images(self, job: BatchJob) -> Iterable[Any]:
        """Rows before they are converted to numbers."""
        if self.head is None:
            return _run_each(self.each, job.sources, job, are_sources=True)
        assert self.head_spec.shape is not None
        scratch = torch.empty((len(job.sources), *self.head_spec.shape), dtype=self.head_spec.dtype, device="cpu")
        _apply_batch(self.head, job, job.sources, scratch)
        return _run_each(self.each, scratch.numpy(), job)

    def _finish(self, rows: Sequence[Any], job: BatchJob, out: torch.Tensor) -> None:
        if self.finish is not None:
            _apply_batch(self.finish, job, rows, out)
            return
        for row, sample in zip(out, rows, strict=True):
            _store(sample, row)


def _specs(steps: Sequence[PlannedStep]) -> list[ImageSpec]:
    """Spec of a sample after each step."""
    specs: list[ImageSpec] = []
    spec: ImageSpec | None = ImageSpec()
    for step in steps:
        spec = infer_spec((step,), spec)
        assert spec is not None  # the plan is batchable
        specs.append(spec)
    return specs


def _conversion(steps: Sequence[PlannedStep], specs: Sequence[ImageSpec]) -> int | None:
    """Position of the step that converts batches to numbers, if usable.

    Steps after it work in place, so none of them may change the dtype or shape.
    """
    split = next((position for position, spec in enumerate(specs) if spec.converted), None)
    if split is None or not steps[split].step.applies_to_batches or any(spec != specs[-1] for spec in specs[split:]):
        return None
    return split


def _apply_batch(planned: PlannedStep, job: BatchJob, sources: Sequence[Any], out: torch.Tensor) -> None:
    keys = planned.keys(job.keys) if planned.step.is_random else None
    # Grids describe the files of the job; images that a step before this one made have none.
    grids = job.grids if sources is job.sources else None
    planned.step.apply_batch(sources, keys, out, grids, job.threads)


def _run_each(
    steps: tuple[PlannedStep, ...], samples: Iterable[Any], job: BatchJob, are_sources: bool = False
) -> Iterator[Any]:
    """Apply the steps to every sample; SampleErrors become ImageErrors with the row."""
    keys = np.stack([planned.keys(job.keys) for planned in steps], axis=1).tolist() if steps else [()] * len(job.keys)
    for row, sample in enumerate(samples):
        try:
            yield run_source(steps, sample, keys[row]) if are_sources else run(steps, sample, keys[row])
        except ImageError as error:
            error.row = row
            raise
        except SampleError as error:
            raise ImageError(f"{describe_source(job.sources[row], row)}: {error}", row) from error


def _store(sample: Any, row: torch.Tensor) -> None:
    tensor = sample if isinstance(sample, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(sample))
    if tensor.shape != row.shape or tensor.dtype != row.dtype:
        # copy_() would broadcast and convert silently.
        raise ArgumentError(
            f"a sample came out as {tensor.dtype} of shape {tuple(tensor.shape)}, but the transforms' infer() promised"
            f" {row.dtype} of shape {tuple(row.shape)}: correct infer() of the transform that changes it"
        )
    if tensor.data_ptr() == row.data_ptr() and tensor.stride() == row.stride():
        return
    # A view of the row itself, such as a transposed one, cannot be copied into it in place.
    row.copy_(tensor.clone() if _within(tensor, row) else tensor)


def _within(tensor: torch.Tensor, row: torch.Tensor) -> bool:
    memory = row.untyped_storage()
    return 0 <= tensor.data_ptr() - memory.data_ptr() < memory.nbytes()


@contextmanager
def _shift_row(start: int) -> Iterator[None]:
    """Make errors of a chunk name the row of the batch."""
    try:
        yield
    except ImageError as error:
        if not start or error.row is None:
            raise
        text = str(error).replace(f"row {error.row}", f"row {error.row + start}", 1)
        raise ImageError(text, error.row + start) from error
