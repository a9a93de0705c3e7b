"""Rows of batches from pictures: natively where that can be, through Pillow where it must."""

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

from feedline.core.rng import torch_keys
from feedline.core.tensors import numpy_view
from feedline.errors import ArgumentError
from feedline.images import native, pillow
from feedline.images.errors import too_large, unreadable
from feedline.images.pillow import Header, Source, is_pixels
from feedline.images.recipe import Recipe

Grid = NDArray[np.uint16]


Keys = NDArray[np.uint64]


_FOREIGN, _FILE, _LARGE = 1, 3, 4
"""Of the kernels' verdicts on a row they did not write, those that mean something here; see native/image/status.h."""


Left = tuple[int, int, int, str]
"""A row that the kernels did not write: its place, the verdict, a number and a text that belong to the verdict."""


_HELD_IN = {torch.uint8: ("uint8",), torch.float32: ("float32",), torch.bfloat16: ("int16", "uint16")}


def read_batch(
    sources: Sequence[Source],
    recipe: Recipe,
    out: NDArray[Any],
    keys: Keys | None = None,
    *,
    grids: Sequence[Grid | None] | None = None,
    threads: int = 1,
) -> None:
    """Write row i of `out` from `sources[i]`, on at most `threads` threads, holding no lock of the interpreter.

    `out` has shape `(len(sources), *recipe.shape)` and the recipe's dtype (for bfloat16, 16-bit integers that hold
    its bits); each row is one piece of memory. `keys` are 64 bits per row that decide the random box and the flip;
    None draws them from torch's generator. `grids[i]` are the lengths of a JPEG's restart intervals, where known.

    Raises for the first row that cannot be read, which `.row` names (rows after it may have been written): ImageError
    for its content, or the OSError of its file.
    """
    _check(len(sources), recipe, out, keys, grids)
    _Reader(sources, recipe, out, _drawn(keys, recipe, len(sources)), threads, range(len(sources))).run(grids)


def read_one(source: Source, recipe: Recipe, key: int | None = None, *, grid: Grid | None = None) -> torch.Tensor:
    """The row that `read_batch` writes from this source with this key, as a tensor of its own."""
    row = torch.empty(recipe.shape, dtype=recipe.dtype)
    keys = None if key is None else np.array([key & 0xFFFFFFFFFFFFFFFF], np.uint64)
    reader = _Reader((source,), recipe, numpy_view(row)[None], _drawn(keys, recipe, 1), 1, (None,))
    reader.run(None if grid is None else (grid,))
    return row


def decode(source: Source, *, apply_exif_orientation: bool = False) -> NDArray[np.uint8]:
    """The whole picture, (height, width, 3) RGB, as Pillow's `convert("RGB")` gives it; ready pixels as they are."""
    if is_pixels(source):
        return np.asarray(source)
    if native.native is None:
        return pillow.pixels(source, None, apply_exif_orientation)
    jpeg = Path(source).read_bytes() if isinstance(source, str | os.PathLike) else source
    header, left = native.native.image_header(jpeg, pillow.pixel_limit())
    if left is None:
        stored = np.empty((header[1], header[0], 3), np.uint8)
        left = native.native.image_decode(jpeg, stored)
        if left is None:
            return _upright(stored, header[5]) if apply_exif_orientation else stored
    if left[1] != _FOREIGN:
        raise _error(left, source, None)
    return pillow.pixels(source, None, apply_exif_orientation)


def probe(source: Source) -> Header:
    """What the header tells; nothing is decoded."""
    if is_pixels(source):
        height, width, components = np.asarray(source).shape
        return Header(width, height, "pixels", components, False, 1)
    if native.native is not None:
        found, left = native.native.image_header(source, 0)
        if left is None:
            return Header(*found)
        if left[1] != _FOREIGN:
            raise _error(left, source, None)
    return pillow.header(source)


