"""Steps of a plan, and the table of fusions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from feedline.core.dataset import Keys
from feedline.core.rng import Draws, derive, derive_each
from feedline.errors import ArgumentError
from feedline.images import ImageSource
from feedline.images.decode import Grid
from feedline.transforms.inputs import open_image, pixels

StepPath = tuple[int, ...]
"""Positions on the path from the outermost `Compose` to a step."""


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """Size, channels, dtype and layout of a sample.

    `size` is (height, width); None where the image decides. `dtype` and `layout` are those of the tensor if the sample
    is `converted`, else uint8 and "HWC".
    """

    size: tuple[int, int] | None = None
    channels: int | None = 3
    converted: bool = False
    dtype: torch.dtype = torch.uint8
    layout: str = "HWC"

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Shape of the sample, None if it varies."""
        if self.size is None or self.channels is None:
            return None
        return (*self.size, self.channels) if self.layout == "HWC" else (self.channels, *self.size)


class Step:
    """Operation on one sample; the hooks are documented in `Transform`."""

    __slots__ = ()

    accepts_tensors: ClassVar[bool] = False
    applies_to_batches: ClassVar[bool] = False

    @property
    def is_random(self) -> bool:
        """True if the result depends on `rng`."""
        return True

    def apply(self, image: Any, rng: Draws) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define apply(image, rng)")

    def apply_source(self, source: Any, rng: Draws, grid: Grid | None = None) -> Any:  # noqa: ARG002 - for decoders
        return self.apply(open_image(source) if self.accepts_tensors else pixels(source), rng)

    def apply_batch(
        self,
        sources: Sequence[ImageSource],
        keys: Keys | None,
        out: torch.Tensor,
        grids: Sequence[Grid | None] | None = None,
        threads: int = 1,
    ) -> None:
        raise NotImplementedError(f"{type(self).__name__} has applies_to_batches: it must define apply_batch()")

    def infer(self, spec: ImageSpec | None) -> ImageSpec | None:
        return spec


@dataclass(frozen=True, slots=True)
class Identity(Step):
    """Step that changes nothing; a plan without transforms has this one."""

    accepts_tensors: ClassVar[bool] = True

    @property
    def is_random(self) -> bool:
        return False

    def apply(self, image: Any, rng: Draws) -> Any:  # noqa: ARG002 - not random
        return image


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """Step at its place in a pipeline; `name` is its transform."""

    step: Step
    path: StepPath
    name: str

    def key(self, key: int) -> int:
        """Key of this step for a sample's key; 0 if not random."""
        if not self.step.is_random:
            return 0
        for position in self.path:
            key = derive(key, position)
        return key

    def keys(self, keys: Keys) -> Keys:
        """Keys of this step for many samples; zeros if not random."""
        if not self.step.is_random:
            return np.zeros_like(keys)
        for position in self.path:
            keys = derive_each((), keys, position)
        return keys


def run(steps: Sequence[PlannedStep], sample: Any, keys: Sequence[int]) -> Any:
    """Apply the steps to an image or tensor, each with its key."""
    for planned, key in zip(steps, keys, strict=True):
        step = planned.step
        sample = step.apply(sample if step.accepts_tensors else pixels(sample), Draws(key))
    return sample


def run_source(steps: Sequence[PlannedStep], source: Any, keys: Sequence[int], grid: Grid | None = None) -> Any:
    """Apply the steps to a source that has not been decoded."""
    return run(steps[1:], steps[0].step.apply_source(source, Draws(keys[0]), grid), keys[1:])


def infer_spec(steps: Iterable[PlannedStep], spec: ImageSpec | None) -> ImageSpec | None:
    """Spec of a sample after the steps.

    Raises ArgumentError if a step that takes images follows the conversion to a tensor.
    """
    for planned in steps:
        if spec is not None and spec.converted and not planned.step.accepts_tensors:
            raise ArgumentError(
                f"{planned.name} cannot follow the conversion to a tensor: put it before ToTensor and Normalize"
            )
        spec = planned.step.infer(spec)
    return spec


Fuse = Callable[[PlannedStep, PlannedStep], PlannedStep | None]


FUSIONS: dict[tuple[type[Step], type[Step]], Fuse] = {}
"""Functions that make one step of two neighbors, by the classes of both steps; add one with `register_fusion`."""


def register_fusion(first: type[Step], second: type[Step], fuse: Fuse) -> None:
    """Let plans replace neighboring `first` and `second` by one step.

    `fuse(before, after)` takes both planned steps and returns one, or None to keep them separate. The fused step must
    give the pixels of the two for every key: keep the `path` of the step whose random numbers it draws. Classes match
    exactly; subclasses need rows of their own. Register before the first pipeline is built, in the module that
    defines the class, so that worker processes do the same. Raises ArgumentError if the pair has another function.
    """
    _check_class(first)
    _check_class(second)
    if not callable(fuse):
        raise ArgumentError(f"register_fusion: give a function of the two planned steps, not {fuse!r}")
    if FUSIONS.setdefault((first, second), fuse) is not fuse:
        raise ArgumentError(f"register_fusion: {first.__name__} and {second.__name__} already have a function")


def unregister_fusion(first: type[Step], second: type[Step]) -> None:
    """Let plans run neighboring `first` and `second` one by one again.

    Pixels do not change. Pipelines that were built before keep the fused step. Raises ArgumentError if the pair has no
    function.
    """
    if FUSIONS.pop((first, second), None) is None:
        raise ArgumentError(f"unregister_fusion: {_name(first)} and {_name(second)} have no function")


def _name(step: Any) -> str:
    return str(getattr(step, "__name__", step))


def _check_class(step: Any) -> None:
    if not (isinstance(step, type) and issubclass(step, Step)):
        raise ArgumentError(f"register_fusion: give two classes of transforms or steps, not {step!r}")


def fuse_steps(steps: Iterable[PlannedStep]) -> tuple[PlannedStep, ...]:
    """Fuse neighbors for which `FUSIONS` has a function."""
    fused: list[PlannedStep] = []
    for step in steps:
        joined = _join(fused[-1], step) if fused else None
        if joined is None:
            fused.append(step)
        else:
            fused[-1] = joined
    return tuple(fused)


def _join(before: PlannedStep, after: PlannedStep) -> PlannedStep | None:
    # Exact classes: a subclass may override apply(), which the fused step would not call.
    fuse = FUSIONS.get((type(before.step), type(after.step)))
    return None if fuse is None else fuse(before, after)
