"""Workers that die: the stream does not change, or the error names the cause of death."""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from process_cases import (
    BATCH_SIZE,
    GONE_WITHIN_S,
    Acting,
    Call,
    Counting,
    Gate,
    Once,
    Squares,
    complain_and_exit,
    exhaust_memory,
    interrupt,
    kill_self,
    leave,
    numbers,
    pools,
    request,
    segfault,
    squares,
    squares_of,
)

from feedline.core.batch import EMPTY_BATCH
from feedline.core.cursor import PartitionOffset
from feedline.core.schedule import PartitionRequest
from feedline.errors import FeedlineError, WorkerDiedError, WorkerError
from feedline.loader.building.builder import BatchBuilder
from feedline.loader.building.partition_builder import PartitionBuilder
from feedline.workers.base import Recovery
from feedline.workers.process import fork_server
from feedline.workers.process.pool import ProcessPool

OpenPool = Callable[..., ProcessPool]
TORCHS_PHRASE = r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly"


@pytest.fixture
def open_pool(no_debris: Any) -> Iterator[OpenPool]:
    fork_server.start()
    yield from pools()


@pytest.mark.parametrize(
    ("act", "kind"),
    # The way a worker was forked matters only where its parent waits for it: after a signal, or a status.
    [
        *((act, "snapshot") for act in (kill_self, complain_and_exit, segfault, leave, interrupt)),
        *((kill_self, "zygote"), (leave, "zygote")),
    ],
)
def test_a_death_costs_nothing(
    open_pool: OpenPool, tmp_path: Path, caplog: Any, kind: str, act: Callable[[], object]
) -> None:
    pool = open_pool(squares({13: Once(tmp_path, act)}), kind=kind)
    assert numbers(pool, 20) == list(range(20))
    assert pool.statistics().restarts == 1
    assert pool.statistics().workers == 2
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("feedline", logging.WARNING)
    assert re.search(TORCHS_PHRASE + ".* at sample 13 .*Deaths in this epoch: 1 of 3", record.message, re.DOTALL)


@pytest.mark.parametrize("kind", ["snapshot", "zygote"])
def test_the_death_of_an_idle_worker(open_pool: OpenPool, kind: str) -> None:
    pool = open_pool(squares(), kind=kind)
    assert numbers(pool, 4) == list(range(4))
    victim = pool.processes[0]
    victim.kill()
    victim.join()
    assert numbers(pool, 8) == list(range(8))
    while pool.statistics().restarts == 0:
        numbers(pool, 1)
    assert victim.exitcode == -signal.SIGKILL
    assert victim not in pool.processes
    assert [process.is_alive() for process in pool.processes] == [True, True]


