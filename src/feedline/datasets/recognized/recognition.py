"""Recognition of the datasets that feedline can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from feedline.collate.rows import RowBuffer
from feedline.core.huggingface import is_table
from feedline.core.recognition import Recognition, SampleReader
from feedline.core.shard_offsets import ShardOffsets
from feedline.datasets.recognized.vision import VISION, VisionReader, why_not
from feedline.transforms.recognized.origin import qualified_name, why_modified


def recognize(dataset: Any) -> Recognition:
    """Recognize a dataset, or the datasets in torch's wrappers."""
    wrap = _WRAPPERS.get(type(dataset))
    name = type(dataset).__name__
    if wrap is not None:
        reason = why_modified(dataset, "torch")
        return wrap(dataset) if reason is None else Recognition(name, None, reason)
    known = VISION.get(qualified_name(type(dataset)))
    if known is None:
        return Recognition(name, None, _why_unknown(dataset))
    reason = why_not(dataset, known)
    if reason is not None:
        return Recognition(name, None, reason)
    reader = VisionReader(dataset, known)
    findings = tuple(reader.findings)
    if not reader.uses_kernels:
        return Recognition(name, None, "none of its transforms is executed by the kernels", findings)
    return Recognition(name, reader, "", findings)


def _why_unknown(dataset: Any) -> str:
    if is_table(dataset):
        return "its format, transform or features need the code of Hugging Face's datasets"
    for base in type(dataset).__mro__[1:]:
        if qualified_name(base) in VISION:
            return f"a subclass of {base.__name__} may override any method: feedline reads only the class itself"
    return "not a class that feedline knows"


class _Original:
    """A dataset that runs its own code, in a wrapper with others."""

    uses_kernels = is_repeatable = False

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def refresh(self) -> None:
        """Do nothing."""

    def read(self, index: Any, rows: RowBuffer | None) -> Any:  # noqa: ARG002 - its samples are copied by collate
        return self._dataset[index]


class _Several:
    """Readers of the parts of a wrapper."""

    def __init__(self, dataset: Any, parts: Sequence[SampleReader]) -> None:
        self._dataset, self._parts = dataset, parts

    @property
    def uses_kernels(self) -> bool:
        return any(part.uses_kernels for part in self._parts)

    @property
    def is_repeatable(self) -> bool:
        return all(part.is_repeatable for part in self._parts)

    def refresh(self) -> None:
        for part in self._parts:
            part.refresh()


class _SubsetReader(_Several):
    def read(self, index: Any, rows: RowBuffer | None) -> Any:
        return self._parts[0].read(self._dataset.indices[index], rows)


class _ConcatReader(_Several):
    def __init__(self, dataset: Any, parts: Sequence[SampleReader]) -> None:
        super().__init__(dataset, parts)
        self._offsets = ShardOffsets(np.diff(dataset.cumulative_sizes, prepend=0))

    def read(self, index: Any, rows: RowBuffer | None) -> Any:
        whole = self._dataset
        if not 0 <= index < whole.cumulative_sizes[-1]:
            return whole[index]  # a negative index counts from the end, or raises an error
        part, row = self._offsets.one(index)
        return self._parts[part].read(row, rows)


def _recognize_wrapped(dataset: Any, inner: Sequence[Any], kind: type[_SubsetReader | _ConcatReader]) -> Recognition:
    parts = tuple(recognize(each) for each in inner)
    name = type(dataset).__name__
    if not any(part.reader for part in parts):
        return Recognition(name, None, "no dataset in it is read by feedline", (), parts)
    readers = [part.reader or _Original(each) for part, each in zip(parts, inner, strict=True)]
    return Recognition(name, kind(dataset, readers), "", (), parts)


def _subset(dataset: Any) -> Recognition:
    return _recognize_wrapped(dataset, [dataset.dataset], _SubsetReader)


def _concat(dataset: Any) -> Recognition:
    return _recognize_wrapped(dataset, dataset.datasets, _ConcatReader)


_WRAPPERS = {Subset: _subset, ConcatDataset: _concat}
