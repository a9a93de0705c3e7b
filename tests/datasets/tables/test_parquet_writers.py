"""Parquet files of other writers: old times and lists, odd names, empty row groups, columns in another order."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feedline.datasets import ORC, Arrow, Parquet
from feedline.errors import ArgumentError, SampleError


def test_times_of_spark_far_from_now(tmp_path: Path) -> None:
    """In nanoseconds, the year 1500 would overflow to 2084."""
    times = [dt.datetime(year, 1, 1) for year in (1, 1500, 1970, 2024, 9999)]  # noqa: DTZ001 - have no zone
    table = pa.table({"t": pa.array(times, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "spark.parquet", use_deprecated_int96_timestamps=True)
    pq.write_table(table, tmp_path / "other.parquet")
    for name in ("spark", "other"):
        data = Parquet(tmp_path / f"{name}.parquet")
        assert [data[i]["t"].item() for i in range(5)] == table["t"].cast(pa.int64()).to_pylist()
    assert len(Parquet(tmp_path)) == 10
    assert len(Parquet(tmp_path, filters=[("t", "<", times[2])])) == 4


@pytest.mark.parametrize("kind", [Parquet, Arrow, ORC], ids=lambda kind: kind.__name__)
def test_columns_may_have_another_order_in_each_file(tmp_path: Path, kind: Any) -> None:
    suffix = kind.__name__.lower()
    for name, table in {"a": {"x": [1], "y": ["one"]}, "b": {"y": ["two"], "x": [2]}}.items():
        write(tmp_path / f"{name}.{suffix}", pa.table(table))
    data = kind(tmp_path)
    assert [(list(row), row["x"].item(), row["y"]) for row in data] == [(["x", "y"], 1, "one"), (["x", "y"], 2, "two")]
    assert [row["x"].item() for row in data.__getitems__([1, 0])] == [2, 1]


def test_members_in_another_order_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"s": [{"a": 1, "b": 2}]}))
    write(tmp_path / "b.parquet", pa.table({"s": [{"b": 1, "a": 2}]}))
    with pytest.raises(SampleError, match=r"column 's' is struct<a: int64, b: int64> in .*struct<b: int64, a: int64>"):
        Parquet(tmp_path)


def write(path: Path, table: Any) -> None:
    if path.suffix == ".orc":
        import pyarrow.orc

        pyarrow.orc.write_table(table, path)
    elif path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)


def test_names_that_occur_twice_matter_only_if_they_are_chosen(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["x", "x", "y"])
    write(tmp_path / "a.parquet", table)
    assert Parquet(tmp_path, ["y"])[0]["y"].item() == Arrow(table, ["y"])[0]["y"].item() == 3
    with pytest.raises(ArgumentError, match=r"column 'x' is in .*a\.parquet more than once"):
        Parquet(tmp_path)


def test_names_with_dots_and_without_letters(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"": [1], "a.b": [2], "a": [{"b": 3}]}))
    assert Parquet(tmp_path, ["a.b"])[0]["a.b"].item() == 2
    assert Parquet(tmp_path, ["a"])[0]["a"]["b"].item() == 3
    assert Parquet(tmp_path, [""])[0][""].item() == 1


def test_row_groups_without_rows(tmp_path: Path) -> None:
    with pq.ParquetWriter(tmp_path / "a.parquet", pa.schema([("x", pa.int64())])) as writer:
        for count in (0, 3, 0, 2):
            writer.write_table(pa.table({"x": pa.array(range(count), pa.int64())}))
    assert [row["x"].item() for row in Parquet(tmp_path)] == [0, 1, 2, 0, 1]
    assert [row["x"].item() for row in Parquet(tmp_path, filters=[("x", ">", 0)])] == [1, 2, 1]


def test_lists_of_old_writers_and_maps_of_structs(tmp_path: Path) -> None:
    pairs = pa.map_(pa.string(), pa.struct([("x", pa.int64())]))
    table = pa.table({"l": [[1, 2], []], "m": pa.array([[("a", {"x": 1})], []], pairs)})
    pq.write_table(table, tmp_path / "a.parquet", use_compliant_nested_type=False)
    first, second = Parquet(tmp_path)
    assert (first["l"].tolist(), second["l"].tolist(), second["m"]) == ([1, 2], [], [])
    assert [(each["key"], each["value"]["x"].item()) for each in first["m"]] == [("a", 1)]


@pytest.mark.parametrize(
    "options", [{"data_page_version": "2.0"}, {"write_page_index": True}, {"version": "1.0"}], ids=str
)
def test_pages_and_indexes_of_all_versions(tmp_path: Path, options: Any) -> None:
    pq.write_table(pa.table({"x": range(1000)}), tmp_path / "a.parquet", row_group_size=100, **options)
    data = Parquet(tmp_path, filters=[("x", ">=", 950)])
    assert [row["x"].item() for row in data] == list(range(950, 1000))
