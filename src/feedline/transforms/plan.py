"""Compiled pipelines: single samples and whole batches with the same bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from feedline import images
from feedline.core.dataset import Keys
from feedline.core.rng import SampleRng, torch_keys
from feedline.core.tensors import Allocator
from feedline.errors import ArgumentError
from feedline.images.decode import Grid
from feedline.transforms.batch import BatchGrids, BatchJob, BatchPlan
from feedline.transforms.inputs import in_own_memory
from feedline.transforms.steps import Identity, ImageSpec, PlannedStep, fuse_steps, infer_spec, run, run_source

Rng = SampleRng | np.random.Generator


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """Steps of a pipeline, with neighbors fused; frozen, picklable and thread-safe.

    Samples are uint8 arrays (height, width, channels) until a step converts them to tensors. `spec` describes the
    samples made from RGB images; it is None after a step whose result is unknown.
    """

    steps: tuple[PlannedStep, ...]
    spec: ImageSpec | None

    @property
    def batchable(self) -> bool:
        """True if all samples have one known shape, which `batch` requires."""
        return self.spec is not None and self.spec.shape is not None

    @property
    def layout(self) -> str:
        """Layout of samples that are tensors; the rest are arrays in "HWC"."""
        for planned in reversed(self.steps):
            spec = planned.step.infer(ImageSpec())
            if spec is None or spec.converted:
                return "CHW" if spec is None else spec.layout  # tensors of foreign callables have channels first
        return "HWC"

    @property
    def is_random(self) -> bool:
        """True if samples depend on their keys."""
        return any(planned.step.is_random for planned in self.steps)

    @property
    def supports_threads(self) -> bool:
        """True if `batch` is one native call, which several threads can share."""
        return self.batchable and BatchPlan.of(self.steps).is_one_call

    def sample(self, source: Any, rng: Rng | None = None, grid: Grid | None = None) -> Any:
        """Make one sample, equal to the row that `batch` makes of it.

        The key is `key_of(rng)`. `source` is a path, the bytes of an image file, an array, a PIL image or a uint8
        tensor (channels first). The result has its own memory.
        """
        return in_own_memory(self.run(source, key_of(rng), grid), source)

    def run(self, source: Any, key: int, grid: Grid | None = None) -> Any:
        """Make one sample for a key; it may share memory with `source`."""
        return run_source(self.steps, source, self._keys(key), grid)

    def apply(self, sample: Any, key: int) -> Any:
        """Apply the steps to a sample in the middle of another pipeline."""
        return run(self.steps, sample, self._keys(key))

    def batch(
        self,
        sources: Sequence[images.ImageSource],
        keys: Keys | None,
        allocate: Allocator,
        grids: BatchGrids = None,
        threads: int = 1,
    ) -> torch.Tensor:
        """Make all samples as one tensor: `sample` of each, collated.

        Its memory is `allocate(shape, dtype)`. `keys` has one uint64 per sample; None draws them from torch's global
        generator. Up to `threads` threads decode. Raises ImageError for the first sample that fails, with its position
        in `row`, and ArgumentError if the plan is not `batchable`.
        """
        spec = self.spec
        if spec is None or spec.shape is None:
            raise ArgumentError(
                "samples whose shape is not known beforehand cannot be made as one batch: make them one by one with"
                " sample(), or crop or resize them to a fixed size"
            )
        out = allocate((len(sources), *spec.shape), spec.dtype)
        keys = torch_keys(len(sources)) if keys is None else keys
        BatchPlan.of(self.steps).write(BatchJob(sources, keys, grids, threads), out)
        return out

    def _keys(self, key: int) -> list[int]:
        return [planned.key(key) for planned in self.steps]


def compile_steps(steps: Iterable[PlannedStep]) -> ImagePlan:
    """Fuse the steps into a plan; ArgumentError if their order is invalid."""
    fused = fuse_steps(steps) or (PlannedStep(Identity(), (), "Compose"),)
    return ImagePlan(fused, infer_spec(fused, ImageSpec()))


def key_of(rng: Rng | None) -> int:
    """Key of a sample, taken from a random number generator.

    A `SampleRng` gives its own key: passed twice, it gives the same image twice. A NumPy generator gives its next
    64 bits; None takes them from torch. Two views of one image therefore need a generator, such as `rng.generator`.
    """
    if rng is None:
        return int(torch_keys(1)[0])
    if isinstance(rng, SampleRng):
        return rng.key
    if isinstance(rng, np.random.Generator):
        return int(rng.integers(0, 1 << 64, dtype=np.uint64))
    raise ArgumentError(f"rng must be a feedline.SampleRng or a numpy.random.Generator, not a {type(rng).__name__}")
