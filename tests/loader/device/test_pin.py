"""`pin_memory=True`, with the copy itself replaced: page-locked memory needs an accelerator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from feedline.loader.device import Depth, PinStage, StageStatistics


def marked(batch: Any) -> tuple[str, Any]:
    return threading.current_thread().name, batch


def pinning_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("feedline-pin")]


class Gate:
    """A copy that waits for permission to continue."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, batch: Any) -> Any:
        assert self.open.wait(60)
        return batch


@pytest.fixture
def stage_of() -> Any:
    stages: list[PinStage] = []

    def make(pin: Callable[[Any], Any], depth_nbytes: int | None = None) -> PinStage:
        stages.append(PinStage(Depth(depth_nbytes), pin))
        return stages[-1]

    yield make
    for stage in stages:
        stage.close()


def test_the_copy_is_made_on_a_thread_of_its_own(stage_of: Any) -> None:
    stage = stage_of(marked)
    name, batch = stage.finish(stage.start("a batch"))
    assert name.startswith("feedline-pin")
    assert batch == "a batch"


def test_start_does_not_wait(stage_of: Any) -> None:
    gate = Gate()
    stage = stage_of(gate)
    first, second = stage.start([1]), stage.start([2])
    gate.open.set()
    assert (stage.finish(first), stage.finish(second)) == ([1], [2])


def test_an_error_is_raised_at_delivery_and_the_stage_works_on(stage_of: Any) -> None:
    stage = stage_of(lambda batch: 1 // batch)
    broken, fine = stage.start(0), stage.start(1)
    with pytest.raises(ZeroDivisionError) as caught:
        stage.finish(broken)
    assert "pin_memory=True" in caught.value.__notes__[0]
    assert stage.finish(fine) == 1


def test_close_joins_the_thread(stage_of: Any) -> None:
    stage = stage_of(marked)
    with stage:
        stage.finish(stage.start(1))
        assert pinning_threads()
    assert not pinning_threads()


def test_what_another_iterator_started_survives_close(stage_of: Any) -> None:
    stage = stage_of(marked)
    theirs = stage.start("theirs")
    stage.close()
    ours = stage.start("ours")
    assert stage.finish(theirs)[1] == "theirs"
    assert stage.finish(ours)[1] == "ours"


def test_no_thread_before_the_first_batch(stage_of: Any) -> None:
    stage_of(marked)
    assert not pinning_threads()


def test_depth_and_statistics(stage_of: Any) -> None:
    stage = stage_of(lambda batch: batch, 1000)
    assert stage.has_room()
    first = stage.start(torch.ones(100))
    assert stage.has_room()
    second = stage.start({"x": torch.ones(100), "y": "text"})
    assert not stage.has_room()
    assert stage.statistics() == StageStatistics(2, 800, 800, 800)
    stage.finish(first)
    stage.finish(second)
    assert stage.statistics() == StageStatistics(0, 0, 800, 800)


class Custom:
    pinned = False

    def pin_memory(self) -> Custom:
        self.pinned = True
        return self


def test_torch_s_own_rules_by_default() -> None:
    custom = Custom()
    batch = {"custom": custom, "name": "text", "many": (b"raw", [3])}
    with PinStage() as stage:
        pinned = stage.finish(stage.start(batch))
    assert pinned == batch
    assert custom.pinned
