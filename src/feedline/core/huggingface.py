"""Tables and streams of Hugging Face's `datasets`, recognized by name.

This module does not import that package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_BUFFERED = "BufferShuffledExamplesIterable"


_COUNTING = {"TakeExamplesIterable", "SkipExamplesIterable"}


_WITHOUT_REPLACEMENT = "all_exhausted_without_replacement"


def is_table(dataset: Any) -> bool:
    """True for a `datasets.Dataset`; does not import `datasets`."""
    names = [cls.__module__ for cls in type(dataset).__mro__ if cls.__name__ == "Dataset"]
    return "datasets.arrow_dataset" in names


def is_stream(dataset: Any) -> bool:
    """True for a `datasets.IterableDataset`; does not import `datasets`."""
    return any(
        cls.__module__ == "datasets.iterable_dataset" and cls.__name__ == "IterableDataset"
        for cls in type(dataset).__mro__
    )


def loses_shuffle_buffer(dataset: Any) -> bool:
    """True if the state of a `datasets.IterableDataset` lacks a shuffle buffer's contents."""
    return any(type(step).__name__ == _BUFFERED for step in stream_steps(dataset))


def counts_across_shards(dataset: Any) -> bool:
    """True if reading the shards of a stream separately changes its examples.

    For a `datasets.IterableDataset`: a step of it counts examples across the shards.
    """
    return any(_counts_examples(step) for step in stream_steps(dataset))


def _counts_examples(step: Any) -> bool:
    if type(step).__name__ in _COUNTING or getattr(step, "with_indices", False):
        return True
    # Each shard would drop its own incomplete batch, and repeat sources until its own end.
    strategy = getattr(step, "stopping_strategy", _WITHOUT_REPLACEMENT)
    return getattr(step, "drop_last_batch", False) or strategy != _WITHOUT_REPLACEMENT


def stream_steps(dataset: Any) -> Iterator[Any]:
    """The steps of a `datasets.IterableDataset`, from the last to its sources.

    Nothing for other objects.
    """
    pending = [dataset._ex_iterable] if hasattr(dataset, "_ex_iterable") else []
    while pending:
        step = pending.pop()
        yield step
        inner = getattr(step, "ex_iterable", None)
        pending += getattr(step, "ex_iterables", []) if inner is None else [inner]
