from __future__ import annotations

import datetime as dt
import json
import os
import pickle
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import torch
from recorder import Recorder
from torch.utils.data import DataLoader, default_collate

import feedline as fl
from feedline.collate.batch_reads import reader_of
from feedline.core import optional
from feedline.core.dataset import BatchRead
from feedline.core.rng import addressed
from feedline.core.tree import leaves
from feedline.datasets import Parquet
from feedline.datasets.tables import row_groups
from feedline.datasets.tables.row_groups import RowGroupWarning, read_in_pieces
from feedline.errors import ArgumentError, FeedlineError, MissingExtraError, SampleError, SampleIndexError, StateError

N = 100


def same(ours: Any, theirs: Any) -> bool:
    pairs = list(zip(leaves(ours), leaves(theirs), strict=True))
    return type(ours) is type(theirs) and all(
        a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    table = pa.table(
        {
            "x": np.arange(N, dtype=np.float32),
            "y": np.arange(N) % 7,
            "v": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(3 * N, dtype=np.int16)), 3),
            "name": [f"rów {i}" for i in range(N)],
        }
    )
    pq.write_table(table.slice(0, 60), tmp_path / "part-0.parquet", row_group_size=25)
    pq.write_table(table.slice(60), tmp_path / "part-1.parquet")
    return tmp_path


def read(folder: Path, table: Any, **arguments: Any) -> Parquet:
    pq.write_table(table, folder / "made.parquet")
    return Parquet(folder / "made.parquet", **arguments)


class TestRows:
    def test_samples_are_dicts_with_the_stored_dtypes(self, folder: Path) -> None:
        dataset = Parquet(folder)
        sample = dataset[61]
        assert (len(dataset), dataset.shard_sizes.tolist()) == (N, [25, 25, 10, 40])
        assert (sample["x"].item(), sample["x"].dtype, sample["y"].dtype) == (61.0, torch.float32, torch.int64)
        assert (sample["v"].tolist(), sample["v"].dtype) == ([183, 184, 185], torch.int16)
        assert sample["name"] == "rów 61"
        assert dataset[-1]["x"].item() == N - 1

    def test_columns_are_chosen_in_order(self, folder: Path) -> None:
        assert list(Parquet(folder, ["y", "x"])[0]) == ["y", "x"]

    def test_all_ways_to_fetch_agree(self, folder: Path) -> None:
        dataset, empty, indices = Parquet(folder), Recorder(), [99, 0, 30, 30, -1, 59, 60]
        theirs = default_collate([dataset[i] for i in indices])
        read = reader_of(dataset)
        assert read is not None
        batch = read(BatchRead(np.array(indices), empty))
        assert same(batch, theirs)
        assert empty.holds(batch)
        assert same(default_collate(dataset.__getitems__(indices)), theirs)

    def test_works_in_torchs_own_loader(self, folder: Path) -> None:
        dataset = Parquet(folder)
        theirs, ours = list(DataLoader(dataset, 16)), list(fl.DataLoader(dataset, 16))
        assert len(ours) == 7
        assert all(map(same, ours, theirs))

    @pytest.mark.parametrize("index", [N, -N - 1])
    def test_an_index_out_of_range_is_named(self, folder: Path, index: int) -> None:
        dataset = Parquet(folder)
        for fetch in (dataset.__getitem__, lambda i: dataset.__getitems__([0, i])):
            with pytest.raises(SampleIndexError, match=f"index {index} is out of range for Parquet with 100 samples"):
                fetch(index)

    def test_samples_are_memory_of_their_own(self, folder: Path) -> None:
        dataset = Parquet(folder)
        dataset[5]["v"].fill_(9)
        dataset.__getitems__([5])[0]["v"].fill_(9)
        assert dataset[5]["v"].tolist() == [15, 16, 17]

    def test_a_transform_sees_samples_and_may_draw(self, folder: Path) -> None:
        dataset = Parquet(folder, transform=lambda sample, rng: (sample["x"].item(), rng.integers(1 << 30)))
        assert reader_of(dataset) is None
        with addressed([7, 8]):
            (first, one), (second, other) = dataset.__getitems__([3, 4])
        assert (first, second) == (3.0, 4.0)
        assert one != other


