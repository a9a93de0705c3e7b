"""Decoding of record bytes into values, and transforms of values and samples.

Images are decoded straight into tensors by feedline's transforms, and into PIL images for others.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from zipfile import BadZipFile

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from numpy.typing import NDArray

from feedline import images
from feedline.core.arguments import function_of
from feedline.core.dataset import TransformFunction
from feedline.core.rng import SampleRng, sample_rng
from feedline.core.sample_transform import SampleTransform
from feedline.core.stage_parts import DECODING, TRANSFORMING
from feedline.core.tensors import Allocator, torch_dtype
from feedline.datasets import array_container
from feedline.errors import ArgumentError, SampleError
from feedline.images.decode import Grid
from feedline.transforms import ImagePlan, plan
from feedline.transforms.native_steps import Window

Encoded = bytes | memoryview


Where = Callable[[], str]
"""Describes a record, or a field of a record, for errors."""


DecodeFunction = Callable[[Any], Any]
"""Converts encoded bytes to a value."""


Decode = str | DecodeFunction
"""A name in `DECODERS`, or a function."""


BAD_DATA = (ValueError, TypeError, LookupError, OSError, ArithmeticError, PIL.Image.DecompressionBombError)
"""Errors by which a user's decoder reports bad data; any other exception is a bug in the decoder."""


DAMAGE = (*BAD_DATA, SyntaxError, RuntimeError, EOFError, struct.error, zlib.error, BadZipFile)
"""Errors by which Pillow and other libraries report bad data."""


_IN_MEMORY = re.compile(r" <_io\.BytesIO object at 0x[0-9a-fA-F]+>")


def split_transform(
    transform: TransformFunction | Mapping[str, TransformFunction] | None, fields: Iterable[str] | None
) -> tuple[Mapping[str, TransformFunction], TransformFunction | None]:
    """Split into transforms by field and a transform of whole samples.

    One of the two is empty. ArgumentError names a key that is not a field.
    """
    if not isinstance(transform, Mapping):
        return {}, transform
    unknown = [name for name in transform if name not in (fields or ())]
    if unknown:
        raise ArgumentError(
            f"transform= names {unknown[0]!r}; known fields of a sample are {', '.join(fields or ()) or 'none'}"
        )
    return transform, None


def check_names(names: Any, argument: str, example: str) -> None:
    """Raise ArgumentError unless `names` is a non-empty collection of strings.

    A bare string would otherwise count as a collection of its letters.
    """
    if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"{argument}={names!r}: give a tuple of names, such as {example}")


class Decoder:
    """Decodes and transforms one field, of single samples or of batches.

    A dataset has a decoder for each field. Subclasses define their kind of source, such as encoded bytes or parsed
    features. They keep no reference to a source.
    """

    step: SampleTransform
    """The transform, which `__call__` applies."""

    @property
    def batchable(self) -> bool:
        """True if `batch` is supported."""
        return False

    @property
    def uses_keys(self) -> bool:
        """True if `batch` depends on keys."""
        return False

    @property
    def supports_threads(self) -> bool:
        """True if several threads can share the work on a batch."""
        return False

    @property
    def is_ours(self) -> bool:
        """True if no user function is involved."""
        return False

    @property
    def copies(self) -> bool:
        """True if a value is only a copy of the bytes."""
        return False

    def __call__(self, source: Any, row: int | None, where: Where) -> Any:
        """The value; SampleError if `where()` cannot be decoded.

        `row` is the row of the sample in a batch that is read at once, or None.
        """
        raise NotImplementedError

    def batch(
        self,
        sources: Sequence[Any],
        keys: NDArray[np.uint64] | None,
        allocate: Allocator,
        where: Callable[[int], str],
        threads: int = 1,
    ) -> torch.Tensor:
        """The values as one tensor; `where(row)` describes an unreadable value.

        `threads` share the work if that is supported.
        """
        raise NotImplementedError


