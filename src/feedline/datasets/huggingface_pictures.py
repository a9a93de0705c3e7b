"""A column of pictures of a `datasets.Dataset`, made into tensors straight from the stored bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from feedline.datasets.arrays import Transform
from feedline.datasets.decoding import Decoding
from feedline.datasets.huggingface_table import StoredRows
from feedline.datasets.nulls import Nulls
from feedline.datasets.records import Keys
from feedline.datasets.spans import Int64s
from feedline.errors import SampleError
from feedline.rows import Empty

_MISSING = {"bytes": b"", "path": ""}


class Pictures:
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

    def batch(self, inside: Int64s, keys: Keys, empty: Empty) -> torch.Tensor:
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
