"""Cost of sending, measured before a loop has worker processes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import Dataset

import feedline as fl
from feedline.loader.monitoring import monitor as monitor_module
from feedline.loader.monitoring import sending as sending_module
from feedline.loader.monitoring.monitor import MEASURE_AFTER_NS
from feedline.loader.monitoring.sending import MOST_NBYTES, PAUSE_FACTOR, SendingMeasurement, sending_cost
from feedline.loader.report.context import SendingCost
from feedline.loader.report.model import TRANSPORT, Model
from feedline.loader.report.replay import PROCESS, EngineSetting, Task


def objects() -> list[Any]:
    return [{"numbers": list(range(2000)), "name": str(number)} for number in range(64)]


@pytest.mark.alone
def test_python_objects_cost_more_than_tensors_of_default_collate() -> None:
    plain, tensors = sending_cost(objects(), collated=False), sending_cost(torch.zeros(64, 2000), collated=True)
    assert plain is not None
    assert tensors is not None
    assert min(plain.packing.cpu_s, plain.unpacking.cpu_s) > 0
    assert plain.packing.cpu_s + plain.unpacking.cpu_s > tensors.packing.cpu_s + tensors.unpacking.cpu_s


def test_a_measurement_leaves_the_batch_as_it_is_and_nothing_behind() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    for batch in (torch.arange(300_000), objects(), {"x": torch.arange(300_000), "y": ["a"]}):
        for collated in (True, False):
            kept = str(batch)
            assert sending_cost(batch, collated=collated) is not None
            assert str(batch) == kept
    assert set(Path("/proc/self/fd").iterdir()) <= before


@pytest.mark.parametrize("batch", [lambda: 0, torch.empty(MOST_NBYTES + 1, dtype=torch.uint8)], ids=["lambda", "large"])
def test_what_cannot_or_should_not_be_sent_has_no_cost(batch: Any) -> None:
    unsent = sending_cost((item for item in (batch,)), collated=False) if callable(batch) else None
    assert unsent is None
    assert callable(batch) or sending_cost(batch, collated=True) is None


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        time.sleep(MEASURE_AFTER_NS / 10e9)
        return {"numbers": list(range(index, index + 4000))}


def plain_list(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize("collated", [False, True])
def test_a_large_batch_is_measured_once_the_loop_lasts_long_enough(collated: bool) -> None:
    batch = torch.zeros(1 << 20, dtype=torch.uint8) if collated else [bytes(1 << 19)] * 2
    second_ns = 1_000_000_000
    measurement = SendingMeasurement()
    assert measurement.is_due(5 * second_ns)
    measurement.measure(batch, 5 * second_ns, collated=collated)
    assert measurement.cost is None
    assert not measurement.is_due(
        5 * second_ns + PAUSE_FACTOR * 500_000
    )  # half a millisecond for a copy of 1 MiB, or less
    assert measurement.is_due(6 * second_ns)
    measurement.measure(batch, 6 * second_ns, collated=collated)
    assert not measurement.is_due(10**6 * second_ns)
    assert [measurement.cost] != [None]


@pytest.mark.parametrize("method", ["inline", "thread", "process"])
def test_a_loop_without_processes_measures_one_batch(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending_module, "PAUSE_FACTOR", 0)  # at the first look, however long the loop lasts
    workers: dict[str, Any] = {} if method == "inline" else {"num_workers": 1, "worker_method": method}
    with fl.DataLoader(Slow(), batch_size=2, collate_fn=plain_list, **workers) as loader:
        for _ in loader:
            pass
        model = loader.report().replayed
        assert model is not None
        sending = model.context.sending
        assert (sending is None) == (method == "process")
        if sending is not None:
            assert with_processes(model) < with_processes(with_cost(model, 0.0))
            assert with_processes(with_cost(model, 1000.0)) < 0.1


class Watched(list[int]):
    """A list that counts the values that are read one by one."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        for value in super().__iter__():
            Watched.read += 1
            yield value


def watched(samples: list[int]) -> Watched:
    return Watched(range(100_000))


def test_a_short_loop_does_not_count_the_many_values_of_a_batch() -> None:
    Watched.read = 0
    with fl.DataLoader(list(range(40)), batch_size=2, collate_fn=watched) as loader:
        for _ in loader:
            pass
        assert loader.report().replayed is not None
    assert Watched.read < 1000


