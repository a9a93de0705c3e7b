"""`CachedMap`: a function over each sample, computed once and kept on disk."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feedline.datasets.combining import samples_of, wants_within
from feedline.datasets.files import Pathlike
from feedline.datasets.fingerprints import fingerprint
from feedline.datasets.plain_values import decode, encode
from feedline.datasets.record_store import RecordStore
from feedline.errors import ArgumentError
from feedline.listings import listing_of
from feedline.rng import takes_rng
from feedline.rows import as_indices, one_within, within
from feedline.wants import Wants

_BATCH = 64


class CacheWriteWarning(RuntimeWarning):
    """A result could not be kept, and will be computed again."""


class CachedMap(torch.utils.data.Dataset[Any]):
    """`fn(sample)` of each sample, computed when it is first fetched, and from then on read from `folder`.

    Kept under a fingerprint of the function, what it refers to, and the dataset: when one of them changes, results are
    computed anew, into a folder of their own; a dataset of which nothing tells that, such as one of objects in a store
    without versions, is an ArgumentError. Any number of workers and jobs may share a folder; one that is killed
    loses the sample it was working on. `fn` gives tensors, arrays, numbers, texts, bytes, and dicts, lists and tuples
    of these. A random function has no one result to keep: ArgumentError.
    """

    def __init__(self, dataset: Any, fn: Any, folder: Pathlike) -> None:
        if not callable(fn) or takes_rng(fn):
            raise ArgumentError("fn must be callable with a sample alone; use Map for what is random")
        self.dataset, self.fn = dataset, fn
        self.folder = str(Path(folder, fingerprint("map", fn, dataset, len(dataset))).absolute())
        self._store = RecordStore(self.folder, len(dataset))

    @property
    def listing_digest(self) -> str | None:
        """That of the dataset within."""
        return listing_of(self.dataset)

    @property
    def thread_safe(self) -> bool:
        """As the dataset within."""
        return bool(getattr(self.dataset, "thread_safe", False))

    @property
    def wants(self) -> Wants:
        """What the dataset within wants from caches for results that are missing; absent where it cannot tell."""
        inside = wants_within(self.dataset)
        return lambda indices: inside(np.array([at for at in indices.tolist() if not self._store.has(at)], np.int64))

    def fill(self, num_workers: int = 0) -> None:
        """Compute all that is missing now, in that many processes."""
        if len(self):
            loader = torch.utils.data.DataLoader(_Filling(self), _BATCH, num_workers=num_workers, collate_fn=len)
            for _ in loader:
                pass

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """The function of sample `index`."""
        at = one_within(index, len(self), "CachedMap")
        kept = self._store.get(at)
        return decode(kept) if kept is not None else self._computed(at, self.dataset[at])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The function of the samples of these indices; what is missing is fetched at once where the dataset can."""
        places = within(as_indices(indices), len(self), "CachedMap").tolist()
        kept = {at: self._store.get(at) for at in places}
        missing = [at for at, data in kept.items() if data is None]
        fetched = dict(zip(missing, samples_of(self.dataset, missing) if missing else [], strict=True))
        computed = {at: self._computed(at, sample) for at, sample in fetched.items()}
        return [computed[at] if data is None else decode(data) for at, data in ((at, kept[at]) for at in places)]

    def _computed(self, at: int, sample: Any) -> Any:
        data = encode(self.fn(sample))
        try:
            self._store.put(at, data)
        except OSError as error:
            warnings.warn(
                f"results cannot be kept in {self.folder} ({error.strerror}), and are computed each time: make room"
                " there, or give another folder",
                CacheWriteWarning,
                stacklevel=3,
            )
        return decode(data)


class _Filling(torch.utils.data.Dataset[None]):
    """Samples that are computed for the sake of being kept."""

    def __init__(self, filled: CachedMap) -> None:
        self._filled = filled

    def __len__(self) -> int:
        return len(self._filled)

    def __getitem__(self, index: int) -> None:
        self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> list[None]:
        self._filled.__getitems__(indices)
        return [None] * len(indices)
