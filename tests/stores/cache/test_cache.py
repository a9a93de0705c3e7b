"""The cache: kept and removed data, and the effects of bad disks and changed objects."""

from __future__ import annotations

import errno
import os
import pickle
import random
import shutil
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preloaded import Preloaded, Script

from feedline import stores
from feedline.errors import ArgumentError
from feedline.stores.cache import folder, locks
from feedline.stores.cache.entries import PieceKey, file_nbytes, is_abandoned, temporary
from feedline.stores.cache.folder import Folder
from feedline.stores.cache.locks import FetchLocks

PIECE = 1000
CONTENT = random.Random(1).randbytes(25_500)


@dataclass
class FakeStore:
    """Objects in memory; counts requests, and can block them."""

    objects: dict[str, bytes]
    versions: dict[str, str] = field(default_factory=dict)
    fetched: Counter[tuple[int, int]] = field(default_factory=Counter)
    infos: int = 0
    gate: threading.Event | None = None
    entered: threading.Event = field(default_factory=threading.Event)
    url: str = "s3://fake"

    def info(self, path: str) -> stores.ObjectInfo:
        self.infos += 1
        return stores.ObjectInfo(path, len(self.objects[path]), self.versions.get(path, "v1"))

    def size(self, path: str) -> int:
        return len(self.objects[path])

    def read(self, path: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> memoryview:
        raise NotImplementedError

    def read_many(
        self, path: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None
    ) -> list[memoryview]:
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(60)
        if version != self.versions.get(path, "v1"):
            raise stores.ObjectChangedError(f"{path} changed")
        self.fetched.update(ranges)
        return [memoryview(self.objects[path][start:stop]) for start, stop in ranges]

    def list(self, prefix: str = "") -> Iterator[stores.ObjectInfo]:
        return (self.info(path) for path in sorted(self.objects) if path.startswith(prefix))


def cached(place: Path, fake: FakeStore | None = None, limit: int | str = "1 MB") -> stores.CachedStore:
    return stores.CachedStore(fake or FakeStore({"a": CONTENT}), stores.Cache(place, limit=limit, piece_nbytes=PIECE))


def files(place: Path) -> list[Path]:
    return [path for path in (place / "v1/objects").rglob("*") if path.is_file()]


def taken_nbytes(place: Path) -> int:
    return sum(path.stat().st_size for path in [*files(place), *(place / "v1/temporary").iterdir()])


@pytest.fixture
def fake() -> FakeStore:
    return FakeStore({"a": CONTENT, "b": CONTENT[::-1]})


def test_read_pieces_are_not_fetched_again(tmp_path: Path, fake: FakeStore) -> None:
    before = stores.statistics()
    store = cached(tmp_path, fake)
    assert store.read("a", 1500, 3200) == CONTENT[1500:3200]
    assert store.read("a", 2999, 3001) == CONTENT[2999:3001]
    assert cached(tmp_path, fake).read("a", 1000, 4000) == CONTENT[1000:4000]
    assert fake.fetched == {(1000, 2000): 1, (2000, 3000): 1, (3000, 4000): 1}
    after = stores.statistics()
    assert (after.cache_misses - before.cache_misses, after.cache_hits - before.cache_hits) == (3, 5)


@settings(max_examples=30)
@given(ranges=st.lists(st.tuples(st.integers(0, 25_500), st.integers(0, 25_500)).map(lambda r: tuple(sorted(r)))))
def test_every_range_equals_that_of_the_store(
    tmp_path_factory: pytest.TempPathFactory, ranges: list[tuple[int, int]]
) -> None:
    store = cached(tmp_path_factory.mktemp("cache"), limit=10_000)
    assert [bytes(view) for view in store.read_many("a", ranges)] == [CONTENT[start:stop] for start, stop in ranges]


def test_an_object_is_looked_up_once(tmp_path: Path, fake: FakeStore) -> None:
    store = cached(tmp_path, fake)
    for start in range(0, 25_000, 500):
        store.read("a", start, start + 10)
    assert fake.infos == 1
    assert [info.path for info in store.list()] == ["a", "b"]
    store.read("b", 0, 1)
    assert fake.infos == 3  # two of them by the listing


def test_it_stays_below_its_limit_and_drops_the_least_recently_used(tmp_path: Path, fake: FakeStore) -> None:
    before = stores.statistics().cache_evicted
    store, one = cached(tmp_path, fake, limit=10 * file_nbytes(PIECE)), file_nbytes(PIECE)
    for number in range(10):
        store.read("a", number * PIECE, number * PIECE + 1)
    assert taken_nbytes(tmp_path) == 10 * one
    for at, path in enumerate(sorted(files(tmp_path), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, (at, at))
    fresh = cached(tmp_path, fake, limit=10 * one)
    fresh.read("a", 0, 1)  # the oldest becomes the newest
    for number in range(10, 18):
        fresh.read("a", number * PIECE, number * PIECE + 1)
        assert taken_nbytes(tmp_path) <= 10 * one
    assert stores.statistics().cache_evicted > before
    fake.fetched.clear()
    cached(tmp_path, fake).read("a", 0, 1)
    assert not fake.fetched
    cached(tmp_path, fake).read("a", 1000, 1001)
    assert fake.fetched == {(1000, 2000): 1}


def test_data_being_read_survives_its_eviction(tmp_path: Path) -> None:
    store = cached(tmp_path, limit=file_nbytes(PIECE) * 3)
    store.cache.limit_nbytes()
    folder = Folder(store.cache)
    folder.put(PieceKey("x", "v", PIECE, 0), memoryview(CONTENT[:PIECE]))
    held = folder.get(PieceKey("x", "v", PIECE, 0))
    for number in range(20):
        store.read("a", number * PIECE, number * PIECE + 1)
    assert Folder(store.cache).get(PieceKey("x", "v", PIECE, 0)) is None
    assert held == CONTENT[:PIECE]


def test_an_object_larger_than_the_limit_is_read_and_not_kept(tmp_path: Path, fake: FakeStore) -> None:
    store = cached(tmp_path, fake, limit=500)
    with pytest.warns(
        stores.CacheWarning, match=r"cannot keep pieces of 1,000 bytes within its limit of 500"
    ) as caught:
        assert store.read("a") == CONTENT
    assert len(caught) == 1
    assert not files(tmp_path)


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "empty", "other"])
def test_a_damaged_piece_is_fetched_again(tmp_path: Path, fake: FakeStore, damage: str) -> None:
    cached(tmp_path, fake).read("a", 0, 5000)
    before, victim = stores.statistics().cache_damaged, files(tmp_path)[2]
    content = bytearray(victim.read_bytes())
    if damage == "flipped":
        content[500] ^= 1
    victim.write_bytes(
        {"shorter": content[:-1], "longer": content + b"x", "empty": b"", "other": b"\0" * len(content)}.get(
            damage, content
        )
    )
    assert cached(tmp_path, fake).read("a", 0, 5000) == CONTENT[:5000]
    assert stores.statistics().cache_damaged == before + 1
    assert sorted(fake.fetched.values()) == [1, 1, 1, 1, 2]


