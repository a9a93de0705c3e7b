"""Transforms made of other transforms."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from feedline.core.rng import Draws, derive
from feedline.errors import ArgumentError
from feedline.transforms._arguments import argument_error, check_probability, check_weights, init_frozen
from feedline.transforms.base import Transform
from feedline.transforms.foreign import Foreign
from feedline.transforms.plan import ImagePlan
from feedline.transforms.steps import ImageSpec, PlannedStep, Step, StepPath, infer_spec

AnyTransform = Transform | Callable[..., Any]


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Compose(Transform):
    """Transforms applied in order; neighbors that fuse become one call.

    Each draws from a key of its own, derived from the sample's key and its position. So appending a transform changes
    nothing before it. (A flip right after RandomResizedCrop takes the next number of the crop's key.) Foreign callables
    get a PIL image, or the tensor after ToTensor or Normalize, and may return either or an array.
    """

    transforms: tuple[Transform, ...]

    def __init__(self, transforms: Sequence[AnyTransform]) -> None:
        init_frozen(self, transforms=_check_parts(self, transforms))
        _ = self.plan  # raises for an order that cannot work

    def place(self, path: StepPath) -> tuple[PlannedStep, ...]:
        return tuple(step for at, part in enumerate(self.transforms) for step in part.place((*path, at)))

    def apply(self, image: Any, rng: Draws) -> Any:
        return self.plan.apply(image, rng.key)

    def infer(self, spec: ImageSpec | None) -> ImageSpec | None:
        return infer_spec(self.plan.steps, spec)

    def __repr__(self) -> str:
        return _format(self, "")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class RandomApply(Transform):
    """All of the transforms with probability `p`, else none of them."""

    transforms: tuple[Transform, ...]
    p: float

    def __init__(self, transforms: Sequence[AnyTransform] | Transform, p: float = 0.5) -> None:
        listed = [transforms] if isinstance(transforms, Transform) else transforms
        init_frozen(self, transforms=_check_parts(self, listed), p=check_probability(self, "p", p))
        _ = self.plan

    def lower(self) -> Step:
        return ApplyWithProbability(Compose(self.transforms).plan, self.p)

    def __repr__(self) -> str:
        return _format(self, f", p={self.p}")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class RandomChoice(Transform):
    """One of the transforms, chosen with weights `p`, equally by default."""

    transforms: tuple[Transform, ...]
    p: tuple[float, ...] | None

    accepts_tensors: ClassVar[bool] = True

    def __init__(self, transforms: Sequence[AnyTransform], p: Sequence[float] | None = None) -> None:
        init_frozen(self, transforms=_check_parts(self, transforms))
        if not self.transforms:
            raise argument_error(self, "transforms", transforms, "there must be one to choose")
        init_frozen(self, p=None if p is None else check_weights(self, "p", p, len(self.transforms)))
        _ = self.plan

    def apply(self, image: Any, rng: Draws) -> Any:
        chosen = self.transforms[rng.weighted_index(self.p or (1.0,) * len(self.transforms))]
        return chosen.plan.apply(image, derive(rng.key, "chosen"))

    def infer(self, spec: ImageSpec | None) -> ImageSpec | None:
        specs = {infer_spec(part.plan.steps, spec) for part in self.transforms}
        return specs.pop() if len(specs) == 1 else None

    def __repr__(self) -> str:
        return _format(self, "" if self.p is None else f", p={self.p}")


@dataclass(frozen=True, slots=True)
class ApplyWithProbability(Step):
    """Plan that is applied with probability `p`."""

    plan: ImagePlan
    p: float

    accepts_tensors: ClassVar[bool] = True

    def apply(self, image: Any, rng: Draws) -> Any:
        return self.plan.apply(image, derive(rng.key, "applied")) if rng.unit() < self.p else image

    def infer(self, spec: ImageSpec | None) -> ImageSpec | None:
        return spec if infer_spec(self.plan.steps, spec) == spec else None


def _check_parts(owner: Transform, transforms: Iterable[Any]) -> tuple[Transform, ...]:
    if isinstance(transforms, Transform) or not isinstance(transforms, Iterable):
        raise argument_error(owner, "transforms", transforms, "give a list of transforms")
    parts = tuple(transforms)
    for position, part in enumerate(parts):
        if isinstance(part, type) or not callable(part):
            name = type(owner).__name__
            raise ArgumentError(f"{name}: transforms[{position}] is {part!r}; give transforms, or other callables")
    return tuple(part if isinstance(part, Transform) else Foreign(part) for part in parts)


def _format(owner: RandomApply | RandomChoice | Compose, arguments: str) -> str:
    """Format the pipeline as Python code, with one line per transform."""
    lines = "".join(f"\n{textwrap.indent(repr(part), '    ')}," for part in owner.transforms)
    return f"{type(owner).__name__}([{lines}\n]{arguments})" if lines else f"{type(owner).__name__}([]{arguments})"