class TestFiles:
    def test_by_path_pattern_braces_and_list(self, folder: Path) -> None:
        first, second = folder / "part-0.parquet", folder / "part-1.parquet"
        for paths in (f"{folder}/part-*.parquet", f"{folder}/part-{{0..1}}.parquet", [first, second], str(folder)):
            assert Parquet(paths)[99]["x"].item() == 99
        assert Parquet([second, str(first)])[0]["x"].item() == 60
        assert len(Parquet(first)) == 60

    def test_what_is_not_there_is_named(self, folder: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no files: .*none-\*\.parquet' matches none"):
            Parquet(f"{folder}/none-*.parquet")
        with pytest.raises(FileNotFoundError, match=r"part-2\.parquet"):
            Parquet(f"{folder}/part-{{0..2}}.parquet")
        with pytest.raises(FileNotFoundError, match="the list of paths is empty"):
            Parquet([])

    @pytest.mark.parametrize("paths", [None, 3, b"x", [None]])
    def test_what_is_no_path_is_named(self, paths: Any) -> None:
        with pytest.raises(
            ArgumentError, match="is not a path: give a path, an address, a pattern, or a list of paths"
        ):
            Parquet(paths)

    def test_one_name_for_columns_is_refused(self, folder: Path) -> None:
        with pytest.raises(ArgumentError, match=r"columns='xy': give a list of names, such as \['xy'\]"):
            Parquet(folder, "xy")

    def test_a_missing_column_names_the_existing_ones(self, folder: Path) -> None:
        with pytest.raises(ArgumentError, match=r"column 'z' is not in .*part-0\.parquet; there are x, y, v, name"):
            Parquet(folder, ["x", "z"])

    def test_files_of_another_schema_are_named(self, folder: Path) -> None:
        pq.write_table(pa.table({"x": np.arange(3)}), folder / "part-2.parquet")
        with pytest.raises(
            SampleError, match=r"part-2\.parquet and .*part-0\.parquet do not have the same columns: name, v, y"
        ):
            Parquet(folder)
        with pytest.raises(SampleError, match=r"column 'x' is float in .*part-0\.parquet, but int64 in .*part-2"):
            Parquet(folder, ["x"])

    def test_texts_of_either_width_are_the_same_kind(self, tmp_path: Path) -> None:
        for name, kind in (("a", pa.string()), ("b", pa.large_string()), ("c", pa.dictionary(pa.int8(), pa.string()))):
            pq.write_table(pa.table({"s": pa.array(["one", "two"]).cast(kind)}), tmp_path / f"{name}.parquet")
        assert [sample["s"] for sample in Parquet(tmp_path).__getitems__(range(6))] == ["one", "two"] * 3

    @pytest.mark.parametrize("content", [b"", b"PAR1", b"not a table at all, but long enough to be looked at\0"])
    def test_a_file_that_is_no_parquet_is_named(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "bad.parquet").write_bytes(content)
        with pytest.raises(SampleError, match=r"bad\.parquet cannot be read: it is damaged, truncated, or not Parquet"):
            Parquet(tmp_path)

    def test_a_truncated_file_is_named(self, folder: Path) -> None:
        path = folder / "part-1.parquet"
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(SampleError, match=r"part-1\.parquet cannot be read"):
            Parquet(folder)

    def test_a_damaged_page_is_named_with_its_row_group(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.parquet"
        pq.write_table(pa.table({"x": np.arange(1000)}), path, write_page_checksum=True, use_dictionary=False)
        data = bytearray(path.read_bytes())
        data[400] ^= 0xFF
        path.write_bytes(data)
        with pytest.raises(SampleError, match=r"row group 0 of .*bad\.parquet cannot be read"):
            Parquet(path)[0]

    def test_a_file_that_has_changed_is_refused(self, folder: Path) -> None:
        dataset = Parquet(folder)
        pq.write_table(pa.table({"x": [1.0]}), folder / "part-0.parquet")
        with pytest.raises(StateError, match=r"part-0\.parquet has changed since this dataset was made"):
            dataset[0]

    def test_files_without_rows_have_none(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"x": pa.array([], pa.int32())}), tmp_path / "a.parquet")
        assert len(Parquet(tmp_path)) == 0
        pq.write_table(pa.table({"x": pa.array([5], pa.int32())}), tmp_path / "b.parquet")
        assert Parquet(tmp_path)[0]["x"].item() == 5

    def test_a_filesystem_of_pyarrows_reads_elsewhere(self, folder: Path) -> None:
        there = pyarrow.fs.SubTreeFileSystem(str(folder), pyarrow.fs.LocalFileSystem())
        dataset = pickle.loads(pickle.dumps(Parquet("part-{0,1}.parquet", filesystem=there)))
        assert dataset[99]["x"].item() == 99
        with pytest.raises(FileNotFoundError, match=r"part-9\.parquet is not a file on SubTreeFileSystem"):
            Parquet("part-9.parquet", filesystem=there)

    def test_a_file_of_a_filesystem_that_has_changed_is_refused(self, folder: Path) -> None:
        path = folder / "part-0.parquet"
        dataset = Parquet(str(path), filesystem=pyarrow.fs.LocalFileSystem())
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
        with pytest.raises(
            StateError, match=r"part-0\.parquet has changed .* had (\d+) bytes, and has \1 now or was wr"
        ):
            dataset[0]

    def test_a_missing_extra_names_the_command(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> Any:
            raise ModuleNotFoundError(name=name.partition(".")[0])

        monkeypatch.setattr(optional, "import_module", missing)
        with pytest.raises(
            MissingExtraError, match=r"datasets\.Parquet needs pyarrow.*pip install 'feedline\[arrow\]'"
        ):
            Parquet(folder)


class TestKinds:
    def test_times_are_the_integers_that_are_stored(self, tmp_path: Path) -> None:
        day = dt.date(1970, 1, 11)
        moment = dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC)
        columns = {
            "date": pa.array([day], pa.date32()),
            "time": pa.array([moment], pa.timestamp("us", "UTC")),
            "span": pa.array([dt.timedelta(seconds=2)], pa.duration("ms")),
            "price": pa.array([Decimal("1.25")], pa.decimal128(9, 2)),
        }
        sample = read(tmp_path, pa.table(columns))[0]
        assert {name: (value.item(), value.dtype) for name, value in sample.items()} == {
            "date": (10, torch.int32),
            "time": (1_000_000, torch.int64),
            "span": (2000, torch.int64),
            "price": (1.25, torch.float64),
        }

    def test_nested_columns(self, tmp_path: Path) -> None:
        rows = [
            {
                "s": {"a": 1, "b": "x"},
                "l": [1, 2],
                "ll": [[1, 2], [3, 4]],
                "t": ["p", "q"],
                "d": [{"k": 1}],
                "bin": b"\0",
            },
            {"s": {"a": 2, "b": "y"}, "l": [3], "ll": [[5], [6, 7]], "t": [], "d": [], "bin": b""},
        ]
        one, two = read(tmp_path, pa.Table.from_pylist(rows)).__getitems__([0, 1])
        assert one["s"]["a"].item() == 1
        assert two["s"]["b"] == "y"
        assert (one["l"].tolist(), two["l"].tolist()) == ([1, 2], [3])
        assert one["ll"].tolist() == [[1, 2], [3, 4]]
        assert [part.tolist() for part in two["ll"]] == [[5], [6, 7]]
        assert (one["t"], two["t"]) == (["p", "q"], [])
        assert (one["d"][0]["k"].item(), two["d"]) == (1, [])
        assert (one["bin"], two["bin"]) == (b"\0", b"")

    def test_lists_of_one_length_become_one_tensor(self, tmp_path: Path) -> None:
        dataset = read(tmp_path, pa.table({"ids": [[i, i + 1, i + 2] for i in range(9)]}))
        with fl.DataLoader(dataset, 3, num_workers=2) as loader:
            assert next(iter(loader))["ids"].tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]

    def test_lists_of_other_lengths_ask_for_pad(self, tmp_path: Path) -> None:
        dataset = read(tmp_path, pa.table({"ids": [[1], [2, 3]]}))
        with pytest.raises(RuntimeError) as caught:
            next(iter(fl.DataLoader(dataset, 2)))
        assert any("feedline.collate.pad()" in text for text in caught.value.__notes__)
        padded = next(iter(fl.DataLoader(dataset, 2, collate_fn=fl.collate.pad())))
        assert padded["ids"].values.tolist() == [[1, 0], [2, 3]]

    def test_maps_are_lists_of_pairs(self, tmp_path: Path) -> None:
        maps = pa.array([[("a", 1)], [], [("b", 2), ("c", 3)]], pa.map_(pa.string(), pa.int32()))
        dataset = read(tmp_path, pa.table({"m": maps}))
        assert dataset[1]["m"] == []
        assert [(pair["key"], pair["value"].item()) for pair in dataset[2]["m"]] == [("b", 2), ("c", 3)]

    def test_a_column_of_nothing_but_nulls(self, tmp_path: Path) -> None:
        table = pa.table({"x": [1, 2], "none": pa.nulls(2)})
        with pytest.raises(SampleError, match=r"made\.parquet, row 1 .*column 'none' is null"):
            read(tmp_path, table)[1]
        assert read(tmp_path, table, columns=["x"])[1]["x"].item() == 2
        assert read(tmp_path, table, nulls={"none": "nan"})[0]["none"].isnan()
        assert read(tmp_path, table, nulls={"none": 3})[0]["none"].item() == 3

    def test_tensors_of_fixed_shape(self, tmp_path: Path) -> None:
        array = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
        table = pa.table({"t": pa.FixedShapeTensorArray.from_numpy_ndarray(array)})
        assert torch.equal(read(tmp_path, table)[1]["t"], torch.from_numpy(array[1]))


