"""Pictures that become samples: straight into a tensor by feedline's own transforms, as PIL images for any other."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from numpy.typing import NDArray

from feedline import images
from feedline.datasets.arrays import Transform
from feedline.datasets.decoding import DAMAGE, undecodable
from feedline.images import ImageError
from feedline.rng import SampleRng, takes_rng
from feedline.rows import Empty
from feedline.transforms import ImagePlan, plan
from feedline.transforms.windows import Window

Grid = NDArray[np.uint16]


class Called:
    """A transform, called with the sample's generator where it wants one; None passes values through."""

    def __init__(self, transform: Transform | None) -> None:
        self.transform = transform
        self.wants_rng = transform is not None and takes_rng(transform)

    def __call__(self, value: Any, rng: SampleRng | None) -> Any:
        if self.transform is None:
            return value
        return self.transform(value, rng) if self.wants_rng else self.transform(value)


class Pictures:
    """How the source of a picture (a path, encoded bytes or ready pixels) becomes a value, and many a batch.

    A transform of feedline's own is one step with decoding; any other gets what `load(source)` gives. With
    `apply_exif_orientation` the transform sees the picture as it is meant to be looked at.
    """

    def __init__(
        self, transform: Transform | None, load: Callable[[Any], Any], *, apply_exif_orientation: bool = False
    ) -> None:
        found = plan(transform)
        self.called = Called(transform)
        self._load = load
        self._oriented = apply_exif_orientation
        self._turns = found is not None and apply_exif_orientation
        if found is not None and apply_exif_orientation:
            found, self._turns = _turning(found)
        self._plan = found

    @property
    def fused(self) -> bool:
        """Whether decoding and transform are one step."""
        return self._plan is not None

    @property
    def batchable(self) -> bool:
        """Whether `batch` can be had."""
        return self._plan is not None and self._plan.batchable

    @property
    def draws(self) -> bool:
        """Whether values depend on the sample's generator."""
        return self.called.wants_rng if self._plan is None else self._plan.draws

    @property
    def splits(self) -> bool:
        """Whether several threads can share the work on a batch."""
        return self._plan is not None and not self._turns and self._plan.splits

    def value(self, source: Any, rng: SampleRng | None, grid: Grid | None = None) -> Any:
        """One picture transformed; `rng` is needed if it `draws`."""
        if self._plan is None:
            return self.called(self._load(source), rng)
        return self._plan.sample(self._turned(source), SampleRng(0) if rng is None else rng, grid)

    def batch(
        self,
        sources: Sequence[Any],
        keys: NDArray[np.uint64] | None,
        empty: Empty,
        grids: Sequence[Grid | None] | None = None,
        threads: int = 1,
    ) -> torch.Tensor:
        """The values as one tensor; an ImageError tells the row of the first picture that cannot be read."""
        assert self._plan is not None
        if keys is None:
            keys = np.zeros(len(sources), np.uint64)
        if self._turns:
            sources, grids = [self._turned(source, row) for row, source in enumerate(sources)], None
        return self._plan.batch(sources, keys, empty, grids, threads)

    def _turned(self, source: Any, row: int | None = None) -> Any:
        if not self._turns:
            return source
        try:
            return images.decode(source, apply_exif_orientation=True)
        except ImageError as error:
            error.row = row
            raise


def _turning(found: ImagePlan) -> tuple[ImagePlan, bool]:
    """The plan with orientation applied where it decodes, and whether pictures must be decoded and turned before it."""
    first = found.steps[0]
    if not isinstance(first.step, Window):
        return found, True
    window = replace(first.step, recipe=replace(first.step.recipe, apply_exif_orientation=True))
    return replace(found, steps=(replace(first, step=window), *found.steps[1:])), False


def rgb(file: Any, *, apply_exif_orientation: bool = False) -> PIL.Image.Image:
    """The picture in a path or file object as torchvision's default loader gives it: Pillow's, converted to RGB."""
    with PIL.Image.open(file) as image:
        upright = PIL.ImageOps.exif_transpose(image) if apply_exif_orientation else image
        return upright.convert("RGB")


def loaded(source: str | memoryview, *, apply_exif_orientation: bool = False) -> PIL.Image.Image:
    """The picture in a file, or in its content, as `rgb` gives it.

    SampleError names one that holds none, OSError one that is not there.
    """
    try:
        file = source if isinstance(source, str) else io.BytesIO(source)
        return rgb(file, apply_exif_orientation=apply_exif_orientation)
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the file, not of what is in it
            raise
        name = source if isinstance(source, str) else "what was fetched"
        raise undecodable(f"{name} cannot be read as a picture", error, "replace or remove it") from error
