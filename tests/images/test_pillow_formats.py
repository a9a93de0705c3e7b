"""All other kinds of images: through Pillow, by content and not by name; unreadable files are named."""

from __future__ import annotations

import base64
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from image_cases import by_pillow, encoded, jpeg, photo, rgb, with_frame
from PIL import Image, ImageFile

from feedline import images
from feedline.errors import ArgumentError, SampleError
from feedline.images import Recipe, native

RECIPE = Recipe((24, 32), images.WholeBox())

ARITHMETIC = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABQODxIPDRQSEBIXFRQYHjIhHhwcHj0sLiQySUBMS0dARkVQWnNiUFVtVkVGZIhlbXd7gYKBTmCN"
    "l4x9lnN+gXz/2wBDARUXFx4aHjshITt8U0ZTfHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHz/yQAR"
    "CAAYACgDASIAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwDSLv5dI9JNKXIM2a0q0AAPfbcal/aF/PRRzrqEpXvwayL3+BS0wuLE"
    "zgcn66s7edul3jjTTRK/H/uqhUEGGqecqDKTI6SVovD/2Q=="
)
"""JPEG of 40 × 24 pixels, made with `jpegtran -arithmetic`."""


def foreign() -> dict[str, bytes]:
    image = photo(60, 40)
    alpha = image.convert("RGBA")
    alpha.putalpha(image.convert("L"))
    palette = image.quantize(16)
    deep = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    frames = {"save_all": True, "append_images": [photo(60, 40, 1)]}
    return {
        "PNG": encoded(image, "PNG"),
        "PNG, alpha": encoded(alpha, "PNG"),
        "PNG, 1 bit": encoded(image.convert("1"), "PNG"),
        "PNG, 16 bits": encoded(deep, "PNG"),
        "PNG, gray and alpha": encoded(alpha.convert("LA"), "PNG"),
        "PNG, transparent palette": encoded(palette, "PNG", transparency=3),
        "GIF, animated": encoded(image, "GIF", **frames),
        "WebP": encoded(image, "WEBP"),
        "WebP, animated": encoded(image, "WEBP", **frames),
        "BMP": encoded(image, "BMP"),
        "TIFF": encoded(image, "TIFF"),
        "PPM": encoded(image, "PPM"),
        "JPEG, CMYK": encoded(image.convert("CMYK"), "JPEG"),
    }


@pytest.mark.parametrize("kind", foreign())
def test_other_formats_are_what_pillow_converts(kind: str, tmp_path: Path) -> None:
    data = foreign()[kind]
    path = tmp_path / "lies.jpg"
    path.write_bytes(data)
    pixels = np.asarray(rgb(data))
    wanted = images.read_one(pixels, RECIPE)
    for source in (data, str(path), path, memoryview(data)):
        np.testing.assert_array_equal(images.decode(source), pixels)
        assert torch.equal(images.read_one(source, RECIPE), wanted)
    header = images.probe(str(path))
    assert (header.width, header.height) == (60, 40)
    assert header.format == kind.partition(",")[0].upper()


