"""Frames: any sequence of crops, resizes and flips gives Pillow's pixels, or those of torch's operators."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_cases import jpeg, photo
from PIL import Image

from feedline.images.placed import PLACEMENT, PlacedReader
from feedline.transforms.recognized.frame import Frame, RefusedError
from feedline.transforms.recognized.steps import resizes_tensors_of_levels

FILTERS = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)

sides = st.integers(1, 90)
steps = st.one_of(
    st.tuples(st.just("crop"), st.integers(-20, 60), st.integers(-20, 60), sides, sides),
    st.tuples(st.just("resize"), sides, sides, st.booleans()),
    st.tuples(st.sampled_from(["flip_horizontally", "flip_vertically"])),
)


def step_of_pillow(image: Image.Image, name: str, *arguments: Any) -> Image.Image:
    if name == "crop":
        left, top, width, height = arguments
        return image.crop((left, top, left + width, top + height))
    if name == "resize":
        height, width, bicubic = arguments
        return image.resize((width, height), FILTERS[bicubic])
    flips = {"flip_horizontally": Image.Transpose.FLIP_LEFT_RIGHT, "flip_vertically": Image.Transpose.FLIP_TOP_BOTTOM}
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
    assert np.array_equal(frame.materialize(), np.asarray(image))


def step_of_torch(tensor: torch.Tensor, name: str, *arguments: Any) -> torch.Tensor:
    if name == "crop":
        left, top, width, height = arguments
        high, wide = tensor.shape[1:]
        sides = (-left, left + width - wide, -top, top + height - high)  # negative ones crop
        return torch.nn.functional.pad(tensor, sides)
    if name == "resize":
        height, width, bicubic = arguments
        mode = "bicubic" if bicubic else "bilinear"
        return torch.nn.functional.interpolate(tensor[None], (height, width), mode=mode, antialias=True)[0]
    return tensor.flip(-1 if name == "flip_horizontally" else -2)


@pytest.mark.skipif(not resizes_tensors_of_levels(), reason="torch resizes uint8 as floats on this CPU")
@given(st.lists(steps, max_size=6), sides, sides, st.sampled_from([0, 1, 9]))
def test_any_steps_on_a_tensor_give_torchs_levels(steps: list[Any], width: int, height: int, contrast: int) -> None:
    levels = np.asarray(photo(width, height))
    if contrast:  # weights differ most where levels do
        levels = np.where(levels % (contrast + 1), np.uint8(0), np.uint8(255))
    tensor, frame = torch.from_numpy(levels.transpose(2, 0, 1).copy()), Frame(levels, width, height)
    frame.tensor_of = Frame.materialize
    for name, *arguments in steps:
        if (name, *arguments[:2]) == ("resize", 1, 1):  # torch fails for some tensors; the steps leave all to it
            return
        try:
            getattr(frame, name)(*arguments)
        except RefusedError:
            return
        tensor = step_of_torch(tensor, name, *arguments)
    assert np.array_equal(frame.to_value().transpose(2, 0, 1), tensor.numpy())


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
