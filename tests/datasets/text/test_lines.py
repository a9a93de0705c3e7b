from __future__ import annotations

import csv
import gzip
import json
import os
import pickle
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import feedline as fl
from feedline.datasets import CSV, JSONL, Lines, file_objects
from feedline.datasets.indexes import IndexFileWarning
from feedline.datasets.text import line_index
from feedline.errors import ArgumentError, SampleError, SampleIndexError, StateError
from feedline.stores.base import FileVersion
from feedline.stores.files import LocalFile
from feedline.stores.local import RECHECK_S

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

    def test_the_index_is_written_once_and_again_when_the_file_changes(self, tmp_path: Path) -> None:
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

    def test_the_index_may_be_in_another_folder(self, tmp_path: Path) -> None:
        data, index = tmp_path / "data", tmp_path / "index"
        data.mkdir()
        assert len(Lines(written(data / "t.txt", "a\n"), index_dir=index)) == 1
        assert len(list(index.iterdir())) == 1
        assert [path.name for path in data.iterdir()] == ["t.txt"]

    def test_a_folder_that_cannot_be_written_costs_only_time(self, tmp_path: Path) -> None:
        path, index = written(tmp_path / "t.txt", "a\nb\n"), written(tmp_path / "file", "")
        with pytest.warns(IndexFileWarning, match="could not be written"):
            dataset = Lines(path, index_dir=index / "in a file")
        assert pickle.loads(pickle.dumps(dataset))[1] == "b"

    def test_more_files_than_a_process_may_open(self, tmp_path: Path) -> None:
        for i in range(600):
            written(tmp_path / f"{i:03}.txt", f"{i}\n")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        before = len(list(Path("/proc/self/fd").iterdir()))
        # Earlier tests of this process may have left some open, until their garbage is collected.
        limit = max(256, 2 * before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            dataset = Lines(tmp_path)
            assert all_of(dataset) == [str(i) for i in range(600)]
            assert len(list(Path("/proc/self/fd").iterdir())) - before < 0.3 * limit < 600
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_a_file_that_has_changed_is_refused(self, tmp_path: Path) -> None:
        path = written(tmp_path / "t.txt", "a\nb\n")
        data = pickle.dumps(Lines(path))
        written(path, "longer than before\n")
        with pytest.raises(StateError, match=r"t\.txt has changed since this dataset was made"):
            pickle.loads(data)[0]


@pytest.mark.parametrize("read", [Lines, JSONL, CSV])
def test_patterns_do_not_match_the_indexes(tmp_path: Path, read: Any) -> None:
    """An index next to its file was read as text when the dataset was created again."""
    written(tmp_path / "a.txt", "1\n2\n3\n")
    written(tmp_path / "b.txt", "1\n2\n")
    lengths = [len(read(tmp_path / pattern)) for pattern in ("*", "*.txt*", "**", "?.*", "*")]
    assert lengths == [5 - 2 * (read is CSV)] * 5
    assert len(list(tmp_path.glob(".*-index"))) == 2
    assert sorted(fl.datasets.Files(str(tmp_path / "*"), decode="text")) == ["1\n2\n", "1\n2\n3\n"]


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

    @pytest.mark.parametrize("line", ['{"a":1}{"a":2}', '{"a": tru}', "[1] [2]", '{"a": "1'])
    def test_a_malformed_first_line_is_no_array(self, tmp_path: Path, line: str) -> None:
        with pytest.raises(SampleError, match=r"t\.jsonl, line 1, is not JSON .*on_error='skip'"):
            JSONL(written(tmp_path / "t.jsonl", f"{line}\n{{}}\n"))[0]

    def test_a_missing_key_names_the_existing_ones(self, tmp_path: Path) -> None:
        dataset = JSONL(written(tmp_path / "t.jsonl", '{"a": 1}\n[1]\n'), ["b"])
        with pytest.raises(SampleError, match=r"t\.jsonl, line 1, has no key 'b'; it has a"):
            dataset[0]
        with pytest.raises(SampleError, match=r"line 2, is a list; columns= needs objects"):
            dataset[1]

    def test_a_transform_may_draw(self, path: Path) -> None:
        dataset = JSONL(path, transform=lambda row, rng: row["x"] + rng.random())
        batches = [list(fl.DataLoader(dataset, 5, seed=3, num_workers=n)) for n in (0, 2)]
        assert all(torch.equal(a, b) for a, b in zip(*batches, strict=True))


class TestReading:
    """Features of all text files: addresses, encodings, a limit for the size of a record."""

    @pytest.mark.parametrize(
        ("encoding", "make", "content"),
        [
            ("utf-8", Lines, "é1\né2\né3"),
            ("utf-8-sig", CSV, "é\né1\né2\né3\n"),  # a mark before the name of the first column
            ("utf-8-sig", JSONL, '"é1"\n"é2"\n"é3"\n'),
            ("latin-1", CSV, 'é\n"é1"\né2\né3\n'),
            ("cp1252", JSONL, '"é1"\n"é2"\n"é3"\n'),
            ("UTF8", CSV, "é\né1\né2\né3\n"),
        ],
    )
    def test_encodings(self, tmp_path: Path, make: Any, content: str, encoding: str) -> None:
        dataset = make(written(tmp_path / "t.txt", content.encode(encoding)), encoding=encoding)
        assert all_of(dataset) == [{"é": text} if make is CSV else text for text in ("é1", "é2", "é3")]
        assert pickle.loads(pickle.dumps(dataset))[2] == dataset[2]

    def test_characters_of_two_bytes(self, tmp_path: Path) -> None:
        content = '名前,x\n"表,\nソ",1\nーソ,2\n'
        dataset = CSV(written(tmp_path / "t.csv", content.encode("shift_jis")), encoding="shift_jis")
        assert all_of(dataset) == [{"名前": "表,\nソ", "x": "1"}, {"名前": "ーソ", "x": "2"}]

    def test_a_delimiter_that_is_half_of_a_character(self, tmp_path: Path) -> None:
        content = "名前|ソ\n表|1\n"
        path = written(tmp_path / "t.csv", content.encode("shift_jis"))
        assert all_of(CSV(path, encoding="shift_jis", delimiter="|", index_dir=tmp_path)) == [{"名前": "表", "ソ": "1"}]

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-7", "cp500", "iso2022_jp"])
    def test_encodings_without_single_bytes_are_converted(self, tmp_path: Path, encoding: str) -> None:
        texts = ["a,b", "1,2", "", "3,4"] if encoding == "cp500" else ["a,b", "1,名前", "", "2,表"]
        path = written(tmp_path / "t.txt", "\n".join(texts).encode(encoding))
        assert all_of(Lines(path, encoding=encoding, index_dir=tmp_path)) == texts
        rows = [dict(zip("ab", text.split(","), strict=True)) for text in texts[1:] if text]
        assert all_of(CSV(path, encoding=encoding, index_dir=tmp_path)) == rows
        value = written(tmp_path / "t.jsonl", '{"x": 1}\n\n{"x": 2}'.encode(encoding))
        assert all_of(JSONL(value, encoding=encoding, index_dir=tmp_path)) == [{"x": 1}, {"x": 2}]
        packed = written(tmp_path / "t.txt.gz", gzip.compress("\n".join(texts).encode(encoding)))
        assert all_of(Lines(packed, encoding=encoding, index_dir=tmp_path)) == texts

    @pytest.mark.parametrize("make", [Lines, JSONL, CSV])
    def test_utf_16_is_named(self, tmp_path: Path, make: Any) -> None:
        path = written(tmp_path / "t.txt", "a,b\n1,2\n".encode("utf-16"))
        with pytest.raises(SampleError, match=r"t\.txt is UTF-16; pass encoding='utf-16'"):
            make(path)
        with pytest.raises(ArgumentError, match="encoding='latin-11' is not a text encoding of Python"):
            make(path, encoding="latin-11")
        path = written(tmp_path / "cut.txt", "a,b\n".encode("utf-16")[:-1])
        with pytest.raises(SampleError, match=r"cut\.txt is not UTF-16 \(.*truncated data\); pass its encoding="):
            make(path, encoding="utf-16", index_dir=tmp_path)

    def test_another_encoding_is_named_as_the_remedy(self, tmp_path: Path) -> None:
        content = "größe,x\né,1\n".encode("latin-1")
        with pytest.raises(SampleError, match=r"t\.csv: the first row is not UTF-8 .*encoding='cp1252'"):
            CSV(written(tmp_path / "t.csv", content))
        with pytest.raises(SampleError, match=r"t\.csv, line 2, is not ASCII .*encoding='cp1252'"):
            Lines(tmp_path / "t.csv", encoding="ascii")[1]

    def test_addresses(self, tmp_path: Path) -> None:
        written(tmp_path / "a.jsonl", '{"x": 1}\n\n{"x": null}\n')
        written(tmp_path / "b.jsonl", '{"x": 3}')
        written(tmp_path / "c.csv", 'x\n"1\n2"\n3\n')
        dataset = JSONL(tmp_path)
        assert [dataset.address(i) for i in (0, 1, -1)] == [
            (str(tmp_path / "a.jsonl"), "line 1"),
            (str(tmp_path / "a.jsonl"), "line 3"),
            (str(tmp_path / "b.jsonl"), "line 1"),
        ]
        assert CSV(tmp_path).address(1) == (str(tmp_path / "c.csv"), "line 4")
        with pytest.raises(SampleIndexError, match="index 3 is out of range for JSONL with 3 samples"):
            dataset.address(3)

    @pytest.mark.parametrize("make", [Lines, JSONL, CSV])
    def test_a_record_that_is_too_long_is_refused(self, tmp_path: Path, make: Any) -> None:
        path = written(tmp_path / "t.txt", '"x"\n"1"\n"' + "y" * 100 + '"\n')
        dataset = make(path, max_record_nbytes=50)
        assert dataset[len(dataset) - 2] in ("1", {"x": "1"}, '"1"')
        with pytest.raises(
            SampleError, match=r"t\.txt, line 3, has 10[23] bytes, and max_record_nbytes= allows 50; raise the limit"
        ):
            dataset[-1]
        with fl.DataLoader(dataset, 1, on_error="skip") as loader:
            assert len(list(loader)) == len(dataset) - 1
        assert make(path)[-1] is not None
        with pytest.raises(ArgumentError, match="max_record_nbytes=0 must be at least 1"):
            make(path, max_record_nbytes=0)

    def test_a_line_of_any_length_is_indexed_in_little_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(file_objects, "_PART_NBYTES", 8)
        short, long = b'"one"\r\n', b'"' + b"x" * 100 + b'"\r\n'
        path = written(tmp_path / "t.jsonl", short + long + b"  \n" + short + long)
        file = LocalFile(str(path), *FileVersion.of(path.stat()))
        found = [*line_index.line_pieces(file, 20)]
        assert max(len(piece.data) for piece in found) <= 20 + 2 * 8
        assert sum(len(piece.data) + piece.left_out for piece in found) == file.nbytes
        monkeypatch.setattr(line_index, "_HELD_NBYTES", 20)
        assert all_of(JSONL(path)) == ["one", "x" * 100] * 2
        assert all_of(Lines(path))[1:3] == ['"' + "x" * 100 + '"', "  "]
        with pytest.raises(
            SampleError, match=r"t\.jsonl: the line at byte 7 has more than 20 bytes; is this a CSV file"
        ):
            CSV(path, max_record_nbytes=20)

    @pytest.mark.parametrize("make", [JSONL, CSV])
    def test_a_bare_name_is_no_list_of_columns(self, tmp_path: Path, make: Any) -> None:
        with pytest.raises(ArgumentError, match=r"columns='xy': pass a list of names, such as \['xy'\]"):
            make(written(tmp_path / "t.txt", "x,y\n"), "xy")


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

    @pytest.mark.parametrize("rest", ['"x', '"x\n3,y\n4,z\n', '"x ""quoted""\n'])
    def test_a_row_that_ends_within_quotes_is_an_error(self, tmp_path: Path, rest: str) -> None:
        """A truncated value, or all other rows as one value, would pass for the last row."""
        data = CSV(written(tmp_path / "t.csv", f'p,q\n0,"a\nb"\n1,{rest}'))
        assert len(data) == 2
        assert data[0] == {"p": "0", "q": "a\nb"}
        with pytest.raises(SampleError, match=r"t\.csv, line 4, ends within a quoted field: .*truncated\? Repair"):
            data[1]
        with pytest.raises(SampleError, match="line 4, ends within a quoted field"):
            CSV(data.paths[0], escape="\\")[1]
        with fl.DataLoader(data, on_error="skip") as loader:
            assert [batch["p"] for batch in loader] == [["0"]]
            assert loader.stats().skipped == 1

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

    @settings(suppress_health_check=FRESH)
    @given(
        rows=st.lists(st.tuples(*[st.text(st.sampled_from('aé表,;"\\ \n'), max_size=6)] * 2), max_size=6),
        encoding=st.sampled_from(["utf-8", "utf-16", "shift_jisx0213"]),
        quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL, csv.QUOTE_NONE]),
    )
    def test_escaped_quotes_are_read_as_they_were_written(
        self, tmp_path: Path, rows: list[Any], encoding: str, quoting: Any
    ) -> None:
        path = tmp_path / "t.csv"
        with open(path, "w", newline="", encoding=encoding) as file:
            writer = csv.writer(file, doublequote=False, escapechar="\\", quoting=quoting, lineterminator="\n")
            writer.writerows([("p", "q"), *rows])
        for index in tmp_path.glob("*-index"):
            index.unlink()
        dataset = CSV(path, escape="\\", encoding=encoding, index_dir=tmp_path, cache=tmp_path)
        assert [list(row.values()) for row in all_of(dataset)] == list(map(list, rows))

    @pytest.mark.parametrize("text", [r'"say \"hi\"",2', r'"a \" b",2', '"a\\"",1\n"b\\"",2', r'"end \"",2'])
    def test_escaped_quotes_are_not_misread_without_a_word(self, tmp_path: Path, text: str) -> None:
        path = written(tmp_path / "t.csv", f'x,y\n{text}\n"z",3\n')
        with pytest.raises(SampleError, match=r't\.csv, line 2, is not in the default .* pass escape="\\\\"'):
            CSV(path)[0]
        rows = all_of(CSV(path, escape="\\"))
        assert rows[-1] == {"x": "z", "y": "3"}
        assert [row["x"].count('"') for row in rows[:-1]] == [line.count('\\"') for line in text.split("\n")]
        with pytest.raises(SampleError, match=r't\.csv: the first row is not CSV .*pass escape="\\\\"'):
            CSV(written(tmp_path / "t.csv", text))

    def test_a_backslash_at_the_end_of_a_field_is_no_escape(self, tmp_path: Path) -> None:
        path = written(tmp_path / "t.csv", 'x,y\n"C:\\",2\n5\\" disc,3\n')
        assert all_of(CSV(path)) == [{"x": "C:\\", "y": "2"}, {"x": '5\\" disc', "y": "3"}]

    @pytest.mark.parametrize("escape", ["", ",", '"', "\n", "é", 3])
    def test_what_is_no_escape(self, tmp_path: Path, escape: Any) -> None:
        with pytest.raises(ArgumentError, match=r"escape=.* must be one ASCII character that is not a quote, blank"):
            CSV(written(tmp_path / "t.csv", "x\n"), escape=escape)

    def test_a_value_that_cannot_be_converted_is_named(self, tmp_path: Path) -> None:
        dataset = CSV(written(tmp_path / "t.csv", 'x,y\n1,"a\nb"\noops,2\n3,4\n'), {"x": float})
        with pytest.raises(SampleError, match=r"t\.csv, line 4, column 'x': cannot convert 'oops' to float"):
            dataset[1]
        with pytest.raises(
            SampleError, match=r"line 2, column 'y': cannot convert 'a\\nb' to bool \(neither true nor false\)"
        ):
            CSV(tmp_path / "t.csv", {"y": bool})[0]
        with pytest.raises(SampleError, match=r"line 4, column 'x': cannot convert 'oops' to __getitem__ \('oops'\)"):
            CSV(tmp_path / "t.csv", {"x": {"1": 0, "3": 1}.__getitem__})[1]

    def test_a_row_of_another_length_is_named(self, tmp_path: Path) -> None:
        dataset = CSV(written(tmp_path / "t.csv", "x,y\n1\n1,2\n"))
        with pytest.raises(SampleError, match=r"t\.csv, line 2, has 1 fields, but the first row has 2"):
            dataset[0]
        assert dataset[1] == {"x": "1", "y": "2"}

    def test_a_field_beyond_the_limit_of_the_csv_module_is_named(self, tmp_path: Path) -> None:
        long = "a" * (csv.field_size_limit() + 1)
        with pytest.raises(SampleError, match=r"line 2, is not CSV .*csv\.field_size_limit"):
            CSV(written(tmp_path / "t.csv", f"x\n{long}\n"))[0]
        with pytest.raises(SampleError, match=r"the row at byte 2 is not CSV .*csv\.field_size_limit"):
            CSV(written(tmp_path / "u.csv", f'x\n"{long}"\n'))

    @pytest.mark.parametrize("quoted", ["3", '"3"'])
    def test_a_carriage_return_alone_spoils_one_row(self, tmp_path: Path, quoted: str) -> None:
        dataset = CSV(written(tmp_path / "t.csv", f"x,y\n1\r,2\n{quoted},4\n5,6\n"))
        with pytest.raises(
            SampleError, match=r"t\.csv, line 2, is not CSV \(new-line .*quote the field, or pass on_err"
        ):
            dataset[0]
        assert [dataset[1], dataset[2]] == [{"x": "3", "y": "4"}, {"x": "5", "y": "6"}]
        with pytest.raises(SampleError, match=r"m\.csv: the first row is not CSV .*a carriage return only\?"):
            CSV(written(tmp_path / "m.csv", "x,y\r1,2\r"))

    @pytest.mark.parametrize("delimiter", [";;", "", '"', "\n", 3])
    def test_what_is_no_delimiter(self, tmp_path: Path, delimiter: Any) -> None:
        with pytest.raises(
            ArgumentError, match=r"delimiter=.* must be one character that is not a quote, line end or NUL"
        ):
            CSV(written(tmp_path / "t.csv", "x\n"), delimiter=delimiter)

    @pytest.mark.parametrize("mark", [";", "\t", "|"])
    def test_a_first_row_of_another_delimiter_is_not_one_column(self, tmp_path: Path, mark: str) -> None:
        path = written(tmp_path / "t.csv", f"x{mark}y\n1{mark}2\n")
        with pytest.raises(ArgumentError, match=r"t\.csv has one column, .* pass delimiter="):
            CSV(path)
        assert CSV(path, delimiter=mark)[0] == {"x": "1", "y": "2"}
        assert CSV(path, [f"x{mark}y"])[0] == {f"x{mark}y": f"1{mark}2"}

    @pytest.mark.parametrize(("delimiter", "encoding"), [("→", "utf-8"), ("§", "utf-8"), ("§", "latin-1")])
    def test_delimiters_beyond_ascii(self, tmp_path: Path, delimiter: str, encoding: str) -> None:
        content = f'x{delimiter}y\n1{delimiter}"2\né"\n3{delimiter}4\n'
        dataset = CSV(written(tmp_path / "t.csv", content.encode(encoding)), delimiter=delimiter, encoding=encoding)
        assert all_of(dataset) == [{"x": "1", "y": "2\né"}, {"x": "3", "y": "4"}]
        with pytest.raises(ArgumentError, match="delimiter='→' is not a single byte in ISO8859-1"):
            CSV(tmp_path / "t.csv", delimiter="→", encoding="latin-1")

    def test_files_share_their_first_row(self, tmp_path: Path) -> None:
        written(tmp_path / "a.csv", "x,y\n1,2\n")
        written(tmp_path / "b.csv", "x,y\n3,4\n")
        assert [row["y"] for row in all_of(CSV(tmp_path))] == ["2", "4"]
        written(tmp_path / "c.csv", "x,z\n3,4\n")
        with pytest.raises(
            SampleError, match=r"c\.csv has the columns \['x', 'z'\] in its first row, but .*a\.csv has"
        ):
            CSV(tmp_path)

    def test_bad_files_and_columns_are_named(self, tmp_path: Path) -> None:
        for content in ("", "\n\n", "\r\r"):
            with pytest.raises(SampleError, match=r"empty\.csv is empty; its first row"):
                CSV(written(tmp_path / "empty.csv", content))
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


@pytest.mark.parametrize("read", [Lines, JSONL, CSV])
def test_a_file_that_is_cut_short_while_it_is_read(tmp_path: Path, read: Any) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b'{"a": 1}\n' * 20_000)
    dataset = read(path)
    assert dataset[0] is not None
    os.truncate(path, 9)
    time.sleep(2 * RECHECK_S)
    with (
        fl.DataLoader(dataset, 256, collate_fn=len) as loader,
        pytest.raises(StateError, match=r"a.txt has changed since this dataset was made: it had 180000 bytes"),
    ):
        list(loader)
