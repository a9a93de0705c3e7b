"""Locks that another thread holds at the moment of the fork: a worker that needs one is replaced, and nothing hangs."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from held_locks import Guarded, held
from preloaded import Preloaded
from process_cases import BATCH_SIZE, Call, Gate, Squares, launcher_of, pools, request, squares, squares_of
from rounds import rounds

from feedline.core.descriptors import pipe
from feedline.errors import WorkerStalledError
from feedline.loader.building.builder import BatchBuilder
from feedline.workers.process import fork_server
from feedline.workers.process.pool import ProcessPool
from feedline.workers.process.snapshot import SnapshotLauncher
from feedline.workers.process.watchdog import LockWatch, ticks_if_waiting

OpenPool = Callable[..., ProcessPool]


@pytest.fixture
def open_pool(no_debris: Any, monkeypatch: Any) -> Iterator[OpenPool]:
    monkeypatch.setattr("feedline.workers.process.watchdog.STUCK_S", 0.3)
    monkeypatch.setattr("feedline.workers.process.watchdog.CHECK_S", 0.1)
    fork_server.start()
    yield from pools()


class _WhenLogged(logging.Handler):
    """Calls `act` once feedline has logged something; a context manager."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act = act

    def emit(self, record: logging.LogRecord) -> None:
        self.act()

    def __enter__(self) -> None:
        logging.getLogger("feedline").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("feedline").removeHandler(self)


