"""Batches from worker processes, after a fork by the user."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import feedline as fl
from feedline.workers.transport.forks import ForkRecord, forks

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that travel in shared memory: each is larger than what fits into a message."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((40_000,), index)


@pytest.fixture
def batches() -> Iterator[Iterator[torch.Tensor]]:
    """Batches of two rows: 0 and 1, 2 and 3, and so on."""
    loader = fl.DataLoader(Rows(), batch_size=2, num_workers=1, worker_method="process")
    yield iter(loader)
    loader.close()


def in_child(program: Callable[[], bool]) -> int:
    """Fork; the child exits with 0 if `program` returns True."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if program() else 1)
        finally:
            os._exit(2)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_the_training_process_writes_does_not_reach_a_child(batches: Iterator[torch.Tensor]) -> None:
    kept, latest = next(batches), next(batches)
    reading, writing = os.pipe()

    def unchanged() -> bool:
        os.read(reading, 1)  # the training process has written to its batches
        return bool((kept.numpy() == [[0], [1]]).all() and (latest.numpy() == [[2], [3]]).all())

    child = in_child(unchanged)
    kept.numpy()[:] = 7
    latest.numpy()[:] = 8
    os.write(writing, b".")
    assert exit_code(child) == 0
    assert [batch[0, 0].item() for batch in batches] == [4, 6, 8, 10]
    assert (kept.numpy() == 7).all()
    os.close(reading)
    os.close(writing)


def test_what_a_child_writes_stays_there(batches: Iterator[torch.Tensor]) -> None:
    batch = next(batches)

    def writes() -> bool:
        batch.numpy()[:] = 9
        return bool((batch.numpy() == 9).all())

    assert exit_code(in_child(writes)) == 0
    assert (batch.numpy() == [[0], [1]]).all()


def test_a_grandchild_has_the_batches_of_its_parent(batches: Iterator[torch.Tensor]) -> None:
    batch = next(batches)

    def forks_again() -> bool:
        batch.numpy()[:] = 5
        grandchild = in_child(lambda: bool((batch.numpy() == 5).all()))
        return exit_code(grandchild) == 0

    assert exit_code(in_child(forks_again)) == 0


def mapped(address: int) -> str:
    """The line of this process's memory map that contains an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= address < high:
            return line
    raise AssertionError(hex(address))


def test_batches_that_the_loop_has_not_got_are_not_copied(batches: Iterator[torch.Tensor]) -> None:
    """A fork costs the memory of what the child can reach, not of all that was prefetched."""
    batch = next(batches)
    assert len(forks._live()) >= 1
    assert "feedline" in mapped(batch.data_ptr())
    address = batch.data_ptr()
    assert exit_code(in_child(lambda: "feedline" not in mapped(address))) == 0
    del batch
    assert exit_code(in_child(lambda: forks._live() == [])) == 0


def test_threads_that_fork_at_once(batches: Iterator[torch.Tensor]) -> None:
    batch = next(batches)
    codes: list[int] = []

    def fork() -> None:
        unchanged = [in_child(lambda: bool((batch.numpy() == [[0], [1]]).all())) for _ in range(5)]
        codes.extend(map(exit_code, unchanged))

    threads = [threading.Thread(target=fork) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 15


def test_the_record_stays_small() -> None:
    record = ForkRecord()
    kept = [np.zeros(1, np.uint8) for _ in range(3)]
    record.add_delivered(map(weakref.ref, kept))
    for _ in range(1000):
        record.add_delivered([weakref.ref(np.zeros(1, np.uint8))])
    assert len(record._delivered) <= 100
    assert len(record._live()) == 3


def test_workers_share_a_batch_with_the_training_process(batches: Iterator[torch.Tensor]) -> None:
    """As torch's do."""
    batch = next(batches)
    seen: list[Any] = []

    class Looking(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor("feedline" in mapped(batch.data_ptr()))

    with fl.DataLoader(Looking(), num_workers=1, worker_method="process") as loader:
        seen = [value.item() for value in loader]
    assert all(seen)
