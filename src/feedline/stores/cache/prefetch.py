"""Reading ahead as a block, for readers that know what they will read.

What will be wanted soon, order by order, fetched piece by piece.
"""

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
"""Pieces that are not looked for on the disk once more: an order mostly wants pieces of which the one before wanted
other bytes."""


_MOST = 1024
"""Orders that lie ahead of the reader, however little they want."""


class ObjectRange(NamedTuple):
    """Bytes of an object that will be read; without `stop`, to its end."""

    path: str
    start: int = 0
    stop: int | None = None


PrefetchItem = Sequence[tuple[CachedStore, ObjectRange]]
"""Wants that are read together: those of a batch."""


@dataclass(frozen=True, slots=True)
class PrefetchStatistics:
    """How far a prefetch is."""

    fetched: int
    """Orders that lie in the cache because of it, or lay there already."""
    passed: int
    """Orders that the reader was done with before they were begun."""
    failed: int
    """Orders that could not be fetched; the reader meets the error itself."""
    ahead_nbytes: int
    """Bytes wanted by orders that the reader has not come to, and what had to be fetched beyond these."""
    peak_nbytes: int
    """The most that `ahead_nbytes` ever was."""


class _Piece(NamedTuple):
    store: CachedStore
    path: str
    number: int


@dataclass(slots=True, eq=False)
class _LocatedRange:
    """An order, of which so many fetches are still to end."""

    position: int
    left: int = 0
    failed: bool = False


@dataclass(slots=True, eq=False)
class _FetchTask:
    """One fetch: pieces that follow one another, or something of an object that nobody knows yet, of any size."""

    run: Callable[[], None]
    pieces: Sequence[_Piece] = ()
    orders: list[_LocatedRange] = field(default_factory=list)


