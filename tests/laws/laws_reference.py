"""The expected stream in plain Python: the reference of the law tests for every loader."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, RandomSampler

import feedline as fl

Row = tuple[float, ...]
LARGEST = 40
"""No dataset of the laws is larger, and no epoch is longer than twice that."""


class Augmented(Dataset[Row]):
    """Each sample is its index and random draws: from `sample_rng()`, and with `legacy` from the global generators."""

    def __init__(self, n: int, legacy: bool) -> None:
        self.n, self.legacy = n, legacy

    def __getitem__(self, index: int) -> Row:
        if not self.legacy:
            return index, float(fl.sample_rng().random())
        old = random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))  # noqa: NPY002
        return index, float(fl.sample_rng().random()), *old

    def __len__(self) -> int:
        return self.n


def seed_torch(seed: int) -> None:
    """Seed torch's generator; `torch.manual_seed` takes milliseconds to format its callers for each kind of GPU."""
    torch.default_generator.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed the process-wide generators."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - as users do
    seed_torch(seed)


def rows_of(batch: Any) -> list[Row]:
    """The rows of a batch of `Augmented`, collated or a single sample."""
    columns = [torch.as_tensor(column, dtype=torch.float64).reshape(-1).tolist() for column in batch]
    return list(zip(*columns, strict=True))


@cache
def draws(seed: int, epoch: int, legacy: bool, length: int = 2 * LARGEST) -> list[Row]:
    """The draws of the sample at each position of an epoch, by an inline loader with one batch."""
    loader = fl.DataLoader(Augmented(length, legacy), batch_size=length, collate_fn=list, seed=seed)
    loader.set_epoch(epoch)
    (samples,) = loader
    return [sample[1:] for sample in samples]


@dataclass(frozen=True)
class Order:
    """A family of samplers: the arguments that select it, and its expected order."""

    name: str
    arguments: Callable[[int, int], dict[str, Any]]
    epoch: Callable[[int, int, int], Sequence[int]]

    def __repr__(self) -> str:
        return self.name


def _weights(n: int) -> list[float]:
    return [1.0 + i % 3 for i in range(n)]


def _listed(n: int) -> list[int]:
    return [(7 * i + 3) % n for i in range(n + n // 2)]


def _torch_sampler(n: int, seed: int) -> RandomSampler:
    return RandomSampler(range(n), generator=torch.Generator().manual_seed(seed % 1000))


def _torch_epoch(n: int, seed: int, epoch: int) -> list[int]:
    sampler = _torch_sampler(n, seed)
    return [list(sampler) for _ in range(epoch + 1)][-1]


ORDERS = (
    Order("sequential", lambda n, seed: {}, lambda n, seed, epoch: range(n)),
    Order(
        "shuffle",
        lambda n, seed: {"shuffle": True},
        lambda n, seed, epoch: fl.samplers.Shuffled(n, seed).take(epoch, 0, n).tolist(),
    ),
    Order(
        "weighted",
        lambda n, seed: {"sampler": fl.samplers.Weighted(_weights(n), seed=seed)},
        lambda n, seed, epoch: fl.samplers.Weighted(_weights(n), seed=seed).take(epoch, 0, n).tolist(),
    ),
    Order("list", lambda n, seed: {"sampler": _listed(n)}, lambda n, seed, epoch: _listed(n)),
    Order("torch", lambda n, seed: {"sampler": _torch_sampler(n, seed)}, _torch_epoch),
)


@dataclass(frozen=True)
class Work:
    """The parameters of a stream: data, order, seed and tail. Workers are not among them."""

    n: int
    order: Order
    seed: int
    drop_last: bool = False
    legacy: bool = False

    def loader(self, batch_size: int | None, hands: Hands, world: tuple[int, int] | None = None) -> Any:
        """A loader over this work."""
        return fl.DataLoader(
            Augmented(self.n, self.legacy),
            batch_size=batch_size,
            drop_last=self.drop_last and batch_size is not None,
            seed=self.seed,
            distributed=world,
            **self.order.arguments(self.n, self.seed),
            **hands.arguments(),
        )

    def row(self, epoch: int, position: int) -> Row:
        """The sample at a position of the global order."""
        return (float(self.indices(epoch)[position]), *draws(self.seed, epoch, self.legacy)[position])

    def indices(self, epoch: int) -> Sequence[int]:
        """The order of an epoch."""
        return _indices(self.order, self.n, self.seed, epoch)

    def steps(self, size: int, epoch: int = 0, position: int = 0) -> Iterator[tuple[int, range]]:
        """The spans of global batches of `size` rows, epoch after epoch, from a position on."""
        while True:
            length = len(self.indices(epoch))
            while position < length and not (self.drop_last and length - position < size):
                yield epoch, range(position, min(position + size, length))
                position += size
            epoch, position = epoch + 1, 0

    def batches(self, batch_size: int | None, count: int) -> list[list[Row]]:
        """The first `count` batches of one stream."""
        steps = Work(self.n, self.order, self.seed, self.drop_last and batch_size is not None).steps(batch_size or 1)
        return [[self.row(epoch, p) for p in span] for epoch, span in islice(steps, count)]

    def has_batches(self, size: int) -> bool:
        """True if an epoch has at least one batch of `size` rows."""
        return not self.drop_last or len(self.indices(0)) >= size


@lru_cache(maxsize=4096)
def _indices(order: Order, n: int, seed: int, epoch: int) -> Sequence[int]:
    return order.epoch(n, seed, epoch)


def share(span: range, length: int, rank: int, world: int) -> list[int]:
    """The positions of one rank in a global batch: a contiguous run, completed with the epoch's first positions."""
    missing = -len(span) % world
    rows = [*span, *(place % length for place in range(missing))]
    each = len(rows) // world
    return rows[rank * each : (rank + 1) * each]


@dataclass(frozen=True)
class Hands:
    """The workers that build the batches; they never affect the result."""

    method: str = "inline"
    workers: int = 0
    prefetch: int | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """The arguments of DataLoader."""
        if self.method == "inline":
            return dict(self.more)
        return {
            "num_workers": self.workers,
            "worker_method": self.method,
            "prefetch_factor": self.prefetch,
            **self.more,
        }


def taken(loader: Any, count: int, after: Callable[[Any], None] | None = None) -> list[Any]:
    """The next `count` batches of a loader, over as many epochs as that takes; `after(iterator)` follows each batch."""
    batches: list[Any] = []
    idle = 0
    while len(batches) < count and idle < 2:
        iterator = iter(loader)
        idle += 1
        for batch in islice(iterator, count - len(batches)):
            batches.append(batch)
            idle = 0
            if after is not None:
                after(iterator)
    return batches


def saved(loader: Any) -> Any:
    """The state after a round trip through a checkpoint file."""
    return json.loads(json.dumps(loader.state_dict()))


class KeptLoaders:
    """Loaders whose workers live from example to example, because forks of the test process take time.

    An example calls `begin` with its initial state. Laws with few examples use new loaders, with their own workers.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[Any, Any]] = {}

    def begin(self, key: Any, make: Callable[[], Any], state: Any = None) -> Any:
        """The loader of this key at a state; None: at its first position."""
        if key not in self._kept:
            loader = make()
            assert loader.persistent_workers
            self._kept[key] = loader, saved(loader)
        loader, start = self._kept[key]
        loader.load_state_dict(start if state is None else state)
        return loader

    def close(self) -> None:
        """End all workers."""
        while self._kept:
            self._kept.popitem()[1][0].close()
