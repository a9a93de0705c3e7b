"""Base classes of samplers with random access, and tools to write them."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from feedline.errors import ArgumentError
from feedline.samplers import _arguments

Indices = NDArray[np.int64]


Item = TypeVar("Item", bound=np.generic)


LONGEST = 1 << 62
"""Upper bound of an epoch's length: positions, and the sum of two positions, fit into int64."""


_LARGEST_BLOCK = 4096


_WIDEST = {"i": "<i8", "u": "<i8", "f": "<f8"}  # equal numbers of any dtype have equal digests


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class _MissingLength:
    """Placeholder of `length`, which a subclass must set."""

    def __get__(self, sampler: object, owner: type) -> _MissingLength:
        if sampler is None:
            return self
        raise AttributeError(f"{owner.__name__} must set self.length, the length of an epoch; None if it is endless")


class IndexSampler(Sampler[int]):
    """An order of indices, addressed by (epoch, position).

    Subclasses set `length` and define `indices`. The length must not depend on the epoch.
    """

    epoch: int = 0
    """The epoch that `iter()` yields; `take` ignores it."""

    extent: int | None = None
    """Exclusive upper bound of the indices; None where the size of the dataset is unknown."""

    length: int | None = _MissingLength()  # type: ignore[assignment]
    """Indices per epoch; None for an endless epoch."""

    _begun: int | None = 0  # None for an epoch that was set since, whose number may be the same

    def upcoming(self, following: int) -> int:
        """The epoch that a loader reads next.

        It is the epoch set by `set_epoch` since the last `begin`, else `following`.
        """
        return self.epoch if self.epoch != self._begun else following

    def begin(self, epoch: int) -> None:
        """Record that a loader starts to read `epoch`."""
        self.epoch = self._begun = epoch

    def take(self, epoch: int, start: int, stop: int) -> Indices:
        """The indices at positions [start, stop) of `epoch`.

        A new array, shorter (or empty) past the end. A pure function: any way to cut an epoch into spans gives the same
        indices.
        """
        start, stop = clip_span(start, stop, self.length)
        return self.indices(epoch, start, stop) if start < stop else np.empty(0, np.int64)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Hook for subclasses: the indices at positions [start, stop).

        Returns a new int64 array. `take` calls it with 0 <= start < stop <= length. It must be a pure function of its
        arguments.
        """
        raise NotImplementedError(f"{type(self).__name__} must define indices(epoch, start, stop)")

    def fingerprint(self) -> str:
        """Short text that identifies the order.

        A saved state is only loaded into a sampler with an equal fingerprint. By default the text holds the class name
        and the constructor's arguments, read from the attributes `name` or `_name`; ArgumentError if there is no such
        attribute. It is computed once: do not change the arguments afterwards.
        """
        return _fingerprint_of(self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` yields."""
        self.epoch, self._begun = _arguments.integer("epoch", epoch, 0), None

    def __iter__(self) -> Iterator[int]:
        return self._integers(self.epoch)

    def _integers(self, epoch: int) -> Iterator[int]:
        start, size = 0, 64  # small at first, so that the first index is ready without delay
        while len(block := self.take(epoch, start, start + size)) == size:
            yield from block.tolist()
            start, size = start + size, min(2 * size, _LARGEST_BLOCK)
        yield from block.tolist()

    def __len__(self) -> int:
        if self.length is None:
            # list() and torch's DataLoader expect a TypeError from a sampler without a length.
            raise TypeError(f"{type(self).__name__} is endless and has no length: stop the loop by a number of steps")
        return self.length


