"""Helpers of the tests of all formats: comparison of samples, and all ways to fetch them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Any

import numpy as np
import PIL.Image
import torch
from recorder import Recorder
from torch.utils.data import default_collate

from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead


def equal(ours: Any, theirs: Any) -> bool:
    """True if two samples or batches are equal, types and dtypes included."""
    if isinstance(ours, Mapping):
        return (
            isinstance(theirs, Mapping) and list(ours) == list(theirs) and all(equal(ours[k], theirs[k]) for k in ours)
        )
    if isinstance(ours, PIL.Image.Image):
        return (
            isinstance(theirs, PIL.Image.Image) and ours.mode == theirs.mode and equal(np.array(ours), np.array(theirs))
        )
    if isinstance(ours, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, np.ndarray):
        return isinstance(theirs, np.ndarray) and ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    if isinstance(ours, Sequence) and not isinstance(ours, (str, bytes)):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)


def all_ways_agree(dataset: Any, indices: Sequence[int]) -> None:
    """Samples one by one, many at once, and as one batch if the dataset can build it."""
    theirs = [dataset[index] for index in indices]
    assert equal(dataset.__getitems__(list(indices)), theirs)
    read = reader_of(dataset)
    if read is not None:
        empty = Recorder()
        assert equal(read(BatchRead(np.array(indices, np.int64), empty)), default_collate(theirs))
        assert empty.given


@contextmanager
def hidden(module: str) -> Iterator[None]:
    """As if the module were not installed."""
    names = [name for name in sys.modules if name == module or name.startswith(f"{module}.")]
    held = {name: sys.modules.pop(name) for name in names}
    finder = _Hides(module)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.modules.update(held)


class _Hides(MetaPathFinder):
    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name.partition(".")[0] == self.module:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
