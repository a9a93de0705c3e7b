"""Rows of images: Pillow's levels for every sampling, crop and instruction set of the kernels."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diagonals import diagonal
from image_cases import apart, by_pillow, encoded, intervals, jpeg, photo, rgb, sample_photograph
from PIL import Image

from feedline import images
from feedline.images import CropPolicy, Recipe, native

SAMPLINGS = ["4:4:4", "4:2:2", "4:2:0", "4:1:1", "4:4:0", "gray", "RGB"]
CROPS = [images.RandomBox(), images.CenterBox(96), images.WholeBox()]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The operations of EXIF's orientations."""

crops = pytest.mark.parametrize("crop", CROPS, ids=lambda crop: type(crop).__name__)
sampled_crops = pytest.mark.parametrize(
    ("sampling", "crop"),
    # A crop policy only chooses a box. That of random crops chooses boxes of all places and sizes.
    [*((sampling, CROPS[0]) for sampling in SAMPLINGS), *(("4:2:0", crop) for crop in CROPS[1:])],
)


def test_the_image_kernels_were_built() -> None:
    assert native.native is not None


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"restart_marker_blocks": 3}], ids=lambda o: "".join(o) or "plain"
)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_decoded_image_is_pillows(sampling: str, options: dict[str, int]) -> None:
    for width, height in [(1, 1), (3, 2), (17, 16), (33, 65), (250, 131)]:
        data = jpeg(width, height, sampling=sampling, quality=90, **options)
        np.testing.assert_array_equal(images.decode(data), rgb(data))


@sampled_crops
def test_rows_are_pillows(sampling: str, crop: CropPolicy) -> None:
    for seed, (width, height) in enumerate([(1, 1), (9, 300), (300, 9), (251, 187), (640, 427)]):
        data = jpeg(width, height, seed, sampling=sampling, quality=90)
        for key in range(4):
            interpolation = ("bilinear", "bicubic")[key % 2]
            recipe = Recipe((72, 80), crop, flip=0.5, interpolation=interpolation)
            row = images.read_one(data, recipe, key).numpy()
            wanted = by_pillow(rgb(data), images.geometry(recipe, key, width, height), interpolation)
            np.testing.assert_array_equal(row, wanted)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_region_is_cut_from_the_whole_exactly(sampling: str, progressive: bool) -> None:
    """The part around a box that is not decoded does not show in the pixels."""
    data = jpeg(331, 203, sampling=sampling, progressive=progressive, quality=95)
    pixels = np.asarray(rgb(data))
    recipe = Recipe((50, 50), images.RandomBox((0.001, 0.3), (0.1, 10)))
    keys = np.arange(60, dtype=np.uint64)
    np.testing.assert_array_equal(rows([data] * 60, recipe, keys), rows([pixels] * 60, recipe, keys))


@sampled_crops
def test_scaled_decoding_is_pillows_draft(sampling: str, crop: CropPolicy) -> None:
    for width, height in [(1024, 683), (517, 519), (1101, 640)]:
        data = jpeg(width, height, sampling=sampling, quality=90)
        recipe = Recipe((64, 64), crop, scaled_decode=True)
        for key in range(3):
            plan = images.geometry(recipe, key, width, height)
            scale = next(
                s
                for s in (8, 4, 2, 1)
                if (plan.box[2] >= 2 * s * plan.full[1] and plan.box[3] >= 2 * s * plan.full[0]) or s == 1
            )
            assert scale > 1 or isinstance(crop, images.RandomBox)
            assert apart(images.read_one(data, recipe, key), drafted(data, plan, scale)) <= 1