def test_a_piece_of_another_length_is_fetched_again(tmp_path: Path, fake: FakeStore) -> None:
    """A server that counts whole seconds may give two contents of an object one version."""
    before, store = stores.statistics().cache_damaged, cached(tmp_path, fake)
    assert store.read("a", 25_000) == CONTENT[25_000:]
    fake.objects["a"] = CONTENT + bytes(300)
    store.info("a")
    assert store.read("a", 25_000) == CONTENT[25_000:] + bytes(300)
    assert store.cached_pieces("a", version="v1").cut(25_000, 25_800) == CONTENT[25_000:] + bytes(300)
    assert cached(tmp_path, fake).read("a", 25_000) == CONTENT[25_000:] + bytes(300)
    assert stores.statistics().cache_damaged == before + 1


def test_a_new_version_is_another_piece(tmp_path: Path, fake: FakeStore) -> None:
    store = cached(tmp_path, fake)
    store.read("a", 0, 2000)
    fake.objects["a"], fake.versions["a"] = CONTENT[::-1], "v2"
    assert store.read("a", 0, 2000) == CONTENT[:2000]  # all from the cache, all of one version
    with pytest.raises(stores.ObjectChangedError, match="a changed"):
        store.read("a", 0, 3000)
    assert store.read("a", 0, 3000) == CONTENT[::-1][:3000]
    with pytest.raises(stores.ObjectChangedError, match=r"s3://fake/a has changed .*: version v1 was requested"):
        store.read("a", 0, 10, version="v1")


def test_one_fetches_for_all(tmp_path: Path, fake: FakeStore) -> None:
    fake.gate = threading.Event()
    readers = [cached(tmp_path, fake) for _ in range(8)]
    before = stores.statistics().cache_shared
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(reader.read, "a", 0, 3000) for reader in readers]
        assert fake.entered.wait(60)
        fake.gate.set()
        assert all(one.result() == CONTENT[:3000] for one in found)
    assert set(fake.fetched.values()) == {1}
    assert stores.statistics().cache_shared >= before


