"""`HuggingFace`: a `datasets.Dataset`, whose table is read directly where the result is known to be equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import collate
from feedline.datasets.arrays import Transform
from feedline.datasets.decoding import Step, split_transform
from feedline.datasets.huggingface_pictures import Pictures, is_picture
from feedline.datasets.huggingface_table import StoredRows, targets_of
from feedline.datasets.nulls import Nulls
from feedline.datasets.records import Keys, _keys_of
from feedline.datasets.spans import Int64s
from feedline.errors import ArgumentError, SampleError
from feedline.hugging_face import is_table
from feedline.rows import Empty, as_indices, one_within, within
from feedline.transforms import plan


class HuggingFace(torch.utils.data.Dataset[Any]):
    """A `datasets.Dataset` with its format, transform and selection: `HuggingFace(ds)[i]` is `ds[i]`.

    Batches are what torch's DataLoader makes of `ds`. Numbers, texts and, in the formats "torch" and "numpy", lists of
    numbers are gathered from the memory-mapped table without `datasets`' own formatting; other features, other
    formats, `set_transform` and missing values go through it. `transform` is for samples, or a dict for values by
    column: a picture and a transform of feedline's own are one step, straight from the stored bytes. Pickles as
    `datasets` does: by path. `fl.DataLoader` does the same for a `datasets.Dataset` that is given as it is.
    """

    def __init__(self, dataset: Any, transform: Transform | Mapping[str, Transform] | None = None) -> None:
        _refuse_others(dataset)
        self.dataset = dataset
        self._names = list(dataset.format["columns"])
        by_column, whole = split_transform(transform, self._names)
        fused = {name: each for name, each in by_column.items() if plan(each) and is_picture(dataset, name)}
        self._pictures = {name: Pictures(dataset, name, each) for name, each in fused.items()}
        self._steps = {name: Step(each) for name, each in by_column.items() if name not in fused}
        self._step = Step(whole)
        left = [name for name in self._names if name not in fused]
        self._rest: Any = None if not left else dataset.remove_columns(list(fused)) if fused else dataset
        self._targets = {} if self._rest is None else targets_of(self._rest)
        self._rows: StoredRows | None = None

    @property
    def thread_safe(self) -> bool:
        """Whether several threads may read: they may where nothing of `datasets`' own runs for each sample."""
        return self._targets is not None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """What `ds[index]` gives, transformed."""
        if self._rest is self.dataset:
            return self._transformed(self.dataset[index], None)
        at = one_within(index, len(self), "Dataset")
        return self._transformed(self._merged(np.array([at]), [None])[0], None)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """What `ds.__getitems__(indices)` gives, transformed."""
        inside = within(as_indices(indices), len(self), "Dataset")
        return [self._transformed(each, row) for row, each in enumerate(self._merged(inside, range(len(inside))))]

    @property
    def gather(self) -> Callable[..., Any]:
        """`gather(indices, empty)`, with `keys` where pictures are random: the collated batch in one pass.

        Absent where samples have to be seen one by one: by `datasets`, or by a transform.
        """
        if self._targets is None or self._steps or self._step.transform is not None:
            raise AttributeError("gather: datasets, or a transform, has to see each sample")
        if not all(each.decoding.batchable for each in self._pictures.values()):
            raise AttributeError("gather: pictures are not of one size")
        return self._drawn if any(each.decoding.draws for each in self._pictures.values()) else self._gathered

    def _gathered(self, indices: NDArray[np.int64], empty: Empty) -> Any:
        return self._drawn(indices, empty, None)

    def _drawn(self, indices: NDArray[np.int64], empty: Empty, keys: Keys) -> Any:
        inside = within(indices, len(self), "Dataset")
        drawn = _keys_of(keys, len(inside), [name for name, each in self._pictures.items() if each.decoding.draws])
        found = self._rest_of_batch(inside, empty)
        for name, pictures in self._pictures.items():
            found[name] = pictures.batch(inside, drawn.get(name), empty)
        return {name: found[name] for name in self._names}

    def _rest_of_batch(self, inside: Int64s, empty: Empty) -> dict[str, Any]:
        if not self._targets:
            return {}
        try:
            return self._direct.batch(inside, self._targets, empty)
        except SampleError:  # a value is missing: `datasets` says what stands for it
            found: dict[str, Any] = collate.default(self._rest.__getitems__(inside.tolist()), empty=empty)
            return found

    def _merged(self, inside: Int64s, rows: Sequence[int | None]) -> list[Any]:
        samples = self._rest_of_samples(inside)
        for name, pictures in self._pictures.items():
            for sample, picture in zip(samples, pictures.samples(inside, rows), strict=True):
                sample[name] = picture
        return [{name: each[name] for name in self._names} for each in samples] if self._pictures else samples

    def _rest_of_samples(self, inside: Int64s) -> list[Any]:
        if self._rest is None or not len(inside):
            return [{} for _ in range(len(inside))]
        if self._targets and self._rest.format["type"] == "torch":
            try:
                return self._direct.converted(inside, self._targets)
            except SampleError:  # a value is missing: `datasets` says what stands for it
                pass
        return list(self._rest.__getitems__(inside.tolist()))

    def _transformed(self, sample: Any, row: int | None) -> Any:
        for name, step in self._steps.items():
            sample[name] = step(sample[name], row)
        return self._step(sample, row)

    @property
    def _direct(self) -> StoredRows:
        rows = self._rows
        if rows is None:
            assert self._rest is not None
            assert self._targets is not None
            table = self._rest.data.table.select(list(self._targets))
            rows = self._rows = StoredRows(self._rest, table, Nulls())  # either of two threads' results serves
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}


def _refuse_others(dataset: Any) -> None:
    if isinstance(dataset, Mapping):
        raise ArgumentError(f"this is a dict of splits ({', '.join(map(str, dataset))}): give one, as ds['train']")
    if not is_table(dataset):
        hint = "HuggingFaceStream is for such streams" if hasattr(dataset, "num_shards") else "give a Dataset"
        raise ArgumentError(f"HuggingFace reads datasets.Dataset, not {type(dataset).__name__}; {hint}")
