"""Shares of images that workers decode for a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import ConcatDataset, StackDataset, Subset

from feedline.core.dataset import is_ours

_WRAPPERS = (Subset, ConcatDataset, StackDataset)
_LONG = 64
"""Longer lists hold files or samples, not transforms."""


def decode_share_of(dataset: Any) -> str | None:
    """The `cpu_share` of each `DecodeOnDevice` in a dataset, or None."""
    shares = sorted(set(_shares_in(dataset)))
    return ", ".join(f"{share:g}" for share in shares) or None


def _shares_in(dataset: Any) -> Iterator[float]:
    pending, seen = [dataset], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (list, tuple)):
            pending += value if len(value) <= _LONG else ()
        elif isinstance(value, dict):
            pending += value.values() if len(value) <= _LONG else ()
        elif isinstance(value, _WRAPPERS) or any(map(is_ours, type(value).__mro__)):
            if isinstance(share := getattr(value, "cpu_share", None), float):
                yield share
            pending += getattr(value, "__dict__", {}).values()
            pending += (getattr(value, name, None) for cls in type(value).__mro__ for name in _slots(cls))


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