class BatchIndexSampler(Sampler[list[int]]):
    """An order of batches of indices, addressed by (epoch, batch number).

    Works as torch's `batch_sampler=` too. Subclasses set `length` and define `batches`. The length must not depend on
    the epoch.
    """

    epoch: int = 0
    """The epoch that `iter()` yields; `take_batches` ignores it."""

    length: int = _MissingLength()  # type: ignore[assignment]
    """Batches per epoch."""

    _begun: int | None = 0

    def upcoming(self, following: int) -> int:
        """See `IndexSampler.upcoming`."""
        return self.epoch if self.epoch != self._begun else following

    def begin(self, epoch: int) -> None:
        """See `IndexSampler.begin`."""
        self.epoch = self._begun = epoch

    def take_batches(self, epoch: int, start: int, stop: int) -> list[Indices]:
        """The batches [start, stop) of `epoch`, fewer (or none) past the end.

        A pure function, as `IndexSampler.take`.
        """
        start, stop = clip_span(start, stop, self.length)
        return self.batches(epoch, start, stop) if start < stop else []

    def batches(self, epoch: int, start: int, stop: int) -> list[Indices]:
        """Hook for subclasses: the batches [start, stop) of `epoch`.

        Returns a list of new int64 arrays. `take_batches` calls it with 0 <= start < stop <= length. It must be a pure
        function of its arguments.
        """
        raise NotImplementedError(f"{type(self).__name__} must define batches(epoch, start, stop)")

    def fingerprint(self) -> str:
        """See `IndexSampler.fingerprint`."""
        return _fingerprint_of(self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` yields."""
        self.epoch, self._begun = _arguments.integer("epoch", epoch, 0), None

    def __iter__(self) -> Iterator[list[int]]:
        return self._lists(self.epoch)

    def _lists(self, epoch: int) -> Iterator[list[int]]:
        for number in range(self.length):
            yield self.take_batches(epoch, number, number + 1)[0].tolist()

    def __len__(self) -> int:
        return self.length


def from_blocks(block: Callable[[int], NDArray[Item]], size: int, start: int, stop: int) -> NDArray[Item]:
    """Elements [start, stop) of a sequence that is computed in blocks.

    `block(n)` gives block `n`, of `size` elements. The result is a new array.
    """
    return np.concatenate(
        [
            block(number)[max(start - number * size, 0) : stop - number * size]
            for number in range(start // size, (stop - 1) // size + 1)
        ]
    )


def clip_span(start: int, stop: int, length: int | None) -> tuple[int, int]:
    """The span as ints, cut to `length`; ArgumentError for a negative start."""
    if start < 0:
        raise ArgumentError(f"start must be at least 0, but is {start}")
    return int(start), int(stop if length is None else min(stop, length))


def describe(sampler: Any, /, **parameters: object) -> str:
    """`Class(name=value, ...)`, computed once per sampler; containers appear as `<count:digest>`."""
    if "_fingerprint" not in vars(sampler):
        name = type(sampler).__name__
        parts = (f"{key}={_describe_parameter(name, key, value)}" for key, value in parameters.items())
        sampler._fingerprint = f"{name}({', '.join(parts)})"
    fingerprint: str = sampler._fingerprint
    return fingerprint


def _fingerprint_of(sampler: Any) -> str:
    known: str | None = vars(sampler).get("_fingerprint")  # read at the start of each epoch
    return describe(sampler, **_parameters(sampler)) if known is None else known


def _parameters(sampler: Any) -> dict[str, object]:
    """The arguments of all constructors of a class, read from the attributes.

    Reading attributes instead of recording the call leaves pickling unchanged, and keeps no second copy of large
    arguments.
    """
    constructors = [vars(cls)["__init__"] for cls in type(sampler).__mro__ if cls not in _bases() and _constructs(cls)]
    parameters: dict[str, object] = {}
    for depth, constructor in enumerate(constructors):
        for parameter in _parameters_of(constructor):
            name = parameter.name
            attribute = next((each for each in (name, f"_{name}") if _has_value(sampler, each)), None)
            if attribute is not None:
                parameters[name] = getattr(sampler, attribute)
            # The arguments of inherited constructors may be constants here, and *args are usually passed on to them.
            elif depth == 0 and not (_is_variadic(parameter) and len(constructors) > 1):
                raise ArgumentError(
                    f"{type(sampler).__name__}.fingerprint() needs the argument {name!r} of the constructor, without "
                    f"which a resumed run could continue in another order: keep it as self.{name} or self._{name}, or "
                    "override fingerprint()"
                )
    return parameters


@cache
def _bases() -> frozenset[type]:
    """Classes whose constructors take no arguments of an order."""
    return frozenset((*IndexSampler.__mro__, *BatchIndexSampler.__mro__))


@lru_cache(maxsize=256)
def _parameters_of(constructor: Callable[..., None]) -> tuple[inspect.Parameter, ...]:
    """The parameters of a constructor, without `self`."""
    return tuple(inspect.signature(constructor).parameters.values())[1:]


def _constructs(cls: type) -> bool:
    return "__init__" in vars(cls)


def _has_value(sampler: Any, attribute: str) -> bool:
    """True if the attribute is a value of the instance.

    Methods and class-level defaults are not arguments.
    """
    return attribute in vars(sampler) or inspect.isdatadescriptor(getattr(type(sampler), attribute, None))


def _is_variadic(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _describe_parameter(name: str, key: str, value: object) -> str:
    text = _describe(value)
    if text is None:
        raise ArgumentError(
            f"{name}.fingerprint() cannot describe {key}: the repr of {type(value).__name__} holds an address, which "
            "differs in every process. Override fingerprint(), with the values that determine the order"
        )
    return text


def _describe(value: Any) -> str | None:
    """Text that is equal for equal values, in every process.

    None if the value has no such text.
    """
    if callable(getattr(value, "fingerprint", None)):
        return str(value.fingerprint())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, (list, tuple, range)) and value and set(map(type, value)) <= {int, float, bool}:
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OSU" and not _exceeds_int64(value):
        wide = value.astype(_WIDEST.get(value.dtype.kind, value.dtype))
        return _digest("x".join(map(str, wide.shape)), wide.tobytes())
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return _describe_container(value)
    text = repr(value)
    return None if _ADDRESS.search(text) else text


def _exceeds_int64(array: NDArray[Any]) -> bool:
    return array.dtype.kind == "u" and array.size > 0 and bool(array.max() > np.iinfo(np.int64).max)


def _describe_container(value: Any) -> str | None:
    items = [_describe(item) for item in (value.items() if isinstance(value, dict) else value)]
    if None in items:
        return None
    # The order of a set differs between processes.
    texts = sorted(map(str, items)) if isinstance(value, (set, frozenset)) else map(str, items)
    return _digest(str(len(items)), ", ".join(texts).encode())


def _digest(count: str, content: bytes) -> str:
    return f"<{count}:{hashlib.blake2b(content, digest_size=8).hexdigest()}>"
