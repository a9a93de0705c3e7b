"""Functions that decode images, with native kernels or Pillow."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.dataset import Keys
from feedline.core.rng import torch_keys
from feedline.core.stage_parts import DECODING, READ_FILES, TRANSFORMING, Part
from feedline.core.tensors import numpy_view
from feedline.errors import ArgumentError
from feedline.images import native, pillow
from feedline.images.errors import ImageError, too_large, unreadable_error
from feedline.images.pillow import Header, ImageSource, is_pixels
from feedline.images.recipe import Recipe

Grid = NDArray[np.uint16]
"""Lengths of a JPEG's restart intervals."""


_FOREIGN, _FILE, _LARGE = 1, 3, 4
"""Reasons why the kernels did not write a row; values of `enum class Verdict` in native/image/status.h."""


Unwritten = tuple[int, int, int, str]
"""Row that the kernels did not write: its position, the verdict, and the verdict's number and text.

Foreign rows are for Pillow; their text, if any, is the reason if Pillow cannot read them either.
"""


_STORAGE = {torch.uint8: ("uint8",), torch.float32: ("float32",), torch.bfloat16: ("int16", "uint16")}


def read_batch(
    sources: Sequence[ImageSource],
    recipe: Recipe,
    out: NDArray[Any],
    keys: Keys | None = None,
    *,
    grids: Sequence[Grid | None] | None = None,
    threads: int = 1,
) -> None:
    """Write row i of `out` from `sources[i]`, without the GIL.

    `out` has shape `(len(sources), *recipe.shape)` and the recipe's dtype (for bfloat16, 16-bit integers that hold its
    bits); each row is contiguous. `keys` has one uint64 per row, which determines the random box and the flip; None
    draws them from torch's generator. `grids[i]` holds the lengths of a JPEG's restart intervals, if they are known.
    `threads` native threads share the rows.

    Raises an error for the first row that cannot be read: ImageError for its content, with the row in `.row`, or the
    OSError of its file. Later rows may have been written.
    """
    _check(len(sources), recipe, out, keys, grids)
    keys = _draw_keys(keys, recipe, len(sources))
    with _part(sources[0] if len(sources) else None):
        _Reader(sources, recipe, out, keys, threads, range(len(sources))).run(grids)


def read_one(source: ImageSource, recipe: Recipe, key: int | None = None, *, grid: Grid | None = None) -> torch.Tensor:
    """Read one image: the row that `read_batch` writes, as a new tensor.

    `source`, `recipe`, `key` and `grid` describe one row. Raises the same errors as `read_batch`.
    """
    row = torch.empty(recipe.shape, dtype=recipe.dtype, device="cpu")
    keys = None if key is None else np.array([key & 0xFFFFFFFFFFFFFFFF], np.uint64)
    reader = _Reader((source,), recipe, numpy_view(row)[None], _draw_keys(keys, recipe, 1), 1, (None,))
    with _part(source):
        reader.run(None if grid is None else (grid,))
    return row


def _part(source: ImageSource | None) -> Part:
    """Part of a batch: pixels are not decoded, but cropped and resized."""
    return TRANSFORMING if source is not None and is_pixels(source) else DECODING


def decode(source: ImageSource, *, apply_exif_orientation: bool = False) -> NDArray[np.uint8]:
    """Decode a whole image to RGB levels, uint8 (height, width, 3).

    `source` is a path, the bytes of a file, or an array of pixels. With `apply_exif_orientation`, the image is turned
    upright. The result equals Pillow's `convert("RGB")`. Arrays of pixels are returned unchanged. ImageError for
    damaged content, the OSError of the file if it cannot be read.
    """
    if is_pixels(source):
        return pillow.check_pixels(source, None)
    with DECODING:
        return _decode_file(source, apply_exif_orientation)


def _decode_file(source: ImageSource, apply_exif_orientation: bool) -> NDArray[np.uint8]:
    if native.native is None:
        return np.array(pillow.pixels(source, None, apply_exif_orientation))  # a copy, since Pillow's are read-only
    jpeg = _read_file(source) if isinstance(source, str | os.PathLike) else source
    header, unwritten = native.native.image_header(jpeg, pillow.pixel_limit())
    if unwritten is None:
        stored = np.empty((header[1], header[0], 3), np.uint8)
        unwritten = native.native.image_decode(jpeg, stored)
        if unwritten is None:
            return _rotate_upright(stored, header[5]) if apply_exif_orientation else stored
    return np.array(_decode_unwritten(unwritten, source, None, apply_exif_orientation))


def _read_file(path: str | os.PathLike[str]) -> bytes:
    pillow.check_regular(path)
    with READ_FILES as part:
        content = Path(path).read_bytes()
        part.count(len(content))
    return content


def _decode_unwritten(unwritten: Unwritten, source: ImageSource, row: int | None, oriented: bool) -> NDArray[np.uint8]:
    """Decode a remaining row with Pillow.

    If Pillow fails, too, the error has the reason of the kernels, if there is one.
    """
    if unwritten[1] != _FOREIGN:
        raise _error(unwritten, source, row)
    try:
        return pillow.pixels(source, row, oriented)
    except ImageError:
        if unwritten[3]:
            raise _error(unwritten, source, row) from None
        raise


def probe(source: ImageSource) -> Header:
    """Read the header of an image, without decoding it.

    `source` is a path, the bytes of a file, or an array of pixels. ImageError for content without a readable header,
    the OSError of the file if it cannot be read.
    """
    if is_pixels(source):
        height, width, components = pillow.check_pixels(source, None).shape
        return Header(width, height, "pixels", components, False, 1)
    if native.native is not None:
        header, unwritten = native.native.image_header(source, 0)
        if unwritten is None:
            return Header(*header)
        if unwritten[1] != _FOREIGN:
            raise _error(unwritten, source, None)
        try:
            return pillow.header(source)
        except ImageError:
            if unwritten[3]:
                raise _error(unwritten, source, None) from None
            raise
    return pillow.header(source)


