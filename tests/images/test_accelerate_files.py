"""Accelerated Pillow with files, handles, plugins and threads."""

from __future__ import annotations

import functools
import io
import mmap
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagonals import diagonal_by_day
from image_cases import encoded, jpeg, photo
from PIL import ExifTags, Image, ImageFile, ImageOps, JpegImagePlugin

from feedline.images import accelerate, accelerate_pillow, native, pillow_obstacle
from feedline.images.deferred import CHANGES

pytestmark = pytest.mark.skipif(pillow_obstacle() is not None, reason=str(pillow_obstacle()))


@pytest.fixture
def accelerated() -> Iterator[None]:
    with accelerate_pillow():
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "photo.jpg"
    path.write_bytes(jpeg(1200, 800, 3, quality=95))
    assert path.stat().st_size > ImageFile.MAXBLOCK
    return path


def is_deferred(image: Image.Image) -> bool:
    return accelerate._DEFERRED in vars(image)


def by_pillow(call: Callable[[], Any]) -> Any:
    """The result of a call, or the type and text of its error."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - it is compared
        return type(error), str(error)


def both(call: Callable[[], Any]) -> tuple[Any, Any]:
    expected = by_pillow(call)
    with accelerate_pillow():
        return by_pillow(call), expected


@pytest.fixture
def no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow without its JPEG decoder."""
    found = Image._getdecoder

    def other(mode: str, name: str, *args: Any) -> Any:
        assert name != "jpeg"
        return found(mode, name, *args)

    monkeypatch.setattr(Image, "_getdecoder", other)


@pytest.mark.usefixtures("accelerated")
def test_the_usual_code_does_without_pillows_decoder(path: Path, request: pytest.FixtureRequest) -> None:
    assert accelerate._agrees()  # it compares with that decoder
    request.getfixturevalue("no_decoder")
    image = Image.open(path).convert("RGB")
    assert is_deferred(image)
    small = image.crop((100, 50, 500, 400)).resize((224, 224), Image.Resampling.BILINEAR).transpose(0)
    assert type(small) is Image.Image
    assert is_deferred(small)
    assert np.array(small).shape == (224, 224, 3)
    assert is_deferred(small)
    assert small.getpixel((3, 4)) == tuple(np.asarray(small)[4, 3])
    assert not is_deferred(small)


@pytest.mark.usefixtures("accelerated")
@pytest.mark.parametrize("orientation", [1, 6])
def test_rotated_photos_stay_deferred_when_they_are_turned_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    with Image.open(io.BytesIO(jpeg(80, 60, exif=exif))) as image:
        upright = ImageOps.exif_transpose(image)
    assert upright.size == ((80, 60) if orientation == 1 else (60, 80))
    assert is_deferred(upright)
    assert is_deferred(image)


def loaded(path: Path) -> Any:
    image = Image.open(path)
    image.load()
    return image


@pytest.mark.usefixtures("accelerated")
def test_a_load_for_its_effect_alone_defers_the_decoding(path: Path) -> None:
    image = loaded(path)
    assert is_deferred(image)
    assert (type(image), image.tile, image.fp) == (JpegImagePlugin.JpegImageFile, [], None)
    image.load()
    converted = image.convert("RGB")
    converted.load()
    assert is_deferred(image)
    assert is_deferred(converted)


def kept(path: Path) -> Any:
    pixels = Image.open(path).load()
    return type(pixels), pixels[3, 4]


def returned(path: Path) -> Any:
    def access(image: Any) -> Any:
        return image.load()

    return access(Image.open(path))[3, 4]


def kept_by_a_list(path: Path) -> Any:
    image = Image.open(path)
    found: list[Any] = []
    found.extend(map(type(image).load, [image]))
    return found[0][3, 4]


class Owner:
    """Object whose `load` returns the result of Pillow's, through a function written in C."""

    def __init__(self, image: Any) -> None:
        self.found: list[Any] = []
        self.load = partial(self.found.extend, map(type(image).load, [image]))


def kept_behind_a_method_of_the_same_name(path: Path) -> Any:
    owner = Owner(Image.open(path))
    owner.load()
    return owner.found[0][3, 4]


def assigned(path: Path) -> Any:
    image = Image.open(path)
    image.load()
    pixels = image.load()
    pixels[0, 0] = (1, 2, 3)
    image.load()
    return image.crop((0, 0, 9, 9)).tobytes(), image.getpixel((0, 0))


@pytest.mark.parametrize("use", [kept, returned, kept_by_a_list, kept_behind_a_method_of_the_same_name, assigned])
def test_access_to_the_pixels_is_pillows(use: Callable[[Path], Any], path: Path) -> None:
    ours, expected = both(lambda: use(path))
    assert ours == expected


