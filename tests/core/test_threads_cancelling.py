"""Waits that can be canceled, and a pool without a wait for its threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path

import pytest
from debris import DebrisGuard
from preloaded import Preloaded

from feedline.core import threads
from feedline.core.threads import CancelScope, DaemonPool, WaitCancelledError

LONG_S = 600.0


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """The event that hanging calls wait for."""
    event = threading.Event()
    yield event
    event.set()


def in_thread(scope: CancelScope, work: threading.Event) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that sleeps in the scope, and the event that ends it."""
    ends: list[BaseException] = []

    def sleep() -> None:
        with scope.enter():
            work.set()
            try:
                threads.sleep(LONG_S)
            except WaitCancelledError as error:
                ends.append(error)

    thread = threading.Thread(target=sleep)
    thread.start()
    return thread, ends


def test_a_sleep_ends_when_its_scope_is_canceled() -> None:
    scope, begun = CancelScope(), threading.Event()
    thread, ends = in_thread(scope, begun)
    assert begun.wait(30)
    scope.cancel()
    thread.join(30)
    assert len(ends) == 1


def test_what_is_canceled_waits_for_nothing_more() -> None:
    with CancelScope() as scope:
        scope.cancel()
        with pytest.raises(WaitCancelledError):
            threads.sleep(LONG_S)
        with CancelScope(), pytest.raises(WaitCancelledError):
            threads.sleep(LONG_S)
    threads.sleep(0)


def test_a_wait_for_an_event_ends_with_it_or_with_the_scope() -> None:
    event = threading.Event()
    event.set()
    threads.wait(event, LONG_S)
    threads.wait(threading.Event(), 0)
    with CancelScope() as scope:
        scope.cancel()
        with pytest.raises(WaitCancelledError):
            threads.wait(threading.Event(), LONG_S)


def test_a_scope_ends_with_the_one_around_it_and_not_the_other_way() -> None:
    with CancelScope() as outer:
        inner = CancelScope()
        inner.cancel()
        assert not outer.cancelled
        other = CancelScope()
    assert other.cancelled


def test_scopes_that_ended_are_forgotten() -> None:
    with CancelScope() as outer:
        inner = CancelScope()
        seen = weakref.ref(inner)
        inner.cancel()
        del inner
        gc.collect()
        assert seen() is None
        assert not outer.cancelled


def test_a_pool_gives_what_its_calls_give() -> None:
    with DaemonPool(4) as pool:
        assert list(pool.map(lambda number: number * 2, range(100))) == list(range(0, 200, 2))
        failed: Future[int] = pool.submit(int, "x")
        with pytest.raises(ValueError, match="invalid literal"):
            failed.result()
    with pytest.raises(RuntimeError, match="takes no more calls"):
        pool.submit(int)


def test_a_pool_has_no_more_threads_than_it_may_and_needs() -> None:
    pool, here, barrier = DaemonPool(3, "few"), threading.current_thread(), threading.Barrier(3)
    names = set()
    for _ in range(20):
        names.add(pool.submit(lambda: threading.current_thread().name).result())
    assert names == {"few_0"}
    together = [pool.submit(barrier.wait, 30) for _ in range(9)]
    assert sorted(each.result() for each in together) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len({thread for thread in threading.enumerate() if thread.name.startswith("few_")}) == 3
    assert here is threading.current_thread()


def test_calls_that_submit_calls_find_a_thread() -> None:
    with DaemonPool(2) as pool:
        assert pool.submit(lambda: pool.submit(lambda: 7).result()).result() == 7


def test_a_future_is_done_when_its_scope_is_canceled_though_its_call_hangs(release: threading.Event) -> None:
    pool, begun = DaemonPool(1), threading.Event()

    def hang() -> None:
        begun.set()
        release.wait()

    with CancelScope() as scope:
        hanging, queued = pool.submit(hang), pool.submit(hang)
        assert begun.wait(30)
        scope.cancel()
        for future in (hanging, queued):
            with pytest.raises(CancelledError):
                future.result(30)
    release.set()
    assert pool.submit(lambda: 3).result() == 3


def test_calls_of_calls_end_with_the_scope_of_the_first() -> None:
    pool, other, begun = DaemonPool(1), DaemonPool(1), threading.Event()
    ends: list[BaseException] = []

    def inner() -> None:
        begun.set()
        try:
            threads.sleep(LONG_S)
        except WaitCancelledError as error:
            ends.append(error)

    with CancelScope() as scope:
        future = pool.submit(lambda: other.submit(inner).result())
        assert begun.wait(30)
        scope.cancel()
        with pytest.raises(CancelledError):
            future.result(30)
    other.submit(int).result()  # after `inner`
    assert len(ends) == 1


def test_a_block_that_fails_does_not_wait(release: threading.Event) -> None:
    futures: list[Future[bool]] = []

    def fail() -> None:
        with DaemonPool(2) as pool:
            futures.extend(pool.submit(release.wait) for _ in range(4))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(30)


def test_a_call_in_a_pool_is_made_at_once() -> None:
    pool = DaemonPool(1)
    assert pool.call(lambda: pool.call(threading.current_thread)) is not threading.current_thread()


def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch, no_debris: DebrisGuard) -> None:
    monkeypatch.setattr(threads, "_IDLE_S", 0.01)
    pool = DaemonPool(4)
    barrier = threading.Barrier(4)
    for future in [pool.submit(barrier.wait, 30) for _ in range(4)]:
        future.result()
    no_debris.check()
    assert pool.submit(lambda: 3).result() == 3


def test_a_pool_that_comes_and_goes_loses_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_IDLE_S", 0.0)
    pool = DaemonPool(3)
    assert [pool.submit(lambda each=each: each).result(30) for each in range(500)] == list(range(500))
    assert list(pool.map(abs, range(500))) == list(range(500))


def test_threads_end_with_their_pool(no_debris: DebrisGuard) -> None:
    pool = DaemonPool(4)
    assert list(pool.map(abs, range(9))) == list(range(9))
    del pool
    no_debris.check()


def test_what_a_call_gave_is_not_held() -> None:
    class Result:
        pass

    pool = DaemonPool(1)
    result = pool.submit(Result).result()
    seen = weakref.ref(result)
    pool.submit(int).result()
    del result
    assert seen() is None


def test_python_exits_while_calls_hang(preloaded: Preloaded, tmp_path: Path) -> None:
    program = (
        "import threading; from feedline.core.threads import DaemonPool\n"
        "pool = DaemonPool(2); begun = threading.Event()\n"
        "pool.submit(lambda: (begun.set(), threading.Event().wait()))\n"
        "begun.wait()"
    )
    assert preloaded.run_code(program, tmp_path) == (0, "")  # a hanging call never returns
