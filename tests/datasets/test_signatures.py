"""Files of other formats, given to a table: the error names their format, and its dataset."""

from __future__ import annotations

import gzip
import io
import lzma
import pickle
import sqlite3
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import feather
from safetensors.numpy import save
from scipy.io import savemat
from tar_cases import write_tar

from feedline.datasets import CSV, HDF5, JSONL, ORC, ArrayFile, Arrow, Avro, Lines, Parquet, TarShards, TFRecord
from feedline.errors import FeedlineError, SampleError

# The first block of every file of Riegeli, as ArrayRecord writes them.
RIEGELI = bytes.fromhex(
    "83af70d10d884a3f" + "00" * 8 + "40" + "00" * 7 + "91ba c23c9287e1a9" + "00" * 8 + "e19f13c0e9b1c372"
)
TABLES = {"parquet": Parquet, "arrow": Arrow, "orc": ORC, "avro": Avro}
ROWS = pa.table({"x": list(range(50))})


def _written(write: Callable[[io.BytesIO], Any]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def _sqlite(folder: Path) -> bytes:
    database = sqlite3.connect(folder / "x.db")
    database.execute("create table x (x)")
    database.close()
    return (folder / "x.db").read_bytes()


def _avro(file: io.BytesIO) -> None:
    fastavro.writer(file, {"type": "record", "name": "r", "fields": [{"name": "x", "type": "long"}]}, [{"x": 1}])


def _zip(file: io.BytesIO) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("xl/workbook.xml", "<workbook/>")


FOREIGN: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "parquet": (lambda _: _written(lambda file: pq.write_table(ROWS, file)), "a Parquet file.*; read it with Parquet"),
    "arrow": (lambda _: _written(lambda file: feather.write_feather(ROWS, file)), "an Arrow file.*read it with Arrow"),
    "orc": (lambda _: _written(lambda file: pyarrow.orc.write_table(ROWS, file)), "an ORC file.*; read it with ORC"),
    "avro": (lambda _: _written(_avro), "an Avro file.*; read it with Avro"),
    "feather 1": (lambda _: b"FEA1" + bytes(200), "a file of Feather version 1.*; rewrite it with pyarrow.feather"),
    "xls": (lambda _: bytes.fromhex("d0cf11e0a1b11ae1") + bytes(2000), "an old Excel workbook.*pandas.read_excel"),
    "xlsx": (lambda _: _written(_zip), "an Excel workbook or another zip archive.*pandas.read_excel"),
    "gzip": (lambda _: gzip.compress(b"x" * 100, mtime=0), "compressed by gzip.*; decompress it"),
    "npy": (
        lambda _: _written(lambda file: np.save(file, np.arange(9))),
        "an array of NumPy.*; read it with ArrayFile",
    ),
    "sqlite": (_sqlite, "a database of SQLite.*; read it with SQLManifest"),
    "csv": (lambda _: b"x,y\n1,2\n3,4\n", "text.*; read it with CSV, JSONL or Lines"),
    "lfs": (
        lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        "a pointer of Git LFS.*git lfs pull",
    ),
    "duckdb": (lambda _: bytes(8) + b"DUCK" + bytes(200), "a database of DuckDB.*COPY"),
    "vortex": (lambda _: b"VTXF" + bytes(200), "a Vortex file.*; write it as Parquet"),
    "array record": (lambda _: RIEGELI, "an ArrayRecord or another Riegeli file.*ArrayRecordDataSource"),
    "matlab": (
        lambda _: _written(lambda file: savemat(file, {"x": np.arange(9)})),
        "a MATLAB file older than version 7.3.*scipy.io.loadmat",
    ),
    "safetensors": (lambda _: save({"x": np.arange(9)}), "a safetensors file.*; load it with safetensors"),
    "torch": (lambda _: _written(lambda file: torch.save(torch.arange(9), file)), "a file of torch.save.*torch.load"),
    "pickle": (lambda _: pickle.dumps({"x": 1}), "a pickle.*; load it with pickle.load"),
    "blosc2": (lambda _: b"\x9e\xa8b2frame\0" + bytes(200), "a Blosc2 array.*blosc2.open"),
    "lz4": (lambda _: b"\x04\x22\x4d\x18" + bytes(200), "compressed by lz4.*; decompress it"),
    "lz4 -l": (lambda _: b"\x02\x21\x4c\x18" + bytes(200), "compressed by lz4.*; decompress it"),
    "tar": (lambda folder: write_tar(folder / "x", {"a.txt": b"x"}).read_bytes(), "a tar.*; read it with TarShards"),
    "lzma": (lambda _: lzma.compress(b"x" * 100, lzma.FORMAT_ALONE), "compressed by lzma.*; decompress it"),
    "7z": (lambda _: b"7z\xbc\xaf\x27\x1c" + bytes(200), "an archive of 7-Zip.*; unpack the archive"),
    "cpio": (lambda _: b"070701" + b"0" * 104 + b"TRAILER!!!", "an archive of cpio.*; unpack the archive"),
    "page": (lambda _: b"<!DOCTYPE html><html><body>Sign in</body></html>", "a web page.*; check the address"),
}


