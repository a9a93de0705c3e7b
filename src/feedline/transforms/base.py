"""What all transforms are: frozen values that compile to a plan."""

from __future__ import annotations

from typing import Any, ClassVar

from feedline.transforms.inputs import Picture, pixels
from feedline.transforms.plan import ImagePlan, Rng, compiled
from feedline.transforms.steps import ImageSpec, Path, PlannedStep, Step


class Transform:
    """A frozen, picklable value; `transform(image)` or `transform(image, rng)` applies it, from any thread.

    An image is a PIL image, a uint8 array (height, width, 3), a uint8 tensor (3, height, width), a path, or the bytes
    of an image file. The result is a uint8 array, or a tensor after ToTensor or Normalize.
    """

    __slots__ = ("_plan",)
    _plan: ImagePlan

    def __call__(self, image: Any, rng: Rng | None = None) -> Any:
        return self.plan.sample(image, rng)

    @property
    def plan(self) -> ImagePlan:
        """How it is carried out."""
        try:
            return self._plan
        except AttributeError:  # threads that compile at once come to the same
            object.__setattr__(self, "_plan", compiled(self.placed(())))
            return self._plan

    def placed(self, path: Path) -> tuple[PlannedStep, ...]:
        """Its steps, at their places below `path`."""
        return (PlannedStep(self.step(), path, type(self).__name__),)

    def step(self) -> Step:
        """What it does, as one step."""
        raise NotImplementedError


class Pixelwise(Transform):
    """A transform that is its own step, from levels to levels of the same shape."""

    __slots__ = ()
    takes_numbers: ClassVar[bool] = False
    reads: ClassVar[bool] = False

    @property
    def draws(self) -> bool:
        return True

    def step(self) -> Step:
        return self

    def apply(self, sample: Any, key: int) -> Any:
        return self.change(pixels(sample), key)

    def follow(self, form: ImageSpec | None) -> ImageSpec | None:
        return form

    def change(self, picture: Picture, key: int) -> Picture:
        """The changed picture, in memory of its own or the same one; never written to."""
        raise NotImplementedError


def plan(transform: Any) -> ImagePlan | None:
    """How feedline carries out the transform; None for a foreign callable, which gets a PIL image."""
    return transform.plan if isinstance(transform, Transform) else None
