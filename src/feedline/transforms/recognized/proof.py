"""Comparison of the kernels' results with a library's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image

from feedline.core.rng_globals import restoring_globals
from feedline.transforms.recognized.chain import PACKAGE


def agree(ours: Callable[[], Any], theirs: Callable[[], Any]) -> bool:
    """True if two calls give equal results after equal random draws.

    Draws are compared by the state of torch's generator. All global generators are restored. Errors of both calls are
    raised.
    """
    with restoring_globals():
        mine = ours()
        after = torch.get_rng_state()
    with restoring_globals():
        return _equal(mine, theirs()) and torch.equal(after, torch.get_rng_state())


def versions() -> str:
    """Versions of the libraries that decide about pixels."""
    return f"{PACKAGE} {_version(PACKAGE)}, Pillow {_version('PIL')}, torch {torch.__version__}"


def _version(package: str) -> str:
    return str(getattr(sys.modules.get(package), "__version__", "of an unknown version"))


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Image.Image) and isinstance(theirs, Image.Image):  # maybe of a class that decodes later
        return (ours.mode, ours.size, ours.tobytes()) == (theirs.mode, theirs.size, theirs.tobytes())
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape and _strides(ours) == _strides(theirs)
        return same and torch.equal(ours, theirs)
    return bool(ours == theirs)


def _strides(tensor: torch.Tensor) -> list[int]:
    """Strides of axes longer than 1; along others, any number is right."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