def decoder_of(decode: Decode, transform: TransformFunction | None = None) -> Decoder:
    """The decoder of encoded bytes, which may be memoryviews.

    `decode` is "bytes", "text" (UTF-8), "npy" (a tensor), "image" (RGB, as a PIL image) or a function of the bytes. An
    image and a feedline transform are one step from the encoded bytes.
    """
    if decode == "image" and plan(transform) is not None:
        return ImageDecoder(transform, image_of)
    return ValueDecoder(decode, transform)


class ValueDecoder(Decoder):
    """Calls a function of the source, then the transform.

    Takes the arguments of `decoder_of`.
    """

    def __init__(self, decode: Decode, transform: TransformFunction | None = None, *, kind: str | None = None) -> None:
        self.step = SampleTransform(transform)
        self._decode = function_of("decode", decode, DECODERS)
        name = decode if isinstance(decode, str) else kind
        self._what = name or getattr(decode, "__name__", type(decode).__name__)
        # Libraries under feedline's decoders may raise anything for bad data.
        self._damage: tuple[type[Exception], ...] = BAD_DATA if name is None else (Exception,)

    @property
    def is_ours(self) -> bool:
        return self._decode in DECODERS.values() and self.step.transform is None

    @property
    def copies(self) -> bool:
        return self._decode is bytes and self.step.transform is None

    def __call__(self, source: Any, row: int | None, where: Where) -> Any:
        try:
            with DECODING:
                value = self._decode(source)
        except MemoryError:
            raise
        except self._damage as error:
            raise undecodable_error(f"{where()} cannot be decoded as {self._what}", error, "rewrite it") from error
        return self.step(value, row)


def undecodable_error(what: str, error: Exception, remedy: str) -> SampleError:
    """A SampleError with cause and remedy for undecodable data.

    If the cause has its own remedy, `remedy` is not used.
    """
    if isinstance(error, PIL.Image.DecompressionBombError):
        remedy = "raise PIL.Image.MAX_IMAGE_PIXELS to read such large images"
    reason = _IN_MEMORY.sub("", str(error)).rstrip(".")
    return SampleError(f"{what} ({type(error).__name__}: {reason}); {remedy}, or pass on_error='skip' to the loader")


def text_of(source: Encoded) -> str:
    return str(source, "utf-8")


def npy_of(source: Encoded) -> torch.Tensor:
    """Copy a `.npy` array into a new tensor; never unpickles."""
    array = array_container.array(memoryview(source))
    native = array.dtype.newbyteorder("=")
    if torch_dtype(native) is None:
        raise ValueError(f"torch has no dtype for {array.dtype}")
    return torch.from_numpy(np.array(array, native, order="C"))


def image_of(source: Encoded) -> PIL.Image.Image:
    """Decode an image completely and convert it to RGB."""
    with images.open_image(io.BytesIO(source)) as image:
        return image.convert("RGB")


DECODERS: dict[str, DecodeFunction] = {
    "bytes": bytes,
    "text": text_of,
    "npy": npy_of,
    "image": image_of,
}
"""Decoders by the names that `decode` accepts."""


