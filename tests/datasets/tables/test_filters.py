"""Filters on null values: columns of any type, by rows, by statistics, and by folders."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feedline.datasets import Parquet
from feedline.errors import ArgumentError

COLUMNS = {
    "number": pa.array([1, None, 3]),
    "nan": pa.array([1.0, None, float("nan")]),
    "flag": pa.array([True, None, False]),
    "text": pa.array(["a", None, ""]),
    "bytes": pa.array([b"a", None, b""]),
    "date": pa.array([1, None, 2], pa.date32()),
    "decimal": pa.array([Decimal("1.5"), None, Decimal("2.5")]),
    "dictionary": pa.array(["a", None, "b"]).dictionary_encode(),
    "list": pa.array([[1], None, []]),
    "list_of_structs": pa.array([[{"a": 1}], None, [None]]),
    "fixed": pa.array([[1, 2], None, [None, None]], pa.list_(pa.int32(), 2)),
    "struct": pa.array([{"a": 1}, None, {"a": None}]),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pq.write_table(pa.table({**COLUMNS, "row": [0, 1, 2]}), tmp_path / "t.parquet", row_group_size=2)
    return tmp_path / "t.parquet"


def rows(path: Path, filters: Any) -> list[int]:
    return [sample["row"].item() for sample in Parquet(path, ["row"], filters=filters)]


@pytest.mark.parametrize("column", COLUMNS)
def test_columns_of_any_type_are_null_or_not(path: Path, column: str) -> None:
    assert rows(path, [(column, "!=", None)]) == [0, 2]
    assert rows(path, [(column, "==", None)]) == rows(path, [(column, "=", None)]) == [1]


def test_together_with_others(path: Path) -> None:
    assert rows(path, [("list", "!=", None), ("row", ">", 0)]) == [2]
    assert rows(path, [[("list", "==", None)], [("row", "==", 0)]]) == [0, 1]


def test_what_an_error_of_a_null_list_leaves_out_can_be_read(path: Path) -> None:
    dataset = Parquet(path, ["list"], filters=[("list", "!=", None)])
    assert [sample["list"].tolist() for sample in dataset] == [[1], []]


def test_folders_that_stand_for_null(tmp_path: Path) -> None:
    for number, folder in enumerate(("year=2024", "year=__HIVE_DEFAULT_PARTITION__")):
        (tmp_path / folder).mkdir()
        pq.write_table(pa.table({"row": [number]}), tmp_path / folder / "t.parquet")
    assert rows(tmp_path, [("year", "!=", None)]) == [0]
    assert rows(tmp_path, [("year", "==", None)]) == [1]


def test_null_has_no_order(path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"\('row', '<', None\) is invalid: nulls have no order; use == or !="):
        rows(path, [("row", "<", None)])
