"""EXIF orientation: results of `ImageOps.exif_transpose` for every format and every kind of tag."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from image_cases import encoded, jpeg, photo
from PIL import Image, ImageOps
from verdicts import tags, with_segment

import feedline as fl
from feedline import images
from feedline import transforms as T
from feedline.images import Recipe, native

FORMATS = ["JPEG", "MPO", "PNG", "WEBP", "AVIF", "TIFF"]
RECIPE = Recipe((40, 50), images.RandomBox(), flip=0.5, apply_exif_orientation=True)
SHORT, LONG = 3, 4


@pytest.fixture(params=["native", "pillow"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs a test with the kernels, and without them."""
    if request.param == "pillow":
        monkeypatch.setattr(native, "native", None)
        monkeypatch.setattr(native, "_warn_slow", lambda: None)
    native.plan_of.cache_clear()
    yield request.param
    native.plan_of.cache_clear()


def saved(format_: str, orientation: int, kind: int) -> bytes:
    if format_ == "TIFF":
        file = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = orientation
        photo(61, 45).save(file, "TIFF", tiffinfo=exif)
        return tiff_of_type(file.getvalue(), kind)
    options = {"save_all": True, "append_images": [photo(61, 45, 1)]} if format_ == "MPO" else {}
    return encoded(photo(61, 45), format_, exif=tags((0x0112, kind, orientation)), **options)


def tiff_of_type(data: bytes, kind: int) -> bytes:
    """The same TIFF with an orientation tag of another type; its value is the same in little endian."""
    entry = data.index((0x0112).to_bytes(2, "little") + SHORT.to_bytes(2, "little"))
    return data[: entry + 2] + kind.to_bytes(2, "little") + data[entry + 4 :]


def transposed(data: bytes) -> Image.Image:
    with Image.open(io.BytesIO(data)) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("format_", FORMATS)
def test_images_are_turned_as_by_exif_transpose(format_: str) -> None:
    for orientation in range(10):
        data = saved(format_, orientation, (SHORT, LONG)[orientation % 2])
        pixels, wrong = np.asarray(transposed(data)), f"orientation {orientation}"
        np.testing.assert_array_equal(images.decode(data, apply_exif_orientation=True), pixels, wrong)
        with Image.open(io.BytesIO(data)) as image:
            np.testing.assert_array_equal(images.decode(data), np.asarray(image.convert("RGB")), wrong)
        for key in range(3):
            assert torch.equal(images.read_one(data, RECIPE, key), images.read_one(pixels, RECIPE, key)), wrong


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_the_header_describes_what_decode_gives(format_: str, orientation: int) -> None:
    """A TIFF is upright in Pillow's eyes before it is turned."""
    data = saved(format_, orientation, SHORT)
    header = images.probe(data)
    assert images.decode(data).shape == (header.height, header.width, 3)
    turned = images.decode(data, apply_exif_orientation=True).shape[:2]
    assert turned == ((header.width, header.height) if header.orientation >= 5 else (header.height, header.width))


def xmp(orientation: int) -> bytes:
    return b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="%d"/>' % orientation


ODD = {
    "bytes": tags((0x0112, 1, 6)),
    "rational": tags((0x0112, 5, 6)),
    "twice": tags((0x0112, SHORT, 6), (0x0112, SHORT, 3)),
    "big endian": tags((0x0112, LONG, 5), order="big"),
    "out of range": tags((0x0112, SHORT, 600)),
    "behind a value beyond the end": tags((0x010E, 5, 9999), (0x0112, SHORT, 6)),
    "double prefix": b"Exif\0\0" + tags((0x0112, SHORT, 6)),
    "no entries": tags(),
    "cut": tags((0x0112, SHORT, 6))[:-9],
}


@pytest.mark.filterwarnings("ignore")  # Pillow warns of damaged tags
@pytest.mark.parametrize("odd", ODD)
def test_odd_tags_are_read_as_by_pillow(odd: str) -> None:
    plain = jpeg(61, 45, 2)
    files = [with_segment(plain, 0xE1, ODD[odd]), with_segment(with_segment(plain, 0xE1, xmp(3)), 0xE1, ODD[odd])]
    files.append(with_segment(with_segment(plain, 0xE1, tags((0x0112, SHORT, 8))), 0xE1, ODD[odd]))
    for data in files:
        pixels = np.asarray(transposed(data))
        np.testing.assert_array_equal(images.decode(data, apply_exif_orientation=True), pixels)
        assert torch.equal(images.read_one(data, RECIPE, 1), images.read_one(pixels, RECIPE, 1))


def test_the_last_of_several_xmp_packets_counts() -> None:
    data = with_segment(with_segment(jpeg(61, 45), 0xE1, xmp(6)), 0xE1, xmp(3))
    np.testing.assert_array_equal(images.decode(data, apply_exif_orientation=True), np.asarray(transposed(data)))


@pytest.mark.parametrize("format_", FORMATS)
def test_a_folder_of_turned_images(format_: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    data = saved(format_, 6, LONG)
    (tmp_path / "a" / "1.jpg").write_bytes(data)
    resize = T.Resize((30, 20))
    folder = fl.datasets.ImageFolder(tmp_path, resize, apply_exif_orientation=True)
    np.testing.assert_array_equal(np.asarray(folder[0][0]), np.asarray(resize(transposed(data))))