def test_what_datasets_noted_of_columns_is_known_from_the_footer(tmp_path: Path) -> None:
    noted = json.dumps({"info": {"features": {"image": {"_type": "Image"}}}})
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    images = pa.array([{"bytes": b"x", "path": None}], kind)
    table = pa.table({"image": images}).replace_schema_metadata({"huggingface": noted, "other": "1"})
    assert read(tmp_path, table)[0] == {"image": {"bytes": b"x", "path": ""}}


class TestNulls:
    TABLE = pa.table({"f": [1.0, None], "i": [None, 2], "s": ["a", None], "l": [[1, None], None]})

    @pytest.mark.parametrize(
        ("column", "row", "advice"),
        [
            ("f", 1, "nulls={'f': 'nan'}"),
            ("i", 0, "nulls={'i': 0}"),
            ("s", 1, "nulls={'s': ''}"),
            ("l", 1, "nulls={'l': []}"),
        ],
    )
    def test_a_null_is_named_with_file_column_row_and_remedy(
        self, tmp_path: Path, column: str, row: int, advice: str
    ) -> None:
        dataset = read(tmp_path, self.TABLE, columns=[column])
        for fetch in (dataset.__getitem__, lambda i: dataset.read_batch(BatchRead(np.array([i]), Recorder()))):
            with pytest.raises(SampleError) as caught:
                fetch(row)
            assert f"made.parquet, row {row} (row group 0): column {column!r} is null" in str(caught.value)
            assert advice in str(caught.value)

    def test_an_item_of_a_list_that_is_null_names_the_row_of_the_list(self, tmp_path: Path) -> None:
        dataset = read(tmp_path, pa.table({"l": [[1, 2], [3, None], [4]]}))
        with pytest.raises(SampleError, match=r"row 1 .*column 'l' is null"):
            dataset.__getitems__([2, 1])

    def test_values_stand_for_nulls(self, tmp_path: Path) -> None:
        dataset = read(tmp_path, self.TABLE, columns=["f", "i", "s"], nulls={"f": "nan", "i": -1, "s": "?"})
        batch = dataset.read_batch(BatchRead(np.array([0, 1]), Recorder()))
        assert torch.equal(batch["f"].nan_to_num(7), torch.tensor([1.0, 7.0], dtype=torch.float64))
        assert (batch["i"].tolist(), batch["s"]) == ([-1, 2], ["a", "?"])

    def test_one_value_stands_for_all_that_can_hold_it(self, tmp_path: Path) -> None:
        dataset = read(tmp_path, self.TABLE, nulls=0)
        assert Parquet(tmp_path / "made.parquet", ["f", "i"], nulls=0)[1]["f"].item() == 0
        with pytest.raises(SampleError, match="column 's' is null"):
            dataset[1]

    def test_a_value_that_does_not_fit_is_refused(self, tmp_path: Path) -> None:
        for nulls in ({"i": 0.5}, {"i": float("nan")}, {"s": 1}, {"f": "zero"}):
            with pytest.raises(ArgumentError, match="cannot hold"):
                read(tmp_path, self.TABLE, nulls=nulls)
        with pytest.raises(ArgumentError, match="nulls names the column 'g', which is not read; there are f, i, s, l"):
            read(tmp_path, self.TABLE, nulls={"g": 0})

    def test_rows_with_nulls_can_be_skipped(self, tmp_path: Path) -> None:
        dataset = read(tmp_path, self.TABLE, columns=["f"])
        with fl.DataLoader(dataset, 2, on_error="skip") as loader:
            assert next(iter(loader))["f"].tolist() == [1.0]
            assert loader.stats().skipped == 1