@pytest.mark.parametrize("reader", TABLES)
def test_a_file_of_another_format_is_named(reader: str, tmp_path: Path) -> None:
    """Local and in a store: the error does not call it damaged."""
    memory = fsspec.filesystem("memory")
    for kind, (make, message) in FOREIGN.items():
        if kind == reader:
            continue
        path = tmp_path / f"{kind}.{reader}".replace(" ", "-")
        path.write_bytes(make(tmp_path))
        memory.pipe(f"/foreign/{path.name}", path.read_bytes())
        form = TABLES[reader].__name__
        for source in (path, f"memory://foreign/{path.name}"):
            with pytest.raises(SampleError, match=f"is {message}".replace(".*", f", not {form}.*", 1)) as caught:
                TABLES[reader](source, index_dir=tmp_path / "index")
            assert path.name in str(caught.value)
            assert "damaged" not in str(caught.value)
    memory.rm("/foreign", recursive=True)


BINARY = sorted({"array record", "torch", "pickle", "safetensors", "7z", "duckdb", "lzma"})


@pytest.mark.parametrize("kind", BINARY)
def test_other_readers_name_a_file_of_another_format(kind: str, tmp_path: Path) -> None:
    make, message = FOREIGN[kind]
    what, remedy = message.split(".*", 1)
    path = tmp_path / "a.tar"
    path.write_bytes(make(tmp_path))
    for read in (HDF5, ArrayFile, TFRecord, Lines, JSONL, TarShards):
        with pytest.raises(FeedlineError, match=f"{what}.*{remedy.removeprefix('; ')}"):
            read(path)[0]  # type: ignore[operator]


def test_a_file_of_lance_is_named_by_its_ending(tmp_path: Path) -> None:
    path = tmp_path / "a.lance"
    path.write_bytes(b"0" + bytes(300) + b"\2\0\2\0LANC")
    for read in (*TABLES.values(), HDF5, TFRecord, Lines, JSONL):
        with pytest.raises(SampleError, match=r"a\.lance is a data file of a Lance table, not .*lance\.dataset"):
            read(path)  # type: ignore[operator]


FOLDERS = {
    "_versions/1.manifest": r"a table of Lance; write it as Parquet: .*lance\.dataset",
    "__schema/__1": r"an array of TileDB; save its arrays as \.npy",
    "version_control_info.json": "a dataset of Deep Lake; write its samples",
    "zarr.json": "a Zarr store; read it with Zarr",
    "data.mdb": "an LMDB environment; read it with LMDB",
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_another_format_is_named(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).touch()
    for read in (*TABLES.values(), HDF5, TFRecord, Lines, TarShards):
        with pytest.raises(FileNotFoundError, match=rf"no files: .* matches none.*folder is {FOLDERS[name]}"):
            read(folder)  # type: ignore[operator]


@pytest.mark.parametrize("reader", TABLES)
def test_other_bytes_are_called_damaged(reader: str, tmp_path: Path) -> None:
    for content in (b"", b"PAR", b"Obj", b"\xff\xfe\xfd" * 40, bytes(100)):
        path = tmp_path / f"a.{reader}"
        path.write_bytes(content)
        with pytest.raises(SampleError, match=rf"a\.{reader} cannot be read: it is damaged, truncated, or not"):
            TABLES[reader](path, index_dir=tmp_path / "index")


def test_text_that_begins_as_another_format_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ORCHID\n<html>\n")
    assert list(Lines(tmp_path / "a.txt")) == ["ORCHID", "<html>"]
    (tmp_path / "b.txt").write_text(f"{'x' * 256}\nustar\n")
    assert list(Lines(tmp_path / "b.txt"))[1] == "ustar"


@pytest.mark.parametrize("kind", ["orc", "vortex", "feather 1", "tar"])
def test_binary_files_that_begin_as_text_are_no_lines(kind: str, tmp_path: Path) -> None:
    make, message = FOREIGN[kind]
    (tmp_path / "a.txt").write_bytes(make(tmp_path))
    for read in (Lines, JSONL, CSV):
        with pytest.raises(SampleError, match=message):
            read(tmp_path / "a.txt")  # type: ignore[operator]


def test_a_file_of_zeros_is_no_text(tmp_path: Path) -> None:
    """As file systems leave it after a power failure; it was one line, or an empty table."""
    (tmp_path / "a.txt").write_bytes(bytes(100))
    for read in (Lines, JSONL, CSV):
        with pytest.raises(SampleError, match=r"a\.txt begins with zeros, as after a power failure"):
            read(tmp_path / "a.txt")  # type: ignore[operator]


def test_a_parquet_file_with_a_negative_number_of_rows_is_damaged(tmp_path: Path) -> None:
    data = _written(lambda file: pq.write_table(ROWS, file))
    # All counts, that of the row group included, as thrift's field and number: 100 means 50, and 99 means -50.
    assert b"\x16\x64" in data
    (tmp_path / "a.parquet").write_bytes(data.replace(b"\x16\x64", b"\x16\x63"))
    with pytest.raises(SampleError, match=r"a\.parquet cannot be read: .* impossible number of rows"):
        Parquet(tmp_path / "a.parquet", index_dir=tmp_path / "index")
