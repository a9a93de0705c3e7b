"""States of the random generators of samplers, in JSON.

Finds the generators, reads and sets their states, and packs them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from feedline.core.packing import from_text, pack, to_text, unpack
from feedline.core.torch_wrappers import is_torchs
from feedline.errors import StateError

_WORDS = 624  # words of the state of a Mersenne twister


@dataclass(frozen=True)
class GeneratorAccess:
    """Access to the state of one generator.

    `read` returns a value that `==` compares and `write` accepts. This class is for `numpy.random.Generator`;
    subclasses are for others.
    """

    path: str
    """Name of a generator of the process, or the path of an attribute: ".generator"."""
    holder: Any

    @property
    def owned(self) -> bool:
        """True for the sampler's own generator, False for the process's.

        Only the sampler draws from its own generator.
        """
        return self.path.startswith(".")

    def read(self) -> Any:
        return pack(self.holder.bit_generator.state)

    def write(self, state: Any) -> None:
        self.holder.bit_generator.state = unpack(state)

    def pack(self, state: Any) -> Any:
        """The state in JSON's types."""
        return state

    def unpack(self, packed: Any) -> Any:
        """The state from JSON's types; StateError if it is damaged."""
        return packed


class _Legacy(GeneratorAccess):
    def read(self) -> Any:
        return pack(self.holder.get_state(legacy=False))

    def write(self, state: Any) -> None:
        self.holder.set_state(unpack(state))


class _Python(GeneratorAccess):
    def read(self) -> Any:
        return self.holder.getstate()

    def write(self, state: Any) -> None:
        self.holder.setstate(state)

    def pack(self, state: Any) -> Any:
        version, words, gauss = state
        return {"version": version, "words": to_text(np.array(words, "<u4").tobytes()), "gauss": gauss}

    def unpack(self, packed: Any) -> Any:
        words = np.frombuffer(from_text(packed["words"]), "<u4")
        return packed["version"], tuple(words.tolist()), packed["gauss"]


class _Torch(GeneratorAccess):
    def read(self) -> Any:
        return self.holder.get_state().numpy().tobytes()

    def write(self, state: Any) -> None:
        self.holder.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def pack(self, state: Any) -> Any:
        return to_text(_shorten(state))

    def unpack(self, packed: Any) -> Any:
        return _lengthen(from_text(packed))


def torch_access(path: str, generator: torch.Generator) -> GeneratorAccess:
    """Access to a generator of torch on the CPU."""
    return _Torch(path, generator)


def _shorten(state: bytes) -> bytes:
    """The state of torch's CPU generator with 32-bit words.

    torch stores each 32-bit word in 64 bits. Layout: 24 bytes, the words, and the rest (`CPUGeneratorImplState` in
    ATen/CPUGeneratorImpl.cpp). A state of another layout is unchanged; the two forms differ in length.
    """
    words = np.frombuffer(state, "<u8", _WORDS, 24) if len(state) > 24 + 8 * _WORDS else np.array([1 << 32], "<u8")
    if (words >> np.uint64(32)).any():
        return state
    return state[:24] + words.astype("<u4").tobytes() + state[24 + 8 * _WORDS :]


def _lengthen(content: bytes) -> bytes:
    if not 24 + 4 * _WORDS < len(content) < 24 + 8 * _WORDS:
        return content
    words = np.frombuffer(content, "<u4", _WORDS, 24)
    return content[:24] + words.astype("<u8").tobytes() + content[24 + 4 * _WORDS :]


_TORCH = _Torch("torch", torch.default_generator)


PROCESS: tuple[GeneratorAccess, ...] = (
    _TORCH,
    _Python("random", random._inst),
    _Legacy("numpy", np.random.mtrand._rand),
)


_KINDS = (
    (torch.Generator, _Torch),
    (random.Random, _Python),
    (np.random.RandomState, _Legacy),
    (np.random.Generator, GeneratorAccess),
)


_DRAW_NOTHING = (range, list, tuple, np.ndarray, torch.Tensor)


_INNER = ("sampler", "batch_sampler")  # attributes that may hold a sampler of any class


_ONE_GENERATOR: tuple[Any, ...] = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)


def generators_of(sampler: object) -> list[GeneratorAccess]:
    """The generators that a sampler may draw from.

    These are the generators of the process, and generators in attributes of the sampler and of the samplers inside it.
    torch's own samplers draw from one generator only, containers from none.
    """
    core, prefix = _core(sampler)
    if is_torchs(core, SequentialSampler) or type(core) in _DRAW_NOTHING:
        return []
    if is_torchs(core, *_ONE_GENERATOR):
        generator = core.generator
        return [_TORCH if generator in (None, torch.default_generator) else _Torch(f"{prefix}.generator", generator)]
    by_holder = {id(source.holder): source for source in (*_own_generators(sampler), *PROCESS)}
    return list(by_holder.values())


def _core(sampler: object) -> tuple[Any, str]:
    prefix = ""
    while is_torchs(sampler, BatchSampler):
        sampler, prefix = sampler.sampler, f"{prefix}.sampler"
    return sampler, prefix


def _own_generators(sampler: object) -> Iterator[GeneratorAccess]:
    for path, holder in nested_samplers(sampler):
        for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
            for kind, source in _KINDS:
                if isinstance(value, kind):
                    yield source(f"{path}.{name}", value)


def nested_samplers(sampler: object) -> list[tuple[str, object]]:
    """The sampler and the samplers inside it, with their attribute paths.

    The path of the sampler itself is "".
    """
    samplers: list[tuple[str, object]] = [("", sampler)]
    for path, holder in samplers:  # grows while it is read: samplers inside samplers
        known = {id(other) for _, other in samplers}
        inner = [(name, value) for name, value in getattr(holder, "__dict__", {}).items() if id(value) not in known]
        samplers += [(f"{path}.{name}", value) for name, value in inner if isinstance(value, Sampler) or name in _INNER]
    return samplers


def select_states(available: list[GeneratorAccess], states: dict[str, Any]) -> dict[GeneratorAccess, Any]:
    """The generators named by `states`, with their unpacked states.

    StateError if a generator is unknown or its state is damaged.
    """
    by_path = {source.path: source for source in available}
    unknown = sorted(states.keys() - by_path.keys())
    if unknown:
        raise StateError(
            f"the saved order was drawn from the generator {unknown[0]!r}, but this sampler has only "
            f"{sorted(by_path)}: build the sampler as in the run that saved the state"
        )
    return {by_path[path]: _check_state(by_path[path], packed) for path, packed in states.items()}


def _check_state(source: GeneratorAccess, packed: Any) -> Any:
    """The unpacked state, after a trial that the generator accepts it."""
    before = source.read()
    try:
        state = source.unpack(packed)
        source.write(state)
        return state
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StateError(f"the saved state of the generator {source.path!r} is damaged: {error}") from error
    finally:
        source.write(before)