def test_a_fetch_lock_that_is_never_released_does_not_block_others_forever(tmp_path: Path) -> None:
    name = PieceKey("x", "v", 1, 0).name()
    with FetchLocks(tmp_path / "fetch-locks") as holder, FetchLocks(tmp_path / "fetch-locks") as other:
        assert holder.take(name)
        assert holder.take(name)  # by its holder, any number of times
        assert not other.take(name)
        assert other.take(PieceKey("x", "v", 1, 1).name())
        other.wait(name, timeout_s=0.01)
    for waiting in threading.enumerate():
        if waiting.name == "feedline-lock":  # it gets the lock for a moment
            waiting.join(60)
    with FetchLocks(tmp_path / "fetch-locks") as other:
        other.wait(name, 60.0)
        assert other.take(name)


def test_a_released_fetch_lock_wakes_its_waiters(tmp_path: Path) -> None:
    name = PieceKey("x", "v", 1, 0).name()
    with ThreadPoolExecutor(1) as pool, FetchLocks(tmp_path / "fetch-locks") as waiter:
        with FetchLocks(tmp_path / "fetch-locks") as holder:
            assert holder.take(name)
            waiting = pool.submit(waiter.wait, name, 120.0)
        waiting.result(60)


def test_a_failed_fetch_leaves_the_piece_to_the_next(tmp_path: Path, fake: FakeStore) -> None:
    store = cached(tmp_path, fake)
    content = fake.objects.pop("a")
    store._shared().infos.put("a", stores.ObjectInfo("a", len(content), "v1"))
    with pytest.raises(KeyError):
        store.read("a", 0, 10)
    fake.objects["a"] = content
    assert store.read("a", 0, 10) == content[:10]


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path: Path, fake: FakeStore) -> None:
    store = cached(tmp_path, fake, limit=5 * file_nbytes(PIECE))
    store.read("a", 0, 1)
    abandoned, living = tmp_path / "v1/temporary/abandoned", tmp_path / "v1/temporary/living"
    abandoned.write_bytes(bytes(file_nbytes(PIECE)))
    with locks.AccountFile(tmp_path / "v1/size-account").locked() as account:
        account.nbytes += file_nbytes(PIECE)
    with temporary(living, file_nbytes(PIECE)):
        cached(tmp_path, fake).read("a", 0, 1)
        assert (abandoned.exists(), living.exists()) == (False, True)
        for number in range(12):
            store.read("a", number * PIECE, number * PIECE + 1)
            assert taken_nbytes(tmp_path) <= 5 * file_nbytes(PIECE)  # the data being written is counted, too


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 8])
def test_a_wrong_size_account_is_put_right(tmp_path: Path, fake: FakeStore, content: bytes) -> None:
    limit = 5 * file_nbytes(PIECE)
    cached(tmp_path, fake, limit=limit).read("a", 0, 3000)
    (tmp_path / "v1/size-account").write_bytes(content)
    store = cached(tmp_path, fake, limit=limit)
    for number in range(12):
        store.read("a", number * PIECE, number * PIECE + 1)
        assert taken_nbytes(tmp_path) <= limit
    assert len(files(tmp_path)) >= 3


def test_a_full_disk_is_reported_once_and_reading_continues(
    tmp_path: Path, fake: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = cached(tmp_path, fake)
    store.read("a", 0, 1000)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder, "write", full)
    with pytest.warns(stores.CacheWarning, match=r"stores no more data in this process: the disk is full.*free some"):
        assert store.read("a", 0, 2000) == CONTENT[:2000]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.read("a", 0, 9000) == CONTENT[:9000]
    assert fake.fetched[0, 1000] == 1  # existing data is still used
    assert len(files(tmp_path)) == 1
    assert not list((tmp_path / "v1/temporary").iterdir())


def test_a_folder_that_cannot_be_made_is_reported_once_and_reading_continues(tmp_path: Path, fake: FakeStore) -> None:
    (tmp_path / "file").touch()
    store = cached(tmp_path / "file", fake)
    with pytest.warns(stores.CacheWarning, match=r"cannot be written to \(Not a directory\)"):
        assert store.read("a", 0, 2000) == CONTENT[:2000]
    assert store.read("a", 0, 2000) == CONTENT[:2000]


