"""Images decoded by a thread ahead of the loop, on the CPU device and on a device with streams of its own."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from test_copy import FakeAccelerator, FakeStream, _memory_of

import feedline as fl
from feedline.loader.device import Depth, DeviceStage, PlainStage, decoding
from feedline.loader.device.decoding import DecodeThread, Decoding

CPU = torch.device("cpu")


class Encoded:
    """A batch whose `to` is `decode(numbers)`."""

    decodes_on_device = True
    decode: Callable[[torch.Tensor], Any] = staticmethod(lambda numbers: numbers * 2)

    def __init__(self, samples: Any) -> None:
        self.numbers = torch.as_tensor(samples)

    @property
    def host_nbytes(self) -> int:
        return self.numbers.nbytes

    def to(self, device: torch.device) -> Any:
        assert device == CPU
        return Encoded.decode(self.numbers)


def collated(samples: list[int]) -> dict[str, Any]:
    return {"images": Encoded(samples), "names": [str(sample) for sample in samples]}


def loader_of(kind: str, **arguments: Any) -> fl.DataLoader:
    workers = {} if kind == "inline" else {"num_workers": 1, "worker_method": kind, "prefetch_factor": 8}
    return fl.DataLoader(range(24), 4, collate_fn=collated, **{"device": "cpu", **workers, **arguments})


def numbers_of(batches: Any) -> list[list[int]]:
    return [batch["images"].tolist() for batch in batches]


EXPECTED = [[2 * (start + row) for row in range(4)] for start in range(0, 24, 4)]

each_kind = pytest.mark.parametrize("kind", ["inline", "thread", "process"])


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


class Log:
    """A decoder that records its batches and threads; a batch of `held` waits until it is released."""

    def __init__(self, held: int = -1) -> None:
        self.held, self.released = held, threading.Event()
        self.begun: list[int] = []
        self.threads: set[threading.Thread] = set()

    def __call__(self, numbers: torch.Tensor) -> torch.Tensor:
        self.begun.append(int(numbers[0]) // 4)
        self.threads.add(threading.current_thread())
        if self.begun[-1] == self.held:
            assert self.released.wait(60)
        return numbers * 2


@each_kind
def test_batches_are_decoded_in_order_by_a_thread(kind: str, monkeypatch: pytest.MonkeyPatch, no_debris: Any) -> None:
    log = Log()
    monkeypatch.setattr(Encoded, "decode", log)
    with loader_of(kind) as loader:
        first = list(islice(loader, 2))
        state = loader.state_dict()
        stats = loader.stats()
        assert numbers_of(first) == EXPECTED[:2]
        assert first[1]["names"] == ["4", "5", "6", "7"]
        assert "device_decode" in stats.stages
        assert 0 <= stats.hidden_device_decode_s <= stats.device_decode_s > 0
    with loader_of(kind) as resumed:
        resumed.load_state_dict(state)
        assert numbers_of(resumed) == EXPECTED[2:]
        assert resumed.stats().copied_nbytes == 4 * 4 * 8
    assert threading.main_thread() not in log.threads
    assert log.begun[-4:] == [2, 3, 4, 5]


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_the_next_batches_are_decoded_during_the_step(
    kind: str, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log()
    monkeypatch.setattr(Encoded, "decode", log)
    with loader_of(kind, device=fl.Delivery("cpu", prefetch=prefetch)) as loader:
        iterator = iter(loader)
        wait_until(lambda: iterator.queue().ready == 6)
        for number in range(6):
            assert next(iterator)["images"].tolist() == EXPECTED[number]
            ahead = min(number + prefetch, 6)
            wait_until(lambda ahead=ahead: len(log.begun) == ahead)  # type: ignore[misc] # during the step
            assert iterator.queue().ready == 5 - number
    assert log.begun == list(range(6))


@each_kind
def test_an_error_comes_with_its_own_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(numbers: torch.Tensor) -> torch.Tensor:
        if numbers[0] == 8:
            error = ValueError("damaged")
            error.row = 1  # type: ignore[attr-defined]
            raise error
        return numbers * 2

    monkeypatch.setattr(Encoded, "decode", decode)
    with loader_of(kind) as loader:
        iterator = iter(loader)
        assert numbers_of(islice(iterator, 2)) == EXPECTED[:2]
        with pytest.raises(ValueError, match="damaged") as caught:
            next(iterator)
        assert "sample 9 (epoch 0, position 9, stage device)" in str(caught.value.__notes__)
        assert numbers_of(iterator) == EXPECTED[3:]


@pytest.mark.parametrize("way", ["break", "close", "exception"])
def test_images_of_a_loop_that_ended_are_not_decoded(way: str, monkeypatch: pytest.MonkeyPatch, no_debris: Any) -> None:
    log = Log(held=1)
    monkeypatch.setattr(Encoded, "decode", log)
    loader = loader_of("thread", device=fl.Delivery("cpu", prefetch=4))
    iterator = iter(loader)
    wait_until(lambda: iterator.queue().ready == 6)
    try:
        for _ in iterator:
            wait_until(lambda: log.begun == [0, 1])  # batches 2 and 3 come after it
            threading.Thread(target=open_when_closed, args=(iterator, log.released)).start()
            if way == "exception":
                raise InterruptedError
            if way == "close":
                loader.close()
            break
    except InterruptedError:
        pass
    iterator.close()
    loader.close()
    assert log.begun == [0, 1]
    monkeypatch.undo()
    with loader:
        assert numbers_of(loader)[-1] == EXPECTED[-1]


def open_when_closed(iterator: Any, gate: threading.Event) -> None:
    wait_until(lambda: iterator.closed and not iterator._staged)
    gate.set()


def test_an_interrupt_while_the_loop_waits_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, calls = Decoding.result, iter(range(100))

    def result(self: Any) -> Any:
        if next(calls) in (1, 2, 5):
            raise KeyboardInterrupt
        return wait(self)

    monkeypatch.setattr(Decoding, "result", result)
    monkeypatch.setattr(decoding, "times_s", lambda *_: (1.0, 0.5))
    seen = list[list[int]]()
    with loader_of("thread") as loader:
        iterator = iter(loader)
        while not iterator.closed:
            try:
                for batch in iterator:
                    seen += numbers_of([batch])
            except KeyboardInterrupt:
                continue
        stats = loader.stats()
    assert seen == EXPECTED
    assert (stats.device_decode_s, stats.hidden_device_decode_s) == (6.0, 3.0)


def in_child(check: Callable[[], bool]) -> bool:
    """True if `check()` is true in a forked child."""
    pid = os.fork()
    if not pid:
        signal.alarm(60)  # a child that waits for ever fails
        is_fine = False
        try:
            is_fine = check()
        finally:
            os._exit(not is_fine)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_decodes_what_its_parent_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate, parent = threading.Event(), threading.Event(), os.getpid()

    def decode(numbers: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert os.getpid() != parent or gate.wait(60)
        return numbers * 2

    monkeypatch.setattr(Encoded, "decode", decode)
    thread = DecodeThread(CPU)
    batch = [thread.start(Encoded([number])) for number in range(2)]
    assert begun.wait(60)

    def check() -> bool:
        later = [*batch, thread.start(Encoded([2]))]
        is_equal = torch.cat(thread.finish(later)).tolist() == [0, 2, 4]
        thread.close()
        return is_equal

    assert in_child(check)
    gate.set()
    assert torch.cat(thread.finish(batch)).tolist() == [0, 2]
    thread.close()


def test_the_time_that_the_loop_waited_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits = [0], threading.Event()
    monkeypatch.setattr(decoding, "monotonic_ns", lambda: clock[0])
    result = Decoding.result
    monkeypatch.setattr(Decoding, "result", lambda self: (waits.set(), result(self))[1])

    def decode(numbers: torch.Tensor) -> torch.Tensor:
        clock[0] += 3_000_000_000
        assert numbers[0] == 0 or waits.wait(60)
        clock[0] += 5_000_000_000
        return numbers

    monkeypatch.setattr(Encoded, "decode", decode)
    stage = PlainStage(CPU)
    early = stage.start([Encoded([0])])
    wait_until(lambda: early.moving[0].has_ended)
    stage.finish(early)
    waits.clear()
    stage.finish(stage.start([Encoded([1])]))
    statistics = stage.statistics()
    stage.close()
    assert statistics.decode_s == 16
    assert 8 <= statistics.hidden_decode_s <= 11  # of the second, at least the last 5 were waited for


def test_host_memory_is_free_once_it_is_decoded() -> None:
    thread, images = DecodeThread(CPU), Encoded([1])
    reference, moving = weakref.ref(images), thread.start(images)
    del images
    thread.close()
    assert reference() is None
    assert thread.finish([moving])[0].tolist() == [2]


class Streams(FakeAccelerator):
    """The fake with a stream for decoding; each thread has its current stream."""

    def __init__(self) -> None:
        self._local = threading.local()
        super().__init__()
        self.decoding = FakeStream()

    @property
    def current(self) -> FakeStream:
        return getattr(self._local, "current", self.loop)

    @current.setter
    def current(self, stream: FakeStream) -> None:
        self._local.current = stream

    def decode_stream(self) -> FakeStream:
        return self.decoding

    def advance(self, steps: int) -> bool:
        return self.decoding.advance(steps) or super().advance(steps)

    def decode(self, host: torch.Tensor) -> torch.Tensor:
        """Read the host's memory at once, and write the device's when the stream is advanced."""
        assert self.current is self.decoding
        device = self._allocate(host)
        self.decoding.queue.append(partial(self._copy_now, device.untyped_storage(), _memory_of(host).clone(), []))
        return device


def test_a_device_decodes_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Streams()
    monkeypatch.setattr(Encoded, "decode", accelerator.decode)
    seen: list[Any] = []
    with DeviceStage(accelerator, Depth(batches=2)) as stage:
        for value in range(4):
            moving = stage.start([Encoded([value, value]), torch.tensor([value])])
            wait_until(lambda moving=moving: moving.moving[0][0].has_ended)  # type: ignore[misc]
            images, numbers = stage.finish(moving)
            del moving
            accelerator.read(images, seen)
            accelerator.read(numbers, seen)
            assert accelerator._users[images.data_ptr()] == {accelerator.loop}
            reference = weakref.ref(images)
            del images, numbers
            assert reference() is None
            accelerator.loop.advance(10)  # waits for both streams
            assert len(seen) == 2 * value
            accelerator.side.advance(10)
            accelerator.loop.advance(10)
            assert len(seen) == 2 * value  # still for the decoder
            accelerator.decoding.advance(10)
            accelerator.drain()
        assert seen == [part for value in range(4) for part in ([value, value], [value])]
    statistics = stage.statistics()
    assert statistics.decode_s == pytest.approx(4 * 0.016)
    assert statistics.copied_nbytes == 4 * (16 + 8)


def test_memory_that_the_decoder_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Encoded, "decode", refuse)
    for stage in (DeviceStage(Streams()), PlainStage(CPU)):
        with stage:
            moving = stage.start(Encoded([1, 2]))
            with pytest.raises(torch.OutOfMemoryError) as caught:
                stage.finish(moving)
            assert "a batch of 16 bytes was copied to cpu" in caught.value.__notes__[0]


def test_images_that_come_after_the_end_of_the_thread_are_decoded() -> None:
    """As if the handler of a signal had closed the loader while it handed them over."""
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert Decoding(torch.arange(3), CPU, None, thread).result().tolist() == [0, 1, 2]