class TestLargeRowGroups:
    def test_are_warned_of_when_their_chosen_columns_are_large(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(row_groups, "_LARGE_NBYTES", 10_000)
        table = pa.table({"x": np.arange(2000), "y": np.arange(2000, dtype=np.int8)})
        pq.write_table(table, tmp_path / "t.parquet", row_group_size=1500, use_dictionary=False)
        with pytest.warns(RowGroupWarning, match=r"row group 0 of .*t\.parquet has .* GiB.*columns=.*row_group_size="):
            dataset = Parquet(tmp_path)
        assert pickle.loads(pickle.dumps(dataset))[1999]["x"].item() == 1999  # without another warning
        assert Parquet(tmp_path, ["y"])[1]["y"].item() == 1

    def test_come_in_pieces_where_pyarrow_gives_no_whole(self, tmp_path: Path) -> None:
        table = pa.table({"s": [{"t": str(i), "l": ["a"] * (i % 3)} for i in range(100)]})
        pq.write_table(table, tmp_path / "t.parquet")
        with pq.ParquetFile(tmp_path / "t.parquet") as file:
            pieces = read_in_pieces(file, 0, 16, {"columns": ["s"]})
        assert pieces.column("s").num_chunks == 15
        assert pieces.column("s").combine_chunks() == table.column("s").combine_chunks()

    def test_that_are_empty_are_passed_over_by_filters(self, tmp_path: Path) -> None:
        with pq.ParquetWriter(tmp_path / "t.parquet", pa.schema({"x": pa.int64()})) as writer:
            for rows in ([], [1, 2], [], [3]):
                writer.write_table(pa.table({"x": pa.array(rows, pa.int64())}))
        dataset = Parquet(tmp_path, filters=[("x", ">", 1)])
        assert [sample["x"].item() for sample in dataset.__getitems__(range(2))] == [2, 3]


class TestCache:
    def test_a_row_group_is_decoded_once_for_all_threads(self, folder: Path) -> None:
        dataset, barrier = Parquet(folder), threading.Barrier(8)
        found: list[Any] = []

        def work() -> None:
            barrier.wait()
            found.append(dataset.read_batch(BatchRead(np.arange(N), Recorder()))["x"])

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert all(torch.equal(x, torch.arange(N)) for x in found)
        assert dataset.decoded.loads == 4

    def test_its_bytes_are_bounded(self, folder: Path) -> None:
        whole, small = Parquet(folder), Parquet(folder, cache_nbytes=1000)
        order = np.random.default_rng(0).permutation(N)
        batches = [dataset.read_batch(BatchRead(order, Recorder())) for dataset in (whole, small)]
        assert same(*batches)
        assert whole.decoded.nbytes > 1000
        assert small.decoded.nbytes < whole.decoded.nbytes / 2  # the newest is kept, however large it is
        assert [s["name"] for s in small.__getitems__(order.tolist())] == batches[0]["name"]

    def test_shards_in_order_are_decoded_once_even_if_they_do_not_fit(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"x": np.arange(1000)}), tmp_path / "t.parquet", row_group_size=100)
        dataset = Parquet(tmp_path, cache_nbytes=1700)
        order = fl.samplers.ShardShuffled(dataset.shard_sizes, seed=0, window=2)
        with fl.DataLoader(dataset, 50, sampler=order) as loader:
            seen = torch.cat([batch["x"] for batch in loader])
        assert sorted(seen.tolist()) == list(range(1000))
        assert dataset.decoded.loads == 10

    def test_a_failure_is_tried_again(self, folder: Path) -> None:
        dataset, path = Parquet(folder), folder / "part-0.parquet"
        status = path.stat()
        path.rename(folder / "away")
        with pytest.raises(
            FileNotFoundError, match=r"row group 0 of .*part-0\.parquet cannot be read: the file has been removed"
        ) as caught:
            dataset[0]
        assert isinstance(caught.value, FeedlineError)
        (folder / "away").rename(path)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert dataset[0]["x"].item() == 0