def test_a_jpeg_by_another_name(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(jpeg(50, 40))
    assert images.probe(path) == images.Header(50, 40, "JPEG", 3, False, 1)
    np.testing.assert_array_equal(images.decode(path), rgb(jpeg(50, 40)))


def test_ycck_is_pillows() -> None:
    data = bytearray(encoded(photo(60, 40).convert("CMYK"), "JPEG"))
    adobe = data.index(b"Adobe")
    data[adobe + 11] = 2
    np.testing.assert_array_equal(images.decode(bytes(data)), rgb(bytes(data)))


def test_arithmetic_coding() -> None:
    np.testing.assert_array_equal(images.decode(ARITHMETIC), rgb(ARITHMETIC))
    with pytest.raises(images.ImageError, match="it is truncated: it ends before its last scan does"):
        images.decode(ARITHMETIC[:-20])


def test_headers() -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    assert images.probe(jpeg(70, 50, sampling="gray")) == images.Header(70, 50, "JPEG", 1, False, 1)
    reported = images.probe(jpeg(70, 50, progressive=True, exif=exif.tobytes()))
    assert reported == images.Header(70, 50, "JPEG", 3, True, 8)
    assert images.probe(np.zeros((5, 7, 3), np.uint8)) == images.Header(7, 5, "pixels", 3, False, 1)


def test_a_header_behind_much_else(tmp_path: Path) -> None:
    """Color profiles, thumbnails and notes of cameras may fill hundreds of kilobytes."""
    plain = jpeg(70, 50)
    path = tmp_path / "a.jpg"
    path.write_bytes(plain[:2] + b"".join(b"\xff\xe5\xff\xff" + bytes(65533) for _ in range(9)) + plain[2:])
    assert images.probe(path).width == 70
    np.testing.assert_array_equal(images.decode(path), rgb(plain))


BAD = {
    "empty": (b"", r"it is empty \(0 bytes\)"),
    "text": (b"hello, world", r"of no image format that Pillow knows \(it begins with b'hello, w'\)"),
    "only a beginning": (b"\xff\xd8\xff", "it ends within its header"),
    "half a header": (jpeg(60, 40)[:300], "it ends within its header"),
    "no image": (jpeg(60, 40)[:20] + b"\xff\xd9", "it ends before its image begins"),
    "half the data": (jpeg(200, 200, quality=95)[:-4000], "it is truncated: it ends before its image does"),
    "half a progressive": (jpeg(60, 40, progressive=True)[:-300], "it is truncated: it ends before its last scan does"),
    "12 bits": (with_frame(jpeg(60, 40), precision=12), "a JPEG of 12 bits per sample, of which only 8 are supported"),
    "lossless": (with_frame(jpeg(60, 40), marker=0xC3), "it is a lossless JPEG, which is not supported"),
    "hierarchical": (with_frame(jpeg(60, 40), marker=0xC5), "it is a hierarchical JPEG, which is not supported"),
    "no height": (with_frame(jpeg(60, 40), height=0), "its header says that it has no pixels"),
    "two components": (with_frame(jpeg(60, 40), components=2), "a JPEG of 2 components"),
    "bomb": (
        with_frame(jpeg(60, 40), width=60_000, height=60_000),
        r"60000 × 60000 = 3,600,000,000 pixels, more than the limit of 178,956,970 .* raise PIL.Image.MAX_IMAGE_PIXELS",
    ),
    "truncated PNG": (encoded(photo(60, 40), "PNG")[:2000], "truncated|unrecognized data stream|broken PNG"),
}


@pytest.mark.parametrize("kind", BAD)
def test_unreadable_images_are_reported_with_their_address(kind: str, tmp_path: Path) -> None:
    data, reason = BAD[kind]
    path = tmp_path / "bad.jpg"
    path.write_bytes(data)
    with pytest.raises(images.ImageError, match=reason) as caught:
        images.read_one(str(path), RECIPE)
    assert str(caught.value).startswith(f"{path} could not be read: ")
    assert caught.value.row is None
    with pytest.raises(images.ImageError, match=rf"^the image could not be read: .*({reason})"):
        images.decode(data)
    out = np.zeros((4, 24, 32, 3), np.uint8)
    good = jpeg(60, 40)
    for threads in (1, 3):
        with pytest.raises(images.ImageError, match=rf"^the image in row 2 could not be read: .*({reason})") as caught:
            images.read_batch([good, encoded(photo(9, 9), "PNG"), data, b"worse"], RECIPE, out, threads=threads)
        assert caught.value.row == 2
        assert isinstance(caught.value, SampleError)
        assert isinstance(caught.value, ValueError)


def test_the_remedy_is_reported() -> None:
    with pytest.raises(images.ImageError, match="Replace or remove it, or pass on_error='skip' to the loader"):
        images.decode(b"")


def refused_by_pillow(data: bytes) -> bool:
    try:
        rgb(data)
    except (OSError, SyntaxError):
        return True
    return False


@pytest.mark.parametrize("end", [-4000, -20, -2, -1])
def test_truncated_files_are_refused_as_by_pillow_whatever_part_is_wanted(end: int) -> None:
    data = jpeg(200, 200, quality=95)
    assert refused_by_pillow(data[:end])
    recipe = Recipe((20, 20), images.RandomBox((0.01, 0.02)))
    key = next(key for key in range(99) if images.geometry(recipe, key, 200, 200).box[1] < 40)
    images.read_one(data, recipe, key)
    with pytest.raises(images.ImageError, match="it is truncated: it ends before its image does"):
        images.read_one(data[:end], recipe, key)
    with pytest.raises(images.ImageError, match="it is truncated"):
        images.decode(data[:end])


@pytest.mark.parametrize(
    ("marker", "options"),
    [
        *((marker, {}) for marker in (0x02, 0x01, 0x4F, 0xBF, 0xD0, 0xD8, 0xD9, 0xDA, 0xF0, 0xFF)),
        # Where markers are expected, one of each kind: impossible, a restart out of order, the end.
        *((marker, {"restart_marker_blocks": 3}) for marker in (0x02, 0xD0, 0xD9)),
    ],
)
def test_a_marker_amid_the_data_has_pillows_verdict(marker: int, options: dict[str, int]) -> None:
    """Pillow refuses impossible ones, wherever they are, and reads on after others."""
    data = jpeg(200, 200, quality=90, **options)
    recipe = Recipe((20, 20), images.RandomBox((0.01, 0.9)))
    for at in range(800, len(data) - 2, 1999):
        changed = data[:at] + bytes([0xFF, marker]) + data[at + 2 :]
        for key in range(2):
            plan = images.geometry(recipe, key, 200, 200)
            if refused_by_pillow(changed):
                with pytest.raises(images.ImageError):
                    images.read_one(changed, recipe, key)
            else:
                row = images.read_one(changed, recipe, key).numpy()
                np.testing.assert_array_equal(row, by_pillow(rgb(changed), plan, "bilinear"))


def test_an_impossible_marker_is_named() -> None:
    data = bytearray(jpeg(200, 200, quality=90))
    data[-3000:-2998] = b"\xff\x02"
    with pytest.raises(images.ImageError, match=r"its data are damaged \(libjpeg: Unsupported marker type 0x02\)"):
        images.decode(bytes(data))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 3}], ids="".join)
