"""`feedline index`: missing indexes are built, valid ones kept, all checked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from packing_cases import class_folders, feedline, packed
from tar_cases import write_tar

from feedline.datasets import TarShards
from feedline.datasets.webdataset import ShardError, index_files, open_index
from feedline.errors import ArgumentError
from feedline.stores import ObjectNotFoundError, statistics


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    packed(class_folders(tmp_path / "images", size=400), tmp_path / "shards", "--grid", "--shard-size", 4)
    return tmp_path / "shards"


def states(*arguments: object) -> tuple[int, list[str]]:
    result = feedline("index", *arguments, "--json")
    return result.exit_code, [one["state"] for one in json.loads(result.stdout)]


def test_valid_indexes_stay_and_missing_ones_are_built(shards: Path) -> None:
    (shards / "shard-000001.tar.index").unlink()
    assert states(shards) == (0, ["valid", "built", "valid"])
    assert states(shards, "--rebuild") == (0, ["built", "built", "built"])


def test_a_lost_index_gets_its_grids_back_from_the_images(shards: Path) -> None:
    place = shards / "shard-000000.tar.index"
    before = open_index(shards / "shard-000000.tar", place)
    grids = [before.grid(row, 0).tolist() for row in range(len(before))]
    place.unlink()
    states(shards)
    after = open_index(shards / "shard-000000.tar", place)
    assert [after.grid(row, 0).tolist() for row in range(len(after))] == grids


def test_foreign_tars_are_indexed_with_or_without_a_checksum(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "a.tar", {"0.txt": b"one", "1.txt": b"two"})
    assert states(tar) == (0, ["built"])
    assert states(tar, "--check") == (0, ["checked"])
    with pytest.raises(ShardError, match="no checksum"):
        open_index(tar).verify()
    assert states(tar, "--checksum") == (0, ["built"])
    open_index(tar).verify()
    assert states(tar, "--checksum") == (0, ["valid"])


def test_a_changed_tar_is_found(shards: Path) -> None:
    tar = shards / "shard-000002.tar"
    times = tar.stat()
    data = bytearray(tar.read_bytes())
    data[3000] ^= 1
    tar.write_bytes(data)
    os.utime(tar, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert states(shards, "--check") == (1, ["checked", "checked", "bad"])


def test_a_changed_tar_is_found_without_a_checksum(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "a.tar", {"0.txt": b"one", "1.txt": b"two"})
    states(tar)
    times = tar.stat()
    write_tar(tar, {"0.txt": b"one", "2.txt": b"two"})
    os.utime(tar, ns=(times.st_atime_ns, times.st_mtime_ns))
    result = feedline("index", tar, "--check")
    assert result.exit_code == 1
    assert "feedline index --rebuild" in " ".join(result.output.split())
    assert states(tar, "--rebuild") == (0, ["built"])
    assert states(tar, "--check") == (0, ["checked"])


def test_bad_tars_are_reported_and_the_others_are_indexed(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"0.txt": b"one"})
    (tmp_path / "b.tar").write_bytes(b"no tar at all" * 100)
    (tmp_path / "c.tar").write_bytes(b"")
    cut = write_tar(tmp_path / "d.tar", {"0.txt": b"one", "1.txt": b"x" * 5000})
    os.truncate(cut, 2500)
    result = feedline("index", tmp_path)
    assert result.exit_code == 1
    text = "".join(result.output.split())
    for name in ("b.tar", "c.tar", "d.tar"):
        assert str(tmp_path / name) in text
    assert max(map(len, result.output.splitlines())) <= 60
    assert states(tmp_path, "--allow-truncated")[1] == ["valid", "bad", "bad", "built"]


def test_a_missing_index_fails_the_check_with_the_command(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "a.tar", {"0.txt": b"one"})
    result = feedline("index", tar, "--check")
    assert result.exit_code == 1
    assert "has no index. Build it: feedline index" in " ".join(result.output.split())
    assert not tar.with_name("a.tar.index").exists()


def test_no_tars_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"has no files of a known format.*tar shards"):
        feedline("index", tmp_path)
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(ArgumentError, match=r"CSV needs no index from this command, which writes those of tar shards"):
        feedline("index", tmp_path)


class TestRemote:
    """Tars in stores, and folders for indexes."""

    def put(self, memory: Any, folder: Path) -> str:
        for path in folder.glob("*.tar"):
            memory.pipe(f"/remote/{path.name}", path.read_bytes())
        return "memory://remote"

    def test_indexes_go_into_a_folder_and_from_there_next_to_the_objects(
        self, memory: Any, shards: Path, tmp_path: Path
    ) -> None:
        address, into = self.put(memory, shards), tmp_path / "indexes"
        assert states(address, "--into", into) == (0, ["built", "built", "built"])
        assert states(address, "--into", into) == (0, ["valid", "valid", "valid"])
        assert states(address, "--into", into, "--check") == (0, ["checked"] * 3)
        assert states(address, "--into", into, "--rebuild", "--checksum") == (0, ["built", "built", "built"])
        assert states(address, "--into", into, "--check") == (0, ["checked"] * 3)
        assert not (tmp_path / "xdg").exists()
        with_grids = TarShards(address, ("jpg", "cls"), index_dir=into)
        assert with_grids._shards[0].index.has_grids
        for path in (into / "remote").iterdir():
            memory.pipe(f"/remote/{path.name}", path.read_bytes())
        before = statistics().nbytes
        assert states(address) == (0, ["valid", "valid", "valid"])
        assert TarShards(address)._shards[0].index.has_grids
        assert statistics().nbytes - before < sum(path.stat().st_size for path in (into / "remote").iterdir()) + 100

    def test_without_a_folder_they_are_kept_for_datasets(
        self, memory: Any, shards: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        address = self.put(memory, shards)
        result = feedline("index", address, "--check")
        assert result.exit_code == 1
        assert f"hasnoindex.Buildit:feedlineindex{address}/shard-000000.tar" in "".join(result.output.split())
        assert states(f"{address}/shard-00000[01].tar") == (0, ["built", "built"])
        monkeypatch.setattr(index_files, "build_index", None)
        assert TarShards(f"{address}/shard-00000[01].tar")._shards[0].index.has_grids

    def test_bad_tars_are_reported(self, memory: Any, tmp_path: Path) -> None:
        write_tar(tmp_path / "a.tar", {"0.txt": b"one"})
        (tmp_path / "b.tar").write_bytes(b"no tar at all" * 100)
        address = self.put(memory, tmp_path)
        assert states(address) == (1, ["built", "bad"])
        assert f"{address}/b.taristext,notatar" in "".join(feedline("index", address).output.split())
        write_tar(tmp_path / "a.tar", {"1.txt": b"two"})
        assert states(f"{self.put(memory, tmp_path)}/a.tar", "--check") == (1, ["bad"])
        assert states(f"{address}/a.tar") == (0, ["built"])
        assert states(f"{address}/a.tar", "--check") == (0, ["checked"])

    def test_a_folder_for_the_indexes_of_files(self, shards: Path, tmp_path: Path) -> None:
        into = tmp_path / "indexes"
        assert states(shards, "--into", into) == (0, ["built", "built", "built"])
        assert Path(f"{into}{shards}/shard-000000.tar.index").exists()
        assert states(shards, "--into", into, "--check") == (0, ["checked"] * 3)

    def test_nothing_there(self, memory: Any) -> None:
        with pytest.raises(ArgumentError, match=r"memory://remote has no files of a known format"):
            feedline("index", "memory://remote")
        with pytest.raises(ObjectNotFoundError, match=r"memory://remote/0\.tar"):
            feedline("index", "memory://remote/0.tar")
