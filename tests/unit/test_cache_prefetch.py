"""Prefetching: in order, not too far ahead, and gone when its block is left."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from feedline import stores
from feedline.errors import ArgumentError
from feedline.stores import Prefetch, Want


class FillStore(stores.CachedStore):
    """Notes what is fetched; each fetch waits for its turn to be let through."""

    def __init__(self, folder: Path) -> None:
        (folder / "data").mkdir()
        for name in "abcdefgh":
            (folder / "data" / name).write_bytes(name.encode() * 1000)
        super().__init__(stores.open_store(folder / "data"), stores.Cache(folder / "cache", limit="1 MB"))
        self.filled = list[tuple[str, int, int | None]]()
        self.turn = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def fill_many(self, path: str, ranges: Sequence[tuple[int, int]]) -> None:
        self.begun.release()
        assert self.turn.acquire(timeout=30)
        self.filled += [(path, start, stop) for start, stop in ranges]
        super().fill_many(path, ranges)


@pytest.fixture
def store(tmp_path: Path) -> FillStore:
    return FillStore(tmp_path)


def test_wants_are_fetched_in_order_and_no_further_than_allowed(store: FillStore) -> None:
    wants = [Want(name) for name in "abcdefgh"]
    with Prefetch(store, wants, ahead_nbytes=2500, threads=1) as ahead:
        for _ in range(3):
            assert store.begun.acquire(timeout=30)
            store.turn.release()
        assert not store.begun.acquire(timeout=0.05)  # 3,000 bytes lie ahead
        ahead.advance()
        assert store.begun.acquire(timeout=30)
        store.turn.release()
        assert ahead.statistics().ahead_nbytes <= 3000
    assert [path for path, _, _ in store.filled] == ["a", "b", "c", "d"]
    assert ahead.statistics().peak_nbytes == 3000
    assert ahead.statistics().fetched == 4


def test_what_was_prefetched_is_a_hit(store: FillStore) -> None:
    with Prefetch(store, [Want("a", 0, 500)], threads=1):
        store.turn.release()
    before = stores.statistics()
    assert store.read("a", 0, 500) == b"a" * 500
    after = stores.statistics()
    assert (after.cache_hits - before.cache_hits, after.cache_misses - before.cache_misses) == (1, 0)


def test_a_reader_that_is_ahead_is_not_followed(store: FillStore) -> None:
    ahead = Prefetch(store, [Want(name) for name in "abcd"], threads=1)
    ahead.advance(3)
    store.turn.release()
    with ahead:
        assert store.begun.acquire(timeout=30)
    assert store.filled == [("d", 0, 1000)]
    assert ahead.statistics().passed == 3


def test_what_cannot_be_fetched_is_counted_and_passed(store: FillStore) -> None:
    store.turn.release(4)
    with Prefetch(store, [Want("missing"), Want("a", 0, 99_999), Want("b")], threads=1) as ahead:
        for _ in range(2):
            assert store.begun.acquire(timeout=30)
    assert (ahead.statistics().failed, ahead.statistics().fetched) == (2, 1)


def test_leaving_the_block_ends_it(store: FillStore) -> None:
    def leave() -> None:
        with Prefetch(store, (Want(name) for name in "abcdefgh"), threads=3):
            store.turn.release(100)
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("feedline-prefetch")]


def test_only_a_cache_can_be_filled(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cache="):
        Prefetch(stores.open_store(tmp_path), [])  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"ahead_nbytes": 0}, {"threads": 0}])
def test_impossible_settings(store: FillStore, wrong: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="at least 1"):
        Prefetch(store, [], **wrong)
