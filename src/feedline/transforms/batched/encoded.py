"""`DecodeOnDevice`: images that are decoded where their batch is delivered."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import images
from feedline.core.devices import is_for_device
from feedline.core.rng import torch_keys
from feedline.core.tensors import Allocator, allocate_tensor, numpy_view
from feedline.errors import ArgumentError
from feedline.images.device_decoders import decode_there
from feedline.transforms.base import Transform
from feedline.transforms.batch import Grids
from feedline.transforms.batched.operators import ImageRows, apply_steps, check_steps, stacked
from feedline.transforms.native_steps import Window
from feedline.transforms.plan import ImagePlan
from feedline.transforms.steps import Keys, PlannedStep
from feedline.transforms.steps import Path as StepPath


class EncodedImages:
    """The images of a batch, encoded, in one buffer.

    `data` is uint8 with all files, `stops` the end of each. `to(device)` gives the batch that the plan makes of them.
    """

    def __init__(self, data: torch.Tensor, stops: NDArray[np.int64], plan: ImagePlan, keys: Keys) -> None:
        self.data, self.stops, self.plan, self.keys = data, stops, plan, keys

    @property
    def host_nbytes(self) -> int:
        """Bytes of the files."""
        return self.data.nbytes

    def __len__(self) -> int:
        return len(self.stops)

    def to(self, device: Any) -> torch.Tensor:
        """Decode and transform on the device.

        ImageError carries the row of an unreadable file.
        """
        starts = [0, *self.stops[:-1].tolist()]
        files = [self.data[start:stop] for start, stop in zip(starts, self.stops.tolist(), strict=True)]
        if uses_native(torch.device(device)):
            sources = [file.numpy() for file in files]
            return ImagePlan.batch(self.plan, sources, self.keys, allocate_tensor, threads=torch.get_num_threads())
        levels = decode_there(files, torch.device(device))
        done = stacked(apply_steps(self.plan.steps, ImageRows(levels, is_owned=True), self.keys), "DecodeOnDevice")
        is_levels = self.plan.spec is not None and not self.plan.spec.converted
        return done.permute(0, 2, 3, 1).contiguous() if is_levels else done


def uses_native(device: torch.device) -> bool:
    """True on the CPU, where one native call does all steps."""
    return device.type == "cpu"


@dataclass(frozen=True, slots=True)
class EncodingPlan(ImagePlan):
    """A plan whose batches stay encoded on their way to a device."""

    @property
    def supports_threads(self) -> bool:
        return False

    def batch(
        self,
        sources: Sequence[images.Source],
        keys: Keys | None,
        allocate: Allocator,
        grids: Grids = None,
        threads: int = 1,
    ) -> Any:
        """The encoded images.

        The batch itself if it goes to no device, or if sources are pixels already.
        """
        if not is_for_device() or any(_is_pixels(source) for source in sources):
            return ImagePlan.batch(self, sources, keys, allocate, grids, threads)
        _check_orientation(self.steps)
        files = [_bytes_of(source, row) for row, source in enumerate(sources)]
        stops = np.cumsum([len(file) for file in files], dtype=np.int64)
        data = allocate((int(stops[-1]) if len(stops) else 0,), torch.uint8)
        np.concatenate(files, out=numpy_view(data))
        return EncodedImages(data, stops, self, torch_keys(len(sources)) if keys is None else keys)


def _is_pixels(source: Any) -> bool:
    return isinstance(source, np.ndarray) and source.ndim == 3


def _bytes_of(source: Any, row: int) -> NDArray[np.uint8]:
    """The file, after a look at its header.

    So a worker finds files that are no images, and `on_error` applies.
    """
    content = Path(source).read_bytes() if isinstance(source, (str, os.PathLike)) else source
    try:
        images.probe(source if isinstance(source, str) else content)
    except images.ImageError as error:
        error.row = row
        raise
    return np.frombuffer(content, np.uint8)


def _check_orientation(steps: Sequence[PlannedStep]) -> None:
    if any(isinstance(each.step, Window) and each.step.recipe.apply_exif_orientation for each in steps):
        raise ArgumentError("DecodeOnDevice cannot turn images upright: leave out apply_exif_orientation")


@dataclass(frozen=True, slots=True, init=False)
class DecodeOnDevice(Transform):
    """A transform whose images are decoded on the device of the loader.

    For the `transform` of a dataset of encoded images. With `DataLoader(device=)`, workers send the files of a batch in
    one buffer; decoding and transform follow on the device, by nvImageCodec or torchvision where one is installed. A
    file that they refuse is decoded on the CPU, and counted in `loader.stats()`. Without a device, or for single
    samples, nothing differs from `transform` itself. Each sample draws the same numbers in all cases.

    A file whose header cannot be read follows `on_error`; damage behind it is an error at delivery.
    """

    transform: Transform

    def __init__(self, transform: Transform) -> None:
        if not isinstance(transform, Transform):
            raise ArgumentError(f"DecodeOnDevice({transform!r}): give a transform of feedline")
        check_steps(transform.plan.steps)
        if not transform.plan.batchable:
            raise ArgumentError(f"DecodeOnDevice({transform!r}): crop or resize to a fixed size")
        object.__setattr__(self, "transform", transform)

    @property
    def plan(self) -> ImagePlan:
        """The plan of the transform, with encoded batches."""
        inner = self.transform.plan
        return EncodingPlan(inner.steps, inner.spec)

    def place(self, path: StepPath) -> tuple[PlannedStep, ...]:
        """Steps within another pipeline, which decodes on the CPU."""
        return self.transform.place(path)
