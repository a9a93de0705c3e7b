"""Pixels of transforms, compared with Pillow, NumPy and torch."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from diagonals import diagonal
from PIL import Image, ImageEnhance
from transform_cases import FILTERS, Pixels, difference, first_geometry, jpeg, random_image, through_pillow

from feedline import SampleRng
from feedline.core.rng import Draws
from feedline.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    GaussianBlur,
    Grayscale,
    Normalize,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    ToTensor,
    color,
)

KEYS = range(30)


@pytest.fixture(params=["native", "plain"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with the native arithmetic on levels and with Pillow's."""
    if request.param == "plain":
        monkeypatch.setattr(color, "_native", None)
    elif color._native is None:
        pytest.skip("the native kernels were not built")
    return str(request.param)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_random_resized_crop_is_pillows_crop_and_resize(interpolation: str) -> None:
    transform = Compose([RandomResizedCrop((40, 50), interpolation=interpolation), RandomHorizontalFlip()])
    array = random_image()
    for key in KEYS:
        expected = through_pillow(array, first_geometry(transform, key, array), interpolation)
        assert difference(transform(array, SampleRng(key)), expected) == 0


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("scale_down", [RandomResizedCrop, Resize])
def test_large_jpegs_are_decoded_at_a_fraction_only_on_request(scale_down: Callable[..., Any], scaled: bool) -> None:
    data = jpeg(random_image(400, 600))
    transform = scale_down((20, 30), scaled_decode=scaled)
    exact = transform(np.asarray(Image.open(io.BytesIO(data))), SampleRng(3))
    assert (difference(transform(data, SampleRng(3)), exact) == 0) is not scaled
    shorter = Compose([Resize(24, scaled_decode=scaled), CenterCrop(20)])
    assert (difference(shorter(data), shorter(Image.open(io.BytesIO(data)))) == 0) is not scaled


@pytest.mark.parametrize("shape", [(90, 120), (120, 90), (64, 64), (33, 200)])
def test_the_validation_recipe_is_pillows_resize_and_crop(shape: tuple[int, int]) -> None:
    array = random_image(*shape)
    height, width = shape
    size = (int(64 * width / min(shape)), int(64 * height / min(shape)))
    left, top = round((size[0] - 56) / 2), round((size[1] - 56) / 2)
    resized = Image.fromarray(array).resize(size, FILTERS["bilinear"])
    expected = resized.crop((left, top, left + 56, top + 56))
    assert difference(Compose([Resize(64), CenterCrop(56)])(array), expected) == 0
    assert difference(Resize(64)(array), resized) == 0


def test_resize_to_both_sides() -> None:
    array = random_image()
    expected = Image.fromarray(array).resize((31, 47), FILTERS["bicubic"])
    assert difference(Resize((47, 31), interpolation="bicubic")(array), expected) == 0
    assert difference(Resize([47])(array), Resize(47)(array)) == 0


def test_a_jpeg_that_is_decoded_smaller_differs_by_a_level_from_the_whole_image() -> None:
    large = random_image(600, 800)
    file = jpeg(np.asarray(Image.fromarray(large).resize((200, 150)).resize((800, 600))))
    with Image.open(io.BytesIO(file)) as image:
        whole = np.asarray(image.convert("RGB"))
    for transform in (Resize(64), Compose([Resize(64), CenterCrop(56)]), RandomResizedCrop(32)):
        rng = SampleRng(3)
        assert np.abs(transform(file, rng).astype(int) - transform(whole, rng)).mean() < 1


