"""Properties of devices."""

from __future__ import annotations

import threading

import pytest
import torch

import feedline as fl
from feedline.core.devices import gpu_of, gpu_utilization
from feedline.loader.monitoring import machine


def test_without_a_gpu_its_use_is_unknown() -> None:
    assert torch.cuda.is_initialized() or gpu_utilization() is None


@pytest.mark.parametrize("error", [ModuleNotFoundError("pynvml"), RuntimeError("NVML"), OSError("no permission")])
def test_without_nvml_the_use_of_a_gpu_is_unknown(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "utilization", fail)
    assert gpu_utilization() is None
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: 87)
    assert gpu_utilization() == 0.87


def test_the_gpu_of_a_loop_is_that_of_its_batches_or_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert gpu_of(torch.device("cuda:3")) == torch.device("cuda:3")
    assert gpu_of(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert gpu_of(cuda) is gpu_of(None) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert gpu_of(cuda) == gpu_of(None) == torch.device("cuda:2")


def test_other_threads_report_the_gpu_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank selects its GPU in one thread, and metrics are read in others, where the current one is number 0."""
    here = threading.get_ident()
    seen = list[torch.device]()

    def utilization(device: torch.device) -> int:
        seen.append(device)
        return 60

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2 if threading.get_ident() == here else 0)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    loader = fl.DataLoader(range(8), batch_size=2)
    shares = list[float | None]()
    for _ in loader:
        reader = threading.Thread(target=lambda: shares.append(loader.stats().gpu_utilization))
        reader.start()
        reader.join()
    assert shares == [0.6] * 4
    assert set(seen) == {torch.device("cuda:2")}


def test_after_the_loop_its_latest_use_of_the_gpu_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    use = 60
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: use)
    monkeypatch.setattr(machine, "_MACHINE_S", 0.0)  # no figure is young enough to be used again
    loader = fl.DataLoader(range(8), batch_size=2)
    for _ in loader:
        assert loader.stats().gpu_utilization == 0.6
    use = 0
    assert loader.stats().gpu_utilization == 0.6
    next(iter(loader))
    assert loader.stats().gpu_utilization == 0.0
