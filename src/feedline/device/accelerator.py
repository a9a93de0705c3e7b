"""The accelerator of this machine, whatever its kind; before torch 2.6, which named it first, that is CUDA or none."""

from __future__ import annotations

from typing import Any

import torch

_NAMED: Any = getattr(torch, "accelerator", None)


def current() -> str | None:
    """The type of the current accelerator ("cuda", "mps", "xpu", ...); None without one."""
    if _NAMED is None:
        return "cuda" if torch.cuda.is_available() else None
    return _NAMED.current_accelerator().type if _NAMED.is_available() else None


def index() -> int | None:
    """The number of the current device; None without an accelerator."""
    if current() is None:
        return None
    return int(torch.cuda.current_device() if _NAMED is None else _NAMED.current_device_index())


def select(number: int) -> None:
    """Make this device the current one of the calling thread."""
    if _NAMED is None:
        torch.cuda.set_device(number)
    else:
        _NAMED.set_device_index(number)
