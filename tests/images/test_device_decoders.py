"""Decoders of other packages: whole batches, and single files after an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transform_cases import jpeg, png, random_image, with_orientation

from feedline import images
from feedline.images import device_decoders

HERE = torch.device("cpu")


class WithoutCopy:
    """A stream that records when the host waited for it."""

    waits = 0
    cuda_stream = 7

    def synchronize(self) -> None:
        WithoutCopy.waits += 1


@pytest.fixture(autouse=True)
def no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    WithoutCopy.waits = 0
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: WithoutCopy())
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)


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
    assert WithoutCopy.waits == 6  # before and after each call


def oriented(orientation: int) -> bytes:
    return with_orientation(random_image(40, 50), orientation)


@pytest.mark.parametrize("is_old", [False, True])
def test_nvimgcodec_gets_all_files_and_leaves_them_as_stored(is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the signatures of nvImageCodec 0.9, whose default turns images upright.

    Older versions leave files that they refuse out of the list, and have channels last.
    """
    asked: list[Any] = []
    devices: list[int] = []

    def decode_all(files: list[Any], params: Any = None, cuda_stream: int = 0) -> list[Any]:
        asked.append((params, cuda_stream))
        assert WithoutCopy.waits == 1  # decoding hardware does not wait for the stream
        found = [None if len(file) < 500 else images.decode(file).copy() for file in files]
        if is_old:
            return [each for each in found if each is not None]
        return [None if each is None else each.transpose(2, 0, 1).copy() for each in found]

    def decoder(device_id: int = -1, options: str = "") -> Any:
        assert options == ":fancy_upsampling=1"
        devices.append(device_id)
        return SimpleNamespace(decode=decode_all)

    def params(*, apply_exif_orientation: bool = True, **formats: str) -> Any:
        if is_old and formats:
            raise TypeError("unexpected keyword")
        return {"turned": apply_exif_orientation, **formats}

    codec = SimpleNamespace(Decoder=decoder, DecodeParams=params, P_RGB="planes")
    monkeypatch.setattr(device_decoders, "import_module", lambda _: codec)
    good, other = file_of(jpeg(random_image(3, 50))), file_of(png(random_image(30, 30)))
    found = device_decoders._nvimgcodec()([good, good[:300], other], HERE)
    assert found[0] is not None
    assert torch.equal(found[0], decoded(good))
    assert found[1] is None
    assert found[2] is not None
    assert torch.equal(found[2], decoded(other))
    wanted = {"turned": False} if is_old else {"turned": False, "sample_format": "planes"}
    assert asked == [(wanted, WithoutCopy.cuda_stream)] * (4 if is_old else 1)
    assert devices == [3]  # the current one, since the device has no number
    assert WithoutCopy.waits == 2


