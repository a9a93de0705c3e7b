"""Conformance checks of worker pools."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from feedline.core.dataset import Traits
from feedline.core.rng import sample_rng
from feedline.core.schedule import BatchRequest
from feedline.errors import WorkerError
from feedline.loader.building.builder import BatchBuilder
from feedline.loader.dataloader import DataLoader
from feedline.testing.difference import check_same
from feedline.workers.base import BatchFuture, PoolKind, PoolOptions, WorkerPool
from feedline.workers.registry import find_pool

_SEED = 11
_LENGTH = 60
_BATCH_SIZE = 4
_BROKEN = 37
_REQUESTS = 8
_LIMIT_S = 60.0
"""Longest wait for a batch, which only a pool that breaks its promise reaches."""


class _EpochOutcome(NamedTuple):
    """The batches of an epoch, and the exception that ended it."""

    batches: list[Any]
    error: BaseException | None


class BrokenSampleError(ValueError):
    """The exception of the datasets of `check_pool`, with arguments to compare."""


class RandomSamples:
    """Nested samples that depend on the index and on the random address."""

    traits = Traits(thread_safe=True)

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = sample_rng()
        noise = torch.from_numpy(rng.normal(size=(3, 200)))
        return {"index": index, "noise": noise, "text": f"sample {index}", "pair": (np.float32(rng.random()), [index])}


class BrokenSamples(RandomSamples):
    """The same dataset, except that one sample raises an error."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == _BROKEN:
            raise BrokenSampleError("broken on purpose", index)
        return super().__getitem__(index)


class ProcessAndThread:
    """Samples that name the process and thread they were made in."""

    traits = Traits(thread_safe=True)

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> tuple[int, int]:
        return os.getpid(), threading.get_ident()


def check_pool(worker_method: str, *, num_workers: int = 2) -> None:
    """Raise `AssertionError` for the first promise that a worker pool breaks.

    `worker_method` is the name of the pool in `DataLoader(worker_method=...)`. On loaders with `num_workers` workers
    and a seeded random dataset, the function checks that:

    - batches equal those without workers: over two epochs, with `persistent_workers`, after a resume in mid-epoch, and
      with `on_error="skip"`;
    - an exception of the dataset keeps its type, its arguments and the note with the sample's address, and is raised
      after all earlier batches;
    - closing a loader in mid-epoch ends every worker process and thread;
    - a future keeps its batch, also for a second `result()`, raises again after an error, and does not wait once the
      pool is closed; the statistics count the requests without an answer.
    """
    _check_batches(worker_method, num_workers)
    _check_resume(worker_method, num_workers)
    _check_errors(worker_method, num_workers)
    _check_closing(worker_method, num_workers)
    check_futures(find_pool(worker_method), num_workers)


def _loader(dataset: Any, method: str | None, num_workers: int, **options: Any) -> Any:
    if method is not None:
        options |= {"num_workers": num_workers, "worker_method": method}
    return DataLoader(dataset, _BATCH_SIZE, shuffle=True, seed=_SEED, **options)


def _check_batches(method: str, num_workers: int) -> None:
    with _loader(RandomSamples(), None, 0) as inline:
        expected = [list(inline), list(inline)]
    for options in ({}, {"persistent_workers": True, "prefetch_factor": 7}):
        with _loader(RandomSamples(), method, num_workers, **options) as loader:
            for epoch in (0, 1):
                _check_epoch(expected[epoch], list(loader), method, f"in epoch {epoch}, with {options or 'no options'}")


def _check_epoch(expected: Sequence[Any], got: Sequence[Any], method: str, when: str) -> None:
    promise = f"batches from {method!r} workers must equal those without workers, {when}"
    assert len(expected) == len(got), f"{promise}: {len(got)} batches in place of {len(expected)}"
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        check_same(one, other, f"{promise}, but batch {number} differs")


def _check_resume(method: str, num_workers: int) -> None:
    with _loader(RandomSamples(), None, 0) as inline:
        expected = list(inline)
    with _loader(RandomSamples(), method, num_workers) as cut, _loader(RandomSamples(), method, num_workers) as resumed:
        iterator = iter(cut)
        begun = [next(iterator) for _ in range(3)]
        resumed.load_state_dict(cut.state_dict())
        _check_epoch(expected, begun + list(resumed), method, "after a resume in mid-epoch")


