"""Files and objects found by path, pattern or address, and read in the same way."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from web_servers import Handler, serving

from feedline.core import stage_parts
from feedline.core.telemetry import recorder_of_thread
from feedline.datasets.paths import find
from feedline.errors import ArgumentError, StateError
from feedline.stores import CachedStore, ObjectNotFoundError, ObjectRange, RangeError
from feedline.stores.files import Extent, FileSet

CONTENT = {f"train/{number:03}.bin": bytes([number]) * (1000 + number) for number in range(100)}


@pytest.fixture
def memory() -> Iterator[str]:
    """A store in memory that holds CONTENT."""
    system = fsspec.filesystem("memory")
    for path, data in CONTENT.items():
        system.pipe(f"/bucket/{path}", data)
    yield "memory://bucket"
    system.rm("/bucket", recursive=True)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder that holds CONTENT."""
    for path, data in CONTENT.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(data)
    return str(tmp_path)


@pytest.fixture(params=["files", "objects", "cached objects"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> FileSet:
    """All of CONTENT."""
    if request.param == "files":
        return find(f"{request.getfixturevalue('folder')}/train", "*.bin")
    cache = tmp_path / "cache" if request.param == "cached objects" else None
    return find(f"{request.getfixturevalue('memory')}/train", "*.bin", cache=cache)


def test_a_folder_stands_for_its_files(files: FileSet) -> None:
    assert len(files) == 100
    assert files.names == sorted(files.names)
    assert [files.info(number).size for number in range(100)] == [1000 + number for number in range(100)]
    assert [file.nbytes for file in files] == [1000 + number for number in range(100)]


def test_many_at_once(files: FileSet) -> None:
    rng = np.random.default_rng(0)
    extents = [Extent(int(rng.integers(100)), start, start + 7) for start in range(0, 900, 3)]
    found = files.read(extents)
    assert [bytes(view) for view in found] == [bytes([file]) * 7 for file, _, _ in extents]
    assert files.read([]) == []
    assert [bytes(view) for view in files[3].read([(0, 2), (5, 5)])] == [b"\3\3", b""]


def test_a_pickled_set_reads_the_same(files: FileSet) -> None:
    files.read([Extent(0, 0, 1)])
    again = pickle.loads(pickle.dumps(files))
    assert again.names == files.names
    assert bytes(again.read([Extent(99, 0, 3)])[0]) == bytes([99]) * 3


def test_patterns_and_braces_are_written_out_in_order(memory: str, folder: str) -> None:
    for root in (memory, folder):
        names = find([f"{root}/train/00[12].bin", f"{root}/train/{{007,003}}.bin"], "").names
        assert [name[-7:] for name in names] == ["001.bin", "002.bin", "007.bin", "003.bin"]
        assert len(find(f"{root}/train/{{000..099}}.bin", "")) == 100


def test_files_and_objects_mix(memory: str, folder: str) -> None:
    mixed = find([f"{folder}/train/001.bin", f"{memory}/train/002.bin"], "")
    assert not mixed.is_local
    assert [bytes(view) for view in mixed.read([Extent(1, 0, 1), Extent(0, 0, 1)])] == [b"\2", b"\1"]


class Hundred(Handler):
    """An object of a hundred bytes, in ranges."""

    def do_GET(self) -> None:
        first, last = map(int, self.headers.get("Range", "bytes=0-99").removeprefix("bytes=").split("-"))
        fields = {"Content-Range": f"bytes {first}-{last}/100", "ETag": '"1"', "Accept-Ranges": "bytes"}
        self.answer(206 if "Range" in self.headers else 200, b"a" * (last + 1 - first), fields)


@pytest.mark.parametrize("cached", [False, True])
def test_each_store_has_a_part_of_its_own(
    memory: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    monkeypatch.setattr(stage_parts, "_stores", {})  # earlier tests may have read more stores than have names
    extents = [Extent(4, 0, 5), Extent(3, 0, 7), Extent(0, 1, 3), Extent(2, 0, 11), Extent(0, 0, 1), Extent(3, 9, 9)]
    recorder = recorder_of_thread()
    monkeypatch.setattr(recorder, "next_delay_ns", 1 << 62)  # no reading of all files comes between
    with serving(Hundred, None) as server:
        paths = [f"{memory}/train/{{003..005}}.bin", f"{server.url}/a.bin", f"{folder}/train/007.bin"]
        files = find(paths, "", cache=tmp_path / "cache" if cached else None)
        for _ in range(1 + cached):  # the second time from the memory of the cache
            recorder.next_parts_ns = 0
            outer = recorder.begin()
            views = files.read(extents)
            spans = recorder.finish("fetch", outer)
            assert [bytes(view) for view in views] == [b"\7" * 5, b"a" * 7, b"\3" * 2, b"\5" * 11, b"\3", b""]
            nbytes = {stage: stop for stage, _, stop, _ in spans if stage.endswith(".nbytes")}
            expected = {"files": 5, "memory": 14, server.url: 7}
            assert nbytes == {f"read {name}.nbytes": number for name, number in expected.items()}
            took = {stage: stop - start for stage, start, stop, _ in spans if f"{stage}.nbytes" in nbytes}
            whole_ns = next(stop - start for stage, start, stop, _ in spans if stage == "fetch")
            assert len(took) == 3
            assert sum(took.values()) <= whole_ns


@pytest.mark.parametrize("path", ["train/100.bin", "train/{000..100}.bin", "train/x*.bin", "empty/", "train/none"])
def test_missing_files_are_named(memory: str, path: str) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"memory://bucket/(train/(100|x\*|none)|empty)"):
        find(f"{memory}/{path}", "*.bin")


def test_nothing_is_no_list_of_files() -> None:
    with pytest.raises(FileNotFoundError, match="the list of paths is empty"):
        find([], "*.bin")


def test_a_file_that_changed_is_refused(folder: str) -> None:
    files = find(f"{folder}/train/001.bin", "")
    Path(folder, "train/001.bin").write_bytes(b"other")
    with pytest.raises(StateError, match=r"001\.bin has changed since this dataset was made: it had 1001 bytes, .* 5 "):
        files[0].read([(0, 1)])


def test_an_empty_file_has_no_bytes(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert bytes(find(tmp_path / "empty", "")[0].read([(0, 0)])[0]) == b""


def test_a_file_for_libraries_that_open_files(memory: str, folder: str, tmp_path: Path) -> None:
    assert find(f"{folder}/train/001.bin", "").local_path(0) == f"{folder}/train/001.bin"
    cached = find(f"{memory}/train/001.bin", "", cache=tmp_path / "cache")
    assert Path(cached.local_path(0)).read_bytes().startswith(CONTENT["train/001.bin"])
    with pytest.raises(ArgumentError, match=r"memory://bucket/train/001\.bin is read by a library .* give cache="):
        find(f"{memory}/train/001.bin", "").local_path(0)


def test_wants_are_of_caches_only(memory: str, folder: str, tmp_path: Path) -> None:
    extents = [Extent(0, 5, 9), Extent(1, 0, 3)]
    assert find([f"{folder}/train/001.bin", f"{memory}/train/002.bin"], "").ranges(extents) == []
    cached = find([f"{folder}/train/001.bin", f"{memory}/train/002.bin"], "", cache=tmp_path / "cache")
    ((store, want),) = cached.ranges(extents)
    assert isinstance(store, CachedStore)
    assert want == ObjectRange("bucket/train/002.bin", 0, 3)


def test_mapped_files_are_read_without_waiting(memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = find(f"{memory}/train", "*.bin", cache=tmp_path / "cache")
    extents = [Extent(number, 5, 9) for number in (3, 1, 2)]
    read = files.read(extents)

    def refuse(self: FileSet, wanted: dict[int, Any]) -> Any:
        assert not wanted
        return {}

    monkeypatch.setattr(FileSet, "_start_reads", refuse)
    assert files.read(extents) == read == [bytes([number]) * 4 for number in (3, 1, 2)]
    with pytest.raises(AssertionError):
        files.read([*extents, Extent(4, 0, 1)])


def test_invalid_ranges_are_refused_in_memory_too(memory: str, tmp_path: Path) -> None:
    files = find(f"{memory}/train", "*.bin", cache=tmp_path / "cache")
    files.read([Extent(1, 0, 1001), Extent(2, 0, 1002)])
    with pytest.raises(ValueError, match="not a valid range"):
        files.read([Extent(1, 9, 5), Extent(2, 0, 5)])
    with pytest.raises(RangeError, match="only 1001 bytes"):
        files.read([Extent(1, 0, 1002), Extent(2, 0, 5)])


def test_a_forked_process_opens_its_own(files: FileSet) -> None:
    files.read([Extent(0, 0, 1), Extent(1, 0, 1)])
    pid = os.fork()
    if pid == 0:
        try:
            found = [bytes(view) for view in files.read([Extent(2, 0, 1), Extent(3, 0, 1)])]
            os._exit(0 if found == [b"\2", b"\3"] else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
