"""Pillow with deferred decoding: operations on a JPEG become one native call.

An image keeps its exact type. Its core, which Pillow keeps in one attribute, is absent until something reads that
attribute; a descriptor of the class then computes it. So whatever is not accelerated is Pillow's own code and finds
the pixels that it expects.
"""

from __future__ import annotations

import io
import operator
import os
import sys
from collections.abc import Callable
from functools import cache, lru_cache, partial, wraps
from threading import RLock
from typing import Any, Self

import numpy as np
import PIL
from PIL import Image

from feedline.core.optional import after_import
from feedline.images import native
from feedline.images.callers import result_is_discarded
from feedline.images.deferred import Deferred, DeferredResize, Pixels, Source, Turn

OLDEST, NEWEST = 10, 13
"""Major versions of Pillow that are known; others stay as they are."""


_MAJOR = int(PIL.__version__.partition(".")[0])
_CORE = "_im" if _MAJOR >= 11 else "im"
_DEFERRED = "_feedline_deferred"
_FILTERS = frozenset({1, 2, 3, 4, 5})
"""LANCZOS, BILINEAR, BICUBIC, BOX and HAMMING."""


_LARGEST = 65_500
_SPARE_NBYTES = 1 << 16
_LOADING = ("load", "load_prepare", "load_end", "load_read")
_loading_methods = operator.attrgetter(*_LOADING)


_TURNS: dict[int, Turn] = {
    Image.Transpose.FLIP_LEFT_RIGHT: (False, True, False),
    Image.Transpose.FLIP_TOP_BOTTOM: (False, False, True),
    Image.Transpose.ROTATE_90: (True, True, False),
    Image.Transpose.ROTATE_180: (False, True, True),
    Image.Transpose.ROTATE_270: (True, False, True),
    Image.Transpose.TRANSPOSE: (True, False, False),
    Image.Transpose.TRANSVERSE: (True, True, True),
}


Change = Callable[[Deferred], Deferred | None]
"""Change of a deferred image; None if it takes a second resize."""


def pillow_obstacle() -> str | None:
    """Reason why Pillow cannot be accelerated; None if it can."""
    obstacle = _obvious_obstacle()
    if obstacle is None and not _agrees():
        obstacle = f"Pillow {PIL.__version__} decodes or resizes JPEGs to other pixels: it has another libjpeg"
    return obstacle


def _obvious_obstacle() -> str | None:
    """The obstacle that can be seen without decoding."""
    if native.native is None:
        return "feedline was built without its native image kernels"
    if not OLDEST <= _MAJOR <= NEWEST:
        return f"Pillow {PIL.__version__} is not one of the versions {OLDEST} to {NEWEST} that feedline knows"
    for name in (*_FAST, "tobytes"):
        found = getattr(Image.Image, name)
        if found is not _switch.methods.get(name) and getattr(found, "__module__", None) != "PIL.Image":
            return f"PIL.Image.Image.{name} has been replaced by {getattr(found, '__module__', found)!r}"
    return None


class PillowAcceleration:
    """Acceleration of Pillow in this process.

    It ends with `undo`, or at the end of a `with` block.
    """

    def __init__(self) -> None:
        self._is_on = True

    def undo(self) -> None:
        """End it; images that are still deferred stay valid."""
        if self._is_on:
            self._is_on = False
            _switch.off()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def accelerate_pillow() -> PillowAcceleration:
    """Let Pillow decode JPEGs through feedline's kernels, in this process.

    Worker processes of a `DataLoader` do so by themselves. Images opened with `Image.open` are decoded when their
    pixels are needed: `crop`, `resize`, `transpose`, `convert("RGB")`, `copy` and `tobytes` (which NumPy calls) become
    one native call. Pixels, types, modes and errors are Pillow's. It applies to all threads. Without effect where
    `pillow_obstacle()` gives a reason.
    """
    _switch.on()
    return PillowAcceleration()


def restore_pillow() -> None:
    """End all accelerations of this process.

    Images that are still deferred stay valid.
    """
    while _switch.users:
        _switch.off()