class TestFilters:
    def test_rows_are_chosen_before_reading(self, folder: Path) -> None:
        dataset = Parquet(folder, ["x"], filters=[("y", "==", 3), ("x", "<", 70)])
        expected = [i for i in range(70) if i % 7 == 3]
        assert [dataset[i]["x"].item() for i in range(len(dataset))] == expected
        assert dataset.read_batch(BatchRead(np.arange(len(dataset)), Recorder()))["x"].tolist() == expected
        assert dataset.shard_sizes.sum() == len(expected)

    def test_alternatives(self, folder: Path) -> None:
        assert len(Parquet(folder, filters=[[("y", "==", 0)], [("y", "==", 1)]])) == sum(i % 7 < 2 for i in range(N))

    def test_those_that_leave_no_row_are_refused(self, folder: Path) -> None:
        with pytest.raises(ArgumentError, match=r"match none of the 100 rows of .*part-0\.parquet and 1 more: check"):
            Parquet(folder, filters=[("x", ">", 1000)])
        pq.write_table(pa.table({"x": pa.array([], pa.int32())}), folder / "empty")
        assert len(Parquet(folder / "empty", filters=[("x", ">", 1000)])) == 0  # the filters are not to blame

    def test_bad_ones_are_named(self, folder: Path) -> None:
        with pytest.raises(ArgumentError, match=r"column 'z' is not in"):
            Parquet(folder, filters=[("z", "==", 3)])
        with pytest.raises(ArgumentError, match=r"filters= takes a list of \(column, operator, value\)"):
            Parquet(folder, filters=["y > 3"])


