"""Large batches of the training process are in reused memory, but never while a view of it exists."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import feedline as fl
from feedline.workers.transport import BufferPool
from feedline.workers.transport.slots import IDLE_BATCHES, LARGE_NBYTES

LARGE = (LARGE_NBYTES // 1024, 1024)


def test_memory_without_views_is_used_again() -> None:
    empty = BufferPool()
    first = empty(LARGE, torch.uint8)
    place = first.data_ptr()
    del first
    second = empty(LARGE, torch.uint8)
    assert second.data_ptr() == place
    assert second.shape == LARGE
    assert second.is_contiguous()


LOOKS = {
    "the tensor": lambda tensor: tensor,
    "a view of it": lambda tensor: tensor[5:6, ::2].t(),
    "an array": lambda tensor: tensor.numpy()[3],
    "a detached one": lambda tensor: tensor.view(torch.int16).detach(),
    "its storage": lambda tensor: tensor.untyped_storage(),
    "what autograd keeps": lambda tensor: torch.ones(1024, requires_grad=True) * tensor.view(torch.float32)[0, 0],
}


@pytest.mark.parametrize("look", LOOKS)
def test_memory_with_views_is_left_alone(look: str) -> None:
    empty = BufferPool()
    first = empty(LARGE, torch.uint8)
    place, kept = first.data_ptr(), LOOKS[look](first)
    del first
    gc.collect()
    assert empty(LARGE, torch.uint8).data_ptr() != place
    assert empty.lent_nbytes == LARGE_NBYTES
    del kept
    gc.collect()
    assert empty.lent_nbytes == 0
    assert empty.nbytes == 2 * LARGE_NBYTES


def test_small_tensors_come_from_the_allocator() -> None:
    empty = BufferPool()
    kept = empty((3, 5), torch.bfloat16)
    assert (kept.shape, kept.dtype) == ((3, 5), torch.bfloat16)
    assert empty.nbytes == 0


def test_idle_memory_is_given_back() -> None:
    empty = BufferPool()
    empty((10 * LARGE_NBYTES,), torch.uint8)
    assert empty.nbytes == 10 * LARGE_NBYTES
    for _ in range(IDLE_BATCHES + 1):
        empty(LARGE, torch.uint8)
    assert empty.nbytes == LARGE_NBYTES


def test_threads_never_share_a_block() -> None:
    empty, gate = BufferPool(), threading.Barrier(4)

    def fill(value: int) -> bool:
        gate.wait()
        return all(bool((empty(LARGE, torch.uint8).fill_(value) == value).all()) for _ in range(20))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(fill, range(4)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_uses_its_memory_again_and_keeps_what_is_kept(workers: int) -> None:
    rows = torch.arange(32 * LARGE_NBYTES // 4 // 8, dtype=torch.float32).reshape(32, -1)
    arguments: dict[str, Any] = {"num_workers": workers, "worker_method": "thread", "batch_size": 8}
    for data, collate in ((TensorDataset(rows), None), (list(rows), None)):
        loader = fl.DataLoader(data, collate_fn=collate, **arguments)
        places = set()
        for _ in range(3):
            for batch in loader:
                places.add((batch[0] if isinstance(batch, list) else batch).data_ptr())
        assert len(places) <= 4 + 2 * workers
        kept = [batch[0] if isinstance(batch, list) else batch for batch in loader]
        assert torch.equal(torch.cat(kept), rows)
        assert loader.stats().in_flight_nbytes >= rows.nbytes
        del kept, batch
        loader.close()
        assert loader.stats().arena_nbytes == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_keeps_the_batches_of_its_moment() -> None:
    """Neither later writes of the parent nor its batches in recycled memory reach them."""
    pool = BufferPool()
    batch = pool(LARGE, torch.uint8).fill_(1)
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(sink)
        os.read(source, 1)  # the end of the pipe: the parent has written
        os._exit(0 if (batch.numpy() == 1).all() else 1)  # NumPy: the threads of torch did not survive the fork
    os.close(source)
    batch.fill_(2)
    del batch
    pool(LARGE, torch.uint8).fill_(3)
    os.close(sink)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
