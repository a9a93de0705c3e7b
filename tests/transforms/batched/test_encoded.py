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
from transform_cases import jpeg, png, random_image, with_orientation

import feedline as fl
from feedline import transforms as T
from feedline.errors import ArgumentError, StateError
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


def test_a_resumed_loader_continues_exactly(folder: Path) -> None:
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
    assert sum(accelerated) == COUNT - 2  # workers decode all files except sound RGB JPEGs
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
    row = 3 * 24 * 24 * 4  # of the PNG and the CMYK image, which a worker decodes
    assert crossed == sum(map(len, files()[2:])) + 2 * row


def test_a_file_that_is_no_image_follows_on_error(folder: Path) -> None:
    (folder / "a" / "00.jpg").write_bytes(b"no image at all")
    dataset = fl.datasets.ImageFolder(folder, ON_DEVICE)
    with fl.DataLoader(dataset, 4, device="cpu", on_error="skip") as loader:
        assert sum(len(labels) for _, labels in loader) == COUNT - 1
    with pytest.raises(ImageError, match=r"00\.jpg"):
        list(fl.DataLoader(dataset, 4, device="cpu"))


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_a_damaged_file_is_named_and_follows_on_error(kind: str, folder: Path) -> None:
    place = folder / "b" / "07.jpg"
    place.write_bytes(place.read_bytes()[:900])
    dataset = fl.datasets.ImageFolder(folder, ON_DEVICE)
    index = next(n for n, (path, _) in enumerate(dataset.samples) if path.endswith("07.jpg"))
    workers: dict[str, Any] = {} if kind == "inline" else {"num_workers": 1, "worker_method": kind}
    arguments: dict[str, Any] = {"device": "cpu", "seed": 2, **workers}
    with (
        fl.DataLoader(dataset, 4, **arguments) as loader,
        pytest.raises(ImageError, match=r"(?s)truncated.*07\.jpg") as caught,
    ):
        list(loader)
    assert any(f"sample {index} " in note for note in caught.value.__notes__)
    with fl.DataLoader(dataset, 4, on_error="skip", **arguments) as loader:
        assert sum(len(labels) for _, labels in loader) == COUNT - 1
        assert loader.stats().skipped == 1
    with fl.DataLoader(dataset, 4, on_error="replace", **arguments) as loader:
        assert sum(len(labels) for _, labels in loader) == COUNT


