"""Columns whose rows are indirect: numbers of a dictionary, or several parts."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorder import Recorder

from feedline.core.dataset import BatchRead
from feedline.datasets import Arrow, Parquet
from feedline.datasets.tables.chunks import chunk_of_chunked
from feedline.datasets.tables.columns import column_of
from feedline.datasets.tables.nulls import Nulls
from feedline.datasets.tables.types import kind_of
from feedline.errors import ArgumentError, SampleError


def coded(places: list[int | None], values: Any, kind: Any = None) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array(places, kind or pa.int8()), values)


def runs(ends: list[int], values: list[Any], kind: Any = None) -> Any:
    return pa.RunEndEncodedArray.from_arrays(pa.array(ends, kind or pa.int32()), pa.array(values))


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


VALUES = {
    "texts": pa.array(["a", "", "ü"]),
    "bytes": pa.array([b"a", b"", b"\0"], pa.large_binary()),
    "numbers": pa.array([1.5, 2.5, 3.5], pa.float32()),
    "flags": pa.array([True, False, True]),
    "views": pa.array(["a", "a text of more than twelve", ""], pa.string_view()),
    "tensors": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int16(), 2)),
    "structs": pa.array([{"t": "a"}, {"t": "b"}, {"t": "c"}]),
    "lists": pa.array([["a"], [], ["b", "c"]]),
}


@given(
    st.sampled_from([*VALUES]),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=4),
    st.data(),
)
def test_rows_are_those_of_the_decoded_column(name: str, batches: list[list[int]], data: st.DataObject) -> None:
    chunks = [coded(list(places), VALUES[name]) for places in batches]
    whole = pa.table({"c": pa.chunked_array(chunks)})
    dataset = Arrow(whole)
    expected = [VALUES[name][place].as_py() for places in batches for place in places]
    rows = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=8))
    assert [plain(sample["c"]) for sample in dataset.__getitems__(rows)] == [expected[row] for row in rows]
    sliced = Arrow(whole.slice(1))
    assert [plain(sliced[at]["c"]) for at in range(len(expected) - 1)] == expected[1:]


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint8(), pa.int32(), pa.uint64()], ids=str)
def test_nulls_among_the_numbers_and_among_the_values(kind: Any) -> None:
    table = pa.table({"c": pa.chunked_array([coded([0, None, 1], ["a", None], kind), coded([1], ["b", "c"], kind)])})
    dataset = Arrow(table)
    assert [dataset[0]["c"], dataset[3]["c"]] == ["a", "c"]
    for row in (1, 2):
        with pytest.raises(SampleError, match=f"row {row} of the table: column 'c' is null"):
            dataset.__getitems__([3, row, 0])
    filled = Arrow(table, nulls={"c": "?"})
    assert [sample["c"] for sample in filled.__getitems__([3, 2, 1, 0])] == ["c", "?", "?", "a"]


def test_a_batch_of_numbers_is_in_the_given_memory() -> None:
    dataset, empty = Arrow(pa.table({"c": coded([0, 1, None, 1], pa.array([5, 7]))}), nulls=-1), Recorder()
    batch = dataset.read_batch(BatchRead(np.array([3, 2, 0, -1]), empty))
    assert batch["c"].tolist() == [7, -1, 5, 7]
    assert empty.holds(batch)


def test_within_lists_and_structs() -> None:
    lists = pa.ListArray.from_arrays([0, 2, 2, 3], coded([1, 0, 1], ["a", "b"]))
    numbers = pa.ListArray.from_arrays([0, 2, 2, 3], coded([1, 0, 1], pa.array([10, 20])))
    structs = pa.StructArray.from_arrays([coded([1, 0, 1], ["a", "b"])], ["t"], mask=pa.array([False, True, False]))
    table = pa.table({"l": lists, "n": numbers, "s": structs})
    samples = Arrow(table, ["l", "n"]).__getitems__(range(3))
    assert [sample["l"] for sample in samples] == [["b", "a"], [], ["b"]]
    assert [sample["n"].tolist() for sample in samples] == [[20, 10], [], [20]]
    assert Arrow(table, ["s"])[2] == {"s": {"t": "b"}}
    with pytest.raises(SampleError, match=r"row 1 of the table: column 's\.t' is null"):
        Arrow(table, ["s"])[1]


def test_files_with_and_without_a_dictionary_are_read_together(tmp_path: Path) -> None:
    for name, array in (("a", pa.array(["x", "y"])), ("b", coded([1, None], ["v", "w"]))):
        pq.write_table(pa.table({"c": array}), tmp_path / f"{name}.parquet")
    dataset = Parquet(tmp_path, nulls={"c": "?"})
    assert [sample["c"] for sample in dataset.__getitems__([3, 0, 2, 1])] == ["?", "x", "w", "y"]


def test_a_number_behind_the_end_of_the_dictionary_is_named() -> None:
    broken = pa.DictionaryArray.from_arrays(pa.array([0, 5, -1], pa.int8()), ["a"], safe=False)
    dataset = Arrow(pa.table({"c": broken}))
    assert dataset[0]["c"] == "a"
    for row, number in ((1, 5), (2, -1)):
        with pytest.raises(SampleError, match=rf"row {row} of the table: column 'c' has code {number} in a dictionary"):
            dataset.__getitems__([0, row])


def test_what_arrow_cannot_decode_is_named_with_its_rows(tmp_path: Path) -> None:
    broken = pa.DictionaryArray.from_arrays(pa.array([0, 5], pa.int8()), pa.array([1]), safe=False)
    table = pa.table({"x": [1, 2], "l": pa.ListArray.from_arrays([0, 1, 2], broken)})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(SampleError, match=r"record batch of 2 rows from .*t\.arrow, row 0 on .* leave columns out"):
        Arrow(tmp_path)[0]
    assert Arrow(tmp_path, ["x"])[1]["x"].item() == 2


def test_a_mapped_dictionary_is_not_expanded(tmp_path: Path) -> None:
    rows = 1 << 20
    table = pa.table({"c": pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), ["y" * 200])})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=1 << 16)
    dataset, before = Arrow(tmp_path / "t.arrow"), pa.total_allocated_bytes()
    tracemalloc.start()  # also sees the arrays of NumPy
    try:
        assert dataset[5]["c"] == "y" * 200
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak + pa.total_allocated_bytes() - before < 20_000_000  # the texts themselves would be 205 MB


class TestOtherLayouts:
    """Columns with another memory layout and the same samples, local and remote."""

    ROWS: ClassVar[dict[str, list[Any]]] = {
        "runs": list("aabccc"),
        "numbers": [7] * 5 + [8],
        "views": [[1, 2], [3], [], [4], [5], [6]],
        "wide": [["a"], [], ["b"], [], [], []],
        "empty": [{}] * 6,
        "map": [[{"key": "a", "value": "b"}], [], [{"key": "c", "value": "d"}], [], [], []],
    }

    def column(self, name: str) -> Any:
        match name:
            case "runs":
                return runs([2, 3, 6], ["a", "b", "c"], pa.int16())
            case "numbers":
                return runs([5, 6], [7, 8])
            case "map":
                pairs = [[(each["key"], each["value"]) for each in row] for row in self.ROWS[name]]
                return pa.array(pairs, pa.map_(pa.string(), pa.string()))
        kinds = {"views": pa.list_view(pa.int32()), "wide": pa.large_list_view(pa.string()), "empty": pa.struct([])}
        return pa.array(self.ROWS[name], kinds[name])

    @pytest.mark.parametrize("name", ROWS)
    def test_of_a_table_and_of_a_slice(self, name: str) -> None:
        array, expected = self.column(name), self.ROWS[name]
        for first in (0, 1, 3):
            samples = Arrow(pa.table({"c": array}).slice(first)).__getitems__(range(6 - first))
            assert [plain(sample["c"]) for sample in samples] == expected[first:]

    @pytest.mark.parametrize("name", ROWS)
    def test_of_an_object(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        array, expected = self.column(name), self.ROWS[name]
        words = pa.array(["word"] * 6)
        table = pa.table({"before": words, "none": pa.nulls(6), "c": array, "behind": words, "last": pa.nulls(6)})
        file = io.BytesIO()
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        fsspec.filesystem("memory").pipe("/layouts/t.arrow", file.getvalue())
        address = "memory://layouts/t.arrow"
        for columns in (["c"], ["c", "behind"]):
            samples = Arrow(address, columns).__getitems__(range(6))
            assert [plain(sample["c"]) for sample in samples] == expected
            assert all(sample.get("behind", "word") == "word" for sample in samples)
        for columns in (["none", "c", "last"], None):
            samples = Arrow(address, columns, nulls={"none": "nan", "last": 0}).__getitems__(range(6))
            assert [plain(sample["c"]) for sample in samples] == expected
            assert all(sample["none"].isnan() and sample["last"].item() == 0 for sample in samples)

    def test_lists_that_are_null_or_out_of_order(self) -> None:
        lists = pa.ListViewArray.from_arrays([3, 0, 1], [1, 2, 2], pa.array([10, 20, 30, 40]))
        assert [sample["c"].tolist() for sample in Arrow(pa.table({"c": lists})).__getitems__([0, 1, 2])] == [
            [40], [10, 20], [20, 30],
        ]  # fmt: skip
        table = pa.table({"c": pa.array([[1], None, [2, 3]], pa.list_view(pa.int8()))})
        assert [plain(sample["c"]) for sample in Arrow(table).__getitems__([2, 0])] == [[2, 3], [1]]
        with pytest.raises(SampleError, match="row 1 of the table: column 'c' is null"):
            Arrow(table)[1]

    def test_runs_of_nulls(self) -> None:
        table = pa.table({"c": runs([2, 3], [None, 4])})
        with pytest.raises(SampleError, match="row 1 of the table: column 'c' is null"):
            Arrow(table)[1]
        assert Arrow(table, nulls=0).read_batch(BatchRead(np.arange(3), Recorder()))["c"].tolist() == [0, 0, 4]

    def test_nothing_but_nulls_within_others(self) -> None:
        pairs = pa.FixedSizeListArray.from_arrays(pa.nulls(4), 2)
        table = pa.table({"l": pa.array([[], []]), "p": pairs, "d": pa.nulls(2).dictionary_encode()})
        assert Arrow(table, ["l"])[1]["l"].tolist() == []
        sample = Arrow(table, ["p", "d"], nulls=0)[1]
        assert (sample["p"].tolist(), sample["d"].item()) == ([0, 0], 0)

    def test_what_no_tensor_holds_is_named(self) -> None:
        union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
        for array in (pa.array([(1, 2, 3)], pa.month_day_nano_interval()), union):
            table = pa.table({"x": [1], "odd": array})
            with pytest.raises(ArgumentError, match=r"column 'odd' has the Arrow type .* leave it out with columns="):
                Arrow(table)
            assert Arrow(table, ["x"])[0]["x"].item() == 1


@pytest.mark.parametrize("name", ["numbers", "texts", "lists", "dictionaries"])
def test_columns_in_parts(name: str) -> None:
    numbers = pa.array(range(20))
    columns = {
        "numbers": numbers,
        "texts": numbers.cast(pa.string()),
        "lists": pa.ListArray.from_arrays(range(21), numbers),
        "dictionaries": numbers.cast(pa.string()).dictionary_encode(),
    }
    arrays = [columns[name].slice(at, 5) for at in (0, 5, 10, 15)]
    expected = [plain(each) for array in arrays for each in array.to_pylist()]
    known = kind_of(columns[name].type, "c")
    chunks = [chunk_of_chunked(known, pa.chunked_array(each)) for each in (arrays[:1], arrays[1:3], arrays[3:])]
    column = column_of("c", known, chunks, Nulls())
    which, rows = np.array([2, 1, 1, 0, 1, 1]), np.array([4, 9, 0, 3, 5, 4])
    first = np.array([0, 5, 15])
    assert [plain(each) for each in column.samples(which, rows)] == [expected[at] for at in first[which] + rows]
    assert plain(column.batch(which, rows, Recorder())) == [expected[at] for at in first[which] + rows]
