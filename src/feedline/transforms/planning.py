"""A pipeline compiled: single samples and whole batches, bit for bit the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import images
from feedline.errors import ArgumentError
from feedline.rng import SampleRng, torch_keys
from feedline.rows import Empty
from feedline.transforms.batching import Grids, Stages, Work
from feedline.transforms.forms import Form
from feedline.transforms.fusing import fused
from feedline.transforms.pictures import owned
from feedline.transforms.steps import Keys, Placed, first_form, run
from feedline.transforms.windows import Shorter, Whole, Window

Rng = SampleRng | np.random.Generator


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """The steps of a pipeline, neighbours fused; frozen, picklable, safe to use from many threads at once.

    A sample that is never converted is a uint8 array (height, width, channels), one that is a tensor. `form` is what
    is known of samples made from RGB pictures; None after a step that may do anything.
    """

    steps: tuple[Placed, ...]
    form: Form | None

    @property
    def batchable(self) -> bool:
        """Whether `batch` can be had: the shape of samples is known, and no step is a foreign callable."""
        return self.form is not None and self.form.shape is not None

    @property
    def draws(self) -> bool:
        """Whether samples depend on their keys."""
        return any(placed.step.draws for placed in self.steps)

    @property
    def splits(self) -> bool:
        """Whether all of `batch` is one native call, which several threads can share."""
        return self.batchable and Stages.of(self.steps).is_one_call

    def sample(self, source: Any, rng: Rng | None = None, grid: NDArray[np.uint16] | None = None) -> Any:
        """One sample: the row that `batch` makes with the key of `rng` (see `key_of`).

        `source` is a path, the bytes of an image file, an array, a PIL image or a uint8 tensor (channels first).
        """
        return owned(self.run(source, key_of(rng), grid), source)

    def run(self, sample: Any, key: int, grid: NDArray[np.uint16] | None = None) -> Any:
        """As `sample`, with the key itself; the result may share memory with what was given."""
        first = self.steps[0]
        if grid is None or not isinstance(first.step, (Window, Shorter)):
            return self.apply(first_form(self.steps, sample), key)
        return _applied(self.steps[1:], first.step.apply(sample, first.key(key), grid), key)

    def apply(self, sample: Any, key: int) -> Any:
        """The steps on a sample that is under way: a picture, or a tensor after ToTensor or Normalize."""
        return _applied(self.steps, sample, key)

    def batch(
        self, sources: Sequence[images.Source], keys: Keys | None, empty: Empty, grids: Grids = None, threads: int = 1
    ) -> torch.Tensor:
        """All samples as one tensor in memory from `empty(shape, dtype)`: what collating `sample` of each gives.

        `keys` are the samples' own; None draws them from torch's global generator. Up to `threads` threads decode.
        The first sample that fails raises an ImageError, which has its place in `row`.
        """
        form = self.form
        if form is None or form.shape is None:
            raise ArgumentError(
                "samples whose shape is not known beforehand cannot be made as one batch: make them one by one with"
                " sample(), or crop or resize them to a fixed size"
            )
        out = empty((len(sources), *form.shape), form.dtype)
        keys = torch_keys(len(sources)) if keys is None else keys
        Stages.of(self.steps).write(Work(sources, keys, grids, threads), out)
        return out


def _applied(steps: Sequence[Placed], sample: Any, key: int) -> Any:
    return run(steps, sample, [placed.key(key) for placed in steps])


def compiled(placed: Iterable[Placed]) -> ImagePlan:
    """The plan of these steps; ArgumentError where one comes after the picture has ended as numbers."""
    steps = fused(placed) or (Placed(Whole(), (), "Compose"),)
    return ImagePlan(steps, followed(steps, Form()))


def followed(steps: Iterable[Placed], form: Form | None) -> Form | None:
    """What is known of a sample after the steps."""
    for placed in steps:
        if form is not None and form.converted and not placed.step.takes_numbers:
            raise ArgumentError(
                f"{placed.name} comes after the picture was turned into numbers: put it before ToTensor and Normalize"
            )
        form = placed.step.follow(form)
    return form


def key_of(rng: Rng | None) -> int:
    """The key of a sample: that of a `SampleRng`, the next number of a NumPy generator, or one of torch's global one.

    So the same `SampleRng` twice gives the same picture twice; two views want a generator, such as `rng.generator`.
    """
    if rng is None:
        return int(torch_keys(1)[0])
    if isinstance(rng, SampleRng):
        return rng.key
    if isinstance(rng, np.random.Generator):
        return int(rng.integers(0, 1 << 64, dtype=np.uint64))
    raise ArgumentError(f"rng must be a feedline.SampleRng or a numpy.random.Generator, not a {type(rng).__name__}")
