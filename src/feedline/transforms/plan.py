"""A pipeline compiled: single samples and whole batches, bit for bit the same.

Which neighboring steps become one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import images
from feedline.core.rng import SampleRng, torch_keys
from feedline.core.tensors import Allocator
from feedline.errors import ArgumentError
from feedline.images import CenterBox, RandomBox, Recipe
from feedline.transforms.batch import BatchJob, BatchPlan, Grids
from feedline.transforms.inputs import owned
from feedline.transforms.native_steps import CentralCrop, Conversion, FlipStep, Identity, ResizeShortest, Window
from feedline.transforms.steps import ImageSpec, Keys, PlannedStep, first_form, run


def fused(steps: Iterable[PlannedStep]) -> tuple[PlannedStep, ...]:
    """The same steps, each joined with the ones before it where one native call does both."""
    done: list[PlannedStep] = []
    for step in steps:
        joined = _joined(done[-1], step) if done else None
        if joined is None:
            done.append(step)
        else:
            done[-1] = joined
    return tuple(done)


def _joined(before: PlannedStep, after: PlannedStep) -> PlannedStep | None:
    first, then = before.step, after.step
    if isinstance(first, ResizeShortest) and isinstance(then, CentralCrop):
        recipe = Recipe(then.size, CenterBox(first.side), interpolation=first.interpolation)
        return replace(before, step=Window(recipe))
    if isinstance(first, Window) and isinstance(then, FlipStep):
        return _mirroring(before, first, after, then)
    if isinstance(first, Window) and isinstance(then, Conversion):
        conversion = then if first.conversion is None else _both(first.conversion, then)
        return None if conversion is None else _converting(before, first, conversion)
    if isinstance(first, Conversion) and isinstance(then, Conversion):
        both = _both(first, then)
        return None if both is None else replace(after, step=both)
    return None


def _mirroring(before: PlannedStep, window: Window, after: PlannedStep, mirror: FlipStep) -> PlannedStep | None:
    """The window that also mirrors.

    It has one key: the crop's, of which the flip takes the number after the box; where the crop draws nothing, the
    flip's own.
    """
    if window.conversion is not None or window.recipe.flip:
        return None
    path = before.path if isinstance(window.recipe.law, RandomBox) else after.path
    return replace(before, path=path, step=Window(replace(window.recipe, flip=mirror.p)))


def _converting(before: PlannedStep, window: Window, conversion: Conversion) -> PlannedStep:
    return replace(before, step=Window(conversion.onto(window.recipe), conversion))


def _both(first: Conversion, then: Conversion) -> Conversion | None:
    """ToTensor and what follows it; levels that were normalized are not levels any more."""
    return None if first.mean is not None else replace(then, layout=first.layout)


Rng = SampleRng | np.random.Generator


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """The steps of a pipeline, neighbors fused; frozen, picklable, safe to use from many threads at once.

    A sample that is never converted is a uint8 array (height, width, channels), one that is a tensor. `form` is what
    is known of samples made from RGB pictures; None after a step that may do anything.
    """

    steps: tuple[PlannedStep, ...]
    form: ImageSpec | None

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
        return self.batchable and BatchPlan.of(self.steps).is_one_call

    def sample(self, source: Any, rng: Rng | None = None, grid: NDArray[np.uint16] | None = None) -> Any:
        """One sample: the row that `batch` makes with the key of `rng` (see `key_of`).

        `source` is a path, the bytes of an image file, an array, a PIL image or a uint8 tensor (channels first).
        """
        return owned(self.run(source, key_of(rng), grid), source)

    def run(self, sample: Any, key: int, grid: NDArray[np.uint16] | None = None) -> Any:
        """As `sample`, with the key itself; the result may share memory with what was given."""
        first = self.steps[0]
        if grid is None or not isinstance(first.step, (Window, ResizeShortest)):
            return self.apply(first_form(self.steps, sample), key)
        return _applied(self.steps[1:], first.step.apply(sample, first.key(key), grid), key)

    def apply(self, sample: Any, key: int) -> Any:
        """The steps on a sample that is under way: a picture, or a tensor after ToTensor or Normalize."""
        return _applied(self.steps, sample, key)

    def batch(
        self,
        sources: Sequence[images.Source],
        keys: Keys | None,
        empty: Allocator,
        grids: Grids = None,
        threads: int = 1,
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
        BatchPlan.of(self.steps).write(BatchJob(sources, keys, grids, threads), out)
        return out


def _applied(steps: Sequence[PlannedStep], sample: Any, key: int) -> Any:
    return run(steps, sample, [placed.key(key) for placed in steps])


def compiled(placed: Iterable[PlannedStep]) -> ImagePlan:
    """The plan of these steps; ArgumentError where one comes after the picture has ended as numbers."""
    steps = fused(placed) or (PlannedStep(Identity(), (), "Compose"),)
    return ImagePlan(steps, followed(steps, ImageSpec()))


def followed(steps: Iterable[PlannedStep], form: ImageSpec | None) -> ImageSpec | None:
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
