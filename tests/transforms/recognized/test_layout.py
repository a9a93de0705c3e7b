"""Tensors of pipelines that begin with a tensor have the values, class and memory that torchvision gives them."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_cases import jpeg
from PIL import Image
from vision_cases import MEAN, STD, assert_same, tv_tensors, v2

from feedline.transforms.recognized.chain import Chain
from feedline.transforms.recognized.frame import Frame
from feedline.transforms.recognized.steps import resizes_tensors_of_levels

pytestmark = pytest.mark.skipif(not resizes_tensors_of_levels(), reason="torch resizes uint8 as floats on this CPU")

sides = st.integers(1, 60)
pairs = st.tuples(sides, sides)
moves = st.one_of(
    st.builds(v2.RandomResizedCrop, pairs, st.sampled_from([(0.01, 0.3), (1.0, 1.0)])),
    st.builds(v2.Resize, pairs | sides.map(lambda side: [side])),
    st.builds(v2.CenterCrop, pairs),
    st.builds(v2.RandomCrop, pairs, st.sampled_from([None, 3]), st.booleans()),
    st.builds(v2.RandomHorizontalFlip, st.sampled_from([0.5, 1.0])),
    st.builds(v2.RandomVerticalFlip, st.sampled_from([0.5, 1.0])),
)
NUMBERS = v2.ToDtype(torch.float32, scale=True)
endings = st.sampled_from(
    [
        *([], [v2.ToPureTensor()], [NUMBERS], [v2.ToDtype({tv_tensors.Image: torch.float32}, scale=True)]),
        [NUMBERS, v2.Normalize(MEAN, STD), v2.ToPureTensor()],
    ]
)


def outcome(call: Any, value: Any) -> Any:
    """The result, its place in its storage and the next random number; or the error."""
    torch.manual_seed(0)
    try:
        found = call(value)
    except (ValueError, RuntimeError) as error:  # a crop that does not fit, or a size that torch cannot give
        return str(error)
    memory = (found.storage_offset(), found.untyped_storage().nbytes()) if isinstance(found, torch.Tensor) else None
    return found, memory, torch.rand(1)


@given(st.sampled_from([v2.ToImage, v2.PILToTensor]), st.lists(moves, min_size=1, max_size=4), endings, pairs)
def test_tensors_have_torchvisions_memory(
    begin: Any, moves: list[Any], ending: list[Any], size: tuple[int, int]
) -> None:
    encoded = jpeg(*size)
    transform = v2.Compose([begin(), *moves, *ending])
    chain = Chain(transform)
    ours = outcome(lambda source: chain(Frame(source, *size), None), encoded)
    theirs = outcome(transform, Image.open(io.BytesIO(encoded)).convert("RGB"))
    assert_same(ours, theirs)


@pytest.mark.parametrize("begin", [v2.ToImage, v2.PILToTensor])
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (5, 1)], ids=str)
@pytest.mark.parametrize("inplace", [True, False])
def test_normalized_tensors_of_one_pixel_have_torchvisions_strides(
    begin: Any, size: tuple[int, int], inplace: bool
) -> None:
    """Mean and std have the shape of the image, so torch keeps none of its strides."""
    transform = v2.Compose([begin(), v2.CenterCrop((1, 1)), NUMBERS, v2.Normalize(MEAN, STD, inplace)])
    encoded = jpeg(*size)
    ours = outcome(lambda source: Chain(transform)(Frame(source, *size), None), encoded)
    assert_same(ours, outcome(transform, Image.open(io.BytesIO(encoded)).convert("RGB")))
