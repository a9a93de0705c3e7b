"""Indexes of tars in stores: equal to those of the same tar on this machine, however they are obtained."""

from __future__ import annotations

import gzip
import io
import logging
import pickle
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from image_cases import encoded, intervals, jpeg, photo
from rounds import rounds
from tar_cases import entry, image_members, npy, write_tar

from feedline.datasets import array_container
from feedline.datasets.paths import find
from feedline.datasets.webdataset import (
    ShardError,
    TarIndex,
    Tars,
    build_index,
    index_files,
    open_index,
    sources,
    write_index,
)
from feedline.datasets.webdataset.index_files import index_paths, relative_index_path
from feedline.errors import ArgumentError
from feedline.stores import ObjectChangedError, ObjectNotFoundError, StoreUnavailableError, statistics
from feedline.stores.files import RemoteFile


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for indexes of objects."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "feedline" / "indexes"


@pytest.fixture
def memory() -> Iterator[Any]:
    """A file system that is emptied."""
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def put(memory: Any, path: Path, name: str | None = None) -> str:
    """The address of a copy of a file."""
    memory.pipe(f"/b/{name or path.name}", path.read_bytes())
    return f"memory://b/{name or path.name}"


def tars_at(address: str, **more: Any) -> Tars:
    return Tars(find(address, "*.tar"), **more)


def opened(address: str, **more: Any) -> TarIndex:
    """The index of the only object at an address."""
    tars = tars_at(address, **more)
    [head] = tars.heads()
    index = tars.index(0)
    assert index.head == head
    return index


def source_at(address: str) -> sources.TarSource:
    return sources.TarSource(find(address, "*.tar"), 0)


def reported(index: TarIndex) -> Any:
    dims = [found.tolist() for field in index.fields if (found := index.dimensions(field)) is not None]
    places = index.blocks.tolist(), index.sizes.tolist()
    return list(index.keys), index.fields, *places, dims, index.head.fingerprint, index.head.cut


NAMES = st.text("abcdé/._-", min_size=1, max_size=140).filter(lambda name: ".." not in name.split("/"))
MEMBERS = st.dictionaries(
    st.tuples(NAMES, st.sampled_from(["jpg", "png", "npy", "cls", "bin"])).map(".".join),
    st.sampled_from([b"", b"1", bytes(5000), jpeg(24, 18), encoded(photo(10, 12), "PNG"), npy(np.zeros((3, 5, 3)))]),
    max_size=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=rounds(25, 300))
@given(MEMBERS, st.integers(500, 6000), st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]), st.integers(0, 3000))
def test_an_index_is_that_of_the_file_however_it_is_divided(
    tmp_path: Path, memory: Any, members: dict[str, bytes], part_nbytes: int, form: int, cut: int
) -> None:
    path = write_tar(tmp_path / "x.tar", members, format=form)
    path.write_bytes(path.read_bytes()[: max(1, path.stat().st_size - cut)])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sources, "_PART_NBYTES", part_nbytes)
        source = source_at(put(memory, path))
        near = outcome(lambda: build_index(path, allow_truncated=True))
        far = outcome(lambda: build_index(source, allow_truncated=True))
    assert far == (near if isinstance(near, tuple) else near.replace(str(path), source.name))


def outcome(make: Callable[[], TarIndex]) -> Any:
    """The contents of an index, or the reason why there is none."""
    try:
        return reported(make())
    except ShardError as error:
        return str(error)


