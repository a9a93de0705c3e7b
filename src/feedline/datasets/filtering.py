"""`Filter`: the samples of a dataset that a predicate keeps, found once and recorded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset

from feedline.datasets.combining import samples_of, wants_within
from feedline.datasets.files import Pathlike
from feedline.datasets.fingerprints import fingerprint
from feedline.errors import ArgumentError, note
from feedline.gather import gathering
from feedline.listings import listing_of
from feedline.rows import as_indices, one_within, within
from feedline.wants import Wants

_BATCH = 256

Predicate = Callable[[Any], Any]


class Filter(torch.utils.data.Dataset[Any]):
    """The samples for which `predicate(sample)` is true, in order; `indices` are theirs in the dataset.

    All samples are read once, in `num_workers` processes. With a folder `cache`, what was found is kept there under a
    fingerprint of the predicate and the dataset: it is read again, memory-mapped, as long as neither changes, and
    found anew when one does. Objects of a store that tells no versions are an ArgumentError then.
    """

    def __init__(
        self, dataset: Any, predicate: Predicate, *, cache: Pathlike | None = None, num_workers: int = 0
    ) -> None:
        if not callable(predicate):
            raise ArgumentError(f"predicate must be callable, got {type(predicate).__name__}")
        self.dataset = dataset
        find = partial(_found, dataset, predicate, num_workers)
        self._path: str | None = None
        if cache is not None:
            key = fingerprint("filter", predicate, dataset, len(dataset))
            self._path = str(Path(cache, f"filter-{key}.npy").absolute())
        self.indices: NDArray[np.int64] = find() if self._path is None else _recorded(self._path, find)

    @property
    def listing_digest(self) -> str | None:
        """That of the dataset within."""
        return listing_of(self.dataset)

    @property
    def thread_safe(self) -> bool:
        """As the dataset within."""
        return bool(getattr(self.dataset, "thread_safe", False))

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """The samples left in each shard of the dataset; absent where it has no shards."""
        bounds = np.cumsum([0, *self.dataset.shard_sizes])
        return np.diff(np.searchsorted(self.indices, bounds))

    @property
    def gather(self) -> Callable[..., Any]:
        """The collated batch in one pass; absent where the dataset has none."""
        found = gathering(Subset(self.dataset, self.indices))  # type: ignore[arg-type]
        if found is None:
            raise AttributeError("gather: the dataset has none")
        return found.gather

    @property
    def wants(self) -> Wants:
        """What the dataset within wants from caches; absent where it cannot tell."""
        within_ = wants_within(self.dataset)
        return lambda indices: within_(self.indices[indices])

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        """The sample of the dataset that is number `index` of those kept."""
        return self.dataset[int(self.indices[one_within(index, len(self), "Filter")])]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices, fetched at once where the dataset can."""
        inside = within(as_indices(indices), len(self), "Filter")
        return samples_of(self.dataset, self.indices[inside].tolist())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "indices": None} if self._path else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._path is not None:
            self.indices = np.load(self._path, mmap_mode="r")


class _Judged(torch.utils.data.Dataset[bool]):
    """Whether the predicate holds, sample by sample."""

    def __init__(self, dataset: Any, predicate: Predicate) -> None:
        self._dataset, self._predicate = dataset, predicate

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> bool:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[bool]:
        samples = samples_of(self._dataset, indices)
        return [self._judge(sample, index) for sample, index in zip(samples, indices, strict=True)]

    def _judge(self, sample: Any, index: int) -> bool:
        try:
            return bool(self._predicate(sample))
        except Exception as error:
            note(error, f"feedline: while the predicate of a Filter looked at sample {index}")
            raise


def _found(dataset: Any, predicate: Predicate, num_workers: int) -> NDArray[np.int64]:
    if not len(dataset):
        return np.empty(0, np.int64)
    judged = _Judged(dataset, predicate)
    loader = torch.utils.data.DataLoader(judged, _BATCH, num_workers=num_workers, collate_fn=np.array)
    return np.flatnonzero(np.concatenate(list(loader)))


def _recorded(path: str, find: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
    kept = _kept(path)
    if kept is not None:
        return kept
    indices = find()
    _keep(path, indices)
    return indices


def _kept(path: str) -> NDArray[np.int64] | None:
    try:
        indices: NDArray[np.int64] = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):  # there is none, or it was cut short
        return None
    return indices


def _keep(path: str, indices: NDArray[np.int64]) -> None:
    """Write the file; it appears whole or not at all."""
    folder = Path(path).parent
    folder.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=folder, prefix=".filter-", suffix=f"-{os.getpid()}", delete=False) as file:
        try:
            np.save(file, indices)
            file.close()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
