"""A worker pool from outside: the threads of `concurrent.futures`, chosen by `worker_method="executor"`."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, Self

import feedline as fl
from feedline.workers import Builder, PoolKind, PoolOptions, PoolStatistics, register_pool


class ExecutorFuture:
    """One batch in the making."""

    def __init__(self, request: Any, future: Future[Any], timeout_s: float | None) -> None:
        self.request, self.future, self._timeout_s = request, future, timeout_s

    def done(self) -> bool:
        return self.future.done()

    def result(self) -> Any:
        try:
            return self.future.result(self._timeout_s)
        except CancelledError as error:
            raise fl.errors.WorkerError(f"{self.request} was canceled") from error
        except TimeoutError as error:
            if self.done():  # the dataset has raised it
                raise
            raise fl.errors.WorkerStalledError(f"no batch for {self._timeout_s} s") from error

    def cancel(self) -> None:
        self.future.cancel()


class ExecutorPool:
    """One executor; with partitions one for each thread, so that the batches of a partition are built in order."""

    processes: list[Any] = []  # noqa: RUF012 - part of the protocol: there are none

    def __init__(self, builder: Builder, options: PoolOptions) -> None:
        self._builder, self._options = builder, options
        count, threads = (options.num_workers, 1) if options.partitions else (1, options.num_workers)
        self._executors = [ThreadPoolExecutor(threads) for _ in range(count)]
        self._open: set[Future[Any]] = set()

    def submit(self, request: Any) -> ExecutorFuture:
        number = request.partition % len(self._executors) if self._options.partitions else 0
        future = self._executors[number].submit(self._builder, request, self._options.allocate)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return ExecutorFuture(request, future, self._options.timeout_s or None)

    def wait_any(self, futures: Iterable[ExecutorFuture]) -> ExecutorFuture:
        by_future = {mine.future: mine for mine in futures}
        done, _ = wait(by_future, self._options.timeout_s or None, FIRST_COMPLETED)
        if not done:
            raise fl.errors.WorkerStalledError(f"no batch for {self._options.timeout_s} s")
        return by_future[done.pop()]

    def resize(self, num_workers: int) -> None:
        raise NotImplementedError("an executor keeps its threads: the kind says resizable=False")

    def statistics(self) -> PoolStatistics:
        in_flight = sum(not future.done() for future in self._open.copy())
        return PoolStatistics(workers=self._options.num_workers, in_flight=in_flight)

    def close(self) -> None:
        for executor in self._executors:
            executor.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


KIND = PoolKind(ExecutorPool, shares_rng=True, resizable=False)

register_pool("executor", KIND)
