"""Prefetching into caches, for readers with known ranges."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple, Self

from feedline.core.caches import LRUCache
from feedline.core.threads import CancelScope
from feedline.errors import ArgumentError
from feedline.stores.cache.store import CachedStore

_SEEN = 1 << 16
"""Number of pieces that are not checked on the disk again: an item mostly needs pieces of the previous item, too."""


_MOST_ITEMS_AHEAD = 1024
"""Most items ahead of the reader, even if they are small."""


class ObjectRange(NamedTuple):
    """Bytes of an object that will be read.

    Without `stop`, to its end.
    """

    path: str
    start: int = 0
    stop: int | None = None


PrefetchItem = Sequence[tuple[CachedStore, ObjectRange]]
"""Ranges that are read together, such as the ranges of a batch."""


@dataclass(frozen=True, slots=True)
class PrefetchStatistics:
    """The progress of a prefetch."""

    fetched: int
    """Items whose data are in the cache, by prefetching or since earlier."""
    passed: int
    """Items that the reader passed before their fetch began."""
    failed: int
    """Items that could not be fetched; the reader gets the error itself."""
    ahead_nbytes: int
    """The larger number of bytes: needed by items ahead of the reader, or fetched for them."""
    peak_nbytes: int
    """The highest value of `ahead_nbytes` until now."""


class _FetchPiece(NamedTuple):
    store: CachedStore
    path: str
    number: int


@dataclass(slots=True, eq=False)
class _PendingItem:
    """An item, and the number of its unfinished fetches."""

    position: int
    left: int = 0
    failed: bool = False


@dataclass(slots=True, eq=False)
class _FetchTask:
    """One fetch: consecutive pieces, or a range of an unknown object."""

    run: Callable[[], None]
    pieces: Sequence[_FetchPiece] = ()
    items: list[_PendingItem] = field(default_factory=list)


class Prefetcher:
    """Threads that prefetch ranges into caches, in order.

    One of them takes items from `items`, except while `ahead_nbytes` or more are ahead of the reader, in the cache or
    in flight, and plans the missing pieces. `threads` others fetch these. `advance` may be called from any thread.
    """

    def __init__(self, items: Iterable[PrefetchItem], *, ahead_nbytes: int, threads: int) -> None:
        self._items = enumerate(items)
        self.limit_nbytes = ahead_nbytes
        """The current limit, which may be changed at any time."""
        self._changed = threading.Condition()
        self._reached = 0
        self._ahead: dict[int, int] = {}
        self._peak_nbytes = 0
        self._counts = {"fetched": 0, "passed": 0, "failed": 0}
        self.found = 0
        """Consecutive items, up to now, that were complete in the cache."""
        self._under_way: dict[_FetchPiece, _FetchTask] = {}
        self._unknown = 0
        self._seen: LRUCache[_FetchPiece, bool] = LRUCache(_SEEN)
        self._tasks: SimpleQueue[_FetchTask | None] = SimpleQueue()
        self._closed = False
        self._scope = CancelScope()
        self._planner = threading.Thread(target=self._plan, name="feedline-prefetch-plan", daemon=True)
        self._fetchers = [
            threading.Thread(target=self._fetch, name=f"feedline-prefetch-{number}", daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        """Start the threads."""
        self._planner.start()

    def stop(self) -> None:
        """Start no further fetch, and cancel those in flight."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._scope.cancel()

    def join(self) -> None:
        """Wait for the threads, which end after `stop` or the last fetch."""
        self._planner.join()
        for thread in self._fetchers:
            if thread.ident is not None:  # a thread starts with the first fetch that needs it
                thread.join()

    def advance(self, count: int = 1) -> None:
        """Record that the reader is done with `count` more items."""
        with self._changed:
            self._reached += count
            for position in [position for position in self._ahead if position < self._reached]:
                del self._ahead[position]
            self._changed.notify_all()

    def statistics(self) -> PrefetchStatistics:
        """The progress so far."""
        with self._changed:
            return PrefetchStatistics(
                **self._counts, ahead_nbytes=sum(self._ahead.values()), peak_nbytes=self._peak_nbytes
            )

    def _plan(self) -> None:
        idle = iter(self._fetchers)
        try:
            while (numbered := self._take()) is not None:
                for task in self._plan_item(*numbered):
                    if (thread := next(idle, None)) is not None:
                        thread.start()
                    self._tasks.put(task)
        finally:
            for _ in self._fetchers:
                self._tasks.put(None)

    def _take(self) -> tuple[int, PrefetchItem] | None:
        """The next item ahead of the reader, once its bytes fit.

        None at the end.
        """
        with self._changed:
            self._changed.wait_for(self._has_room)
        # Drawn without the lock: `items` may run a dataset's code, which may be slow.
        while not self._closed and (numbered := next(self._items, None)) is not None:
            with self._changed:
                if numbered[0] >= self._reached:
                    self._ahead[numbered[0]] = 0
                    return numbered
                self._counts["passed"] += 1
        return None

    def _has_room(self) -> bool:
        # Only a fetch reveals the size of an unknown object: each thread starts at most one of unknown size.
        known = sum(self._ahead.values()) < self.limit_nbytes and len(self._ahead) < _MOST_ITEMS_AHEAD
        return self._closed or (known and self._unknown < len(self._fetchers))

    def _plan_item(self, position: int, item: PrefetchItem) -> list[_FetchTask]:
        """Plan the fetches that an item lacks.

        Pieces in flight for another item are not fetched twice.
        """
        try:
            known, unknown = _split_known(item)
            pieces = [piece for each in known for piece in _pieces(*each)]
            wanted = sum(stop - start for _, _, spans in known for start, stop in spans)
            # The sizes are read here, not under the lock below: an object that has just changed is looked up again,
            # which may fail.
            missing = {piece: piece.store.piece_nbytes(*piece[1:]) for piece in pieces if self._is_missing(piece)}
        except Exception:  # noqa: BLE001 - the reader gets the same error, with its context
            with self._changed:
                self._counts["failed"] += 1
            return []
        pending = _PendingItem(position)
        with self._changed:
            # Under the same lock as the registration below: a fetch that ended in between would never report to this
            # item.
            tasks = {self._under_way[piece] for piece in pieces if piece in self._under_way}
            fetches = [_fetch_of(run) for run in _runs([piece for piece in missing if piece not in self._under_way])]
            self._under_way.update({piece: task for task in fetches for piece in task.pieces})
            fetched = sum(missing[piece] for task in fetches for piece in task.pieces)
            self._note(position, max(fetched, wanted))
            fetches += [_FetchTask(partial(self._fetch_range, position, *each)) for each in unknown]
            self._unknown += len(unknown)
            tasks.update(fetches)
            for task in tasks:
                task.items.append(pending)
            pending.left = len(tasks)
            self._counts["fetched"] += not tasks
            self.found = 0 if tasks else self.found + 1
        return fetches

    def _is_missing(self, piece: _FetchPiece) -> bool:
        if self._seen.get(piece):
            return False
        self._seen.put(piece, True)
        return not piece.store.has(piece.path, piece.number)

    def _fetch_range(self, position: int, store: CachedStore, want: ObjectRange) -> None:
        stop = store.size(want.path) if want.stop is None else want.stop
        with self._changed:
            self._note(position, max(0, stop - want.start))
        store.fetch_range(want.path, want.start, stop)

    def _note(self, position: int, nbytes: int) -> None:
        if position in self._ahead:
            self._ahead[position] += nbytes
            self._peak_nbytes = max(self._peak_nbytes, sum(self._ahead.values()))

    def _fetch(self) -> None:
        while (task := self._tasks.get()) is not None:
            failed = False
            try:
                if not self._closed:
                    with self._scope.enter():
                        task.run()
            except Exception:  # noqa: BLE001 - the reader gets the same error, with its context
                failed = True
            with self._changed:
                self._end(task, failed)
                self._changed.notify_all()

    def _end(self, task: _FetchTask, failed: bool) -> None:
        self._unknown -= not task.pieces
        for piece in task.pieces:
            del self._under_way[piece]
            # Recorded as seen when the fetch was planned, but not fetched.
            if failed:
                self._seen.drop(piece)
        for item in task.items:
            item.left -= 1
            item.failed |= failed
            if not item.left:
                self._counts["failed" if item.failed else "fetched"] += 1