def test_all_workers_at_once(open_pool: OpenPool, tmp_path: Path) -> None:
    gates = [Gate(tmp_path, f"gate{n}") for n in range(3)]
    pool = open_pool(squares({BATCH_SIZE * n: Once(tmp_path, gates[n], f"{n}") for n in range(3)}), 3)
    futures = [pool.submit(request(number)) for number in range(12)]
    for gate in gates:
        os.kill(gate.wait_for(), signal.SIGKILL)
    assert [squares_of(future.result().batch)[0] // BATCH_SIZE for future in futures] == list(range(12))


def test_partitions_go_on_where_they_were(open_pool: OpenPool, tmp_path: Path) -> None:
    flag = tmp_path / "died"

    class Dying(Counting):
        def __iter__(self) -> Iterator[int]:
            for value in super().__iter__():
                if value == 1012 and not flag.exists():
                    flag.touch()
                    kill_self()
                yield value

    pool = open_pool(PartitionBuilder(Dying(), batch_size=5), 2, round_robin=True)
    futures = [
        pool.submit(PartitionRequest(0, n, partition, 2, PartitionOffset(), None))
        for n in range(5)
        for partition in range(2)
    ]
    seen: list[Any] = []
    for future in futures:
        batch = future.result().batch
        seen.append(None if batch is EMPTY_BATCH else batch[0].item())
    assert seen == [0, 1000, 5, 1005, 10, 1010, 15, 1015, None, None]


def test_the_budget(open_pool: OpenPool, tmp_path: Path) -> None:
    acts = {BATCH_SIZE * n: Once(tmp_path, kill_self, f"{n}") for n in range(3)}
    pool = open_pool(squares(acts), 1, recovery=Recovery(deaths_per_epoch=2))
    futures = [pool.submit(request(number)) for number in range(3)]
    assert squares_of(futures[0].result().batch)[0] == 0
    assert squares_of(futures[1].result().batch)[0] == BATCH_SIZE
    with pytest.raises(WorkerDiedError, match=TORCHS_PHRASE) as caught:
        futures[2].result()
    assert re.search(r"SIGKILL.*batch 2 of epoch 0 .*at sample 8 \(epoch 0, position 8\)", str(caught.value))
    assert "Something outside killed it" in str(caught.value)
    with pytest.raises(WorkerDiedError):
        pool.submit(request(3))


def test_the_budget_is_for_one_epoch(open_pool: OpenPool, tmp_path: Path) -> None:
    acts = {BATCH_SIZE * n: Once(tmp_path, kill_self, f"{n}") for n in range(4)}
    pool = open_pool(squares(acts), 1, recovery=Recovery(deaths_per_epoch=1))
    for epoch in range(4):
        assert squares_of(pool.submit(request(epoch, epoch=epoch)).result().batch)[0] == BATCH_SIZE * epoch


def test_no_budget(open_pool: OpenPool, tmp_path: Path) -> None:
    pool = open_pool(squares({0: Once(tmp_path, kill_self)}), 1, recovery=Recovery(deaths_per_epoch=0))
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        pool.submit(request(0)).result()


DEATHS = [
    (kill_self, r"killed by signal SIGKILL \(Killed\)", "Something outside killed it"),
    (segfault, r"killed by signal SIGSEGV.*Its last stack:\n.*in segfault", "Native code has crashed"),
    (complain_and_exit, r"exited with code 3.*wrote to stderr:\nthe very last words", "os._exit"),
    (leave, "exited with code 5", "sys.exit"),
    (interrupt, "exited with code 1.*KeyboardInterrupt", "sys.exit"),
]


@pytest.mark.parametrize(("act", "how", "remedy"), DEATHS)
def test_the_sample_that_kills_is_named(open_pool: OpenPool, act: Callable[[], object], how: str, remedy: str) -> None:
    pool = open_pool(squares({14: act}))
    futures = [pool.submit(request(number, 16)) for number in range(6)]
    with pytest.raises(WorkerDiedError) as caught:
        futures[0].result()
    message = str(caught.value)
    assert re.search(TORCHS_PHRASE + ".*" + how, message, re.DOTALL)
    assert "sample 14 (epoch 0, position 14) kills a worker by itself" in message
    assert remedy in message
    for future in futures[1:]:
        assert squares_of(future.result().batch)[0] == 16 * future.request.number


def test_samples_that_kill_can_be_left_out(open_pool: OpenPool) -> None:
    pool = open_pool(squares({3: kill_self, 9: segfault, 10: leave}, action="skip"))
    futures = [pool.submit(request(number, 8)) for number in range(4)]
    results = [future.result() for future in futures]
    assert [i for built in results for i in squares_of(built.batch)] == [i for i in range(32) if i not in (3, 9, 10)]
    skipped = [(skip.index, skip.position, skip.error) for built in results for skip in built.skipped]
    assert [(index, position) for index, position, _ in skipped] == [(3, 3), (9, 9), (10, 10)]
    assert "SIGKILL" in skipped[0][2]


def test_a_batch_of_nothing_but_killers(open_pool: OpenPool) -> None:
    pool = open_pool(squares({0: kill_self, 1: kill_self}, action="skip"), 1)
    built = pool.submit(request(0, 2)).result()
    assert built.batch is EMPTY_BATCH
    assert [skip.index for skip in built.skipped] == [0, 1]


def test_a_batch_that_kills_only_as_a_whole(open_pool: OpenPool) -> None:
    def collate(samples: list[Any]) -> Any:
        return kill_self() if len(samples) == 8 else samples

    pool = open_pool(BatchBuilder(Squares(), collate), 1)
    with pytest.raises(WorkerDiedError, match="none of its samples does so alone"):
        pool.submit(request(0, 8)).result()
    assert len(pool.submit(request(0, 7)).result().batch) == 7


def test_a_partition_that_kills(open_pool: OpenPool) -> None:
    class Dying(Counting):
        def __iter__(self) -> Iterator[int]:
            yield 1
            kill_self()

    pool = open_pool(PartitionBuilder(Dying(), batch_size=5), 1, round_robin=True)
    with pytest.raises(WorkerDiedError, match=r"batch 0 of partition 0 of 1.*at its sample 1"):
        pool.submit(PartitionRequest(0, 0, 0, 1, PartitionOffset(), None)).result()


def test_bad_luck_is_not_held_against_a_request(open_pool: OpenPool, tmp_path: Path) -> None:
    """A request whose workers are killed twice from outside is built nevertheless."""
    pool = open_pool(squares({0: Once(tmp_path, kill_self, "a"), 1: Once(tmp_path, kill_self, "b")}, action="skip"), 1)
    built = pool.submit(request(0)).result()
    assert squares_of(built.batch) == [0, 1, 2, 3]
    assert built.skipped == ()
    assert pool.statistics().restarts == 2


def test_bad_luck_counts(open_pool: OpenPool, tmp_path: Path) -> None:
    acts = {0: Once(tmp_path, kill_self, "a"), 1: Once(tmp_path, kill_self, "b")}
    pool = open_pool(squares(acts), 1, recovery=Recovery(deaths_per_epoch=1))
    with pytest.raises(WorkerDiedError, match="Something outside killed it"):
        pool.submit(request(0)).result()


def test_a_canceled_request_is_not_taken_apart(open_pool: OpenPool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    pool = open_pool(squares({5: Call(_log_and_die, str(log))}), 1)
    future = pool.submit(request(0, 32))
    while pool.statistics().restarts < 2:
        future.done()
    future.cancel()
    assert squares_of(pool.submit(request(3)).result().batch)[0] == 12
    assert log.read_text() == "xx"


def _log_and_die(path: str) -> None:
    with open(path, "a") as log:
        log.write("x")
    kill_self()


@pytest.mark.parametrize("kind", ["snapshot", "zygote"])
def test_a_worker_that_closes_everything_is_replaced(open_pool: OpenPool, tmp_path: Path, kind: str) -> None:
    gate = Gate(tmp_path)
    pool = open_pool(squares({2: Once(tmp_path, Call(_close_and, gate))}), 1, kind=kind)
    future = pool.submit(request(0))
    gate.wait_for()
    assert squares_of(future.result().batch)[0] == 0


def _close_and(gate: Gate) -> None:
    os.closerange(3, 200)
    gate()


@pytest.mark.parametrize("which", ["snapshot", "zygote", "fork server"])
def test_the_death_of_what_they_were_forked_from(open_pool: OpenPool, which: str) -> None:
    kind = "snapshot" if which == "snapshot" else "zygote"
    pool = open_pool(squares(), 2, kind=kind, recovery=Recovery(deaths_per_epoch=1))
    futures = [pool.submit(request(number)) for number in range(20)]
    assert squares_of(futures[0].result().batch)[0] == 0
    workers = [psutil.Process(process.pid) for process in pool.processes]
    forker = workers[1].parent()  # the first worker of a snapshot is a child of this process
    assert forker is not None
    victim = forker.parent() if which == "fork server" else forker
    assert victim is not None
    victim.kill()
    seen = [squares_of(future.result().batch)[0] // BATCH_SIZE for future in futures[1:]]
    assert seen == list(range(1, 20))
    while pool.statistics().restarts == 0:
        numbers(pool, 1)
    assert numbers(pool, 4) == list(range(4))
    psutil.wait_procs(workers, GONE_WITHIN_S)
    assert not any(worker.is_running() for worker in workers)


def test_a_fork_server_that_cannot_start_is_an_error(open_pool: OpenPool, monkeypatch: Any) -> None:
    fork_server.stop()
    monkeypatch.setattr("feedline.workers.process.fork_server._BOOT", "raise SystemExit(4)")
    pool = open_pool(squares(), 2, kind="zygote")
    with pytest.raises(WorkerDiedError, match=r"has ended with exit code 4; .*set_executable"):
        numbers(pool, 1)
    monkeypatch.undo()
    fork_server.stop()


def test_a_program_that_embeds_python_and_names_no_interpreter() -> None:
    fork_server.stop()
    former = spawn.get_executable()
    for executable, text in (("", "sys.executable is empty"), ("/no/such/python", "need a Python interpreter")):
        spawn.set_executable(executable)
        try:
            with pytest.raises((WorkerError, FileNotFoundError)) as caught:
                fork_server.start()
        finally:
            spawn.set_executable(former)
        message = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
        assert text in message
        assert "multiprocessing.set_executable" in message
    fork_server.start()


def test_an_error_on_the_way_into_the_worker(open_pool: OpenPool) -> None:
    class Refusing(Squares):
        def __setstate__(self, state: Any) -> None:
            raise FileNotFoundError(2, "no such shard", "train-0042.tar")

    pool = open_pool(BatchBuilder(Refusing()), kind="zygote")
    with pytest.raises(FileNotFoundError, match="no such shard") as caught:
        numbers(pool, 1)
    assert caught.value.filename == "train-0042.tar"
    assert any("__setstate__" in note for note in caught.value.__notes__)
    with pytest.raises(FileNotFoundError):
        pool.submit(request(1))


def test_an_interrupt_in_the_wrong_moment_costs_nothing(open_pool: OpenPool, monkeypatch: Any) -> None:
    pool = open_pool(squares(), 2)
    futures = [pool.submit(request(number)) for number in range(30)]
    inboxes = {id(member.inbox): member.inbox for member in pool._dispatch.worker_set.members.values()}
    interrupted: list[int] = []
    for inbox in inboxes.values():
        monkeypatch.setattr(inbox, "loads", Call(_interrupt_once, interrupted, inbox.loads))
    with pytest.raises(KeyboardInterrupt):
        futures[0].result()
    assert [squares_of(future.result().batch)[0] // BATCH_SIZE for future in futures] == list(range(30))
    assert pool.statistics().restarts == 0
    assert pool.statistics().workers == 2


def _interrupt_once(interrupted: list[int], loads: Callable[..., Any], *arguments: Any) -> Any:
    if not interrupted:
        interrupted.append(1)
        raise KeyboardInterrupt
    return loads(*arguments)


def test_memory_that_runs_out_within_a_limit(open_pool: OpenPool) -> None:
    pool = open_pool(squares({6: exhaust_memory}))
    futures = [pool.submit(request(number)) for number in range(4)]
    with pytest.raises(MemoryError) as caught:
        futures[1].result()
    assert any("position 6" in note for note in caught.value.__notes__)
    assert squares_of(futures[2].result().batch)[0] == 8
    assert pool.statistics().restarts == 0


class Odd(Exception):
    """Two arguments, but `args` holds one."""

    def __init__(self, shard: str, offset: int) -> None:
        super().__init__(f"{shard} at {offset}")
        self.offset = offset


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("nothing to say")

    def __reduce__(self) -> Any:
        raise ValueError("nothing to give")


def fail(make: Callable[[], BaseException]) -> None:
    raise make()


def make_local() -> BaseException:
    class Local(Exception):
        pass

    return Local("here")


ERRORS: list[Callable[[], BaseException]] = [
    Call(ValueError, "plain"),
    Call(KeyError, "missing"),
    Call(OSError, 2, "gone", "file"),
    Call(Odd, "train.tar", 17),
    Call(UnicodeDecodeError, "utf-8", b"\xff", 0, 1, "bad"),
    Locked,
    Silent,
    make_local,
    Call(StopIteration, 3),
    Call(FeedlineError, "ours"),
]


@pytest.mark.parametrize("kind", ["snapshot", "zygote"])
def test_exceptions_keep_type_and_arguments(open_pool: OpenPool, kind: str) -> None:
    """The errors of every second batch, one after the other, from the same workers."""
    acts = {8 * number + 5: Call(fail, make) for number, make in enumerate(ERRORS)}
    pool = open_pool(BatchBuilder(Acting(acts)), kind=kind)
    futures = [pool.submit(request(number)) for number in range(2 * len(ERRORS) + 1)]
    for number, make in enumerate(ERRORS):
        with pytest.raises(BaseException) as caught:  # noqa: PT011 - its type is what is tested
            futures[2 * number + 1].result()
        assert_kept(caught.value, make, position=8 * number + 5)
        assert squares_of(futures[2 * number + 2].result().batch)[0] == 8 * number + 8


def assert_kept(found: BaseException, make: Callable[[], BaseException], position: int) -> None:
    error = make()
    if make is not make_local:
        assert type(found) is type(error)
        assert found.args == error.args
    assert type(found).__name__ == type(error).__name__
    if isinstance(error, Odd):
        assert isinstance(found, Odd)
        assert found.offset == 17
    last = found.__notes__[-1]
    assert re.match(rf"Caught {type(error).__name__} in DataLoader worker process \d\.\nOriginal Traceback", last)
    assert "process_cases.py" in last
    assert sum(f"position {position}" in note for note in found.__notes__) == 1


def test_an_exception_of_worker_init_fn_meets_every_request(open_pool: OpenPool) -> None:
    def init(worker_id: int) -> None:
        raise RuntimeError(f"worker {worker_id} cannot start")

    pool = open_pool(squares(), 1, init_fn=init)
    for number in range(3):
        with pytest.raises(RuntimeError, match="worker 0 cannot start") as caught:
            pool.submit(request(number)).result()
        assert "feedline: raised by worker_init_fn" in caught.value.__notes__
    assert pool.statistics().restarts == 0


def test_a_worker_init_fn_that_exits(open_pool: OpenPool) -> None:
    pool = open_pool(squares(), 1, init_fn=lambda _: os._exit(9))
    with pytest.raises(WorkerDiedError, match="exited with code 9"):
        pool.submit(request(0)).result()


def test_a_batch_that_cannot_be_sent(open_pool: OpenPool) -> None:
    pool = open_pool(BatchBuilder(Squares(), lambda samples: {"lock": threading.Lock()}), 1)
    with pytest.raises(TypeError, match="lock"):
        pool.submit(request(0)).result()


def test_a_batch_that_cannot_be_received(open_pool: OpenPool) -> None:
    class Bad:
        def __reduce__(self) -> Any:
            return fail, (Call(ZeroDivisionError, "on arrival"),)

    pool = open_pool(BatchBuilder(Squares(), lambda samples: Bad()), 1)
    for number in range(2):
        with pytest.raises(ZeroDivisionError, match="on arrival") as caught:
            pool.submit(request(number)).result()
        assert f"batch {number}" in caught.value.__notes__[-1]


class Rows:
    """Samples that are too large for a message, so that batches of them are in slots."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 << 16,), index)


@pytest.mark.parametrize("kind", ["snapshot", "zygote"])
@pytest.mark.parametrize("wanted", [True, False])
def test_an_answer_that_is_heard_of_together_with_the_death_of_its_worker(
    open_pool: OpenPool, kind: str, wanted: bool
) -> None:
    """The batch is in a slot that was sent with an earlier one."""
    pool = open_pool(BatchBuilder(Rows()), workers=1, kind=kind)
    for number in range(2):
        assert pool.submit(request(number)).result().batch[0, 0] == number * BATCH_SIZE
    worker_set = pool._dispatch.worker_set
    (member,) = worker_set.members.values()
    future = pool.submit(request(2))
    assert select.select([member.answers], [], [], GONE_WITHIN_S)[0]
    member.process.kill()
    assert select.select([worker_set._group.fileno()], [], [], GONE_WITHIN_S)[0]
    if not wanted:
        future.cancel()
    assert pool.submit(request(3)).result().batch[0, 0] == 3 * BATCH_SIZE
    if wanted:
        assert future.result().batch[0, 0] == 2 * BATCH_SIZE
    assert pool.statistics().restarts == 1
