"""Rows of Parquet files chosen by folders, by statistics, and by values."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorder import Recorder
from rounds import rounds

import feedline as fl
from feedline import stores
from feedline.core.dataset import BatchRead
from feedline.datasets import Parquet
from feedline.errors import ArgumentError, SampleError

N = 60


def write(path: Path, first: int = 0, **columns: Any) -> None:
    """20 rows from this number on, in row groups of 5."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"x": np.arange(first, first + 20), "f": np.arange(first, first + 20) / 2, **columns})
    pq.write_table(table, path, row_group_size=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "data/year=2023/kind=a%20b/0.parquet", 0)
    write(tmp_path / "data/year=2024/kind=a%20b/0.parquet", 20)
    write(tmp_path / "data/year=2024/kind=7/0.parquet", 40)
    return tmp_path / "data"


@pytest.fixture
def far(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The same in a store in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    system = fsspec.filesystem("memory")
    system.put(str(folder), "/hive", recursive=True)
    yield "memory://hive"
    system.rm("/hive", recursive=True)


class TestFolders:
    def test_become_columns_behind_the_files_own(self, folder: Path, far: str) -> None:
        for place in (folder, far):
            dataset = Parquet(place)
            assert len(dataset) == N
            assert list(dataset[0]) == ["x", "f", "year", "kind"]
            # in the order of the paths, where 7 comes before a
            wanted = [(0, 2023, "a b"), (40, 2024, "7"), (20, 2024, "a b")]
            found = [dataset[at] for at in (0, 20, 40)]
            assert [(each["x"].item(), each["year"].item(), each["kind"]) for each in found] == wanted
            assert found[0]["year"].dtype == torch.int64

    def test_are_chosen_like_others(self, folder: Path, far: str) -> None:
        for place in (folder, far):
            dataset, empty = Parquet(place, ["year", "x"]), Recorder()
            batch = dataset.read_batch(BatchRead(np.array([0, 59, 1]), empty))
            assert list(batch) == ["year", "x"]
            assert batch["year"].tolist() == [2023, 2024, 2023]
            assert empty.holds(batch)
            assert list(Parquet(place, ["x"])[0]) == ["x"]
            only = pickle.loads(pickle.dumps(Parquet(place, ["kind"])))
            assert only.__getitems__([0, 20, 59]) == [{"kind": "a b"}, {"kind": "7"}, {"kind": "a b"}]
            assert len(only) == N

    def test_count_below_what_was_given(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert list(Parquet(folder / "year=2023")[0]) == ["x", "f", "kind"]
        assert list(Parquet(folder / "year=2023/kind=a%20b")[0]) == ["x", "f"]
        assert list(Parquet(folder / "year=2023/kind=a%20b/0.parquet")[0]) == ["x", "f", "year", "kind"]
        assert list(Parquet(f"{folder}/year={{2023..2024}}/*/0.parquet")[0]) == ["x", "f", "year", "kind"]
        monkeypatch.chdir(folder / "year=2024")
        assert list(Parquet("kind=7/0.parquet")[0]) == ["x", "f", "kind"]
        assert list(Parquet("kind=7")[0]) == ["x", "f"]
        assert Parquet("kind=*/0.parquet")[0]["kind"] == "7"

    def test_of_a_filesystem_count_as_well(self, folder: Path) -> None:
        there = pa.fs.SubTreeFileSystem(str(folder), pa.fs.LocalFileSystem())
        dataset = Parquet("year=2024/kind=7/0.parquet", filesystem=there, filters=[("year", "=", 2024)])
        assert (len(dataset), dataset[3]["kind"].item()) == (20, 7)

    def test_that_a_file_stores_itself_are_the_files(self, tmp_path: Path) -> None:
        write(tmp_path / "year=1/0.parquet", year=[1999] * 20)
        assert Parquet(tmp_path)[0]["year"].item() == 1999
        assert len(Parquet(tmp_path, filters=[("year", "=", 1999)])) == 20

    def test_that_stand_for_null_follow_the_rule_for_nulls(self, tmp_path: Path) -> None:
        write(tmp_path / "year=__HIVE_DEFAULT_PARTITION__/0.parquet")
        write(tmp_path / "year=2024/0.parquet", 20)
        with pytest.raises(SampleError, match=r"0\.parquet, row 0 \(row group 0\): column 'year' is null"):
            Parquet(tmp_path)[20]
        assert Parquet(tmp_path, nulls={"year": -1})[20]["year"].item() == -1
        assert len(Parquet(tmp_path, filters=[("year", "!=", 2000)])) == 20

    def test_that_not_all_files_have_are_named(self, folder: Path) -> None:
        write(folder / "year=2025/0.parquet")
        with pytest.raises(SampleError, match=r"b/0\.parquet is in a folder kind=..., but .*2025/0.* is not"):
            Parquet(folder)
        assert Parquet(folder, ["x", "year"])[-1]["year"].item() == 2025
        with pytest.raises(SampleError, match=r"is in a folder kind="):
            Parquet(folder, ["x"], filters=[("kind", "=", "7")])

    def test_that_are_not_there_are_named_with_those_that_are(self, folder: Path) -> None:
        with pytest.raises(ArgumentError, match=r"column 'month' is not in .*; there are x, f, year, kind"):
            Parquet(folder, ["x", "month"], filters=None)


def read_by_filters(dataset: Any, *arguments: Any, **more: Any) -> tuple[Any, int]:
    """A dataset whose footers are known, and the number of bytes read to choose its rows."""
    dataset(*arguments)
    before = stores.statistics().nbytes
    return dataset(*arguments, **more), stores.statistics().nbytes - before


class TestNothingIsRead:
    def test_where_folders_tell_all(self, far: str) -> None:
        dataset, nbytes = read_by_filters(Parquet, far, filters=[("year", "in", [2024, 2025]), ("kind", "!=", "7")])
        assert nbytes == 0
        assert dataset.shard_sizes.tolist() == [0] * 8 + [5] * 4
        assert dataset[0]["x"].item() == 20

    def test_where_statistics_tell_that_no_row_matches(self, far: str) -> None:
        Parquet(far)  # reads the footers
        before = stores.statistics().nbytes
        with pytest.raises(ArgumentError, match=r"match none of the 60 rows of memory://hive/.* and 2 more"):
            Parquet(far, filters=[("x", ">", 1000)])
        assert stores.statistics().nbytes == before
        _, all_nbytes = read_by_filters(Parquet, far, filters=[("x", "!=", 1000)])
        dataset, nbytes = read_by_filters(Parquet, far, filters=[("x", ">=", 57)])
        assert 0 < nbytes < all_nbytes / 6
        assert [sample["x"].item() for sample in dataset.__getitems__(range(len(dataset)))] == [57, 58, 59]

    def test_of_files_whose_folder_does_not_match(self, far: str) -> None:
        dataset, some = read_by_filters(Parquet, far, filters=[("year", "=", 2023), ("f", "<", 2)])
        assert [sample["x"].item() for sample in dataset.__getitems__(range(len(dataset)))] == [0, 1, 2, 3]
        before = stores.statistics().nbytes
        with pytest.raises(ArgumentError, match="match none"):
            Parquet(far, filters=[("year", "=", 2024), ("f", "<", 2)])
        assert (some > 0, stores.statistics().nbytes) == (True, before)


PREDICATES = st.one_of(
    st.tuples(st.just("x"), st.sampled_from(["<", "<=", ">", ">=", "=", "!="]), st.integers(-5, 65)),
    st.tuples(st.just("f"), st.sampled_from(["<", ">=", "=="]), st.floats(-1, 31)),
    st.tuples(st.just("year"), st.sampled_from(["=", "!=", "<", ">"]), st.integers(2022, 2025)),
    st.tuples(st.just("kind"), st.sampled_from(["=", "!="]), st.sampled_from(["7", "a b", "c"])),
    st.tuples(st.just("odd"), st.sampled_from(["=", "!=", ">"]), st.floats(0, 9)),
    st.tuples(st.just("x"), st.sampled_from(["in", "not in"]), st.lists(st.integers(0, 60), min_size=1, max_size=4)),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=rounds(25, 300))
@given(filters=st.lists(st.lists(PREDICATES, min_size=1, max_size=3), min_size=1, max_size=3))
def test_rows_are_those_that_pyarrow_finds(tmp_path: Path, filters: list[Any]) -> None:
    folder = tmp_path / "data"
    if not folder.exists():
        odd = [None, float("nan"), 3.0, 4.0] * 5
        for year, kind, first in ((2023, "a%20b", 0), (2024, "7", 20), (2024, "a%20b", 40)):
            write(folder / f"year={year}/kind={kind}/0.parquet", first, odd=odd)
    theirs = pa.dataset.dataset(folder, partitioning=pa.dataset.partitioning(
        pa.schema({"year": pa.int64(), "kind": pa.string()}), flavor="hive"
    )).to_table(columns=["x"], filter=pq.filters_to_expression(filters))  # fmt: skip
    if not theirs.num_rows:
        with pytest.raises(ArgumentError, match="match none of the 60 rows"):
            Parquet(folder, ["x"], filters=filters)
        return
    ours = Parquet(folder, ["x"], filters=filters)
    assert [sample["x"].item() for sample in ours.__getitems__(range(len(ours)))] == theirs.column("x").to_pylist()


def test_filtered_rows_are_shuffled_and_resumed_like_others(folder: Path) -> None:
    dataset = Parquet(folder, ["x", "year"], filters=[("x", ">", 12), ("x", "<", 47)])
    with fl.DataLoader(dataset, 5, shuffle=True, seed=3) as loader:
        whole = torch.cat([batch["x"] for batch in loader])
    assert sorted(whole.tolist()) == list(range(13, 47))
    with fl.DataLoader(dataset, 5, shuffle=True, seed=3, num_workers=2, worker_method="thread") as loader:
        batches = iter(loader)
        seen = [next(batches)["x"] for _ in range(3)]
        state = loader.state_dict()
    with fl.DataLoader(dataset, 5, shuffle=True, seed=3) as loader:
        loader.load_state_dict(state)
        assert torch.equal(torch.cat([*seen, *(batch["x"] for batch in loader)]), whole)


@pytest.mark.parametrize("filters", [[("x", "=", "a")], [("year", "=", "a")], [("year", "=", 2023), ("x", "=", "a")]])
def test_values_of_another_type_are_named(folder: Path, filters: list[Any]) -> None:
    with pytest.raises(ArgumentError, match=r"filters cannot be applied to .* use values of the columns' types"):
        Parquet(folder, filters=filters)


@pytest.mark.parametrize("filters", [[], [[]], "x > 3", ["x > 3"], [("x", ">")], [[("x", ">", 3)], "y"], 3, [3]])
def test_what_is_no_filter_is_named(folder: Path, filters: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"filters= takes a list of \(column, operator, value\) tuples, or a list of such lists"
    ):
        Parquet(folder, filters=filters)


def test_an_operator_that_is_none_is_named(folder: Path) -> None:
    with pytest.raises(ArgumentError, match=r"filters: .*~"):
        Parquet(folder, filters=[("x", "~", 3)])


def test_a_column_to_filter_by_that_is_not_there_is_named(folder: Path) -> None:
    for filters in ([("z", "=", 3)], [("year", "=", 1), ("z", "=", 3)]):
        with pytest.raises(ArgumentError, match=r"column 'z' is not in .*; there are x, f, year, kind"):
            Parquet(folder, filters=filters)
