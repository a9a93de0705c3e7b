"""Calls of a transform by the kernels: after a few calls and a comparison, and with equal results."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from image_cases import jpeg
from PIL import Image
from vision_cases import PIPELINES, assert_same, seeded

import feedline as fl
from feedline.core.kernels import SlowKernelsWarning
from feedline.images import accelerate_pillow, pillow_obstacle
from feedline.transforms.recognized.calls import _Calls
from feedline.transforms.recognized.chain import Chain
from feedline.transforms.recognized.frame import RefusedError
from feedline.transforms.recognized.steps import resizes_tensors_of_levels

pytestmark = pytest.mark.skipif(pillow_obstacle() is not None, reason=str(pillow_obstacle()))


def opened(width: int = 90) -> Image.Image:
    return Image.open(io.BytesIO(jpeg(width, 70))).convert("RGB")


def called(transform: Any, original: Callable[[Any], Any], count: int) -> int:
    """Number of calls of `original` in `count` calls; the results are those of the transform."""
    calls, seen = _Calls(transform), []

    def noted(image: Any) -> Any:
        seen.append(image)
        return original(image)

    with accelerate_pillow():
        for number in range(count):
            torch.manual_seed(number)
            found, after = calls(opened(), noted), torch.rand(3)
            torch.manual_seed(number)
            assert torch.equal(found, original(opened()))
            assert torch.equal(after, torch.rand(3))
    return len(seen)


def test_the_kernels_execute_a_proven_transform() -> None:
    transform = PIPELINES["train"]()
    assert called(transform, transform, 12) == 5  # the first four, and one to compare with


def test_a_difference_is_warned_of_and_ends_the_acceleration() -> None:
    transform = PIPELINES["train"]()
    with pytest.warns(SlowKernelsWarning, match="Compose runs its own code"):
        assert called(transform, lambda image: transform(image) + 1, 12) == 13


def test_a_refusal_takes_back_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    transform = PIPELINES["train"]()

    def refused(*_: Any) -> Any:
        torch.rand(7)
        raise RefusedError("no")

    monkeypatch.setattr(Chain, "__call__", refused)
    assert called(transform, transform, 8) == 8


class Photos:
    """Images of the user's own, with draws around those of the transforms."""

    def __init__(self, names: list[str]) -> None:
        self.transforms = [PIPELINES[name]() for name in names]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        before = torch.rand(1)
        images = [transform(opened(90 + index)) for transform in self.transforms]
        return images, before, random.random(), torch.rand(1)


@pytest.mark.skipif(not resizes_tensors_of_levels(), reason="torch resizes uint8 as floats on this CPU")
def test_pipelines_on_tensors_in_a_dataset_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = sys.modules["torchvision.transforms.v2.functional._geometry"]
    dataset = Photos(["v2 on tensors", "v2 on tensors, documented", "v2 on tensors, validate"])
    resize, calls = module.interpolate, []

    def counted(*given: Any, **options: Any) -> Any:
        calls.append(options)
        return resize(*given, **options)

    monkeypatch.setattr(module, "interpolate", counted)

    def epoch(loader: Any) -> tuple[list[Any], int]:
        seeded(0)
        batches = list(
            loader(dataset, 6, shuffle=True, num_workers=2, collate_fn=lambda samples: (samples, len(calls)))
        )
        return [samples for samples, _ in batches], batches[-1][1]

    expected, most = epoch(torch.utils.data.DataLoader)
    found, resizes = epoch(fl.DataLoader)
    assert_same(found, expected)
    assert resizes <= 3 * 5 < most  # of each pipeline the first four, and one to compare with
