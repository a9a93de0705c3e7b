"""HEIC and JPEG XL: read by Pillow's plugins in every kind of worker, and refused by name where these are missing."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Callable
from functools import cache
from importlib import import_module, reload
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from diagonals import diagonal
from image_cases import encoded, photo
from PIL import Image, ImageOps, UnidentifiedImageError

import feedline as fl
from feedline import images
from feedline import transforms as T
from feedline.errors import MissingExtraError
from feedline.images import Recipe, accelerate_pillow
from feedline.images.plugins import open_image

MODULES = {"HEIF": "pillow_heif", "JXL": "pillow_jxl"}
EXTRAS = {"HEIF": "heic", "JXL": "jxl"}
RECIPE = Recipe((20, 30), images.RandomBox(), flip=0.5, apply_exif_orientation=True)
CROP = T.Compose([T.RandomResizedCrop((20, 30)), T.RandomHorizontalFlip()])
KINDS: dict[str, dict[str, Any]] = {
    "inline": {},
    "threads": {"num_workers": 2, "worker_method": "thread"},
    "forked": {"num_workers": 2, "multiprocessing_context": "fork"},
}


def register() -> None:
    """Let Pillow open and save both formats, as a script does."""
    import_module("pillow_heif").register_heif_opener()
    import_module("pillow_jxl")
    if "JXL" not in Image.OPEN:  # removed since the import
        reload(sys.modules["pillow_jxl.JpegXLImagePlugin"])


@pytest.fixture(autouse=True)
def pillow(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Removes the plugins from Pillow, as before their import, and undoes registrations after each test."""
    Image.init()

    def forget() -> None:
        monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name not in MODULES])
        monkeypatch.setattr(Image, "OPEN", {name: opener for name, opener in Image.OPEN.items() if name in Image.ID})
        for module in [name for name in sys.modules if name.startswith(tuple(MODULES.values()))]:
            monkeypatch.delitem(sys.modules, module)

    forget()
    return forget


@cache
def saved(format_: str, mode: str = "RGB", orientation: int | None = None) -> bytes:
    """A file by the plugin's own encoder."""
    register()
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(photo(41, 30).convert(mode), format_, **({} if orientation is None else {"exif": exif.tobytes()}))


def by_plugin(data: bytes) -> Image.Image:
    register()
    with Image.open(io.BytesIO(data)) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