class _Switch:
    """State of Pillow's classes and functions: accelerated or its own."""

    def __init__(self) -> None:
        self.users = 0
        self.methods: dict[str, Any] = {}
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._lock = RLock()

    def renew_lock(self) -> None:
        """Drop a lock that another thread held when this process was forked."""
        self._lock = RLock()

    def on(self) -> None:
        with self._lock:
            self.users += 1
            if self.users > 1 or _obvious_obstacle() is not None:
                return
            if not isinstance(vars(Image.Image).get(_CORE), _AbsentCore):
                setattr(Image.Image, _CORE, _AbsentCore())
            self.methods = {name: _accelerate_method(getattr(Image.Image, name), fast) for name, fast in _FAST.items()}
            self.methods["tobytes"] = _accelerated_tobytes(Image.Image.tobytes)
            for name, method in self.methods.items():
                self._replace(Image.Image, name, method)
            after_import("PIL.ImageFile", self._on_import_of_image_file)

    def off(self) -> None:
        with self._lock:
            self.users -= 1
            if self.users:
                return
            for owner, name, own, replacement in self._replaced:
                # A function that the user has wrapped in turn stays: the wrapper calls it.
                if vars(owner).get(name) is replacement:
                    setattr(owner, name, own)
            self.methods, self._replaced = {}, []

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name), replacement))
        setattr(owner, name, replacement)

    def _on_import_of_image_file(self) -> None:
        with self._lock:
            for owner in (Image.Image, sys.modules["PIL.ImageFile"].ImageFile):
                own = owner.load
                if self.methods and own.__module__ == owner.__module__ and not hasattr(own, "__wrapped__"):
                    self._replace(owner, "load", _accelerated_load(own))


_switch = _Switch()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_switch.renew_lock)


class _AbsentCore:
    """Core of a deferred image, computed on first access.

    Python consults it only for images without the attribute of their own.
    """

    def __get__(self, image: Any, owner: type | None = None) -> Any:
        deferred = None if image is None else vars(image).get(_DEFERRED)
        if deferred is None:
            raise AttributeError(f"{type(image).__name__!r} object has no attribute {_CORE!r}")
        core = Image.frombytes(deferred.mode, deferred.size, _content(deferred.mode, deferred.read())).im
        # Another thread may have been faster, and may have changed its pixels since.
        core = vars(image).setdefault(_CORE, core)
        vars(image).pop(_DEFERRED, None)
        return core


def _content(mode: str, pixels: Pixels) -> bytes:
    if mode != "RGB":
        return pixels[..., 0].tobytes()
    whole: Any = pixels.base  # the bytes that the kernels have written, or an array
    return whole if type(whole) is bytes and len(whole) == pixels.size else pixels.tobytes()


def _accelerate_method(original: Callable[..., Any], fast: Callable[..., Change | None]) -> Any:
    """Method that defers the change that `fast` returns, if any."""

    @wraps(original)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        if _can_be_deferred(self):
            try:
                change = fast(self, *args, **options)
            except Exception:  # noqa: BLE001 - Pillow reports bad arguments in its own words
                change = None
            deferred = None if change is None else _deferred_of(self)
            changed = None if change is None or deferred is None else change(deferred)
            if changed is not None:
                return _new(self, changed)
        return original(self, *args, **options)

    return method


def _accelerated_tobytes(original: Callable[..., bytes]) -> Any:
    @wraps(original)
    def method(self: Any, *args: Any, **options: Any) -> bytes:
        plain = not options and args in {(), ("raw",)}
        deferred = _deferred_of(self) if plain and _can_be_deferred(self) else None
        if deferred is None:
            return original(self, *args, **options)
        pixels = deferred.read()
        vars(self)[_DEFERRED] = deferred.retaining(pixels)
        return _content(deferred.mode, pixels)

    return method


def _accelerated_load(original: Callable[..., Any]) -> Any:
    """Method that decodes only for callers who use its result."""

    @wraps(original)
    def load(self: Any, *args: Any, **options: Any) -> Any:
        alone = not args and not options and _can_be_deferred(self)
        if alone and result_is_discarded(sys._getframe(1), "load", self) and _deferred_of(self) is not None:
            return None
        return original(self, *args, **options)

    return load


def _can_be_deferred(image: Any) -> bool:
    """True without a core, and for a JPEG not yet loaded."""
    state = vars(image)
    if _CORE not in state:
        return _DEFERRED in state
    if state[_CORE] is not None or not _switch.users:
        return False
    plugin = sys.modules.get("PIL.JpegImagePlugin")
    return plugin is not None and type(image) is plugin.JpegImageFile


def _deferred_of(image: Any) -> Deferred | None:
    """The deferred image; None if Pillow has to load it."""
    deferred: Deferred | None = vars(image).get(_DEFERRED)
    return _defer(image) if deferred is None else deferred


