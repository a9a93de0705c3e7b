"""Flows: resumable iterators over one partition in one epoch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any, Protocol, Self

import numpy as np
import torch.utils.data._utils.worker as torch_worker

from feedline.core.rng import addressed, derive, derive_each
from feedline.errors import ArgumentError

_KEYS_TOGETHER = 128
"""Number of keys that are derived at once."""


@dataclass(frozen=True, slots=True)
class FlowPlace:
    """Seed, epoch and partition of a flow, and depth of its step."""

    seed: int
    epoch: int
    partition: int
    partitions: int
    depth: int = 0

    def key(self, *more: int | str) -> int:
        """Random key of an address within this flow."""
        return derive(self.seed, self.epoch, self.partition, self.depth, *more)

    def keys(self, *more: int | str) -> NumberedKeys:
        """Random keys of numbered addresses: `keys(*more)[number]` is `key(*more, number)`."""
        return NumberedKeys((self.seed, self.epoch, self.partition, self.depth, *more))


class NumberedKeys:
    """Random keys of the numbers from 0, derived in blocks.

    Fast for numbers that are requested one after the other.
    """

    def __init__(self, address: tuple[int | str, ...]) -> None:
        self._address = address
        self._first, self._keys = 0, list[int]()

    def __getitem__(self, number: int) -> int:
        row = number - self._first
        if not 0 <= row < len(self._keys):
            numbers = np.arange(number, number + _KEYS_TOGETHER)
            self._first, self._keys, row = number, derive_each(self._address, numbers).tolist(), 0
        return self._keys[row]


class SampleFlow(Protocol):
    """An iterator whose state is small, however much memory it uses.

    `load_state_dict` is called on a new flow, before the first sample. States are JSON values, or hold those of the
    user's own iterators.
    """

    def __iter__(self) -> Self: ...

    def __next__(self) -> Any: ...

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class FlowSource(Protocol):
    """A source of flows, in a constant number of partitions."""

    @property
    def num_partitions(self) -> int: ...

    def open(self, place: FlowPlace) -> SampleFlow: ...


def check_count(name: str, value: Any) -> int:
    """The value as an integer of at least 1; otherwise `ArgumentError`."""
    try:
        count = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name} must be an integer of at least 1, but is {value!r}") from None
    if count < 1:
        raise ArgumentError(f"{name} must be at least 1, but is {count}")
    return count


def describe(value: Any) -> str:
    """Text that identifies a source or step, equal in every process."""
    if hasattr(value, "fingerprint"):
        return str(value.fingerprint())
    if is_dataclass(value) and not isinstance(value, type):
        parts = (f"{each.name}={describe(getattr(value, each.name))}" for each in fields(value))
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, tuple | list):
        # The length and the first items distinguish lists; the text stays short for millions of paths.
        texts = [describe(each) for each in value[:64]]
        return f"[{len(value)}: {', '.join(texts)}]"
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    name = getattr(value, "__qualname__", type(value).__name__)
    return f"{name}{_partitions(value)}"


def _partitions(value: Any) -> str:
    partitions = getattr(value, "num_partitions", None)
    return "" if partitions is None else f" of {partitions}"


OpenFlow = Callable[[int], SampleFlow]
"""Function that opens the flow of the previous step in an epoch."""


class ReadingFlow:
    """Flow over an iterator of the user's.

    If the iterator has no state, a resume reads its samples again from the start. Draws of `sample_rng()` are fixed by
    the number of the sample.
    """

    def __init__(self, samples: Iterator[Any], place: FlowPlace) -> None:
        self._samples, self._keys, self._count = samples, place.keys(), 0
        self._has_state = hasattr(samples, "state_dict") and hasattr(samples, "load_state_dict")
        self._loaded: Any = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        info, torch_worker._worker_info = torch_worker._worker_info, None  # a partition is not the share of a worker
        try:
            with addressed([self._keys[self._count]]):
                sample = next(self._samples)
        finally:
            torch_worker._worker_info = info
        self._count, self._loaded = self._count + 1, None
        return sample

    def state_dict(self) -> Any:
        inner = None
        if self._has_state:  # an iterator may not return its state before the first sample after a resume
            inner = self._loaded if self._loaded is not None else self._samples.state_dict()  # type: ignore[attr-defined]
        return {"count": self._count, "inner": inner}

    def load_state_dict(self, state: Any) -> None:
        if state["inner"] is not None and self._has_state:
            self._samples.load_state_dict(state["inner"])  # type: ignore[attr-defined]
            self._count, self._loaded = state["count"], state["inner"]
            return
        for _ in islice(self, state["count"] - self._count):
            pass


class Chained:
    """Several flows, one after the other."""

    def __init__(self, openings: list[Callable[[], SampleFlow]]) -> None:
        self._openings, self._number = openings, 0
        self._flow: SampleFlow | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while self._number < len(self._openings):
            self._flow = self._flow or self._openings[self._number]()
            for sample in self._flow:
                return sample
            self._number, self._flow = self._number + 1, None
        raise StopIteration

    def state_dict(self) -> Any:
        return {"number": self._number, "inner": None if self._flow is None else self._flow.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self._number, self._flow = state["number"], None
        if state["inner"] is not None:
            self._flow = self._openings[self._number]()
            self._flow.load_state_dict(state["inner"])
