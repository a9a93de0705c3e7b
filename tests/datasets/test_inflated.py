"""The place of decompressed content, for every format that has compressed files."""

from __future__ import annotations

import errno
import gzip
import json
import lzma
import os
import pickle
import tarfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from preloaded import IMPORTS_FEEDLINE, Preloaded

from feedline.datasets import JSONL, MDS, Lines, TarShards, indexes, inflated
from feedline.datasets.fingerprints import fingerprint
from feedline.errors import ArgumentError, StoreError
from feedline.stores import Cache, CacheWarning
from feedline.stores.cache import folder as cache_folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An empty folder, apart from the user's cache."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def write_text(folder: Path, text: str, name: str = "a") -> None:
    (folder / f"{name}.txt.gz").write_bytes(gzip.compress(f"{text}\n".encode()))


def write_tar(folder: Path, text: str, name: str = "a") -> None:
    (folder / "0.txt").write_text(text)
    with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as tar:
        tar.add(folder / "0.txt", "0.txt")
    (folder / "0.txt").unlink()


def write_mds(folder: Path, text: str, name: str = "a") -> None:
    data = text.encode()
    sample = len(data).to_bytes(4, "little") + data
    shard = b"".join(number.to_bytes(4, "little") for number in (1, 12, 12 + len(sample))) + sample
    packed = gzip.compress(shard)
    (folder / f"{name}.gz").write_bytes(packed)
    columns = {"column_names": ["text"], "column_encodings": ["str"], "column_sizes": [None]}
    files = {
        "raw_data": {"basename": name, "bytes": len(shard), "hashes": {}},
        "zip_data": {"basename": f"{name}.gz", "bytes": len(packed), "hashes": {}},
    }
    shards = [{"version": 2, "format": "mds", "compression": "gz", "samples": 1, "hashes": [], **columns, **files}]
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def read_text(folder: str, **options: Any) -> Callable[[], str]:
    data = Lines(folder, **options)
    return lambda: str(data[0])


def read_tar(folder: str, **options: Any) -> Callable[[], str]:
    data = TarShards(folder, ["txt"], **options)
    return lambda: str(data[0][0])


def read_mds(folder: str, **options: Any) -> Callable[[], str]:
    data = MDS(folder, **options)
    return lambda: str(data[0]["text"])


KINDS = {"text": (write_text, read_text), "tar": (write_tar, read_tar), "mds": (write_mds, read_mds)}
Kind = tuple[Callable[..., None], Callable[..., Callable[[], str]]]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def contents(tmp_path: Path, cache: str = "xdg/feedline/decompressed") -> list[Path]:
    """The files of a cache, in the user's cache folder by default."""
    return [path for path in (tmp_path / cache).glob("v1/objects/*/*") if path.is_file()]


def test_each_version_is_decompressed_once_into_one_folder(source: Path, tmp_path: Path, kind: Kind) -> None:
    write, read = kind
    for number, text in enumerate(("one", "another")):
        write(source, text)
        for _ in range(2):
            assert read(str(source))() == text
        assert len(contents(tmp_path)) == number + 1


def test_a_cache_of_its_own_takes_its_content(source: Path, tmp_path: Path, kind: Kind) -> None:
    write, read = kind
    write(source, "one")
    assert read(str(source), cache=tmp_path / "own")() == "one"
    assert len(contents(tmp_path, "own")) == 1
    assert not contents(tmp_path)


def test_content_that_was_evicted_is_made_again(source: Path, tmp_path: Path, kind: Kind) -> None:
    write, read = kind
    write(source, "one")
    before = read(str(source))
    assert before() == "one"
    for path in contents(tmp_path):
        path.unlink()
    assert before() == read(str(source))() == "one"
    assert len(contents(tmp_path)) == 1


def test_a_disk_that_is_full_is_named(
    source: Path, tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = kind
    write(source, "one")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache_folder, "write", full)
    with pytest.raises(StoreError, match=r"cannot be kept decompressed in .* \(No space left .* pass cache=, a folder"):
        read(str(source))()
    assert not contents(tmp_path)
    assert not list((tmp_path / "xdg").rglob("temporary/*"))


def test_content_larger_than_the_cache_is_named(source: Path, tmp_path: Path, kind: Kind) -> None:
    write, read = kind
    write(source, "one" * 1000)
    cache = Cache(tmp_path / "own", 100)
    with (
        pytest.raises(StoreError, match=r"cannot be kept decompressed in .* \(the limit of the cache is lower\)"),
        pytest.warns(CacheWarning) if kind is KINDS["mds"] else nullcontext(),  # its index has the size
    ):
        read(str(source), cache=cache)()
    assert not contents(tmp_path, "own")


def test_a_folder_that_cannot_be_made_is_named(source: Path, tmp_path: Path, kind: Kind) -> None:
    write, read = kind
    write(source, "one")
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"cache='.*/file/own': .* cannot be created .* pass a writable folder"):
        read(str(source), cache=tmp_path / "file/own")


def test_large_content_is_not_read_for_a_checksum(
    source: Path, tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = kind
    write(source, "one")
    synced = list[int]()
    monkeypatch.setattr(cache_folder, "_CHECKED_NBYTES", 8)
    monkeypatch.setattr(os, "fsync", synced.append)
    assert read(str(source))() == "one"
    assert len(synced) == 1  # before it has its name
    (path,) = contents(tmp_path)
    monkeypatch.setattr("feedline.stores.cache.entries.checksum", None)
    assert read(str(source))() == "one"
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    os.truncate(path, path.stat().st_size - 1)
    assert read(str(source))() == "one"
    assert contents(tmp_path)[0].stat().st_size == path.stat().st_size


def test_several_that_open_a_file_at_once_decompress_it_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(source, "one")
    calls, waiting, convert = list[str](), threading.Barrier(4), inflated.converted

    def counting(opener: Any, parts: Any, file: Any) -> Any:
        calls.append(file.name)
        return convert(opener, parts, file)

    def opened(_: int) -> str:
        waiting.wait()
        return read_text(str(source))()

    monkeypatch.setattr("feedline.datasets.text.plain_text.converted", counting)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(opened, range(4))) == ["one"] * 4
    assert len(calls) == 1


