"""`Zip` and `Map`: datasets side by side, and a function over each sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import StackDataset

from feedline.datasets.arrays import Transform
from feedline.errors import ArgumentError
from feedline.gather import gathering
from feedline.listings import listing_of
from feedline.rng import SampleRng, derive, sample_rng, takes_rng
from feedline.wants import Wants, wants_of


class Zip(StackDataset[Any]):
    """Aligned datasets side by side: sample i is a tuple of theirs, or a dict for datasets given by name.

    torch's StackDataset, with an error that quotes the lengths where they differ.
    """

    def __init__(self, *datasets: Any, **named: Any) -> None:
        if bool(datasets) == bool(named):
            raise ArgumentError("give at least one dataset; either all by place or all by name")
        parts = named or {f"argument {place}": part for place, part in enumerate(datasets)}
        lengths = [len(part) for part in parts.values()]
        if len(set(lengths)) > 1:
            names = [f"{type(part).__name__} ({name})" for name, part in parts.items()]
            each = ", ".join(f"{name} has {length}" for name, length in zip(names, lengths, strict=True))
            raise ArgumentError(f"datasets that are aligned have one length, but {each}")
        super().__init__(*datasets, **named)

    @property
    def thread_safe(self) -> bool:
        """Whether all parts are."""
        parts = self.datasets.values() if isinstance(self.datasets, dict) else self.datasets
        return all(getattr(part, "thread_safe", False) for part in parts)

    @property
    def gather(self) -> Callable[..., Any]:
        """The collated batch in one pass; absent unless every part has its own."""
        parts = self.datasets
        found = gathering(StackDataset(**parts) if isinstance(parts, dict) else StackDataset(*parts))
        if found is None:
            raise AttributeError("gather: not every part of this Zip has one")
        return found.gather


class Map(torch.utils.data.Dataset[Any]):
    """`fn(sample)`, or `fn(sample, rng)`, of each sample, when it is fetched.

    `rng` is fixed by (seed, epoch, position), and independent of that of a transform or `Map` within.
    """

    def __init__(self, dataset: Any, fn: Transform) -> None:
        if not callable(fn):
            raise ArgumentError(f"fn must be callable, got {type(fn).__name__}")
        self.dataset, self.fn = dataset, fn
        self._wants_rng = takes_rng(fn)
        self._depth: int = 1 + getattr(dataset, "_depth", 0) if isinstance(dataset, Map) else 1

    @property
    def listing_digest(self) -> str | None:
        """That of the dataset within."""
        return listing_of(self.dataset)

    @property
    def thread_safe(self) -> bool:
        """As the dataset within: a function is taken to be safe, as a transform is."""
        return bool(getattr(self.dataset, "thread_safe", False))

    @property
    def wants(self) -> Wants:
        """What the dataset within wants from caches; absent where it cannot tell."""
        return wants_within(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """The function of sample `index`."""
        return self._mapped(self.dataset[index], None)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The function of the samples of these indices, fetched at once where the dataset can."""
        return [self._mapped(sample, row) for row, sample in enumerate(samples_of(self.dataset, indices))]

    def _mapped(self, sample: Any, row: int | None) -> Any:
        if not self._wants_rng:
            return self.fn(sample)
        return self.fn(sample, SampleRng(derive(sample_rng(row).key, "map", self._depth)))


def wants_within(dataset: Any) -> Wants:
    """`wants_of(dataset)`; AttributeError where there is none, as properties say that something is absent."""
    found = wants_of(dataset)
    if found is None:
        raise AttributeError("wants: the dataset cannot tell")
    return found


def samples_of(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """The samples of these indices, at once where the dataset can."""
    many = getattr(dataset, "__getitems__", None)
    return [dataset[index] for index in indices] if many is None else list(many(indices))
