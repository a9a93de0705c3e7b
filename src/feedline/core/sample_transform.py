"""Transforms of samples, which may take the sample's random generator."""

from __future__ import annotations

from typing import Any

from feedline.core.dataset import TransformFunction
from feedline.core.rng import SampleRng, sample_rng, takes_rng
from feedline.core.stage_parts import TRANSFORMING
from feedline.errors import ArgumentError


class SampleTransform:
    """A transform, called with the sample's generator if it takes one.

    Without a transform, samples are returned unchanged.
    """

    def __init__(self, transform: TransformFunction | None) -> None:
        if transform is not None and not callable(transform):
            raise ArgumentError(f"transform must be callable, got {type(transform).__name__}")
        self.transform = transform
        self.takes_rng = transform is not None and takes_rng(transform)

    def __call__(self, sample: Any, row: int | None) -> Any:
        """The transformed sample; `row` is its row in a batch, or None."""
        return sample if self.transform is None else self.apply(sample, sample_rng(row) if self.takes_rng else None)

    def apply(self, sample: Any, rng: SampleRng | None) -> Any:
        """The transformed sample, with this generator, which other fields may share."""
        if self.transform is None:
            return sample
        with TRANSFORMING:
            return self.transform(sample, rng) if self.takes_rng else self.transform(sample)

    def with_key(self, sample: Any, key: int) -> Any:
        """The transformed sample, with the generator of this key."""
        return self.apply(sample, SampleRng(key) if self.takes_rng else None)
