"""Compressed text files, and files that are no text at all."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import pickle
import shutil
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from diagonals import diagonal

import feedline as fl
from feedline.datasets import CSV, JSONL, Lines
from feedline.errors import SampleError


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


CODECS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstd,
    "zlib": zlib.compress,
    "GZ": lambda data: gzip.compress(data[:50]) + gzip.compress(data[50:]),  # members that follow each other
}
ROWS = [{"x": i, "text": f"text {i}"} for i in range(100)]
TEXT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.mark.parametrize("suffix", CODECS)
def test_a_compressed_file_is_read_like_the_plain_one(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(CODECS[suffix](TEXT))
    data = JSONL(f"{tmp_path}/a.jsonl.{suffix}")
    assert [data[i] for i in range(100)] == ROWS
    with fl.DataLoader(data, 10, num_workers=2, shuffle=True, seed=0) as loader:
        assert sorted(x for batch in loader for x in batch["x"].tolist()) == list(range(100))
    assert pickle.loads(pickle.dumps(data))[7] == ROWS[7]


def test_plain_and_compressed_files_and_objects_mix(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    system = fsspec.filesystem("memory")
    request.addfinalizer(lambda: system.rm("/texts", recursive=True))
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"two\n"))
    system.pipe("/texts/c.txt", b"three\n")
    system.pipe("/texts/d.txt.gz", gzip.compress(b"four\n"))
    data = Lines([tmp_path / "a.txt", tmp_path / "b.txt.gz", "memory://texts/c.txt", "memory://texts/d.txt.gz"])
    assert data.__getitems__(range(4)) == ["one", "two", "three", "four"]


def test_a_folder_stands_for_its_compressed_files(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    system = fsspec.filesystem("memory")
    request.addfinalizer(lambda: system.rm("/texts", recursive=True))
    folder = tmp_path / "texts"
    for name in ("a.txt", "b.txt", "b.txt.gz", "deep/c.txt.bz2", "d.md.gz"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(CODECS.get(name.rpartition(".")[2], bytes)(name.encode()))
        system.pipe(f"/texts/{name}", (folder / name).read_bytes())
    for place in (str(folder), "memory://texts", "memory://texts/"):
        data = Lines(place)
        assert list(data) == ["a.txt", "b.txt", "deep/c.txt.bz2"]
        assert data.paths == [f"{place.rstrip('/')}/{text}" for text in data]
        assert data.address(-1)[0].endswith("/texts/deep/c.txt.bz2")


@pytest.mark.parametrize("suffix", [name for name in CODECS if name.islower()])
def test_all_of_a_compressed_file_is_read(tmp_path: Path, suffix: str) -> None:
    path, packed = tmp_path / f"a.txt.{suffix}", CODECS[suffix](TEXT)
    path.write_bytes(packed * 2)
    assert len(Lines(path)) == 2 * len(ROWS)
    for data in (b"", packed + b"garbage", packed + packed[:-9]):
        path.write_bytes(data)
        with pytest.raises(SampleError, match=r"a\.txt\..* cannot be decompressed: it is damaged, truncated, or not"):
            Lines(path)


@pytest.mark.parametrize("data", [gzip.compress(TEXT)[:-20], b"no gzip", gzip.compress(TEXT)[:20] + b"damage" * 9])
def test_damage_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.txt.gz").write_bytes(data)
    with pytest.raises(SampleError, match=r"a\.txt\.gz cannot be decompressed: it is damaged, truncated, or not"):
        Lines(tmp_path / "a.txt.gz")
    assert not list((tmp_path / "xdg").rglob("temporary/*"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04rest", "is an Excel workbook or another zip archive, not text; save its sheets as 'CSV UTF-8'"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "is an old Excel workbook, not text; save its sheets"),
        (gzip.compress(b"x"), r"is compressed by gzip, not text; give it the extension \.gz"),
        (zstd(b"x"), r"is compressed by zstd, not text; give it the extension \.zst"),
        (b"PAR1", "is a Parquet file, not text; read it with Parquet"),
    ],
)
def test_what_is_no_text_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(SampleError, match=rf"a\.csv {message}"):
        CSV(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("encoding", "dataset"),
    diagonal(["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"], [Lines, JSONL, CSV]),
)
def test_text_of_wide_characters_is_named_and_then_read(
    dataset: type[Lines | JSONL | CSV], encoding: str, tmp_path: Path
) -> None:
    """With a byte order mark or without it."""
    lines = {Lines: ["a", "b\xe9"], JSONL: ['{"x": 1}', '{"x": "\xe9"}'], CSV: ["x,y", "1,\xe9"]}[dataset]
    (tmp_path / "a.txt").write_bytes("".join(f"{line}\r\n" for line in lines).encode(encoding))
    with pytest.raises(SampleError, match=f"a.txt is {encoding.upper()}; pass encoding='{encoding}'"):
        dataset(tmp_path / "a.txt")
    read = list(dataset(tmp_path / "a.txt", encoding=encoding))
    assert read == {Lines: lines, JSONL: [{"x": 1}, {"x": "\xe9"}], CSV: [{"x": "1", "y": "\xe9"}]}[dataset]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_text_sequence_is_named_and_its_remedy_works(indent: int | None, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f"\x1e{json.dumps(row, indent=indent)}\n" for row in ROWS))
    with pytest.raises(SampleError, match=r"a\.jsonl is a JSON text sequence \(RFC 7464\)") as caught:
        JSONL(tmp_path)[0]
    if shutil.which("jq") is None:
        return
    command = str(caught.value).rpartition(": ")[2].replace("OLD", "a.jsonl").replace("NEW", "b.jsonl")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert list(JSONL(tmp_path / "b.jsonl")) == ROWS


def test_excels_line_of_a_delimiter_is_named(tmp_path: Path) -> None:
    for mark in (",", ";", "\t"):
        (tmp_path / "a.csv").write_text(f"sep={mark}\nx{mark}y\n1{mark}2\n")
        with pytest.raises(SampleError, match=r"begins with the line 'sep=.*delete that line, and pass delimiter="):
            CSV(tmp_path / "a.csv", delimiter=mark)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_named(tmp_path: Path, indent: int | None) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS, indent=indent))
    with pytest.raises(SampleError, match=r"a\.jsonl is a single JSON value .* `jq -c '\.\[\]' OLD > NEW`"):
        JSONL(tmp_path)[0]


def test_any_line_shows_that_it_is_in_an_array(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('[\n\t{"x":1},\n\t{"x":2}\n]\n')
    for index in (0, 1):
        with pytest.raises(SampleError, match=r"a\.jsonl is a single JSON value .* an array of objects"):
            JSONL(tmp_path)[index]


def test_lines_may_be_arrays(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('[{"x": 1}]\n[1, 2]\n')
    assert JSONL(tmp_path).__getitems__([0, 1]) == [[{"x": 1}], [1, 2]]
