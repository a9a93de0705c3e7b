"""The stages on a real device: right numbers while copies, kernels and reused slots overlap."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from typing import Any

import pytest
import torch

import feedline as fl
from feedline.loader.device import DeviceStage, PinStage, open_stage

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MIB = 1 << 20
LONG = 200_000_000
"""Clock cycles: about a tenth of a second on any GPU."""


class Slot:
    """Transport memory: a mapped memfd, page-locked by the stage."""

    def __init__(self, stage: DeviceStage, nbytes: int) -> None:
        descriptor = os.memfd_create("feedline-test")
        os.posix_fallocate(descriptor, 0, nbytes)
        self.memory = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.int32)
        os.close(descriptor)
        stage.register(self.memory.data_ptr(), nbytes)


class Slots:
    """A slot is written again as soon as no view of it is left."""

    def __init__(self, stage: DeviceStage, nbytes: int) -> None:
        self._stage, self._nbytes, self.made = stage, nbytes, list[Slot]()
        self._free: deque[Slot] = deque()

    def batch(self, value: int) -> torch.Tensor:
        if not self._free:
            self._free.append(Slot(self._stage, self._nbytes))
            self.made.append(self._free[0])
        slot = self._free.popleft()
        slot.memory.fill_(value)
        view = slot.memory.view(-1)
        weakref.finalize(view, self._free.append, slot)
        return view

    def close(self) -> None:
        for slot in self.made:
            self._stage.unregister(slot.memory.data_ptr())


@pytest.fixture
def stage() -> Any:
    stage = open_stage("cuda")
    assert isinstance(stage, DeviceStage)
    with stage:
        yield stage


@pytest.fixture
def slots(stage: DeviceStage) -> Any:
    slots = Slots(stage, 4 * MIB)
    yield slots
    torch.cuda.synchronize()
    slots.close()


def test_a_registered_slot_is_page_locked_until_it_is_unregistered(stage: DeviceStage) -> None:
    slot = Slot(stage, MIB)
    assert slot.memory.is_pinned()
    assert stage.statistics().registered_nbytes == MIB
    stage.unregister(slot.memory.data_ptr())
    assert not slot.memory.is_pinned()


def test_a_refused_registration_leaves_no_error_behind(stage: DeviceStage) -> None:
    slot = Slot(stage, MIB)
    with pytest.warns(RuntimeWarning, match="could not be page-locked"):
        stage.register(slot.memory.data_ptr(), MIB)
    assert torch.ones(3, device="cuda").add(1).tolist() == [2, 2, 2]
    stage.unregister(slot.memory.data_ptr())


def test_no_staging_from_a_slot(stage: DeviceStage, slots: Slots) -> None:
    moved = stage.finish(stage.start({"x": slots.batch(3)}))["x"]
    assert moved.unique().tolist() == [3]
    assert stage.statistics().staged_nbytes == 0


def test_copies_get_on_while_the_loop_computes(stage: DeviceStage, slots: Slots) -> None:
    torch.cuda._sleep(LONG)
    computing = torch.cuda.current_stream().record_event()
    stage.start(slots.batch(1))
    stage.close()
    assert not computing.query()


def test_numbers_under_stress(stage: DeviceStage, slots: Slots) -> None:
    """The loop's kernels lag behind, slots and device memory are reused all the time, no batch is held."""
    sums, started = list[torch.Tensor](), deque[Any]()
    for value in range(400):
        while not started or stage.has_room():
            started.append(stage.start([slots.batch(value + len(started)), torch.full((1000,), value + len(started))]))
        large, small = stage.finish(started.popleft())
        if value % 50 == 0:
            torch.cuda._sleep(LONG // 10)
        sums.append(torch.stack([large.amin(), large.amax(), small.amin(), small.amax()]))
        del large, small
    seen = torch.stack(sums).tolist()
    assert seen == [[value] * 4 for value in range(400)]
    assert len(slots.made) <= 6


def test_memory_of_a_dropped_batch_is_not_reused_under_a_kernel(stage: DeviceStage, slots: Slots) -> None:
    results = []
    for value in range(8):
        batch = stage.finish(stage.start(slots.batch(value)))
        torch.cuda._sleep(LONG // 10)
        results.append(batch.amin() + batch.amax())
        del batch
    assert [result.item() for result in results] == [2 * value for value in range(8)]


def test_batches_on_another_current_stream(stage: DeviceStage, slots: Slots) -> None:
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        batch = stage.finish(stage.start(slots.batch(5)))
        assert batch.unique().tolist() == [5]


def test_strides_and_types_survive(stage: DeviceStage) -> None:
    images = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    batch = [images, torch.arange(6).view(2, 3).t(), torch.ones(1).expand(4), torch.ones(3, dtype=torch.bfloat16)]
    moved = stage.finish(stage.start(batch))
    assert moved[0].is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(moved, batch, strict=True))


def test_the_time_of_copies_is_known(stage: DeviceStage, slots: Slots) -> None:
    for value in range(4):
        stage.finish(stage.start(slots.batch(value)))
    stage.close()
    statistics = stage.statistics()
    assert statistics.copied_nbytes == 16 * MIB
    assert 0 < statistics.copy_s < 1


def test_pin_memory_gives_torch_s_own_page_locked_memory() -> None:
    with PinStage() as stage:
        pinned = stage.finish(stage.start({"x": torch.ones(3), "name": "a"}))
    assert pinned["x"].is_pinned()
    assert pinned["name"] == "a"


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("method", ["thread", "process"])
def test_a_loader_delivers_on_the_device(num_workers: int, method: str) -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(1003), torch.randn(1003, 17))
    expected = torch.utils.data.DataLoader(dataset, batch_size=32)
    with fl.DataLoader(dataset, batch_size=32, num_workers=num_workers, worker_method=method, device="cuda") as loader:
        for _ in range(2):
            for ours, theirs in zip(loader, expected, strict=True):
                assert all(tensor.is_cuda for tensor in ours)
                assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))
