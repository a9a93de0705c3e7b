"""Process-wide random generators: seeding and restoring."""

from __future__ import annotations

import ctypes
import pickle
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_globals(key: int) -> None:
    """Seed `random`, `numpy.random` and torch, for code without an `rng` argument."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - such code draws from the legacy generator
    torch.default_generator.manual_seed(key)


def global_states() -> bytes:
    """Pickled states of `random`, `numpy.random` and torch's CPU generator."""
    numpy_state = np.random.get_state()  # noqa: NPY002 - as above
    return pickle.dumps((random.getstate(), numpy_state, torch.get_rng_state().numpy()), 5)


def restore_globals(states: bytes) -> None:
    """Restore the generators of this process from `global_states()`."""
    python, numpy_state, torch_state = pickle.loads(states)
    random.setstate(python)
    np.random.set_state(numpy_state)  # noqa: NPY002 - as above
    torch.set_rng_state(torch.from_numpy(torch_state))


@contextmanager
def restored_globals() -> Iterator[None]:
    """Restore `random`, `numpy.random` and torch's CPU generator after the block."""
    python, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = np.random.get_state()  # noqa: NPY002 - as above
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002 - as above
        torch.set_rng_state(torch_state)


class GlobalStateChanges:
    """Changes of the process-wide generators since the last look.

    A look costs a few microseconds if nothing was drawn. The states themselves take 60 µs, as Python and NumPy build
    lists of 624 numbers: their memory is compared instead.
    """

    def __init__(self) -> None:
        self._seen: tuple[object, ...] | None = None
        self._states = b""
        self._has_spare = False

    def take(self) -> bytes:
        """`global_states()` if they have changed since the last call.

        Else b"".
        """
        seen = (torch.get_rng_state().numpy().tobytes(), _numpy_mark(), _python_mark())
        # To draw the second of a pair of normal values, which NumPy keeps, moves nothing that the marks cover.
        if seen == self._seen and not self._has_spare:
            return b""
        former, self._seen, self._states = self._states, seen, global_states()
        self._has_spare = bool(np.random.get_state(legacy=False)["has_gauss"])  # noqa: NPY002
        return b"" if self._states == former else self._states


_TWISTER_NBYTES = 625 * 4
"""Memory of a Mersenne twister: 624 words, and the position in them."""


def _numpy_mark() -> object:
    """Memory of NumPy's global generator.

    Its state if it is not a Mersenne twister.
    """
    generator: Any = np.random.mtrand._rand._bit_generator
    if type(generator) is not np.random.MT19937:
        return pickle.dumps(np.random.get_state())  # noqa: NPY002
    return ctypes.string_at(generator.ctypes.state_address, _TWISTER_NBYTES)


_HEAD_NBYTES = object.__basicsize__


def _is_readable() -> bool:
    """True if the words of `random.Random` follow the object's head."""
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < _HEAD_NBYTES + _TWISTER_NBYTES:
        return False
    sample = random.Random(1)
    position, *words = struct.unpack("625I", ctypes.string_at(id(sample) + _HEAD_NBYTES, _TWISTER_NBYTES))
    return bool(sample.getstate()[1] == (*words, position))


_READABLE = _is_readable()


def _python_mark() -> object:
    """Memory of Python's global generator; its state where it cannot be read."""
    generator: random.Random = random.random.__self__  # type: ignore[attr-defined]
    if not _READABLE:
        return generator.getstate()
    words = ctypes.string_at(id(generator) + _HEAD_NBYTES, _TWISTER_NBYTES)
    return words, generator.gauss_next  # type: ignore[attr-defined]