def undecoded_jpeg(image: Any) -> bytes | None:
    """The JPEG of an RGB image that is not decoded yet.

    None for other images, and at its second use: then decoding it once, for all uses, is faster.
    """
    deferred = _deferred_of(image) if _can_be_deferred(image) else None
    return None if deferred is None or not deferred.is_whole else deferred.source.take()


def _defer(image: Any) -> Deferred | None:
    """Do what Pillow's `load` does, except for the decoding.

    None, and nothing is changed but the position in the file, if it is not certain that the decoding will succeed.
    """
    try:
        found = _read(image)
    except Exception:  # noqa: BLE001 - Pillow's own `load` runs into the same error, and raises it
        return None
    if found is None:
        return None
    deferred, end = found
    if image._exclusive_fp and image._close_exclusive_fp_after_loading:
        image.fp.close()
    else:
        image.fp.seek(end)
    image.fp, image.tile, image.map, image.readonly = None, [], None, 0
    state = vars(image)
    state[_DEFERRED] = deferred
    state.pop(_CORE, None)
    return deferred


def _read(image: Any) -> tuple[Deferred, int] | None:
    """The deferred JPEG that Pillow has opened.

    With the position where Pillow's `load` leaves the file; None if the kernels do not decode it, or not for certain.
    """
    scale = image.decoderconfig[0] if image.decoderconfig else 1
    if not _is_plain(image, scale) or not _loads_as_pillow(type(image), vars(image)) or not _agrees():
        return None
    limit = 4 * image.width * image.height * scale * scale + _SPARE_NBYTES
    image.fp.seek(0)
    jpeg = image.fp.read(limit)
    intact = native.native.image_intact(jpeg) if type(jpeg) is bytes and len(jpeg) < limit else None
    if intact is None:
        return None
    width, height, components, end = intact
    fallback = partial(_decode_by_pillow, jpeg, image.size, list(image.tile), image.decoderconfig)
    source = Source(jpeg, (width, height), scale, fallback)
    if source.size != image.size or components != len(image.getbands()):
        return None
    # Pillow reads whole blocks, up to the one with the end of the image.
    block = image.decodermaxblock
    return Deferred(source, image.mode, (0, 0, *image.size)), min(len(jpeg), -(-end // block) * block)


def _is_plain(image: Any, scale: int) -> bool:
    """True for one tile of all pixels, in RGB or L."""
    if "progressive" in image.info:  # the kernels would refuse it after a look at the whole file
        return False
    if image.mode not in {"RGB", "L"} or len(image.tile) != 1 or image.fp is None or scale not in {1, 2, 4, 8}:
        return False
    codec, extents, offset, arguments = image.tile[0]
    return (codec, extents, offset, arguments) == ("jpeg", (0, 0, *image.size), 0, (image.mode, ""))


def _loads_as_pillow(kind: type, state: dict[str, Any]) -> bool:
    return state.keys().isdisjoint(_LOADING) and _are_pillows(_loading_methods(kind))


@lru_cache(maxsize=64)
def _are_pillows(methods: tuple[Any, ...]) -> bool:
    modules = {getattr(each, "__module__", None) for each in methods}
    return modules <= {"PIL.ImageFile", "PIL.JpegImagePlugin"}


def _decode_by_pillow(jpeg: bytes, size: tuple[int, int], tile: list[Any], decoderconfig: tuple[Any, ...]) -> Pixels:
    """Pixels by Pillow alone."""
    image = sys.modules["PIL.JpegImagePlugin"].JpegImageFile(io.BytesIO(jpeg))
    image.tile, image._size, image.decoderconfig = tile, size, decoderconfig
    _pixels_of(image)
    return np.asarray(image.convert("RGB"))


def _pixels_of(image: Any) -> Any:
    """Access to the pixels, decoded by Pillow now.

    The call is not deferred, since its result is used.
    """
    return image.load()


def _new(image: Any, deferred: Deferred) -> Any:
    """Deferred image, with what Pillow hands on from `image`."""
    new = image._new(deferred)  # it takes mode and size from the core
    state = vars(new)
    state[_DEFERRED] = state.pop(_CORE)
    return new


def _same(deferred: Deferred) -> Deferred:
    return deferred


def _copy(image: Any) -> Change | None:  # noqa: ARG001 - the signature of all changes
    return _same


def _convert(image: Any, mode: Any = None) -> Change | None:
    """Convert to RGB; None with any further argument, or to other modes."""
    if not mode or mode == image.mode:
        return _same
    if mode != "RGB" or "transparency" in image.info:
        return None
    return lambda deferred: deferred._replace(mode="RGB")


def _crop(image: Any, box: Any = None) -> Change | None:
    """Crop a box within the image that has pixels; None for others."""
    if box is None:
        return _same
    x0, y0, x1, y1 = map(int, map(round, box))
    width, height = image.size
    within = 0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height
    most = Image.MAX_IMAGE_PIXELS
    if not within or (most is not None and (x1 - x0) * (y1 - y0) > most):  # Pillow warns, or raises
        return None
    return lambda deferred: deferred.crop((x0, y0, x1 - x0, y1 - y0))


def _transpose(image: Any, method: Any) -> Change | None:  # noqa: ARG001 - as above
    turn = _TURNS.get(method)
    return None if turn is None else lambda deferred: deferred.transpose(turn)


def _resize(image: Any, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None) -> Change | None:
    """DeferredResize with a filter that the kernels have; None for others."""
    if not isinstance(size, tuple | list):  # not every version of Pillow takes arrays
        return None
    width, height = (operator.index(side) for side in size)
    shown = image.size
    edges = (0, 0, *shown) if box is None else tuple(box)
    # As Pillow passes them on: as float32, which holds the sides of images exactly.
    left, top, right, bottom = map(float, edges if box is None else map(np.float32, edges))
    filter_ = Image.Resampling.BICUBIC if resample is None else resample
    within = 0 <= left < right <= shown[0] and 0 <= top < bottom <= shown[1]
    fits = 0 < width <= _LARGEST and 0 < height <= _LARGEST and max(shown) <= _LARGEST
    if not within or not fits or filter_ not in _FILTERS or _reduces_first((width, height), edges, reducing_gap):
        return None
    if (width, height) == shown and edges == (0, 0, *shown):
        return _same
    rounded = (left, top, right, bottom)
    resizing = DeferredResize(int(filter_), rounded, (width, height), (0, 0, width, height), across_first=_MAJOR < 13)
    return lambda deferred: deferred.resize(resizing)


def _reduces_first(size: tuple[int, int], box: tuple[Any, ...], reducing_gap: Any) -> bool:
    """True if Pillow divides the size by a whole number first."""
    if reducing_gap is None:
        return False
    factors = (box[2] - box[0]) / size[0] / reducing_gap, (box[3] - box[1]) / size[1] / reducing_gap
    return bool(reducing_gap < 1 or max(map(int, factors)) > 1)


_FAST: dict[str, Callable[..., Change | None]] = {
    "convert": _convert,
    "copy": _copy,
    "crop": _crop,
    "resize": _resize,
    "transpose": _transpose,
}
"""Methods of `PIL.Image.Image`, and the changes that they make; None leaves the call to Pillow."""


@cache
def _agrees() -> bool:
    """True if Pillow gives the pixels of the kernels.

    Tried once per process: Pillow may have been built with another libjpeg.
    """
    y, x = np.mgrid[:75, :61].astype(np.uint8)
    pixels = np.stack([x * 3 ^ y, y * 5 + x, x * y], axis=-1)
    specimens = [(Image.fromarray(pixels), {"subsampling": kind}) for kind in ("4:4:4", "4:2:2", "4:2:0")]
    specimens.append((Image.fromarray(pixels[..., 0]), {}))
    return all(_agrees_on(image, options) for image, options in specimens)


def _agrees_on(image: Image.Image, options: dict[str, Any]) -> bool:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    jpeg = file.getvalue()
    file.seek(0)
    expected = sys.modules["PIL.JpegImagePlugin"].JpegImageFile(file)  # not `Image.open`, which users replace
    _pixels_of(expected)
    source = Source(jpeg, image.size, 1, lambda: np.empty((0, 0, 3), np.uint8))
    resize = DeferredResize(Image.Resampling.BICUBIC, (2, 3, 50, 70), (40, 9), (0, 0, 40, 9), across_first=_MAJOR < 13)
    whole = Deferred(source, image.mode, (0, 0, *image.size))
    part = Deferred(Source.of(source.read(whole.part, whole.turn, None)), image.mode, whole.part, resizing=resize)
    resized = expected.resize((40, 9), Image.Resampling.BICUBIC, (2, 3, 50, 70))
    return all(
        _content(mine.mode, mine.read()) == theirs.tobytes() for mine, theirs in ((whole, expected), (part, resized))
    )
