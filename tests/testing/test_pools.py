"""check_pool passes feedline's pools and names the faults of others."""

from __future__ import annotations

from typing import Any

import pytest

from feedline.errors import WorkerError
from feedline.testing import check_pool
from feedline.testing.pools import check_futures
from feedline.workers import PoolKind, PoolStatistics, registry
from feedline.workers.threads import ThreadPool


@pytest.mark.parametrize("method", ["thread", "process"])
def test_feedlines_own_pools_pass(method: str) -> None:
    check_pool(method)


class Lingering(ThreadPool):
    def close(self) -> None:
        pass


class Late(ThreadPool):
    """Builds each request for the second time under the number of the one after it."""

    before: Any = None

    def submit(self, request: Any) -> Any:
        before, self.before = self.before, request
        return super().submit(request if before is None or before.number % 5 else before)


class Wrapper:
    """A builder that replaces errors by others."""

    def __init__(self, builder: Any, change: Any) -> None:
        self.builder, self.change = builder, change

    def __call__(self, request: Any, empty: Any) -> Any:
        try:
            return self.builder(request, empty)
        except ValueError as error:
            raise self.change(error) from None


class OtherType(ThreadPool):
    def __init__(self, builder: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(Wrapper(builder, lambda error: RuntimeError(str(error))), *args, **kwargs)


class OtherArguments(ThreadPool):
    def __init__(self, builder: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(Wrapper(builder, lambda error: type(error)(str(error))), *args, **kwargs)


class NoAddress(ThreadPool):
    def __init__(self, builder: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(Wrapper(builder, lambda error: type(error)(*error.args)), *args, **kwargs)


@pytest.mark.parametrize(
    ("pool", "complaint"),
    [
        (Lingering, r"'thread' workers still run as threads \["),
        (Late, "must equal those without workers, in epoch 0"),
        (OtherType, "must keep its type: BrokenSampleError.* became RuntimeError"),
        (OtherArguments, "must keep its arguments"),
        (NoAddress, "must keep the notes that give the sample's address"),
    ],
)
def test_what_is_wrong_with_a_pool_is_named(pool: Any, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ThreadPool", pool)
    with pytest.raises(AssertionError, match=complaint):
        check_pool("thread")


def test_futures_without_workers_keep_the_promises() -> None:
    check_futures(registry.INLINE)


class Changed:
    """A future with one other method."""

    def __init__(self, future: Any) -> None:
        self.future = future

    def __getattr__(self, name: str) -> Any:
        return getattr(self.future, name)


class Copying(Changed):
    def result(self) -> Any:
        return self.future.result()._replace()


class Silent(Changed):
    def result(self) -> Any:
        try:
            return self.future.result()
        except WorkerError:
            return None


class Waiting(Changed):
    def done(self) -> Any:
        return self.future.done() and not self.future._cancelled


class QueueCounting(ThreadPool):
    def statistics(self) -> Any:
        return PoolStatistics(in_flight=sum(queue.qsize() for queue in self._queues))


@pytest.mark.parametrize(
    ("pool", "future", "complaint"),
    [
        (ThreadPool, Copying, r"a second result\(\) must return the same batch"),
        (ThreadPool, Silent, "must raise it again, or a WorkerError, not None"),
        (ThreadPool, Waiting, r"result\(\) must not wait after close"),
        (QueueCounting, Changed, r"in_flight must be the number of .*: it is \d, but \d of \d futures are not done"),
    ],
)
def test_what_is_wrong_with_a_future_is_named(pool: Any, future: Any, complaint: str) -> None:
    class Changing(pool):  # type: ignore[misc]
        def submit(self, request: Any) -> Any:
            return future(super().submit(request))

    kind = PoolKind(lambda builder, options: Changing(builder, options.num_workers))
    with pytest.raises(AssertionError, match=complaint):
        check_futures(kind)