def numbers(pool: ProcessPool, count: int = 8) -> list[int]:
    futures = [pool.submit(request(number)) for number in range(count)]
    return [squares_of(future.result().batch)[0] // BATCH_SIZE for future in futures]


@pytest.mark.parametrize("lock", ["python", "native"])
def test_workers_are_forked_again_once_the_lock_is_free(open_pool: OpenPool, caplog: Any, lock: str) -> None:
    with held(lock) as release:
        pool = open_pool(BatchBuilder(Guarded(lock)))
        with _WhenLogged(release.set):
            assert numbers(pool) == list(range(8))
    (record,) = caplog.records
    assert "waits for a lock that nothing can release" in record.message
    assert "'holder'" in record.message
    assert "in __getitem__" in record.message
    assert "forked again" in record.message
    assert pool.statistics().restarts == 0


def test_workers_inherit_nothing_if_the_lock_stays_held(no_debris: Any, open_pool: OpenPool, caplog: Any) -> None:
    builder = BatchBuilder(Guarded("python"))
    fresh = launcher_of("zygote", builder)
    launcher = SnapshotLauncher(builder, fresh=lambda *_: fresh)
    with held("python"), ProcessPool(launcher, 2) as pool:
        assert numbers(pool) == list(range(8))
    fresh.close()
    assert [record.message.rpartition("\n")[2] for record in caplog.records] == [
        "All workers are forked again.",
        "All workers are replaced by new ones, which inherit nothing from this process.",
    ]


def test_what_can_only_be_inherited_is_an_error_that_names_the_threads(open_pool: OpenPool) -> None:
    lock = threading.Lock()

    class Local(Squares):
        def __getitem__(self, index: int) -> Any:
            with lock:
                return super().__getitem__(index)

    lock.acquire()
    pool = open_pool(BatchBuilder(Local()))
    with pytest.raises(WorkerStalledError, match=r"nothing can release(.|\n)*cannot pickle '_thread\.lock'"):
        numbers(pool)


def test_an_unfinished_import_of_another_thread(open_pool: OpenPool, tmp_path: Path, monkeypatch: Any) -> None:
    gate = Gate(tmp_path)
    (tmp_path / "slow_module.py").write_text(
        f"from pathlib import Path\nPath({str(gate.reached)!r}).write_text('1')\nPath({str(gate.opened)!r}).read_text()"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importing = threading.Thread(target=importlib.import_module, args=("slow_module",))
    importing.start()
    gate.wait_for()
    pool = open_pool(squares({0: Call(importlib.import_module, "slow_module")}), 1)
    with _WhenLogged(gate.open):
        assert numbers(pool) == list(range(8))
    importing.join()
    sys.modules.pop("slow_module", None)


_firsts: list[Callable[[], object]] = []
"""What the next forks of this process do first, one function for each."""

_first: list[Callable[[], object]] = []
"""What a fork of this moment does first."""


def _choose() -> None:
    _first[:] = [_firsts.pop(0)] if _firsts else []


def _do_first() -> None:
    for act in _first:
        act()


os.register_at_fork(before=_choose, after_in_child=_do_first)


def test_a_snapshot_that_cannot_start(open_pool: OpenPool, caplog: Any) -> None:
    """A library's own handler of forks needs a lock."""
    lock = threading.Lock()
    lock.acquire()
    reading, writing = pipe()
    with reading, writing:
        # The first worker waits, too, or would answer all requests: for a pipe, which something could end.
        _firsts.extend([lambda: os.read(reading.fd, 1), lock.acquire])
        assert numbers(open_pool(squares())) == list(range(8))
    (record,) = caplog.records
    assert record.message.startswith("the process that forks the workers")


def _log() -> None:
    logging.getLogger("in a worker").critical("something")


def test_forks_while_threads_allocate_and_log(open_pool: OpenPool, caplog: Any) -> None:
    """The C library and Python free such locks in the child by themselves."""
    over = threading.Event()

    def disturb() -> None:
        logger = logging.getLogger("disturbing")
        while not over.is_set():
            bytearray(1 << 20)
            logger.debug("nothing")

    threads = [threading.Thread(target=disturb) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(rounds(4, 10)):
            pool = open_pool(squares({0: _log}), 2)
            assert numbers(pool, 2) == [0, 1]
            pool.close()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not [record for record in caplog.records if record.name == "feedline"]


@pytest.mark.skipif(importlib.util.find_spec("grpc") is None, reason="comes with tensorboard")
def test_forks_while_threads_of_grpc_work(preloaded: Preloaded, tmp_path: Path) -> None:
    script, log = tmp_path / "train.py", tmp_path / "output.log"
    script.write_text(CALLING)
    assert preloaded.run(script, log, 250) == 0, log.read_text()
    assert log.read_text().count("0 1 2 3\n") == 4


CALLING = """
import threading
from concurrent.futures import ThreadPoolExecutor
import grpc
import feedline

def ask():
    with grpc.insecure_channel(address) as channel:
        return channel.unary_unary("/numbers/echo")(b"1", timeout=200)

class Numbers:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index

def echo(request, context):
    return request

handler = grpc.unary_unary_rpc_method_handler(echo)
server = grpc.server(ThreadPoolExecutor(3))
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("numbers", {"echo": handler}),))
address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
server.start()
over = threading.Event()

def call():
    while not over.is_set():
        ask()

threads = [threading.Thread(target=call) for _ in range(2)]
for thread in threads:
    thread.start()
for epoch in range(4):
    print(*[int(number) for batch in feedline.DataLoader(Numbers(), 2, num_workers=2) for number in batch], flush=True)
over.set()
for thread in threads:
    thread.join()
server.stop(None).wait()
"""


def test_only_waits_that_nothing_can_end_are_noticed() -> None:
    endless, limited, reading = (_waiting(which) for which in range(3))
    clock = iter([0.0, 1.0, 2.5]).__next__
    try:
        _until(lambda: ticks_if_waiting(endless) is not None)
        watch = LockWatch(lambda: 0.0)
        watch._clock = clock
        assert watch.find([limited, reading, endless]) is None
        assert watch.find([limited, reading, endless]) is None
        assert watch.find([limited, reading, endless]) == endless
        assert ticks_if_waiting(limited) is None
        assert ticks_if_waiting(reading) is None
    finally:
        for pid in (endless, limited, reading):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _until(ready: Callable[[], bool]) -> None:
    while not ready():
        pass


def _waiting(which: int) -> int:
    """A process that waits: for a lock, for a lock with a time limit, or for a pipe."""
    pid = os.fork()
    if pid:
        return pid
    lock = threading.Lock()
    lock.acquire()
    if which == 0:
        lock.acquire()
    elif which == 1:
        lock.acquire(timeout=1000)
    os.read(os.pipe()[0], 1)
    os._exit(0)
