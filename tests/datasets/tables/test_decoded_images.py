"""Columns of encoded images and other bytes: decoded, transformed, and equal to the files that they came from."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import feedline as fl
from feedline import transforms as T
from feedline.datasets import Arrow, Files, Parquet, Zip
from feedline.errors import ArgumentError, SampleError

COUNT = 30
TRAIN = T.Compose([T.RandomResizedCrop(32), T.RandomHorizontalFlip()])


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(COUNT):
        levels = np.random.default_rng(number).integers(0, 255, (40 + number, 60, 3), np.uint8)
        PIL.Image.fromarray(levels).save(folder / f"{number:02}.jpg", quality=95)
    return sorted(folder.glob("*.jpg"))


def table_of(photos: list[Path], form: str) -> Any:
    """Photos and labels, in the forms of other writers' tables."""
    data = [path.read_bytes() for path in photos]
    columns = {
        "binary": pa.array(data),
        "large binary": pa.array(data, pa.large_binary()),
        "struct": pa.array([{"bytes": each, "path": None} for each in data]),
        "path first": pa.array([{"path": "x.jpg", "bytes": each} for each in data]),
        "dictionary": pa.array(data).dictionary_encode(),
    }
    return pa.table({"image": columns[form], "label": np.arange(len(photos)) % 7})


FORMS = ("binary", "large binary", "struct", "path first", "dictionary")


@pytest.fixture(params=[Parquet, Arrow], ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def opened(kind: Any, table: Any, folder: Path, **options: Any) -> Any:
    if kind is Arrow:
        return Arrow(table, **options)
    pq.write_table(table, folder / "t.parquet", row_group_size=8)
    return Parquet(folder / "t.parquet", **options)


def epoch(dataset: Any, **options: Any) -> list[Any]:
    with fl.DataLoader(dataset, 8, shuffle=True, seed=3, **options) as loader:
        return list(loader)


@pytest.mark.parametrize("form", FORMS)
def test_a_transform_of_a_column_decodes_its_images(photos: list[Path], kind: Any, form: str, tmp_path: Path) -> None:
    data = opened(kind, table_of(photos, form), tmp_path, transform={"image": TRAIN})
    files = Files(list(map(str, photos)), decode="image", transform=TRAIN)
    assert data.traits.reads_batches
    labels = Arrow(pa.table({"label": np.arange(COUNT) % 7}))
    for mine, (image, label) in zip(epoch(data), epoch(Zip(files, labels)), strict=True):
        assert list(mine) == ["image", "label"]
        assert torch.equal(mine["image"], image)
        assert torch.equal(mine["label"], label["label"])


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "worker_method": "thread"}, {"num_workers": 2}], ids=str)
def test_batches_are_the_same_with_every_kind_of_worker(photos: list[Path], tmp_path: Path, workers: Any) -> None:
    data = opened(Parquet, table_of(photos, "struct"), tmp_path, transform={"image": TRAIN})
    reference = [data.__getitems__(range(4)) for _ in range(1)]
    assert reference[0][0]["image"].shape == (32, 32, 3)
    for mine, other in zip(epoch(data), epoch(data, **workers), strict=True):
        assert torch.equal(mine["image"], other["image"])


def test_the_images_of_any_other_transform_are_pils(photos: list[Path], kind: Any, tmp_path: Path) -> None:
    """The script with torch's loader and a dataset of one's own, and the same with a column."""

    class Own(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, index: int) -> Any:
            image = PIL.Image.open(io.BytesIO(photos[index].read_bytes())).convert("RGB")
            return {"image": to_tensor(image), "label": torch.tensor(index % 7)}

    data = opened(kind, table_of(photos, "binary"), tmp_path, decode={"image": "image"}, transform={"image": to_tensor})
    pairs = zip(torch.utils.data.DataLoader(Own(), 5), fl.DataLoader(data, 5), strict=True)
    for theirs, mine in pairs:
        assert torch.equal(theirs["image"], mine["image"])
        assert torch.equal(theirs["label"], mine["label"])


def to_tensor(image: PIL.Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image.resize((16, 16))).copy())


def test_other_decoders_and_transforms_by_column(kind: Any, tmp_path: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.arange(3))
    table = pa.table({"v": [file.getvalue()], "t": ["text"], "x": [2.5], "s": [b"abc"]})
    data = opened(
        kind, table, tmp_path, decode={"v": "npy", "s": len}, transform={"x": lambda x: x * 2, "t": str.upper}
    )
    assert not data.traits.reads_batches
    (batch,) = list(fl.DataLoader(data, 1))
    assert {name: value if isinstance(value, list) else value.tolist() for name, value in batch.items()} == {
        "v": [[0, 1, 2]],
        "t": ["TEXT"],
        "x": [5.0],
        "s": [3],
    }


def test_a_damaged_image_is_named_by_row_and_column(photos: list[Path], kind: Any, tmp_path: Path) -> None:
    table = pa.table({"image": [photos[0].read_bytes(), b"no image", photos[1].read_bytes()]})
    data = opened(kind, table, tmp_path, transform={"image": TRAIN})
    for read in (lambda: data[1], lambda: data.__getitems__([0, 1]), lambda: next(iter(fl.DataLoader(data, 3)))):
        with pytest.raises(SampleError, match=r"row 1.*: column 'image'"):
            read()
    with fl.DataLoader(data, 1, on_error="skip") as loader:
        assert len(list(loader)) == 2


def test_a_null_image_is_named(photos: list[Path], kind: Any, tmp_path: Path) -> None:
    table = pa.table({"image": [{"bytes": photos[0].read_bytes(), "path": None}, {"bytes": None, "path": "a.jpg"}]})
    data = opened(kind, table, tmp_path, transform={"image": TRAIN})
    with pytest.raises(SampleError, match=r"row 1.*: column 'image\.bytes' is null"):
        data.__getitems__([0, 1])


def test_what_cannot_be_decoded_is_refused(kind: Any, tmp_path: Path) -> None:
    table = pa.table({"x": [1.5], "s": [{"path": "a"}], "b": [b""]})
    for name in ("x", "s"):
        with pytest.raises(ArgumentError, match=rf"column '{name}' is .*, which cannot be decoded: decoders take"):
            opened(kind, table, tmp_path, decode={name: "image"})
    with pytest.raises(ArgumentError, match="transform= names 'y'; known fields of a sample are x, s, b"):
        opened(kind, table, tmp_path, transform={"y": TRAIN})
    with pytest.raises(ArgumentError, match="decode= names 'y'; known fields of a sample are x, s, b"):
        opened(kind, table, tmp_path, decode={"y": "text"})
    with pytest.raises(ArgumentError, match="decode='image': give a dict of decoders by column"):
        opened(kind, table, tmp_path, decode="image")


def test_only_the_chosen_members_of_a_struct_are_read(photos: list[Path], tmp_path: Path) -> None:
    data = opened(
        Parquet, table_of(photos, "struct"), tmp_path, columns=["image.bytes", "label"], transform={"image": TRAIN}
    )
    assert data[0]["image"].shape == (32, 32, 3)
    with pytest.raises(ArgumentError, match="which cannot be decoded"):
        opened(Parquet, table_of(photos, "struct"), tmp_path, columns=["image.path"], decode={"image": "image"})