class Prefetcher:
    """Threads that fetch into caches, in order, what a reader will read, always as many pieces at a time.

    One of them draws from `orders`, no further one while `ahead_nbytes` or more lie ahead of the reader, in the cache
    or on their way, and sees what is missing; `threads` others fetch that. `advance` may be called from any thread.
    """

    def __init__(self, orders: Iterable[PrefetchItem], *, ahead_nbytes: int, threads: int) -> None:
        self._orders = enumerate(orders)
        self.limit_nbytes = ahead_nbytes
        """What `ahead_nbytes` is from now on."""
        self._changed = threading.Condition()
        self._reached = 0
        self._ahead: dict[int, int] = {}
        self._peak_nbytes = 0
        self._counts = {"fetched": 0, "passed": 0, "failed": 0}
        self.found = 0
        """Orders in a row, up to now, of which nothing was missing."""
        self._under_way: dict[_Piece, _FetchTask] = {}
        self._unknown = 0
        self._seen: LRUCache[_Piece, bool] = LRUCache(_SEEN)
        self._tasks: SimpleQueue[_FetchTask | None] = SimpleQueue()
        self._closed = False
        self._scope = CancelScope()
        self._planner = threading.Thread(target=self._plan, name="feedline-prefetch-plan", daemon=True)
        self._fetchers = [
            threading.Thread(target=self._fetch, name=f"feedline-prefetch-{number}", daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        """Begin."""
        self._planner.start()

    def stop(self) -> None:
        """Begin nothing more, and give up what is under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._scope.cancel()

    def join(self) -> None:
        """Wait for the threads, which end after `stop`, and when there is nothing left to fetch."""
        self._planner.join()
        for thread in self._fetchers:
            if thread.ident is not None:  # it is started when there is something to fetch
                thread.join()

    def advance(self, count: int = 1) -> None:
        """The reader is done with `count` more of the orders."""
        with self._changed:
            self._reached += count
            for position in [position for position in self._ahead if position < self._reached]:
                del self._ahead[position]
            self._changed.notify_all()

    def statistics(self) -> PrefetchStatistics:
        """How far it is now."""
        with self._changed:
            return PrefetchStatistics(
                **self._counts, ahead_nbytes=sum(self._ahead.values()), peak_nbytes=self._peak_nbytes
            )

    def _plan(self) -> None:
        idle = iter(self._fetchers)
        try:
            while (taken := self._take()) is not None:
                for task in self._placed(*taken):
                    if (thread := next(idle, None)) is not None:
                        thread.start()
                    self._tasks.put(task)
        finally:
            for _ in self._fetchers:
                self._tasks.put(None)

    def _take(self) -> tuple[int, PrefetchItem] | None:
        """The next order that the reader has not passed, once there is room for it; None at the end."""
        with self._changed:
            self._changed.wait_for(self._has_room)
        while not self._closed and (taken := next(self._orders, None)) is not None:
            with self._changed:
                if taken[0] >= self._reached:
                    self._ahead[taken[0]] = 0
                    return taken
                self._counts["passed"] += 1
        return None

    def _has_room(self) -> bool:
        known = sum(self._ahead.values()) < self.limit_nbytes and len(self._ahead) < _MOST
        return self._closed or (known and self._unknown < len(self._fetchers))

    def _placed(self, position: int, order: PrefetchItem) -> list[_FetchTask]:
        """The fetches of what is missing of an order, but for what is on its way already for another one."""
        try:
            known, unknown = _sorted_out(order)
            pieces = [piece for each in known for piece in _pieces(*each)]
            wanted = sum(stop - start for _, _, spans in known for start, stop in spans)
            missing = list(filter(self._is_missing, pieces))
        except Exception:  # noqa: BLE001 - whoever reads it meets the error, and is told about it
            with self._changed:
                self._counts["failed"] += 1
            return []
        placed = _LocatedRange(position)
        with self._changed:
            tasks = {self._under_way[piece] for piece in pieces if piece in self._under_way}
            fetches = [_fetch_of(run) for run in _runs([piece for piece in missing if piece not in self._under_way])]
            self._under_way.update({piece: task for task in fetches for piece in task.pieces})
            fetched = sum(piece.store.piece_nbytes(*piece[1:]) for task in fetches for piece in task.pieces)
            self._note(position, max(fetched, wanted))
            fetches += [_FetchTask(partial(self._fill, position, *each)) for each in unknown]
            self._unknown += len(unknown)
            tasks.update(fetches)
            for task in tasks:
                task.orders.append(placed)
            placed.left = len(tasks)
            self._counts["fetched"] += not tasks
            self.found = 0 if tasks else self.found + 1
        return fetches

    def _is_missing(self, piece: _Piece) -> bool:
        if self._seen.get(piece):
            return False
        self._seen.put(piece, True)
        return not piece.store.has(piece.path, piece.number)

    def _fill(self, position: int, store: CachedStore, want: ObjectRange) -> None:
        stop = store.size(want.path) if want.stop is None else want.stop
        with self._changed:
            self._note(position, max(0, stop - want.start))
        store.fill(want.path, want.start, stop)

    def _note(self, position: int, nbytes: int) -> None:
        if position in self._ahead:
            self._ahead[position] += nbytes
            self._peak_nbytes = max(self._peak_nbytes, sum(self._ahead.values()))

    def _fetch(self) -> None:
        while (task := self._tasks.get()) is not None:
            failed = False
            try:
                if not self._closed:
                    with self._scope.entered():
                        task.run()
            except Exception:  # noqa: BLE001 - whoever reads it meets the error, and is told about it
                failed = True
            with self._changed:
                self._end(task, failed)
                self._changed.notify_all()

    def _end(self, task: _FetchTask, failed: bool) -> None:
        self._unknown -= not task.pieces
        for piece in task.pieces:
            del self._under_way[piece]
            if failed:
                self._seen.drop(piece)
        for order in task.orders:
            order.left -= 1
            order.failed |= failed
            if not order.left:
                self._counts["failed" if order.failed else "fetched"] += 1


def _sorted_out(
    order: PrefetchItem,
) -> tuple[list[tuple[CachedStore, str, list[tuple[int, int]]]], list[tuple[CachedStore, ObjectRange]]]:
    """The spans that are wanted of each known object; and what is wanted of others, of which the store has to tell."""
    spans: dict[tuple[CachedStore, str], list[tuple[int, int]]] = {}
    unknown = []
    for store, want in order:
        if want.stop is None or not store.knows(want.path):
            unknown.append((store, want))
        else:
            spans.setdefault((store, want.path), []).append((want.start, want.stop))
    return [(store, path, several) for (store, path), several in spans.items()], unknown


def _pieces(store: CachedStore, path: str, spans: Sequence[tuple[int, int]]) -> list[_Piece]:
    return [_Piece(store, path, number) for number in store.pieces(path, spans)]


def _runs(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces that are fetched together."""
    numbers: dict[tuple[CachedStore, str], list[int]] = {}
    for store, path, number in pieces:
        numbers.setdefault((store, path), []).append(number)
    for (store, path), several in numbers.items():
        for run in store.runs(several):
            yield [_Piece(store, path, number) for number in run]


def _fetch_of(run: Sequence[_Piece]) -> _FetchTask:
    store, path, _ = run[0]
    return _FetchTask(partial(store.bring, path, [piece.number for piece in run]), run)


class Prefetch:
    """Fetches into a store's cache, in order, what a reader will read; a block at whose end nothing is left of it.

        with Prefetch(store, wants, ahead_nbytes=1 << 30) as ahead:
            for want in wants:
                use(store.read(*want))
                ahead.advance()

    No further want is begun while `ahead_nbytes` or more lie ahead of the reader; so many `threads` fetch. `wants` is
    drawn from as it goes, by one thread. A loader does this by itself for datasets that are read through a cache.
    """

    def __init__(
        self, store: CachedStore, wants: Iterable[ObjectRange], *, ahead_nbytes: int = 256 << 20, threads: int = 16
    ) -> None:
        if not isinstance(store, CachedStore):
            raise ArgumentError("Prefetch fetches into a cache: open the store with open_store(address, cache=...)")
        if ahead_nbytes < 1 or threads < 1:
            raise ArgumentError("Prefetch: ahead_nbytes and threads are at least 1")
        self._orders = Prefetcher(([(store, want)] for want in wants), ahead_nbytes=ahead_nbytes, threads=threads)

    def __enter__(self) -> Self:
        self._orders.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._orders.stop()
        self._orders.join()

    def advance(self, count: int = 1) -> None:
        """The reader is done with `count` more of the wants; any thread may say so."""
        self._orders.advance(count)

    def statistics(self) -> PrefetchStatistics:
        """How far it is now."""
        return self._orders.statistics()
