"""`HuggingFace`: a `datasets.Dataset`, whose table is read directly where the result is known to be equal.

The table of a `datasets.Dataset`: its rows read directly, and the columns for which that is known to be equal.

A column of pictures of a `datasets.Dataset`, made into tensors straight from the stored bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from feedline import collate
from feedline.core.dataset import Batch, BatchRead, Keys, Traits, check_reads_batches, is_table
from feedline.core.tensors import Allocator, allocate_tensor, as_indices, one_within, within
from feedline.datasets.arrays.npy import Transform
from feedline.datasets.base import _keys_of
from feedline.datasets.decoding import Decoding, SampleTransform, split_transform
from feedline.datasets.tables.base import ChunkRows
from feedline.datasets.tables.chunks import table_chunk
from feedline.datasets.tables.columns import Int64s
from feedline.datasets.tables.nulls import Nulls
from feedline.datasets.tables.types import ColumnType, ListType, NumberType, StructType, TextType, kind_of
from feedline.errors import ArgumentError, SampleError
from feedline.transforms import plan

Targets = Mapping[str, torch.dtype | None]


class StoredRows:
    """The rows of an Arrow table that a `datasets.Dataset` selects, in its order."""

    def __init__(self, dataset: Any, table: Any, nulls: Nulls) -> None:
        self._rows, self._bounds = _chunk_rows(table, nulls)
        self._selected: ChunkRows | None = None
        if dataset._indices is not None:
            selection = dataset._indices.table.rename_columns(["row"])
            self._selected, self._selected_bounds = _chunk_rows(selection, Nulls())

    def samples(self, indices: Int64s) -> list[dict[str, Any]]:
        """A dict for each sample, of what is stored."""
        return self._rows.samples(*_places(self._stored(indices), self._bounds))

    def converted(self, indices: Int64s, targets: Targets) -> list[dict[str, Any]]:
        """A dict for each sample, its tensors of the dtypes wanted."""
        wanted = list(targets.items())
        return [{n: each[n] if d is None else each[n].to(d) for n, d in wanted} for each in self.samples(indices)]

    def batch(self, indices: Int64s, targets: Targets, empty: Allocator) -> dict[str, Any]:
        """The collated batch; tensors of the dtypes wanted, in memory from `empty`."""
        final = set(targets.values())  # no rule converts a dtype that it also converts to

        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return (empty if dtype in final else allocate_tensor)(shape, dtype)

        batch = self._rows.batch(*_places(self._stored(indices), self._bounds), allocate)
        return {name: _as(batch[name], dtype, empty) for name, dtype in targets.items()}

    def _stored(self, indices: Int64s) -> Int64s:
        """The rows of the table that samples are."""
        if self._selected is None:
            return indices
        found = self._selected.batch(*_places(indices, self._selected_bounds), allocate_tensor)["row"]
        rows: Int64s = found.numpy().astype(np.int64)
        return rows


def _chunk_rows(table: Any, nulls: Nulls) -> tuple[ChunkRows, Int64s]:
    kind = StructType(tuple((field.name, kind_of(field.type, field.name)) for field in table.schema))
    batches = [batch for batch in table.to_batches() if batch.num_rows]
    bounds = np.cumsum([0, *(batch.num_rows for batch in batches)])
    chunks = [table_chunk(kind, batch) for batch in batches]
    return ChunkRows(kind, chunks, nulls, lambda chunk, row: f"row {bounds[chunk] + row}"), bounds


def _places(rows: Int64s, bounds: Int64s) -> tuple[Int64s, Int64s]:
    which = np.searchsorted(bounds, rows, side="right") - 1
    return which, rows - bounds[which]


def _as(values: Any, dtype: torch.dtype | None, empty: Allocator) -> Any:
    if dtype is None or values.dtype == dtype:
        return values
    return empty(tuple(values.shape), dtype).copy_(values)


class _Rule(NamedTuple):
    """What a format of `datasets` makes of numbers, once they are collated, and which columns it is known for."""

    integers: torch.dtype
    floats: torch.dtype
    texts: bool
    lists: bool


_RULES = {
    "torch": _Rule(torch.int64, torch.float32, texts=True, lists=True),
    "numpy": _Rule(torch.int64, torch.float32, texts=False, lists=True),
    None: _Rule(torch.int64, torch.float64, texts=True, lists=False),
}


def targets_of(dataset: Any) -> dict[str, torch.dtype | None] | None:
    """The columns of a sample with the dtype that each collates to (None: text); None if `datasets` must see to one."""
    told = dataset.format
    rule = _RULES.get(told["type"])
    if rule is None or told["format_kwargs"] or told["output_all_columns"]:
        return None
    targets: dict[str, torch.dtype | None] = {}
    for name in told["columns"]:
        feature = dataset.features[name]
        if not _is_plain(feature):
            return None
        try:
            kind = kind_of(dataset.data.schema.field(name).type, name)
        except ArgumentError:
            return None
        if not _is_known(kind, rule):
            return None
        targets[name] = _target(kind, rule)
    return targets or None


def _is_plain(feature: Any) -> bool:
    """Whether a feature is stored as what it is: a number, a text, a label, or a list of numbers or texts."""
    if type(feature).__name__ in {"List", "LargeList", "Sequence"}:
        return type(feature.feature).__name__ == "Value" and _is_plain(feature.feature)
    if type(feature).__name__ == "Value":  # times and decimals are stored as numbers, and are none
        return feature.dtype in _KNOWN or feature.dtype in _TEXTS
    return type(feature).__name__ == "ClassLabel"


def _is_known(kind: ColumnType, rule: _Rule) -> bool:
    if isinstance(kind, TextType):
        return rule.texts and not kind.binary
    if isinstance(kind, ListType):
        return (
            rule.lists and isinstance(kind.item, NumberType) and _is_known(kind.item, rule) and kind.item.dtype != bool
        )
    if not isinstance(kind, NumberType):
        return False
    return kind.dtype.name in _KNOWN and (not kind.shape or (rule.lists and kind.dtype != bool))


_KNOWN = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float32", "float64", "bool"}


_TEXTS = {"string", "large_string", "string_view"}


def _target(kind: ColumnType, rule: _Rule) -> torch.dtype | None:
    if isinstance(kind, ListType):
        return _target(kind.item, rule)
    if not isinstance(kind, NumberType):
        return None
    return {"b": torch.bool, "f": rule.floats}.get(kind.dtype.kind, rule.integers)


_MISSING = {"bytes": b"", "path": ""}


class HuggingFaceImages:
    """The pictures of a column with a transform of feedline's own; pickles with its dataset, without what it opened."""

    def __init__(self, dataset: Any, column: str, transform: Transform) -> None:
        self._dataset, self._column = dataset, column
        self.decoding = Decoding("image", transform)
        self._rows: StoredRows | None = None

    def samples(self, inside: Int64s, rows: Sequence[int | None]) -> list[Any]:
        """The picture of each sample; `rows` are their places in the batch, by which they draw."""
        sources = self._sources(inside)
        return [
            self.decoding(source, row, partial(self._where, at))
            for source, row, at in zip(sources, rows, inside.tolist(), strict=True)
        ]

    def batch(self, inside: Int64s, keys: Keys | None, empty: Allocator) -> torch.Tensor:
        """The pictures as one tensor."""
        return self.decoding.batch(self._sources(inside), keys, empty, lambda row: self._where(int(inside[row])))

    def _sources(self, inside: Int64s) -> list[Any]:
        stored = self._opened.samples(inside)
        for each, at in zip(stored, inside.tolist(), strict=True):
            if not each["bytes"] and not each["path"]:
                raise SampleError(f"{self._where(at)} is null; leave such rows out")
        return [each["bytes"] or each["path"] for each in stored]

    def _where(self, at: int) -> str:
        return f"sample {at} of the Hugging Face dataset, column {self._column!r}"

    @property
    def _opened(self) -> StoredRows:
        rows = self._rows
        if rows is None:
            table = self._dataset.data.table.select([self._column]).flatten()
            table = table.rename_columns([name.rpartition(".")[2] for name in table.column_names])
            rows = self._rows = StoredRows(self._dataset, table, Nulls(_MISSING))  # either of two threads' serves
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}


