"""Base class of all transforms."""

from __future__ import annotations

from typing import Any

from feedline.core.rng import Draws
from feedline.transforms.plan import ImagePlan, Rng, compile_steps
from feedline.transforms.steps import ImageSpec, PlannedStep, Step, StepPath


class Transform(Step):
    """Base class of transforms, and the protocol for your own.

    `transform(image)` or `transform(image, rng)` applies one, from any thread. The image is a PIL image, a uint8 array
    (height, width, 3), a uint8 tensor (3, height, width), a path, or the bytes of an image file. The result is a uint8
    array, or a tensor after ToTensor or Normalize.

    A transform of your own defines `apply`, and overrides the members whose defaults do not suit it:

    - `apply(image, rng)`: the changed image. `image` is a uint8 array (height, width, channels) with 3 channels (RGB)
      or 1 (gray). It may be memory of the caller: never write to it; return a new array, a view or `image` itself.
      `rng` is a `Draws`; all randomness comes from it, so that a key always gives the same image.
    - `infer(spec)`: the `ImageSpec` after the transform, given that of its input. Default: `spec` itself, for
      transforms that keep size and channels. None if nothing is known. Batches rely on it.
    - `is_random`: False for a transform that ignores `rng`. Default: True.
    - `accepts_tensors`: True for a transform that may follow ToTensor or Normalize. `apply` then gets the sample as the
      previous step returned it: an array, a tensor, or the result of a foreign callable. Default: False.

    Hooks of transforms that decode, or write whole batches in one native call:

    - `lower()`: the step that executes this transform. Default: the transform itself.
    - `apply_source(source, rng, grid)`: `apply` for the first step of a plan, which gets the source before decoding.
      `grid` holds the lengths of a JPEG's restart intervals, if they are known. Default: decode, then `apply`.
    - `apply_batch(sources, keys, out, grids, threads)`: write row i of the tensor `out`, whose shape and dtype are
      inferred, from `sources[i]`: sources for the first step of a plan, uint8 arrays for a step that converts to
      tensors. `keys` is one uint64 per row, None if not `is_random`. An ImageError names the failed row in `row`.
      Used if `applies_to_batches` is True.

    Instances must not change once they have been used, and must pickle, to serve as part of a dataset.
    """

    __slots__ = ("_plan",)
    _plan: ImagePlan

    def __call__(self, image: Any, rng: Rng | None = None) -> Any:
        return self.plan.sample(image, rng)

    @property
    def plan(self) -> ImagePlan:
        """Compiled plan, cached by the transform."""
        try:
            return self._plan
        except AttributeError:
            # No lock: threads that compile at the same time get equal plans. The setter of a frozen class raises.
            object.__setattr__(self, "_plan", compile_steps(self.place(())))
            return self._plan

    def __getstate__(self) -> dict[str, Any]:
        state: Any = object.__getstate__(self)
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        fields = {**(attributes or {}), **(slots or {})}
        fields.pop("_plan", None)  # compiled again when it is needed
        return fields

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)  # a frozen dataclass refuses setattr()

    def place(self, path: StepPath) -> tuple[PlannedStep, ...]:
        """Return the steps of this transform at `path` of a pipeline."""
        return (PlannedStep(self.lower(), path, type(self).__name__),)

    def lower(self) -> Step:
        return self

    def apply(self, image: Any, rng: Draws) -> Any:
        step = self.lower()
        return Step.apply(self, image, rng) if step is self else step.apply(image, rng)

    def infer(self, spec: ImageSpec | None) -> ImageSpec | None:
        step = self.lower()
        return spec if step is self else step.infer(spec)


def plan(transform: Any) -> ImagePlan | None:
    """Plan of a feedline transform; None for a foreign callable."""
    return transform.plan if isinstance(transform, Transform) else None
