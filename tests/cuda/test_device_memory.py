"""Memory of a real device: errors that name a remedy, page locks that end, and data that lives there."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, get_worker_info

import feedline as fl
from feedline.loader.device import open_stage
from feedline.loader.device.backend import CudaBackend

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # A fork that a test asks for; CUDA has threads.
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

MIB = 1 << 20
BATCH_NBYTES = 32 * MIB


@pytest.fixture
def little_memory() -> Iterator[int]:
    """This process may take five and a half more batches of the device's memory."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 11 * BATCH_NBYTES // 2
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def test_out_of_memory_names_the_batch_and_the_depth_that_fits(little_memory: int) -> None:
    host = torch.ones(BATCH_NBYTES // 4, dtype=torch.int32).pin_memory()

    def run(prefetch: int) -> int:
        stage: Any = open_stage(fl.Delivery("cuda", prefetch=prefetch))
        ahead, seen = deque[Any](), 0
        with stage:
            while seen < 12:
                while stage.has_room():
                    ahead.append(stage.start(host))
                seen += stage.finish(ahead.popleft())[-1].item()
        return seen

    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(prefetch=8)
    notes = notes_of(caught.value)
    assert f"a batch of {BATCH_NBYTES} bytes was copied to cuda:0" in notes, f"{notes} (limit {little_memory})"
    fits = re.search(r"prefetch=(\d+)", notes)
    assert fits is not None, notes
    assert int(fits[1]) == 5, notes
    del caught
    gc.collect()
    assert run(int(fits[1])) == 12


class Ones(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((BATCH_NBYTES // 8,), index, dtype=torch.int32)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_that_keeps_too_much_gets_the_same_error(little_memory: int, num_workers: int) -> None:
    def kept(loader: fl.DataLoader[Any]) -> list[Any]:
        return list(loader)

    with fl.DataLoader(Ones(), batch_size=2, num_workers=num_workers, device="cuda") as loader:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            kept(loader)
        notes = notes_of(caught.value)
        assert f"a batch of {BATCH_NBYTES} bytes" in notes, f"{notes} (limit {little_memory})"
        caught.value.__traceback__ = None
        del caught
        gc.collect()
        assert [int(batch[0, 0]) for batch in loader] == list(range(0, 16, 2))  # the loader and the device work on


def test_a_transform_that_runs_out_of_memory_names_its_batch(little_memory: int) -> None:
    delivery = fl.Delivery("cuda", transform=lambda batch: batch.double().repeat(8, 1))
    with (
        fl.DataLoader(Ones(), batch_size=2, device=delivery) as loader,
        pytest.raises(torch.OutOfMemoryError) as caught,
    ):
        next(iter(loader))
    notes = notes_of(caught.value)
    assert "after the copy of batch 0" in notes, f"{notes} (limit {little_memory})"
    assert "pass Delivery(..., prefetch=1)" in notes, notes


class Locks:
    """Addresses that the driver has locked and unlocked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.locked, self.unlocked = list[int](), list[int]()
        lock, unlock = CudaBackend.host_register, CudaBackend.host_unregister

        def host_register(backend: CudaBackend, address: int, nbytes: int) -> None:
            lock(backend, address, nbytes)
            self.locked.append(address)

        def host_unregister(backend: CudaBackend, address: int) -> None:
            unlock(backend, address)
            self.unlocked.append(address)

        monkeypatch.setattr(CudaBackend, "host_register", host_register)
        monkeypatch.setattr(CudaBackend, "host_unregister", host_unregister)

    def __str__(self) -> str:
        return f"{len(self.locked)} locked, {len(self.unlocked)} unlocked"


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Locks:
    return Locks(monkeypatch)


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count * MIB // 8).view(count, -1))


def test_no_page_lock_outlives_its_loader(locks: Locks) -> None:
    data = numbers(16)
    for _ in range(4):
        with fl.DataLoader(data, batch_size=2, num_workers=2, worker_method="process", device="cuda") as loader:
            total = sum(batch.sum() for (batch,) in loader)
        assert int(total) == data.tensors[0].sum().item()
        del total
    gc.collect()
    assert locks.locked, "no transport memory was page-locked"
    assert sorted(locks.locked) == sorted(locks.unlocked), str(locks)


def test_batches_that_outlive_their_loader_keep_their_memory(locks: Locks) -> None:
    data = numbers(8)
    with fl.DataLoader(data, batch_size=2, num_workers=2, worker_method="process", device="cuda") as loader:
        batches = [batch for (batch,) in loader]
    assert torch.equal(torch.cat(batches).cpu(), data.tensors[0]), str(locks)


def test_lasting_workers_lock_their_memory_once(locks: Locks) -> None:
    with fl.DataLoader(
        numbers(32), batch_size=2, num_workers=2, worker_method="process", persistent_workers=True, device="cuda"
    ) as loader:
        for _ in range(6):
            for (batch,) in loader:
                del batch
        stats = loader.stats()
        assert 0 < len(locks.locked) <= 24, f"{locks}, for 96 batches"
        assert stats.staged_nbytes == 0, f"{stats.staged_nbytes} of {stats.copied_nbytes} bytes were copied twice"
    del loader
    gc.collect()
    assert sorted(locks.locked) == sorted(locks.unlocked), str(locks)


class Deadly(Dataset[torch.Tensor]):
    """Kills its worker at one sample, the first time only."""

    def __init__(self, once: Path) -> None:
        self.once = once

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 30 and get_worker_info() is not None and not self.once.exists():
            self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((MIB // 8,), index)


def test_a_killed_worker_leaves_sound_batches_and_no_page_lock(locks: Locks, tmp_path: Path) -> None:
    with fl.DataLoader(
        Deadly(tmp_path / "once"), batch_size=2, num_workers=2, worker_method="process", device="cuda"
    ) as loader:
        kept = list(loader)
        assert loader.stats().restarts == 1
    assert [batch[:, 0].tolist() for batch in kept] == [[at, at + 1] for at in range(0, 48, 2)]
    assert all(bool((batch == batch[:, :1]).all()) for batch in kept)
    del kept, loader
    gc.collect()
    assert sorted(locks.locked) == sorted(locks.unlocked), str(locks)
    assert torch.ones(3, device="cuda").sum().item() == 3


ROWS = 200


def source() -> TensorDataset:
    draws = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(ROWS, 3, 8, 8, generator=draws), torch.arange(ROWS))


ROW_NBYTES = 3 * 8 * 8 * 4 + 8


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """The same rows, one by one."""

    def __init__(self) -> None:
        self.tensors = source().tensors

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.tensors[0][index], int(self.tensors[1][index])


@pytest.mark.parametrize("data", [source, Samples])
@pytest.mark.parametrize(("budget", "resident"), [("80%", ROWS), (70 * ROW_NBYTES, 70)])
def test_resident_data_keeps_order_and_resumes(data: Any, budget: int | str, resident: int) -> None:
    arguments: dict[str, Any] = {"batch_size": 16, "shuffle": True, "seed": 4}
    alone = fl.DataLoader(source(), **arguments)
    expected = [batch for _ in range(2) for batch in alone]
    there = fl.datasets.DeviceDataset(data(), device="cuda", budget=budget)
    if data is Samples:
        there.fill(num_workers=2)
    statistics = there.statistics()
    assert (statistics.stored, statistics.resident) == (ROWS, resident), statistics
    assert statistics.spilled_nbytes == (ROWS - resident) * ROW_NBYTES, statistics
    for num_workers in (0, 2):
        first = fl.DataLoader(there, num_workers=num_workers, **arguments)
        got = list(islice(first, 5))
        again = fl.DataLoader(there, num_workers=num_workers, **arguments)
        again.load_state_dict(first.state_dict())
        got += [batch for _ in range(2) for batch in again]
        assert len(got) == len(expected)
        for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            assert all(tensor.is_cuda for tensor in ours)
            equal = all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))
            assert equal, f"batch {number} differs, with {num_workers} workers"


@pytest.mark.parametrize("budget", ["80%", 70 * ROW_NBYTES])
def test_gathers_wait_for_no_step(budget: int | str) -> None:
    """A loop may enqueue steps ahead, so that the device never idles."""
    there = fl.datasets.DeviceDataset(source(), device="cuda", budget=budget)
    for data in (there, TensorDataset(*(tensor.cuda() for tensor in source().tensors))):
        loader = fl.DataLoader(data, 16, shuffle=True, seed=0)
        list(loader)  # torch's allocators have memory
        for is_first in (True, False):  # in the first turn, torch allocates page-locked memory, which may wait
            batches = iter(loader)
            next(batches)
            torch.cuda.synchronize()
            torch.cuda._sleep(1_000_000_000)  # half a second
            step = torch.cuda.current_stream().record_event()
            for _ in range(4):
                next(batches)
            waited = step.query()
            assert is_first or not waited, f"{type(data).__name__}: a gather waited for the kernel before it"
            step.synchronize()


def test_resident_data_is_half_as_large_in_bfloat16() -> None:
    rows = source().tensors[0]
    there = fl.datasets.DeviceDataset(rows, device="cuda", dtype=torch.bfloat16)
    batches = list(fl.DataLoader(there, batch_size=32))
    assert there.statistics().resident_nbytes == rows.nbytes // 2, there.statistics()
    assert torch.equal(torch.cat(batches).cpu(), rows.to(torch.bfloat16))


def test_worker_processes_refuse_resident_data() -> None:
    there = fl.datasets.DeviceDataset(source(), device="cuda")
    with pytest.raises(Exception, match=r"num_workers=0|worker_method='thread'|in forked subprocess"):
        list(fl.DataLoader(there, 16, num_workers=1, worker_method="process"))