def test_looks_at_a_batch_of_many_values_cost_little() -> None:
    batch = Watched(range(100_000))
    Watched.read = 0
    measurement = SendingMeasurement()
    begun_ns = measured_ns = 5_000_000_000
    for now_ns in range(begun_ns, begun_ns + 300_000_000_000, 100_000_000):
        if measurement.is_due(now_ns):
            measured_ns = now_ns
            measurement.measure(batch, now_ns, collated=False)
            # A value takes less than 5 microseconds, and one look in 100 of the loop's time; the last one measures.
            assert measurement.cost is not None or Watched.read * 5_000 < 0.04 * (now_ns - begun_ns) + 1_000_000
    assert measurement.cost is not None
    assert measured_ns - begun_ns > 50_000_000_000


@dataclass
class Halved:
    """A batch whose constructor changes its tensor in place."""

    x: torch.Tensor

    def __post_init__(self) -> None:
        self.x.div_(2)


@dataclass
class Scaled:
    x: torch.Tensor
    scale: InitVar[float]

    def __post_init__(self, scale: float) -> None:
        self.x = self.x * scale


@dataclass
class Masked:
    x: torch.Tensor
    mask: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mask = self.x > 1


class Single(NamedTuple("Single", [("x", Any), ("y", Any)])):
    __slots__ = ()

    def __new__(cls, x: torch.Tensor) -> Any:
        return super().__new__(cls, x, x + 1)


class Matched(Sequence[Any]):
    """A sequence whose constructor refuses lists."""

    def __init__(self, items: Any) -> None:
        if not isinstance(items, tuple):
            raise ValueError("a tuple is needed")
        self._items = items

    def __getitem__(self, place: Any) -> Any:
        return self._items[place]

    def __len__(self) -> int:
        return len(self._items)


def in_class(kind: type, samples: list[Any]) -> Any:
    x = torch.stack(samples).double()
    return kind(x, 3.0) if kind is Scaled else kind((x,)) if kind is Matched else kind(x)


def fields_of(batch: Any) -> list[Any]:
    return list(batch) if isinstance(batch, (Matched, Single)) else list(vars(batch).values())


@pytest.mark.parametrize("kind", [Halved, Scaled, Masked, Single, Matched])
def test_a_measurement_builds_no_batch_of_the_loop_again(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[type] = []
    original = SendingMeasurement.measure

    def measure(self: SendingMeasurement, batch: Any, *arguments: Any, **named: Any) -> None:
        original(self, batch, *arguments, **named)
        measured.append(type(batch))

    monkeypatch.setattr(SendingMeasurement, "measure", measure)
    monkeypatch.setattr(sending_module, "PAUSE_FACTOR", 0)
    monkeypatch.setattr(monitor_module, "MEASURE_AFTER_NS", 0)
    monkeypatch.setattr(monitor_module._early, "due_ns", 0)  # the first publication is followed by a look
    arguments: dict[str, Any] = {"batch_size": 2, "collate_fn": partial(in_class, kind)}
    data = torch.arange(400)
    with fl.DataLoader(data, **arguments) as loader:
        batches = list(loader)
    assert measured == [kind]
    for batch, expected in zip(batches, torch.utils.data.DataLoader(data, **arguments), strict=True):
        assert type(batch) is kind
        assert all(map(torch.equal, fields_of(batch), fields_of(expected)))


def with_cost(model: Model, seconds: float) -> Model:
    cost = SendingCost(Task(0.0, seconds), Task(0.0, seconds))
    return replace(model, context=replace(model.context, sending=cost))


def with_processes(model: Model) -> float:
    return model.gain(model.with_setting(EngineSetting(1, method=PROCESS)))


def test_an_unmeasured_batch_has_the_assumed_cost() -> None:
    with fl.DataLoader(torch.utils.data.TensorDataset(torch.zeros(40, 2)), batch_size=2) as loader:
        for _ in loader:
            pass
        model = loader.report().replayed
    assert model is not None
    model = replace(model, context=replace(model.context, sending=None))
    case = model.with_setting(EngineSetting(1, method=PROCESS))
    assert case.change is not None
    assert case.change(model.measured.batches[0]).receive == TRANSPORT
