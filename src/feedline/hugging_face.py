"""What objects of Hugging Face's `datasets` are, told without importing it, nor what reads them here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_BUFFERED = "BufferShuffledExamplesIterable"


def is_table(dataset: Any) -> bool:
    """Whether this is a `datasets.Dataset`, asked without importing `datasets`."""
    return any(
        cls.__module__ == "datasets.arrow_dataset" and cls.__name__ == "Dataset" for cls in type(dataset).__mro__
    )


def forgets(dataset: Any) -> bool:
    """Whether the state of a `datasets.IterableDataset` lacks what it holds: the contents of a shuffle buffer."""
    return _BUFFERED in set(steps(dataset))


def steps(dataset: Any) -> Iterator[str]:
    """The class names of what a `datasets.IterableDataset` does, from its end to its sources; of others, nothing."""
    todo = [dataset._ex_iterable] if hasattr(dataset, "_ex_iterable") else []
    while todo:
        step = todo.pop()
        yield type(step).__name__
        inner = getattr(step, "ex_iterable", None)
        todo += getattr(step, "ex_iterables", []) if inner is None else [inner]
