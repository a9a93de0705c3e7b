"""Image columns of Hugging Face's datasets with a user's transform: batches are those of torch's loader."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_cases import jpeg, photo
from PIL import ExifTags, Image
from vision_cases import PIPELINES, assert_same, seeded, states, v1

import datasets
import feedline as fl
from feedline.images import pillow_obstacle

pytestmark = pytest.mark.skipif(pillow_obstacle() is not None, reason=str(pillow_obstacle()))


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return jpeg(120, 90, orientation, exif=exif)


def files() -> list[bytes]:
    image = photo(130, 97)
    return [
        *(jpeg(160 - number, 100 + number, number) for number in range(20)),
        *(turned(orientation) for orientation in range(1, 9)),
        *(saved(image.convert(mode), "JPEG") for mode in ("L", "CMYK")),
        *(saved(image.convert(mode), "PNG") for mode in ("RGB", "RGBA", "P", "L", "1")),
        saved(image, "JPEG", progressive=True),
        jpeg(80, 80) + b"more",
    ]


def table(rows: list[dict[str, Any]], **options: Any) -> Any:
    features = datasets.Features({"image": datasets.Image(**options), "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict({"image": rows, "label": list(range(len(rows)))}, features)


@pytest.fixture(scope="module")
def in_memory() -> Any:
    return table([{"bytes": content, "path": None} for content in files()])


@pytest.fixture(scope="module")
def by_path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("files")
    for number, content in enumerate(files()):
        (root / f"{number}.image").write_bytes(content)
    return table([{"bytes": None, "path": str(root / f"{number}.image")} for number in range(len(files()))])


class Prepared:
    """Transform of a batch, as in Hugging Face's tutorials."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        images = [self.pipeline(image.convert("RGB")) for image in rows["image"]]
        return {"pixel_values": images, "label": rows["label"]}


def epoch(loader_class: Any, dataset: Any, **arguments: Any) -> Any:
    seeded(0)
    batches = list(loader_class(dataset, batch_size=6, shuffle=True, **arguments))
    return batches, states()


def compare(dataset: Any, **arguments: Any) -> None:
    expected = epoch(torch.utils.data.DataLoader, dataset, **arguments)
    assert_same(epoch(fl.DataLoader, dataset, **arguments), expected)


TO_TENSORS = ["train", "validate", "colors", "random crop", "flip first", "random apply", "v2 train", "v2 colors"]
DAILY = {"train", "random apply", "v2 colors"}