def drafted(data: bytes, plan: images.Geometry, scale: int) -> np.ndarray:
    """As `by_pillow`, from a decode at 1/scale."""
    image = Image.open(io.BytesIO(data))
    if scale > 1:
        image.draft("RGB", (image.width // scale, image.height // scale))
    x, y, width, height = (side / scale for side in plan.box)
    region = image.convert("RGB").crop((int(x), int(y), int(np.ceil(x + width)), int(np.ceil(y + height))))
    box = (x - int(x), y - int(y), min(x - int(x) + width, region.width), min(y - int(y) + height, region.height))
    full = region.resize(plan.full[::-1], Image.Resampling.BILINEAR, box)
    left, top, width, height = plan.window
    row = np.asarray(full.crop((left, top, left + width, top + height)))
    return row[:, ::-1] if plan.flip else row


@crops
def test_all_instruction_sets_give_the_same_bits(crop: CropPolicy) -> None:
    sources = [jpeg(width, height, width) for width, height in [(300, 200), (64, 400), (900, 90), (31, 17)]]
    keys = np.arange(4, dtype=np.uint64)
    for size in [(1, 1), (7, 5), (33, 70), (224, 225)]:
        for dtype in (torch.uint8, torch.float32, torch.bfloat16):
            for layout in ("HWC", "CHW"):
                for interpolation in ("bilinear", "bicubic"):
                    floats = {} if dtype == torch.uint8 else {"mean": MEAN, "std": STD}
                    recipe = Recipe(size, crop, 0.5, interpolation, layout, dtype, **floats)
                    outs = [empty(4, recipe) for _ in range(native.ALL_SETS)]
                    for sets, out in enumerate(outs, 1):
                        assert native.build_plan(recipe, sets=sets).read(sources, out, keys, None, 0, 1) is None
                    assert len({out.tobytes() for out in outs}) == 1


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
@pytest.mark.parametrize(
    "norm", [{}, {"mean": MEAN, "std": STD}, {"mean": (1e-9, -7.0, 0.3), "std": (-1e-20, 3.0, 1e30)}]
)
def test_floats_are_normalized_levels_to_the_last_bit(layout: str, norm: dict[str, tuple[float, float, float]]) -> None:
    data, key = jpeg(300, 200), 5
    recipe = Recipe((63, 61), images.RandomBox(), flip=0.5, layout=layout)
    levels = images.read_one(data, recipe, key)
    floats = images.read_one(data, replace(recipe, dtype=torch.float32, **norm), key)
    halves = images.read_one(data, replace(recipe, dtype=torch.bfloat16, **norm), key)
    shape = (1, 1, 3) if layout == "HWC" else (3, 1, 1)
    wanted = levels.to(torch.float32) / 255
    if norm:
        wanted = (wanted - torch.tensor(norm["mean"]).view(shape)) / torch.tensor(norm["std"]).view(shape)
    assert torch.equal(floats, wanted)
    assert torch.equal(halves, wanted.to(torch.bfloat16))


@crops
def test_layouts_hold_the_same_image(crop: CropPolicy) -> None:
    data = jpeg(200, 300)
    recipe = Recipe((40, 50), crop, flip=0.5)
    planes = images.read_one(data, replace(recipe, layout="CHW"), 3)
    assert torch.equal(planes.permute(1, 2, 0), images.read_one(data, recipe, 3))


@crops
def test_a_flip_mirrors_the_row(crop: CropPolicy) -> None:
    data = jpeg(200, 300)
    recipe = Recipe((40, 50), crop)
    assert torch.equal(images.read_one(data, replace(recipe, flip=1.0), 3), images.read_one(data, recipe, 3).flip(1))


@pytest.mark.parametrize("size", [(200, 60), (60, 200), (101, 100), (100, 101)])
def test_an_image_smaller_than_the_center_is_surrounded_by_zeros(size: tuple[int, int]) -> None:
    """As torchvision's CenterCrop pads: the smaller half first."""
    data = jpeg(100, 80)
    recipe = Recipe(size, images.CenterBox(75))
    resized = rgb(data).resize((93, 75), Image.Resampling.BILINEAR)
    top, left = (size[0] - 75) // 2, (size[1] - 93) // 2
    if top < 0:
        top = round((size[0] - 75) / 2)
    if left < 0:
        left = round((size[1] - 93) / 2)
    wanted = Image.new("RGB", size[::-1])
    wanted.paste(resized, (left, top))
    assert apart(images.read_one(data, recipe), wanted) <= 1
    mirrored = images.read_one(data, replace(recipe, flip=1.0))
    assert torch.equal(mirrored.flip(1), images.read_one(data, recipe))
    padded = images.read_one(data, replace(recipe, dtype=torch.float32, mean=MEAN, std=STD))
    assert torch.allclose(padded[0, 0], -torch.tensor(MEAN) / torch.tensor(STD)) or size == (60, 200)


@pytest.mark.parametrize(("orientation", "crop"), diagonal(range(10), CROPS))
def test_orientations_are_applied_on_request(crop: CropPolicy, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = jpeg(301, 187, exif=exif.tobytes(), quality=95)
    upright = rgb(data)
    if orientation in UPRIGHT:
        upright = upright.transpose(UPRIGHT[orientation])
    assert images.probe(data).orientation == (orientation if 1 <= orientation <= 8 else 1)
    recipe = Recipe((50, 60), crop, flip=0.5, apply_exif_orientation=True)
    pixels = np.asarray(upright)
    np.testing.assert_array_equal(images.decode(data, apply_exif_orientation=True), pixels)
    assert torch.equal(images.read_one(data, recipe, 1), images.read_one(pixels, recipe, 1))
    assert torch.equal(
        images.read_one(data, replace(recipe, apply_exif_orientation=False), 1),
        images.read_one(np.asarray(rgb(data)), recipe, 1),
    )


@pytest.mark.parametrize("orientation", range(2, 9))
def test_turned_images_can_be_decoded_at_a_scale(orientation: int) -> None:
    """Where a mirrored side is no multiple of the scale, its incomplete pixel comes first: nothing may shift."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = jpeg(1001, 603, exif=exif.tobytes(), quality=95)
    recipe = Recipe((37, 37), images.WholeBox(), apply_exif_orientation=True, scaled_decode=True)
    full = images.read_one(data, replace(recipe, scaled_decode=False)).float()
    small = images.read_one(data, recipe).float()
    assert (full - small).abs().mean() < 3


def test_orientation_in_xmp_counts_where_exif_has_none() -> None:
    packet = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    plain = jpeg(40, 30)
    data = plain[:2] + b"\xff\xe1" + (len(packet) + 2).to_bytes(2) + packet + plain[2:]
    assert images.probe(data).orientation == Image.open(io.BytesIO(data)).getexif()[0x0112] == 6
    assert images.decode(data, apply_exif_orientation=True).shape == (40, 30, 3)


@pytest.mark.parametrize(
    ("view", "crop"), diagonal(["rows", "columns", "reversed", "BGR", "F-order", "read-only"], CROPS)
)
def test_ready_pixels_in_any_strides(view: str, crop: CropPolicy) -> None:
    pixels = np.asarray(photo(160, 120))
    shown = {
        "rows": np.tile(pixels, (1, 2, 1))[:, :160],
        "columns": np.repeat(pixels, 2, axis=1)[:, ::2],
        "reversed": pixels[::-1, ::-1].copy()[::-1, ::-1],
        "BGR": pixels[..., ::-1].copy()[..., ::-1],
        "F-order": np.asfortranarray(pixels),
        "read-only": pixels,
    }[view]
    recipe = Recipe((50, 60), crop, flip=0.5)
    plan = images.geometry(recipe, 1, 160, 120)
    assert apart(images.read_one(shown, recipe, 1), by_pillow(Image.fromarray(pixels), plan, "bilinear")) <= 1


def test_a_batch_is_its_rows_on_any_number_of_threads(tmp_path: Path) -> None:
    datas = [jpeg(50 + 9 * i, 200 - 5 * i, i) for i in range(20)]
    (tmp_path / "a.jpg").write_bytes(datas[0])
    sources = [str(tmp_path / "a.jpg"), tmp_path / "a.jpg", memoryview(datas[2]), bytearray(datas[3]), *datas[4:18]]
    sources += [np.frombuffer(datas[18], np.uint8), encoded(photo(90, 60), "PNG")]
    keys = np.random.default_rng(0).integers(0, 1 << 64, 20, np.uint64)
    recipe = Recipe((48, 56), images.RandomBox(), flip=0.5)
    wanted = [images.read_one(source, recipe, int(key)).numpy() for source, key in zip(sources, keys, strict=True)]
    for threads in (1, 2, 5):
        np.testing.assert_array_equal(rows(sources, recipe, keys, threads=threads), wanted)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: rows(sources, recipe, keys, threads=2), range(8)):
            np.testing.assert_array_equal(got, wanted)


def test_rows_may_have_gaps_between_them() -> None:
    recipe = Recipe((10, 12), images.WholeBox())
    store = np.zeros((3, 5, 10, 12, 3), np.uint8)
    images.read_batch([jpeg(30, 20, i) for i in range(3)], recipe, store[:, 2])
    assert all(torch.equal(torch.from_numpy(store[i, 2]), images.read_one(jpeg(30, 20, i), recipe)) for i in range(3))
    assert not store[:, [0, 1, 3, 4]].any()


@crops
@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:0", "gray"])
def test_a_grid_changes_no_pixel(sampling: str, crop: CropPolicy) -> None:
    data = jpeg(640, 480, sampling=sampling, restart_marker_blocks=4, quality=90)
    grid = intervals(data)
    keys = np.arange(40, dtype=np.uint64)
    for recipe in (
        Recipe((64, 64), replace(crop, scale=(0.02, 0.2)) if isinstance(crop, images.RandomBox) else crop),
        Recipe((32, 32), crop),
    ):
        wanted = rows([data] * 40, recipe, keys)
        np.testing.assert_array_equal(rows([data] * 40, recipe, keys, grids=[grid] * 40), wanted)
        np.testing.assert_array_equal(
            rows([data] * 40, recipe, keys, grids=[None, grid[::-1].copy()] * 20)[::2], wanted[::2]
        )
        assert torch.equal(images.read_one(data, recipe, 7, grid=grid), torch.from_numpy(wanted[7]))


def test_without_keys_torchs_generator_decides() -> None:
    recipe = Recipe((20, 20), images.RandomBox(), flip=0.5)
    torch.manual_seed(3)
    first = rows([jpeg(99, 77)] * 4, recipe, None)
    torch.manual_seed(3)
    keys = torch.empty(4, dtype=torch.int64).random_().numpy().view(np.uint64)
    np.testing.assert_array_equal(first, rows([jpeg(99, 77)] * 4, recipe, keys))
    state = torch.get_rng_state()
    rows([jpeg(99, 77)], Recipe((20, 20), images.WholeBox()), None)
    assert torch.equal(state, torch.get_rng_state())


def empty(count: int, recipe: Recipe) -> np.ndarray:
    kinds = {torch.uint8: np.uint8, torch.float32: np.float32, torch.bfloat16: np.int16}
    return np.empty((count, *recipe.shape), kinds[recipe.dtype])


def rows(sources: list, recipe: Recipe, keys: np.ndarray | None, **options: object) -> np.ndarray:
    out = empty(len(sources), recipe)
    images.read_batch(sources, recipe, out, keys, **options)
    return out


@pytest.mark.parametrize("name", ["china.jpg", "flower.jpg"])
@pytest.mark.parametrize("size", [(213 // 2, 160), (53, 80), (26, 40)])
def test_scaled_decoding_stays_close_to_a_resize_of_all_pixels(name: str, size: tuple[int, int]) -> None:
    data = encoded(sample_photograph(name), quality=92)
    recipe = Recipe(size, images.WholeBox())
    some, every = (images.read_one(data, replace(recipe, scaled_decode=scaled)).double() for scaled in (True, False))
    assert not torch.equal(some, every)
    assert 10 * torch.log10(255**2 / (some - every).square().mean()) > 38