@pytest.mark.parametrize("damage", [b"", b"\xff\xd8\xff", jpeg(90, 60)[:700], jpeg(90, 60)[:-2]])
def test_a_load_of_a_damaged_file_raises_at_once(damage: bytes) -> None:
    def loaded() -> bytes:
        image = Image.open(io.BytesIO(damage))
        image.load()
        return image.tobytes()

    ours, expected = both(loaded)
    assert by_text(ours) == by_text(expected)


def by_text(result: Any) -> Any:
    """The result; errors without the address of the file object."""
    return (result[0], result[1].partition(" <")[0]) if isinstance(result, tuple) else result


@pytest.mark.usefixtures("accelerated")
def test_an_image_keeps_its_exact_type_when_it_is_deferred_and_after(path: Path) -> None:
    image = Image.open(path)
    assert not is_deferred(image)
    copied = image.copy()
    assert is_deferred(image)
    assert type(image) is JpegImagePlugin.JpegImageFile
    assert type(copied) is Image.Image
    assert (image.format, copied.format) == ("JPEG", None)
    image.load()
    copied.load()
    assert (type(image), type(copied)) == (JpegImagePlugin.JpegImageFile, Image.Image)


def closed_too_early(path: Path) -> Any:
    with path.open("rb") as file:
        image = Image.open(file)
    return image.convert("RGB")


def loaded_in_time(path: Path) -> Any:
    with path.open("rb") as file:
        image = Image.open(file).convert("RGB")
    return image.tobytes()


def moved(path: Path) -> Any:
    with path.open("rb") as file:
        image = Image.open(file)
        file.seek(7)
        small = image.resize((9, 9))
        return file.tell(), file.closed, image.fp, small.tobytes()


def of_path_in_a_block(path: Path) -> Any:
    with Image.open(path) as image:
        rgb = image.convert("RGB")
    return image.fp, rgb.tobytes(), by_pillow(lambda: image.crop((0, 0, 5, 5)).tobytes())


def left_before_use(path: Path) -> Any:
    with Image.open(path) as image:
        pass
    return image.convert("RGB")


def closed(path: Path) -> Any:
    image = Image.open(path)
    rgb = image.convert("RGB")
    image.close()
    return by_pillow(lambda: image.crop((0, 0, 5, 5))), rgb.tobytes()


def closed_copy(path: Path) -> Any:
    rgb = Image.open(path).convert("RGB")
    rgb.close()
    return rgb.crop((0, 0, 5, 5))


def verified(path: Path) -> Any:
    image = Image.open(path)
    image.verify()
    return image.convert("RGB")


def unbuffered(path: Path) -> Any:
    with path.open("rb", buffering=0) as file:
        return Image.open(file).convert("RGB").tobytes()


def mapped(path: Path) -> Any:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        return Image.open(memory).convert("RGB").tobytes(), memory.tell()


def in_memory(path: Path) -> Any:
    file = io.BytesIO(path.read_bytes())
    image = Image.open(file)
    image.crop((3, 4, 50, 60))
    return file.tell(), file.closed, image.fp, image.tile


def stream(path: Path) -> Any:
    class Stream(io.RawIOBase):
        def __init__(self) -> None:
            self.file = path.open("rb")

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            return self.file.readinto(buffer)

    with Stream() as source:
        found = Image.open(io.BufferedReader(source)).convert("RGB").tobytes()
        source.file.close()
        return found


def growing(path: Path) -> Any:
    file = io.BytesIO(path.read_bytes()[:3000])
    image = Image.open(file)
    file.seek(0, io.SEEK_END)
    file.write(path.read_bytes()[3000:])
    return image.convert("RGB").tobytes()


def parsed(path: Path) -> Any:
    parser = ImageFile.Parser()
    parser.feed(path.read_bytes())
    return parser.close().resize((20, 20)).tobytes()


USES = [
    closed_too_early,
    loaded_in_time,
    moved,
    of_path_in_a_block,
    left_before_use,
    closed,
    closed_copy,
    verified,
    unbuffered,
    mapped,
    in_memory,
    stream,
    growing,
    parsed,
]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize(("use", "tail"), diagonal_by_day(USES, [0, 40, 1 << 18]))
def test_handles_are_used_as_by_pillow(path: Path, use: Callable[[Path], Any], tail: int) -> None:
    path.write_bytes(path.read_bytes() + bytes(tail))
    found, expected = both(lambda: use(path))
    assert found == expected


def test_bombs_warn_and_raise_as_with_pillow(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.open(path)

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200_000)
    with accelerate_pillow(), pytest.warns(Image.DecompressionBombWarning):
        image.crop((0, 0, 600, 400))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100_000)
    with accelerate_pillow(), pytest.raises(Image.DecompressionBombError):
        Image.open(path)