class TestPickling:
    def test_files_travel_by_path(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)
        dataset = Parquet("part-*.parquet")
        dataset.read_batch(BatchRead(np.arange(N), Recorder()))
        data = pickle.dumps(dataset)
        monkeypatch.chdir("/")
        assert len(data) < 3000
        assert pickle.loads(data)[99]["name"] == "rów 99"

    def test_a_fork_decodes_for_itself(self, folder: Path) -> None:
        dataset = Parquet(folder)
        assert dataset[0]["x"].item() == 0
        child = os.fork()
        if child == 0:
            os._exit(0 if dataset.decoded.loads == 0 and dataset[99]["x"].item() == 99 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_summaries_of_a_folder_are_no_files_of_rows(tmp_path: Path) -> None:
    """As Dask and Spark write them next to the files."""
    table, footers = pa.table({"x": list(range(10))}), list[Any]()
    for number in range(2):
        pq.write_table(table, tmp_path / f"{number}.parquet", metadata_collector=footers)
        footers[-1].set_file_path(f"{number}.parquet")
    pq.write_metadata(table.schema, tmp_path / "_metadata", footers)
    pq.write_metadata(table.schema, tmp_path / "_common_metadata")
    assert len(Parquet(tmp_path)) == 20
    for name, what in [("_metadata", "row groups of other files"), ("_common_metadata", "schema")]:
        for paths in (tmp_path / name, [tmp_path / "0.parquet", tmp_path / name]):
            with pytest.raises(ArgumentError, match=rf"{name} .*{what}.*, and no rows: give the folder {tmp_path},"):
                Parquet(paths)
    pq.write_table(table[:0], tmp_path / "2.parquet")
    assert len(Parquet(tmp_path / "2.parquet")) == 0


@pytest.mark.parametrize("settings", [{}, {"write_page_index": True, "row_group_size": 10}, {"use_dictionary": False}])
def test_files_that_cat_has_joined_are_named(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The footer has the places of rows in the last file, so rows of the first one would be read."""
    table = pa.table({"x": list(range(100)), "y": [f"text {number}" for number in range(100)]})
    pq.write_table(table, tmp_path / "a.parquet", **settings)
    data = (tmp_path / "a.parquet").read_bytes()
    assert len(Parquet(tmp_path)) == 100
    pq.write_table(table[:50], tmp_path / "b.parquet", **settings)
    short = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").unlink()
    for joined in (data * 2, data * 3, short + data, data + short):
        (tmp_path / "a.parquet").write_bytes(joined)
        last = len(short if joined.endswith(short) else data)
        with pytest.raises(SampleError, match=rf"several Parquet files, .* begins at byte {len(joined) - last}\. Join"):
            Parquet(tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"\x25\x02\x18\x01x", b"\x25\x00\x18\x01x"),  # no nulls, but counts of them in each column chunk
        (b"\x16\x06\x26", b"\x16\x0a\x26"),  # five rows instead of three
    ],
)
def test_a_footer_that_contradicts_itself_is_named(tmp_path: Path, before: bytes, after: bytes) -> None:
    """pyarrow would end the process for the first one, and give fewer rows for the second one."""
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    assert data.count(before) == 1
    (tmp_path / "a.parquet").write_bytes(data.replace(before, after))
    with pytest.raises(SampleError, match=r"a\.parquet cannot be read: it is damaged"):
        Parquet(tmp_path).__getitems__([0, -1])
