"""Pillow with deferred decoding: operations on a JPEG become one native call.

An image keeps its exact type. Its core, which Pillow keeps in one attribute, is absent until something reads that
attribute; a descriptor of the class then computes it. Therefore, all calls that are not accelerated run Pillow's own
code, with the pixels that it expects.
"""

from __future__ import annotations

import dis
import io
import operator
import os
import sys
from bisect import bisect_right
from collections.abc import Callable
from functools import cache, lru_cache, partial, wraps
from threading import RLock
from types import CodeType, FrameType
from typing import Any, Self

import numpy as np
import PIL
from PIL import Image

from feedline.core.definitions import module_of_code
from feedline.core.optional import after_import
from feedline.images import native
from feedline.images.crops import Pixels
from feedline.images.deferred import CHANGES, MAJOR, Change, Deferred, DeferredResize, PixelSource

OLDEST, NEWEST = 10, 13
"""Known major versions of Pillow; others decode by their own code."""


_CORE = "_im" if MAJOR >= 11 else "im"
_DEFERRED = "_feedline_deferred"
_SPARE_NBYTES = 1 << 16
_LOADING = ("load", "load_prepare", "load_end", "load_read")
_loading_methods = operator.attrgetter(*_LOADING)


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
    if not OLDEST <= MAJOR <= NEWEST:
        return f"Pillow {PIL.__version__} is not one of the versions {OLDEST} to {NEWEST} that feedline knows"
    for name in (*CHANGES, "tobytes"):
        found = getattr(Image.Image, name)
        if not _is_of("PIL.Image", found):
            return f"PIL.Image.Image.{name} has been replaced by {module_of_code(found) or found!r}"
    return None


def _is_of(module: str, method: Any) -> bool:
    """True for a module's own function, also behind an accelerated method."""
    if getattr(method, "__globals__", None) is globals():
        method = method.__wrapped__
    return module_of_code(method) == module


class PillowAcceleration:
    """Acceleration of Pillow in this process.

    It ends with `undo`, or at the end of a `with` block.
    """

    def undo(self) -> None:
        """End the acceleration; images that are still deferred stay valid."""
        _switch.off(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def accelerate_pillow() -> PillowAcceleration:
    """Make Pillow decode JPEGs by feedline's kernels, in this process.

    Worker processes of a `DataLoader` do so automatically. Images opened with `Image.open` are decoded when their
    pixels are needed: `crop`, `resize`, `transpose`, `convert("RGB")`, `copy` and `tobytes` (which NumPy calls) become
    one native call. Pixels, types, modes and errors are Pillow's. The acceleration applies to all threads, and ends
    with `undo` of the result. It has no effect where `pillow_obstacle()` gives a reason.
    """
    acceleration = PillowAcceleration()
    _switch.on(acceleration)
    return acceleration


def restore_pillow() -> None:
    """End all accelerations of this process.

    Images that are still deferred stay valid.
    """
    for user in list(_switch.users):
        _switch.off(user)


class _Switch:
    """State of Pillow's classes and functions: accelerated or its own."""

    def __init__(self) -> None:
        self.users: set[PillowAcceleration] = set()
        self.methods: dict[str, Any] = {}
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._lock = RLock()

    def renew_lock(self) -> None:
        """Drop a lock that another thread held when this process was forked."""
        self._lock = RLock()

    def on(self, user: PillowAcceleration) -> None:
        with self._lock:
            self.users.add(user)
            if len(self.users) > 1 or _obvious_obstacle() is not None:
                return
            if not isinstance(vars(Image.Image).get(_CORE), _AbsentCore):
                setattr(Image.Image, _CORE, _AbsentCore())
            self.methods = {
                name: _accelerate_method(getattr(Image.Image, name), fast) for name, fast in CHANGES.items()
            }
            self.methods["tobytes"] = _accelerated_tobytes(Image.Image.tobytes)
            self.methods["thumbnail"] = _releasing_thumbnail(Image.Image.thumbnail)
            for name, method in self.methods.items():
                self._replace(Image.Image, name, method)
            after_import("PIL.ImageFile", self._on_import_of_image_file)

    def off(self, user: PillowAcceleration) -> None:
        with self._lock:
            self.users.discard(user)  # missing if it has ended before, or with all others
            if self.users:
                return
            for owner, name, own, replacement in self._replaced:
                # A function that the user has wrapped since then stays: the wrapper calls it.
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
                if self.methods and module_of_code(own) == owner.__module__:
                    self._replace(owner, "load", _accelerated_load(own))


_switch = _Switch()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_switch.renew_lock)


class _AbsentCore:
    """Core of a deferred image, computed on first access.

    Python consults it only for images without the attribute of their own.
    """

    def __get__(self, image: Any, owner: type | None = None) -> Any:
        state: dict[str, Any] = {} if image is None else vars(image)
        deferred = state.get(_DEFERRED)
        # Another thread may have been faster, and may have changed the pixels since then. It sets the core first.
        if deferred is None:
            if _CORE in state:
                return state[_CORE]
            raise AttributeError(f"{type(image).__name__!r} object has no attribute {_CORE!r}")
        core = Image.frombytes(deferred.mode, deferred.size, _content(deferred.mode, deferred.read())).im
        core = state.setdefault(_CORE, core)
        state.pop(_DEFERRED, None)
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
        vars(self)[_DEFERRED] = deferred.with_pixels(pixels)
        return _content(deferred.mode, pixels)

    return method