def test_truncated_files_are_read_where_pillow_may(options: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    data = jpeg(200, 200, quality=90, **options)
    cut = data[: len(data) * 2 // 3]
    recipe = Recipe((40, 40), images.RandomBox(), flip=0.5)
    with pytest.raises(images.ImageError, match="it is truncated"):
        images.read_one(cut, recipe, 1)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    plan = images.geometry(recipe, 1, 200, 200)
    np.testing.assert_array_equal(images.read_one(cut, recipe, 1).numpy(), by_pillow(rgb(cut), plan, "bilinear"))
    np.testing.assert_array_equal(images.decode(cut), rgb(cut))
    np.testing.assert_array_equal(images.decode(data), rgb(data))


def test_damage_that_libjpeg_decodes_past_is_pillows() -> None:
    data = bytearray(jpeg(120, 80, restart_marker_blocks=4))
    data[-700:-690] = bytes(10)
    np.testing.assert_array_equal(images.decode(bytes(data)), rgb(bytes(data)))


def test_more_scans_than_any_honest_file_has() -> None:
    data = jpeg(60, 40, progressive=True)
    scan = data.rindex(b"\xff\xda")
    with pytest.raises(images.ImageError, match="it has more than 500 scans"):
        images.decode(data[:-2] + data[scan:-2] * 600 + b"\xff\xd9")


@pytest.mark.parametrize(
    ("make", "error"),
    [(lambda path: None, FileNotFoundError), (Path.mkdir, IsADirectoryError)],
    ids=["missing", "folder"],
)
def test_errors_of_files_keep_their_type(make: object, error: type[OSError], tmp_path: Path) -> None:
    path = tmp_path / "nothing.jpg"
    make(path)
    for read in (images.decode, images.probe, lambda source: images.read_one(source, RECIPE)):
        with pytest.raises(error, match=str(path)):
            read(str(path))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    for read in (images.decode, images.probe, lambda source: images.read_one(source, RECIPE)):
        with pytest.raises(images.ImageError, match=r"pipe.jpg could not be read: it is not a regular file"):
            read(tmp_path / "pipe.jpg")


def test_only_jpegs_may_not_be_larger_than_2_gib(tmp_path: Path) -> None:
    data = encoded(photo(60, 40), "PNG")
    for name, beginning in (("large.png", data), ("large.jpg", jpeg(60, 40))):
        with (tmp_path / name).open("wb") as file:
            file.write(beginning)
            file.truncate((1 << 31) + 1)
    assert images.probe(tmp_path / "large.png").format == "PNG"
    assert torch.equal(images.read_one(tmp_path / "large.png", RECIPE), images.read_one(data, RECIPE))
    assert images.probe(tmp_path / "large.jpg").format == "JPEG"
    with pytest.raises(images.ImageError, match=r"large.jpg could not be read: it is larger than 2 GiB"):
        images.read_one(tmp_path / "large.jpg", RECIPE)


def test_a_probe_of_another_format_reads_no_further_than_its_beginning(tmp_path: Path) -> None:
    with (tmp_path / "a.png").open("wb") as file:
        file.write(encoded(photo(60, 40), "PNG"))
        file.truncate(1 << 20)
    native.native.image_reads()
    assert images.probe(tmp_path / "a.png").width == 60
    assert native.native.image_reads()[1] == 1 << 18


def test_decoded_levels_are_writable() -> None:
    for name in ("JPEG", "PNG"):
        assert images.decode(encoded(photo(60, 40), name)).flags.writeable


def test_a_row_that_the_kernels_cannot_write_after_pillow_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = native.plan_of(RECIPE)

    def read(sources: Any, *args: Any) -> Any:
        if isinstance(sources[0], np.ndarray):
            return [(0, 2, 0, "there is not enough memory to decode it")]
        return plan.read(sources, *args)

    monkeypatch.setattr(native, "plan_of", lambda _: SimpleNamespace(read=read))
    with pytest.raises(images.ImageError, match="row 1 could not be read: there is not enough memory") as caught:
        images.read_batch([jpeg(60, 40), encoded(photo(60, 40), "PNG")], RECIPE, np.empty((2, 24, 32, 3), np.uint8))
    assert caught.value.row == 1


def test_pillows_limit_on_pixels_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    datas = jpeg(60, 40), encoded(photo(60, 40), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for data in datas:
        with pytest.raises(
            images.ImageError, match=r"2,?400 pixels.* limit of 2,?000 .*raise PIL.Image.MAX_IMAGE_PIXELS"
        ):
            images.read_one(data, RECIPE)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert images.read_one(datas[0], RECIPE).shape == (24, 32, 3)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("limit", [1e9, np.float64(1e9), float("inf"), float("nan"), sys.maxsize, 1 << 70, 2400.5])
def test_pillows_limit_may_be_any_number(limit: Any, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    if not kernels:
        monkeypatch.setattr(native, "native", None)
    for data in (jpeg(60, 40), encoded(photo(60, 40), "PNG")):
        assert images.decode(data).shape == (40, 60, 3)


def test_a_limit_of_no_pixels_is_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    datas = jpeg(60, 40), encoded(photo(60, 40), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 0)
    for data in datas:
        with pytest.raises(images.ImageError, match=r"raise PIL.Image.MAX_IMAGE_PIXELS"):
            images.decode(data)


def test_errors_travel_between_processes() -> None:
    with pytest.raises(images.ImageError) as caught:
        images.read_batch([b""], RECIPE, np.zeros((1, 24, 32, 3), np.uint8))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.row) == (str(caught.value), 0)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (7, TypeError, "int"),
        (np.zeros((4, 4), np.uint8), TypeError, "pixels of shape"),
        (np.zeros((4, 4, 4), np.uint8), TypeError, "pixels of shape"),
        (np.zeros((4, 4, 3), np.float32), TypeError, "of uint8"),
        (np.zeros((4, 4, 3), np.int8), TypeError, "of uint8, not int8"),
        (np.zeros((4, 4, 3), bool), TypeError, "of uint8, not bool"),
        (memoryview(np.zeros((4, 4, 3), np.int8)), TypeError, "of uint8, not int8"),
        (np.zeros((0, 4, 3), np.uint8), images.ImageError, "without pixels"),
        ("a\0b.jpg", ValueError, "null"),
    ],
    ids=lambda value: None,
)
def test_sources_that_are_no_images(source: object, error: type[Exception], message: str) -> None:
    for read in (lambda source: images.read_one(source, RECIPE), images.decode, images.probe):
        with pytest.raises(error, match=message):
            read(source)


def test_sources_may_be_one_array_of_images_and_a_row_of_them_may_be_wrong() -> None:
    pixels = np.asarray(photo(60, 40))
    out = np.empty((2, 24, 32, 3), np.uint8)
    images.read_batch(np.stack([pixels, pixels]), RECIPE, out)
    assert (out == images.read_one(pixels, RECIPE).numpy()).all()
    assert np.array_equal(images.decode(memoryview(pixels)), pixels)
    with pytest.raises(images.ImageError, match=r"the image in row 1 could not be read: .* without pixels") as caught:
        images.read_batch([pixels, pixels[:0]], RECIPE, out)
    assert caught.value.row == 1


def test_arguments_that_do_not_fit() -> None:
    data = jpeg(60, 40)
    good = np.zeros((1, 24, 32, 3), np.uint8)
    locked = good.copy()
    locked.flags.writeable = False
    cases = {
        r"out has shape \(2, 24, 32, 3\); 1 rows of this recipe have \(1, 24, 32, 3\)": {
            "out": np.zeros((2, 24, 32, 3), np.uint8)
        },
        "out has dtype float32; rows of torch.uint8 need uint8": {"out": good.astype(np.float32)},
        "out has dtype >f4; rows of torch.float32 need float32": {
            "recipe": replace(RECIPE, dtype=torch.float32),
            "out": good.astype(">f4"),
        },
        "out must be an array of NumPy, not Tensor": {"out": torch.from_numpy(good)},
        "out is read-only": {"out": locked},
        "each row of out must be contiguous": {"out": np.zeros((1, 24, 64, 3), np.uint8)[:, :, ::2]},
        "keys must be an array of one uint64 for each of 1 sources": {"keys": np.zeros(2, np.uint64)},
        "keys must be an array of one uint64 .* got int64 of shape": {"keys": np.zeros(1, np.int64)},
        "keys must be an array of one uint64 .* got a list": {"keys": [7]},
        "grids must be one for each of 1 sources, or None; got 2": {"grids": [None, None]},
    }
    for message, changes in cases.items():
        with pytest.raises(ArgumentError, match=message):
            images.read_batch(**{"sources": [data], "recipe": RECIPE, "out": good, **changes})
    with pytest.raises(TypeError, match="a grid is one axis of uint16"):
        images.read_batch([data], RECIPE, good, grids=[np.zeros(3, np.int64)])
