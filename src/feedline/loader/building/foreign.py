"""Datasets of other libraries, and the classes with which feedline reads them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from feedline.core.huggingface import is_table
from feedline.core.recognition import Recognition

_ADAPTERS = {"datasets.arrow_dataset.Dataset": "feedline.datasets.tables.huggingface:HuggingFace"}
"""Foreign types, and the dataset class that reads whole batches of them; imported late, as pyarrow is slow."""


def adapt(dataset: Any) -> Any:
    """The dataset, with known foreign types replaced by readers of whole batches.

    Datasets inside torch's Subset and ConcatDataset are replaced, too.
    """
    if type(dataset) is Subset:
        inner = adapt(dataset.dataset)
        return dataset if inner is dataset.dataset else Subset(inner, dataset.indices)
    if type(dataset) is ConcatDataset:
        parts = list(map(adapt, dataset.datasets))
        return dataset if all(map(operator.is_, parts, dataset.datasets)) else ConcatDataset(parts)
    adapter = _ADAPTERS.get(f"{type(dataset).__module__}.{type(dataset).__qualname__}")
    return dataset if adapter is None else resolve_name(adapter)(dataset)


def plain_samples(dataset: Any) -> Callable[..., Any] | None:
    """`__getitems__` of an unformatted Hugging Face table, read by feedline.

    None for other datasets. The table may be inside torch's Subset. Samples equal the dataset's own.
    """
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    if not is_table(inner):
        return None
    read = adapt(dataset)
    table = read
    while type(table) is Subset:
        table = table.dataset
    return read.__getitems__ if getattr(table, "has_plain_samples", False) else None


_LIBRARIES = frozenset({"torchvision"})
"""Packages whose datasets may be recognized."""


_RECOGNIZER = "feedline.datasets.recognized.recognition:recognize"
"""Imported late: most loaders do without the image kernels."""


def may_be_recognized(dataset: Any) -> bool:
    """True if the dataset's class comes from a library that feedline knows.

    Datasets inside torch's wrappers count.
    """
    if type(dataset) is Subset:
        return may_be_recognized(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return any(map(may_be_recognized, dataset.datasets))
    return type(dataset).__module__.partition(".")[0] in _LIBRARIES


def recognize(dataset: Any) -> Recognition:
    """Examine a dataset, and the datasets inside torch's wrappers."""
    recognition: Recognition = resolve_name(_RECOGNIZER)(dataset)
    return recognition