@pytest.mark.parametrize(
    "pipeline", [name if name in DAILY else pytest.param(name, marks=pytest.mark.nightly) for name in TO_TENSORS]
)
def test_batches_of_worker_processes_are_torchs(in_memory: Any, pipeline: str) -> None:
    compare(in_memory.with_transform(Prepared(PIPELINES[pipeline]())), num_workers=1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accelerate", [True, False])
def test_batches_of_files_are_torchs(by_path: Any, workers: int, accelerate: bool) -> None:
    dataset = by_path.with_transform(Prepared(PIPELINES["train"]()))
    expected = epoch(torch.utils.data.DataLoader, dataset, num_workers=workers)
    assert_same(epoch(fl.DataLoader, dataset, num_workers=workers, accelerate=accelerate), expected)


def twice(rows: dict[str, Any]) -> dict[str, Any]:
    """Two views of an image, by two pipelines, then Pillow's own pixels."""
    images = [image.convert("RGB") for image in rows["image"]]
    found = [(VIEWS[0](image), VIEWS[1](image), np.array(image.resize((9, 9))).sum()) for image in images]
    return {"views": [each[:2] for each in found], "sums": [int(each[2]) for each in found]}


VIEWS = [PIPELINES["train"](), PIPELINES["train"]()]


def test_two_views_of_an_image_are_torchs(in_memory: Any) -> None:
    compare(in_memory.with_transform(twice), num_workers=1)


def pixels_before(rows: dict[str, Any]) -> dict[str, Any]:
    """Images that the transform edits, and whose pixels it reads, before a pipeline of its own for each sample."""
    found = []
    for image in rows["image"]:
        levels = image.convert("RGB")
        access = levels.load()
        access[0, 0] = (1, 2, 3)
        pipeline = v1.Compose([v1.Resize((40, 40)), v1.RandomHorizontalFlip(), v1.ToTensor()])
        found.append(pipeline(levels) + access[0, 0][1])
    return {"pixel_values": found}


def test_edited_images_are_torchs(in_memory: Any) -> None:
    compare(in_memory.with_transform(pixels_before), num_workers=1)


def unconverted(rows: dict[str, Any]) -> dict[str, Any]:
    images = [VIEWS[0](image) for image in rows["image"] if image.mode == "RGB"]
    return {"mean": [sum(image.mean() for image in images)] * len(rows["image"])}


@pytest.mark.parametrize("mode", [None, "RGB", "L"])
def test_images_passed_as_they_are_decoded_are_torchs(mode: str | None) -> None:
    rows = [{"bytes": content, "path": None} for content in files()]
    compare(table(rows, mode=mode).with_transform(unconverted), num_workers=1)


def is_accelerated(rows: dict[str, Any]) -> dict[str, Any]:
    """Flags of images that are not decoded, and of the method of `Compose`."""
    undecoded = ["_feedline_deferred" in vars(image) for image in rows["image"]]
    return {"undecoded": undecoded, "compose": [hasattr(v1.Compose.__call__, "__wrapped__")] * len(undecoded)}


@pytest.mark.parametrize("accelerate", [True, False])
def test_images_are_decoded_later_only_in_worker_processes(accelerate: bool) -> None:
    rows = [{"bytes": jpeg(60, 50), "path": None}] * 2
    dataset = table(rows).with_transform(is_accelerated)
    with fl.DataLoader(dataset, batch_size=2, num_workers=1, accelerate=accelerate) as loader:
        (batch,) = loader
    assert batch["undecoded"].tolist() == batch["compose"].tolist() == [accelerate] * 2
    with fl.DataLoader(dataset, batch_size=2, accelerate=accelerate) as loader:
        (batch,) = loader
    assert batch["undecoded"].tolist() == batch["compose"].tolist() == [False] * 2


class Halved(v1.Compose):
    """A sequence of the user's own."""

    def __call__(self, image: Any) -> Any:
        return super().__call__(image) / 2


def own_step(image: Image.Image) -> Image.Image:
    return image.rotate(90)


OWN: dict[str, Any] = {
    "a subclass": Halved([v1.Resize((40, 40)), v1.ToTensor()]),
    "a step": v1.Compose([v1.Resize((40, 40)), own_step, v1.ToTensor()]),
    "levels of Pillow": v1.Compose([v1.Resize((40, 40)), np.array]),
}


@pytest.mark.parametrize("pipeline", OWN)
def test_code_of_the_users_own_runs_as_it_is(in_memory: Any, pipeline: str) -> None:
    compare(in_memory.with_transform(Prepared(OWN[pipeline])), num_workers=1)


@pytest.mark.parametrize("damaged", [b"", b"no image", jpeg(160, 100)[:1500]])
@pytest.mark.parametrize("workers", [0, 2])
def test_errors_of_damaged_images_are_pillows(damaged: bytes, workers: int) -> None:
    rows = [{"bytes": content, "path": None} for content in (jpeg(60, 50), damaged)]
    dataset = table(rows).with_transform(Prepared(PIPELINES["train"]()))
    with pytest.raises(OSError) as theirs:  # noqa: PT011 - the texts are compared
        list(torch.utils.data.DataLoader(dataset, batch_size=2))
    with pytest.raises(OSError) as ours, fl.DataLoader(dataset, batch_size=2, num_workers=workers) as loader:  # noqa: PT011
        list(loader)
    assert str(theirs.value).partition(" <")[0] in str(ours.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "no.jpg")
    dataset = table([{"bytes": None, "path": missing}]).with_transform(Prepared(PIPELINES["train"]()))
    with fl.DataLoader(dataset, num_workers=1) as loader, pytest.raises(FileNotFoundError, match=r"no\.jpg"):
        list(loader)


def test_the_plan_names_what_the_workers_accelerate(in_memory: Any) -> None:
    dataset = in_memory.with_transform(Prepared(PIPELINES["train"]()))
    assert "execute torchvision's Compose" in str(fl.DataLoader(dataset, num_workers=2).plan())
    for arguments in ({"num_workers": 0}, {"num_workers": 2, "accelerate": False}):
        assert "Compose" not in str(fl.DataLoader(dataset, **arguments).plan())