class TestKept:
    def test_is_made_once_and_mapped_from_then_on(
        self, tmp_path: Path, memory: Any, kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = write_tar(tmp_path / "x.tar", image_members(3))
        address = put(memory, path)
        with caplog.at_level(logging.WARNING, "feedline"):
            assert reported(opened(address)) == reported(build_index(path))
        size = path.stat().st_size
        assert f"all {size:,} bytes of 1 tars ({address}, ...) are read once to index them" in caplog.text
        assert f"feedline index {address} --into FOLDER" in caplog.text
        [place] = kept.iterdir()
        assert place.name.endswith("-x.tar.index")
        before = statistics().nbytes
        with monkeypatch.context() as patched:
            patched.setattr(index_files, "build_index", None)
            assert reported(opened(address)) == reported(build_index(path))
        assert statistics().nbytes == before

    def test_many_are_built_at_once_and_logged_in_one_line(
        self, tmp_path: Path, memory: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        for number in range(20):
            put(memory, write_tar(tmp_path / f"{number:02}.tar", {f"{number}.txt": b"x" * number}))
        with caplog.at_level(logging.WARNING, "feedline"):
            heads = tars_at("memory://b/*.tar").heads()
        assert [head.samples for head in heads] == [1] * 20
        assert len(caplog.records) == 1
        assert "of 20 tars (memory://b/00.tar, ...)" in caplog.text

    def test_in_a_folder_of_ones_own_by_address(self, tmp_path: Path, memory: Any, kept: Path) -> None:
        path = write_tar(tmp_path / "x.tar", image_members(2))
        for name in ("x.tar", "deep/x.tar"):
            opened(put(memory, path, name), index_dir=tmp_path / "indexes")
            assert (tmp_path / f"indexes/b/{name}.index").exists()
        assert not kept.exists()
        near = open_index(path, index_dir=tmp_path / "indexes")
        assert near.path == f"{tmp_path}/indexes{path}.index"
        assert not Path(f"{path}.index").exists()
        assert open_index(path, index_dir=tmp_path / "indexes").path == near.path

    @pytest.mark.parametrize("name", ["s3://b/../../etc/x.tar", "s3://b/a/../../../x.tar"])
    def test_no_address_leads_out_of_that_folder(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match=r"it may not begin with / or contain \.\."):
            index_paths(name, tmp_path)
        assert relative_index_path("s3://b/a/x.tar") == "b/a/x.tar.index"

    def test_another_version_is_indexed_again(
        self, tmp_path: Path, memory: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        opened(put(memory, write_tar(tmp_path / "x.tar", image_members(2))))
        address = put(memory, write_tar(tmp_path / "x.tar", image_members(3, 5)))
        assert list(opened(address).keys) == ["0005", "0006", "0007"]
        assert "is built again (the tar has changed)" in caplog.text

    def test_the_same_content_in_another_version_is_known_again(
        self, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_tar(tmp_path / "x.tar", image_members(40))
        opened(put(memory, path))
        address = put(memory, path)
        monkeypatch.setattr(index_files, "build_index", None)
        opened(address)
        before = statistics().requests
        files = find(address, "*.tar")
        found = statistics().requests - before
        Tars(files).heads()
        assert statistics().requests - before == found

    def test_where_no_index_can_be_kept_it_is_pickled(
        self, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refusing(path: str, *_: Any) -> None:
            raise OSError(30, "Read-only file system", path)

        monkeypatch.setattr(array_container, "write", refusing)
        tars = tars_at(put(memory, write_tar(tmp_path / "x.tar", image_members(2))))
        tars.heads()
        assert "the index of memory://b/x.tar stays in memory" in caplog.text
        monkeypatch.setattr(index_files, "build_index", None)
        copy = pickle.loads(pickle.dumps(tars))
        assert reported(copy.index(0)) == reported(tars.index(0))

    def test_truncated_ones_are_reported_from_the_index_too(self, tmp_path: Path, memory: Any) -> None:
        path = write_tar(tmp_path / "x.tar", {"a.txt": b"1", "b.txt": bytes(3000)})
        path.write_bytes(path.read_bytes()[:3000])
        address = put(memory, path)
        for _ in range(2):
            with pytest.raises(ShardError, match=r"memory://b/x.tar is truncated: member 'b.txt'.*allow_truncated"):
                tars_at(address).heads()
            assert list(opened(address, allow_truncated=True).keys) == ["a"]


class TestBeside:
    def test_an_index_that_was_uploaded_is_taken_over_with_its_grids(
        self, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = jpeg(640, 480, restart_marker_blocks=8)
        path = write_tar(tmp_path / "x.tar", {"0.jpg": data, "1.bin": bytes(9_000_000)})
        write_index(path, grids={"0.jpg": intervals(data)})
        put(memory, Path(f"{path}.index"))
        address = put(memory, path)
        monkeypatch.setattr(index_files, "build_index", None)
        before = statistics().nbytes
        index = opened(address)
        assert index.grid(0, 0).tolist() == intervals(data).tolist()  # type: ignore[union-attr]
        assert statistics().nbytes - before < 400_000
        before = statistics().nbytes
        opened(address)
        assert statistics().nbytes == before

    @pytest.mark.parametrize("what", ["another tar's", "damaged", "cut"])
    def test_one_that_does_not_fit_is_reported_and_not_used(
        self, tmp_path: Path, memory: Any, caplog: pytest.LogCaptureFixture, what: str
    ) -> None:
        path = write_tar(tmp_path / "x.tar", image_members(3))
        other = write_tar(tmp_path / "y.tar", {f"other-{name}": data for name, data in image_members(3).items()})
        assert other.stat().st_size == path.stat().st_size
        index = write_index(other if what == "another tar's" else path).read_bytes()
        memory.pipe("/b/x.tar.index", {"damaged": b"x" * 5000, "cut": index[:-100]}.get(what, index))
        assert reported(opened(put(memory, path))) == reported(build_index(path))
        assert "the index memory://b/x.tar.index is built again (" in caplog.text

    def test_a_store_that_fails_is_not_taken_for_one_without_an_index(
        self, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        address = put(memory, write_tar(tmp_path / "x.tar", image_members(2)))

        def failing(*_: Any, **__: Any) -> None:
            raise StoreUnavailableError("down")

        file = source_at(address).file
        assert isinstance(file, RemoteFile)
        monkeypatch.setattr(type(file.store), "read", failing)
        with pytest.raises(StoreUnavailableError):
            tars_at(address).heads()


class TestReading:
    def test_content_of_members_is_not_fetched(
        self, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sources, "_PART_NBYTES", 10_000)
        path = write_tar(tmp_path / "x.tar", {f"{at}.mp4": bytes(1_000_000) for at in range(5)})
        source, before = source_at(put(memory, path)), statistics().nbytes
        assert reported(build_index(source)) == reported(build_index(path))
        assert statistics().nbytes - before < 400_000

    def test_earlier_parts_are_freed(self, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sources, "_PART_NBYTES", 1000)
        data = np.random.default_rng(0).bytes(100_500)
        memory.pipe("/b/x", data)
        with source_at("memory://b/x") as source:
            for start in range(0, 100_000, 700):
                assert source.read(start, 900) == data[start : start + 900]
                assert len(source._reader._pending) <= 6
            assert source.read(100_400, 900) == data[100_400:]
            assert source.read(200_000, 900) == b""
            assert source.read_spans([(5, 9), (100_499, 100_600), (300_000, 300_001)]) == [data[5:9], data[-1:], b""]

    def test_checksums(self, tmp_path: Path, memory: Any) -> None:
        path = write_tar(tmp_path / "x.tar", image_members(2))
        source = source_at(put(memory, path))
        index = build_index(source, checksum=True)
        assert index.head.blake2b == build_index(path, checksum=True).head.blake2b
        index.verify(source)
        other = source_at(put(memory, write_tar(tmp_path / "x.tar", image_members(2, 5))))
        with pytest.raises(ShardError, match=r"memory://b/x.tar is not the indexed tar: its checksum"):
            index.verify(other)

    def test_an_object_that_changes_or_goes_while_it_is_read(self, tmp_path: Path, memory: Any) -> None:
        address = put(memory, write_tar(tmp_path / "x.tar", image_members(2)))
        tars = tars_at(address)
        put(memory, write_tar(tmp_path / "x.tar", image_members(2, 5)))
        with pytest.raises(ObjectChangedError, match=rf"{address} has changed .*: version"):
            tars.heads()
        memory.rm("/b/x.tar")
        with pytest.raises(ObjectNotFoundError, match=address):
            tars.heads()


def _double(path: Path) -> Path:
    return write_tar(path, [("a.jpg", b"1"), ("a.JPG", b"3")])


def _bytes(data: bytes) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        path.write_bytes(data)
        return path

    return write


REFUSED: dict[str, Callable[[Path], Path]] = {
    "compressed": _bytes(gzip.compress(bytes(2000))),
    "no tar": _bytes(b"<html>no such page</html>" * 100),
    "empty": _bytes(b""),
    "absolute": lambda path: write_tar(path, {"/etc/a.txt": b""}),
    "leading out": lambda path: write_tar(path, {"a/../../b.txt": b""}),
    "link": lambda path: entry(path, "a.txt", tarfile.SYMTYPE, "b"),
    "device": lambda path: entry(path, "a.txt", tarfile.CHRTYPE),
    "twice": _double,
    "joined": lambda path: _bytes(2 * write_tar(path, {"a.txt": b"1"}).read_bytes())(path),
    "many fields": lambda path: write_tar(path, {f"a.{number}": b"" for number in range(1100)}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_files_that_are_refused_are_refused_as_objects(what: str, tmp_path: Path, memory: Any, kept: Path) -> None:
    path = REFUSED[what](tmp_path / "x.tar")
    with pytest.raises(ShardError) as near:
        build_index(path)
    address = put(memory, path)
    with pytest.raises(ShardError) as far:
        tars_at(address).heads()
    assert str(far.value) == str(near.value).replace(str(path), address)
    assert not kept.exists()


def test_a_pax_header_of_many_parts(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_PART_NBYTES", 512)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("long/" * 300 + "a.txt")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    memory.pipe("/b/x.tar", file.getvalue())
    assert list(build_index(source_at("memory://b/x.tar")).keys) == ["long/" * 300 + "a"]
