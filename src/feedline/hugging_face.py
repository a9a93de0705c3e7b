"""What objects of Hugging Face's `datasets` are, told without importing it, nor what reads them here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_BUFFERED = "BufferShuffledExamplesIterable"
_COUNTING = {"TakeExamplesIterable", "SkipExamplesIterable"}
_WITHOUT_REPLACEMENT = "all_exhausted_without_replacement"


def is_table(dataset: Any) -> bool:
    """Whether this is a `datasets.Dataset`, asked without importing `datasets`."""
    return any(
        cls.__module__ == "datasets.arrow_dataset" and cls.__name__ == "Dataset" for cls in type(dataset).__mro__
    )


def is_stream(dataset: Any) -> bool:
    """Whether this is a `datasets.IterableDataset`, asked without importing `datasets`."""
    return any(
        cls.__module__ == "datasets.iterable_dataset" and cls.__name__ == "IterableDataset"
        for cls in type(dataset).__mro__
    )


def forgets(dataset: Any) -> bool:
    """Whether the state of a `datasets.IterableDataset` lacks what it holds: the contents of a shuffle buffer."""
    return any(type(step).__name__ == _BUFFERED for step in steps(dataset))


def counts(dataset: Any) -> bool:
    """Whether the shards of a `datasets.IterableDataset`, each by itself, would give other examples than all together.

    They do where something is counted over the shards.
    """
    return any(_counts(step) for step in steps(dataset))


def _counts(step: Any) -> bool:
    if type(step).__name__ in _COUNTING or getattr(step, "with_indices", False):
        return True
    # an incomplete batch would be dropped at the end of each shard, and sources cycled through until a shard has ended
    strategy = getattr(step, "stopping_strategy", _WITHOUT_REPLACEMENT)
    return getattr(step, "drop_last_batch", False) or strategy != _WITHOUT_REPLACEMENT


def steps(dataset: Any) -> Iterator[Any]:
    """What a `datasets.IterableDataset` does, from its end to its sources; of others, nothing."""
    todo = [dataset._ex_iterable] if hasattr(dataset, "_ex_iterable") else []
    while todo:
        step = todo.pop()
        yield step
        inner = getattr(step, "ex_iterable", None)
        todo += getattr(step, "ex_iterables", []) if inner is None else [inner]
