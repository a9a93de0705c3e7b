"""Process-wide random generators: seeding and restoring."""

from __future__ import annotations

import ctypes
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    return pickle.dumps(_states(), 5)


def _states() -> tuple[Any, Any, Any]:
    return random.getstate(), _numpy_state(), torch.get_rng_state().numpy()


def _numpy_state() -> Any:
    return np.random.get_state(legacy=False)  # noqa: NPY002 - as above


def states_after_seeding(python: int, numpy: Any) -> bytes:
    """`global_states()` after seeding.

    `python` seeds `random` and torch, `numpy` seeds NumPy.
    """
    states = (
        random.Random(python).getstate(),
        np.random.RandomState(numpy).get_state(legacy=False),
        torch.Generator().manual_seed(python).get_state().numpy(),
    )
    return pickle.dumps(states, 5)


def restore_globals(states: bytes) -> None:
    """Restore the generators of this process from `global_states()`."""
    _set_states(*pickle.loads(states))


def _set_states(python: Any, numpy_state: Any, torch_state: Any) -> None:
    random.setstate(python)
    np.random.set_state(numpy_state)  # noqa: NPY002 - as above
    torch.set_rng_state(torch.from_numpy(torch_state))


@contextmanager
def restoring_globals() -> Iterator[None]:
    """Restore `random`, `numpy.random` and torch's CPU generator after the block."""
    python, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = np.random.get_state()  # noqa: NPY002 - as above
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002 - as above
        torch.set_rng_state(torch_state)


class LoadedGenerators:
    """The process-wide generators that a user's `load_state_dict` sets."""

    def __init__(self) -> None:
        self._changed: set[int] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note which generators the block changes."""
        before = _packed_states()
        yield
        self._changed.update(number for number, state in enumerate(_packed_states()) if state != before[number])

    def restore_others(self, states: bytes) -> None:
        """Restore the generators from `global_states()`, but those that were changed."""
        now = _states()
        _set_states(*(now[n] if n in self._changed else state for n, state in enumerate(pickle.loads(states))))


def _packed_states() -> list[bytes]:
    return [pickle.dumps(state, 5) for state in _states()]


@dataclass(slots=True)
class SamplerSteps:
    """Steps of foreign samplers, and draws of seeds for loaders.

    Both may draw from the process-wide generators.
    """

    running: int = 0
    draws: int = 0
    """Number of steps that have drawn random numbers."""


SAMPLER_STEPS = SamplerSteps()
"""The steps of this process. Worker threads share its generators, and must not count these draws as their own."""


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed as torch's loaders do."""
    # Not a `with` block: every epoch passes here, and it would cost as much as the draw.
    SAMPLER_STEPS.running += 1
    try:
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        SAMPLER_STEPS.draws += 1
    finally:
        SAMPLER_STEPS.running -= 1
    return seed


class GlobalStateChanges:
    """Changes of the process-wide generators since the last check.

    A check takes a fraction of the time of packing the states: it compares the memory of NumPy's generator.
    """

    def __init__(self) -> None:
        self._seen: tuple[object, ...] | None = None
        self._states = b""
        self._may_hide = False

    def take(self) -> bytes:
        """`global_states()` if they have changed since the last call.

        Else b"".
        """
        mark = _numpy_mark()
        seen = (torch.get_rng_state().numpy().tobytes(), mark, random.getstate())
        # Marks do not cover the second of a pair of normal values, which NumPy keeps. It can appear or disappear under
        # an equal mark if code draws it, or seeds again. Both need a generator that has moved before.
        if seen == self._seen and not self._may_hide:
            return b""
        if self._seen is not None and mark != self._seen[1]:
            self._may_hide = True
        former, self._seen, self._states = self._states, seen, global_states()
        self._may_hide |= bool(np.random.get_state(legacy=False)["has_gauss"])  # noqa: NPY002
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
