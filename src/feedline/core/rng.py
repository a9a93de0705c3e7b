"""Addressed randomness: keys from (seed, epoch, position), and generators from keys."""

from __future__ import annotations

import hashlib
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.core import kernels
from feedline.core.kernels import GOLDEN, MASK64, mix64, mix64_each, unit_floats


def derive(*parts: int | str) -> int:
    """A 64-bit key for an address such as `derive(seed, epoch, position, "crop")`.

    Every part is mixed in, never added: neighboring seeds, epochs or positions give unrelated keys. Source of the
    mixing function: splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    key = 0
    for part in parts:
        key = mix64((key ^ (part if type(part) is int else _number(part))) + GOLDEN & MASK64)
    return key


def derive_each(parts: Sequence[int | str], places: NDArray[Any], *more: int | str) -> NDArray[np.uint64]:
    """`derive(*parts, place, *more)` for every place, as uint64."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is intended
        keys = mix64_each((np.uint64(derive(*parts)) ^ places.astype(np.uint64, copy=False)) + np.uint64(GOLDEN))
        for part in more:
            keys = mix64_each((keys ^ np.uint64(_number(part) & MASK64)) + np.uint64(GOLDEN))
    return keys


@lru_cache(maxsize=1024)
def _text_number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _number(part: Any) -> int:
    return _text_number(part) if isinstance(part, str) else int(part)


def permuted(key: int, length: int, start: int, stop: int) -> NDArray[np.int64]:
    """Elements [start, stop) of the permutation of `range(length)` with this key.

    int64, in O(stop - start). A Feistel network over the smallest sufficient power of two, repeated until it lands
    below `length` (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). `length` must be below 2**62.
    """
    if not 0 <= start <= stop <= length:
        raise ValueError(f"the span [{start}, {stop}) is not within a permutation of {length} elements")
    return kernels.permuted(key & MASK64, length, start, stop)


class SampleRng:
    """A `numpy.random.Generator` fixed by `key`.

    The generator is only created when its first method is used.
    """

    __slots__ = ("_generator", "_key")

    def __init__(self, key: int) -> None:
        self._key = key
        self._generator: np.random.Generator | None = None

    @property
    def key(self) -> int:
        """The 64-bit key of the sample.

        Derive further keys from it: `derive(rng.key, "crop")`.
        """
        return self._key

    @property
    def generator(self) -> np.random.Generator:
        """The generator itself, for code that checks its type."""
        if self._generator is None:
            self._generator = np.random.Generator(np.random.Philox(key=self._key))
        return self._generator

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look up special methods before `_generator` is set
            raise AttributeError(name)
        return getattr(self.generator, name)


