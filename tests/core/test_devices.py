"""Properties of devices."""

from __future__ import annotations

import pytest
import torch

from feedline.core.devices import gpu_utilization


def test_without_a_gpu_its_use_is_unknown() -> None:
    assert torch.cuda.is_initialized() or gpu_utilization() is None


@pytest.mark.parametrize("error", [ModuleNotFoundError("pynvml"), RuntimeError("NVML"), OSError("no permission")])
def test_without_nvml_the_use_of_a_gpu_is_unknown(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> int:
        raise error

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "utilization", fail)
    assert gpu_utilization() is None
    monkeypatch.setattr(torch.cuda, "utilization", lambda: 87)
    assert gpu_utilization() == 0.87
