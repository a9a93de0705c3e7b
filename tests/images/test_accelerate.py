"""Accelerated Pillow equals Pillow in pixels, types, attributes and errors, for any chain of operations."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_cases import jpeg
from PIL import ExifTags, Image, ImageEnhance, ImageFile, ImageFilter, ImageOps
from rounds import rounds

from feedline.images import accelerate_pillow, pillow_obstacle

SIZES = [(1, 1), (8, 8), (17, 15), (33, 48), (100, 61), (250, 131), (40, 300)]
SAMPLINGS = ["4:4:4", "4:2:2", "4:2:0", "4:1:1", "4:4:0", "gray", "RGB"]
FILTERS = [None, *range(6)]

pytestmark = pytest.mark.skipif(pillow_obstacle() is not None, reason=str(pillow_obstacle()))

fractions = st.floats(0, 1, width=32)
spans = st.tuples(fractions, fractions).map(sorted)
lengths = st.integers(1, 90)
reaches = st.integers(-20, 120)


def inside(image: Image.Image, across: list[float], down: list[float]) -> tuple[float, float, float, float]:
    width, height = image.size
    return across[0] * width, down[0] * height, across[1] * width, down[1] * height


def whole_pixels(box: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(int(edge) for edge in box)


def restored(image: Image.Image) -> Any:
    return pickle.loads(pickle.dumps(image))


def drafted(image: Image.Image, mode: str | None, size: tuple[int, int]) -> Any:
    return image.draft(mode, size)


def made_thumbnail(image: Image.Image, size: tuple[int, int], *more: Any) -> Any:
    small = image.copy()
    small.thumbnail(size, *more)
    return small


def in_place(image: Image.Image, size: tuple[int, int]) -> Any:
    image.thumbnail(size)
    return image


def painted(image: Image.Image) -> Any:
    image.putpixel((0, 0), 7)
    return image.getpixel((0, 0))


def rotated_exif() -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return exif


def cut(data: bytes, share: float, gap: int, replacement: bytes = b"") -> bytes:
    """Without `gap` bytes at a place between the first bytes and the last."""
    at = 2 + int(share * (len(data) - 3))
    return data[:at] + replacement + data[at + gap :]


Operation = Callable[[Image.Image], Any]

deferring = st.one_of(
    st.builds(lambda a, d: lambda image: image.crop(inside(image, a, d)), spans, spans),
    st.builds(lambda a, d: lambda image: image.crop(whole_pixels(inside(image, a, d))), spans, spans),
    st.builds(
        lambda size, f: lambda image: image.resize(size, f), st.tuples(lengths, lengths), st.sampled_from(FILTERS)
    ),
    st.builds(
        lambda size, f, a, d: lambda image: image.resize(size, f, box=inside(image, a, d)),
        st.tuples(lengths, lengths),
        st.sampled_from(FILTERS),
        spans,
        spans,
    ),
    st.builds(lambda method: lambda image: image.transpose(method), st.sampled_from(list(Image.Transpose))),
    st.builds(lambda mode: lambda image: image.convert(mode), st.sampled_from(["RGB", "RGB", "L", None])),
    st.just(lambda image: image.copy()),
    st.just(lambda image: np.asarray(image)),
    st.just(lambda image: np.array(image, copy=True)),
)

others: list[Operation] = [
    lambda image: image.load() is None,
    lambda image: image.getbands(),
    lambda image: image.tobytes("raw", image.mode),
    lambda image: image.tobytes("jpeg"),
    lambda image: image.tobytes("raw", "BGR"),
    lambda image: image.convert("HSV"),
    lambda image: image.convert("RGB", (1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0)),
    lambda image: image.convert("RGB", dither=Image.Dither.NONE),
    lambda image: image.convert("no such mode"),
    lambda image: image.crop(None),
    lambda image: image.crop((5, 5, 2, 2)),
    lambda image: image.crop((0, 0, image.width, image.height)),
    lambda image: image.crop((1, 2, 3)),
    lambda image: image.crop("box"),
    lambda image: image.resize((0, 3)),
    lambda image: image.resize((4.5, 3)),
    lambda image: image.resize((4, 3), 17),
    lambda image: image.resize((4, 3), box=(0, 0, 1000, 1000)),
    lambda image: image.resize((4, 3), box=(0, 0, 0, 0)),
    lambda image: image.resize([9, 7], Image.Resampling.BILINEAR, reducing_gap=2.0),
    lambda image: image.resize((3, 2), Image.Resampling.BICUBIC, reducing_gap=1.1),
    lambda image: image.resize((3, 2), Image.Resampling.BICUBIC, reducing_gap=0.5),
    lambda image: image.resize(np.array([6, 5])),
    lambda image: image.transpose(9),
    lambda image: image.reduce(2),
    lambda image: image.rotate(17, expand=True),
    lambda image: image.rotate(90),
    lambda image: image.filter(ImageFilter.BLUR),
    lambda image: image.split()[0],
    lambda image: image.getpixel((0, 0)),
    lambda image: image.histogram(),
    lambda image: image.getextrema(),
    lambda image: image.quantize(4),
    lambda image: image.point(lambda level: 255 - level),
    lambda image: image.readonly,
    lambda image: image.getpalette(),
    lambda image: image.tell(),
    lambda image: image.seek(1),
    lambda image: dict(image.getexif()),
    lambda image: image == image.copy(),
    lambda image: image.im.size,
    lambda image: repr(image).partition(" at ")[0],
    lambda image: ImageOps.exif_transpose(image),
    lambda image: ImageOps.fit(image, (13, 9)),
    lambda image: ImageOps.mirror(image),
    lambda image: ImageOps.pad(image, (13, 9)),
    lambda image: ImageEnhance.Brightness(image).enhance(0.5),
    lambda image: Image.blend(image, image.transpose(0), 0.5),
    lambda image: made_thumbnail(image, (20, 20)),
    lambda image: made_thumbnail(image, (9, 14), Image.Resampling.LANCZOS, 3.0),
    lambda image: in_place(image, (12, 12)),
    lambda image: drafted(image, "RGB", (10, 10)),
    lambda image: drafted(image, "L", (30, 30)),
    lambda image: image.verify(),
    lambda image: image.close(),
    lambda image: restored(image),
    lambda image: copy.copy(image),
    lambda image: copy.deepcopy(image),
    painted,
]
reaching = st.builds(lambda a, b, c, d: lambda image: image.crop((a, b, c, d)), reaches, reaches, reaches, reaches)
operations = st.one_of(deferring, deferring, st.sampled_from(others), reaching)
chains = st.lists(st.tuples(st.integers(0, 3), operations), min_size=1, max_size=7)

files = st.builds(
    lambda size, sampling, seed, quality, options: jpeg(*size, seed, sampling=sampling, quality=quality, **options),
    st.sampled_from(SIZES),
    st.sampled_from(SAMPLINGS),
    st.integers(0, 9),
    st.integers(20, 98),
    st.sampled_from(
        [
            {},
            {"optimize": True},
            {"progressive": True},
            {"comment": b"a comment"},
            {"icc_profile": b"a profile" * 9},
            {"exif": rotated_exif()},
            {"dpi": (72, 144)},
            {"restart_marker_blocks": 3},
        ]
    ),
)


def seen(value: Any) -> Any:
    """A comparable form of a result; errors are results, too."""
    if isinstance(value, Image.Image):
        return type(value), value.mode, value.size, value.info, _attempt(value.tobytes)
    if isinstance(value, np.ndarray):
        # NumPy makes an object array of an image whose pixels it cannot read.
        content = b"" if value.dtype == object else value.tobytes()
        return value.dtype, value.shape, value.flags.writeable, content
    return value


def _attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - it is compared
        return type(error), str(error)


def trace(opened: Callable[[], Image.Image], chain: list[tuple[int, Operation]]) -> list[Any]:
    """All results of a chain; each step works on an image of an earlier step, counted from the latest."""
    images = [opened()]
    results: list[Any] = []
    for back, operation in chain:
        image = images[-1 - back % len(images)]
        result = _attempt(lambda image=image, operation=operation: operation(image))
        results.append((type(result), getattr(result, "mode", None), getattr(result, "size", None)))
        if isinstance(result, Image.Image) and result is not image:
            images.append(result)
        elif not isinstance(result, Image.Image):
            results.append(seen(result))
    first = images[0]
    results.append((getattr(first, "fp", None) is None, first.tile, first.decoderconfig))
    return [*results, *map(seen, images)]


def both(opened: Callable[[], Image.Image], chain: list[tuple[int, Operation]]) -> tuple[list[Any], list[Any]]:
    expected = trace(opened, chain)
    with accelerate_pillow():
        return expected, trace(opened, chain)


def from_memory(data: bytes) -> Callable[[], Image.Image]:
    return lambda: Image.open(io.BytesIO(data))


@given(data=files, chain=chains)
@settings(max_examples=rounds(100, 400))
def test_chains_equal_pillows_results(data: bytes, chain: list[tuple[int, Operation]]) -> None:
    expected, found = both(from_memory(data), chain)
    assert found == expected


@given(data=files, chain=st.lists(st.tuples(st.just(0), deferring), min_size=1, max_size=6))
@settings(max_examples=rounds(100, 400))
def test_deferred_chains_equal_pillows_results(data: bytes, chain: list[tuple[int, Operation]]) -> None:
    expected, found = both(from_memory(data), chain)
    assert found == expected


levels = st.one_of(st.integers(0, 255), st.just(0xFF))
damages = st.one_of(
    st.builds(lambda share: lambda data: data[: int(len(data) * share)], fractions),
    st.builds(lambda tail: lambda data: data + tail, st.binary(min_size=1, max_size=99)),
    st.builds(lambda share, byte: lambda data: cut(data, share, 1, bytes([byte])), fractions, levels),
    st.builds(lambda share, gap: lambda data: cut(data, share, gap), fractions, st.integers(1, 200)),
)


@given(data=files, harm=st.lists(damages, min_size=1, max_size=3), chain=chains, lenient=st.booleans())
@settings(max_examples=rounds(100, 500))
def test_damaged_files_fail_at_the_same_call_with_the_same_error(
    data: bytes, harm: list[Callable[[bytes], bytes]], chain: list[tuple[int, Operation]], lenient: bool
) -> None:
    for damage in harm:
        data = damage(data)
    if isinstance(_attempt(from_memory(data)), tuple):
        return  # the error of `Image.open`, which is Pillow's own
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lenient)
        expected, found = both(from_memory(data), chain)
    assert found == expected