@pytest.mark.parametrize("format_", MODULES)
def test_the_missing_package_is_named(
    format_: str, pillow: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = saved(format_)
    data = data if format_ == "HEIF" else images.plugins._JPEG_XL_CONTAINER + data
    pillow()
    monkeypatch.setitem(sys.modules, MODULES[format_], None)
    path = tmp_path / "a.jpg"
    path.write_bytes(data)
    reads: list[Callable[[Any], Any]] = [images.decode, images.probe, lambda source: images.read_one(source, RECIPE)]
    for read in reads:
        for source in (data, path):
            with pytest.raises(MissingExtraError, match=rf"pip install 'feedline\[{EXTRAS[format_]}\]'"):
                read(source)


@pytest.mark.parametrize("format_", MODULES)
def test_an_installed_plugin_is_registered_on_first_use(format_: str, pillow: Callable[[], None]) -> None:
    for mode in ("RGB", "L", "RGBA"):
        for orientation in (None, *range(1, 9)) if mode == "RGB" else (6,):
            data = saved(format_, mode, orientation)
            pixels, wrong = np.asarray(by_plugin(data)), f"{mode}, orientation {orientation}"
            pillow()
            np.testing.assert_array_equal(images.decode(data, apply_exif_orientation=True), pixels, wrong)
            for key in range(3):
                assert torch.equal(images.read_one(data, RECIPE, key), images.read_one(pixels, RECIPE, key)), wrong
            header = images.probe(data)
            assert header.format == format_
            sides = header.height, header.width
            assert pixels.shape[:2] == (sides[::-1] if header.orientation >= 5 else sides), wrong


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Turned files in a folder of one class and in a tar, others in a table; in `png` PNGs of their pixels."""
    root = tmp_path_factory.mktemp("photos")
    turned = [saved(format_, "RGB", orientation) for format_ in MODULES for orientation in (1, 3, 6, 8)]
    upright = [saved(format_, mode) for format_ in MODULES for mode in ("RGB", "L", "RGBA")]
    write(root, turned, upright)
    write(root / "png", *([encoded(by_plugin(data), "PNG") for data in files] for files in (turned, upright)))
    return root


def write(root: Path, turned: list[bytes], upright: list[bytes]) -> None:
    (root / "folder" / "a").mkdir(parents=True)
    with tarfile.open(root / "a.tar", "w") as tar:
        for number, data in enumerate(turned):
            name = f"{number}.{'heic' if number < 4 else 'jxl'}"
            (root / "folder" / "a" / name).write_bytes(data)
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    pq.write_table(pa.table({"image": upright}), root / "a.parquet")


ENDINGS = (".heic", ".jxl")
PLACES: dict[str, Callable[[Path], Any]] = {
    "folder": lambda root: fl.datasets.ImageFolder(
        root / "folder", CROP, extensions=ENDINGS, apply_exif_orientation=True
    ),
    "tar": lambda root: fl.datasets.TarShards(
        root / "a.tar", ["heic;jxl"], transform={"heic;jxl": CROP}, apply_exif_orientation=True
    ),
    "table": lambda root: fl.datasets.Parquet(root / "a.parquet", transform={"image": CROP}),
    "table, by a transform of one's own": lambda root: fl.datasets.Parquet(
        root / "a.parquet", decode={"image": "image"}, transform={"image": resized}
    ),
}


def resized(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.resize((30, 20))))


def epoch(dataset: Any, **kind: Any) -> torch.Tensor:
    with fl.DataLoader(dataset, 4, shuffle=True, seed=3, **kind) as loader:
        batches = [batch["image"] if isinstance(batch, dict) else batch[0] for batch in loader]
    return torch.cat(batches)


@pytest.mark.parametrize(("place", "kind"), diagonal(list(PLACES), list(KINDS)))
def test_datasets_give_the_plugins_pixels_with_every_kind_of_worker(
    place: str, kind: str, folder: Path, pillow: Callable[[], None]
) -> None:
    """Equal to PNGs of the same pixels, which need no plugin."""
    register()
    dataset = PLACES[place](folder)
    assert torch.equal(epoch(dataset, **KINDS[kind]), epoch(PLACES[place](folder / "png")))


class Opened(torch.utils.data.Dataset[torch.Tensor]):
    """Files opened by a script's own code, which knows Pillow only."""

    def __init__(self, files: list[bytes]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(io.BytesIO(self.files[index])) as image:
            box = image.crop((1, 2, 33, 24)).resize((16, 11)).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            return torch.from_numpy(np.array(box.convert("RGB")))


@pytest.mark.parametrize("kind", KINDS)
def test_accelerated_pillow_leaves_them_to_the_plugins(kind: str) -> None:
    register()
    dataset = Opened([saved(format_, mode) for format_ in MODULES for mode in ("RGB", "L", "RGBA")])
    wanted = [dataset[index] for index in range(len(dataset))]
    with accelerate_pillow(), fl.DataLoader(dataset, 1, **KINDS[kind]) as loader:
        assert all(torch.equal(mine[0], theirs) for mine, theirs in zip(loader, wanted, strict=True))


def test_two_bytes_are_no_proof_of_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged JPEG may begin like a JPEG XL codestream, and must stay an error that on_error can skip."""
    monkeypatch.setitem(sys.modules, "pillow_jxl", None)
    with pytest.raises(images.ImageError, match=r"JPEG XL files do so, too, and need pip install 'feedline\[jxl\]'"):
        images.decode(b"\xff\x0a" + bytes(100))


def test_a_stream_that_cannot_be_read_again_is_refused_by_its_content() -> None:
    stream = SimpleNamespace(read=io.BytesIO(b"no image").read)
    with pytest.raises(UnidentifiedImageError):
        open_image(cast(IO[bytes], stream))


def test_damage_is_not_taken_for_a_missing_package() -> None:
    with pytest.raises(images.ImageError, match="of no image format that Pillow knows"):
        images.decode(b"\0\0\0\x1cftypqt  \0\0\0\0")


@pytest.mark.parametrize("format_", MODULES)
def test_damaged_files_are_refused_as_images(format_: str) -> None:
    data = saved(format_)
    for damaged in (data[:40], data[: len(data) // 2], data[:-9], data[:24] + bytes(len(data) - 24)):
        with pytest.raises(images.ImageError):
            images.decode(damaged)
