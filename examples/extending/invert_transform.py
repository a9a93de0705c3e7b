"""A transform from outside, with a fusion: two inversions in a row are none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from feedline.transforms import Draws, PlannedStep, Transform, register_fusion


@dataclass(frozen=True)
class Invert(Transform):
    """Replaces each level by 255 minus it, `times` times."""

    times: int = 1
    is_random = False

    def apply(self, image: Any, rng: Draws) -> Any:
        """Gets uint8 levels (height, width, channels), and returns new ones."""
        return np.subtract(255, image, dtype=np.uint8) if self.times % 2 else image


def fuse(before: PlannedStep, after: PlannedStep) -> PlannedStep:
    """One inversion in place of two."""
    assert isinstance(before.step, Invert)
    assert isinstance(after.step, Invert)
    return replace(after, step=Invert(before.step.times + after.step.times))


register_fusion(Invert, Invert, fuse)