def _check_errors(method: str, num_workers: int) -> None:
    with _loader(BrokenSamples(), None, 0) as inline:
        expected = _outcome(inline)
    with _loader(BrokenSamples(), method, num_workers) as loader:
        got = _outcome(loader)
    assert type(got.error) is type(expected.error), (
        f"an exception from {method!r} workers must keep its type: {expected.error!r} became {got.error!r}"
    )
    _check_epoch(expected.batches, got.batches, method, "before an exception")
    assert got.error.args == expected.error.args, (  # type: ignore[union-attr]
        f"an exception from {method!r} workers must keep its arguments: {expected.error!r} became {got.error!r}"
    )
    notes, missing = getattr(got.error, "__notes__", []), getattr(expected.error, "__notes__", [])
    assert all(note in notes for note in missing), (
        f"an exception from {method!r} workers must keep the notes that give the sample's address, "
        f"{missing}, but has {notes}"
    )
    with _loader(BrokenSamples(), None, 0, on_error="skip") as inline:
        batches = list(inline)
    with _loader(BrokenSamples(), method, num_workers, on_error="skip") as loader:
        _check_epoch(batches, list(loader), method, 'with on_error="skip"')


def _outcome(loader: Any) -> _EpochOutcome:
    batches: list[Any] = []
    try:
        batches.extend(loader)
    except Exception as error:  # noqa: BLE001 - it is compared
        return _EpochOutcome(batches, error)
    return _EpochOutcome(batches, None)


def _check_closing(method: str, num_workers: int) -> None:
    for persistent in (False, True):
        loader = _loader(ProcessAndThread(), method, num_workers, persistent_workers=persistent, collate_fn=list)
        iterator = iter(loader)
        places = {place for _ in range(5) for place in next(iterator)}
        loader.close()
        loader.close()
        _check_joined(method, places)


def _check_joined(method: str, places: set[tuple[int, int]]) -> None:
    processes = {pid for pid, _ in places if pid != os.getpid()}
    alive = sorted(pid for pid in processes if _is_alive(pid))
    assert not alive, f"close() must join every worker, but {method!r} workers still run as processes {alive}"
    idents = {ident for pid, ident in places if pid == os.getpid()} - {threading.get_ident()}
    names = [thread.name for thread in threading.enumerate() if thread.ident in idents]
    assert not names, f"close() must join every worker, but {method!r} workers still run as threads {names}"


def check_futures(kind: PoolKind, num_workers: int = 2) -> None:
    """Raise `AssertionError` for the first promise that a future breaks."""
    options = PoolOptions(num_workers, timeout_s=_LIMIT_S)
    try:
        with kind.open(BatchBuilder(BrokenSamples(), reseeds=False), options) as pool:
            _check_results(pool)
            _check_count(pool)
            left = [pool.submit(_request(number)) for number in range(_REQUESTS)]
        for future in left:
            assert future.done(), "result() must not wait after close(), but done() is False for a request in flight"
            with suppress(WorkerError):
                future.result()
    finally:
        options.retained.close()


def _check_results(pool: WorkerPool) -> None:
    future = pool.submit(_request(0))
    assert future.result() is future.result(), (
        "a second result() must return the same batch, because an interrupt may arrive before the first one is stored"
    )
    future = pool.submit(_request(1, _LENGTH))
    errors = [_error_of(future), _error_of(future)]
    assert isinstance(errors[0], BrokenSampleError), f"result() must raise the dataset's exception, not {errors[0]!r}"
    assert isinstance(errors[1], (BrokenSampleError, WorkerError)), (
        f"a second result() after an exception must raise it again, or a WorkerError, not {errors[1]!r}"
    )


def _error_of(future: BatchFuture) -> Exception | None:
    try:
        future.result()
    except Exception as error:  # noqa: BLE001 - it is compared
        return error
    return None


def _check_count(pool: WorkerPool) -> None:
    """Compare the number of requests in flight with the futures."""
    futures = [pool.submit(_request(number)) for number in range(_REQUESTS)]
    while True:
        count, waiting = pool.statistics().in_flight, sum(not future.done() for future in futures)
        assert waiting <= count <= len(futures), (
            f"statistics().in_flight must be the number of requests without an answer: it is {count}, but {waiting} of"
            f" {len(futures)} futures are not done"
        )
        if not futures:
            return
        futures.pop(0).result()


def _request(number: int, length: int = _BROKEN) -> BatchRequest:
    return BatchRequest(0, number, 0, length, np.arange(length), range(length), _SEED)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
