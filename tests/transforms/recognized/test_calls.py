"""Calls of a transform by the kernels: after a few, once proven, and never with other results."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from image_cases import jpeg
from PIL import Image
from vision_cases import PIPELINES

from feedline.core.kernels import SlowKernelsWarning
from feedline.images import accelerate_pillow, pillow_obstacle
from feedline.transforms.recognized.calls import _Calls
from feedline.transforms.recognized.chain import Chain
from feedline.transforms.recognized.frame import RefusedError

pytestmark = pytest.mark.skipif(pillow_obstacle() is not None, reason=str(pillow_obstacle()))


def opened() -> Image.Image:
    return Image.open(io.BytesIO(jpeg(90, 70))).convert("RGB")


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
