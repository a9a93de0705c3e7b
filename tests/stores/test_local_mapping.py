"""Mapped files: the parts in use stay mapped, and no others."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest

from feedline import stores
from feedline.stores import local
from feedline.stores.cache import entries

PIECE = 10_000
CONTENT = os.urandom(40 * PIECE)


def mappings(name: str) -> int:
    return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return local.map_file(file.fileno(), path.stat().st_size)


def test_a_view_outlives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mapped-until-unlinked"
    path.write_bytes(CONTENT)
    view = mapped(path)[PIECE : PIECE + 5]
    path.unlink()
    assert bytes(view) == CONTENT[PIECE : PIECE + 5]
    assert view.readonly


def test_the_last_view_unmaps(tmp_path: Path) -> None:
    path = tmp_path / "mapped-and-let-go"
    path.write_bytes(CONTENT)
    whole = mapped(path)
    part = whole[1:2]
    assert mappings(path.name) == 1
    del whole
    assert mappings(path.name) == 1
    del part
    assert mappings(path.name) == 0


def test_an_empty_file_and_a_wrong_descriptor(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert mapped(tmp_path / "empty").nbytes == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        local.map_file(-1, 10)


def cached(folder: Path) -> stores.CachedStore:
    (folder / "objects").mkdir()
    (folder / "objects/a").write_bytes(CONTENT)
    return stores.CachedStore(
        stores.open_store(str(folder / "objects")), stores.Cache(folder / "cache", limit="10 MB", piece_nbytes=PIECE)
    )


def test_views_of_many_pieces_hold_no_descriptor(tmp_path: Path) -> None:
    store = cached(tmp_path)
    store.read("a")
    gc.collect()
    before = descriptors()
    views = store.read_many("a", [(start, start + 10) for start in range(0, len(CONTENT), PIECE)])
    assert descriptors() == before
    assert b"".join(views) == b"".join(CONTENT[start : start + 10] for start in range(0, len(CONTENT), PIECE))


def test_where_nothing_more_can_be_mapped_pieces_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(tmp_path).read("a")
    kept = sorted(path.stat().st_ino for path in (tmp_path / "cache").rglob("*") if path.is_file())

    def refuse(fd: int, nbytes: int) -> memoryview:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(entries, "map_file", refuse)
    again = stores.CachedStore(
        stores.open_store(str(tmp_path / "objects")), stores.Cache(tmp_path / "cache", "10 MB", PIECE)
    )
    assert again.read("a") == CONTENT
    assert sorted(path.stat().st_ino for path in (tmp_path / "cache").rglob("*") if path.is_file()) == kept