class Draws:
    """Stream of random numbers fixed by a 64-bit key.

    The numbers are the outputs of splitmix64; image kernels draw crops and flips from the same stream. It is cheaper to
    create than a `numpy.random.Generator`, and most transforms need only a few numbers.
    """

    __slots__ = ("_state", "key")

    def __init__(self, key: int) -> None:
        self.key = self._state = key & MASK64

    def unit(self) -> float:
        """Uniform in [0, 1): the 53 upper bits of the next output."""
        self._state = z = self._state + GOLDEN & MASK64
        return (mix64(z) >> 11) * 2.0**-53

    def between(self, low: float, high: float) -> float:
        """Uniform in [low, high)."""
        return low + (high - low) * self.unit()

    def below(self, count: int) -> int:
        """Uniform in `range(count)`."""
        # Not exactly uniform, by less than count / 2**53: a rejection would take a varying number of outputs.
        return int(count * self.unit())

    def permutation(self, count: int) -> list[int]:
        """Random order of `range(count)` (Fisher and Yates)."""
        order = list(range(count))
        for last in range(count - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order

    def weighted_index(self, weights: Sequence[float]) -> int:
        """Random index, with probability proportional to its weight."""
        bounds = list(accumulate(weights))
        # Compare shares, not sums: the draw is below 1, which is the last share, however small the weights are.
        drawn = self.unit()
        return next(index for index, bound in enumerate(bounds) if drawn < bound / bounds[-1])


class DrawsEach:
    """The streams of `Draws` of many keys at once.

    Each method returns one float64 or int64 per key: the numbers that a `Draws` of that key would give at this point.
    """

    __slots__ = ("_states",)

    def __init__(self, keys: NDArray[np.uint64]) -> None:
        self._states = keys.astype(np.uint64)

    def unit(self) -> NDArray[np.float64]:
        """See `Draws.unit`."""
        with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is intended
            self._states = self._states + np.uint64(GOLDEN)
            mixed = mix64_each(self._states)
        return unit_floats(mixed)

    def between(self, low: float, high: float) -> NDArray[np.float64]:
        """See `Draws.between`."""
        return low + (high - low) * self.unit()

    def below(self, counts: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Draws.below`; `counts` may have one number per key."""
        return (counts * self.unit()).astype(np.int64)

    def permutation(self, count: int) -> NDArray[np.int64]:
        """See `Draws.permutation`; one row per key."""
        orders = np.tile(np.arange(count), (len(self._states), 1))
        rows = np.arange(len(orders))
        for last in range(count - 1, 0, -1):
            other = self.below(last + 1)
            orders[rows, last], orders[rows, other] = orders[rows, other], orders[rows, last].copy()
        return orders


class RowKeys(Sequence[int]):
    """Random keys of rows, computed on access: most samples draw nothing.

    The key of a row is `derive(*parts, row)`; with `numbers`, `derive(*parts, numbers[row])`.
    """

    __slots__ = ("_numbers", "_parts")

    def __init__(self, *parts: int | str, numbers: Sequence[int] | NDArray[np.int64] | None = None) -> None:
        self._parts, self._numbers = parts, numbers

    def __len__(self) -> int:
        return sys.maxsize if self._numbers is None else len(self._numbers)

    def __getitem__(self, row: Any) -> Any:
        return derive(*self._parts, row if self._numbers is None else int(self._numbers[row]))


class Address(threading.local):
    """The random keys of the samples that this thread is fetching."""

    keys: Sequence[int] | None = None
    row: int | None = 0
    """None while a dataset fetches several samples and has not named one."""
    calls: int = 0

    def next_key(self, keys: Sequence[int]) -> int:
        """The key of an unnamed sample of a batch.

        The n-th call is assumed to be for the n-th sample; no key is returned twice.
        """
        turn, row = divmod(self.calls, len(keys))
        self.calls += 1
        return derive(keys[row], turn) if turn else keys[row]


_address = Address()


class addressed:  # noqa: N801 - reads as a verb in a `with` statement
    """Within the block, `sample_rng(row)` of this thread draws from `keys[row]`.

    `.row` is the default row. `keys=None` leaves the randomness to torch's global generator.
    """

    __slots__ = ("_keys", "_outer")

    def __init__(self, keys: Sequence[int] | None) -> None:
        self._keys = keys

    def __enter__(self) -> Address:
        self._outer = _address.keys, _address.row, _address.calls
        _address.keys, _address.row, _address.calls = self._keys, 0, 0
        return _address

    def __exit__(self, *_: object) -> None:
        _address.keys, _address.row, _address.calls = self._outer


def is_addressed() -> bool:
    """True inside a block of `addressed` with keys."""
    return _address.keys is not None


def sample_rng(row: int | None = None) -> SampleRng:
    """The random generator of the sample that this thread is fetching.

    It is fixed by (seed, epoch, position). For use inside `__getitem__` or a transform. A dataset that fetches several
    samples at once names the sample by its `row` in the batch; without `row`, the first call is for the first sample,
    and so on. Outside a loader, or without `seed`, the generator is seeded from torch's global one.
    """
    keys = _address.keys
    if keys is None:
        return SampleRng(_torch_key())
    if row is None:
        row = _address.row
    return SampleRng(_address.next_key(keys) if row is None else keys[row])


def batch_keys(count: int) -> NDArray[np.uint64]:
    """Keys for the random numbers of a whole batch, one per row.

    They are fixed by (seed, epoch, position), and independent of the keys of the samples. For use in a collate
    function. Outside a loader, or without `seed`, they come from torch's global generator.
    """
    keys = _address.keys
    if keys is None:
        return torch_keys(count)
    own = derive_each((), np.array([keys[row] for row in range(min(count, len(keys)))], np.uint64), "batch")
    more = range(1, -(-count // max(1, len(keys))))  # a collate function may make several rows of a sample
    return np.concatenate([own, *(derive_each((), own, turn) for turn in more)])[:count] if more else own


def takes_rng(fn: Callable[..., Any]) -> bool:
    """True if a callable takes the sample's generator.

    It does if it requires a second argument, or has an argument named `rng`.
    """
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except ValueError:  # built-ins without a signature take the sample only
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (positional[1].default is inspect.Parameter.empty or positional[1].name == "rng")


def torch_keys(count: int) -> NDArray[np.uint64]:
    """Keys for `count` samples of a loader without `seed`.

    They equal the keys that as many calls of `sample_rng()` would draw.
    """
    import torch

    return torch.empty(count, dtype=torch.int64, device="cpu").random_().numpy().view(np.uint64)


def _torch_key() -> int:
    import torch

    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
