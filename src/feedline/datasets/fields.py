"""The table that says how the fields of a tar sample are decoded: by the extension of their member. No pickle."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from zipfile import ZipFile

from numpy.typing import NDArray

from feedline.datasets.inflating import is_bomb
from feedline.errors import ArgumentError
from feedline.shards import npy
from feedline.shards.names import extension, is_image

Decode = Callable[[memoryview], Any]
Own = Mapping[str, Callable[[bytes], Any]]
"""A user's decoders, by field (`seg.png`) or extension (`png`)."""


def integer(data: memoryview) -> int:
    """A whole number in decimal digits."""
    return int(bytes(data))


def text(data: memoryview) -> str:
    """UTF-8."""
    return str(data, "utf-8")


def json_value(data: memoryview) -> Any:
    return json.loads(bytes(data))


def json_lines(data: memoryview) -> list[Any]:
    """One value for each line that is not blank."""
    return [json.loads(line) for line in bytes(data).splitlines() if line.strip()]


def array(data: memoryview) -> NDArray[Any]:
    """The array of a `.npy` member, in memory of its own."""
    return npy.array(data).copy()


def arrays(data: memoryview) -> dict[str, NDArray[Any] | bytes]:
    """The arrays of a `.npz` member by name, and the bytes of what is none; no more than its directory promises."""
    with ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        nbytes = sum(entry.file_size for entry in entries)
        if is_bomb(nbytes, len(data)):
            raise ValueError(f"{len(data):,} bytes claim to hold {nbytes:,}, as a decompression bomb does")
        return {entry.filename.removesuffix(".npy"): _array_in(archive.read(entry)) for entry in entries}


def _array_in(content: bytes) -> NDArray[Any] | bytes:
    return array(memoryview(content)) if npy.is_array(content) else content


DECODERS: dict[str, Decode] = {
    "cls": integer,
    "cls2": integer,
    "class": integer,
    "count": integer,
    "index": integer,
    "inx": integer,
    "id": integer,
    "txt": text,
    "text": text,
    "transcript": text,
    "json": json_value,
    "jsn": json_value,
    "jsonl": json_lines,
    "npy": array,
    "npz": arrays,
}
"""Decoders by extension. Pictures (`shards.IMAGE_EXTENSIONS`) become PIL images in RGB; all that is not here, bytes."""

PICKLES = frozenset({"pickle", "pkl", "pyd", "pt", "pth"})
"""Extensions of what only pickle reads, which would run any code that a shard's author put there."""


def decoder(field: str, own: Own) -> Decode | None:
    """How a field is decoded; None for a picture. ArgumentError refuses what only pickle reads."""
    function = own.get(field, own.get(extension(field)))
    if function is not None:
        return partial(_from_bytes, function)
    if is_image(field):
        return None
    if extension(field) in PICKLES:
        raise ArgumentError(
            f"field {field!r} would have to be unpickled, which runs whatever code its author put there. Store it as "
            f"npy, npz or json, leave it out with fields=, or pass decoders={{{field!r}: function_of_the_bytes}} if "
            f"you trust it"
        )
    return DECODERS.get(extension(field), bytes)


def _from_bytes(function: Callable[[bytes], Any], data: memoryview) -> Any:
    return function(bytes(data))