@pytest.mark.parametrize("size", [(20, 30), (90, 120), (100, 50), (51, 151)])
def test_center_crop_pads_with_zeros_as_torchvision(size: tuple[int, int]) -> None:
    array = random_image(90, 121)
    height, width = size
    sides = [((n - m) // 2, (n - m + 1) // 2) if n > m else (0, 0) for n, m in zip(size, array.shape, strict=False)]
    padded = np.pad(array, [*sides, (0, 0)])
    top, left = round((padded.shape[0] - height) / 2), round((padded.shape[1] - width) / 2)
    assert difference(CenterCrop(size)(array), padded[top : top + height, left : left + width]) == 0


@pytest.mark.parametrize(
    ("mode", "padding"),
    [
        # More than the image is wide: each mode continues what it has added itself.
        *((mode, (30, 30)) for mode in ("constant", "edge", "reflect", "symmetric")),
        *(("constant", 3), ("edge", (2, 9)), ("reflect", (1, 0, 7, 4)), ("symmetric", (2, 9))),
    ],
)
def test_random_crop_shows_a_part_of_the_padded_image(mode: str, padding: Any) -> None:
    array = random_image(12, 15)
    left, top, right, bottom = (padding,) * 4 if isinstance(padding, int) else padding * (4 // len(padding))
    fill = {"constant_values": 9} if mode == "constant" else {}
    padded = np.pad(array, [(top, bottom), (left, right), (0, 0)], mode, **fill)  # type: ignore[call-overload]
    windows = np.lib.stride_tricks.sliding_window_view(padded, (10, 11), axis=(0, 1)).transpose(0, 1, 3, 4, 2)
    transform = RandomCrop((10, 11), padding=padding, fill=9, padding_mode=mode)
    for key in KEYS:
        found = transform(array, SampleRng(key))
        assert (windows == found).all(axis=(2, 3, 4)).any()


def test_random_crop_fills_with_a_color_and_pads_what_is_too_small() -> None:
    array = random_image(8, 30)
    for key in KEYS:
        shown = RandomCrop(20, pad_if_needed=True, fill=(1, 2, 3))(array, SampleRng(key))
        assert shown.shape == (20, 20, 3)
        assert (shown == (1, 2, 3)).all(axis=2).all(axis=1).sum() == 12


def test_flips_exchange_sides() -> None:
    array = random_image()
    assert difference(RandomHorizontalFlip(1.0)(array), array[:, ::-1]) == 0
    assert difference(RandomVerticalFlip(1.0)(array), array[::-1]) == 0
    assert difference(RandomHorizontalFlip(0.0)(array), array) == 0
    assert difference(RandomVerticalFlip(0.0)(array), array) == 0


ENHANCED: dict[int, Callable[[Image.Image, float], Image.Image]] = {
    color.BRIGHTNESS: lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    color.CONTRAST: lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    color.SATURATION: lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    color.HUE: lambda image, share: hue_turned(image, share),
}


def hue_turned(image: Image.Image, share: float) -> Image.Image:
    """adjust_hue by torchvision's documentation: the hue channel shifted by `share * 255`, cyclically."""
    channels = np.array(image.convert("HSV"))
    channels[..., 0] = (channels[..., 0].astype(int) + int(share * 255)) % 256
    return Image.merge("HSV", [Image.fromarray(channels[..., i]) for i in range(3)]).convert("RGB")


def enhanced(array: Pixels, adjustments: list[tuple[int, float]]) -> Pixels:
    image = Image.fromarray(array)
    for which, factor in adjustments:
        image = ENHANCED[which](image, factor)
    return np.asarray(image)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("which", [color.BRIGHTNESS, color.CONTRAST, color.SATURATION])
def test_one_adjustment_is_pillows(which: int) -> None:
    array = random_image(37, 41)
    for factor in (0.0, 0.37, 0.8, 1.0, 1.25, 1.9, 6.0):
        apart = difference(color.adjust(array, [(which, factor)]), enhanced(array, [(which, factor)]))
        assert apart == 0, factor


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("share", [-0.5, -0.21, -0.001, 0.0, 0.1, 0.5])
def test_turning_the_hue_is_pillows(share: float) -> None:
    steps = np.arange(0, 256, 3, np.uint8)
    colors = np.stack(np.meshgrid(steps, steps, steps[::5]), axis=-1).reshape(86, -1, 3)
    assert difference(color.adjust(colors, [(color.HUE, share)]), enhanced(colors, [(color.HUE, share)])) == 0


@pytest.mark.usefixtures("kernels")
def test_adjustments_follow_one_another() -> None:
    array, factors = random_image(30, 40), (1.3, 0.6, 1.7, -0.2)
    before = array.copy()
    for order in permutations(range(4)):
        adjustments = [(which, factors[which]) for which in order]
        assert difference(color.adjust(array, adjustments), enhanced(array, adjustments)) == 0, order
        assert difference(array, before) == 0


@pytest.mark.usefixtures("kernels")
def test_adjustments_of_views_and_of_gray() -> None:
    array = random_image()[::2, ::-1]
    adjustments = [(color.CONTRAST, 1.4), (color.HUE, 0.2)]
    assert difference(color.adjust(array, adjustments), enhanced(np.ascontiguousarray(array), adjustments)) == 0
    gray = random_image()[:, :, :1]
    bright = color.adjust(gray, [(color.SATURATION, 0.3), (color.BRIGHTNESS, 1.5), (color.HUE, 0.2)])
    assert difference(bright[:, :, 0], enhanced(gray[:, :, 0], [(color.BRIGHTNESS, 1.5)])) == 0


def test_color_jitter_applies_what_it_draws() -> None:
    array, jitter = random_image(), ColorJitter(0.4, 0.4, 0.4, 0.1)
    for key in KEYS:
        adjustments = jitter.adjustments(Draws(key))
        assert sorted(which for which, _ in adjustments) == [0, 1, 2, 3]
        assert difference(jitter(array, SampleRng(key)), enhanced(array, adjustments)) == 0


def levels_draws(key: int) -> Any:
    from feedline.core.rng import Draws

    return Draws(key)


@pytest.mark.usefixtures("kernels")
def test_gray_is_pillows() -> None:
    array = random_image()
    gray = np.asarray(Image.fromarray(array).convert("L"))
    assert difference(Grayscale()(array), gray[:, :, None]) == 0
    assert difference(Grayscale(3)(array), np.repeat(gray[:, :, None], 3, axis=2)) == 0
    assert difference(RandomGrayscale(1.0)(array), np.repeat(gray[:, :, None], 3, axis=2)) == 0
    assert difference(RandomGrayscale(0.0)(array), array) == 0
    assert difference(Grayscale(3)(gray), np.repeat(gray[:, :, None], 3, axis=2)) == 0


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("kernel_size", "sigma"), [*diagonal([1, 5, (9, 3), 23], [0.8, 2.0]), (5, 0.1)])
def test_blur_is_the_convolution_with_a_bell(kernel_size: Any, sigma: float) -> None:
    array = random_image(40, 50)
    wide, tall = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
    bells = []
    for size in (wide, tall):
        places = torch.linspace(-(size - 1) / 2, (size - 1) / 2, size, dtype=torch.float64)
        bell = torch.exp(-0.5 * (places / sigma) ** 2)
        bells.append(bell / bell.sum())
    border = (wide // 2, wide // 2, tall // 2, tall // 2)
    bordered = torch.nn.functional.pad(torch.tensor(array).permute(2, 0, 1).double(), border, "reflect")
    kernel = torch.outer(bells[1], bells[0])[None, None]
    expected = torch.nn.functional.conv2d(bordered[:, None], kernel)[:, 0].round().permute(1, 2, 0)
    assert difference(GaussianBlur(kernel_size, sigma)(array), expected) <= 1


@pytest.mark.skipif(color._native is None, reason="the native kernels were not built")
def test_both_blurs_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    array = random_image(61, 47)
    natively = [GaussianBlur((7, 5))(array, SampleRng(key)) for key in KEYS]
    monkeypatch.setattr(color, "_native", None)
    for key, expected in zip(KEYS, natively, strict=True):
        assert difference(GaussianBlur((7, 5))(array, SampleRng(key)), expected) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 3])
def test_numbers_are_torchs(dtype: torch.dtype, channels: int) -> None:
    array = random_image()[:, :, :channels]
    shares = torch.tensor(array).permute(2, 0, 1).float() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406])[:channels], torch.tensor([0.229, 0.224, 0.225])[:channels]
    normalized = (shares - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
    torch.testing.assert_close(ToTensor(dtype)(array), shares.to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(ToTensor(dtype, "HWC")(array), shares.permute(1, 2, 0).to(dtype), rtol=0, atol=0)
    found = Normalize(mean.tolist(), std.tolist(), dtype)(array)
    torch.testing.assert_close(found, normalized.to(dtype))
    torch.testing.assert_close(Compose([ToTensor(), Normalize(mean.tolist(), std.tolist(), dtype)])(array), found)
    torch.testing.assert_close(Normalize(mean.tolist(), std.tolist(), dtype)(shares), normalized.to(dtype))


def test_levels_as_a_tensor_stay_levels() -> None:
    array = random_image()
    assert torch.equal(ToTensor(torch.uint8)(array), torch.tensor(array).permute(2, 0, 1))
    assert torch.equal(ToTensor(torch.uint8, "HWC")(array), torch.tensor(array))


def test_one_mean_stands_for_all_channels() -> None:
    array = random_image()
    torch.testing.assert_close(Normalize([0.5], [0.25])(array), Normalize([0.5] * 3, [0.25] * 3)(array))


@pytest.mark.parametrize("value", [0, 128.0, (10, 20, 30)])
def test_erasing_replaces_one_rectangle(value: Any) -> None:
    array = np.full((40, 60, 3), 255, np.uint8)
    for key in KEYS:
        erased = RandomErasing(1.0, value=value)(array, SampleRng(key))
        changed = (erased != 255).all(axis=2)
        rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
        assert changed.sum() == len(rows) * len(columns) > 0
        assert (erased[changed] == value).all()
    assert (array == 255).all()


def test_erasing_with_noise() -> None:
    numbers = torch.full((3, 40, 60), 9.0)
    erased = RandomErasing(1.0, scale=(0.3, 0.3), value="random")(numbers, SampleRng(1))
    inside = erased[erased != 9.0]
    assert abs(inside.mean()) < 0.2
    assert abs(inside.std() - 1) < 0.2
    image_erased = RandomErasing(1.0, scale=(0.3, 0.3), value="random")(np.zeros((40, 60, 3), np.uint8), SampleRng(1))
    assert 100 < image_erased[image_erased > 0].mean() < 155
    assert torch.equal(numbers, torch.full((3, 40, 60), 9.0))


def test_erasing_nothing_gives_the_image() -> None:
    array = random_image()
    assert difference(RandomErasing(0.0)(array, SampleRng(0)), array) == 0
    assert difference(RandomErasing(1.0, scale=(1.0, 1.0), ratio=(1.0, 1.0))(array, SampleRng(0)), array) == 0
