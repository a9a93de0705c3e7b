"""JPEGs with a grid: the original pixels, and parts with the pixels of the whole."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from grid_cases import SAMPLINGS, Packed, packed, pixels
from image_cases import encoded, intervals, jpeg, photo, with_frame
from PIL import Image

from feedline import _native, images


@pytest.fixture(scope="module", params=SAMPLINGS)
def sampled(request: pytest.FixtureRequest) -> list[Packed]:
    """Images of odd sizes, noisy enough for grids of every size."""
    sizes = [(333, 251), (500, 375), (641, 129), (97, 402)]
    return [packed(jpeg(w, h, i, sampling=request.param, quality=98)) for i, (w, h) in enumerate(sizes)]


ENCODINGS = [{}, {"optimize": True}, {"restart_marker_blocks": 3}, {"progressive": True}]
RELABELED = ["4:1:1", "4:4:0"]  # by image_cases, which cannot do that to progressive files


@pytest.mark.parametrize(
    ("sampling", "options"),
    [(s, o) for s in SAMPLINGS for o in ENCODINGS if not (s in RELABELED and "progressive" in o)],
)
def test_every_pixel_stays(sampling: str, options: dict[str, int]) -> None:
    before = jpeg(455, 333, sampling=sampling, quality=95, **options)
    after = packed(before)
    assert np.array_equal(pixels(after.jpeg), pixels(before))
    assert not images.probe(after.jpeg).progressive


def test_markers_between_scans_do_not_move_into_the_header() -> None:
    plain = encoded(photo(200, 150), progressive=True, keep_rgb=True, quality=95)
    second = plain.index(b"\xff\xda", plain.index(b"\xff\xda") + 2)
    late = b"\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0"  # read before the first scan, it makes RGB YCbCr
    before = plain[:second] + late + plain[second:]
    assert np.array_equal(pixels(before), pixels(plain))
    assert np.array_equal(pixels(packed(before).jpeg), pixels(plain))


def crops(width: int, height: int, rng: random.Random, number: int) -> list[tuple[int, int, int, int]]:
    """Boxes of all sizes, most of them small; many at an edge of the image, or where blocks begin or end."""

    def span(most: int) -> tuple[int, int]:
        size = rng.randint(1, rng.choice([min(9, most), min(40, most), most]))
        room = most - size
        starts = [0, room, rng.randint(0, room), rng.randint(0, room), rng.randint(0, room) // 8 * 8]
        starts.append(max(0, -size % 8 + rng.randint(0, room) // 8 * 8 - 8))
        return rng.choice(starts), size

    spans = [(span(width), span(height)) for _ in range(number)]
    return [(x, y, w, h) for (x, w), (y, h) in spans]


def test_every_part_decodes_as_the_whole_does(sampled: list[Packed]) -> None:
    rng, assembled = random.Random(1), 0
    for whole in sampled:
        expected = pixels(whole.jpeg)
        for x, y, w, h in crops(expected.shape[1], expected.shape[0], rng, 60):
            answer = whole.part((x, y, w, h))
            if answer is None:
                continue
            part, (left, top, width, height) = answer
            found = pixels(part)
            assert found.shape[:2] == (height, width)
            inside = found[y - top : y - top + h, x - left : x - left + w]
            assert np.array_equal(inside, expected[y : y + h, x : x + w]), (x, y, w, h)
            assembled += 1
    assert assembled > 120


@pytest.mark.parametrize("denominator", [2, 4, 8])
def test_every_part_decodes_as_the_whole_does_at_reduced_scales(sampled: list[Packed], denominator: int) -> None:
    rng, assembled = random.Random(denominator), 0
    for whole in sampled:
        expected = pixels(whole.jpeg, denominator)
        full = pixels(whole.jpeg)
        for x, y, w, h in crops(full.shape[1], full.shape[0], rng, 25):
            answer = whole.part((x, y, w, h), denominator)
            if answer is None or min(answer[1][2:]) < denominator:  # Pillow would choose another scale
                continue
            part, (left, top, _, _) = answer
            assert left % denominator == top % denominator == 0
            found = pixels(part, denominator)
            columns = slice(x // denominator, -(-(x + w) // denominator))
            rows = slice(y // denominator, -(-(y + h) // denominator))
            moved = found[rows.start - top // denominator :, columns.start - left // denominator :]
            wanted = expected[rows, columns]
            assert np.array_equal(moved[: wanted.shape[0], : wanted.shape[1]], wanted), (x, y, w, h)
            assembled += 1
    assert assembled > 20


def test_batches_are_the_same_with_grids_as_without() -> None:
    whole = [packed(jpeg(500, 375, seed, quality=90)) for seed in range(8)]
    recipe = images.Recipe((64, 48), images.RandomBox((0.01, 1.0)), 0.5)
    keys = np.arange(8, dtype=np.uint64)
    with_grids, without = (np.empty((8, 64, 48, 3), np.uint8) for _ in range(2))
    images.read_batch([one.jpeg for one in whole], recipe, with_grids, keys, grids=[one.lengths for one in whole])
    images.read_batch([one.jpeg for one in whole], recipe, without, keys)
    assert np.array_equal(with_grids, without)


def test_lengths_are_those_of_the_file_and_can_be_found_again() -> None:
    after = packed(jpeg(500, 375, quality=95))
    assert np.array_equal(after.lengths, intervals(after.jpeg))
    again = _native.grid_measure(after.jpeg)
    assert again is not None
    assert np.array_equal(np.frombuffer(again, np.uint16), after.lengths)


@pytest.mark.parametrize(
    "other", [jpeg(500, 375), jpeg(500, 375, restart_marker_blocks=7), b"", b"\xff\xd8\xff", b"plain text"]
)
def test_no_lengths_are_found_in_files_without_a_grid(other: bytes) -> None:
    assert _native.grid_measure(other) is None


@pytest.mark.parametrize("quality", [75, 90, 98])
def test_the_file_hardly_grows(quality: int) -> None:
    before = [jpeg(500, 375, seed, quality=quality) for seed in range(4)]
    after = sum(len(packed(one).jpeg) for one in before)
    assert after <= 1.03 * sum(map(len, before))


def test_intervals_divide_rows_whatever_the_width() -> None:
    for width in range(321, 340):
        whole = packed(jpeg(width, 200, quality=97))
        columns, rows = -(-width // 16), -(-200 // 16)
        assert len(whole.lengths) % rows == 0
        assert columns % (len(whole.lengths) // rows) == 0
        assert len(whole.lengths) > rows, "one interval a row leaves nothing out at the sides"


def test_markers_stay_in_the_file_and_leave_the_part() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    profile = bytes(range(256)) * 20
    before = encoded(photo(400, 300), quality=95, exif=exif, icc_profile=profile, comment=b"kept")
    after = packed(before)
    with Image.open(io.BytesIO(after.jpeg)) as image:
        assert image.getexif()[0x0112] == 6
        assert image.info["icc_profile"] == profile
        assert image.info["comment"] == b"kept"
    part = after.part((0, 0, 30, 30))
    assert part is not None
    assert b"kept" not in part[0]
    assert len(part[0]) < len(profile)


@pytest.mark.parametrize("progressive", [False, True])
def test_four_inks_stay_four_inks(progressive: bool) -> None:
    before = encoded(photo(300, 200).convert("CMYK"), quality=95, progressive=progressive)
    after = packed(before)
    assert np.array_equal(pixels(after.jpeg), pixels(before))
    part = after.part((40, 60, 70, 80))
    assert part is not None
    left, top = part[1][:2]
    inside = pixels(part[0])[60 - top : 140 - top, 40 - left : 110 - left]
    assert np.array_equal(inside, pixels(before)[60:140, 40:110])


def test_images_behind_the_first_and_their_index_go() -> None:
    before = jpeg(400, 300, quality=95)
    index = b"MPF\0" + bytes(40)
    with_index = before[:2] + b"\xff\xe2" + (len(index) + 2).to_bytes(2) + index + before[2:] + jpeg(64, 64)
    assert packed(with_index).jpeg == packed(before).jpeg


GOOD = jpeg(400, 300, quality=95)
PROGRESSIVE = jpeg(400, 300, quality=95, progressive=True)


def before_last_scan(progressive: bytes) -> bytes:
    return progressive[: progressive.rindex(b"\xff\xda")] + b"\xff\xd9"


def with_many_scans(progressive: bytes) -> bytes:
    last = progressive.rindex(b"\xff\xda")
    return progressive[:-2] + 250 * progressive[last:-2] + b"\xff\xd9"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "Empty input"),
        (b"not an image", "Not a JPEG file"),
        (GOOD[:200], "missing SOS marker"),
        (GOOD[: len(GOOD) // 2], "Premature end"),
        (GOOD[:5000] + bytes(40) + b"\xff\xd5" + GOOD[5042:], "Corrupt JPEG data"),
        (before_last_scan(PROGRESSIVE), "before its last scan"),
        (with_many_scans(jpeg(64, 64, progressive=True)), "More than 200 scans"),
        (with_frame(GOOD, precision=12), "precision 12"),
        (with_frame(GOOD, width=60_000, height=60_000), "128 megapixels"),
        (with_frame(GOOD, width=11_000, height=11_000), "Too few bytes"),
        (jpeg(64, 64), "Too small"),
        (jpeg(130, 800, quality=3, optimize=True), "grow too much"),
    ],
)
def test_images_that_cannot_be_rewritten_are_reported(data: bytes, reason: str) -> None:
    answer = _native.grid_rewrite(data)
    assert isinstance(answer, str)
    assert reason in answer


def test_a_part_is_refused_when_the_lengths_are_not_those_of_the_file() -> None:
    jpeg_, lengths = packed(jpeg(500, 375, quality=95))
    box = (200, 200, 50, 50)
    assert _native.grid_assemble(jpeg_, lengths, box) is not None
    swapped = lengths.copy()
    place = int(np.flatnonzero(lengths[:-1] != lengths[1:])[len(lengths) // 2])
    swapped[[place, place + 1]] = swapped[[place + 1, place]]
    good = _native.grid_assemble(jpeg_, lengths, box)
    for wrong in (lengths[:-1], np.append(lengths, lengths[-1:]), lengths[::-1].copy(), lengths + np.uint16(1)):
        assert _native.grid_assemble(jpeg_, wrong, box) is None
    assert _native.grid_assemble(jpeg_, swapped, box) in (None, good), "the pair may lie outside of the part"
    other = packed(jpeg(500, 375, 5, quality=95))
    assert _native.grid_assemble(other.jpeg, lengths, box) is None
    assert _native.grid_assemble(GOOD, lengths, box) is None


@pytest.mark.parametrize(
    "box", [(-1, 0, 5, 5), (0, 0, 0, 5), (398, 0, 5, 5), (0, 298, 5, 5), (0, 0, 2**31 - 1, 5), (2**31 - 1, 0, 5, 5)]
)
def test_a_part_outside_of_the_image_is_refused(box: tuple[int, int, int, int]) -> None:
    assert packed(GOOD).part(box) is None


def test_a_part_that_leaves_hardly_anything_out_is_refused() -> None:
    whole = packed(GOOD)
    assert whole.part((0, 0, 400, 300)) is None
    assert whole.part((10, 10, 380, 280)) is None
    assert whole.part((0, 0, 400, 20)) is None, "a decoder stops below the crop by itself"
    assert whole.part((0, 250, 400, 20)) is not None


def test_wrong_arguments_are_type_errors() -> None:
    whole = packed(GOOD)
    with pytest.raises(TypeError, match="uint16"):
        _native.grid_assemble(whole.jpeg, whole.lengths.astype(np.int64), (0, 0, 5, 5))
    with pytest.raises(TypeError, match="without gaps"):
        _native.grid_assemble(whole.jpeg, whole.lengths[::2], (0, 0, 5, 5))
    with pytest.raises(TypeError):
        _native.grid_rewrite("text")
