"""The extensions of `examples/extending`. Importing one registers it; here, only `registered` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import executor_pool
import feedline as fl
import invert_transform
import recordio_dataset
import zip_store

_PAIR = (invert_transform.Invert, invert_transform.Invert)

_ROWS: tuple[tuple[Callable[..., None], Callable[..., None], tuple[Any, ...], Any], ...] = (
    (fl.datasets.register_format, fl.datasets.unregister_format, ("recordio",), recordio_dataset.FORMAT),
    (fl.workers.register_pool, fl.workers.unregister_pool, ("executor",), executor_pool.KIND),
    (fl.stores.register_scheme, fl.stores.unregister_scheme, ("zipfile",), zip_store.SCHEME),
    (fl.transforms.register_fusion, fl.transforms.unregister_fusion, _PAIR, invert_transform.fuse),
)

for _, unregister, key, _ in _ROWS:
    unregister(*key)


@contextmanager
def registered() -> Iterator[None]:
    """The rows of all extensions, for the duration of a block."""
    for register, _, key, row in _ROWS:
        register(*key, row)
    yield
    for _, unregister, key, _ in _ROWS:
        unregister(*key)
