"""Braces mean the same in paths, in addresses and on a filesystem of pyarrow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from diagonals import diagonal
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from feedline import stores
from feedline.datasets.paths import find
from feedline.datasets.tables.parquet_files import FilesystemFiles
from feedline.errors import ArgumentError
from feedline.stores.globs import braces, first_forms

WRITTEN_OUT = [
    ("a.tar", ["a.tar"]),
    ("a{0..2}.tar", ["a0.tar", "a1.tar", "a2.tar"]),
    ("{008..011}", ["008", "009", "010", "011"]),
    ("{08..101..31}", ["008", "039", "070", "101"]),
    ("{9..011}", ["009", "010", "011"]),
    ("{0..10..5}", ["0", "5", "10"]),
    ("{0..10..-4}", ["0", "4", "8"]),
    ("{3..1}", ["3", "2", "1"]),
    ("{10..08}", ["10", "09", "08"]),
    ("{train,val}-{0..1}", ["train-0", "train-1", "val-0", "val-1"]),
    ("x{,.idx}", ["x", "x.idx"]),
    ("{b,a,b}", ["b", "a", "b"]),
    ("{1..3,7}", ["1..3", "7"]),
    (
        "{" + ",".join(f"some-long-name-{number}" for number in range(20)) + "}",
        [f"some-long-name-{n}" for n in range(20)],
    ),
]
REFUSED = [
    "a{0..2",
    "a}b",
    "}a{",
    "{a{b}}",
    "{a,{b,c}}",
    "{one}",
    "a{}",
    "{a..c}",
    "{-1..3}",
    "{0..5..0}",
    "{0..99999999999}",
    "{0..9999}{0..9999}",
]
WAYS = ["pattern", "files", "objects", "expanded files", "expanded objects", "filesystem"]

Names = Callable[[str], list[str]]


class Places:
    """A folder and a store, with the same files in them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._memory = folder, fsspec.filesystem("memory")

    def put(self, *names: str) -> None:
        for name in names:
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"x")
            self._memory.pipe(f"/braces/{name}", b"x")

    def close(self) -> None:
        if self._memory.exists("/braces"):
            self._memory.rm("/braces", recursive=True)

    def written_out(self, way: str) -> Names:
        root = "memory://braces" if "objects" in way else str(self.folder)

        def below(names: list[str]) -> list[str]:
            return [name.removeprefix(f"{root}/") for name in names]

        ways: dict[str, Names] = {
            "pattern": braces,
            "files": lambda pattern: below(find(f"{root}/{pattern}", "*.bin").names),
            "expanded files": lambda pattern: below(stores.expand(f"{root}/{pattern}")),
            "filesystem": lambda pattern: FilesystemFiles(SubTreeFileSystem(root, LocalFileSystem()), pattern).names,
        }
        ways |= {"objects": ways["files"], "expanded objects": ways["expanded files"]}
        return ways[way]


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with contextlib.closing(Places(tmp_path)) as made:
        yield made


@pytest.mark.parametrize("way", WAYS)
def test_braces_are_written_out(tmp_path: Path, way: str) -> None:
    for number, (pattern, expected) in enumerate(WRITTEN_OUT):
        folder = tmp_path / str(number)
        folder.mkdir()
        with contextlib.closing(Places(folder)) as places:
            places.put(*expected)
            assert places.written_out(way)(pattern) == expected, pattern


@pytest.mark.parametrize("way", WAYS)
def test_braces_that_mean_nothing_are_refused_by_name(places: Places, way: str) -> None:
    for pattern in REFUSED:
        with pytest.raises(ArgumentError, match=r"braces|neither a range|has no end|more than 10,000,000") as caught:
            places.written_out(way)(pattern)
        assert pattern in str(caught.value)


@pytest.mark.parametrize(
    ("name", "way"),
    diagonal(
        ["a{x}b", "odd{name", "{train,val}", "part-{0..1}.bin", "{a,{b,c}}", "{one}/x"],
        ["files", "expanded files", "filesystem"],
    ),
)
def test_a_file_that_is_there_is_meant_itself(places: Places, way: str, name: str) -> None:
    places.put(name, "train", "val", "part-0.bin", "part-1.bin")
    assert places.written_out(way)(name) == [name]


@pytest.mark.parametrize("folder", ["run{1}", "odd{name", "{8F2A}"])
def test_a_folder_that_is_there_may_have_braces_in_its_name(places: Places, folder: str) -> None:
    names = [f"{folder}/{number}.bin" for number in range(3)]
    places.put(*names)
    for way in ("files", "expanded files"):
        written_out = places.written_out(way)
        assert written_out(f"{folder}/{{0..2}}.bin") == names
        assert written_out(f"{folder}/*.bin") == names
        with pytest.raises(ArgumentError, match=r"\{x\} is neither a range"):
            written_out(f"{folder}/{{x}}.bin")
    assert places.written_out("files")(folder) == names


@pytest.mark.parametrize("way", ["files", "objects"])
def test_braces_may_name_folders_and_patterns(places: Places, way: str) -> None:
    names = ["train/0.bin", "train/1.bin", "val/0.bin"]
    places.put(*names, "val/notes.txt")
    written_out = places.written_out(way)
    assert written_out("{val,train}") == ["val/0.bin", "train/0.bin", "train/1.bin"]
    assert written_out("{train,val}/*.bin") == names
    with pytest.raises(FileNotFoundError, match=r"test.* match"):
        written_out("{train,test}/*.bin")
    with pytest.raises(FileNotFoundError, match=r"val/1\.bin"):
        written_out("{train,val}/{0..1}.bin")


@pytest.mark.parametrize("way", ["files", "objects", "expanded files", "expanded objects"])
def test_only_patterns_with_a_leading_dot_match_hidden_names(places: Places, way: str) -> None:
    """As in a shell: indexes, and what desktops leave behind, are no samples."""
    places.put("a.bin", ".a.bin", "b/c.bin", "b/.c.bin", ".d/e.bin")
    written_out = places.written_out(way)
    assert written_out("*") == written_out("?.bin") == ["a.bin"]
    assert written_out("**/*.bin") == ["a.bin", "b/c.bin"]
    assert written_out(".*.bin") == [".a.bin"]
    assert written_out("b/.*") == ["b/.c.bin"]
    assert written_out(".d/*") == [".d/e.bin"]
    assert written_out(".a.bin") == [".a.bin"]


def test_only_endings_that_extend_the_first_are_forms_of_one_file() -> None:
    assert first_forms(["a.h5", "a.hdf5", "b.hdf5"], "*.{h5,hdf5}") == ["a.h5", "a.hdf5", "b.hdf5"]
    names = ["a.tar", "a.tar.gz", "a.tgz", "b.tgz"]
    assert first_forms(names, "*.{tar,tar.gz,tgz}") == ["a.tar", "b.tgz"]
    assert first_forms(["a.txt.gz", "a.txt"], "*.txt{,.gz}") == ["a.txt"]
