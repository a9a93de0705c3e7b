"""Frames: any sequence of crops, resizes and flips gives Pillow's pixels."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_cases import jpeg, photo
from PIL import Image

from feedline.images.placed import PLACEMENT, PlacedReader
from feedline.transforms.recognized.frame import Frame, RefusedError

FILTERS = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)

sides = st.integers(1, 90)
steps = st.one_of(
    st.tuples(st.just("crop"), st.integers(-20, 60), st.integers(-20, 60), sides, sides),
    st.tuples(st.just("resize"), sides, sides, st.booleans()),
    st.tuples(st.sampled_from(["mirror", "upend"])),
)


def step_of_pillow(image: Image.Image, name: str, *arguments: Any) -> Image.Image:
    if name == "crop":
        left, top, width, height = arguments
        return image.crop((left, top, left + width, top + height))
    if name == "resize":
        height, width, bicubic = arguments
        return image.resize((width, height), FILTERS[bicubic])
    flips = {"mirror": Image.Transpose.FLIP_LEFT_RIGHT, "upend": Image.Transpose.FLIP_TOP_BOTTOM}
    return image.transpose(flips[name])


@given(st.lists(steps, max_size=6), sides, sides, st.booleans())
def test_any_steps_give_pillows_pixels(steps: list[Any], width: int, height: int, encoded: bool) -> None:
    image: Image.Image = photo(width, height)
    source: Any = np.asarray(image)
    if encoded:
        source = jpeg(width, height)
        image = Image.open(io.BytesIO(source)).convert("RGB")
    frame = Frame(source, width, height)
    for name, *arguments in steps:
        try:
            getattr(frame, name)(*arguments)
        except RefusedError:
            return
        image = step_of_pillow(image, name, *arguments)
    assert (frame.width, frame.height) == image.size
    assert np.array_equal(frame.settle(), np.asarray(image))


@pytest.mark.parametrize(
    "placement",
    [
        [0, 0, 0, 5, 0, 0, 5, 5, 0, 0],
        [-1, 0, 5, 5, 0, 0, 5, 5, 0, 0],
        [6, 0, 5, 5, 0, 0, 5, 5, 0, 0],
        [0, 0, 5, 11, 0, 0, 5, 5, 0, 0],
        [0, 0, 5, 5, 0, 0, 0, 5, 0, 0],
        [0, 0, 5, 5, 0, 0, 5, 5, 5, 0],
        [0, 0, 5, 5, 0, 0, 5, 5, 0, -8],
        [0, 0, 5, 5, 0, 0, 1 << 40, 5, 0, 0],
        [0, 0, 1 << 40, 5, 0, 0, 5, 5, 0, 0],
        [-(1 << 62), 0, 5, 5, 0, 0, 5, 5, 0, 0],
    ],
)
@pytest.mark.parametrize("encoded", [True, False])
def test_places_outside_of_the_image_are_refused(placement: list[int], encoded: bool) -> None:
    source: Any = jpeg(10, 10) if encoded else np.zeros((10, 10, 3), np.uint8)
    out = np.full((1, 8, 8, 3), 7, np.uint8)
    unwritten = PlacedReader().read((source,), out, np.array([placement], np.int64))
    assert unwritten is not None
    assert "does not lie within the image" in unwritten[0][3]
    assert (out == 7).all()


def test_arguments_that_do_not_fit_are_refused() -> None:
    levels, out = np.zeros((10, 10, 3), np.uint8), np.empty((1, 8, 8, 3), np.uint8)
    whole = np.array([[0, 0, 10, 10, 0, 0, 8, 8, 0, 0]], np.int64)
    reader = PlacedReader()
    for placements in (whole[:, :9], whole[0], np.repeat(whole, 2, 0), whole.astype(np.int32)):
        with pytest.raises(ValueError, match="placements are int64"):
            reader.read((levels,), out, placements)
    for wrong in (out[0], out[:, :, :, :2].copy(), out.astype(np.float32), out[:, ::2]):
        with pytest.raises(ValueError, match="out does not fit"):
            reader.read((levels,), wrong, whole)
    assert whole.shape[1] == PLACEMENT