def _upright(stored: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """The picture as it is meant to be looked at, by its EXIF orientation."""
    turned = stored[:: -1 if orientation in {3, 4, 6, 7} else 1, :: -1 if orientation in {2, 3, 7, 8} else 1]
    return np.ascontiguousarray(turned.transpose(1, 0, 2) if orientation >= 5 else turned)


def _drawn(keys: Keys | None, recipe: Recipe, count: int) -> Keys | None:
    return torch_keys(count) if keys is None and recipe.draws else keys


def _check(count: int, recipe: Recipe, out: NDArray[Any], keys: Keys | None, grids: Any) -> None:
    if out.shape != (count, *recipe.shape):
        raise ArgumentError(f"out has shape {out.shape}; {count} rows of this recipe have {(count, *recipe.shape)}")
    if out.dtype.name not in _HELD_IN[recipe.dtype]:
        needed = " or ".join(_HELD_IN[recipe.dtype])
        raise ArgumentError(f"out has dtype {out.dtype}; rows of {recipe.dtype} need {needed}")
    if not out.flags.writeable:
        raise ArgumentError("out is read-only")
    if count and not out[0].flags.c_contiguous:
        raise ArgumentError(f"each row of out must be one piece of memory; it has strides {out.strides}")
    if keys is not None and (keys.shape != (count,) or keys.dtype != np.uint64):
        raise ArgumentError(f"keys are one uint64 for each of {count} sources; got {keys.dtype} of shape {keys.shape}")
    if grids is not None and len(grids) != count:
        raise ArgumentError(f"{len(grids)} grids do not belong to {count} sources")


@dataclass(frozen=True, slots=True)
class _Reader:
    """One call's work; `names` are the rows as errors tell them."""

    sources: Sequence[Source]
    recipe: Recipe
    out: NDArray[Any]
    keys: Keys | None
    threads: int
    names: Sequence[int | None]

    def run(self, grids: Sequence[Grid | None] | None) -> None:
        plan = native.plan_of(self.recipe)
        if plan is None:
            self._each(range(len(self.sources)), self._through_pillow)
        elif left := plan.read(self.sources, self.out, self.keys, grids, pillow.pixel_limit(), self.threads):
            self._finish(left, plan)

    def _finish(self, left: list[Left], plan: Any) -> None:
        """Decode with Pillow what is not an ordinary JPEG, up to the first row that cannot be read at all."""
        broken = next((item for item in left if item[1] != _FOREIGN), None)
        foreign = [row for row, verdict, *_ in left if verdict == _FOREIGN and (broken is None or row < broken[0])]

        def read(row: int) -> None:
            pixels = pillow.pixels(self.sources[row], self.names[row], self.recipe.apply_exif_orientation)
            keys = None if self.keys is None else self.keys[row : row + 1]
            plan.read((pixels,), self.out[row : row + 1], keys, None, 0, 1)

        self._each(foreign, read)
        if broken is not None:
            raise _error(broken, self.sources[broken[0]], self.names[broken[0]])

    def _through_pillow(self, row: int) -> None:
        key = None if self.keys is None else int(self.keys[row])
        native.write(pillow.levels(self.sources[row], self.names[row], self.recipe, key), self.recipe, self.out[row])

    def _each(self, rows: Sequence[int], read: Callable[[int], None]) -> None:
        """All rows on at most `threads` threads; of several errors, that of the first row."""
        if self.threads <= 1 or len(rows) <= 1:
            for row in rows:
                read(row)
            return
        with ThreadPoolExecutor(min(self.threads, len(rows)), thread_name_prefix="feedline-images") as pool:
            for _ in pool.map(read, rows):
                pass


def _error(left: Left, source: Source, row: int | None) -> Exception:
    _, verdict, number, text = left
    if verdict == _FILE:
        return OSError(number, os.strerror(number), source)
    if verdict == _LARGE:
        return unreadable(source, row, *too_large(*divmod(number, 1 << 32), pillow.pixel_limit()))
    return unreadable(source, row, text)
