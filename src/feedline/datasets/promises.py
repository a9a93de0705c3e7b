"""What an index of shards promises, read without trust: numbers that can be, names that stay within the folder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_MOST = 1 << 63


def count(told: Any, what: str) -> int:
    """A number of samples, bytes or tokens; ValueError if it is none."""
    if type(told) is not int or not 0 <= told < _MOST:
        raise ValueError(f"{what} is {told!r}")
    return told


def samples(told: Any, nbytes: int, what: str) -> int:
    """The number of samples of a shard of `nbytes`, in which each has an offset of four bytes."""
    found = count(told, what)
    if 4 * found > nbytes:
        raise ValueError(f"{what} is {found}, in {nbytes} bytes")
    return found


def refuse_overflow(several: Iterable[int]) -> None:
    """ValueError if all shards together hold more samples than can be counted."""
    count(sum(several), "the number of all samples")


def file_name(told: Any) -> str:
    """The name of a file within the folder, or within folders of it; ValueError for any other."""
    name = str(told)
    if name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"the file name {name!r} leads out of the folder")
    if "\0" in name:
        raise ValueError(f"no file can have the name {name!r}")
    return name
