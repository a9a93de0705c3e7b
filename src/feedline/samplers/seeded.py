"""torch's `RandomSampler` and its few bytes of state."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

from feedline.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from feedline.samplers.order import Indices


def seedable(sampler: Any) -> bool:
    """Whether `sampler` is torch's `RandomSampler` without a generator, as it is or in torch's `BatchSampler`."""
    core = sampler.sampler if type(sampler) is BatchSampler else sampler
    return type(core) is RandomSampler and core.generator is None


class Seeded:
    """A run of torch's `RandomSampler` without a generator, which draws a seed from torch's global one and no more.

    The same draw is made at the same moment, so that order and global state are torch's; the seed is all there is to
    record. The methods are those of `Drawn`.
    """

    def __init__(self, sampler: Any, script: dict[str, Any], convert: Callable[[Any], Any] | None = None) -> None:
        self._sampler = sampler
        self._convert = convert
        self._seed: int | None = script.get("seed")
        if script.keys() - {"seed"} or not isinstance(self._seed, int | None):
            raise StateError(f"a saved order of {type(sampler).__name__} holds a seed, but this one holds {script}")
        self._items: Iterator[Any] | None = None
        self._order: Indices | None = None

    def start(self) -> None:
        """Nothing: torch draws with the first item, not in `iter`."""

    def pull(self, count: int) -> list[Any] | Indices:
        if self._items is None and self._order is None:
            self._open()
        if self._order is None:
            items = islice(self._items or (), count)
            return list(items if self._convert is None else map(self._convert, items))
        part, self._order = self._order[:count], self._order[count:]
        return part

    def _open(self) -> None:
        if self._seed is None:
            self._seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator()
        generator.manual_seed(self._seed)
        sampler = self._sampler
        if type(sampler) is BatchSampler:
            inner = _with(sampler.sampler, generator)
            self._items = iter(BatchSampler(inner, sampler.batch_size, sampler.drop_last))
        elif self._convert or sampler.replacement or sampler.num_samples > len(sampler.data_source):
            self._items = iter(_with(sampler, generator))
        else:  # a single permutation: as an array, without a Python integer for every sample
            n = len(sampler.data_source)
            self._order = torch.randperm(n, generator=generator).numpy()[: sampler.num_samples]

    def recorded(self) -> dict[str, Any]:
        return {} if self._seed is None else {"seed": self._seed}


def _with(sampler: Any, generator: torch.Generator) -> RandomSampler:
    return RandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples, generator)
