"""Interrupts between a batch and the loop: the same iterator continues without a loss or a repetition."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from types import FrameType
from typing import Any

import pytest
import torch
from gated import Gated
from rounds import rounds

import feedline as fl
from feedline.loader import pools
from feedline.loader.device import PlainStage


class Numbers:
    """16 samples, each large enough to travel in a slot."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.full((5_000,), index)


class Encoded:
    """A batch that a thread decodes."""

    decodes_on_device = True
    host_nbytes = 0

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self._samples = samples

    def to(self, device: torch.device) -> torch.Tensor:
        return torch.stack(self._samples).to(device)


class Interrupter:
    """Raises KeyboardInterrupt at the entry of the `at`-th called function of feedline's loop.

    Ranges of torch's profiler, which the loop enters and leaves, count too.
    A collected generator is entered too, but no signal could arrive there. Only the model of the loop has generators.
    """

    def __init__(self, at: int) -> None:
        self.at, self.count, self.place = at, 0, ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        is_loop = "feedline/loader" in path and not path.endswith("report/replay.py")
        if event == "call" and (is_loop or path.endswith("torch/autograd/profiler.py")):
            self.count += 1
            if self.count == self.at:
                self.place = f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return None

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        former = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(former)


PROCESS = {"num_workers": 1, "worker_method": "process", "persistent_workers": True}
"""One process for hundreds of iterators: a new one for each would take minutes, and would not change the loop."""


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"shuffle": True, "seed": 1},
        {**PROCESS, "seed": 0},
        {"device": fl.Delivery("cpu", dtype=torch.float64)},
        {"device": "cpu", "collate_fn": Encoded},
    ],
)
def test_nothing_is_lost_or_repeated(arguments: dict[str, Any], no_debris: Any) -> None:
    interrupt_everywhere(arguments)


def test_nothing_is_lost_or_repeated_under_the_profiler(no_debris: Any) -> None:
    with torch.autograd.profiler.profile():
        interrupt_everywhere({"seed": 0})


def interrupt_everywhere(arguments: dict[str, Any]) -> None:
    with fl.DataLoader(Numbers(), 4, **arguments) as loader:
        expected = [int(batch[0, 0]) for batch in loader]
        for at in range(1, 1000):
            loader.set_epoch(0)
            iterator = iter(loader)
            seen = [int(next(iterator)[0, 0])]
            interrupter = Interrupter(at)
            with interrupter.interrupting():
                seen.append(int(next(iterator)[0, 0]))
            seen += [int(batch[0, 0]) for batch in iterator]
            assert seen == expected, interrupter.place
            if not interrupter.place:
                return


class InterruptedSampler:
    """16 random numbers; the `at`-th draw of all raises KeyboardInterrupt."""

    def __init__(self, at: int) -> None:
        self.at, self.drawn = at, 0

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        for _ in range(16):
            self.drawn += 1
            if self.drawn == self.at:
                raise KeyboardInterrupt
            yield int(torch.randint(1000, ()))


class EagerStage(PlainStage):
    """A stage that starts each batch as soon as it is there."""

    def has_room(self) -> bool:
        return True


def first_elements(sampler: InterruptedSampler, **arguments: Any) -> list[int]:
    torch.manual_seed(0)
    seen: list[int] = []
    with fl.DataLoader(Numbers(), 2, sampler=sampler, **arguments) as loader:
        iterator = None
        while iterator is None or not iterator.closed:
            try:
                iterator = iterator or iter(loader)
                seen += (int(batch[0, 0]) for batch in iterator)
            except KeyboardInterrupt:
                continue
    return seen


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("arguments", [{}, {"num_workers": 1, "worker_method": "process", "seed": 0}])
def test_an_interrupted_sampler_continues(
    device: str | None, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if device is not None:
        monkeypatch.setattr(pools, "open_stage", lambda *_, **__: EagerStage(torch.device("cpu")))
    expected = first_elements(InterruptedSampler(-1), device=device, **arguments)
    assert len(set(expected)) > 4
    for at in range(6, 17, rounds(2, 1)):  # iter(loader) draws the first four, and may then return no iterator
        sampler = InterruptedSampler(at)
        assert first_elements(sampler, device=device, **arguments) == expected, at
        assert sampler.drawn > 16


@contextmanager
def handler_while_it_waits(loader: fl.DataLoader[Any], handler: Callable[..., object]) -> Iterator[None]:
    """Run `handler` as that of a signal while the loop over `Gated` waits for its sixth batch."""

    def signal_when_it_waits() -> None:
        while loader.delivered < 5 or not loader._fl_monitor.waiting_s():
            sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, handler)
    try:
        waker = threading.Thread(target=signal_when_it_waits)
        waker.start()
        yield
        waker.join()
    finally:
        signal.signal(signal.SIGUSR1, former)


@pytest.mark.parametrize("method", ["thread", "process"])
def test_a_handler_that_closes_the_loader_ends_a_loop_that_waits(method: str, tmp_path: Path) -> None:
    gate, received = tmp_path / "gate", list[list[int]]()
    loader = fl.DataLoader(Gated(gate), 4, num_workers=1, worker_method=method)

    def close(*_: object) -> None:
        gate.touch()
        loader.close()

    with handler_while_it_waits(loader, close):
        received += [batch.tolist() for batch in loader]
    assert received == [list(range(start, start + 4)) for start in range(0, 20, 4)]


@pytest.mark.parametrize("late", [TimeoutError("the step takes too long"), SystemExit("the job ends")], ids=repr)
@pytest.mark.parametrize(("method", "device"), [("thread", None), ("thread", "cpu"), ("process", None)])
def test_a_handler_that_raises_loses_no_batch(
    method: str, device: str | None, late: BaseException, tmp_path: Path
) -> None:
    gate, received = tmp_path / "gate", list[list[int]]()

    def give_up(*_: object) -> None:
        raise late

    with fl.DataLoader(Gated(gate), 4, num_workers=1, worker_method=method, device=device) as loader:
        iterator = iter(loader)
        with handler_while_it_waits(loader, give_up), pytest.raises(type(late)) as caught:
            received += (batch.tolist() for batch in iterator)
        gate.touch()
        received += (batch.tolist() for batch in iterator)
    assert caught.value is late
    assert received == [list(range(start, start + 4)) for start in range(0, 40, 4)]
