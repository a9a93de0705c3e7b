"""Laws of every image, size and recipe: Pillow's levels, and one geometry in Python and in the kernels."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from image_cases import by_pillow, jpeg, photo, rgb
from PIL import Image

from feedline import images
from feedline.images import CropPolicy, Recipe, native

keys = st.integers(0, (1 << 64) - 1)
sides = st.one_of(st.integers(1, 40), st.integers(1, 700))
outputs = st.one_of(st.integers(1, 20), st.integers(1, 300))
positive = st.floats(0.01, 100, allow_nan=False)


def increasing(bounds: tuple[float, float]) -> tuple[float, float]:
    return min(bounds), max(bounds)


random_boxes = st.builds(
    images.RandomBox,
    st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)).map(increasing),
    st.tuples(positive, positive).map(increasing),
)
laws = st.one_of(random_boxes, st.builds(images.CenterBox, outputs), st.just(images.WholeBox()))
recipes = st.builds(
    Recipe,
    st.tuples(outputs, outputs),
    laws,
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from(["bilinear", "bicubic"]),
)


@given(recipes, keys, st.integers(1, 70_000), st.integers(1, 70_000))
def test_python_and_kernels_agree_on_geometry(recipe: Recipe, key: int, width: int, height: int) -> None:
    plan = images.geometry(recipe, key, width, height)
    box, flip, full, window = native.plan_of(recipe).geometry(key, width, height)
    assert (tuple(box), flip, tuple(full), tuple(window)) == (plan.box, plan.flip, plan.full, plan.window)


@given(recipes, keys, st.integers(1, 70_000), st.integers(1, 70_000))
def test_boxes_are_within_the_image_and_windows_not_empty(recipe: Recipe, key: int, width: int, height: int) -> None:
    plan = images.geometry(recipe, key, width, height)
    x, y, w, h = plan.box
    assert 0 <= x < x + w <= width
    assert 0 <= y < y + h <= height
    for first, size, full in zip(plan.window[:2], plan.window[2:], plan.full[::-1], strict=True):
        assert first < full
        assert first + size > 0
    assert plan == images.geometry(recipe, key, width, height)


@given(
    recipes,
    keys,
    sides,
    sides,
    st.sampled_from(["4:4:4", "4:2:2", "4:2:0", "4:1:1", "4:4:0", "gray", "RGB"]),
    st.booleans(),
)
def test_rows_are_pillows(recipe: Recipe, key: int, width: int, height: int, sampling: str, progressive: bool) -> None:
    data = jpeg(width, height, key % 100, sampling=sampling, progressive=progressive, quality=key % 70 + 30)
    plan = images.geometry(recipe, key, width, height)
    assume(plan.full[0] * plan.full[1] < 1 << 22)  # the reference computes all of it
    image = rgb(data)
    row = images.read_one(data, recipe, key).numpy()
    np.testing.assert_array_equal(row, by_pillow(image, plan, recipe.interpolation))
    np.testing.assert_array_equal(row, images.read_one(np.asarray(image), recipe, key))


@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 60), st.integers(1, 60), st.just(3))), recipes, keys)
def test_pixels_of_any_kind_are_resized_as_by_pillow(pixels: np.ndarray, recipe: Recipe, key: int) -> None:
    plan = images.geometry(recipe, key, pixels.shape[1], pixels.shape[0])
    assume(plan.full[0] * plan.full[1] < 1 << 22)
    row = images.read_one(pixels, recipe, key)
    np.testing.assert_array_equal(row, by_pillow(Image.fromarray(pixels), plan, recipe.interpolation))


@given(recipes, keys, sides, sides)
def test_kernels_of_all_instruction_sets_give_the_same_bits(recipe: Recipe, key: int, width: int, height: int) -> None:
    pixels = np.asarray(photo(width, height, key % 100))
    out = np.empty((native.ALL_SETS, *recipe.shape), np.uint8)
    for sets in range(native.ALL_SETS):
        plan = native.build_plan(recipe, sets=sets + 1)
        plan.read((pixels,), out[sets : sets + 1], np.array([key], np.uint64), None, 0, 1)
    np.testing.assert_array_equal(out[1:], out[:1].repeat(native.ALL_SETS - 1, 0))


@given(st.lists(st.tuples(keys, st.integers(1, 90), st.integers(1, 90)), max_size=8), recipes, st.integers(1, 4))
def test_a_batch_is_its_rows(shapes: list[tuple[int, int, int]], recipe: Recipe, threads: int) -> None:
    sources = [jpeg(width, height, key % 100) for key, width, height in shapes]
    given_keys = np.array([key for key, _, _ in shapes], np.uint64)
    out = np.empty((len(sources), *recipe.shape), np.uint8)
    images.read_batch(sources, recipe, out, given_keys, threads=threads)
    for source, key, row in zip(sources, given_keys, out, strict=True):
        np.testing.assert_array_equal(row, images.read_one(source, recipe, int(key)))


@given(st.tuples(outputs, outputs), laws, keys, sides, sides)
def test_a_flip_mirrors(size: tuple[int, int], law: CropPolicy, key: int, width: int, height: int) -> None:
    pixels = np.asarray(photo(width, height))
    row = images.read_one(pixels, Recipe(size, law), key)
    assert (images.read_one(pixels, Recipe(size, law, flip=1.0), key) == row.flip(1)).all()
