"""The table of a `datasets.Dataset`: its rows read directly, and the columns for which that is known to be equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from feedline.datasets.chunks import table_chunk
from feedline.datasets.kinds import Kind, Lists, Numbers, Struct, Text, kind_of
from feedline.datasets.nulls import Nulls
from feedline.datasets.spans import Int64s
from feedline.datasets.tables import ChunkRows
from feedline.errors import ArgumentError
from feedline.rows import Empty, torch_empty

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

    def batch(self, indices: Int64s, targets: Targets, empty: Empty) -> dict[str, Any]:
        """The collated batch; tensors of the dtypes wanted, in memory from `empty`."""
        final = set(targets.values())  # no rule converts a dtype that it also converts to

        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return (empty if dtype in final else torch_empty)(shape, dtype)

        batch = self._rows.batch(*_places(self._stored(indices), self._bounds), allocate)
        return {name: _as(batch[name], dtype, empty) for name, dtype in targets.items()}

    def _stored(self, indices: Int64s) -> Int64s:
        """The rows of the table that samples are."""
        if self._selected is None:
            return indices
        found = self._selected.batch(*_places(indices, self._selected_bounds), torch_empty)["row"]
        rows: Int64s = found.numpy().astype(np.int64)
        return rows


def _chunk_rows(table: Any, nulls: Nulls) -> tuple[ChunkRows, Int64s]:
    kind = Struct(tuple((field.name, kind_of(field.type, field.name)) for field in table.schema))
    batches = [batch for batch in table.to_batches() if batch.num_rows]
    bounds = np.cumsum([0, *(batch.num_rows for batch in batches)])
    chunks = [table_chunk(kind, batch) for batch in batches]
    return ChunkRows(kind, chunks, nulls, lambda chunk, row: f"row {bounds[chunk] + row}"), bounds


def _places(rows: Int64s, bounds: Int64s) -> tuple[Int64s, Int64s]:
    which = np.searchsorted(bounds, rows, side="right") - 1
    return which, rows - bounds[which]


def _as(values: Any, dtype: torch.dtype | None, empty: Empty) -> Any:
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


def _is_known(kind: Kind, rule: _Rule) -> bool:
    if isinstance(kind, Text):
        return rule.texts and not kind.binary
    if isinstance(kind, Lists):
        return rule.lists and isinstance(kind.item, Numbers) and _is_known(kind.item, rule) and kind.item.dtype != bool
    if not isinstance(kind, Numbers):
        return False
    return kind.dtype.name in _KNOWN and (not kind.shape or (rule.lists and kind.dtype != bool))


_KNOWN = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float32", "float64", "bool"}
_TEXTS = {"string", "large_string", "string_view"}


def _target(kind: Kind, rule: _Rule) -> torch.dtype | None:
    if isinstance(kind, Lists):
        return _target(kind.item, rule)
    if not isinstance(kind, Numbers):
        return None
    return {"b": torch.bool, "f": rule.floats}.get(kind.dtype.kind, rule.integers)
