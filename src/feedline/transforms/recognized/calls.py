"""Calls of torchvision's `Compose` on JPEGs that Pillow has not decoded."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import lru_cache, partial, wraps
from typing import Any

import torch
from PIL import Image

from feedline.core.kernels import SlowKernelsWarning
from feedline.core.optional import after_import
from feedline.images.accelerate import undecoded_jpeg
from feedline.images.pillow import pixel_limit
from feedline.images.placed import can_place
from feedline.transforms.recognized.chain import PACKAGE, Chain
from feedline.transforms.recognized.frame import Frame, RefusedError
from feedline.transforms.recognized.origin import is_from, note_replacement
from feedline.transforms.recognized.proof import agree, versions

_COMPOSES = {f"{PACKAGE}.transforms.transforms": "__call__", f"{PACKAGE}.transforms.v2._container": "forward"}
"""Modules with a `Compose`, and its method that runs the steps."""


_FEW = 4
"""Calls of a `Compose` before its steps are examined: some code makes a `Compose` for each sample."""


Call = Callable[..., Any]


def accelerate_compose() -> None:
    """Let `Compose` execute its steps by the kernels, in this process.

    Applies to images opened by an accelerated Pillow, if all steps are torchvision's own and give a tensor. Results
    and random draws are torchvision's. torchvision may be imported later.
    """
    if can_place():
        for module, method in _COMPOSES.items():
            after_import(module, partial(_replace, module, method))


def _replace(module: str, method: str) -> None:
    kind = sys.modules[module].Compose
    original = vars(kind).get(method)
    if is_from(original, PACKAGE):
        replacement = _accelerate_call(kind, original)
        note_replacement(replacement)
        setattr(kind, method, replacement)


def _accelerate_call(kind: type, original: Call) -> Any:
    @wraps(original)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if type(self) is not kind or len(args) != 1 or options or not isinstance(args[0], Image.Image):
            return original(self, *args, **options)
        return _calls_of(self)(args[0], partial(original, self))

    return call


class _Calls:
    """Calls of one transform, by the kernels where they are certain."""

    def __init__(self, transform: Any) -> None:
        self._transform = transform
        self._seen = 0
        self._chain: Chain | None = None
        self._suits = self._proven = self._disabled = False

    def __call__(self, image: Image.Image, original: Call) -> Any:
        """Result of `original(image)`, computed by the kernels where possible."""
        self._seen += 1
        if self._disabled or self._seen <= _FEW or not self._is_suitable():
            return original(image)
        frame = _frame_of(image)
        if frame is None or not (self._proven or self._prove(frame, image, original)):
            return original(image)
        assert self._chain is not None
        drawn = torch.get_rng_state()
        try:
            return self._chain(frame, None)
        except RefusedError:
            torch.set_rng_state(drawn)
            return original(image)

    def _is_suitable(self) -> bool:
        if self._chain is None or not self._chain.is_current(self._transform):
            self._chain = chain = Chain(self._transform)
            self._proven = False
            # A step of the user's own might be run twice, after a refusal.
            self._suits = chain.uses_kernels and chain.is_repeatable and chain.gives_tensors
        return self._suits

    def _prove(self, frame: Frame, image: Image.Image, original: Call) -> bool:
        """Compare both results for the first image; True if they are equal."""
        assert self._chain is not None
        try:
            same = agree(partial(self._chain, _restart(frame), None), partial(original, image))
        except Exception:  # noqa: BLE001 - a bad image or step: the library raises the error itself
            return False
        self._proven, self._disabled = same, not same
        if not same:
            warnings.warn(
                f"{type(self._transform).__name__} runs its own code, several times slower: with {versions()},"
                " feedline's results would differ from the library's own. Pass accelerate=False to the loader to"
                " silence this, and report it to feedline.",
                SlowKernelsWarning,
                stacklevel=4,
            )
        return same


@lru_cache(maxsize=16)
def _calls_of(transform: Any) -> _Calls:
    """Calls of a transform, by identity."""
    return _Calls(transform)


def _frame_of(image: Image.Image) -> Frame | None:
    """Frame of an undecoded JPEG at its first use, else None."""
    found = undecoded_jpeg(image)
    if found is None:
        return None
    # A crop above the limit is for Pillow to judge.
    frame = Frame(found, *image.size, pixel_limit(1))
    frame.opened = lambda: image
    return frame


def _restart(frame: Frame) -> Frame:
    """New frame of the same source; `frame` must have no steps yet."""
    return Frame(frame.source, frame.width, frame.height, frame.limit)