@pytest.mark.usefixtures("accelerated")
def test_a_patched_method_of_pillow_is_respected(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda self, size, *_: found(self, (size[0] + 1, size[1])))
    assert Image.open(path).resize((5, 5)).size == (6, 5)


def test_a_method_patched_before_stops_the_acceleration(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crop(self: Image.Image, box: Any = None) -> str:
        return "cropped by the user"

    monkeypatch.setattr(Image.Image, "crop", crop)
    assert f"crop has been replaced by {__name__!r}" in str(pillow_obstacle())
    with accelerate_pillow():
        with Image.open(path) as image:
            assert image.crop() == "cropped by the user"
        assert not is_deferred(Image.open(path).convert("RGB"))


@pytest.mark.parametrize("name", [*CHANGES, "tobytes"])
def test_a_wrapped_method_stops_the_acceleration(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    found = getattr(Image.Image, name)

    @functools.wraps(found)  # which copies Pillow's `__module__`
    def wrapper(self: Any, *args: Any) -> Any:
        calls.append(name)
        return found(self, *args)

    monkeypatch.setattr(Image.Image, name, wrapper)
    assert f"{name} has been replaced by {__name__!r}" in str(pillow_obstacle())
    with accelerate_pillow():
        image = Image.open(path).convert("RGB").crop((0, 0, 9, 9)).resize((5, 5)).transpose(Image.Transpose.TRANSPOSE)
        assert not is_deferred(image.copy())
        image.tobytes()
    assert name in calls


@pytest.mark.usefixtures("accelerated")
def test_a_resize_wrapped_later_leaves_the_acceleration_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Image.Image.resize

    @functools.wraps(found)
    def halved(self: Any, size: tuple[int, int], *args: Any) -> Any:
        return found(self, (size[0] // 2, size[1] // 2), *args)

    monkeypatch.setattr(Image.Image, "resize", halved)
    accelerate._agrees.cache_clear()
    assert Image.open(path).resize((10, 8)).size == (5, 4)
    assert accelerate._agrees()


@pytest.mark.parametrize("name", ["load", "load_read", "load_prepare", "load_end"])
@pytest.mark.usefixtures("accelerated")
def test_a_patched_loader_of_pillow_is_called(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    found = getattr(JpegImagePlugin.JpegImageFile, name)

    def patched(self: Any, *args: Any) -> Any:
        calls.append(name)
        return found(self, *args)

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, name, patched)
    assert not is_deferred(Image.open(path).convert("RGB"))
    assert calls
    monkeypatch.undo()
    accelerate.restore_pillow()
    # The same for a function with Pillow's `__module__`, in the class that defines the method.
    owner = next(kind for kind in JpegImagePlugin.JpegImageFile.__mro__ if name in vars(kind))
    calls.clear()
    found = getattr(owner, name)
    monkeypatch.setattr(owner, name, functools.wraps(found)(patched))
    with accelerate_pillow():
        assert not is_deferred(Image.open(path).convert("RGB"))
    assert calls


@pytest.mark.usefixtures("accelerated")
def test_images_of_other_classes_stay_as_they_are(path: Path, tmp_path: Path) -> None:
    class Own(JpegImagePlugin.JpegImageFile):
        pass

    assert not is_deferred(Own(path).convert("RGB"))
    for name in ("PNG", "WEBP", "GIF", "TIFF", "BMP"):
        other = tmp_path / f"photo.{name.lower()}"
        other.write_bytes(encoded(photo(30, 20), name))
        with Image.open(other) as image:
            assert not is_deferred(image.convert("RGB"))


@pytest.mark.usefixtures("accelerated")
def test_more_bytes_than_pixels_are_not_kept() -> None:
    data = jpeg(4, 4, comment=b"long" * 8_000)
    image = Image.open(io.BytesIO(data + bytes(1 << 20))).convert("RGB")
    assert not is_deferred(image)


@pytest.mark.usefixtures("accelerated")
def test_threads_that_share_an_image_see_one_core(path: Path) -> None:
    expected = by_pillow(lambda: Image.open(path).convert("RGB").resize((64, 48)).tobytes())
    for _ in range(20):
        image = Image.open(path).convert("RGB").resize((64, 48))
        barrier = threading.Barrier(4)

        def use(number: int, image: Image.Image = image, barrier: threading.Barrier = barrier) -> Any:
            barrier.wait()
            return image.im if number % 2 else image.tobytes()

        with ThreadPoolExecutor(4) as pool:
            first, core, second, same = pool.map(use, range(4))
        assert core is same is image.im
        assert first == second == expected
        # As a thread that found no core just before another one set it:
        assert vars(Image.Image)[accelerate._CORE].__get__(image) is core


@pytest.mark.usefixtures("accelerated")
def test_several_crops_of_one_image_decode_it_at_most_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Any] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(kernels, name)

        def image_part(self, source: Any, *args: Any) -> Any:
            if isinstance(source, bytes):
                decoded.append(args)
            return kernels.image_part(source, *args)

    kernels = native.native
    image = Image.open(path).convert("RGB")
    assert accelerate._agrees()
    monkeypatch.setattr(native, "native", Counting())
    crops = [image.crop((i, i, 200 + i, 200 + i)).resize((50, 50)).tobytes() for i in range(10)]
    assert len(set(crops)) == 10
    assert len(decoded) == 2


def test_undo_restores_pillow_and_keeps_deferred_images(path: Path) -> None:
    methods, transpose = dict(vars(Image.Image)), ImageOps.exif_transpose
    expected = Image.open(path).resize((30, 20)).tobytes()
    outer = accelerate_pillow()
    with accelerate_pillow():
        image = Image.open(path).resize((30, 20))
    assert is_deferred(Image.open(path).copy())
    outer.undo()
    outer.undo()
    assert ImageOps.exif_transpose is transpose
    assert {name: value for name, value in vars(Image.Image).items() if name in methods} == methods
    assert not is_deferred(Image.open(path).copy())
    assert is_deferred(image)
    assert image.tobytes() == expected


def test_an_acceleration_that_has_ended_with_all_others_does_not_end_a_later_one(path: Path) -> None:
    methods = {name: getattr(Image.Image, name) for name in CHANGES}
    ended = accelerate_pillow()
    accelerate.restore_pillow()
    ended.undo()
    with accelerate_pillow():
        assert is_deferred(Image.open(path).copy())
        ended.undo()
        assert is_deferred(Image.open(path).copy())
    assert {name: getattr(Image.Image, name) for name in CHANGES} == methods


@pytest.mark.usefixtures("accelerated")
def test_an_image_made_smaller_in_place_keeps_no_jpeg(path: Path) -> None:
    small = Image.open(path)
    small.thumbnail((100, 100))
    assert not is_deferred(small)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    turned = Image.open(io.BytesIO(jpeg(80, 60, exif=exif)))
    ImageOps.exif_transpose(turned, in_place=True)
    np.asarray(turned)
    assert not is_deferred(turned)


@pytest.mark.usefixtures("accelerated")
def test_a_decoded_image_keeps_no_jpeg(path: Path) -> None:
    image = Image.open(path)
    parts = [image.crop((0, 0, 10 + step, 10)) for step in range(2)]
    data = vars(image)["_feedline_deferred"].source._jpeg
    for part in parts:  # the second one decodes the whole image
        np.asarray(part)
    assert sys.getrefcount(data) <= 2  # this function's


def test_an_unknown_version_of_pillow_is_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate, "MAJOR", accelerate.NEWEST + 1)
    assert "is not one of the versions" in str(pillow_obstacle())
    with accelerate_pillow():
        assert not is_deferred(Image.open(path).copy())


def test_without_kernels_pillow_is_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "native", None)
    assert "without its native image kernels" in str(pillow_obstacle())
    with accelerate_pillow():
        assert not is_deferred(Image.open(path).copy())


@pytest.mark.usefixtures("accelerated")
def test_another_libjpeg_in_pillow_is_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate, "_agrees", lambda: False)
    assert "another libjpeg" in str(pillow_obstacle())
    assert not is_deferred(Image.open(path).copy())


@pytest.mark.usefixtures("accelerated")
def test_kernels_that_fail_leave_the_decoding_to_pillow(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = by_pillow(lambda: np.asarray(Image.open(path).crop((10, 20, 310, 220)).resize((30, 20))))
    small = Image.open(path).crop((10, 20, 310, 220)).resize((30, 20))
    assert is_deferred(small)
    kernels = native.native

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(kernels, name)

        def image_part(self, source: Any, *args: Any) -> Any:
            return None if isinstance(source, bytes) else kernels.image_part(source, *args)

    monkeypatch.setattr(native, "native", Failing())
    assert np.array_equal(np.asarray(small), expected)


@pytest.mark.usefixtures("accelerated")
def test_deferred_images_use_less_memory_than_decoded_ones(path: Path) -> None:
    Image.open(path).convert("RGB")
    tracemalloc.start()
    try:
        images = [Image.open(path).convert("RGB") for _ in range(10)]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(map(is_deferred, images))
    assert held < 10 * (path.stat().st_size + 20_000)