def _rotate_upright(stored: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Apply an EXIF orientation; values from 5 up also transpose."""
    flipped = stored[:: -1 if orientation in {3, 4, 6, 7} else 1, :: -1 if orientation in {2, 3, 7, 8} else 1]
    return np.ascontiguousarray(flipped.transpose(1, 0, 2) if orientation >= 5 else flipped)


def _draw_keys(keys: Keys | None, recipe: Recipe, count: int) -> Keys | None:
    return torch_keys(count) if keys is None and recipe.is_random else keys


def _check(count: int, recipe: Recipe, out: Any, keys: Any, grids: Any) -> None:
    if not isinstance(out, np.ndarray):
        raise ArgumentError(f"out must be an array of NumPy, not {type(out).__name__}")
    if out.shape != (count, *recipe.shape):
        raise ArgumentError(f"out has shape {out.shape}; {count} rows of this recipe have {(count, *recipe.shape)}")
    if out.dtype.name not in _STORAGE[recipe.dtype] or not out.dtype.isnative:
        needed = " or ".join(_STORAGE[recipe.dtype])
        raise ArgumentError(f"out has dtype {out.dtype}; rows of {recipe.dtype} need {needed}")
    if not out.flags.writeable:
        raise ArgumentError("out is read-only")
    if count and not out[0].flags.c_contiguous:
        raise ArgumentError(f"each row of out must be contiguous; out has strides {out.strides}")
    if keys is not None and (not isinstance(keys, np.ndarray) or keys.shape != (count,) or keys.dtype != np.uint64):
        got = f"{keys.dtype} of shape {keys.shape}" if isinstance(keys, np.ndarray) else f"a {type(keys).__name__}"
        raise ArgumentError(f"keys must be an array of one uint64 for each of {count} sources; got {got}")
    if grids is not None and len(grids) != count:
        raise ArgumentError(f"grids must be one for each of {count} sources, or None; got {len(grids)}")


@dataclass(frozen=True, slots=True)
class _Reader:
    """Arguments of one call; `names` are row numbers for errors."""

    sources: Sequence[ImageSource]
    recipe: Recipe
    out: NDArray[Any]
    keys: Keys | None
    threads: int
    names: Sequence[int | None]

    def run(self, grids: Sequence[Grid | None] | None) -> None:
        for source, row in zip(self.sources, self.names, strict=True):
            if is_pixels(source):
                pillow.check_pixels(source, row)
        plan = native.plan_of(self.recipe)
        if plan is None:
            self._for_each(range(len(self.sources)), self._read_with_pillow)
            return
        if len(self.sources) and isinstance(self.sources[0], str | os.PathLike):
            unwritten = self._read_files(plan, grids)
        else:
            unwritten = self._read(plan, grids)
        if unwritten:
            self._finish(unwritten, plan)

    def _read(self, plan: Any, grids: Sequence[Grid | None] | None) -> list[Unwritten] | None:
        rows: list[Unwritten] | None = plan.read(
            self.sources, self.out, self.keys, grids, pillow.pixel_limit(), self.threads
        )
        return rows

    def _read_files(self, plan: Any, grids: Sequence[Grid | None] | None) -> list[Unwritten] | None:
        """Call `_read`; the reading of files does not count as decoding."""
        native.native.image_reads()
        unwritten = self._read(plan, grids)
        elapsed_ns, nbytes = native.native.image_reads()
        # Threads that share the rows read at the same time as this thread, but count their own time.
        READ_FILES.claim(elapsed_ns, nbytes if self.threads == 1 else 0)
        return unwritten

    def _finish(self, unwritten: list[Unwritten], plan: Any) -> None:
        """Decode the remaining rows with Pillow, up to the first error."""
        last = next((place for place, item in enumerate(unwritten) if item[1] != _FOREIGN), len(unwritten))

        def read(place: int) -> None:
            row = unwritten[place][0]
            pixels = _decode_unwritten(
                unwritten[place], self.sources[row], self.names[row], self.recipe.apply_exif_orientation
            )
            keys = None if self.keys is None else self.keys[row : row + 1]
            left = plan.read((pixels,), self.out[row : row + 1], keys, None, 0, 1)
            if left:  # not enough memory
                raise _error(left[0], self.sources[row], self.names[row])

        # No rows after a failed one: only an earlier row can still have the first error of the batch.
        self._for_each(range(min(last + 1, len(unwritten))), read)

    def _read_with_pillow(self, row: int) -> None:
        key = None if self.keys is None else int(self.keys[row])
        native.write(pillow.levels(self.sources[row], self.names[row], self.recipe, key), self.recipe, self.out[row])

    def _for_each(self, rows: Sequence[int], read: Callable[[int], None]) -> None:
        """Call `read` for all rows; raises the first error in their order."""
        if self.threads <= 1 or len(rows) <= 1:
            for row in rows:
                read(row)
            return
        with ThreadPoolExecutor(min(self.threads, len(rows)), thread_name_prefix="feedline-images") as pool:
            for _ in pool.map(read, rows):
                pass


def _error(unwritten: Unwritten, source: ImageSource, row: int | None) -> Exception:
    _, verdict, number, text = unwritten
    if verdict == _FILE:
        return OSError(number, os.strerror(number), source)
    if verdict == _LARGE:
        return unreadable_error(source, row, *too_large(*divmod(number, 1 << 32), pillow.pixel_limit()))
    return unreadable_error(source, row, text)
