"""Copies ahead of delivery, on a fake accelerator that runs its streams only on request.

The fake has the worst timing that a real one may have: a copy from page-locked memory reads it only when its stream is
advanced, and memory of a dead tensor is reused at once. So every missing wait shows as a wrong number.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import feedline as fl
from feedline.loader.device import Depth, DeviceStage, PlainStage, StageStatistics, resolve

Work = Callable[[], bool]
"""Work enqueued on a stream; returns False when it has to wait."""


class FakeStream:
    """Work in order, executed by `advance`."""

    def __init__(self) -> None:
        self.queue: deque[Work] = deque()

    def advance(self, steps: int) -> bool:
        """Do up to `steps` pieces of work; returns True if any was done."""
        done = 0
        while self.queue and done < steps and self.queue[0]():
            self.queue.popleft()
            done += 1
        return done > 0


@dataclass(eq=False)
class FakeEvent:
    accelerator: FakeAccelerator
    passed_ms: float | None = None

    def pass_now(self) -> bool:
        self.passed_ms = self.accelerator.clock_ms
        return True

    def query(self) -> bool:
        return self.passed_ms is not None

    def synchronize(self) -> None:
        self.accelerator.waits += self.passed_ms is None
        while self.passed_ms is None:
            assert self.accelerator.advance(1), "the host waits for an event that cannot pass"

    def elapsed_time(self, end_event: FakeEvent) -> float:
        return end_event.passed_ms - self.passed_ms


class FakeAccelerator:
    """`Backend` of a device whose memory is the host's, one millisecond for each byte copied."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.side, self.loop = FakeStream(), FakeStream()
        self.current = self.loop
        self.clock_ms = 0.0
        self.waits = 0
        self.locked: dict[int, int] = {}
        self.refuses = False
        self.pinned_tensors: list[torch.Tensor] = []  # never reused: their copies may be late
        self._pinned: dict[int, torch.Tensor] = {}
        self._dead: list[tuple[torch.Tensor, list[FakeEvent]]] = []
        self._users: dict[int, set[FakeStream]] = {}

    def side_stream(self) -> FakeStream:
        return self.side

    def current_stream(self) -> FakeStream:
        return self.current

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer

    def record(self, stream: FakeStream) -> FakeEvent:
        event = FakeEvent(self)
        stream.queue.append(event.pass_now)
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        stream.queue.append(event.query)

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        assert self.current is self.side
        device = self._allocate(host)
        source = _memory_of(host)
        if not self.is_pinned(host) and host.data_ptr() not in self._pinned:
            source = source.clone()
        keep = self._pinned.pop(host.data_ptr(), None)  # torch's allocator guards its own blocks
        self.side.queue.append(partial(self._copy_now, device.untyped_storage(), source, [keep]))
        return device

    def record_stream(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self._users[tensor.data_ptr()].add(stream)

    def is_pinned(self, host: torch.Tensor) -> bool:
        return any(start <= host.data_ptr() < start + nbytes for start, nbytes in self.locked.items())

    def pin(self, host: torch.Tensor) -> torch.Tensor:
        copy = host.clone()
        self._pinned[copy.data_ptr()] = copy
        return copy

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.refuses:
            raise RuntimeError("out of lockable memory")
        tensor = torch.empty(shape, dtype=dtype)
        self.locked[tensor.data_ptr()] = tensor.nbytes
        self.pinned_tensors.append(tensor)
        return tensor

    def host_register(self, address: int, nbytes: int) -> None:
        if self.refuses:
            raise RuntimeError("out of lockable memory")
        self.locked[address] = nbytes

    def host_unregister(self, address: int) -> None:
        del self.locked[address]

    def advance(self, steps: int) -> bool:
        """Advance the copies first, then the loop's work."""
        return self.side.advance(steps) or self.loop.advance(steps)

    def drain(self) -> None:
        while self.advance(1000):
            pass
        assert not self.loop.queue, "the loop's work waits for ever"

    def read(self, device: torch.Tensor, into: list[Any]) -> None:
        """Enqueue a kernel of the loop that reads `device`; it holds the memory, not the tensor."""
        memory = torch.empty(0, dtype=device.dtype).set_(device.untyped_storage(), 0, device.shape, device.stride())
        self.loop.queue.append(lambda: into.append(memory.tolist()) is None)

    def _copy_now(self, device: torch.UntypedStorage, source: torch.Tensor, kept: list[Any]) -> bool:
        torch.empty(0, dtype=source.dtype).set_(device, 0, source.shape, source.stride()).copy_(source)
        self.clock_ms += source.nbytes
        kept.clear()
        return True

    def _allocate(self, host: torch.Tensor) -> torch.Tensor:
        for place, (memory, guards) in enumerate(self._dead):
            if memory.nbytes == host.nbytes and all(guard.query() for guard in guards):
                del self._dead[place]
                break
        else:
            memory = torch.full((host.nbytes,), 255, dtype=torch.uint8)
        tensor = torch.empty(0, dtype=host.dtype).set_(memory.untyped_storage(), 0, host.shape, host.stride())
        self._users[tensor.data_ptr()] = set()
        weakref.finalize(tensor, self._die, memory)
        return tensor

    def _die(self, memory: torch.Tensor) -> None:
        self._dead.append((memory, [self.record(stream) for stream in self._users[memory.data_ptr()]]))


def _memory_of(host: torch.Tensor) -> torch.Tensor:
    """The bytes at the address of `host`, without a reference to it, as a DMA engine sees them."""
    if host.nbytes == 0:
        return host.clone()
    raw = (ctypes.c_char * host.untyped_storage().nbytes()).from_address(host.untyped_storage().data_ptr())
    start = host.storage_offset() * host.itemsize
    return torch.frombuffer(raw, dtype=host.dtype, offset=start).as_strided(host.shape, host.stride())


class Slots:
    """Registered transport memory: a slot is written again as soon as no view of it is left."""

    def __init__(self, stage: DeviceStage, rows: int = 4) -> None:
        self._stage, self._rows = stage, rows
        self._memory: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []

    def batch(self, value: int) -> torch.Tensor:
        if not self._free:
            memory = torch.zeros(self._rows, dtype=torch.int64)
            self._stage.register(memory.data_ptr(), memory.nbytes)
            self._memory.append(memory)
            self._free.append(memory)
        memory = self._free.pop()
        memory.fill_(value)
        view = memory.view(-1)
        weakref.finalize(view, self._free.append, memory)
        return view

    @property
    def made(self) -> int:
        return len(self._memory)

    @property
    def free(self) -> int:
        return len(self._free)


@pytest.fixture
def accelerator() -> FakeAccelerator:
    return FakeAccelerator()


class Pair(NamedTuple):
    left: Any
    right: Any


def test_a_nested_batch_arrives_in_its_containers(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    batch = {"x": [torch.arange(3), (torch.ones(2), "name")], "pair": Pair(torch.zeros(1), None), "n": 7}
    moved = stage.finish(stage.start(batch))
    accelerator.drain()
    assert moved["x"][0].tolist() == [0, 1, 2]
    assert moved["x"][1][0].tolist() == [1, 1]
    assert type(moved["x"][1]) is tuple
    assert moved["x"][1][1] == "name"
    assert type(moved["pair"]) is Pair
    assert moved["pair"].left.tolist() == [0]
    assert (moved["pair"].right, moved["n"]) == (None, 7)


def test_nothing_is_copied_before_the_side_stream_runs(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    flight = stage.start(Slots(stage).batch(5))
    seen: list[Any] = []
    accelerator.read(stage.finish(flight), seen)
    accelerator.loop.advance(10)
    assert not seen
    accelerator.drain()
    assert seen == [[5, 5, 5, 5]]


def test_a_slot_is_held_until_its_copy_has_ended(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    slots = Slots(stage)
    stage.finish(stage.start({"x": slots.batch(1)}))
    stage.has_room()
    assert slots.free == 0
    accelerator.drain()
    stage.has_room()
    assert slots.free == 1


class Unmovable:
    def to(self, device: torch.device) -> None:
        raise TypeError("stays")


def test_a_slot_is_held_also_when_another_leaf_cannot_be_moved(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    slots = Slots(stage)
    with pytest.raises(TypeError, match="stays"):
        stage.start([slots.batch(1), Unmovable()])
    assert slots.free == 0
    stage.close()
    assert slots.free == 1


def test_memory_that_is_not_page_locked_may_change_at_once(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    batch = torch.ones(3)
    flight = stage.start(batch)
    batch.fill_(9)
    moved = stage.finish(flight)
    accelerator.drain()
    assert moved.tolist() == [1, 1, 1]
    assert stage.statistics().staged_nbytes == 12


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("refuses", [False, True])
def test_batches_that_this_process_builds_need_no_staging(
    accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch, num_workers: int, refuses: bool
) -> None:
    monkeypatch.setattr(resolve, "backend_of", lambda _: accelerator)
    accelerator.refuses = refuses
    rows = torch.arange(64 * 2048).view(64, 2048)
    data = torch.utils.data.TensorDataset(rows, torch.arange(64))
    with fl.DataLoader(data, 8, num_workers=num_workers, worker_method="thread", device="cpu") as loader:
        batches = list(loader)
        accelerator.drain()
        staged = loader.stats().staged_nbytes
    assert torch.equal(torch.cat([batch for batch, _ in batches]), rows)
    assert staged == 64 * 8 + (rows.nbytes if refuses else 0)  # the small tensors are staged


def test_strides_survive(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    images = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    moved = stage.finish(stage.start(images))
    accelerator.drain()
    assert torch.equal(moved, images)
    assert moved.stride() == images.stride()


def test_an_empty_tensor_is_not_staged(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    accelerator.pin = None  # type: ignore[assignment]
    moved = stage.finish(stage.start(torch.empty(0, 3)))
    assert moved.shape == (0, 3)


class OnItsOwn:
    """A batch type with `to`: its memory cannot be registered for the stream that uses it."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        self.accelerator, self.stream = accelerator, None

    def to(self, device: torch.device) -> OnItsOwn:
        moved = OnItsOwn(self.accelerator)
        moved.stream = self.accelerator.current
        return moved


class Recorded(OnItsOwn):
    """A batch type with `to` and `record_stream`, as TensorDict and PyG's Data are."""

    def to(self, device: torch.device, *, non_blocking: bool) -> Recorded:
        assert non_blocking
        moved = Recorded(self.accelerator)
        moved.stream = self.accelerator.current
        self.accelerator._users[id(moved)] = set()
        return moved

    def record_stream(self, stream: FakeStream) -> None:
        raise AssertionError("only the backend is asked")

    def data_ptr(self) -> int:
        return id(self)


def test_an_object_with_to_is_moved_on_the_loop_s_stream(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    assert stage.finish(stage.start([OnItsOwn(accelerator)]))[0].stream is accelerator.loop


def test_an_object_that_records_streams_is_moved_on_the_side_stream(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    moved = stage.finish(stage.start([Recorded(accelerator)]))[0]
    assert moved.stream is accelerator.side
    assert accelerator._users[id(moved)] == {accelerator.loop}


def test_sparse_tensors_and_subclasses_are_moved_on_the_loop_s_stream(accelerator: FakeAccelerator) -> None:
    class Labeled(torch.Tensor):
        pass

    stage = DeviceStage(accelerator)
    accelerator.copy = None  # type: ignore[assignment,method-assign]
    batch = [torch.eye(3).to_sparse(), torch.ones(2).as_subclass(Labeled)]
    moved = stage.finish(stage.start(batch))
    assert moved[0].is_sparse
    assert type(moved[1]) is Labeled


def test_a_packed_sequence_keeps_its_sizes_on_the_host(accelerator: FakeAccelerator) -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    for stage in (DeviceStage(accelerator), PlainStage(torch.device("meta"))):
        moved = stage.finish(stage.start({"x": packed}))["x"]
        assert type(moved) is type(packed)
        assert moved.batch_sizes.is_cpu


class Encoding(UserDict[str, Any]):
    """A batch like those of tokenizers: a dictionary with `to`."""

    def to(self, device: torch.device) -> Encoding:
        raise AssertionError("its tensors are copied ahead one by one")


def test_a_dictionary_is_walked_even_if_it_could_move_itself(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    moved = stage.finish(stage.start(Encoding(ids=torch.ones(2))))
    accelerator.drain()
    assert type(moved) is Encoding
    assert moved["ids"].tolist() == [1, 1]


class Forgets(FakeAccelerator):
    """A backend whose method `what` does nothing, which the stress test below must detect."""

    def __init__(self, what: str) -> None:
        super().__init__()
        setattr(self, what, lambda *_: None)


def train(accelerator: FakeAccelerator, stage: DeviceStage, moves: list[int]) -> tuple[list[Any], list[Any]]:
    """A loop that starts, delivers, reads and drops batches while the device sometimes advances."""
    slots, started, seen, expected = Slots(stage), deque[Any](), [], []
    for number, move in enumerate(moves):
        if move < 3:
            accelerator.side.advance(move + 1)
        elif move < 6:
            accelerator.loop.advance(2 * (move - 2))
        elif move < 8 and (not started or stage.has_room()):
            started.append((number, stage.start(slots.batch(number))))
        elif started:
            value, flight = started.popleft()
            expected.append([value] * 4)
            accelerator.read(stage.finish(flight), seen)
            del flight
    accelerator.drain()
    return seen, expected


MOVES = st.lists(st.integers(0, 9), max_size=200)


@given(moves=MOVES, depth_nbytes=st.none() | st.integers(1, 200))
def test_every_read_of_the_loop_sees_its_own_batch(moves: list[int], depth_nbytes: int | None) -> None:
    accelerator = FakeAccelerator()
    seen, expected = train(accelerator, DeviceStage(accelerator, Depth(depth_nbytes)), moves)
    assert seen == expected


class Careless(DeviceStage):
    """Drops the host's tensors as soon as their copies are enqueued."""

    def start(self, batch: Any) -> Any:
        flight = super().start(batch)
        flight.moving[1].tensors.host.clear()
        return flight


IMPATIENT = [7, 7, 9, 7, 9, 7, 9, 5, 2, 2, 5, 5] * 4
"""The copies lag behind the loop, and every batch is dropped at once."""
BUSY = [7, 2, 2, 9] * 12
"""The loop's kernels lag behind the copies."""


@pytest.mark.parametrize(
    ("make", "stage", "moves"),
    [
        (partial(Forgets, "wait"), DeviceStage, IMPATIENT),
        (partial(Forgets, "record_stream"), DeviceStage, BUSY),
        (FakeAccelerator, Careless, IMPATIENT),
    ],
    ids=["no wait", "no record_stream", "no reference to the host's memory"],
)
def test_the_fake_catches_what_it_is_there_for(
    make: Callable[[], FakeAccelerator], stage: type[DeviceStage], moves: list[int]
) -> None:
    accelerator = make()
    seen, expected = train(accelerator, stage(accelerator), moves)
    assert seen != expected


@pytest.mark.parametrize("moves", [IMPATIENT, BUSY])
def test_the_same_moves_are_fine_with_nothing_forgotten(accelerator: FakeAccelerator, moves: list[int]) -> None:
    seen, expected = train(accelerator, DeviceStage(accelerator), moves)
    assert seen == expected


def test_slots_are_reused(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    slots = Slots(stage)
    for value in range(20):
        stage.finish(stage.start(slots.batch(value)))
        accelerator.drain()
    assert slots.made <= 2


def test_two_batches_are_the_default_depth(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    first = stage.start(torch.ones(1000))
    assert stage.has_room()
    second = stage.start(torch.ones(1000))
    accelerator.drain()
    assert not stage.has_room()
    stage.finish(first)
    assert stage.has_room()
    stage.finish(second)


def test_the_depth_in_bytes_counts_the_next_batch_as_large_as_the_last(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator, Depth(1000))
    flights = [stage.start(torch.ones(100))]
    assert stage.has_room()
    flights.append(stage.start(torch.ones(100)))
    accelerator.drain()
    assert not stage.has_room()
    assert stage.statistics().in_flight_nbytes == 800


def test_one_batch_larger_than_the_depth_still_goes(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator, Depth(10))
    flight = stage.start(torch.ones(100))
    assert not stage.has_room()
    moved = stage.finish(flight)
    accelerator.drain()
    assert moved.tolist() == [1] * 100


def test_unfinished_copies_of_delivered_batches_take_room(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    for _ in range(2):
        stage.finish(stage.start(torch.ones(3)))
    assert not stage.has_room()
    assert accelerator.waits == 0
    stage.start(torch.ones(3))
    assert accelerator.waits == 1


def test_a_dropped_batch_leaves_by_itself(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    flight = stage.start(torch.ones(3))
    assert stage.statistics().in_flight == 1
    del flight
    assert stage.statistics().in_flight == 0


def test_close_waits_for_the_copies_and_the_stage_works_on(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    slots = Slots(stage)
    with stage:
        flight = stage.start(slots.batch(3))
    assert not accelerator.side.queue
    assert slots.free == 1
    assert stage.finish(flight).tolist() == [3] * 4
    stage.close()
    assert stage.finish(stage.start(slots.batch(4))) is not None


def test_statistics(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    first, second = stage.start(Slots(stage).batch(1)), stage.start(torch.ones(2))
    stage.finish(first)
    accelerator.drain()
    stage.has_room()
    assert stage.statistics() == StageStatistics(
        in_flight=1,
        in_flight_nbytes=8,
        peak_nbytes=40,
        copied_nbytes=40,
        staged_nbytes=8,
        registered_nbytes=32,
        copy_s=pytest.approx(0.040),
        hidden_copy_s=pytest.approx(0.040),
    )
    stage.finish(second)


def test_memory_that_cannot_be_locked_is_staged_and_said(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    accelerator.refuses = True
    with pytest.warns(RuntimeWarning, match=r"32 bytes .* could not be page-locked \(out of lockable memory\).*ulimit"):
        batch = Slots(stage).batch(6)
    moved = stage.finish(stage.start(batch))
    accelerator.drain()
    assert moved.tolist() == [6] * 4
    assert stage.statistics().staged_nbytes == 32


def test_a_batch_arrives_where_nothing_can_be_page_locked(
    accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pin(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(accelerator, "pin", pin)
    stage = DeviceStage(accelerator)
    host = torch.arange(4)
    with pytest.warns(RuntimeWarning, match=r"32 bytes could not .* memory \(CUDA error: out of memory\);.*ulimit -l"):
        moving = stage.start(host)
    host.fill_(9)  # not page-locked: it has been read already
    moved = stage.finish(moving)
    accelerator.drain()
    assert moved.tolist() == [0, 1, 2, 3]
    stage.close()
    assert (stage.statistics().copied_nbytes, stage.statistics().staged_nbytes) == (32, 0)


def test_only_what_was_locked_is_unlocked(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    stage.register(4096, 64)
    stage.unregister(8192)
    assert accelerator.locked == {4096: 64}
    stage.unregister(4096)
    stage.unregister(4096)
    assert accelerator.locked == {}


def test_a_device_without_streams_gets_its_batch_at_delivery() -> None:
    stage = PlainStage(torch.device("meta"))
    batch = {"x": torch.ones(3), "name": "a"}
    moving = stage.start(batch)
    assert moving is batch
    assert not stage.has_room()
    moved = stage.finish(moving)
    assert moved["x"].is_meta
    assert moved["name"] == "a"
    assert stage.statistics() == StageStatistics(copied_nbytes=12)


def test_a_batch_that_is_there_already_is_not_counted() -> None:
    stage, batch = PlainStage(torch.device("cpu")), torch.ones(3)
    with stage:
        assert stage.finish(stage.start(batch)) is batch
    assert stage.statistics() == StageStatistics()


def test_a_depth_in_batches_is_kept(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator, Depth(batches=4))
    slots = Slots(stage)
    flights = []
    while stage.has_room():
        flights.append(stage.start(slots.batch(len(flights))))
    assert len(flights) == 4
    assert accelerator.waits == 0


def test_a_copy_that_the_loop_did_not_wait_for_is_hidden(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator)
    slots = Slots(stage)
    early = stage.start(slots.batch(1))
    accelerator.side.advance(1000)
    stage.finish(early)
    accelerator.drain()
    late = stage.start(slots.batch(2))
    stage.finish(late)
    accelerator.loop.advance(1000)  # comes to the wait before the copy begins
    accelerator.drain()
    stage.close()
    statistics = stage.statistics()
    assert statistics.copy_s == pytest.approx(0.064)
    assert statistics.hidden_copy_s == pytest.approx(0.032)


def test_a_batch_that_does_not_fit_is_named(accelerator: FakeAccelerator) -> None:
    stage = DeviceStage(accelerator, Depth(batches=3))
    slots = Slots(stage)
    flights = [stage.start(slots.batch(1)), stage.start(slots.batch(2))]

    def refuse(host: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    accelerator.copy = refuse  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        stage.start(slots.batch(3))
    (note,) = caught.value.__notes__
    assert "a batch of 32 bytes was copied to cpu, with 2 more on their way (64 bytes)" in note
    assert "prefetch=2" in note
    del flights
    stage.close()


def test_two_devices_of_one_process_do_not_mix() -> None:
    one, other = FakeAccelerator(), FakeAccelerator()
    stages = [DeviceStage(one), DeviceStage(other)]
    slots = [Slots(stage) for stage in stages]
    flights = [stage.start(slot.batch(value)) for stage, slot, value in zip(stages, slots, (3, 4), strict=True)]
    seen: list[Any] = []
    for accelerator, stage, flight in zip((one, other), stages, flights, strict=True):
        accelerator.read(stage.finish(flight), seen)
    one.drain()
    assert seen == [[3] * 4]
    other.drain()
    assert seen == [[3] * 4, [4] * 4]


def test_a_batch_that_is_there_already_is_kept_for_the_loop_s_stream(accelerator: FakeAccelerator) -> None:
    used: list[Any] = []
    accelerator.device = torch.device("meta")
    accelerator.record_stream = lambda tensor, stream: used.append((tensor, stream))  # type: ignore[method-assign]
    batch = torch.empty(3, device="meta")
    stage = DeviceStage(accelerator)
    assert stage.finish(stage.start([batch]))[0] is batch
    assert [(tensor is batch, stream is accelerator.loop) for tensor, stream in used] == [(True, True)]


def test_staging_memory_is_written_on_the_cpus_of_the_node(accelerator: FakeAccelerator) -> None:
    before = os.sched_getaffinity(0)
    seen: list[set[int]] = []
    pin = accelerator.pin
    accelerator.pin = lambda host: (seen.append(os.sched_getaffinity(0)), pin(host))[1]  # type: ignore[method-assign]
    with DeviceStage(accelerator, cpus=frozenset({min(before)})) as stage:
        stage.start([torch.ones(3)])
        accelerator.drain()
    assert seen == [{min(before)}]
    assert os.sched_getaffinity(0) == before
