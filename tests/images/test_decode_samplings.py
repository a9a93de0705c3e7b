"""JPEGs of every sampling: Pillow's pixels at every scale and for every part, the same ones every time."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from crafted_jpegs import MOST_BLOCKS, Factors, all_factors, crafted
from image_cases import by_pillow, rgb
from perturbed import printed_by
from PIL import Image
from preloaded import Preloaded

from feedline import images
from feedline.images import Recipe, native

NAMED = {"4:1:0": ((4, 2), (1, 1), (1, 1)), "2x4": ((2, 4), (1, 1), (1, 1)), "4:1:1": ((4, 1), (1, 1), (1, 1))}
"""Samplings whose coarse components libjpeg decodes with larger blocks at a reduced scale."""

SIZES = [(203, 157), (331, 90)]


def scale_of(plan: images.Geometry) -> int:
    box, full = plan.box, plan.full
    fits = [s for s in (8, 4, 2) if box[2] >= 2 * s * full[1] and box[3] >= 2 * s * full[0]]
    return fits[0] if fits else 1


def by_draft(data: bytes, plan: images.Geometry, scale: int) -> np.ndarray:
    """Row that Pillow gives from a decode at 1/scale."""
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (max(1, image.width // scale), max(1, image.height // scale)))
    x, y, width, height = (side / scale for side in plan.box)
    region = image.convert("RGB").crop((int(x), int(y), int(np.ceil(x + width)), int(np.ceil(y + height))))
    box = (x - int(x), y - int(y), min(x - int(x) + width, region.width), min(y - int(y) + height, region.height))
    return np.asarray(region.resize(plan.full[::-1], Image.Resampling.BILINEAR, box))


def check_parts(data: bytes, size: tuple[int, int], sides: tuple[int, ...], keys: int) -> set[int]:
    """Compare random parts at all scales that they allow; returns these scales."""
    scales = set()
    for side in sides:
        recipe = Recipe((side, side), images.RandomBox((0.02, 0.9), (0.4, 2.5)), scaled_decode=True)
        for key in range(keys):
            plan = images.geometry(recipe, key, *size)
            scales.add(scale_of(plan))
            wanted = by_draft(data, plan, scale_of(plan))
            np.testing.assert_array_equal(images.read_one(data, recipe, key).numpy(), wanted)
    return scales


@pytest.mark.parametrize("factors", list(all_factors()), ids=lambda f: "{}x{}-{}x{}".format(*f[0], *f[1]))
def test_parts_of_every_sampling_are_pillows_at_every_scale(factors: Factors) -> None:
    scales = set()
    for size in SIZES:
        data = crafted(*size, factors)
        np.testing.assert_array_equal(images.decode(data), rgb(data))
        scales |= check_parts(data, size, (48, 20, 6, 3), 3)
    assert scales == {1, 2, 4, 8}


def random_samplings(count: int) -> Iterator[tuple[Factors, bool]]:
    """Factors that differ in all components, in one scan or in one scan each."""
    rng = random.Random(0)
    for _ in range(count):
        factors = [(rng.randint(1, 4), rng.randint(1, 4)) for _ in range(rng.choice([1, 3, 3, 3]))]
        fits = len(factors) == 1 or sum(h * v for h, v in factors) <= MOST_BLOCKS
        yield factors, fits and rng.random() < 0.6


def test_samplings_that_differ_in_all_components() -> None:
    """Both refuse factors that do not divide each other; of the rest, all rows are equal."""
    read = 0
    for number, (factors, interleaved) in enumerate(random_samplings(80)):
        data = crafted(90 + number, 140 - number, factors, number, interleaved=interleaved, restart=number % 3)
        try:
            wanted = np.asarray(rgb(data))
        except OSError:
            with pytest.raises(images.ImageError, match="Fractional sampling"):
                images.decode(data)
            continue
        np.testing.assert_array_equal(images.decode(data), wanted)
        check_parts(data, (90 + number, 140 - number), (30, 12, 4), 2)
        read += 1
    assert read > 20


@cache
def other_samplings(size: tuple[int, int]) -> list[bytes]:
    return [crafted(*size, factors, seed) for seed, factors in enumerate(NAMED.values())]


@pytest.mark.parametrize("name", NAMED)
def test_a_row_is_the_same_whatever_was_decoded_before(name: str) -> None:
    """Lines that were not computed would show pixels of earlier images."""
    size = (400, 300)
    data, others = crafted(*size, NAMED[name]), other_samplings(size)
    recipe = Recipe((24, 24), images.RandomBox((0.3, 0.9)), scaled_decode=True)
    for quick in (True, False):
        plan, rows = native.build_plan(recipe, quick=quick), set()
        for turn in range(12):
            out = np.empty((2, *recipe.shape), np.uint8)
            assert plan.read([others[turn % 3], data], out, np.array([turn, 5], np.uint64), None, 0, 1) is None
            rows.add(out[1].tobytes())
        assert len(rows) == 1


def test_damaged_images_of_rare_samplings_end() -> None:
    """libjpeg-turbo would skip lines of such files forever after a part was read."""
    data = crafted(61, 77, ((1, 2), (1, 4), (1, 4)), interleaved=False)
    damaged = data[:400] + data[408:]
    whole, recipe = rgb(damaged), Recipe((24, 17), images.RandomBox((0.01, 1.0), (0.1, 10)))
    for key in range(20):
        plan = images.geometry(recipe, key, *whole.size)
        wanted = by_pillow(whole, plan, recipe.interpolation)
        np.testing.assert_array_equal(images.read_one(damaged, recipe, key).numpy(), wanted)


def digest() -> str:
    """Digest of rows of many samplings, at all scales and with both entropy decoders."""
    found = sha256()
    for number, factors in enumerate([*NAMED.values(), *list(all_factors())[::5]]):
        data = crafted(140 + number, 120 + 3 * number, factors, number)
        for side in (30, 9, 3):
            recipe = Recipe((side, side), images.RandomBox((0.02, 0.9), (0.4, 2.5)), scaled_decode=True)
            for quick in (True, False):
                out = np.empty((9, *recipe.shape), np.uint8)
                plan = native.build_plan(recipe, quick=quick)
                assert plan.read([data] * 9, out, np.arange(9, dtype=np.uint64), None, 0, 1) is None
                found.update(out.tobytes())
    return found.hexdigest()


def test_rows_do_not_depend_on_what_new_memory_holds(preloaded: Preloaded, tmp_path: Path) -> None:
    assert printed_by(preloaded, tmp_path, Path(__file__)) == f"{digest()}\n"


if __name__ == "__main__":
    print(digest())
