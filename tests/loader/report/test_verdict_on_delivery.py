"""The verdict on delivery: copies to a device, and page-locking.

The bus is simulated, with the interface of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from time import sleep
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import feedline as fl
from diagnosis import choose
from diagnosis_device import SlowBus, on_bus, with_slow_pins
from diagnosis_pipelines import synthetic
from feedline.loader.report import Verdict


class Zeros(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(5_000)


def verdict_of(place: AbstractContextManager[None], step: Callable[[Any], None], **arguments: Any) -> Verdict:
    with place, fl.DataLoader(Zeros(), batch_size=4, **arguments) as loader:
        for batch in loader:
            step(batch)
        assert {"copy"} <= set(loader.stats().stages)
        return loader.report()


def test_steps_that_wait_for_the_bus() -> None:
    bus = SlowBus(rate=1e6)  # 80 ms a batch: far longer than anything else, however slow the machine
    verdict = verdict_of(on_bus(bus), bus.step(0.001), device="cpu")
    assert verdict.limiting_stage == "copy", str(verdict)
    assert "the device copies 78 KiB a batch in " in verdict.explanation
    (smaller,) = (advice for advice in verdict.advice if "uint8" in advice.text)
    assert smaller.basis == "bound"


def test_staging_on_the_host_is_a_stage_with_a_remedy() -> None:
    bus = SlowBus(rate=1e9, pin_rate=1e6)
    threads = {"num_workers": 2, "worker_method": "thread"}
    verdict = verdict_of(on_bus(bus), bus.step(0.001), device="cpu", **threads)
    assert verdict.limiting_stage == "copy", str(verdict)
    assert verdict.explained_share >= 0.9
    assert any("100 % of the bytes were copied twice" in advice.text for advice in verdict.advice)


def test_page_locking_is_a_stage_with_a_remedy() -> None:
    verdict = verdict_of(with_slow_pins(0.08), lambda _: None, pin_memory=True)
    assert verdict.limiting_stage == "copy", str(verdict)
    assert verdict.explained_share >= 0.9
    assert any("in place of pin_memory=True" in advice.text for advice in verdict.advice)


def slow_transform(batch: torch.Tensor) -> torch.Tensor:
    sleep(0.08)
    return batch


class SlowToDecode:
    """A batch whose decoder on the device takes long."""

    decodes_on_device = True

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self._samples = samples

    def to(self, device: torch.device) -> torch.Tensor:
        sleep(0.08)
        return torch.stack(self._samples).to(device)


@pytest.mark.parametrize(
    ("arguments", "stage", "remedy"),
    [
        ({"device": fl.Delivery("cpu", transform=slow_transform)}, "device_transform", "Delivery(transform=...)"),
        ({"device": "cpu", "collate_fn": SlowToDecode}, "device_decode", "cpu_share="),
    ],
    ids=["transform", "decode"],
)
def test_work_on_the_device_is_a_stage_with_a_remedy(arguments: dict[str, Any], stage: str, remedy: str) -> None:
    with fl.DataLoader(Zeros(), batch_size=4, **arguments) as loader:
        for _ in loader:
            pass
        verdict = loader.report()
    assert verdict.limiting_stage == stage, str(verdict)
    assert verdict.explained_share >= 0.9
    assert any(remedy in advice.text for advice in verdict.advice)


def test_loops_of_the_bench_are_chosen_by_a_part_of_their_name() -> None:
    known = synthetic()
    assert [pipeline.name for pipeline in choose(known, "sampler")] == ["slow sampler"]
    with pytest.raises(ValueError, match=r"no name contains 'fast sampler': .*; slow sampler; "):
        choose(known, "fast sampler")
