"""Recipes: what they accept, and the boxes of crop policies, with torchvision's rounding."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from feedline import images
from feedline.errors import ArgumentError
from feedline.images import Recipe

WHOLE = Recipe((20, 30), images.WholeBox())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 224}, "size must be 2 numbers, not 224"),
        ({"size": (224,)}, "size must be 2 numbers"),
        ({"size": (0, 10)}, "size must be a whole number of pixels from 1 to 65,500; got 0"),
        ({"size": (10, 2.5)}, "got 2.5"),
        ({"size": (10, 10**6)}, "got 1000000"),
        ({"size": (float("nan"), 10)}, "size must be a whole number of pixels from 1 to 65,500; got nan"),
        ({"size": (float("inf"), 10)}, "got inf"),
        ({"size": (None, 10)}, "got None"),
        ({"size": ("20", 10)}, "got '20'"),
        ({"flip": None}, "flip must be a probability between 0 and 1, not None"),
        ({"apply_exif_orientation": "yes"}, "apply_exif_orientation must be one of True, False; got 'yes'"),
        ({"dtype": torch.float32, "mean": (0, 0, "a"), "std": (1, 1, 1)}, "mean must be 3 numbers"),
        ({"dtype": torch.float32, "mean": (0, 0, 1e39), "std": (1, 1, 1)}, "mean must be three finite numbers"),
        ({"dtype": torch.float32, "mean": (0, 0, 0), "std": (1, 1e-50, 1)}, "std must be three finite numbers other"),
        ({"dtype": torch.float32, "mean": (0, 0, 0), "std": (1, 1e-44, 1)}, "std must be three finite numbers other"),
        ({"crop": "random"}, "crop must be a RandomBox, CenterBox or WholeBox, not 'random'"),
        ({"flip": 1.5}, "flip must be a probability between 0 and 1, not 1.5"),
        ({"interpolation": "lanczos"}, "interpolation must be one of 'bilinear', 'bicubic'; got 'lanczos'"),
        ({"layout": "NCHW"}, "layout must be one of 'HWC', 'CHW'"),
        (
            {"dtype": torch.float16},
            "dtype must be one of torch.uint8, torch.float32, torch.bfloat16; got torch.float16",
        ),
        ({"mean": (0, 0, 0), "std": (1, 1, 1)}, "mean and std need floats: pass dtype=torch.float32"),
        ({"dtype": torch.float32, "mean": (0, 0, 0)}, "mean and std belong together"),
        ({"dtype": torch.float32, "mean": (0, 0), "std": (1, 1, 1)}, "mean must be 3 numbers"),
        (
            {"dtype": torch.float32, "mean": (0, 0, 0), "std": (1, 0, 1)},
            "std must be three finite numbers other than 0",
        ),
        ({"dtype": torch.float32, "mean": (0, float("nan"), 0), "std": (1, 1, 1)}, "mean must be three finite numbers"),
    ],
)
def test_recipes_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        replace(WHOLE, **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: images.RandomBox(scale=(0.5, 0.1)), "RandomBox.scale must be two positive numbers, the smaller first"),
        (lambda: images.RandomBox(ratio=(0, 1)), "RandomBox.ratio must be two positive numbers"),
        (lambda: images.RandomBox(scale=0.5), "RandomBox.scale must be 2 numbers"),
        (lambda: images.RandomBox(scale=("a", 1)), "RandomBox.scale must be 2 numbers"),
        (lambda: images.CenterBox(None), "CenterBox.shorter must be a whole number of pixels"),
        (lambda: images.CenterBox(0), "CenterBox.shorter must be a whole number of pixels"),
    ],
)
def test_crop_policies_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_recipes_are_values() -> None:
    recipe = Recipe([20, 30], images.RandomBox([0.1, 1], (0.5, 2)), dtype=torch.float32, mean=[0, 0, 0], std=[1, 1, 1])
    assert recipe.size == (20, 30)
    assert replace(recipe, scaled_decode=1) == replace(recipe, scaled_decode=True)
    assert recipe == pickle.loads(pickle.dumps(recipe))
    assert hash(recipe) == hash(replace(recipe))
    assert recipe.shape == (20, 30, 3)
    assert replace(recipe, layout="CHW").shape == (3, 20, 30)
    assert recipe.is_random
    assert not WHOLE.is_random
    assert replace(WHOLE, flip=0.5).is_random


@pytest.mark.parametrize(
    ("shorter", "size", "image", "full", "window"),
    [
        (256, (224, 224), (500, 375), (256, 341), (58, 16)),
        (256, (224, 224), (375, 500), (341, 256), (16, 58)),
        (256, (224, 224), (300, 300), (256, 256), (16, 16)),
        (7, (4, 4), (10, 10), (7, 7), (2, 2)),  # round(1.5) is 2,
        (9, (4, 4), (10, 10), (9, 9), (2, 2)),  # and round(2.5) too
        (100, (99, 224), (300, 100), (100, 300), (38, 0)),
        (5, (8, 6), (50, 50), (5, 5), (0, -1)),  # three lines of padding: one above, two below
        (224, (224, 224), (3, 60_000), (4_480_000, 224), (0, 2_239_888)),
    ],
)
def test_the_center_is_torchvisions(shorter: int, size: tuple[int, int], image: Any, full: Any, window: Any) -> None:
    plan = images.geometry(Recipe(size, images.CenterBox(shorter)), None, *image)
    assert plan == images.Geometry((0, 0, *image), False, full, (*window, size[1], size[0]))


def test_boxes_never_change() -> None:
    """Saved states rely on these numbers."""
    recipe = Recipe((224, 224), images.RandomBox(), flip=0.5)
    plans = [images.geometry(recipe, key, 500, 375) for key in (0, 1, (1 << 64) - 1)]
    assert [(plan.box, plan.flip) for plan in plans] == [
        ((36, 83, 160, 122), True),
        ((136, 27, 360, 313), True),
        ((8, 4, 463, 365), False),
    ]


@pytest.mark.parametrize(("width", "height", "box"), [(1000, 10, (493, 0, 13, 10)), (10, 1000, (0, 493, 10, 13))])
def test_images_too_long_for_any_attempt_give_their_center(width: int, height: int, box: Any) -> None:
    recipe = Recipe((224, 224), images.RandomBox(scale=(0.5, 1.0)))
    assert {images.geometry(recipe, key, width, height).box for key in range(50)} == {box}


def test_the_random_box_is_torchvisions() -> None:
    """Area, ratio and place are uniform where the box fits, and flips have the given probability."""
    recipe = Recipe((8, 8), images.RandomBox((0.1, 0.4), (0.5, 2.0)), flip=0.25)
    plans = [images.geometry(recipe, key, 1000, 1000) for key in range(4000)]
    boxes = torch.tensor([plan.box for plan in plans], dtype=torch.float64)
    area = boxes[:, 2] * boxes[:, 3] / 1e6
    ratio = (boxes[:, 2] / boxes[:, 3]).log() / torch.tensor(2.0).log()
    place = boxes[:, 0] / (1000 - boxes[:, 2] + 1)
    for values, low, high in ((area, 0.1, 0.4), (ratio, -1, 1), (place, 0, 1)):
        assert values.min() > low - 0.01
        assert values.max() < high + 0.01
        # The mean is five standard deviations off once in a million runs; these draws are always the same.
        assert abs(values.mean() - (low + high) / 2) < 5 * (high - low) / 12**0.5 / 4000**0.5
    assert abs(sum(plan.flip for plan in plans) / 4000 - 0.25) < 0.035