def test_a_read_only_folder_is_still_read(tmp_path: Path, fake: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(tmp_path, fake).read("a", 0, 1000)
    real_open = os.open

    def refusing(path: str, flags: int, *more: int) -> int:
        if str(path).startswith(str(tmp_path)) and flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real_open(path, flags, *more)

    monkeypatch.setattr(os, "open", refusing)
    store = cached(tmp_path, fake)
    with pytest.warns(stores.CacheWarning, match=r"cannot be written to \(Read-only file system\)"):
        assert store.read("a", 0, 3000) == CONTENT[:3000]
    assert fake.fetched[0, 1000] == 1


def test_a_file_that_cannot_be_read_is_fetched(tmp_path: Path, fake: FakeStore) -> None:
    cached(tmp_path, fake).read("a", 0, 1000)
    (victim,) = files(tmp_path)
    victim.unlink()
    victim.mkdir()
    with pytest.warns(stores.CacheWarning, match="Is a directory"):
        assert cached(tmp_path, fake).read("a", 0, 1000) == CONTENT[:1000]


@pytest.mark.parametrize(
    ("limit", "nbytes"),
    [
        *[(1234, 1234), ("1234B", 1234), ("1.5 kB", 1500), ("2 GB", 2 * 10**9), ("3TB", 3 * 10**12)],
        *[("2 GiB", 2 << 30), ("10gb", 10**10), ("10G", 10**10), ("64k", 64_000), ("5", 5)],
    ],
)
def test_limits(limit: int | str, nbytes: int, tmp_path: Path) -> None:
    assert stores.Cache(tmp_path, limit=limit).limit_nbytes() == nbytes


def test_a_share_of_the_disk(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    assert stores.Cache(tmp_path, limit="25%").limit_nbytes() == disk.f_frsize * disk.f_blocks // 4


@pytest.mark.parametrize("limit", [0, -5, 0.5, "much", "200%", "0 %", "5 PB", "", None])
def test_limits_that_mean_nothing(limit: int | str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="Cache"):
        stores.Cache(tmp_path, limit=limit)


def test_a_piece_has_bytes(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="piece_nbytes=0"):
        stores.Cache(tmp_path, piece_nbytes=0)


@pytest.mark.parametrize("place", ["", "s3://bucket/cache"])
def test_a_cache_is_a_folder(place: str) -> None:
    with pytest.raises(ArgumentError, match="give a folder of this machine"):
        stores.Cache(place)


def test_a_job_with_a_lower_limit_is_warned_of_evictions(tmp_path: Path, fake: FakeStore) -> None:
    cached(tmp_path, fake).read("a", 0, 9000)
    held = taken_nbytes(tmp_path)
    with pytest.warns(stores.CacheWarning, match=rf"holds {held:,} bytes, more than this limit of 5,000"):
        cached(tmp_path, fake, limit=5000).read("a", 0, 10)
    assert fake.fetched[0, 1000] == 1


def test_files_used_by_a_clock_that_is_ahead_are_evicted_first(tmp_path: Path, fake: FakeStore) -> None:
    limit = 5 * file_nbytes(PIECE)
    cached(tmp_path, fake, limit=limit).read("a", 0, 4000)
    ahead = time.time() + 10**8
    for path in files(tmp_path):
        os.utime(path, (ahead, ahead))
    for _ in range(3):
        cached(tmp_path, fake, limit=limit).read("a", 6000, 9000)
    assert [fake.fetched[start, start + 1000] for start in (6000, 7000, 8000)] == [1, 1, 1]


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path, fake: FakeStore) -> None:
    store = cached(tmp_path, fake)
    store.read("a", 0, 1000)
    shutil.rmtree(tmp_path / "v1")
    assert store.read("a", 0, 3000) == CONTENT[:3000]
    assert files(tmp_path)
    shutil.rmtree(tmp_path / "v1")
    assert Path(store.file(store.info("a"))).exists()


STOPPED = """
import sys, time
from feedline.stores.cache.locks import AccountFile
with AccountFile(sys.argv[1]).locked():
    print(flush=True)
    time.sleep(600)
"""


@contextmanager
def _job(preloaded: Preloaded, folder: Path, code: str, *arguments: str) -> Iterator[tuple[Script, IO[str]]]:
    """Another job that runs this code, and its output; killed at the end."""
    script = folder / "job.py"
    script.write_text(code)
    reading, writing = os.pipe()
    with open(os.devnull) as nothing, open(reading) as lines:
        job = preloaded.start(str(script), *arguments, stdin=nothing.fileno(), stdout=writing, stderr=2, cwd=folder)
        os.close(writing)
        try:
            yield job, lines
        finally:
            job.kill()


def test_a_stopped_job_does_not_hold_up_the_others(
    preloaded: Preloaded, tmp_path: Path, fake: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = cached(tmp_path, fake)
    store.read("a", 0, 1000)
    monkeypatch.setattr(locks, "_PATIENCE_S", 0.1)
    with _job(preloaded, tmp_path, STOPPED, str(tmp_path / "v1/size-account")) as (other, lines):
        lines.readline()
        with pytest.warns(stores.CacheWarning, match=r"stores no new data for now: another process has held") as caught:
            assert store.read("a", 0, 9000) == CONTENT[:9000]
        assert len(caught) == 1
        with pytest.raises(stores.StoreError, match="another process has held the size account"):
            store.file(store.info("a"))
        other.kill()
    store.read("a", 0, 9000)
    assert len(files(tmp_path)) == 9


FORKED = """
import os, sys, time
from pathlib import Path
from feedline.stores.cache.locks import FetchLocks
from feedline.stores.cache.entries import temporary
from feedline.stores.cache.locks import AccountFile
root, name = Path(sys.argv[1]), sys.argv[2]
account = AccountFile(root / "size-account")
with FetchLocks(root / "fetch-locks") as fetch_locks, account.locked(), temporary(root / "written", 10):
    assert fetch_locks.take(name)
    child = os.fork()
    if not child:
        time.sleep(600)
    print(child, flush=True)
    time.sleep(600)
"""


def test_no_lock_outlives_its_process_in_one_that_was_forked(preloaded: Preloaded, tmp_path: Path) -> None:
    name = PieceKey("x", "v", 1, 0).name()
    with _job(preloaded, tmp_path, FORKED, str(tmp_path), name) as (parent, lines):
        child = int(lines.readline())
        with FetchLocks(tmp_path / "fetch-locks") as fetch_locks:
            assert not fetch_locks.take(name)
        assert not is_abandoned(tmp_path / "written")
        parent.kill()
    try:
        os.kill(child, 0)
        with FetchLocks(tmp_path / "fetch-locks") as fetch_locks, locks.AccountFile(tmp_path / "size-account").locked():
            assert fetch_locks.take(name)
        assert is_abandoned(tmp_path / "written")
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_cached_store_travels(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(CONTENT)
    store = stores.open_store(tmp_path, cache=tmp_path / "cache")
    assert store.read("x", 5, 10) == CONTENT[5:10]
    assert pickle.loads(pickle.dumps(store)).read("x") == CONTENT


def test_keys_tell_everything_apart() -> None:
    keys = [
        PieceKey("a", "v", 1, 0),
        PieceKey("b", "v", 1, 0),
        PieceKey("a", "w", 1, 0),
        PieceKey("a", "v", 2, 0),
        PieceKey("a", "v", 1, 1),
    ]
    assert len({key.name() for key in keys}) == len(keys)


def test_an_object_as_a_file(tmp_path: Path, fake: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feedline.stores.cache.store._PART_NBYTES", 1000)
    store = cached(tmp_path, fake)
    path = store.file(store.info("a"))
    assert Path(path).read_bytes()[: len(CONTENT)] == CONTENT
    fetched = dict(fake.fetched)
    assert min(fetched) == (0, 1000)
    assert cached(tmp_path, fake).file(stores.ObjectInfo("a", len(CONTENT), "v1")) == path
    assert dict(fake.fetched) == fetched


def test_an_empty_object_as_a_file(tmp_path: Path) -> None:
    store = cached(tmp_path, FakeStore({"a": b""}))
    assert Path(store.file(store.info("a"))).exists()


def test_an_object_that_cannot_be_kept_is_no_file(tmp_path: Path, fake: FakeStore) -> None:
    store = cached(tmp_path, fake, limit=len(CONTENT) // 2)
    with pytest.raises(stores.StoreError, match=r"s3://fake/a \([\d,]+ bytes\) is needed as a file, .* raise limit="):
        store.file(store.info("a"))
    assert not files(tmp_path)


def test_a_damaged_file_is_fetched_again(tmp_path: Path, fake: FakeStore) -> None:
    store = cached(tmp_path, fake)
    path = Path(store.file(store.info("a")))
    path.write_bytes(b"x" + path.read_bytes()[1:])
    again = cached(tmp_path, fake)
    assert Path(again.file(again.info("a"))).read_bytes()[: len(CONTENT)] == CONTENT
    assert max(fake.fetched.values()) == 2


def test_one_fetches_a_file_for_all(tmp_path: Path, fake: FakeStore) -> None:
    fake.gate = threading.Event()
    readers = [cached(tmp_path, fake) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(reader.file, reader.info("a")) for reader in readers]
        assert fake.entered.wait(60)
        fake.gate.set()
        assert len({one.result() for one in found}) == 1
    assert set(fake.fetched.values()) == {1}
