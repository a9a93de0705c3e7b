"""The files of a folder that belong to a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feedline.datasets import Arrow, Parquet
from feedline.errors import ArgumentError, SampleError

ASIDE = ("_temporary/0/task_0/part-1.parquet", "_started.parquet", "year=1/_tmp/2.parquet", ".part.parquet")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of a table, and what Spark left next to them."""
    data = tmp_path / "_all.runs/data"
    for number, name in enumerate(("year=1/0.parquet", "year=2/0.parquet", *ASIDE)):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"x": [number]}), data / name)
    return data


@pytest.fixture
def far(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The same in a store in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    system = fsspec.filesystem("memory")
    for path in folder.rglob("*.parquet"):
        system.pipe(f"/aside/_all/{path.relative_to(folder)}", path.read_bytes())
    yield "memory://aside/_all"
    system.rm("/aside", recursive=True)


def rows(*given: object) -> list[int]:
    dataset = Parquet([str(each) for each in given], ["x"])
    return [dataset[at]["x"].item() for at in range(len(dataset))]


def test_what_writers_keep_aside_is_left_out(folder: Path, far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (folder, far):
        assert rows(place) == rows(f"{place}/") == rows(f"{place}/year={{1..2}}") == [0, 1]
    assert rows(f"file://{folder}") == [0, 1]
    monkeypatch.chdir(folder)
    assert rows(".") == rows("../data") == rows("year=1", "year=2") == [0, 1]


def test_what_is_named_is_taken(folder: Path, far: str) -> None:
    for place in (folder, far):
        assert rows(place, f"{place}/_started.parquet") == [0, 1, 3]
        assert rows(f"{place}/_*.parquet") == [3]
        assert rows(f"{place}/_temporary") == [2]


def test_folders_that_are_columns_are_data(tmp_path: Path) -> None:
    (tmp_path / "_year=2024").mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / "_year=2024/0.parquet")
    assert Parquet(tmp_path)[0]["_year"].item() == 2024


def test_a_folder_without_data_is_named(tmp_path: Path) -> None:
    (tmp_path / "_temporary").mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / "_temporary/0.parquet")
    with pytest.raises(FileNotFoundError, match=r"no files: all names in .* begin with '_' or '\.'"):
        Parquet(tmp_path)


def test_an_empty_file_is_no_marker(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    with pytest.raises(SampleError, match=r"a\.parquet cannot be read"):
        Parquet(tmp_path)


def test_what_is_neither_a_table_nor_a_path_is_named() -> None:
    with pytest.raises(
        ArgumentError, match=r"None is not a path: give a path, .* a pyarrow\.Table, or a list of paths"
    ):
        Arrow(None)
    with pytest.raises(ArgumentError, match=r"columns='xy': give a list of names"):
        Arrow(pa.table({"x": [1], "y": [2]}), "xy")
