from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from record_files import filled, records
from tar_cases import write_tar

from feedline.datasets import (
    LMDB,
    Arrays,
    CachedMap,
    Filter,
    ImageFolder,
    Lines,
    Parquet,
    TarShards,
    TFRecord,
    array_container,
)
from feedline.datasets.indexes import BuiltIndex, Columns
from feedline.errors import ArgumentError, SampleError, StateError

CONTENT = {"starts": np.arange(3000, dtype=np.int64), "names": np.arange(7, dtype=np.uint8)}
STATE = (7, "state")


def built() -> Columns:
    return CONTENT


def forbidden() -> Columns:
    pytest.fail("built again")


def damages(good: bytes) -> Iterator[bytes]:
    """A byte changed in each of many places, the first and the last ones among them."""
    places = random.Random(0).sample(range(len(good)), 40)
    for at in (*range(0, 300, 11), *places, len(good) - 1):
        hurt = bytearray(good)
        hurt[at] ^= 1 << at % 8
        yield bytes(hurt)


def replace(path: Path, data: bytes) -> None:
    """Another file at the path, as after a copy or a restore."""
    other = path.with_name("other")
    other.write_bytes(data)
    other.replace(path)


def equal(found: Columns, expected: Columns = CONTENT) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


class TestArrays:
    def test_any_damage_is_reported(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        array_container.write(str(path), {"a": "é"}, CONTENT)
        assert equal(array_container.open_mapped(str(path)).arrays)
        good = path.read_bytes()
        for hurt in damages(good):
            replace(path, hurt)
            try:
                assert equal(array_container.open_mapped(str(path)).arrays)  # a byte of padding
            except SampleError:
                continue
            assert equal(array_container.parse(hurt, "x").arrays)

    def test_the_head_alone_is_checked_when_nothing_else_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        array_container.write(str(path), {}, CONTENT)
        data = bytearray(path.read_bytes())
        data[-60] ^= 1
        replace(path, bytes(data))
        assert array_container.read_table(str(path)).arrays["names"].shape == (7,)
        for read in (array_container.open_mapped, lambda name: array_container.parse(path.read_bytes(), name)):
            with pytest.raises(SampleError, match=r"x is damaged: the checksum of its array 'names' does not match"):
                read(str(path))

    def test_an_older_version_is_reported_with_the_remedy(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        array_container.write(str(path), {}, CONTENT)
        data = bytearray(path.read_bytes())
        data[16] = 1
        path.write_bytes(data)
        with pytest.raises(SampleError, match=r"version 1 of the format; this feedline reads 3") as caught:
            array_container.read_table(str(path))
        assert caught.value.__notes__ == ["Remove the file, and it is built again."]


class TestBuiltIndex:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        BuiltIndex(tmp_path / "side", STATE, built)
        return tmp_path / "side"

    def test_a_damaged_head_is_found_at_once(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        data = bytearray(path.read_bytes())
        data[40] ^= 1
        replace(path, bytes(data))
        with caplog.at_level(logging.WARNING, "feedline"):
            assert equal(BuiltIndex(path, STATE, built).arrays)
            assert equal(BuiltIndex(path, STATE, forbidden).arrays)
        assert [record.getMessage() for record in caplog.records] == [
            f"feedline: the index {path} is built again ({path} is damaged: the checksum of its table does not match)"
        ]

    def test_damaged_arrays_are_made_again_when_they_are_used(
        self, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        good = path.read_bytes()
        replace(path, good[:-60] + b"\xff" + good[-59:])
        opened = BuiltIndex(path, STATE, built)
        assert path.read_bytes() != good
        with caplog.at_level(logging.WARNING, "feedline"):
            assert equal(opened.open_arrays())
            assert equal(opened.open_arrays())
        assert path.read_bytes() == good
        assert len(caplog.records) == 1
        assert "built again (" in caplog.text

    def test_another_process_says_what_to_do(self, path: Path) -> None:
        opened = pickle.loads(pickle.dumps(BuiltIndex(path, STATE, built)))
        good = path.read_bytes()
        replace(path, good[:-60] + b"\xff" + good[-59:])
        with pytest.raises(
            StateError,
            match=r"index .*side is damaged: the checksum of its array 'names' .*; remove it, and create the",
        ):
            opened.open_arrays()

    def test_what_is_not_the_same_when_it_is_made_again_is_refused(self, path: Path) -> None:
        other = {"starts": CONTENT["starts"][:9]}
        good = path.read_bytes()
        replace(path, good[:-60] + b"\xff" + good[-59:])
        with pytest.raises(StateError, match=r"side was removed or replaced while a dataset used it"):
            BuiltIndex(path, STATE, lambda: other).open_arrays()


class TestDatasets:
    """After any damage to an index, samples are right, or an error of feedline is raised."""

    def check(self, opening: object, place: Path) -> None:
        assert callable(opening)
        expected = list(map(repr, opening()))
        good = place.read_bytes()
        for hurt in damages(good):
            replace(place, hurt)
            assert list(map(repr, opening())) == expected
        for rest in (0, 10, 300, len(good) - 1):
            replace(place, good[:rest])
            assert list(map(repr, opening())) == expected

    def test_tars(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "x.tar", {f"{i:03}.txt": b"%d" % i * i for i in range(60)})
        self.check(lambda: TarShards(path), Path(f"{path}.index"))

    def test_records(self, tmp_path: Path) -> None:
        (tmp_path / "x.tfrecord").write_bytes(records(*(b"%d" % i * i for i in range(90))))
        self.check(
            lambda: (bytes(record) for record in TFRecord(tmp_path / "x.tfrecord", decode="bytes")),
            tmp_path / ".x.tfrecord.index",
        )

    def test_environments(self, tmp_path: Path) -> None:
        path = filled(tmp_path / "lmdb", {b"%d" % i * (i % 5 + 1): b"value %d" % i for i in range(90)})
        self.check(lambda: LMDB(path), path / "data.mdb.main.keys")

    def test_of_many_indexes_only_the_heads_are_read(self, tmp_path: Path) -> None:
        names = [tmp_path / f"{i}.tfrecord" for i in range(3)]
        for name in names:
            name.write_bytes(records(b"one", b"two"))
        TFRecord(names)
        place = tmp_path / ".1.tfrecord.index"
        good = place.read_bytes()
        replace(place, good[:-60] + b"\xff" + good[-59:])
        dataset = TFRecord(names, decode="bytes")
        assert place.read_bytes() != good
        assert [bytes(dataset[i]) for i in (0, 1, 4, 5)] == [b"one", b"two"] * 2
        assert place.read_bytes() != good
        assert bytes(dataset[3]) == b"two"
        assert place.read_bytes() == good
        assert not list(tmp_path.glob("*partial*"))


def _same(sample: Any) -> Any:
    return sample


OPENED: dict[str, Callable[[Path, str], object]] = {
    "lines": lambda root, folder: Lines(root / "a.txt", index_dir=folder),
    "parquet": lambda root, folder: Parquet(root / "a.parquet", index_dir=folder),
    "tar": lambda root, folder: TarShards(root / "a.tar", index_dir=folder),
    "images": lambda root, folder: ImageFolder(root, extensions=".txt", index_dir=folder),
    "filter": lambda root, folder: Filter([1, 2], bool, index_dir=folder).indices,
    "cached map": lambda root, folder: CachedMap(Arrays({"x": np.arange(3)}), _same, folder)[0],
}


@pytest.mark.parametrize("name", OPENED)
def test_folders_of_indexes_and_results_are_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An address would be a folder "s3:" in the current one, and `~` a folder of that name."""
    root, here, home = tmp_path / "data", tmp_path / "here", tmp_path / "home"
    for folder in (root / "class", here, home):
        folder.mkdir(parents=True)
    (root / "class/0.txt").write_text("x")
    (root / "a.txt").write_text("a\nb\n")
    pq.write_table(pa.table({"x": [1]}), root / "a.parquet")
    write_tar(root / "a.tar", {"0.txt": b"x"})
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(ArgumentError, match="='s3://bucket/kept': give a folder of this machine"):
        OPENED[name](root, "s3://bucket/kept")
    OPENED[name](root, "~/kept")
    assert not list(here.iterdir())
    assert name == "parquet" or list((home / "kept").iterdir())  # footers of local files are not kept
