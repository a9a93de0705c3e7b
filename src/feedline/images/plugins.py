"""Pillow's plugins for HEIC and JPEG XL."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from typing import IO, Any

from PIL import Image, UnidentifiedImageError

from feedline.core import optional
from feedline.errors import MissingExtraError

_SNIFFED = 16
"""Number of bytes at the beginning of a file that identify its format."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """Package that adds a format to Pillow.

    Importing it is enough, unless `register` names a function to call.
    """

    format: str
    module: str
    extra: str
    register: str | None = None

    def load(self) -> None:
        """Import the package; MissingExtraError if it is not installed."""
        module = optional.load(self.module, self.extra, f"an image in {self.format} format")
        if self.register is not None:
            getattr(module, self.register)()


HEIC = Plugin("HEIC", "pillow_heif", "heic", "register_heif_opener")


JPEG_XL = Plugin("JPEG XL", "pillow_jxl", "jxl")


_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"}


_JPEG_XL_CONTAINER = b"\0\0\0\x0cJXL \r\n\x87\n"


_JPEG_XL_STREAM = b"\xff\x0a"
"""Only two bytes: damaged files of other formats may begin with them, too."""


def plugin_for(beginning: bytes) -> Plugin | None:
    """Plugin for a file with this beginning; None for all other formats."""
    if beginning[4:8] == b"ftyp" and beginning[8:12] in _HEIC_BRANDS:
        return HEIC
    return JPEG_XL if beginning.startswith((_JPEG_XL_CONTAINER, _JPEG_XL_STREAM)) else None


def open_image(source: str | os.PathLike[str] | IO[bytes]) -> Image.Image:
    """Open an image as `PIL.Image.open` does, HEIC and JPEG XL included.

    MissingExtraError names the package that such an image needs.
    """
    if not isinstance(source, str | os.PathLike):
        source = _seekable(source)
    try:
        return Image.open(source)
    except UnidentifiedImageError:
        if not _load_plugin(beginning_of(source)):
            raise
    return Image.open(source)


def _seekable(file: IO[bytes]) -> IO[bytes]:
    """The file, or its content if it can only be read once.

    `PIL.Image.open` would take the content, and leave nothing for a second look.
    """
    try:
        file.seek(0)
    except (AttributeError, io.UnsupportedOperation):
        return io.BytesIO(file.read())
    return file


def _load_plugin(beginning: bytes) -> bool:
    """Load the plugin for a file; False without one."""
    plugin = plugin_for(beginning)
    try:
        if plugin is not None:
            plugin.load()
    except MissingExtraError:
        if not beginning.startswith(_JPEG_XL_STREAM):
            raise
        return False
    return plugin is not None


def beginning_of(source: Any) -> bytes:
    """Read the first bytes of a path or file object."""
    if isinstance(source, str | os.PathLike):
        with open(source, "rb") as file:
            return file.read(_SNIFFED)
    source.seek(0, io.SEEK_SET)
    beginning: bytes = source.read(_SNIFFED)
    source.seek(0, io.SEEK_SET)
    return beginning
