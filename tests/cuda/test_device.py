"""The stages on a real device: right numbers while copies, kernels and reused slots overlap."""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import feedline as fl
from feedline import transforms as T
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
    """The loop's kernels are late, slots and device memory are reused all the time, and no batch is held."""
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


def test_data_on_the_device_is_gathered_there() -> None:
    images, labels = torch.randint(0, 256, (200, 3, 8, 8), dtype=torch.uint8), torch.arange(200)
    expected = list(fl.DataLoader(torch.utils.data.TensorDataset(images, labels), 16, shuffle=True, seed=0))
    row = images[0].nbytes + 8
    for budget in ("80%", 70 * row):
        data = fl.datasets.DeviceDataset((images, labels), device="cuda", budget=budget)
        for num_workers in (0, 2):
            got = list(fl.DataLoader(data, 16, shuffle=True, seed=0, num_workers=num_workers))
            for ours, theirs in zip(got, expected, strict=True):
                assert all(tensor.is_cuda for tensor in ours)
                assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))


def test_a_tensor_dataset_on_the_device_is_read_in_whole_batches() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(100, device="cuda"))
    with fl.DataLoader(data, 32) as loader:
        assert loader.plan().accelerated
        assert torch.cat([batch for (batch,) in loader]).tolist() == list(range(100))


AUGMENT = T.OnBatch([T.RandomResizedCrop(16), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4, 0.2)])


def test_augmentation_is_within_a_level_of_the_cpu_s() -> None:
    images = torch.randint(0, 256, (64, 3, 32, 40), dtype=torch.uint8)
    keys = np.arange(64, dtype=np.uint64)
    for pipeline in (T.OnBatch(T.RandomResizedCrop(16)), T.OnBatch(T.RandomCrop(24)), T.OnBatch(T.GaussianBlur(5))):
        ours, theirs = pipeline(images.cuda(), keys).cpu().int(), pipeline(images, keys).int()
        assert (ours - theirs).abs().max() <= 1
    color = T.OnBatch(T.ColorJitter(0.4, 0.4, 0.4, 0.2))
    assert torch.equal(color(images.cuda(), keys).cpu(), color(images, keys))


def test_static_batches_replay_in_a_graph() -> None:
    images = torch.randint(0, 256, (64, 3, 32, 40), dtype=torch.uint8)
    data = torch.utils.data.TensorDataset(images, torch.arange(64))
    delivery = fl.Delivery("cuda", transform=AUGMENT, dtype=torch.float16, static=True, prefetch=3)
    with fl.DataLoader(data, 16, seed=0, shuffle=True, device=delivery) as loader:
        addresses = {tuple(tensor.data_ptr() for tensor in batch) for _ in range(2) for batch in loader}
        stats = loader.stats()
    assert len(addresses) == 1
    assert 0 <= stats.hidden_copy_s <= stats.copy_s


def test_two_streams_of_loaders_do_not_mix() -> None:
    one, other = (torch.utils.data.TensorDataset(torch.full((64, 1000), value)) for value in (1, 2))
    loaders = [fl.DataLoader(data, 8, device="cuda", num_workers=2) for data in (one, other)]
    for (first,), (second,) in zip(*loaders, strict=True):
        assert (first.unique().tolist(), second.unique().tolist()) == ([1], [2])


def test_encoded_images_are_decoded_there(tmp_path: Path) -> None:
    for number in range(12):
        place = tmp_path / "ab"[number % 2] / f"{number}.jpg"
        place.parent.mkdir(exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 256, (6, 8, 3), np.uint8)
        Image.fromarray(noise).resize((64, 48), Image.Resampling.BICUBIC).save(place, quality=92)
    train = T.imagenet_train(16)
    expected = fl.DataLoader(fl.datasets.ImageFolder(tmp_path, train), 4, shuffle=True, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # no decoder may be installed
        data = fl.datasets.ImageFolder(tmp_path, T.DecodeOnDevice(train))
        with fl.DataLoader(data, 4, shuffle=True, seed=0, device="cuda") as loader:
            for (ours, labels), (theirs, others) in zip(loader, expected, strict=True):
                assert torch.equal(labels.cpu(), others)
                assert (ours.cpu() - theirs).abs().mean() < 0.05  # decoders differ by some levels
            assert loader.stats().decoded_on_device == 12