def test_torchcodec_turns_images_and_this_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the signature of torchcodec 0.17, which always turns images upright."""

    def decode_jpeg(source: Any, *, mode: str = "RGB", device: Any = "cpu") -> Any:
        assert mode == "RGB"
        some = source if isinstance(source, list) else [source]
        upright = [images.decode(file.numpy(), apply_exif_orientation=True) for file in some]
        levels = [torch.from_numpy(np.array(each)).permute(2, 0, 1) for each in upright]
        return levels if isinstance(source, list) else levels[0]

    monkeypatch.setattr(device_decoders, "import_module", lambda _: SimpleNamespace(decode_jpeg=decode_jpeg))
    files = [file_of(oriented(number)) for number in range(1, 9)]
    for file, found in zip(files, device_decoders._torchcodec()(files, HERE), strict=True):
        assert found is not None
        assert torch.equal(found, decoded(file))


@pytest.mark.parametrize("refused", [False, True])
def test_images_are_turned_upright_on_the_device(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        device_decoders, "decoder_of", lambda _: lambda some, __: [None if refused else decoded(file) for file in some]
    )
    files = [file_of(oriented(number)) for number in range(1, 9)]
    for file, found in zip(
        files, device_decoders.decode_on_device(files, HERE, apply_exif_orientation=True), strict=True
    ):
        upright = np.array(images.decode(file.numpy(), apply_exif_orientation=True))
        assert torch.equal(found, torch.from_numpy(upright).permute(2, 0, 1))


def test_a_file_whose_tags_cannot_be_read_is_decoded_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = file_of(oriented(6)), file_of(b"no image")
    monkeypatch.setattr(device_decoders, "decoder_of", lambda _: lambda some, __: [decoded(good) for _ in some])
    with pytest.raises(images.ImageError, match="could not be read") as caught:
        device_decoders.decode_on_device([good, good, bad], HERE, apply_exif_orientation=True)
    assert caught.value.row == 2


class FakePipeline:
    """The part of DALI's `Pipeline` that feedline uses; after an error it cannot run again."""

    made: ClassVar[list[int]] = []

    def __init__(self, batch_size: int, num_threads: int, device_id: int, **options: Any) -> None:
        assert (num_threads, device_id) == (torch.get_num_threads(), 3)
        assert options == {"prefetch_queue_depth": 1, "exec_async": False, "exec_pipelined": False}
        self.size, self.broken = batch_size, False
        self.made.append(batch_size)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def set_outputs(self, levels: Any) -> None:
        assert levels == ("decoded", "external", "mixed", "RGB", False)

    def build(self) -> None: ...

    def feed_input(self, name: str, files: list[Any]) -> None:
        assert name == "files"
        assert len(files) <= self.size
        self.files = files

    def run(self) -> tuple[list[Any]]:
        assert not self.broken
        if any(len(file) < 500 for file in self.files):
            self.broken = True
            raise RuntimeError("Critical error in pipeline")
        return ([torch.from_numpy(images.decode(file).copy()) for file in self.files],)


def external_source(*, name: str, device: str, dtype: str, ndim: int) -> str:
    assert (name, device, dtype, ndim) == ("files", "cpu", "UINT8", 1)
    return "external"


def image(files: str, *, device: str, output_type: str, adjust_orientation: bool) -> tuple[Any, ...]:
    return "decoded", files, device, output_type, adjust_orientation


DALI = {
    "nvidia.dali": SimpleNamespace(Pipeline=FakePipeline),
    "nvidia.dali.fn": SimpleNamespace(external_source=external_source, decoders=SimpleNamespace(image=image)),
    "nvidia.dali.types": SimpleNamespace(UINT8="UINT8", RGB="RGB"),
}


def test_dali_decodes_by_a_pipeline_that_is_made_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = FakePipeline.made
    made.clear()
    monkeypatch.setattr(device_decoders, "import_module", DALI.__getitem__)
    decode = device_decoders._dali()
    good = file_of(jpeg(random_image(40, 50)))
    for count in (3, 4):
        found = decode([good] * count, HERE)
        assert all(each is not None and torch.equal(each, decoded(good)) for each in found)
    assert made == [4]
    found = decode([good, good[:300], good], HERE)
    assert [each is None for each in found] == [False, True, False]
    assert made == [4, 1, 1]


@pytest.mark.parametrize("error", [AttributeError("decode_jpeg"), OSError("Could not load this library")])
def test_a_package_that_does_not_fit_is_passed_over(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def old() -> Any:
        raise error

    def found(module: str) -> Any:
        if module == "broken":
            raise error
        return module

    made = object()
    rows = (("broken", lambda: None), ("json", old), ("json", lambda: made))
    monkeypatch.setattr(device_decoders, "_DECODERS", rows)
    monkeypatch.setattr(device_decoders, "find_spec", found)
    device_decoders.decoder_of.cache_clear()
    assert device_decoders.decoder_of("cuda") is made
    device_decoders.decoder_of.cache_clear()


def test_the_first_installed_decoder_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made = object()
    rows = (("missing_module.part", lambda: None), ("json.tool", lambda: made))
    monkeypatch.setattr(device_decoders, "_DECODERS", rows)
    device_decoders.decoder_of.cache_clear()
    assert device_decoders.decoder_of("cuda") is made
    device_decoders.decoder_of.cache_clear()
