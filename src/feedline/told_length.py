"""Notices iterable datasets that give more than they said they would."""

from __future__ import annotations

import warnings


class ToldLength:
    """Counts what an iterator yields against the length that `len(loader)` was told, and warns as torch does."""

    def __init__(self, dataset: object, told: int, num_workers: int) -> None:
        self._dataset, self._told, self._num_workers = dataset, told, num_workers
        self._yielded = 0

    def count(self) -> None:
        """One more batch was yielded."""
        self._yielded += 1
        if self._yielded <= self._told:
            return
        text = (
            f"Length of IterableDataset {self._dataset} was reported to be {self._told} (when accessing "
            f"len(dataloader)), but {self._yielded} samples have been fetched. "
        )
        if self._num_workers > 0:
            text += (
                "For multiprocessing data-loading, this may come from workers that all read the same samples: give "
                "each its own part in __iter__ (torch.utils.data.get_worker_info() tells id and num_workers)."
            )
        warnings.warn(text, stacklevel=4)