def test_content_has_no_part_in_fingerprints(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(source, "one")
    seen = set()
    for number in range(2):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache {number}"))
        data = Lines(source)
        seen.add((data.listing_fingerprint, fingerprint(data)))
    assert len(seen) == 1
    write_text(source, "one\ntwo")
    assert fingerprint(Lines(source)) not in {each for _, each in seen}


def test_an_index_fits_content_that_is_made_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(source, "one\ntwo")
    data = pickle.dumps(Lines(source))
    monkeypatch.setattr(indexes.files, "write", None)  # no index is built again
    for opened in (lambda: pickle.loads(data), lambda: Lines(source)):
        contents(tmp_path)[0].unlink()
        assert opened().__getitems__([0, 1]) == ["one", "two"]


def test_a_source_without_versions_is_read_again(request: pytest.FixtureRequest, monkeypatch: Any) -> None:
    system = fsspec.filesystem("memory")
    request.addfinalizer(lambda: system.rm("/texts", recursive=True))
    plain = system.info
    monkeypatch.setattr(
        MemoryFileSystem,
        "info",
        lambda self, path, **more: {k: v for k, v in plain(path, **more).items() if k in ("name", "size", "type")},
    )
    for text in (b"one\ntwo\n", b"o\nnetwo\n"):
        system.pipe("/texts/a.txt.gz", gzip.compress(text))
        data = Lines("memory://texts/a.txt.gz")
        assert list(data) == list(pickle.loads(pickle.dumps(data))) == text.decode().split()


def test_the_least_recently_used_is_evicted_first(source: Path, tmp_path: Path) -> None:
    limit = Cache(tmp_path / "own", 2500)
    for name in "abc":
        write_text(source, "x" * 999, name)
    first = Lines(source / "a.txt.gz", cache=limit)
    (path,) = contents(tmp_path, "own")
    os.utime(path, (1, 1))
    Lines(source / "b.txt.gz", cache=limit)
    assert first[0] == Lines(source / "a.txt.gz", cache=limit)[0]  # the oldest becomes the newest
    (second,) = (each for each in contents(tmp_path, "own") if each != path)
    os.utime(second, (2, 2))
    Lines(source / "c.txt.gz", cache=limit)
    assert path.exists()
    assert not second.exists()
    with pytest.warns(CacheWarning, match=r"decompressed, .*a\.txt\.gz .* 3,000 bytes, but .* keeps 2,500"):
        every = Lines(source, cache=limit)
    assert list(every) == ["x" * 999] * 3
    assert sum(each.stat().st_size for each in contents(tmp_path, "own")) <= 2500


def test_objects_are_fetched_ahead_until_they_are_decompressed(
    source: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    system = fsspec.filesystem("memory")
    request.addfinalizer(lambda: system.rm("/shards", recursive=True))
    write_mds(source, "one")
    for path in source.iterdir():
        system.pipe(f"/shards/{path.name}", path.read_bytes())
    data = MDS("memory://shards", cache=tmp_path / "own")
    assert [each.path for _, each in data.ranges(np.arange(1))] == ["a.gz"]
    assert data[0] == {"text": "one"}
    assert data.ranges(np.arange(1)) == []


def test_a_folder_of_json_lines_has_its_indexes_next_to_it(source: Path) -> None:
    (source / "a.jsonl.gz").write_bytes(gzip.compress(b'{"x": 1}\n'))
    assert JSONL(source)[0] == JSONL(source)[0] == {"x": 1}
    assert sorted(path.name for path in source.iterdir()) == [".a.jsonl.gz.jsonl-index", "a.jsonl.gz"]


_WITHOUT_BZ2_AND_LZMA = f"""
{IMPORTS_FEEDLINE}
sys.modules.pop("bz2", None), sys.modules.pop("lzma", None)
sys.modules["_bz2"] = sys.modules["_lzma"] = None  # as in a Python that was built without their libraries
import feedline as fl

assert all(getattr(fl.datasets, name) for name in fl.datasets.__all__)
plain, *packed = sys.argv[1:]
print(fl.datasets.Lines(plain)[0])
for path in packed:
    try:
        fl.datasets.Lines(path)
    except fl.errors.MissingExtraError as error:
        print(error)
"""


def test_a_python_without_bz2_and_lzma_reads_everything_else(
    preloaded: Preloaded, source: Path, tmp_path: Path
) -> None:
    write_text(source, "one", "a")
    (source / "b.txt.xz").write_bytes(lzma.compress(b"two"))
    (source / "c.txt.bz2").write_bytes(b"BZh9")
    paths = [source / name for name in ("a.txt.gz", "b.txt.xz", "c.txt.bz2")]
    code, printed = preloaded.run_code(_WITHOUT_BZ2_AND_LZMA, tmp_path, *map(str, paths))
    assert code == 0, printed
    first, *errors = printed.splitlines()
    assert first == "one"
    assert [error.split(",")[0] for error in errors] == [
        "a file compressed by xz needs Python's module lzma",
        "a file compressed by bzip2 needs Python's module bz2",
    ]
