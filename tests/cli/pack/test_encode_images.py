"""Changes of an image by `feedline pack`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_cases import apart, encoded, jpeg, photo
from packing_cases import feedline, members, packed
from PIL import Image
from tar_cases import write_tar

from feedline import images
from feedline.cli.pack import PackOptions
from feedline.cli.pack.encode import encode_image
from feedline.errors import ArgumentError, SampleError


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def made(data: bytes, field: str = "jpg", **options: Any) -> tuple[str, Image.Image]:
    image = encode_image(data, field, PackOptions(**options))
    return image.field, opened(image.data)


@pytest.mark.parametrize(
    ("size", "bounded"),
    [((400, 300), (133, 100)), ((300, 400), (100, 133)), ((101, 333), (100, 329)), ((300, 100), (300, 100))],
)
def test_the_shorter_side_is_bounded_and_the_shape_stays(size: tuple[int, int], bounded: tuple[int, int]) -> None:
    field, image = made(jpeg(*size), shorter_side=100)
    assert (field, image.size, image.format) == ("jpg", bounded, "JPEG")


def test_images_that_are_small_enough_stay_as_they_are() -> None:
    data = jpeg(120, 100)
    assert encode_image(data, "jpg", PackOptions(shorter_side=100)).data == data


def test_resizing_is_pillows_antialiased_bicubic() -> None:
    original = photo(400, 300)
    _, image = made(encoded(original, "PNG"), "png", shorter_side=64)
    assert np.array_equal(np.asarray(image), np.asarray(original.resize((85, 64), Image.Resampling.BICUBIC)))


def test_quality_makes_every_image_a_jpeg() -> None:
    small, large = (encode_image(encoded(photo(200, 150), "PNG"), "png", PackOptions(quality=q)) for q in (30, 95))
    assert small.field == large.field == "jpg"
    assert opened(small.data).format == "JPEG"
    assert len(small.data) < len(large.data) / 3


@pytest.mark.parametrize(
    ("mode", "format_", "mode_after", "format_after"),
    [
        ("L", "JPEG", "L", "JPEG"),
        ("CMYK", "JPEG", "RGB", "JPEG"),
        ("RGBA", "PNG", "RGBA", "PNG"),
        ("P", "PNG", "RGB", "PNG"),
        ("L", "PNG", "L", "PNG"),
        ("RGB", "WEBP", "RGB", "PNG"),
        ("RGB", "BMP", "RGB", "PNG"),
    ],
)
def test_formats_and_modes_after_resizing(mode: str, format_: str, mode_after: str, format_after: str) -> None:
    field, image = made(encoded(photo(120, 90).convert(mode), format_), "x", shorter_side=40)
    assert (image.mode, image.format) == (mode_after, format_after)
    assert field == {"JPEG": "jpg", "PNG": "png"}[format_after]


def test_a_transparent_palette_stays_transparent() -> None:
    image = photo(80, 60).convert("P")
    image.info["transparency"] = 0
    assert made(encoded(image, "PNG", transparency=0), "png", shorter_side=30)[1].mode == "RGBA"


def test_orientation_and_color_profile_stay_and_thumbnails_go() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010E] = "described " * 500
    data = encoded(photo(300, 200), exif=exif, icc_profile=b"profile" * 30)
    _, image = made(data, shorter_side=50)
    assert dict(image.getexif()) == {0x0112: 6}
    assert image.info["icc_profile"] == b"profile" * 30


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_pixels_are_those_of_the_upright_image(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo(150, 100), exif=exif)
    image = encode_image(data, "jpg", PackOptions(decoded=True))
    assert image.field == "npy"
    upright = images.decode(data, apply_exif_orientation=True)
    assert np.array_equal(np.load(io.BytesIO(image.data), allow_pickle=False), upright)
    smaller = encode_image(data, "jpg", PackOptions(decoded=True, shorter_side=50))
    shape = (75, 50, 3) if orientation == 6 else (50, 75, 3)
    assert np.load(io.BytesIO(smaller.data), allow_pickle=False).shape == shape


@pytest.mark.parametrize(
    ("dtype", "format_"), [("uint16", "PNG"), ("uint16", "TIFF"), ("int32", "TIFF"), ("float32", "TIFF")]
)
@pytest.mark.parametrize("options", [{"shorter_side": 8}, {"quality": 90}, {"decoded": True}])
def test_values_of_more_than_8_bits_are_not_clipped(dtype: str, format_: str, options: dict[str, Any]) -> None:
    data = encoded(Image.fromarray(np.linspace(0, 60_000, 256).reshape(16, 16).astype(dtype)), format_)
    with pytest.raises(ValueError, match="more than 8 bits"):
        encode_image(data, "x", PackOptions(**options))
    assert encode_image(data, "x", PackOptions(shorter_side=16)).data == data


def test_a_grid_comes_with_its_lengths_or_with_a_reason() -> None:
    good = encode_image(jpeg(400, 300, quality=95), "jpg", PackOptions(grid=True))
    assert good.lengths is not None
    assert not good.reason
    small, foreign = jpeg(40, 30), encoded(photo(40, 30), "PNG")
    assert encode_image(small, "jpg", PackOptions(grid=True)) == ("jpg", small, None, "Too small for a grid")
    assert encode_image(foreign, "jpg", PackOptions(grid=True)) == ("jpg", foreign, None, "PNG, not JPEG")


def test_an_image_that_is_encoded_again_can_have_a_grid() -> None:
    data = jpeg(800, 600, quality=98)
    image = encode_image(data, "jpg", PackOptions(grid=True, shorter_side=300, quality=90))
    assert image.lengths is not None
    plain = encode_image(data, "jpg", PackOptions(shorter_side=300, quality=90))
    assert apart(opened(image.data), opened(plain.data)) == 0


MASKED = {"0.jpg": jpeg(200, 150, quality=95), "0.seg.png": encoded(photo(200, 150).convert("L"), "PNG")}


def test_masks_are_not_touched_unless_named(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "a.tar", MASKED)
    with pytest.raises(ArgumentError, match=r"has 2 images \(jpg, seg\.png\).*--field jpg"):
        feedline("pack", tar, tmp_path / "out", "--shorter-side", 50)
    packed(tar, tmp_path / "one", "--shorter-side", 50, "--field", "jpg")
    found = members(tmp_path / "one")
    assert opened(found["0.jpg"]).size == (66, 50)
    assert found["0.seg.png"] == MASKED["0.seg.png"]
    packed(tar, tmp_path / "both", "--shorter-side", 50, "--field", "jpg", "--field", "seg.png")
    assert opened(members(tmp_path / "both")["0.seg.png"]).size == (66, 50)


def test_a_grid_changes_no_pixel_so_masks_may_stand_by(tmp_path: Path) -> None:
    packed(write_tar(tmp_path / "a.tar", MASKED), tmp_path / "out", "--grid")
    found = members(tmp_path / "out")
    assert found["0.seg.png"] == MASKED["0.seg.png"]
    assert apart(opened(found["0.jpg"]), opened(MASKED["0.jpg"])) == 0


def test_two_parts_that_would_get_one_name_are_refused(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "a.tar", {"0.png": encoded(photo(40, 30), "PNG"), "0.jpg": jpeg(40, 30)})
    with pytest.raises(SampleError, match=r"two parts of sample '0' would both be '0\.jpg'"):
        feedline("pack", tar, tmp_path / "out", "--quality", 80, "--field", "png", "--field", "jpg")


def test_a_decompression_bomb_is_a_bad_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar = write_tar(tmp_path / "a.tar", {"0.png": encoded(photo(200, 150), "PNG")})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for options in (("--shorter-side", 50), ("--decoded",)):
        with pytest.raises(SampleError, match=r"member '0\.png' could not be packed"):
            feedline("pack", tar, tmp_path / options[0], *options)


def test_a_truncated_image_is_kept_by_a_grid_and_refused_by_resizing(tmp_path: Path) -> None:
    whole = jpeg(400, 300, quality=95)
    tar = write_tar(tmp_path / "a.tar", {"0.jpg": whole[: len(whole) // 2], "1.jpg": whole})
    reported = packed(tar, tmp_path / "out", "--grid")
    assert reported["without_grid"] == {"Premature end of JPEG file": 1}
    with pytest.raises(SampleError, match=r"a\.tar: member '0\.jpg' could not be packed: .*truncated"):
        feedline("pack", tar, tmp_path / "other", "--shorter-side", 50)
