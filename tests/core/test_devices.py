"""Properties of devices."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

import feedline as fl
from feedline import transforms as T
from feedline.core.devices import gpu_of, gpu_utilization, uploaded
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


class OffTheCpu(torch.overrides.TorchFunctionMode):
    """Functions that take values from the CPU to another device, except for `uploaded`."""

    def __init__(self) -> None:
        self.found = set[str]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        is_moved = isinstance(result, torch.Tensor) and not result.is_cpu and any(each.is_cpu for each in tensors)
        is_indexed = function is torch.Tensor.__getitem__ and _has_host_index(args[1]) and not args[0].is_cpu
        caller = sys._getframe(1)
        if (is_moved or is_indexed) and caller.f_code is not uploaded.__code__:
            self.found.add(f"{function.__name__} in {caller.f_code.co_name}")
        return result


def _has_host_index(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(part, (list, np.ndarray)) or (isinstance(part, torch.Tensor) and part.is_cpu) for part in parts
    )


def test_values_go_to_a_device_unchanged() -> None:
    odd = np.arange(24).reshape(4, 6)[::2, 1::2]
    for values in (
        odd,
        torch.from_numpy(odd),
        torch.tensor(2.5),
        np.empty((0, 3)),
        torch.ones(3, dtype=torch.bfloat16),
    ):
        there = uploaded(values, torch.device("cpu"))
        assert torch.equal(there, torch.as_tensor(values))
        away = uploaded(values, torch.device("meta"))
        assert (away.is_meta, away.shape, away.dtype) == (True, there.shape, there.dtype)


@pytest.mark.parametrize("levels", [True, False])
def test_batched_steps_take_all_values_to_the_device_in_one_way(levels: bool) -> None:
    """With CUDA, any other way may wait for the steps of the loop."""
    jitter, keys = T.ColorJitter(0.4, 0.4, 0.4, 0.2), np.arange(12, dtype=np.uint64)
    random = [T.RandomGrayscale(), T.RandomApply([jitter]), T.RandomChoice([T.RandomVerticalFlip(), jitter])]
    steps = [
        T.RandomResizedCrop((24, 20)), T.RandomResizedCrop(40, interpolation="bicubic"), T.Resize((30, 70)),
        T.RandomCrop((52, 80), padding=(30, 12), fill=(9, 80, 200)), T.RandomCrop(40, padding=8, padding_mode="edge"),
        T.RandomHorizontalFlip(), jitter, *random, T.GaussianBlur((5, 7), (0.3, 2.0)), T.RandomErasing(0.8, value=3),
    ]  # fmt: skip
    if not levels:
        steps = [T.ToTensor(), T.Normalize(T.IMAGENET_MEAN, T.IMAGENET_STD), T.RandomErasing(1.0, value="random")]
        steps = [T.Compose(steps[:2]), T.Compose(steps)]
    images = torch.empty(12, 3, 48, 64, dtype=torch.uint8, device="meta")
    for step in steps:
        with OffTheCpu() as moves:
            assert T.OnBatch(step)(images, keys).is_meta
        assert not moves.found, (step, moves.found)
    for mixture in () if levels else (T.MixUp(12), T.CutMix(12)):
        with OffTheCpu() as moves:
            T.OnBatch(mixture)((images.float(), torch.arange(12, device="meta")), keys)
        assert not moves.found, (mixture, moves.found)