class ImageDecoder(Decoder):
    """Decodes and transforms images, singly or in batches.

    A source is a path, encoded bytes or decoded pixels. A feedline transform is fused with decoding; any other is
    applied to `load(source)`. With `apply_exif_orientation` the transform sees the upright
    image. The caller of `value` and `decode_batch` must describe an ImageError.
    """

    def __init__(
        self, transform: TransformFunction | None, load: Callable[[Any], Any], *, apply_exif_orientation: bool = False
    ) -> None:
        image_plan = plan(transform)
        self.step = SampleTransform(transform)
        self._load = load
        self._oriented = apply_exif_orientation
        self._turns = image_plan is not None and apply_exif_orientation
        if image_plan is not None and apply_exif_orientation:
            image_plan, self._turns = _add_orientation(image_plan)
        self._plan = image_plan

    @property
    def fused(self) -> bool:
        """True if decoding and transform are one step."""
        return self._plan is not None

    @property
    def batchable(self) -> bool:
        return self._plan is not None and self._plan.batchable

    @property
    def uses_keys(self) -> bool:
        """True if values, or batches, depend on the sample's generator."""
        return self.step.takes_rng if self._plan is None else self._plan.is_random

    @property
    def supports_threads(self) -> bool:
        return self._plan is not None and not self._turns and self._plan.supports_threads

    def __call__(self, source: Any, row: int | None, where: Where) -> Any:
        with naming_images(lambda _: where()):
            return self.value(source, sample_rng(row) if self.uses_keys else None)

    def batch(
        self,
        sources: Sequence[Any],
        keys: NDArray[np.uint64] | None,
        allocate: Allocator,
        where: Callable[[int], str],
        threads: int = 1,
    ) -> torch.Tensor:
        with naming_images(where):
            return self.decode_batch(sources, keys, allocate, threads=threads)

    def value(self, source: Any, rng: SampleRng | None, grid: Grid | None = None) -> Any:
        """Decode and transform one image; `rng` is required if it `uses_keys`."""
        if self._plan is None:
            with DECODING:
                loaded = self._load(source)
            return self.step.apply(loaded, rng)
        with TRANSFORMING:  # the decoder inside counts as decoding
            return self._plan.sample(self._turn(source), SampleRng(0) if rng is None else rng, grid)

    def decode_batch(
        self,
        sources: Sequence[Any],
        keys: NDArray[np.uint64] | None,
        allocate: Allocator,
        grids: Sequence[Grid | None] | None = None,
        threads: int = 1,
    ) -> torch.Tensor:
        """The images as one tensor; ImageError has the first unreadable row."""
        assert self._plan is not None
        if keys is None and not self.uses_keys:
            keys = np.zeros(len(sources), np.uint64)  # without keys, the plan would draw them from torch
        if self._turns:
            sources, grids = [self._turn(source, row) for row, source in enumerate(sources)], None
        with TRANSFORMING:  # as above
            return self._plan.batch(sources, keys, allocate, grids, threads)

    def _turn(self, source: Any, row: int | None = None) -> Any:
        if not self._turns:
            return source
        try:
            return images.decode(source, apply_exif_orientation=True)
        except images.ImageError as error:
            error.row = row
            raise


@contextmanager
def naming_images(where: Callable[[int], str]) -> Iterator[None]:
    """Add the place `where(row)` to image errors of the block."""
    try:
        yield
    except images.ImageError as error:
        raise SampleError(f"{where(error.row or 0)}: {error}") from error


def _add_orientation(image_plan: ImagePlan) -> tuple[ImagePlan, bool]:
    """Add orientation to the plan's decoding step.

    The second result is True if images must instead be decoded and turned before the plan.
    """
    first = image_plan.steps[0]
    if not isinstance(first.step, Window):
        return image_plan, True
    window = replace(first.step, recipe=replace(first.step.recipe, apply_exif_orientation=True))
    return replace(image_plan, steps=(replace(first, step=window), *image_plan.steps[1:])), False


def rgb(file: Any, *, apply_exif_orientation: bool = False) -> PIL.Image.Image:
    """Decode a path or file object with Pillow into RGB.

    The result equals the result of torchvision's default loader.
    """
    with images.open_image(file) as image:
        upright = PIL.ImageOps.exif_transpose(image) if apply_exif_orientation else image
        return upright.convert("RGB")


def loaded(source: str | memoryview, *, apply_exif_orientation: bool = False) -> PIL.Image.Image:
    """Decode an image path or encoded bytes, as `rgb` does.

    SampleError if the content is not a readable image, OSError if the file cannot be read.
    """
    try:
        file = source if isinstance(source, str) else io.BytesIO(source)
        return rgb(file, apply_exif_orientation=apply_exif_orientation)
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the file system, not of the decoder
            raise
        name = source if isinstance(source, str) else "the fetched content"
        raise undecodable_error(f"{name} cannot be read as an image", error, "replace or remove it") from error
