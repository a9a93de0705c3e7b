"""Flows: resumable iterators over one partition in one epoch."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker

from feedline.core.rng import addressed, derive, derive_each
from feedline.errors import ArgumentError

_KEYS_TOGETHER = 128
"""Number of keys that are derived at once."""


_PLAIN = (int, float, complex, str, bytes, range, slice)
"""Types whose `repr` has all of the value."""


_SHOWN = 64
"""Number of entries of a list that a description shows."""


@dataclass(frozen=True, slots=True)
class FlowPlace:
    """Seed, epoch and partition of a flow, and depth of its step.

    Later passes within an epoch have an `epoch` of their own, from which random numbers are derived. `loop_epoch` is
    the epoch of the loop, None if it is the same one.
    """

    seed: int
    epoch: int
    partition: int
    partitions: int
    depth: int = 0
    loop_epoch: int | None = None

    @property
    def shown_epoch(self) -> int:
        """Epoch of the loop, for weights and errors."""
        return self.epoch if self.loop_epoch is None else self.loop_epoch

    @property
    def passed_epoch(self) -> int:
        """Epoch for datasets and samplers.

        They may add it to a seed of 32 bits.
        """
        return self.epoch if self.shown_epoch == self.epoch else self.epoch >> 31

    def at(self, epoch: int) -> FlowPlace:
        """The same place in a pass with another `epoch`."""
        return replace(self, epoch=epoch, loop_epoch=self.shown_epoch)

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
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    if callable(getattr(value, "fingerprint", None)) and not isinstance(value, type):
        return str(value.fingerprint())
    if is_dataclass(value) and not isinstance(value, type):
        parts = (f"{each.name}={describe(getattr(value, each.name))}" for each in fields(value))
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, tuple | list | Mapping | set | frozenset):
        return _describe_all(_entries(value))
    if isinstance(value, os.PathLike):
        return f"{type(value).__name__}({os.fspath(value)!r})"
    if isinstance(value, partial):
        return f"partial({describe(value.func)}, {describe(value.args)}, {describe(value.keywords)})"
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{_describe_all(list(map(repr, _first_numbers(value))))}"
    name = getattr(value, "__qualname__", type(value).__name__)
    return f"{name}{_partitions(value)}"


def _entries(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{describe(key)}: {describe(each)}" for key, each in value.items()]
    # Paths of a million files would take a second and a half, at the start of each epoch.
    texts = list(map(repr if set(map(type, value)).issubset(_PLAIN) else describe, value))
    return sorted(texts) if isinstance(value, set | frozenset) else texts


def _describe_all(texts: list[str]) -> str:
    """The first texts, and a digest of the others.

    It stays short for millions of paths.
    """
    shown = texts[:_SHOWN]
    if len(texts) > _SHOWN:
        rest = hashlib.sha256("\0".join(texts[_SHOWN:]).encode(errors="surrogatepass"))
        shown.append(f"and {rest.hexdigest()[:16]}")
    return f"[{len(texts)}: {', '.join(shown)}]"


def _first_numbers(value: Any) -> list[Any]:
    """Up to 4,096 elements of an array or tensor."""
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        return []
    numbers: list[Any] = value.reshape(-1)[:4096].tolist()
    return numbers


def _partitions(value: Any) -> str:
    partitions = getattr(value, "num_partitions", None)
    return "" if partitions is None else f" of {partitions}"


OpenFlow = Callable[[int], SampleFlow]
"""Function that opens the flow of the previous step in an epoch."""


class ReadingFlow:
    """Flow over an iterator of the user's.

    If the iterator has no state, a resume reads its samples again from the start, through the errors that the first
    run has passed. Draws of `sample_rng()` are fixed by the number of the sample.
    """

    def __init__(self, samples: Iterator[Any], place: FlowPlace) -> None:
        self._samples, self._keys, self._count = samples, place.keys(), 0
        self._has_state = hasattr(samples, "state_dict") and hasattr(samples, "load_state_dict")
        self._loaded: Any = None
        self._errors = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            sample = self._read()
        except StopIteration:
            raise
        except Exception:
            self._errors += 1
            raise
        self._count, self._loaded = self._count + 1, None
        return sample

    def _read(self) -> Any:
        info, torch_worker._worker_info = torch_worker._worker_info, None  # a partition is not the share of a worker
        try:
            with addressed([self._keys[self._count]]):
                return next(self._samples)
        finally:
            torch_worker._worker_info = info

    def state_dict(self) -> Any:
        inner = None
        if self._has_state:  # an iterator may not return its state before the first sample after a resume
            inner = self._loaded if self._loaded is not None else self._samples.state_dict()  # type: ignore[attr-defined]
        # The iterator may change its state in place, and this one is kept while it goes on.
        return {"count": self._count, "errors": self._errors, "inner": deepcopy(inner)}

    def load_state_dict(self, state: Any) -> None:
        if state["inner"] is not None and self._has_state:
            self._samples.load_state_dict(state["inner"])  # type: ignore[attr-defined]
            self._count, self._loaded = state["count"], state["inner"]
            return
        errors = state.get("errors", 0)
        while self._count < state["count"]:
            try:
                next(self)
            except StopIteration:
                break
            except Exception:
                if self._errors > errors:
                    raise  # the first run has not raised it


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
