"""`DecodeOnDevice`: decoding of images on the device of their batch."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import images
from feedline.core.dataset import Keys
from feedline.core.devices import Device, for_device, is_for_device, synchronize, uploaded, usable_device
from feedline.core.rng import torch_keys
from feedline.core.tensors import Allocator, allocate_tensor, numpy_view
from feedline.errors import ArgumentError
from feedline.images import native
from feedline.images.device_decoders import count_in_workers, decode_on_device
from feedline.transforms._arguments import check_probability
from feedline.transforms.base import Transform
from feedline.transforms.batch import BatchGrids
from feedline.transforms.batched.operators import ImageRows, apply_steps, check_steps, stacked
from feedline.transforms.native_steps import Window
from feedline.transforms.plan import ImagePlan
from feedline.transforms.steps import PlannedStep, StepPath


class EncodedImages:
    """The images of a batch, encoded, in one buffer.

    `data` is uint8 with the files of `rows`, `stops` the end of each. `ready` holds the other rows, which a worker has
    decoded, or None; `fallbacks` of these because a device might refuse them. `to(device)` returns the batch that the
    plan makes from them, and waits for the decoder.
    """

    decodes_on_device = True
    """A `Delivery` calls `to` in a thread, while the loop computes."""

    def __init__(
        self,
        data: torch.Tensor,
        stops: NDArray[np.int64],
        plan: ImagePlan,
        keys: Keys,
        rows: NDArray[np.int64],
        ready: torch.Tensor | None = None,
        fallbacks: int = 0,
    ) -> None:
        self.data, self.stops, self.plan, self.keys = data, stops, plan, keys
        self.rows, self.ready, self.fallbacks = rows, ready, fallbacks

    @property
    def host_nbytes(self) -> int:
        """Bytes that are copied to the device."""
        return self.data.nbytes + (0 if self.ready is None else self.ready.nbytes)

    def __len__(self) -> int:
        return len(self.keys)

    def to(self, device: Any) -> torch.Tensor:
        """Decode and transform on the device.

        Raises ImageError with the `row` of an unreadable file.
        """
        done: Any
        try:
            done = self._decode(torch.device(device))
        except images.ImageError as error:
            error.row = int(self.rows[error.row or 0])
            raise
        if self.ready is None:
            return cast("torch.Tensor", done)
        out = torch.empty((len(self), *self.ready.shape[1:]), dtype=self.ready.dtype, device=device)
        others = np.setdiff1d(np.arange(len(self)), self.rows)
        for at, part in ((self.rows, done), (others, self.ready.to(device))):
            if part is not None:
                out.index_copy_(0, uploaded(at, out.device), part)
        return out

    def _decode(self, device: torch.device) -> Any:
        """Decode and transform the images of `rows`; None without any."""
        if not uses_native(device):
            count_in_workers(len(self) - len(self.rows), self.fallbacks)
        if not len(self.rows) and self.ready is not None:
            return None
        starts = [0, *self.stops[:-1].tolist()]
        files = [self.data[start:stop] for start, stop in zip(starts, self.stops.tolist(), strict=True)]
        keys = self.keys[self.rows]
        if uses_native(device):
            sources = [file.numpy() for file in files]
            return ImagePlan.batch(self.plan, sources, keys, allocate_tensor, threads=torch.get_num_threads())
        levels = decode_on_device(files, device, apply_exif_orientation=_turns_upright(self.plan.steps))
        done = stacked(apply_steps(self.plan.steps, ImageRows(levels, is_owned=True), keys), "DecodeOnDevice")
        is_levels = self.plan.spec is not None and not self.plan.spec.converted
        return done.permute(0, 2, 3, 1).contiguous() if is_levels else done


def uses_native(device: torch.device) -> bool:
    """True on the CPU, where one native call does all steps."""
    return device.type == "cpu"


@dataclass(frozen=True, slots=True)
class EncodingPlan(ImagePlan):
    """A plan whose batches stay encoded on their way to a device."""

    cpu_share: float = 0.0

    @property
    def supports_threads(self) -> bool:
        return False

    def batch(
        self,
        sources: Sequence[images.ImageSource],
        keys: Keys | None,
        allocate: Allocator,
        grids: BatchGrids = None,
        threads: int = 1,
    ) -> Any:
        """Collect the files into `EncodedImages` if the batch goes to a device.

        Otherwise, or if a source is an array of pixels, returns the decoded and transformed batch.
        """
        if not is_for_device() or any(_is_pixels(source) for source in sources):
            return ImagePlan.batch(self, sources, keys, allocate, grids, threads)
        files = [_bytes_of(source, row) for row, source in enumerate(sources)]
        keys = torch_keys(len(sources)) if keys is None else keys
        doubtful = np.array([not _is_sound(file) for file in files], np.bool_)
        here = doubtful | np.array([is_decoded_by_worker(file, self.cpu_share) for file in files], np.bool_)
        ready = self._decode_in_worker(files, np.flatnonzero(here), keys, allocate, threads) if here.any() else None
        rows = np.flatnonzero(~here)
        stops = np.cumsum([len(files[row]) for row in rows], dtype=np.int64)
        data = allocate((int(stops[-1]) if len(stops) else 0,), torch.uint8)
        if len(rows):
            np.concatenate([files[row] for row in rows], out=numpy_view(data))
        return EncodedImages(data, stops, self, keys, rows, ready, int(doubtful.sum()))

    def _decode_in_worker(
        self, files: list[NDArray[np.uint8]], rows: NDArray[np.int64], keys: Keys, allocate: Allocator, threads: int
    ) -> torch.Tensor:
        try:
            return ImagePlan.batch(self, [files[row] for row in rows], keys[rows], allocate, None, threads)
        except images.ImageError as error:
            row = error.row or 0
            error.row = int(rows[row])
            error.args = (str(error).replace(f"in row {row} ", f"in row {error.row} ", 1),)
            raise


def _is_sound(file: NDArray[np.uint8]) -> bool:
    """True for JPEGs that decode without an error, by their markers.

    Workers decode all other files: a device may refuse these, and `on_error` applies to damaged ones.
    """
    return native.native is None or native.native.image_intact(file) is not None


def is_decoded_by_worker(file: NDArray[np.uint8], share: float) -> bool:
    """True for a `share` of all files, which workers decode.

    Depends on the content only, so an image is always decoded by the same decoder.
    """
    return share > 0 and zlib.crc32(file[-_TAIL:].data) < share * 2**32


_TAIL = 4096
"""Number of last bytes that decide about the decoder of a file: many files have equal headers."""


def _is_pixels(source: Any) -> bool:
    return isinstance(source, np.ndarray) and source.ndim == 3


def _bytes_of(source: Any, row: int) -> NDArray[np.uint8]:
    """Content of an image file whose header was checked.

    Workers thus find files that are not images, and `on_error` applies.
    """
    content = Path(source).read_bytes() if isinstance(source, (str, os.PathLike)) else source
    try:
        images.probe(source if isinstance(source, str) else content)
    except images.ImageError as error:
        error.row = row
        raise
    return np.frombuffer(content, np.uint8)


def _turns_upright(steps: Sequence[PlannedStep]) -> bool:
    return any(isinstance(each.step, Window) and each.step.recipe.apply_exif_orientation for each in steps)


@dataclass(frozen=True, slots=True, init=False)
class DecodeOnDevice(Transform):
    """A transform whose images are decoded on the device of the loader.

    For the `transform` of a dataset of encoded images. With `DataLoader(device=)`, workers send the files of a batch in
    one buffer; decoding and transform follow on the device, by nvImageCodec or torchvision where one is installed. A
    file that they refuse is decoded on the CPU, and counted in `loader.stats()`. Without a device, and for single
    samples, it equals `transform` itself. Each sample draws the same numbers in all cases.

    Workers decode every file that is not a sound JPEG, so `on_error` applies to files that are damaged or have an
    unreadable header.

    `cpu_share` is the part of the images that workers decode, from 0 to 1, for machines whose CPUs would otherwise be
    idle. The content of an image decides which of the two decoders it gets, in all epochs and after a resume. The share
    changes neither order nor batches nor random numbers. `measured` finds the share.
    """

    transform: Transform
    cpu_share: float

    def __init__(self, transform: Transform, cpu_share: float = 0.0) -> None:
        if not isinstance(transform, Transform):
            raise ArgumentError(f"DecodeOnDevice({transform!r}): give a transform of feedline")
        check_steps(transform.plan.steps)
        if not transform.plan.batchable:
            raise ArgumentError(f"DecodeOnDevice({transform!r}): crop or resize to a fixed size")
        object.__setattr__(self, "transform", transform)
        object.__setattr__(self, "cpu_share", check_probability(self, "cpu_share", cpu_share))

    @classmethod
    def measured(
        cls, transform: Transform, files: Sequence[images.ImageSource], device: Device = "cuda", num_workers: int = 1
    ) -> DecodeOnDevice:
        """Create the transform with a measured `cpu_share`.

        With this share, `num_workers` CPUs and the device need equal times. `files` are some tens of encoded images,
        typical of the dataset; CPU and device both decode all of them. Measure once, and pass the `cpu_share` of the
        result to later runs: with another share, some images get another decoder.
        """
        there = cls(transform)
        if not len(files) or num_workers < 1:
            raise ArgumentError("DecodeOnDevice.measured needs encoded images, and at least 1 worker")
        keys = np.arange(len(files), dtype=np.uint64)
        plan, wanted = there.plan, usable_device(device)
        with for_device(active=True):
            batch = plan.batch(files, keys, allocate_tensor)

        def decode_on_device_too() -> None:
            batch.to(wanted)
            synchronize(wanted)

        here_s = _fastest(lambda: ImagePlan.batch(plan, files, keys, allocate_tensor)) / num_workers
        there_s = _fastest(decode_on_device_too)
        return cls(transform, round(there_s / (here_s + there_s), 3))

    @property
    def plan(self) -> ImagePlan:
        """Plan of the transform, with encoded batches."""
        inner = self.transform.plan
        return EncodingPlan(inner.steps, inner.spec, self.cpu_share)

    def place(self, path: StepPath) -> tuple[PlannedStep, ...]:
        """Steps within another pipeline, which decodes on the CPU."""
        return self.transform.place(path)


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of three runs, after one warm-up run."""
    run()
    times = []
    for _ in range(3):
        started = perf_counter()
        run()
        times.append(perf_counter() - started)
    return min(times)


def decoded_on_device(transform: Any) -> Any:
    """Transform, or dict of transforms, for a dataset's `decode="device"`."""
    if isinstance(transform, Mapping):
        return {name: _on_device_if_image(each) for name, each in transform.items()}
    if isinstance(transform, DecodeOnDevice):
        return transform
    if not isinstance(transform, Transform):
        raise ArgumentError(
            f'decode="device" needs a transform of feedline that makes images of one size, not {transform!r}'
        )
    return DecodeOnDevice(transform)


def _on_device_if_image(transform: Any) -> Any:
    return decoded_on_device(transform) if isinstance(transform, Transform) else transform