def _split_known(
    item: PrefetchItem,
) -> tuple[list[tuple[CachedStore, str, list[tuple[int, int]]]], list[tuple[CachedStore, ObjectRange]]]:
    """Split an item into spans of known objects and ranges of others.

    The sizes of the others have to be requested from the store.
    """
    spans: dict[tuple[CachedStore, str], list[tuple[int, int]]] = {}
    unknown = []
    for store, want in item:
        if want.stop is None or not store.has_info(want.path):
            unknown.append((store, want))
        else:
            spans.setdefault((store, want.path), []).append((want.start, want.stop))
    return [(store, path, several) for (store, path), several in spans.items()], unknown


def _pieces(store: CachedStore, path: str, spans: Sequence[tuple[int, int]]) -> list[_FetchPiece]:
    return [_FetchPiece(store, path, number) for number in store.pieces(path, spans)]


def _runs(pieces: Sequence[_FetchPiece]) -> Iterator[list[_FetchPiece]]:
    """Group pieces that are fetched together."""
    numbers: dict[tuple[CachedStore, str], list[int]] = {}
    for store, path, number in pieces:
        numbers.setdefault((store, path), []).append(number)
    for (store, path), several in numbers.items():
        for run in store.runs(several):
            yield [_FetchPiece(store, path, number) for number in run]


def _fetch_of(run: Sequence[_FetchPiece]) -> _FetchTask:
    store, path, _ = run[0]
    return _FetchTask(partial(store.fetch_pieces, path, [piece.number for piece in run]), run)


class Prefetch:
    """A block that prefetches into a store's cache.

    Ranges are fetched in the order in which the reader will read them. Nothing is left running at the end:

        with Prefetch(store, ranges, ahead_nbytes=1 << 30) as ahead:
            for each in ranges:
                use(store.read(*each))
                ahead.advance()

    No further range is started while `ahead_nbytes` or more are ahead of the reader. `threads` threads fetch, and one
    more takes ranges from `ranges`. A loader does this automatically for datasets that are read through a cache.
    """

    def __init__(
        self, store: CachedStore, ranges: Iterable[ObjectRange], *, ahead_nbytes: int = 256 << 20, threads: int = 16
    ) -> None:
        if not isinstance(store, CachedStore):
            raise ArgumentError("Prefetch fetches into a cache: open the store with open_store(address, cache=...)")
        if ahead_nbytes < 1 or threads < 1:
            raise ArgumentError("Prefetch: ahead_nbytes and threads must be at least 1")
        self._items = Prefetcher(([(store, each)] for each in ranges), ahead_nbytes=ahead_nbytes, threads=threads)

    def __enter__(self) -> Self:
        self._items.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._items.stop()
        self._items.join()

    def advance(self, count: int = 1) -> None:
        """Record that the reader is done with `count` more ranges.

        Any thread may call it.
        """
        self._items.advance(count)

    def statistics(self) -> PrefetchStatistics:
        """The progress so far."""
        return self._items.statistics()
