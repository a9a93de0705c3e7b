"""Behavior of every process pool, for all ways to start workers."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from diagonals import at_night
from process_cases import (
    BATCH_SIZE,
    Acting,
    Call,
    Counting,
    Facts,
    Gate,
    Squares,
    launcher_of,
    pools,
    request,
    squares,
    squares_of,
)

from feedline.core.batch import EMPTY_BATCH
from feedline.core.cursor import PartitionOffset
from feedline.core.schedule import BatchRequest, PartitionRequest
from feedline.core.telemetry import Span
from feedline.errors import ArgumentError, WorkerError
from feedline.loader.building.builder import BatchBuilder, allocate_tensor
from feedline.loader.building.partition_builder import PartitionBuilder
from feedline.loader.report.stats import is_wall
from feedline.workers.base import WorkerPool
from feedline.workers.process import channels, fork_server, zygote
from feedline.workers.process.pool import ProcessPool

OpenPool = Callable[..., ProcessPool]


@pytest.fixture
def helpers() -> None:
    """The fork server, and multiprocessing's helpers, live as long as this process: they are no debris."""
    fork_server.start()
    resource_tracker.ensure_running()
    forkserver.ensure_running()


@pytest.fixture
def open_pool(helpers: None, no_debris: Any) -> Iterator[OpenPool]:
    """Pools over zygotes, closed at the end; no test may leave anything."""
    yield from pools()


def typed(pool: ProcessPool) -> WorkerPool:
    """For the type checker: a pool has the type that the loop requires."""
    return pool


@pytest.mark.parametrize("kind", ["snapshot", "zygote"])
def test_batches_are_what_they_are_inline(open_pool: OpenPool, kind: str) -> None:
    """`tests/conformance/test_torch_arguments.py` compares those of each start method of multiprocessing."""
    builder = BatchBuilder(Squares())
    pool = open_pool(builder, 2, kind=kind)
    futures = [pool.submit(request(number)) for number in range(12)]
    for future in futures:
        inline = builder(future.request, allocate_tensor)
        assert torch.equal(future.result().batch, inline.batch)


def test_every_batch_reports_its_stages_and_worker(open_pool: OpenPool) -> None:
    spans = [Span(*span) for span in open_pool(squares(), 1).submit(request(0)).result().spans if is_wall(span[0])]
    assert [span.stage for span in spans] == ["fetch", "collate", "serialize", "receive"]
    assert [span.worker for span in spans] == [0, 0, 0, -1]
    assert all(span.start_ns <= span.stop_ns for span in spans)
    assert [span.start_ns for span in spans] == sorted(span.start_ns for span in spans)


@pytest.mark.parametrize("kind", ["snapshot", "zygote"])
def test_the_idle_worker_takes_the_next_request(open_pool: OpenPool, tmp_path: Path, kind: str) -> None:
    gate = Gate(tmp_path)
    pool = open_pool(squares({0: gate}), 2, kind=kind)
    blocked = pool.submit(request(0))
    gate.wait_for()
    others = [pool.submit(request(number)) for number in range(1, 9)]
    assert [squares_of(future.result().batch)[0] for future in others] == [BATCH_SIZE * n for n in range(1, 9)]
    assert not blocked.done()
    gate.open()
    assert squares_of(blocked.result().batch)[0] == 0


