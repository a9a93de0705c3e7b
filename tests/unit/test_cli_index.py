"""`feedline index`: indexes are made where they are missing, kept where they fit, and checked."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from feedline.errors import ArgumentError
from feedline.shards import ShardError, open_index
from packing_cases import class_folders, feedline, packed
from tar_cases import write_tar


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    packed(class_folders(tmp_path / "pictures", size=400), tmp_path / "shards", "--grid", "--shard-size", 4)
    return tmp_path / "shards"


def states(*arguments: object) -> tuple[int, list[str]]:
    result = feedline("index", *arguments, "--json")
    return result.exit_code, [one["state"] for one in json.loads(result.stdout)]


def test_indexes_that_fit_stay_and_missing_ones_are_made(shards: Path) -> None:
    (shards / "shard-000001.tar.index").unlink()
    assert states(shards) == (0, ["fits", "made", "fits"])
    assert states(shards, "--rebuild") == (0, ["made", "made", "made"])


def test_a_lost_index_gets_its_grids_back_from_the_pictures(shards: Path) -> None:
    place = shards / "shard-000000.tar.index"
    before = open_index(shards / "shard-000000.tar", place)
    grids = [before.grid(row, 0).tolist() for row in range(len(before))]
    place.unlink()
    states(shards)
    after = open_index(shards / "shard-000000.tar", place)
    assert [after.grid(row, 0).tolist() for row in range(len(after))] == grids


def test_foreign_tars_are_indexed_with_or_without_a_checksum(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "a.tar", {"0.txt": b"one", "1.txt": b"two"})
    assert states(tar) == (0, ["made"])
    assert states(tar, "--check") == (0, ["checked"])
    with pytest.raises(ShardError, match="no checksum"):
        open_index(tar).verify()
    assert states(tar, "--checksum") == (0, ["made"])
    open_index(tar).verify()
    assert states(tar, "--checksum") == (0, ["fits"])


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
    assert states(tar, "--rebuild") == (0, ["made"])
    assert states(tar, "--check") == (0, ["checked"])


def test_what_is_bad_is_told_and_the_others_are_done(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"0.txt": b"one"})
    (tmp_path / "b.tar").write_bytes(b"no tar at all" * 100)
    (tmp_path / "c.tar").write_bytes(b"")
    cut = write_tar(tmp_path / "d.tar", {"0.txt": b"one", "1.txt": b"x" * 5000})
    os.truncate(cut, 2500)
    result = feedline("index", tmp_path)
    assert result.exit_code == 1
    told = "".join(result.output.split())
    for name in ("b.tar", "c.tar", "d.tar"):
        assert str(tmp_path / name) in told
    assert max(map(len, result.output.splitlines())) <= 60
    assert states(tmp_path, "--allow-truncated")[1] == ["fits", "bad", "bad", "made"]


def test_a_missing_index_fails_the_check_with_the_command(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "a.tar", {"0.txt": b"one"})
    result = feedline("index", tar, "--check")
    assert result.exit_code == 1
    assert "has no index. Make it: feedline index" in " ".join(result.output.split())
    assert not tar.with_name("a.tar.index").exists()


def test_no_tars_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"hold no \.tar files"):
        feedline("index", tmp_path)
