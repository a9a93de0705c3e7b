"""feedline's entropy decoder has the pixels and the refusals of libjpeg's, for any content of a file."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from grid_cases import packed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from image_cases import intervals, jpeg, photo, rgb
from PIL import Image

from feedline import images
from feedline.images import Recipe, native

SAMPLINGS = ["4:4:4", "4:2:2", "4:2:0", "4:1:1", "4:4:0", "gray", "RGB"]
SIZES = [(1, 1), (8, 8), (17, 15), (33, 48), (100, 61), (250, 131)]
MEETINGS = 4
"""Decodes with one table, after which all its look-ups exist."""

REGION = Recipe((20, 24), images.RandomBox((0.01, 0.6), (0.2, 5)), flip=0.5)
RECIPES = [REGION, Recipe((13, 9), images.WholeBox()), Recipe((40, 40), images.CenterBox(50))]

kinds = st.fixed_dictionaries(
    {
        "sampling": st.sampled_from(SAMPLINGS),
        "quality": st.integers(1, 100),
        "optimize": st.booleans(),
        "restart_marker_blocks": st.integers(0, 9),
    }
)
"""Options of JPEGs that determine their entropy-coded data."""


def noise(width: int, height: int, amount: int, seed: int) -> Image.Image:
    """A photograph with noise: all coefficients are coded, and the rare ones have long codes."""
    grain = np.random.default_rng(seed).normal(0, amount, (height, width, 3))
    return Image.fromarray((np.asarray(photo(width, height, seed)) + grain).clip(0, 255).astype(np.uint8))


def saved(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def decoded(data: bytes, *, quick: bool) -> list[Any]:
    """Several decodes of a whole image: pixels, or the reason why there are none."""
    header = native.native.image_header(data, 0)[0]
    if header is None:
        return []
    results: list[Any] = []
    for _ in range(MEETINGS):
        out = np.zeros((header[1], header[0], 3), np.uint8)
        left_over = native.native.image_decode(data, out, quick)
        results.append(left_over or out.tobytes())
    return results


def rows(datas: list[bytes], recipe: Recipe, *, quick: bool, grids: list[Any] | None = None) -> tuple[Any, bytes]:
    """Several rows of each image, and the rows left to another decoder; unwritten rows are zero."""
    keys = np.arange(MEETINGS * len(datas), dtype=np.uint64)
    out = np.zeros((len(keys), *recipe.shape), np.uint8)
    plan = native.build_plan(recipe, quick=quick)
    left_over = plan.read(datas * MEETINGS, out, keys, grids and grids * MEETINGS, 0, 1)
    for row, *_ in left_over or []:
        out[row] = 0
    return left_over, out.tobytes()


def agree(data: bytes) -> None:
    assert decoded(data, quick=True) == decoded(data, quick=False)
    for recipe in RECIPES:
        assert rows([data], recipe, quick=True) == rows([data], recipe, quick=False)


def scan_of(data: bytes) -> int:
    """Offset of the entropy-coded data of a baseline JPEG."""
    at = data.index(b"\xff\xda")
    return at + 2 + int.from_bytes(data[at + 2 : at + 4])


def test_it_is_in_use_here() -> None:
    """If it is not in use, the tests below compare libjpeg with itself."""
    assert native.native.image_quick()


@settings(deadline=None, max_examples=60)
@given(kinds, st.sampled_from(SIZES), st.integers(0, 3))
def test_pixels_are_libjpegs(kind: dict[str, Any], size: tuple[int, int], seed: int) -> None:
    agree(jpeg(*size, seed, **kind))


@pytest.mark.parametrize(
    ("quality", "optimize"), [(2, True), (30, False), (85, True), (97, False), (100, True), (100, False)]
)
def test_pixels_of_noise_are_libjpegs(quality: int, optimize: bool) -> None:
    """Blocks without an end, numbers of up to eleven bits, and codes of all lengths."""
    for amount in (4, 30, 400):
        agree(saved(noise(200, 120, amount, quality), quality=quality, optimize=optimize))


def test_flat_images_and_single_peaks() -> None:
    """Blocks with a mean only, and coefficients after runs of more than fifteen zeros."""
    x = np.arange(128)
    waves = np.where((x[:, None] * 7 // 8 + x * 7 // 8) % 2, 255, 0).astype(np.uint8)
    for pixels in (np.zeros_like(waves), np.full_like(waves, 255), waves):
        for quality in (20, 75, 100):
            agree(saved(Image.fromarray(pixels), quality=quality))


@pytest.mark.parametrize("options", [{}, {"restart_marker_blocks": 2}], ids=["plain", "restarts"])
def test_truncated_files_are_refused_or_read_equally(options: dict[str, int]) -> None:
    data = jpeg(40, 30, quality=80, **options)
    cuts = range(scan_of(data), len(data))
    for recipe in (Recipe((9, 9), images.WholeBox()), REGION):
        cut = [data[:end] for end in cuts]
        left_over, _ = both = rows(cut, recipe, quick=True)
        assert both == rows(cut, recipe, quick=False)
        assert left_over


def test_intervals_that_are_lost_or_out_of_order_have_the_same_consequences() -> None:
    data = jpeg(64, 48, quality=90, restart_marker_blocks=2)
    ends = (scan_of(data) + np.cumsum(intervals(data))).tolist()
    for end, following in pairwise(ends[:-1]):
        for number in range(8):
            agree(data[: end - 1] + bytes([0xD0 + number]) + data[end:])
        agree(data[:end] + data[following:])
        agree(data[: end - 2] + data[end:])
        agree(data[: end - 2] + b"\x00\x00" + data[end - 2 :])


changes = st.lists(st.tuples(st.floats(0, 1), st.sampled_from(["set", "flip", "cut", "marker"]), st.integers(0, 255)))


@settings(deadline=None, max_examples=150)
@given(kinds, changes)
@example({"sampling": "4:2:0", "quality": 90, "restart_marker_blocks": 2}, [(0.5, "marker", 0xD0)])
@example({"sampling": "4:2:0", "quality": 90, "restart_marker_blocks": 2}, [(0.5, "marker", 0xFF)])
@example({"sampling": "gray", "quality": 90}, [(0.3, "cut", 40), (0.9, "set", 255)])
def test_damage_has_the_same_consequences(kind: dict[str, Any], damage: list[tuple[float, str, int]]) -> None:
    """libjpeg does not notice most damage and continues to decode; its pixels are expected then."""
    data = bytearray(jpeg(64, 48, **kind))
    start = scan_of(bytes(data))
    for share, act, value in damage:
        at = start + int(share * (len(data) - 3 - start))
        if act == "set":
            data[at] = value
        elif act == "flip":
            data[at] ^= 1 << value % 8
        elif act == "marker":
            data[at : at + 2] = bytes([0xFF, value])
        elif at + value < len(data) - 2:
            del data[at : at + value]
    agree(bytes(data))


@settings(deadline=None, max_examples=60)
@given(kinds, st.binary(min_size=1, max_size=12), st.floats(0, 1))
def test_damaged_tables_have_the_same_consequences(kind: dict[str, Any], bytes_: bytes, share: float) -> None:
    data = bytearray(jpeg(64, 48, **kind))
    first = data.index(b"\xff\xc4")
    at = first + int(share * (scan_of(bytes(data)) - first - len(bytes_)))
    data[at : at + len(bytes_)] = bytes_
    agree(bytes(data))


@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:0", "gray"])
def test_grid_packed_images_are_decoded_alike(sampling: str) -> None:
    whole = [packed(jpeg(500, 375, seed, sampling=sampling, quality=92)) for seed in range(3)]
    datas, grids = [one.jpeg for one in whole], [one.lengths for one in whole]
    for recipe in (*RECIPES, Recipe((32, 32), images.RandomBox((0.02, 0.2)))):
        wanted = rows(datas, recipe, quick=False)
        assert wanted[0] is None
        assert rows(datas, recipe, quick=True, grids=grids) == wanted
        assert rows(datas, recipe, quick=True) == wanted


def test_damage_in_a_grid_has_the_same_consequences() -> None:
    whole = packed(jpeg(500, 375, quality=92))
    recipe = Recipe((32, 32), images.RandomBox((0.02, 0.2)))
    for seed in range(20):
        data = bytearray(whole.jpeg)
        rng = np.random.default_rng(seed)
        for at in rng.integers(scan_of(whole.jpeg), len(data) - 2, 12):
            data[at] = rng.integers(256)
        one = [bytes(data)]
        assert rows(one, recipe, quick=True, grids=[whole.lengths]) == rows(
            one, recipe, quick=False, grids=[whole.lengths]
        )


def without_tables(data: bytes) -> bytes:
    """The same JPEG without its Huffman tables, like the frames of Motion JPEG."""
    out, at = bytearray(data[:2]), 2
    while data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4])
        if data[at + 1] != 0xC4:
            out += data[at:end]
        at = end
    return bytes(out + data[at:])


def test_tables_of_one_image_are_not_anothers() -> None:
    """A missing table is the standard's, whatever was decoded before."""
    frame, other = without_tables(jpeg(90, 70, quality=75)), jpeg(90, 70, 1, quality=60, optimize=True)
    assert len(frame) < len(jpeg(90, 70, quality=75))
    for quick in (True, False):
        decoded(other, quick=quick)
        assert decoded(frame, quick=quick) == [rgb(frame).tobytes()] * MEETINGS


def test_many_tables_by_turns_on_many_threads() -> None:
    datas = [jpeg(120, 90, seed, quality=20 + 3 * seed, optimize=True) for seed in range(25)]
    datas += [jpeg(120, 90, seed, quality=90) for seed in range(5)]
    wanted = rows(datas, REGION, quick=False)
    with ThreadPoolExecutor(4) as pool:
        assert all(got == wanted for got in pool.map(lambda _: rows(datas, REGION, quick=True), range(8)))
