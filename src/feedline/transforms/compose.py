"""Transforms made of transforms."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from feedline.core.rng import derive
from feedline.errors import ArgumentError
from feedline.transforms import _arguments
from feedline.transforms._arguments import settle
from feedline.transforms._random import Draws
from feedline.transforms.base import Transform
from feedline.transforms.foreign import Foreign
from feedline.transforms.plan import ImagePlan, followed
from feedline.transforms.steps import ImageSpec, Path, PlannedStep, Step

Part = Transform | Callable[..., Any]


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Compose(Transform):
    """Transforms one after the other; neighbors that the native kernels do at once become one call.

    Each draws from a key of its own, derived from the sample's and its place; so one that is appended changes nothing
    before it. (A flip right after RandomResizedCrop takes the next number of the crop's key.) Other callables may be
    among them: they get a PIL image, or the tensor after ToTensor or Normalize, and may give either or an array.
    """

    transforms: tuple[Transform, ...]

    def __init__(self, transforms: Sequence[Part]) -> None:
        settle(self, transforms=_parts(self, transforms))
        _ = self.plan  # an order that cannot work is refused here

    def placed(self, path: Path) -> tuple[PlannedStep, ...]:
        return tuple(step for place, part in enumerate(self.transforms) for step in part.placed((*path, place)))

    def __repr__(self) -> str:
        return _listed(self, "")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class RandomApply(Transform):
    """All of the transforms with probability `p`, else none."""

    transforms: tuple[Transform, ...]
    p: float

    def __init__(self, transforms: Sequence[Part] | Transform, p: float = 0.5) -> None:
        listed = [transforms] if isinstance(transforms, Transform) else transforms
        settle(self, transforms=_parts(self, listed), p=_arguments.probability(self, "p", p))
        _ = self.plan

    def step(self) -> Step:
        return ApplyWithProbability(Compose(self.transforms).plan, self.p)

    def __repr__(self) -> str:
        return _listed(self, f", p={self.p}")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class RandomChoice(Transform):
    """One of the transforms; `p` weighs them, equally by default."""

    transforms: tuple[Transform, ...]
    p: tuple[float, ...] | None

    def __init__(self, transforms: Sequence[Part], p: Sequence[float] | None = None) -> None:
        settle(self, transforms=_parts(self, transforms))
        if not self.transforms:
            raise _arguments.refusal(self, "transforms", transforms, "there must be one to choose")
        settle(self, p=None if p is None else _arguments.weights(self, "p", p, len(self.transforms)))
        _ = self.plan

    def step(self) -> Step:
        return OneOf(tuple(part.plan for part in self.transforms), self.p or (1.0,) * len(self.transforms))

    def __repr__(self) -> str:
        return _listed(self, "" if self.p is None else f", p={self.p}")


@dataclass(frozen=True, slots=True)
class ApplyWithProbability:
    """A plan that is carried out if the key says so."""

    plan: ImagePlan
    p: float

    takes_numbers: ClassVar[bool] = True
    reads: ClassVar[bool] = False
    draws: ClassVar[bool] = True

    def apply(self, sample: Any, key: int) -> Any:
        return self.plan.apply(sample, derive(key, "applied")) if Draws(key).unit() < self.p else sample

    def follow(self, form: ImageSpec | None) -> ImageSpec | None:
        return form if followed(self.plan.steps, form) == form else None


@dataclass(frozen=True, slots=True)
class OneOf:
    """The plan that the key chooses."""

    plans: tuple[ImagePlan, ...]
    weights: tuple[float, ...]

    takes_numbers: ClassVar[bool] = True
    reads: ClassVar[bool] = False
    draws: ClassVar[bool] = True

    def apply(self, sample: Any, key: int) -> Any:
        return self.plans[Draws(key).weighted(self.weights)].apply(sample, derive(key, "chosen"))

    def follow(self, form: ImageSpec | None) -> ImageSpec | None:
        forms = {followed(plan.steps, form) for plan in self.plans}
        return forms.pop() if len(forms) == 1 else None


def _parts(owner: Transform, transforms: Iterable[Any]) -> tuple[Transform, ...]:
    if isinstance(transforms, Transform) or not isinstance(transforms, Iterable):
        raise _arguments.refusal(owner, "transforms", transforms, "give a list of transforms")
    found = tuple(transforms)
    for place, part in enumerate(found):
        if isinstance(part, type) or not callable(part):
            name = type(owner).__name__
            raise ArgumentError(f"{name}: transforms[{place}] is {part!r}; give transforms, or other callables")
    return tuple(part if isinstance(part, Transform) else Foreign(part) for part in found)


def _listed(owner: RandomApply | RandomChoice | Compose, more: str) -> str:
    """The pipeline, a line for each transform; as it may be typed again."""
    lines = "".join(f"\n{textwrap.indent(repr(part), '    ')}," for part in owner.transforms)
    return f"{type(owner).__name__}([{lines}\n]{more})" if lines else f"{type(owner).__name__}([]{more})"
