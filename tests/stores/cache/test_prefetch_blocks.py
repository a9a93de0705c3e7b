"""Prefetching: in order, not too far ahead, and ended with its block."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from feedline import stores
from feedline.errors import ArgumentError
from feedline.stores import ObjectRange, Prefetch

PIECE, MEBIBYTES_4 = 400, 4 << 20


class FillStore(stores.CachedStore):
    """Records fetches, each of which waits until the test releases it."""

    def __init__(self, folder: Path, piece_nbytes: int = PIECE) -> None:
        (folder / "data").mkdir()
        for name in "abcdefgh":
            (folder / "data" / name).write_bytes(name.encode() * 1000)
        super().__init__(stores.open_store(folder / "data"), stores.Cache(folder / "cache", "100 MB", piece_nbytes))
        self.filled = list[tuple[str, int, int | None]]()
        self.brought = list[tuple[str, tuple[int, ...]]]()
        self.failures = 0
        self.turn = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def fetch_range(self, path: str, start: int = 0, stop: int | None = None) -> int:
        self.begun.release()
        assert self.turn.acquire(timeout=60)
        self.filled.append((path, start, stop))
        return super().fetch_range(path, start, stop)

    def fetch_pieces(self, path: str, numbers: Sequence[int]) -> None:
        self.begun.release()
        assert self.turn.acquire(timeout=60)
        self.brought.append((path, tuple(numbers)))
        if self.failures:
            self.failures -= 1
            raise stores.StoreError(path)
        super().fetch_pieces(path, numbers)


@pytest.fixture
def store(tmp_path: Path) -> FillStore:
    return FillStore(tmp_path)


def test_wants_are_fetched_in_order_and_no_further_than_allowed(store: FillStore) -> None:
    wants = [ObjectRange(name) for name in "abcdefgh"]
    with Prefetch(store, wants, ahead_nbytes=2500, threads=1) as ahead:
        for _ in range(3):
            assert store.begun.acquire(timeout=60)
            store.turn.release()
        assert not store.begun.acquire(timeout=0.05)  # 3,000 bytes are ahead
        ahead.advance()
        assert store.begun.acquire(timeout=60)
        store.turn.release()
        assert ahead.statistics().ahead_nbytes <= 3000
    assert [path for path, _, _ in store.filled] == ["a", "b", "c", "d"]
    assert ahead.statistics().peak_nbytes == 3000
    assert ahead.statistics().fetched == 4


def test_a_prefetched_range_is_a_hit(store: FillStore) -> None:
    with Prefetch(store, [ObjectRange("a", 0, 500)], threads=1) as ahead:
        store.turn.release()
        until_ended(ahead, 1)
    before = stores.statistics()
    assert store.read("a", 0, 500) == b"a" * 500
    after = stores.statistics()
    assert (after.cache_hits - before.cache_hits, after.cache_misses - before.cache_misses) == (2, 0)


def test_a_reader_that_is_ahead_is_not_followed(store: FillStore) -> None:
    ahead = Prefetch(store, [ObjectRange(name) for name in "abcd"], threads=1)
    ahead.advance(3)
    store.turn.release()
    with ahead:
        assert store.begun.acquire(timeout=60)
    assert store.filled == [("d", 0, 1000)]
    assert ahead.statistics().passed == 3


def test_failed_fetches_are_counted_and_skipped(store: FillStore) -> None:
    store.turn.release(4)
    with Prefetch(store, [ObjectRange("missing"), ObjectRange("a", 0, 99_999), ObjectRange("b")], threads=1) as ahead:
        for _ in range(2):
            assert store.begun.acquire(timeout=60)
    assert (ahead.statistics().failed, ahead.statistics().fetched) == (2, 1)


def known(store: FillStore) -> FillStore:
    list(store.list())
    return store


def until_ended(ahead: Prefetch, orders: int) -> None:
    for _ in range(3000):
        if ahead.statistics().fetched + ahead.statistics().failed == orders:
            return
        time.sleep(0.01)
    raise AssertionError(ahead.statistics())


def test_missing_pieces_of_known_objects_are_fetched_once(store: FillStore) -> None:
    """Pieces hold 400 bytes and the last one of 1,000 holds 200; adjacent pieces are one request."""
    known(store).turn.release(100)
    store.read("a", 450, 460)
    wants = [ObjectRange("a", 0, 10), ObjectRange("a", 5, 900), ObjectRange("b", 0, 1000), ObjectRange("b", 300, 500)]
    with Prefetch(store, wants, threads=3) as ahead:
        until_ended(ahead, 4)
    assert sorted(store.brought) == [("a", (0,)), ("a", (2,)), ("b", (0, 1, 2))]
    assert ahead.statistics().fetched == 4
    assert ahead.statistics().peak_nbytes == 400 + 895 + 1000 + 200


def test_planning_of_present_pieces_does_not_run_far_ahead_of_the_reader(store: FillStore) -> None:
    """Planned items are held in memory: with a warm cache, the epoch must not be planned all at once."""
    for name in "ab":
        known(store).read(name)
    drawn = list[int]()

    def wants(nbytes: int) -> Iterator[ObjectRange]:
        for number in range(5000):
            drawn.append(number)
            yield ObjectRange("ab"[number % 2], 0, nbytes)

    for nbytes, most in ((1000, 10), (1, 1024)):
        drawn.clear()
        with Prefetch(store, wants(nbytes), ahead_nbytes=9500, threads=2) as ahead:
            until_ended(ahead, most)
            assert len(drawn) == most
            ahead.advance(5)
            until_ended(ahead, most + 5)
    assert not store.brought


def test_a_piece_in_flight_is_waited_for_and_not_fetched_twice(store: FillStore) -> None:
    ahead = Prefetch(
        known(store), [ObjectRange("a", 0, 10), ObjectRange("a", 10, 20), ObjectRange("b", 0, 10)], threads=2
    )
    with ahead:
        assert store.begun.acquire(timeout=60)
        assert store.begun.acquire(timeout=60)  # "a" and "b": the second want adds nothing
        assert ahead.statistics().fetched == 0
        store.turn.release(2)
        until_ended(ahead, 3)
    assert sorted(store.brought) == [("a", (0,)), ("b", (0,))]
    assert ahead.statistics().fetched == 3


def test_the_pieces_of_one_want_are_fetched_at_the_same_time(tmp_path: Path) -> None:
    store = FillStore(tmp_path, piece_nbytes=MEBIBYTES_4)
    (tmp_path / "data" / "long").write_bytes(bytes(3 * MEBIBYTES_4))
    with Prefetch(known(store), [ObjectRange("long", 0, 3 * MEBIBYTES_4)], threads=3):
        assert all(store.begun.acquire(timeout=60) for _ in range(3))
        store.turn.release(3)


def test_a_failed_piece_is_fetched_for_the_next_item_that_needs_it(store: FillStore) -> None:
    store.failures = 1
    with Prefetch(known(store), [ObjectRange("a", 0, 10), ObjectRange("a", 0, 10)], ahead_nbytes=1, threads=1) as ahead:
        for count in (1, 2):
            assert store.begun.acquire(timeout=60)
            store.turn.release()
            until_ended(ahead, count)
            ahead.advance()
    assert store.brought == [("a", (0,)), ("a", (0,))]
    assert (ahead.statistics().failed, ahead.statistics().fetched) == (1, 1)


def test_an_object_that_is_looked_up_again_in_vain_is_counted_and_passed(
    store: FillStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread has just noticed that the object changed, so its size must be requested."""
    size = store.piece_nbytes

    def piece_nbytes(path: str, number: int) -> int:
        if path == "a":
            raise stores.ObjectNotFoundError("a is gone")
        return size(path, number)

    monkeypatch.setattr(store, "piece_nbytes", piece_nbytes)
    known(store).turn.release(10)
    with Prefetch(store, [ObjectRange("a", 0, 10), ObjectRange("b", 0, 10)], threads=1) as ahead:
        until_ended(ahead, 2)
    assert (ahead.statistics().failed, ahead.statistics().fetched) == (1, 1)


def test_leaving_the_block_ends_it(store: FillStore) -> None:
    def leave() -> None:
        with Prefetch(store, (ObjectRange(name) for name in "abcdefgh"), threads=3):
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
