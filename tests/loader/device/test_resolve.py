"""The stages for the arguments `device=` and `pin_memory=`, and the errors where there is none."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

from feedline.core.devices import usable_device
from feedline.errors import ArgumentError
from feedline.loader.device import DeviceStage, PinStage, PlainStage, open_stage
from feedline.loader.device.backend import AcceleratorBackend
from feedline.loader.device.resolve import backend_of


@pytest.fixture
def no_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.fixture
def two_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.parametrize("device", ["cuda0", "gpu", 3.5, object()])
def test_what_is_no_device(device: object) -> None:
    with pytest.raises(ArgumentError, match=r"is not a device that torch knows .* Pass 'cuda'"):
        usable_device(device)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_cuda_build")
def test_a_build_without_cuda() -> None:
    message = f"device='cuda': torch {torch.__version__} is built without CUDA. Install"
    with pytest.raises(ArgumentError, match=re.escape(message)):
        usable_device("cuda")


def test_a_cuda_build_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ArgumentError, match=r"finds 0 CUDA devices \(CUDA_VISIBLE_DEVICES is ''\)"):
        usable_device(torch.device("cuda"))


@pytest.mark.usefixtures("two_cuda_devices")
def test_an_index_past_the_last_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ArgumentError, match=r"'cuda:2': .* finds 2 CUDA devices \(CUDA_VISIBLE_DEVICES is not set\)"):
        usable_device("cuda:2")


@pytest.mark.usefixtures("two_cuda_devices")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 1)])
def test_cuda_is_copied_ahead(device: str | torch.device) -> None:
    assert isinstance(open_stage(device), DeviceStage)


def test_a_device_that_torch_cannot_use_here() -> None:
    with pytest.raises(ArgumentError, match=r"device='hpu': torch .* cannot use it here"):
        usable_device("hpu")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_devices_without_streams(device: str) -> None:
    assert usable_device(device) == torch.device(device)
    assert isinstance(open_stage(device), PlainStage)


def accelerated_by(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: device is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)


def test_no_stage_without_a_device_and_pinning() -> None:
    assert open_stage() is None


def test_pinning_where_there_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerated_by(monkeypatch, "cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(open_stage(pin_memory=True), PinStage)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (None, "set as true but no accelerator is found, then device pinned memory won't be used."),
        ("mps", "set as true but not supported on MPS now, device pinned memory won't be used."),
    ],
)
def test_pinning_where_torch_only_warns(monkeypatch: pytest.MonkeyPatch, kind: str | None, message: str) -> None:
    accelerated_by(monkeypatch, kind)
    with pytest.warns(UserWarning, match=message):
        assert open_stage(pin_memory=True) is None


def test_a_device_goes_before_pin_memory() -> None:
    assert isinstance(open_stage("cpu", pin_memory=True), PlainStage)


class Recorder:
    """Streams and events of an accelerator that only record their calls."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def record(self, stream: Recorder) -> None:
        self.log.append(f"record on {stream.name}")

    def wait_event(self, event: Recorder) -> None:
        self.log.append(f"{self.name} waits")


def test_other_accelerators_have_a_side_stream_of_torch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    current = [Recorder(log, "loop")]
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: current[0])
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: current.__setitem__(0, stream))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch, "Stream", lambda _: Recorder(log, "side"))
    monkeypatch.setattr(torch, "Event", lambda _, enable_timing: Recorder(log, "event"))
    streams = backend_of(torch.device("xpu"))
    assert isinstance(streams, AcceleratorBackend)
    assert streams.device == torch.device("xpu", 1)
    side = streams.side_stream()
    assert streams.side_stream() is side
    with streams.on(side):
        assert streams.current_stream() is side
        event = streams.record(side)
    assert streams.current_stream().name == "loop"
    streams.wait(streams.current_stream(), event)
    assert log == ["record on side", "loop waits"]
    streams.host_register(0, 1)
    streams.host_unregister(0)


@pytest.mark.parametrize("kind", ["cpu", "mps", "meta"])
def test_devices_with_one_stream_are_copied_to_at_delivery(kind: str) -> None:
    assert backend_of(torch.device(kind)) is None
