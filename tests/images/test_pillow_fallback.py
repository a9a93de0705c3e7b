"""Without the native kernels everything goes through Pillow: the same geometry, the same rows."""

from __future__ import annotations

import tracemalloc
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from image_cases import apart, encoded, jpeg, photo
from PIL import Image

from feedline import images
from feedline.core.kernels import SlowKernelsWarning
from feedline.images import CropPolicy, Recipe, native

CROPS = [images.RandomBox(), images.CenterBox(70), images.CenterBox(40), images.WholeBox()]
SIZES = [(200, 150), (73, 400), (811, 643), (5, 3)]


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A build without libjpeg-turbo, whose warning was already issued."""
    monkeypatch.setattr(native, "native", None)
    monkeypatch.setattr(native, "_warn_slow", lambda: None)
    native.plan_of.cache_clear()
    yield
    native.plan_of.cache_clear()


def table() -> list[tuple[bytes, Recipe, int]]:
    exif = Image.Exif()
    cases = []
    for crop in CROPS:
        for seed, (width, height) in enumerate(SIZES):
            exif[0x0112] = 2 + len(cases) % 7
            data = jpeg(width, height, seed, exif=exif.tobytes(), quality=90)
            recipe = Recipe((56, 64), crop, flip=0.5, interpolation=("bilinear", "bicubic")[seed % 2])
            recipe = replace(recipe, scaled_decode=len(cases) % 2 == 1)
            cases += [(data, recipe, seed), (data, replace(recipe, apply_exif_orientation=True), seed)]
            cases += [(encoded(photo(width, height), "PNG"), recipe, seed)]
    whole = Recipe((31, 64), images.CenterBox(300))  # of a side whose parts have no bounds in float32
    return [*cases, (jpeg(500, 400), whole, 0), (jpeg(500, 400), replace(whole, interpolation="bicubic"), 0)]


@pytest.fixture(scope="module")
def rows() -> list[tuple[tuple[bytes, Recipe, int], torch.Tensor]]:
    """Cases with their rows by the kernels, computed before `no_kernels` removes them for a test."""
    return [(case, images.read_one(*case)) for case in table()]


@pytest.mark.usefixtures("no_kernels")
def test_rows_are_those_of_the_kernels(rows: list[tuple[tuple[bytes, Recipe, int], torch.Tensor]]) -> None:
    for case, wanted in rows:
        assert torch.equal(images.read_one(*case), wanted)


@pytest.mark.usefixtures("no_kernels")
def test_a_side_of_millions_of_lines_needs_no_memory_for_them() -> None:
    recipe = Recipe((24, 24), images.CenterBox(224))
    tracemalloc.start()
    row = images.read_one(np.tile(np.arange(3, dtype=np.uint8), (60_000, 3, 1)), recipe, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 28
    assert torch.equal(row, torch.arange(3, dtype=torch.uint8).expand(24, 24, 3))


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("crop", CROPS, ids=str)
def test_ready_pixels_threads_and_types(crop: CropPolicy) -> None:
    datas = [jpeg(90, 60, i) for i in range(4)]
    keys = np.arange(4, dtype=np.uint64)
    recipe = Recipe((30, 40), crop, flip=0.5)
    rows = np.empty((4, 30, 40, 3), np.uint8)
    images.read_batch(datas, recipe, rows, keys, threads=3)
    for key, data in enumerate(datas):
        assert apart(images.read_one(images.decode(data), recipe, key), rows[key]) <= 1
    norm = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
    planes = images.read_one(datas[1], replace(recipe, dtype=torch.float32, layout="CHW", **norm), 1)
    mean, std = torch.tensor(norm["mean"]), torch.tensor(norm["std"])
    wanted = ((torch.from_numpy(rows[1]).to(torch.float32) / 255 - mean) / std).permute(2, 0, 1)
    assert torch.equal(planes, wanted)
    halves = images.read_one(datas[1], replace(recipe, dtype=torch.bfloat16, layout="CHW", **norm), 1)
    assert torch.equal(halves, wanted.to(torch.bfloat16))


@pytest.mark.usefixtures("no_kernels")
def test_headers_and_errors(tmp_path: Path) -> None:
    assert images.probe(jpeg(70, 50, progressive=True)) == images.Header(70, 50, "JPEG", 3, True, 1)
    (tmp_path / "bad.jpg").write_bytes(b"")
    with pytest.raises(images.ImageError, match=r"bad.jpg could not be read: it is empty \(0 bytes\)"):
        images.decode(tmp_path / "bad.jpg")
    with pytest.raises(
        images.ImageError, match=r"the image in row 1 could not be read: image file is truncated"
    ) as caught:
        images.read_batch(
            [jpeg(60, 40), jpeg(60, 40, quality=95)[:-400]], Recipe((8, 8), CROPS[-1]), np.empty((2, 8, 8, 3), np.uint8)
        )
    assert caught.value.row == 1
    with pytest.raises(FileNotFoundError):
        images.read_one(tmp_path / "none.jpg", Recipe((8, 8), CROPS[-1]))


def test_the_warning_is_issued_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "native", None)
    native.plan_of.cache_clear()
    native._warn_slow.cache_clear()
    with pytest.warns(
        SlowKernelsWarning, match="Pillow decodes the images, .* several times slower. Install .* libjpeg62-turbo-dev"
    ):
        images.read_one(jpeg(9, 9), Recipe((8, 8), CROPS[-1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images.read_one(jpeg(9, 9), Recipe((9, 8), CROPS[-1]))
    native.plan_of.cache_clear()
    native._warn_slow.cache_clear()
