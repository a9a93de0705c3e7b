"""Rows of tables with different shapes: the error of collating them names the row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import feedline as fl
from feedline.core.dataset import BatchRead
from feedline.core.tensors import allocate_tensor
from feedline.datasets import Arrow, Parquet

TABLE = pa.table({"y": [0, 1, 2, 3], "x": [[1, 2], [3, 4], [5], [6, 7]]})


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def test_of_a_file_by_path_and_row(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "t.parquet")
    with fl.DataLoader(Parquet(tmp_path), 4) as loader, pytest.raises(RuntimeError, match="equal size") as caught:
        next(iter(loader))
    place = tmp_path / "t.parquet"
    expected = f"{place}, row 2 (row group 0): column 'x' has shape (1,), and (2,) in {place}, row 0 (row group 0)"
    assert expected in notes(caught.value)
    assert "feedline.collate.pad()" in notes(caught.value)


def test_of_a_table_by_row() -> None:
    with pytest.raises(RuntimeError) as caught:
        Arrow(TABLE).read_batch(BatchRead(np.array([3, 1, 2]), allocate_tensor))
    assert "row 2 of the table: column 'x' has shape (1,), and (2,) in row 3 of the table" in notes(caught.value)


@pytest.mark.parametrize(
    ("column", "shapes"),
    [
        ([[[1], [2, 3]], [[1], [2]]], "has shape (2, 1), and [(1,), (2,)] in row 0"),
        ([[["a"]], [["a"], ["b"]]], "has shape [['str'], ['str']], and [['str']] in row 0"),
        ([{"l": [1]}, {"l": []}], "has shape {'l': (0,)}, and {'l': (1,)} in row 0"),
    ],
    ids=["lists of lists", "texts", "structs"],
)
def test_far_within(column: list[Any], shapes: str) -> None:
    with pytest.raises((RuntimeError, TypeError)) as caught:
        Arrow(pa.table({"x": column})).read_batch(BatchRead(np.array([0, 1]), allocate_tensor))
    assert f"row 1 of the table: column 'x' {shapes}" in notes(caught.value)


def test_a_null_elsewhere_changes_nothing() -> None:
    with pytest.raises(RuntimeError, match="equal size"):
        Arrow(TABLE.append_column("z", pa.array([None, 1, 2, 3]))).read_batch(BatchRead(np.arange(4), allocate_tensor))


def test_other_errors_of_collating_stay_as_they_are() -> None:
    def full(*_: Any) -> Any:
        raise RuntimeError("no memory is left")

    with pytest.raises(RuntimeError, match="no memory is left") as caught:
        Arrow(TABLE, ["y"]).read_batch(BatchRead(np.array([0, 1]), full))
    assert "column" not in "".join(getattr(caught.value, "__notes__", []))
