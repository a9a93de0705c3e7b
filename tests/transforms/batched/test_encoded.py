"""Images that stay encoded until they are on the device: the same batches, errors with names, counted fallbacks."""

from __future__ import annotations

import io
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tar_cases import image_members, write_tar
from transform_cases import jpeg, png, random_image

import feedline as fl
from feedline import transforms as T
from feedline.errors import ArgumentError
from feedline.images import ImageError, device_decoders
from feedline.testing import check_dataset
from feedline.testing.difference import check_same
from feedline.transforms.batched import encoded

COUNT = 14
TRAIN = T.imagenet_train(24)
ON_DEVICE = T.DecodeOnDevice(TRAIN)


def cmyk() -> bytes:
    file = io.BytesIO()
    Image.fromarray(random_image()).convert("CMYK").save(file, "JPEG")
    return file.getvalue()


def files() -> list[bytes]:
    return [png(random_image(40, 50, 3)), cmyk(), *(jpeg(random_image(40 + n, 60, n)) for n in range(COUNT - 2))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, content in enumerate(files()):
        place = tmp_path / "photos" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:02d}.jpg").write_bytes(content)
    return tmp_path / "photos"


def datasets(folder: Path, transform: Any) -> dict[str, Any]:
    tar = write_tar(folder.parent / "t.tar", image_members(COUNT))
    table = pa.table({"image": files(), "label": list(range(COUNT))})
    pq.write_table(table, folder.parent / "t.parquet")
    return {
        "ImageFolder": fl.datasets.ImageFolder(folder, transform),
        "TarShards": fl.datasets.TarShards(tar, columns=("jpg", "cls"), transform={"jpg": transform}),
        "Parquet": fl.datasets.Parquet(folder.parent / "t.parquet", transform={"image": transform}),
    }


def batches(dataset: Any, **arguments: Any) -> list[Any]:
    with fl.DataLoader(dataset, 4, shuffle=True, seed=6, **arguments) as loader:
        return list(loader)


