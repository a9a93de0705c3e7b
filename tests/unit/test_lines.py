from __future__ import annotations

import csv
import json
import os
import pickle
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import feedline as fl
from feedline.datasets import CSV, JSONL, Lines
from feedline.datasets.sidecars import SideCarWarning
from feedline.errors import ArgumentError, SampleError, SampleIndexError, StateError

FRESH = [HealthCheck.function_scoped_fixture]


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def all_of(dataset: Any) -> list[Any]:
    return [dataset[i] for i in range(len(dataset))]


class TestLines:
    @settings(suppress_health_check=FRESH)
    @given(text=st.text(st.sampled_from("aé \r\n"), max_size=30))
    def test_lines_are_pythons(self, tmp_path: Path, text: str) -> None:
        path = written(tmp_path / "t.txt", text)
        expected = text.split("\n")
        expected = expected[:-1] if expected[-1] == "" else expected
        for index in tmp_path.glob("*-index"):
            index.unlink()  # two examples may fall into one tick of the clock
        assert all_of(Lines(path)) == [line.removesuffix("\r") for line in expected]

    def test_many_files_and_a_byte_order_mark(self, tmp_path: Path) -> None:
        written(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo")
        written(tmp_path / "b.txt", "")
        written(tmp_path / "c.txt", "three\n")
        dataset = Lines(tmp_path)
        assert (all_of(dataset), dataset.shard_sizes.tolist()) == (["one", "two", "three"], [2, 0, 1])
        assert dataset.__getitems__([-1, 0]) == ["three", "one"]
        with pytest.raises(SampleIndexError, match="index 3 is out of range for Lines with 3 samples"):
            dataset[3]

    def test_bytes_that_are_not_utf8_are_named_with_their_line(self, tmp_path: Path) -> None:
        dataset = Lines(written(tmp_path / "t.txt", b"one\ntwo\n\xff\xfe\n"))
        with pytest.raises(SampleError, match=r"t\.txt, line 3, is not UTF-8"):
            dataset[2]

    def test_the_index_is_written_once_and_anew_when_the_file_changes(self, tmp_path: Path) -> None:
        path = written(tmp_path / "t.txt", "a\nb\n")
        Lines(path)
        (index,) = tmp_path.glob("*-index")
        first = index.stat().st_mtime_ns
        assert len(Lines(path)) == 2
        assert index.stat().st_mtime_ns == first
        written(path, "a\nb\nc\n")
        assert all_of(Lines(path)) == ["a", "b", "c"]

    def test_the_index_takes_16_bytes_a_row(self, tmp_path: Path) -> None:
        Lines(written(tmp_path / "t.txt", "a\n" * 100_000))
        (index,) = tmp_path.glob("*-index")
        assert index.stat().st_size < 16.1 * 100_000

    def test_the_index_may_lie_elsewhere(self, tmp_path: Path) -> None:
        data, index = tmp_path / "data", tmp_path / "index"
        data.mkdir()
        assert len(Lines(written(data / "t.txt", "a\n"), index=index)) == 1
        assert len(list(index.iterdir())) == 1
        assert [path.name for path in data.iterdir()] == ["t.txt"]

    def test_a_folder_that_cannot_be_written_costs_only_time(self, tmp_path: Path) -> None:
        path, index = written(tmp_path / "t.txt", "a\nb\n"), written(tmp_path / "file", "")
        with pytest.warns(SideCarWarning, match="could not be written"):
            dataset = Lines(path, index=index / "in a file")
        assert pickle.loads(pickle.dumps(dataset))[1] == "b"

    def test_more_files_than_a_process_may_open(self, tmp_path: Path) -> None:
        for i in range(300):
            written(tmp_path / f"{i:03}.txt", f"{i}\n")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        before = len(list(Path("/proc/self/fd").iterdir()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        try:
            dataset = Lines(tmp_path)
            assert all_of(dataset) == [str(i) for i in range(300)]
            assert len(list(Path("/proc/self/fd").iterdir())) - before < 100
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_a_file_that_has_changed_is_refused(self, tmp_path: Path) -> None:
        path = written(tmp_path / "t.txt", "a\nb\n")
        data = pickle.dumps(Lines(path))
        written(path, "longer than before\n")
        with pytest.raises(StateError, match=r"t\.txt has changed since this dataset was made"):
            pickle.loads(data)[0]


class TestJSONL:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        rows = [json.dumps({"x": i, "y": i / 2, "text": f"é{i}"}, ensure_ascii=bool(i % 2)) for i in range(20)]
        return written(tmp_path / "t.jsonl", "\n".join(rows[:10]) + "\n \n\n" + "\r\n".join(rows[10:]))

    def test_rows_are_the_values(self, path: Path) -> None:
        dataset = JSONL(path)
        assert all_of(dataset) == [{"x": i, "y": i / 2, "text": f"é{i}"} for i in range(20)]
        assert JSONL(path, ["y"])[3] == {"y": 1.5}

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("method", ["thread", "process"])
    def test_loaders_agree(self, path: Path, workers: int, method: str) -> None:
        dataset = JSONL(path)
        theirs = list(DataLoader(dataset, 6))
        with fl.DataLoader(dataset, 6, num_workers=workers, worker_method=method) as loader:
            for ours, their in zip(loader, theirs, strict=True):
                assert torch.equal(ours["x"], their["x"])
                assert torch.equal(ours["y"], their["y"])
                assert ours["text"] == their["text"]

    @pytest.mark.parametrize("line", ["{", "nothing", '{"a": 1} {"b": 2}', "[" * 100_000])
    def test_a_malformed_line_is_named(self, tmp_path: Path, line: str) -> None:
        dataset = JSONL(written(tmp_path / "t.jsonl", f"1\n\n{line}\n"))
        with pytest.raises(SampleError, match=r"t\.jsonl, line 3, is not JSON .*on_error='skip'"):
            dataset[1]

    def test_a_missing_key_tells_those_that_are_there(self, tmp_path: Path) -> None:
        dataset = JSONL(written(tmp_path / "t.jsonl", '{"a": 1}\n[1]\n'), ["b"])
        with pytest.raises(SampleError, match=r"t\.jsonl, line 1, has no key 'b'; it has a"):
            dataset[0]
        with pytest.raises(SampleError, match=r"line 2, is a list; columns= needs objects"):
            dataset[1]

    def test_a_transform_may_draw(self, path: Path) -> None:
        dataset = JSONL(path, transform=lambda row, rng: row["x"] + rng.random())
        batches = [list(fl.DataLoader(dataset, 5, seed=3, num_workers=n)) for n in (0, 2)]
        assert all(torch.equal(a, b) for a, b in zip(*batches, strict=True))


class TestCSV:
    CONTENT = 'x,name,ok\n1.5,"a, b",yes\n2.5,"two\nlines ""quoted""",no\n\n3.5,é,true\n'

    def test_rows_are_dicts_converted_as_declared(self, tmp_path: Path) -> None:
        path = written(tmp_path / "t.csv", self.CONTENT)
        assert all_of(CSV(path)) == [
            {"x": "1.5", "name": "a, b", "ok": "yes"},
            {"x": "2.5", "name": 'two\nlines "quoted"', "ok": "no"},
            {"x": "3.5", "name": "é", "ok": "true"},
        ]
        assert all_of(CSV(path, {"ok": bool, "x": float}))[1] == {"ok": False, "x": 2.5}
        assert CSV(path, ["name"])[2] == {"name": "é"}

    @settings(suppress_health_check=FRESH)
    @given(
        rows=st.lists(st.tuples(*[st.text(st.sampled_from('aé,;" \n'), max_size=6)] * 2), max_size=6),
        delimiter=st.sampled_from(",;\t"),
        end=st.sampled_from(["\n", "\r\n"]),
    )
    def test_what_the_csv_module_writes_is_read_back(
        self, tmp_path: Path, rows: list[Any], delimiter: str, end: str
    ) -> None:
        path = tmp_path / "t.csv"
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter=delimiter, lineterminator=end)
            writer.writerows([("p", "q"), *rows])
        for index in tmp_path.glob("*-index"):
            index.unlink()
        dataset = CSV(path, delimiter=delimiter)
        assert [tuple(row.values()) for row in all_of(dataset)] == rows

    def test_a_value_that_cannot_be_converted_is_named(self, tmp_path: Path) -> None:
        dataset = CSV(written(tmp_path / "t.csv", 'x,y\n1,"a\nb"\noops,2\n3,4\n'), {"x": float})
        with pytest.raises(SampleError, match=r"t\.csv, line 4, column 'x': 'oops' is no float"):
            dataset[1]
        with pytest.raises(SampleError, match=r"line 2, column 'y': 'a\\nb' is no bool \(neither true nor false\)"):
            CSV(tmp_path / "t.csv", {"y": bool})[0]

    def test_a_row_of_another_length_is_named(self, tmp_path: Path) -> None:
        dataset = CSV(written(tmp_path / "t.csv", "x,y\n1\n1,2\n"))
        with pytest.raises(SampleError, match=r"t\.csv, line 2, has 1 fields, the first row has 2"):
            dataset[0]
        assert dataset[1] == {"x": "1", "y": "2"}

    def test_a_field_beyond_the_limit_of_the_csv_module_is_named(self, tmp_path: Path) -> None:
        long = "a" * (csv.field_size_limit() + 1)
        with pytest.raises(SampleError, match=r"line 2, is not CSV .*csv\.field_size_limit"):
            CSV(written(tmp_path / "t.csv", f"x\n{long}\n"))[0]
        with pytest.raises(SampleError, match=r"begins at byte 2 is not CSV .*csv\.field_size_limit"):
            CSV(written(tmp_path / "u.csv", f'x\n"{long}"\n'))

    def test_files_share_their_first_row(self, tmp_path: Path) -> None:
        written(tmp_path / "a.csv", "x,y\n1,2\n")
        written(tmp_path / "b.csv", "x,y\n3,4\n")
        assert [row["y"] for row in all_of(CSV(tmp_path))] == ["2", "4"]
        written(tmp_path / "c.csv", "x,z\n3,4\n")
        with pytest.raises(SampleError, match=r"c\.csv begins with the columns \['x', 'z'\], but .*a\.csv with"):
            CSV(tmp_path)

    def test_bad_files_and_columns_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(SampleError, match=r"empty\.csv is empty; its first row"):
            CSV(written(tmp_path / "empty.csv", ""))
        with pytest.raises(SampleError, match=r"twice\.csv: the first row names a column twice"):
            CSV(written(tmp_path / "twice.csv", "x,x\n"))
        with pytest.raises(ArgumentError, match=r"column 'z' is not in .*t\.csv; there are x, y"):
            CSV(written(tmp_path / "t.csv", "x,y\n"), ["z"])

    def test_it_travels_by_path(self, tmp_path: Path) -> None:
        dataset = CSV(written(tmp_path / "t.csv", "x\n" + "1\n" * 10_000), {"x": float})
        data = pickle.dumps(dataset)
        assert len(data) < 2000
        child = os.fork()
        if child == 0:
            os._exit(0 if dataset[9_999] == {"x": 1.0} else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pickle.loads(data)[9_999] == {"x": 1.0}
