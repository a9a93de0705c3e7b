"""Hugging Face `datasets.Dataset`, reading its Arrow table directly if possible.

`targets_of` determines if a direct read certainly gives the result of `datasets`. `HuggingFaceImages` decodes a column
of images from the stored bytes. All other reads call `datasets`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from feedline import collate
from feedline.core.dataset import Batch, BatchRead, Keys, Traits, TransformFunction, check_reads_batches
from feedline.core.huggingface import is_table
from feedline.core.kernels import Int64s
from feedline.core.sample_transform import SampleTransform
from feedline.core.tensors import Allocator, as_indices, normalize_index, normalize_indices
from feedline.datasets.base import _keys_of
from feedline.datasets.decoding import decoder_of, split_transform
from feedline.datasets.tables.columns import NullError
from feedline.datasets.tables.huggingface_rows import StoredRows, opened_rows, rows_of
from feedline.datasets.tables.nulls import Nulls
from feedline.datasets.tables.types import ColumnType, ListType, NumberType, StructType, TextType, kind_of
from feedline.errors import ArgumentError, SampleError
from feedline.transforms import plan


class _DtypeRule(NamedTuple):
    """Dtypes of collated numbers in a format of `datasets`.

    `lists` is True if columns of lists are known to be read in the same way.
    """

    integers: torch.dtype
    floats: torch.dtype
    lists: bool


_RULES = {
    "torch": _DtypeRule(torch.int64, torch.float32, lists=True),
    "numpy": _DtypeRule(torch.int64, torch.float32, lists=True),
    None: _DtypeRule(torch.int64, torch.float64, lists=True),
}


def targets_of(dataset: Any) -> dict[str, torch.dtype | None] | None:
    """The dtype that each column collates to; None for a text.

    Returns None if `datasets` must format a column itself.
    """
    dataset_format = dataset.format
    rule = _RULES.get(dataset_format["type"])
    if rule is None or dataset_format["format_kwargs"] or dataset_format["output_all_columns"]:
        return None
    targets: dict[str, torch.dtype | None] = {}
    for name in _names_in_samples(dataset):
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


def plain_names(dataset: Any) -> list[str] | None:
    """Columns of a dataset without a format.

    None if its samples need the code of `datasets`.
    """
    dataset_format = dataset.format
    if dataset_format["type"] is not None or dataset_format["format_kwargs"] or dataset_format["output_all_columns"]:
        return None
    names = _names_in_samples(dataset)
    try:
        kinds = [kind_of(dataset.data.schema.field(name).type, name) for name in names]
    except ArgumentError:
        return None
    fine = all(map(_has_python_values, kinds)) and all(_is_plain(dataset.features[name]) for name in names)
    return names if names and fine else None


def _names_in_samples(dataset: Any) -> list[str]:
    """Columns of the format, in the order of the table."""
    chosen = set(dataset.format["columns"])
    return [name for name in dataset.column_names if name in chosen]


def _has_python_values(kind: ColumnType) -> bool:
    if isinstance(kind, ListType):
        return not isinstance(kind.item, (ListType, StructType)) and _has_python_values(kind.item)
    if isinstance(kind, NumberType):
        return kind.dtype.name in _KNOWN
    return isinstance(kind, TextType) and not kind.binary


def _is_plain(feature: Any) -> bool:
    """True if a feature needs no decoding.

    These are numbers, texts and labels, and lists of numbers or texts.
    """
    if type(feature).__name__ in {"List", "LargeList", "Sequence"}:
        return type(feature.feature).__name__ == "Value" and _is_plain(feature.feature)
    if type(feature).__name__ == "Value":  # times and decimals are stored as numbers, but are returned as other types
        return feature.dtype in _KNOWN or feature.dtype in _TEXTS
    return type(feature).__name__ == "ClassLabel"


def _is_known(kind: ColumnType, rule: _DtypeRule) -> bool:
    if isinstance(kind, TextType):
        return not kind.binary
    if isinstance(kind, ListType):
        return (
            rule.lists and isinstance(kind.item, NumberType) and _is_known(kind.item, rule) and kind.item.dtype != bool
        )
    if not isinstance(kind, NumberType):
        return False
    return kind.dtype.name in _KNOWN and (not kind.shape or (rule.lists and kind.dtype != bool))


_KNOWN = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float32", "float64", "bool"}


_TEXTS = {"string", "large_string", "string_view"}


def _target(kind: ColumnType, rule: _DtypeRule) -> torch.dtype | None:
    if isinstance(kind, ListType):
        return _target(kind.item, rule)
    if not isinstance(kind, NumberType):
        return None
    return {"b": torch.bool, "f": rule.floats}.get(kind.dtype.kind, rule.integers)


_MISSING = {"bytes": b"", "path": ""}


class HuggingFaceImages:
    """Images of a column, decoded and transformed in one step.

    `transform` is one that `feedline.transforms` can plan. Pickles with the dataset, without open rows.
    """

    def __init__(self, dataset: Any, column: str, transform: TransformFunction) -> None:
        self._dataset, self._column = dataset, column
        self.decoder = decoder_of("image", transform)
        self._rows: StoredRows | None = None

    def samples(self, inside: Int64s, rows: Sequence[int | None]) -> list[Any]:
        """The transformed image of each sample.

        `rows` are their positions in the batch, which seed random transforms.
        """
        sources = self._sources(inside)
        return [
            self.decoder(source, row, partial(self._describe, at))
            for source, row, at in zip(sources, rows, inside.tolist(), strict=True)
        ]

    def batch(self, inside: Int64s, keys: Keys | None, allocate: Allocator) -> torch.Tensor:
        """The transformed images as one tensor, in memory from `allocate`."""
        return self.decoder.batch(self._sources(inside), keys, allocate, lambda row: self._describe(int(inside[row])))

    def _sources(self, inside: Int64s) -> list[Any]:
        stored = self._opened.samples(inside)
        for each, at in zip(stored, inside.tolist(), strict=True):
            if not each["bytes"] and not each["path"]:
                raise SampleError(f"{self._describe(at)} is null; leave such rows out")
        return [each["bytes"] or each["path"] for each in stored]

    def _describe(self, at: int) -> str:
        return f"sample {at} of the Hugging Face dataset, column {self._column!r}"

    @property
    def _opened(self) -> StoredRows:
        rows = self._rows
        if rows is None:
            table = self._dataset.data.table.select([self._column]).flatten()
            table = table.rename_columns([name.rpartition(".")[2] for name in table.column_names])
            # No lock: if two threads compute this value, either result is valid.
            rows = self._rows = StoredRows(self._dataset, opened_rows(table, Nulls(_MISSING)))
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}


def _is_image(dataset: Any, column: str) -> bool:
    return type(dataset.features[column]).__name__ == "Image"


class HuggingFace(torch.utils.data.Dataset[Any]):
    """A `datasets.Dataset` with its format, transform and selection: `HuggingFace(ds)[i]` is `ds[i]`.

    Batches equal the batches of torch's DataLoader over `ds`. Numbers and texts, and lists of numbers in the formats
    "torch" and "numpy", are gathered from the memory-mapped table without the formatting of `datasets`. Other features,
    other formats, `set_transform` and nulls go through `datasets`.

    `transform` is applied to samples, or is a dict of transforms for values by column. For a column of images, decoding
    and one of feedline's transforms are one step from the stored bytes. Pickles as `datasets` does, by path.
    `fl.DataLoader` wraps a `datasets.Dataset` in this class itself.
    """

    def __init__(
        self, dataset: Any, transform: TransformFunction | Mapping[str, TransformFunction] | None = None
    ) -> None:
        _check_dataset(dataset)
        self.dataset = dataset
        self._names = _names_in_samples(dataset)
        by_column, whole = split_transform(transform, self._names)
        fused = {name: each for name, each in by_column.items() if plan(each) and _is_image(dataset, name)}
        self._images = {name: HuggingFaceImages(dataset, name, each) for name, each in fused.items()}
        self._steps = {name: SampleTransform(each) for name, each in by_column.items() if name not in fused}
        self._step = SampleTransform(whole)
        left = [name for name in self._names if name not in fused]
        self._rest: Any = None if not left else dataset.remove_columns(list(fused)) if fused else dataset
        self._targets = {} if self._rest is None else targets_of(self._rest)
        self._plain_names = None if self._rest is None else plain_names(self._rest)
        self._rows: StoredRows | None = None
        self._plain_rows: StoredRows | None = None

    @property
    def has_plain_samples(self) -> bool:
        """True if samples are Python's values, read from the table."""
        return self._plain_names is not None and not self._images

    @property
    def traits(self) -> Traits:
        """Traits: thread-safe, with batches, only without code of `datasets`."""
        images = [each.decoder for each in self._images.values()]
        one_by_one = self._targets is None or self._steps or self._step.transform is not None
        return Traits(
            thread_safe=self._targets is not None,
            reads_batches=not one_by_one and all(each.batchable for each in images),
            uses_keys=any(each.uses_keys for each in images),
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """`ds[index]`, transformed."""
        if self._rest is self.dataset and not self._is_row_of_tensors(index):
            return self._transform(self.dataset[index], None)
        at = normalize_index(index, len(self), "Dataset")
        return self._transform(self._read(np.array([at]), [None])[0], None)

    def _is_row_of_tensors(self, index: Any) -> bool:
        """True for a sample that is made faster from the table.

        That read also refuses damage. For one row of Python's values, `datasets` is faster.
        """
        is_row = type(index) is int and -len(self) <= index < len(self)
        return is_row and bool(self._targets) and self._rest.format["type"] == "torch"

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """`ds.__getitems__(indices)`, transformed."""
        inside = normalize_indices(as_indices(indices), len(self), "Dataset")
        return [self._transform(each, row) for row, each in enumerate(self._read(inside, range(len(inside))))]

    def read_batch(self, request: BatchRead) -> Batch:
        """The collated batch in one pass.

        TypeError if `datasets` or a transform must process each sample.
        """
        check_reads_batches(self)
        inside = normalize_indices(request.indices, len(self), "Dataset")
        drawing = [name for name, each in self._images.items() if each.decoder.uses_keys]
        keys = _keys_of(request.keys, len(inside), drawing)
        columns = self._rest_of_batch(inside, request.allocate)
        for name, images in self._images.items():
            columns[name] = images.batch(inside, keys.get(name), request.allocate)
        return {name: columns[name] for name in self._names}

    def _rest_of_batch(self, inside: Int64s, allocate: Allocator) -> dict[str, Any]:
        if not self._targets:
            return {}
        try:
            return self._direct.batch(inside, self._targets, allocate)
        except (SampleError, RuntimeError) as error:
            _check_intact(error)
            # A null, or lists of different lengths: left to `datasets` and torch.
            batch: dict[str, Any] = collate.default(self._rest.__getitems__(inside.tolist()), allocate=allocate)
            return batch

    def _read(self, inside: Int64s, rows: Sequence[int | None]) -> list[Any]:
        samples = self._rest_of_samples(inside)
        for name, images in self._images.items():
            for sample, image in zip(samples, images.samples(inside, rows), strict=True):
                sample[name] = image
        return [{name: each[name] for name in self._names} for each in samples] if self._images else samples

    def _rest_of_samples(self, inside: Int64s) -> list[Any]:
        if self._rest is None or not len(inside):
            return [{} for _ in range(len(inside))]
        try:
            if self._plain_names is not None:
                return self._plain.plain(inside)
            if self._targets and self._rest.format["type"] == "torch":
                return self._direct.converted(inside, self._targets)
        except SampleError as error:  # a null: `datasets` determines its value
            _check_intact(error)
        return list(self._rest.__getitems__(inside.tolist()))

    def _transform(self, sample: Any, row: int | None) -> Any:
        for name, step in self._steps.items():
            sample[name] = step(sample[name], row)
        return self._step(sample, row)

    @property
    def _direct(self) -> StoredRows:
        rows = self._rows
        if rows is None:
            assert self._rest is not None
            assert self._targets is not None
            rows = self._rows = StoredRows(self._rest, rows_of(self._rest.data.table, list(self._targets)))
        return rows

    @property
    def _plain(self) -> StoredRows:
        rows = self._plain_rows
        if rows is None:
            assert self._plain_names is not None
            rows = StoredRows(self._rest, rows_of(self._rest.data.table, self._plain_names))
            self._plain_rows = rows
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None, "_plain_rows": None}


def _check_intact(error: Exception) -> None:
    """Raise an error about damage again.

    `datasets` would read foreign memory, and could end the process.
    """
    if isinstance(error, SampleError) and not isinstance(error.__cause__, NullError):
        raise error


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, Mapping):
        raise ArgumentError(f"this is a dict of splits ({', '.join(map(str, dataset))}): pass one, such as ds['train']")
    if not is_table(dataset):
        hint = "use HuggingFaceStream for streams" if hasattr(dataset, "num_shards") else "pass a datasets.Dataset"
        raise ArgumentError(f"HuggingFace reads datasets.Dataset, not {type(dataset).__name__}; {hint}")
