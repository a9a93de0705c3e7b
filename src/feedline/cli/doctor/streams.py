"""Checks of a stream: samples of two workers, and its length."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice
from time import monotonic
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from feedline.cli.doctor.data import length_of
from feedline.cli.doctor.findings import Finding, Severity
from feedline.cli.target import as_feedline
from feedline.core.rng_globals import restoring_globals
from feedline.loader.checks import SAME_SAMPLES
from feedline.loader.partitions import is_partitioned

READING_S = 3.0
"""Seconds after which no further batch of a stream is read."""


COMPARED_BATCHES = 8
"""Batches of two workers that are read to compare them."""


def duplicates(loader: TorchDataLoader[Any], ranks: int) -> Iterator[Finding]:
    """Findings on workers that read the same samples."""
    if not isinstance(loader.dataset, IterableDataset) or loader.num_workers < 2 or is_partitioned(loader.dataset):
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        number = sum(1 for _ in islice(_counts(loader, 2), COMPARED_BATCHES))
    if any(SAME_SAMPLES in str(warning.message) for warning in caught):
        each = f"{ranks} × {loader.num_workers}" if ranks > 1 else f"{loader.num_workers}"
        evidence = f"two workers read the same samples: the {each} workers would give every sample once each"
        remedy = (
            "give each its own part in __iter__ (torch.utils.data.get_worker_info() gives id and num_workers), or"
            " num_workers=1"
        )
        if ranks > 1:
            remedy += "; distributed='auto' divides the samples among the ranks"
        yield Finding("workers", evidence, Severity.BAD, remedy)
    elif number:
        yield Finding("workers", "two read different samples")


def length(loader: TorchDataLoader[Any]) -> Iterator[Finding]:
    """Length of a stream, compared with the samples read."""
    promised = length_of(loader.dataset) if isinstance(loader.dataset, IterableDataset) else None
    if promised is None:
        return
    read, deadline, has_ended = 0, monotonic() + READING_S, True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of batches beyond the length
        for samples in _counts(loader, 1):
            read += samples
            if read > promised or monotonic() > deadline:
                has_ended = False
                break
    if read > promised or (has_ended and read < promised):
        got = f"the stream ends after {read:,}" if has_ended else "the stream goes on"
        evidence = f"len() says {promised:,} samples, but {got}"
        yield Finding("length", evidence, Severity.BAD, "let __len__ return the number of samples")
    elif has_ended:
        yield Finding("length", f"{read:,} samples")


def _counts(loader: TorchDataLoader[Any], workers: int) -> Iterator[int]:
    """Number of samples in each small batch that `workers` processes read.

    The dataset of this process stays as it is.
    """
    changes: dict[str, Any] = {"num_workers": workers, "worker_method": "process", "persistent_workers": False}
    changes |= {"seed": 0, "distributed": None, "device": None, "pin_memory": False}
    changes |= {"collate_fn": len, "batch_size": 4, "drop_last": False}
    with restoring_globals(), as_feedline(loader, **changes) as copy:
        yield from copy