def test_wait_any_gives_what_is_done_first(open_pool: OpenPool, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    pool = open_pool(squares({0: gate}), 2)
    futures = [pool.submit(request(number)) for number in range(3)]
    gate.wait_for()
    first = pool.wait_any(futures)
    second = pool.wait_any([future for future in futures if future is not first])
    assert {first.request.number, second.request.number} == {1, 2}
    gate.open()
    assert pool.wait_any([futures[0]]) is futures[0]


def test_a_result_can_be_taken_again_after_an_interrupt(open_pool: OpenPool) -> None:
    future = open_pool(squares(), 1).submit(request(0))
    assert future.result() is future.result()
    future.cancel()
    with pytest.raises(WorkerError, match="was canceled"):
        future.result()


def test_requests_and_batches_may_be_large(open_pool: OpenPool) -> None:
    class Wide(Squares):
        def __getitem__(self, index: int) -> Any:
            return torch.full((100,), index)

    size = 20_000
    pool = open_pool(BatchBuilder(Wide(1 << 20)), 2)
    for future in [pool.submit(request(number, size)) for number in range(6)]:
        batch = future.result().batch
        assert batch[:, 7].tolist() == future.request.indices.tolist()


def test_more_requests_than_the_socket_holds(open_pool: OpenPool, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    pool = open_pool(squares({0: gate}), 1)
    futures = [pool.submit(request(number)) for number in range(1500)]
    gate.wait_for()
    gate.open()
    assert [squares_of(future.result().batch)[0] // BATCH_SIZE for future in futures[::50]] == list(range(0, 1500, 50))
    assert pool.statistics().in_flight < 1500


def test_canceled_requests_are_not_built(open_pool: OpenPool, tmp_path: Path) -> None:
    gate, mark = Gate(tmp_path), tmp_path / "built"
    pool = open_pool(squares({0: gate, 12: Call(mark.touch)}), 1)
    futures = [pool.submit(request(number)) for number in range(4)]
    gate.wait_for()
    for future in futures:
        future.cancel()
    assert pool.statistics().in_flight == 0
    last = pool.submit(request(5))
    gate.open()
    assert squares_of(last.result().batch)[0] == 5 * BATCH_SIZE
    assert not mark.exists()
    assert pool.statistics().in_flight == 0
    with pytest.raises(WorkerError, match="canceled"):
        futures[0].result()


def test_a_canceled_result_frees_its_memory(open_pool: OpenPool) -> None:
    class Wide(Squares):
        def __getitem__(self, index: int) -> Any:
            return torch.full((1 << 16,), index)

    pool = open_pool(BatchBuilder(Wide()), 1)
    future = pool.submit(request(0))
    assert pool.wait_any([future]) is future
    assert pool.statistics().lent_nbytes > 0
    future.cancel()
    assert pool.statistics().lent_nbytes == 0


@pytest.mark.parametrize("kind", ["snapshot", "zygote"])
def test_it_grows_and_shrinks_while_it_works(open_pool: OpenPool, kind: str) -> None:
    pool = open_pool(squares(), 1, kind=kind)
    numbers = iter(range(200))
    seen = []
    for size in (3, 1, 4, 2):
        futures = [pool.submit(request(next(numbers))) for _ in range(10)]
        pool.resize(size)
        seen += [squares_of(future.result().batch)[0] // BATCH_SIZE for future in futures]
        while pool.statistics().workers != size:
            pool.submit(request(0)).result()
    assert seen == list(range(40))
    assert pool.statistics().restarts == 0


@pytest.mark.parametrize("size", [0, -1, 100_000])
def test_a_size_that_cannot_be(open_pool: OpenPool, size: int) -> None:
    with pytest.raises(ArgumentError, match="between 1 and"):
        open_pool(squares(), 1).resize(size)


def test_statistics(open_pool: OpenPool) -> None:
    class Wide(Squares):
        def __getitem__(self, index: int) -> Any:
            return torch.full((1 << 16,), index)

    pool = open_pool(BatchBuilder(Wide()), 2)
    pids = sorted(process.pid for process in pool.processes if process.pid is not None)  # waits until both have started
    statistics = pool.statistics()
    assert (statistics.workers, statistics.in_flight, statistics.restarts) == (2, 0, 0)
    assert sorted(statistics.pids) == pids
    future = pool.submit(request(0))
    assert pool.statistics().in_flight == 1
    built = future.result()
    statistics = pool.statistics()
    assert statistics.in_flight == 0
    assert statistics.arena_nbytes >= statistics.lent_nbytes >= built.batch.nbytes
    del built, future
    assert pool.statistics().lent_nbytes == 0


def test_figures_and_pids_do_not_wait_for_a_batch(open_pool: OpenPool, tmp_path: Path) -> None:
    """Another thread waits for a batch at the same time."""
    gate = Gate(tmp_path)
    pool = open_pool(squares({0: gate}), 2)
    future = pool.submit(request(0))
    waiting = threading.Thread(target=future.result)
    waiting.start()
    gate.wait_for()
    assert pool.statistics().in_flight == 1
    assert [process.pid is not None for process in pool.processes] == [True, True]
    assert [process.exitcode for process in pool.processes] == [None, None]
    gate.open()
    waiting.join()


@pytest.mark.parametrize("kind", ["snapshot", "zygote", *at_night("spawn", "forkserver")])
def test_workers_are_what_torchs_are(open_pool: OpenPool, kind: str) -> None:
    """Equal seeding, one thread, daemons that ignore Ctrl-C."""
    (torchs,) = torch.utils.data.DataLoader(Facts(), batch_size=None, sampler=[0], num_workers=1)
    pool = open_pool(BatchBuilder(Facts(), list), 1, kind=kind, base_seed=torchs["seed"])
    fact = pool.submit(request(0, 1)).result().batch[0]
    assert fact["draws"] == torchs["draws"]
    assert fact.pop("interrupt") == signal.SIG_IGN
    assert fact.pop("terminate") == signal.SIG_DFL
    assert fact.pop("pid") == pool.processes[0].pid
    assert fact == {name: torchs[name] for name in fact}


@pytest.mark.parametrize("kind", ["snapshot", "zygote"])
def test_worker_init_fn(open_pool: OpenPool, tmp_path: Path, kind: str) -> None:
    def init(worker_id: int) -> None:
        (tmp_path / f"{worker_id}").touch()

    pool = open_pool(squares(), 2, kind=kind, init_fn=init)
    pool.submit(request(0)).result()
    pool.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_partitions_stay_with_their_worker(open_pool: OpenPool) -> None:
    pool = open_pool(PartitionBuilder(Counting(), batch_size=5), 2, round_robin=True)
    futures = [pool.submit(partition_request(partition, number)) for number in range(5) for partition in range(3)]
    batches: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    workers: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    for future in futures:
        built = future.result()
        batches[future.request.partition].append(None if built.batch is EMPTY_BATCH else built.batch.tolist())
        workers[future.request.partition].add(built.spans[0][-1])
    assert workers == {0: {0}, 1: {1}, 2: {0}}
    for partition, drawn in batches.items():
        base = 1000 * partition
        assert drawn == [*([*range(base + 5 * k, base + 5 * k + 5)] for k in range(4)), None]


def test_partitions_survive_another_number_of_workers(open_pool: OpenPool) -> None:
    pool = open_pool(PartitionBuilder(Counting(), batch_size=5), 1, round_robin=True)
    seen = []
    for number, size in enumerate((3, 2, 1, 2)):
        futures = [pool.submit(partition_request(partition, number)) for partition in range(3)]
        pool.resize(size)
        seen.append([future.result().batch[0].item() for future in futures])
    assert seen == [[5 * number, 1000 + 5 * number, 2000 + 5 * number] for number in range(4)]


def partition_request(partition: int, number: int) -> PartitionRequest:
    return PartitionRequest(0, number, partition, 3, PartitionOffset(), None)


def test_closing_twice_is_closing_once(open_pool: OpenPool) -> None:
    pool = open_pool(squares(), 2)
    pids = [process.pid for process in pool.processes]
    pool.submit(request(0)).result()  # workers that are still starting are killed
    pool.close()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert [process.is_alive() for process in pool.processes] == [False, False]
    assert [process.exitcode for process in pool.processes] == [0, 0]
    with pytest.raises(WorkerError, match="have been closed"):
        pool.submit(request(0))


def test_leaving_with_requests_in_flight(open_pool: OpenPool, tmp_path: Path, monkeypatch: Any) -> None:
    mark = tmp_path / "built"
    gate = Gate(tmp_path)
    pool = open_pool(squares({0: gate, 40: Call(mark.touch)}), 1)
    futures = [pool.submit(request(number)) for number in range(20)]
    gate.wait_for()
    worker_set = pool._dispatch.worker_set
    shut_down = worker_set.close

    def close(grace_s: float) -> None:  # batches that were not taken can no longer be taken
        gate.open()
        shut_down(grace_s)

    monkeypatch.setattr(worker_set, "close", close)
    pool.close()
    assert not mark.exists()
    with pytest.raises(WorkerError, match="have been closed"):
        futures[10].result()


def test_a_worker_that_does_not_finish_is_killed(open_pool: OpenPool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("feedline.workers.process.pool.GRACE_S", 0.1)
    gate = Gate(tmp_path)
    pool = open_pool(squares({0: gate}), 1)
    pool.submit(request(0))
    gate.wait_for()
    pool.close()
    assert pool.processes[0].exitcode == -9


def test_kept_batches_outlive_their_pool(open_pool: OpenPool) -> None:
    class Wide(Squares):
        def __getitem__(self, index: int) -> Any:
            return torch.full((1 << 14,), index)

    pool = open_pool(BatchBuilder(Wide()), 2)
    batches = [pool.submit(request(number)).result().batch for number in range(4)]
    pool.close()
    assert [batch[:, -1].tolist() for batch in batches] == [[*range(4 * n, 4 * n + 4)] for n in range(4)]


def test_an_arena_grows_for_a_user_who_keeps_batches(open_pool: OpenPool) -> None:
    class Wide(Squares):
        def __getitem__(self, index: int) -> Any:
            return np.full(1 << 13, index)

    pool = open_pool(BatchBuilder(Wide()), 1)
    kept = [pool.submit(request(number)).result().batch for number in range(100)]
    assert [int(batch[0, 0]) for batch in kept] == list(range(0, 400, 4))
    assert pool.statistics().lent_nbytes >= sum(batch.nbytes for batch in kept)


def test_one_launcher_serves_two_pools_at_once(open_pool: OpenPool) -> None:
    launcher = launcher_of("zygote", squares())
    with ProcessPool(launcher, 1) as first, ProcessPool(launcher, 1) as second:
        futures = [pool.submit(request(number)) for number in range(6) for pool in (first, second)]
        launcher.close()  # the pools go on
        seen = [squares_of(future.result().batch)[0] // BATCH_SIZE for future in futures]
    assert seen == [number for number in range(6) for _ in range(2)]


def test_a_launcher_knows_whether_it_still_serves(open_pool: OpenPool) -> None:
    dataset = Acting({})
    launcher = launcher_of("zygote", BatchBuilder(dataset))
    assert launcher.matches(BatchBuilder(dataset))
    dataset.length += 1
    assert not launcher.matches(BatchBuilder(dataset))
    launcher.close()


def test_several_threads_may_use_one_pool(open_pool: OpenPool) -> None:
    pool = open_pool(squares(), 2)
    seen: list[list[int]] = [[], [], []]

    def loop(which: int) -> None:
        for number in range(30):
            seen[which] += squares_of(pool.submit(request(number + 30 * which)).result().batch)

    threads = [threading.Thread(target=loop, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [list(range(120 * which, 120 * which + 120)) for which in range(3)]


def test_closing_while_another_thread_waits(open_pool: OpenPool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("feedline.workers.process.pool.GRACE_S", 0.1)
    gate = Gate(tmp_path)
    pool = open_pool(squares({0: gate}), 1)
    future = pool.submit(request(0))
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            future.result()
        except WorkerError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    gate.wait_for()
    pool.close()
    waiting.join()
    assert "have been closed" in str(errors[0])


def test_a_forked_child_of_the_users_leaves_the_pool_alone(open_pool: OpenPool) -> None:
    pool = open_pool(squares(), 1)
    pool.submit(request(0)).result()
    pid = os.fork()
    if pid == 0:
        try:
            pool.submit(request(1))
        except WorkerError as error:
            pool.close()
            os._exit(0 if "forked from it" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert squares_of(pool.submit(request(2)).result().batch)[0] == 2 * BATCH_SIZE


def test_a_forked_child_of_the_users_gets_workers_of_its_own(open_pool: OpenPool) -> None:
    launcher = launcher_of("zygote", squares())
    with ProcessPool(launcher, 1) as pool:
        pool.submit(request(0)).result()
        pid = os.fork()
        if pid == 0:
            try:
                with ProcessPool(launcher, 1) as own:
                    found = squares_of(own.submit(request(1)).result().batch)[0]
                launcher.close()
                fork_server.stop()
                os._exit(0 if found == BATCH_SIZE else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert squares_of(pool.submit(request(2)).result().batch)[0] == 2 * BATCH_SIZE
    launcher.close()


def test_a_pool_that_is_never_closed_lets_its_workers_go(open_pool: OpenPool) -> None:
    launcher = launcher_of("zygote", squares())
    pool = ProcessPool(launcher, 1)
    pool.submit(request(0)).result()
    process = pool.processes[0]
    assert process.is_alive()
    launcher.close()
    del pool
    gc.collect()
    assert not process.is_alive()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("ask", ["pids", "is_alive"])
def test_garbage_collection_may_close_a_pool_at_any_allocation(open_pool: OpenPool, monkeypatch: Any, ask: str) -> None:
    launcher = launcher_of("zygote", squares())
    pool = ProcessPool(launcher, 1)
    pool.submit(request(0)).result()
    process, workers = pool.processes[0], pool._dispatch.worker_set
    gc.disable()
    try:
        dropped = Cycle()
        weakref.finalize(dropped, pool.close)  # as an iteration does
        del dropped
        receive, dup = channels.ReceiveBuffer.receive, os.dup  # called while the locks are held

        def collect(then: Callable[..., Any], *arguments: Any) -> Any:
            gc.collect()
            return then(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(channels.ReceiveBuffer, "receive", lambda *given: collect(receive, *given))
            patch.setattr(zygote.os, "dup", partial(collect, dup))
            assert workers.pids() == [process.pid] if ask == "pids" else process.is_alive()
    finally:
        gc.enable()
    process.join()
    assert not process.is_alive()
    for thread in threading.enumerate():
        if thread.name == "feedline-finalizer":
            thread.join()
    launcher.close()


def test_the_request_itself_may_be_anything(open_pool: OpenPool) -> None:
    pool = open_pool(BatchBuilder({("a", 1): 5, "b": 6}, list), 1)
    odd = BatchRequest(0, 0, 0, 2, [("a", 1), "b"], range(2), None)
    assert pool.submit(odd).result().batch == [5, 6]
    with pytest.raises(TypeError, match="pickle"):
        pool.submit(odd._replace(indices=[threading.Lock()]))
    assert pool.submit(odd).result().batch == [5, 6]