@pytest.mark.usefixtures("accelerated")
def test_an_image_that_fails_on_the_device_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded, "_is_sound", lambda _: True)  # as if its markers did not show the damage
    monkeypatch.setattr(device_decoders, "decoder_of", lambda _: lambda some, __: [None] * len(some))
    place = folder / "b" / "07.jpg"
    place.write_bytes(place.read_bytes()[:900])
    dataset = fl.datasets.ImageFolder(folder, T.DecodeOnDevice(TRAIN, cpu_share=0.5))
    index = next(n for n, (path, _) in enumerate(dataset.samples) if path.endswith("07.jpg"))
    monkeypatch.setattr(encoded, "is_decoded_by_worker", lambda file, _: len(file) != 900 and len(file) % 2 == 0)
    with fl.DataLoader(dataset, 4, device="cpu") as loader, pytest.raises(ImageError, match="truncated") as caught:
        list(loader)
    assert any(f"sample {index} (epoch 0, position {index}, stage device)" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_share_of_the_workers_changes_no_pixel_where_decoders_agree(share: float, folder: Path) -> None:
    expected = batches(fl.datasets.ImageFolder(folder, TRAIN))
    dataset = fl.datasets.ImageFolder(folder, T.DecodeOnDevice(TRAIN, cpu_share=share))
    check_same(expected, batches(dataset, device="cpu"), "any share must give the same images")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_share_of_the_cpu_is_among_the_statistics(folder: Path, accelerated: list[int], workers: int) -> None:
    dataset = fl.datasets.ImageFolder(folder, T.DecodeOnDevice(TRAIN, cpu_share=0.5))
    with fl.DataLoader(dataset, 4, device="cpu", num_workers=workers) as loader:
        assert loader.stats().decode_cpu_share is None
        for _ in range(2):
            for _ in loader:
                pass
            stats = loader.stats()
            assert stats.since_epoch is not None
            assert stats.since_epoch.decoded_by_workers + stats.since_epoch.decoded_on_device == COUNT
    assert stats.decode_fallbacks == 4
    assert stats.decoded_by_workers == 2 * COUNT - sum(accelerated) - 4
    assert stats.decode_cpu_share == pytest.approx(1 - sum(accelerated) / (2 * COUNT))
    assert 0.1 < stats.decode_cpu_share < 0.9
    assert stats.flat()["feedline/decode_cpu_share"] == stats.decode_cpu_share
    assert "images decoded by the CPU: " in str(stats)


def test_an_image_is_decoded_by_the_same_decoder_in_every_batch(
    folder: Path, accelerated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the two decoders differ: the device's makes all images gray."""

    def gray(some: Any, device: torch.device) -> list[torch.Tensor | None]:
        accelerated.append(len(some))
        return [torch.full((3, 64, 64), 99, dtype=torch.uint8) for _ in some]

    monkeypatch.setattr(device_decoders, "decoder_of", lambda _: gray)
    transform = T.DecodeOnDevice(T.CenterCrop(24), cpu_share=0.5)
    dataset = fl.datasets.ImageFolder(folder, transform)

    def by_index(batch_size: int, seed: int) -> dict[int, torch.Tensor]:
        loader = fl.DataLoader(dataset, batch_size, sampler=fl.samplers.Shuffled(COUNT, seed), device="cpu")
        rows = [row for images, _ in loader for row in images]
        order = fl.samplers.Shuffled(COUNT, seed).take(0, 0, COUNT).tolist()
        return dict(zip(order, rows, strict=True))

    one, other = by_index(4, 1), by_index(5, 2)
    assert all(torch.equal(one[index], other[index]) for index in range(COUNT))
    there = sum(bool((row == 99).all()) for row in one.values())
    assert 0 < there < COUNT
    expected = batches(dataset, device="cpu", num_workers=1, worker_method="process")
    loader = fl.DataLoader(dataset, 4, shuffle=True, seed=6, device="cpu")
    begun = list(islice(loader, 2))
    resumed = fl.DataLoader(dataset, 4, shuffle=True, seed=6, device="cpu")
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    check_same(expected, begun + list(resumed), "a resumed loader must split alike")

    class Own(fl.datasets.ImageFolder):
        pass

    def subset(decode: T.DecodeOnDevice) -> torch.utils.data.Subset[Any]:
        return torch.utils.data.Subset(fl.datasets.ImageFolder(folder, decode), range(COUNT))

    less = T.DecodeOnDevice(T.CenterCrop(24), cpu_share=0.25)
    for dataset_of in (lambda decode: Own(folder, decode), subset):
        state = fl.DataLoader(dataset_of(transform), 4, shuffle=True, seed=6, device="cpu").state_dict()
        other = dataset_of(less)
        shifted = fl.DataLoader(other, 4, shuffle=True, seed=6, device="cpu")
        with pytest.raises(StateError, match=r"saved with DecodeOnDevice\(cpu_share=0.5\), but it is 0.25 here"):
            shifted.load_state_dict(state)
        fl.DataLoader(other, 4, shuffle=True, seed=6).load_state_dict(state)  # without a device nothing is split


def test_the_share_follows_the_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([6.0, 1.0])  # the CPU needs six seconds, two workers three; the device one
    monkeypatch.setattr(encoded, "_fastest", lambda run: (run(), next(times))[1])
    found = T.DecodeOnDevice.measured(TRAIN, files(), device="cpu", num_workers=2)
    assert found.cpu_share == 0.25
    with pytest.raises(ArgumentError, match="at least 1 worker"):
        T.DecodeOnDevice.measured(TRAIN, [], device="cpu")


def test_without_a_decoder_a_warning_names_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("way", ["native", "seam"])
def test_images_are_turned_upright_as_on_the_cpu(way: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if way == "seam":
        request.getfixturevalue("accelerated")
    for number in range(1, 9):
        place = tmp_path / "a" / f"{number}.jpg"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(with_orientation(random_image(40, 60, number), number))
    crop = T.RandomResizedCrop(24)

    def images_of(transform: Any, **arguments: Any) -> torch.Tensor:
        dataset = fl.datasets.ImageFolder(tmp_path, transform, apply_exif_orientation=True)
        return torch.cat([images for images, _ in batches(dataset, **arguments)]).int()

    wanted, got = images_of(crop), images_of(T.DecodeOnDevice(crop), device="cpu")
    assert (wanted - got).abs().max() <= (way == "seam")
    first = T.Compose([T.RandomHorizontalFlip(), T.Resize((24, 24))])  # workers decode and turn these
    assert torch.equal(images_of(first), images_of(T.DecodeOnDevice(first), device="cpu"))


@pytest.mark.parametrize("name", ["ImageFolder", "TarShards", "Parquet"])
def test_datasets_take_decode_device(name: str, folder: Path) -> None:
    expected = batches(datasets(folder, ON_DEVICE)[name], device="cpu")
    dataset = {
        "ImageFolder": lambda: fl.datasets.ImageFolder(folder, TRAIN, decode="device"),
        "TarShards": lambda: fl.datasets.TarShards(
            folder.parent / "t.tar", columns=("jpg", "cls"), transform={"jpg": TRAIN}, decode="device"
        ),
        "Parquet": lambda: fl.datasets.Parquet(
            folder.parent / "t.parquet", transform={"image": TRAIN}, decode="device"
        ),
    }[name]()
    with fl.DataLoader(dataset, 4, shuffle=True, seed=6, device="cpu") as loader:
        check_same(expected, list(loader), "decode='device' must be DecodeOnDevice")


def test_decode_device_needs_a_transform(folder: Path) -> None:
    with pytest.raises(ArgumentError, match="needs a transform of feedline"):
        fl.datasets.ImageFolder(folder, decode="device")
    with pytest.raises(ArgumentError, match=r"decode='gpu': give \"device\""):
        fl.datasets.ImageFolder(folder, TRAIN, decode="gpu")  # type: ignore[arg-type]
