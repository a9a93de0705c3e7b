"""What the name of a tar member says: which sample it belongs to, and which field of it it is."""

from __future__ import annotations

import re

IMAGE_EXTENSIONS = frozenset(
    "avif bmp gif jfif jp2 jpe jpeg jpg pbm pgm png pnm ppm tif tiff webp".split()  # noqa: SIM905 - reads as a list
)
"""Extensions, in lower case, of members that hold an encoded picture."""

_BOOKKEEPING = re.compile(r"__[^/]*__(/|$)")


def split(name: str) -> tuple[str, str] | None:
    """Key and field of a member, by WebDataset's rule; None for one that is no part of any sample.

    The key is the path up to the first dot of the base name, the field is what follows that dot, in lower case:
    `train/0001.seg.PNG` is field `seg.png` of sample `train/0001`. No part of a sample are files without an
    extension, hidden files (`._0001.jpg` of macOS) and WebDataset's own bookkeeping (`__name__`).
    """
    folder, slash, base = name.rpartition("/")
    stem, _, field = base.partition(".")
    if not stem or not field or _BOOKKEEPING.match(name):
        return None
    return folder + slash + stem, field.lower()


def extension(field: str) -> str:
    """The last part of a field's name: `png` of `seg.png`."""
    return field.rpartition(".")[2]


def is_image(field: str) -> bool:
    """Whether a field of this name holds an encoded picture."""
    return extension(field) in IMAGE_EXTENSIONS


def danger(name: str) -> str | None:
    """Why a member's name must not be trusted, or None."""
    if name.startswith("/"):
        return "has an absolute path"
    if ".." in name.split("/"):
        return "leads out of its folder with '..'"
    return None
