"""Decoders of other packages behind the seam: whole batches, and each file after an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transform_cases import jpeg, png, random_image

from feedline import images
from feedline.images import device_decoders

HERE = torch.device("cpu")


class WithoutCopy:
    """A stream that says when the host waited for it."""

    waits = 0

    def synchronize(self) -> None:
        WithoutCopy.waits += 1


@pytest.fixture(autouse=True)
def no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    WithoutCopy.waits = 0
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: WithoutCopy())
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())


def file_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decoded(data: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.array(images.decode(data.numpy()))).permute(2, 0, 1)


class FakeTorchvision:
    """`torchvision.io`: refuses a whole list for one file that it cannot decode."""

    ImageReadMode = SimpleNamespace(RGB="RGB")

    def __init__(self) -> None:
        self.calls: list[int] = []

    def decode_jpeg(self, files: Any, *, mode: str, device: torch.device) -> Any:
        some = files if isinstance(files, list) else [files]
        self.calls.append(len(some))
        if any(len(file) < 500 for file in some):
            raise RuntimeError("nvjpeg: bad JPEG")
        levels = [decoded(file) for file in some]
        return levels if isinstance(files, list) else levels[0]


def test_torchvision_gets_jpegs_only_and_each_alone_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    io = FakeTorchvision()
    monkeypatch.setattr(device_decoders, "import_module", lambda _: io)
    decode = device_decoders._torchvision()
    good, other = file_of(jpeg(random_image(40, 50))), file_of(png(random_image(30, 30)))
    found = decode([good, other, good], HERE)
    assert found[0] is not None
    assert torch.equal(found[0], decoded(good))
    assert found[1] is None
    assert io.calls == [2]
    found = decode([good, good[:300], good], HERE)
    assert [each is None for each in found] == [False, True, False]
    assert io.calls == [2, 3, 1, 1, 1]
    assert decode([other], HERE) == [None]
    assert WithoutCopy.waits == 3


def test_nvimgcodec_gets_all_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode_all(files: list[Any]) -> list[Any]:
        return [None if len(file) < 500 else images.decode(file).copy() for file in files]

    codec = SimpleNamespace(Decoder=lambda: SimpleNamespace(decode=decode_all))
    monkeypatch.setattr(device_decoders, "import_module", lambda _: codec)
    good, other = file_of(jpeg(random_image(40, 50))), file_of(png(random_image(30, 30)))
    found = device_decoders._nvimgcodec()([good, good[:300], other], HERE)
    assert [None if each is None else tuple(each.shape) for each in found] == [(3, 40, 50), None, (3, 30, 30)]
    assert WithoutCopy.waits == 1


def test_the_first_installed_decoder_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made = object()
    rows = (("missing_module.part", lambda: None), ("json.tool", lambda: made))
    monkeypatch.setattr(device_decoders, "_DECODERS", rows)
    device_decoders.decoder_of.cache_clear()
    assert device_decoders.decoder_of("cuda") is made
    device_decoders.decoder_of.cache_clear()