def is_picture(dataset: Any, column: str) -> bool:
    """Whether a column is stored as pictures."""
    return type(dataset.features[column]).__name__ == "Image"


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
        self._pictures = {name: HuggingFaceImages(dataset, name, each) for name, each in fused.items()}
        self._steps = {name: SampleTransform(each) for name, each in by_column.items() if name not in fused}
        self._step = SampleTransform(whole)
        left = [name for name in self._names if name not in fused]
        self._rest: Any = None if not left else dataset.remove_columns(list(fused)) if fused else dataset
        self._targets = {} if self._rest is None else targets_of(self._rest)
        self._rows: StoredRows | None = None

    @property
    def traits(self) -> Traits:
        """Threads may read, and whole batches be read, where no code of `datasets` runs for each sample."""
        images = [each.decoding for each in self._pictures.values()]
        one_by_one = self._targets is None or self._steps or self._step.transform is not None
        return Traits(
            thread_safe=self._targets is not None,
            reads_batches=not one_by_one and all(each.batchable for each in images),
            uses_keys=any(each.draws for each in images),
        )

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

    def read_batch(self, request: BatchRead) -> Batch:
        """The collated batch in one pass; TypeError where `datasets` or a transform has to see each sample."""
        check_reads_batches(self)
        inside = within(request.indices, len(self), "Dataset")
        drawing = [name for name, each in self._pictures.items() if each.decoding.draws]
        keys = _keys_of(request.keys, len(inside), drawing)
        columns = self._rest_of_batch(inside, request.allocate)
        for name, pictures in self._pictures.items():
            columns[name] = pictures.batch(inside, keys.get(name), request.allocate)
        return {name: columns[name] for name in self._names}

    def _rest_of_batch(self, inside: Int64s, empty: Allocator) -> dict[str, Any]:
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