@pytest.mark.parametrize("name", ["ImageFolder", "TarShards", "Parquet"])
def test_batches_are_those_that_workers_decode(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = batches(datasets(folder, TRAIN)[name])
    dataset = datasets(folder, ON_DEVICE)[name]
    check_same(expected, batches(dataset), "without a device, workers must decode")
    sent: list[int] = []
    to = encoded.EncodedImages.to
    monkeypatch.setattr(encoded.EncodedImages, "to", lambda self, device: (sent.append(len(self)), to(self, device))[1])
    check_same(expected, batches(dataset, device="cpu"), "on the device, images must be the same")
    arguments = {"device": "cpu", "num_workers": 1, "worker_method": "process"}
    check_same(expected, batches(dataset, **arguments), "from worker processes, too")
    assert sent == [4, 4, 4, 2] * 2


def test_it_keeps_the_promises_of_a_dataset(folder: Path) -> None:
    check_dataset(fl.datasets.ImageFolder(folder, ON_DEVICE), methods=())


def test_a_resumed_loader_goes_on_exactly(folder: Path) -> None:
    dataset = fl.datasets.ImageFolder(folder, ON_DEVICE)
    expected = batches(dataset, device="cpu")
    loader = fl.DataLoader(dataset, 4, shuffle=True, seed=6, device="cpu")
    begun = list(islice(loader, 2))
    resumed = fl.DataLoader(dataset, 4, shuffle=True, seed=6)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    check_same(expected, begun + list(resumed), "a resumed loader must go on with the same images")


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device in the CPU's memory whose decoder takes baseline RGB JPEGs only, and the numbers of files it got."""
    got: list[int] = []

    def decode(some: Any, device: torch.device) -> list[torch.Tensor | None]:
        got.append(len(some))
        images = [Image.open(io.BytesIO(file.numpy().tobytes())) for file in some]
        return [
            torch.from_numpy(np.array(each)).permute(2, 0, 1) if (each.format, each.mode) == ("JPEG", "RGB") else None
            for each in images
        ]

    monkeypatch.setattr(encoded, "uses_native", lambda _: False)
    monkeypatch.setattr(device_decoders, "decoder_of", lambda _: decode)
    return got


def test_a_device_decodes_whole_batches_and_the_cpu_the_rest(folder: Path, accelerated: list[int]) -> None:
    expected = batches(fl.datasets.ImageFolder(folder, TRAIN))
    with fl.DataLoader(fl.datasets.ImageFolder(folder, ON_DEVICE), 4, shuffle=True, seed=6, device="cpu") as loader:
        got = list(loader)
        stats = loader.stats()
    assert accelerated == [4, 4, 4, 2]
    assert (stats.decoded_on_device, stats.decode_fallbacks) == (COUNT, 2)
    for (images, labels), (wanted, others) in zip(got, expected, strict=True):
        assert torch.equal(labels, others)
        assert (images - wanted).abs().max() <= 1.01 / 255 / min(T.IMAGENET_STD)


@pytest.mark.usefixtures("accelerated")
def test_levels_keep_their_layout(folder: Path) -> None:
    crop = T.CenterCrop(32)
    got = batches(fl.datasets.ImageFolder(folder, T.DecodeOnDevice(crop)), device="cpu")
    check_same(batches(fl.datasets.ImageFolder(folder, crop)), got, "levels must come as they do from workers")


def test_bytes_cross_encoded(folder: Path) -> None:
    with fl.DataLoader(fl.datasets.ImageFolder(folder, ON_DEVICE), COUNT, device="cpu") as loader:
        list(loader)
        crossed = loader.stats().copied_nbytes
    assert crossed == sum(map(len, files()))


def test_a_file_that_is_no_image_follows_on_error(folder: Path) -> None:
    (folder / "a" / "00.jpg").write_bytes(b"no image at all")
    dataset = fl.datasets.ImageFolder(folder, ON_DEVICE)
    with fl.DataLoader(dataset, 4, device="cpu", on_error="skip") as loader:
        assert sum(len(labels) for _, labels in loader) == COUNT - 1
    with pytest.raises(ImageError, match=r"00\.jpg"):
        list(fl.DataLoader(dataset, 4, device="cpu"))


@pytest.mark.parametrize("way", ["native", "seam"])
def test_a_damaged_file_is_named_at_delivery(way: str, folder: Path, request: pytest.FixtureRequest) -> None:
    if way == "seam":
        request.getfixturevalue("accelerated")
        device_decoders.decoder_of = lambda _: lambda some, __: [None] * len(some)  # type: ignore[assignment]
    place = folder / "b" / "07.jpg"
    place.write_bytes(place.read_bytes()[:900])
    dataset = fl.datasets.ImageFolder(folder, ON_DEVICE)
    index = next(n for n, (path, _) in enumerate(dataset.samples) if path.endswith("07.jpg"))
    with fl.DataLoader(dataset, 4, device="cpu") as loader, pytest.raises(ImageError, match="truncated") as caught:
        list(loader)
    assert any(f"sample {index} (epoch 0, position {index}, stage device)" in note for note in caught.value.__notes__)


def test_without_a_decoder_a_warning_says_who_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_decoders, "_DECODERS", ())
    device_decoders.decoder_of.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"no decoder of images for 'cuda'.*nvidia-nvimgcodec"):
        decode = device_decoders.decoder_of("cuda")
    device_decoders.decoder_of.cache_clear()
    assert decode([torch.zeros(3)], torch.device("cpu")) == [None]


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (T.RandomHorizontalFlip(), "crop or resize to a fixed size"),
        (T.Compose([T.CenterCrop(8), np.flipud]), "has no batched operator"),
        (len, "give a transform of feedline"),
    ],
    ids=["size", "operator", "function"],
)
def test_bad_transforms_are_named(transform: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        T.DecodeOnDevice(transform)


def test_images_are_not_turned_upright_on_a_device(folder: Path) -> None:
    dataset = fl.datasets.ImageFolder(folder, ON_DEVICE, apply_exif_orientation=True)
    with pytest.raises(ArgumentError, match="leave out apply_exif_orientation"):
        list(fl.DataLoader(dataset, 4, device="cpu"))