def _releasing_thumbnail(original: Callable[..., Any]) -> Any:
    """Method that drops the JPEG of an image that has become small."""

    @wraps(original)
    def thumbnail(self: Any, *args: Any, **options: Any) -> Any:
        result = original(self, *args, **options)
        if _CORE in vars(self):
            vars(self).pop(_DEFERRED, None)
        return result

    return thumbnail


def _accelerated_load(original: Callable[..., Any]) -> Any:
    """Method that decodes only if the caller uses its result."""

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
    if state[_CORE] is not None:
        state.pop(_DEFERRED, None)  # Pillow has replaced the pixels without reading the old ones
        return False
    if not _switch.users:
        return False
    plugin = sys.modules.get("PIL.JpegImagePlugin")
    return plugin is not None and type(image) is plugin.JpegImageFile


def _deferred_of(image: Any) -> Deferred | None:
    """The deferred image; None if Pillow has to load it."""
    deferred: Deferred | None = vars(image).get(_DEFERRED)
    return _defer(image) if deferred is None else deferred


def undecoded_jpeg(image: Any) -> bytes | None:
    """The JPEG of an RGB image that is not decoded yet.

    None for other images, and for the second use of an image: from then on, one decoding for all uses is faster.
    """
    deferred = _deferred_of(image) if _can_be_deferred(image) else None
    return None if deferred is None or not deferred.is_whole else deferred.source.take_jpeg()


def _defer(image: Any) -> Deferred | None:
    """Pillow's `load` without the decoding.

    If it is not certain that the decoding will succeed, returns None, and has changed nothing except the position in
    the file.
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

    The second value is the position after Pillow's `load`. None if the kernels do not decode the image, or not for
    certain.
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
    fallback = partial(_decode_by_pillow, image.size, list(image.tile), image.decoderconfig)
    source = PixelSource(jpeg, (width, height), scale, fallback)
    if source.size != image.size or components != len(image.getbands()):
        return None
    # Pillow reads whole blocks, up to the block with the end of the image.
    block = image.decodermaxblock
    return Deferred(source, image.mode, (0, 0, *image.size)), min(len(jpeg), -(-end // block) * block)


def _is_plain(image: Any, scale: int) -> bool:
    """True for one tile of all pixels, in RGB or L."""
    if "progressive" in image.info:  # the kernels would refuse the image only after reading the whole file
        return False
    if image.mode not in {"RGB", "L"} or len(image.tile) != 1 or image.fp is None or scale not in {1, 2, 4, 8}:
        return False
    codec, extents, offset, arguments = image.tile[0]
    return (codec, extents, offset, arguments) == ("jpeg", (0, 0, *image.size), 0, (image.mode, ""))


def _loads_as_pillow(kind: type, state: dict[str, Any]) -> bool:
    return state.keys().isdisjoint(_LOADING) and _are_pillows(_loading_methods(kind))


@lru_cache(maxsize=64)
def _are_pillows(methods: tuple[Any, ...]) -> bool:
    return all(any(_is_of(module, each) for module in ("PIL.ImageFile", "PIL.JpegImagePlugin")) for each in methods)


def _decode_by_pillow(size: tuple[int, int], tile: list[Any], decoderconfig: tuple[Any, ...], jpeg: bytes) -> Pixels:
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
    """Deferred image, with the attributes that Pillow copies from `image`."""
    new = image._new(deferred)  # Pillow takes mode and size from the core
    state = vars(new)
    state[_DEFERRED] = state.pop(_CORE)
    return new


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
    source = PixelSource(jpeg, image.size, 1, lambda _: np.empty((0, 0, 3), np.uint8))
    resize = DeferredResize(Image.Resampling.BICUBIC, (2, 3, 50, 70), (40, 9), (0, 0, 40, 9), across_first=MAJOR < 13)
    whole = Deferred(source, image.mode, (0, 0, *image.size))
    part = Deferred(PixelSource.of(source.read(whole.part, whole.turn, None)), image.mode, whole.part, resizing=resize)
    resize_by_pillow = _switch.methods.get("resize", Image.Image.resize)  # users may have replaced it since then
    resized = resize_by_pillow(expected, (40, 9), Image.Resampling.BICUBIC, (2, 3, 50, 70))
    return all(
        _content(mine.mode, mine.read()) == theirs.tobytes() for mine, theirs in ((whole, expected), (part, resized))
    )


_VARIABLES = frozenset({"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_WITHOUT_EFFECT = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL"})
_STATEMENT_LENGTH = 4


def result_is_discarded(frame: FrameType, method: str, receiver: object) -> bool:
    """True if the frame runs the statement `variable.method()` on the receiver.

    False whenever that is not certain. The variable has to hold the receiver itself: a function written in C, which has
    no frame, may stand between the frame and the method, and may use the result.
    """
    variable = _variable_of_statement(frame.f_code, frame.f_lasti, method)
    return variable is not None and frame.f_locals.get(variable) is receiver


@lru_cache(maxsize=256)
def _variable_of_statement(code: CodeType, position: int, method: str) -> str | None:
    """Local variable of the statement `variable.method()` at a position.

    None if there is another call.
    """
    instructions = [each for each in dis.get_instructions(code) if each.opname not in _WITHOUT_EFFECT]
    # The position may be in the inline cache after the instruction.
    call = bisect_right([each.offset for each in instructions], position) - 1
    statement = instructions[max(call - 2, 0) : call + 2]
    if len(statement) != _STATEMENT_LENGTH:
        return None
    variable, attribute, called, after = statement
    is_method = variable.opname in _VARIABLES and attribute.opname in _ATTRIBUTES and attribute.argval == method
    is_plain = called.opname == "CALL" and called.arg == 0 and after.opname == "POP_TOP"
    return str(variable.argval) if is_method and is_plain else None
