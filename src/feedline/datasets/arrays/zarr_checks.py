"""Arrays of zarr whose chunks are checked before they are decoded.

The checked codecs do not verify the sizes in a chunk. Later codecs, also within shards, see a chunk first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from types import new_class
from typing import Any, TypeVar

from feedline.core import optional
from feedline.datasets.arrays.frames import check_blosc, check_count

C = TypeVar("C")

Check = Callable[[Any], None]
"""Raises ValueError for a damaged chunk."""


_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("Blosc", "BloscCodec"), check_blosc),
    **dict.fromkeys(("VLenUTF8", "VLenBytes", "VLenArray", "VLenUTF8Codec", "VLenBytesCodec"), check_count),
}
"""Checks by the names of codecs: of numcodecs, with its wrappers for Zarr 3, and of zarr."""


def with_checked_frames(array: Any) -> Any:
    """The same array, with its chunks checked before they are decoded."""
    metadata = array.metadata
    if metadata.zarr_format == 2:
        codecs = (*(metadata.filters or ()), *([] if metadata.compressor is None else [metadata.compressor]))
        checked = _followed(codecs, _numcodecs_check)
        changes = {"filters": checked[:-1] or None, "compressor": checked[-1]} if checked != codecs else {}
    else:
        checked = _checked_codecs(metadata.codecs)
        changes = {"codecs": checked} if checked != metadata.codecs else {}
    if not changes:
        return array
    zarr = _load("zarr")
    return zarr.Array(zarr.AsyncArray(metadata=replace(metadata, **changes), store_path=array.store_path))


def _checked_codecs(codecs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Codecs of Zarr 3, and of its shards, with checks."""
    return _followed(tuple(map(_checked_shard, codecs)), _zarr_check)


def _checked_shard(codec: Any) -> Any:
    changes = {
        name: checked
        for name in ("codecs", "index_codecs")
        if (checked := _checked_codecs(getattr(codec, name, ()))) != getattr(codec, name, ())
    }
    return replace(codec, **changes) if changes else codec


def _followed(codecs: tuple[C, ...], follow: Callable[[Check], Any]) -> tuple[C, ...]:
    """Codecs, each followed by its check.

    Chunks are decoded from the last codec to the first.
    """
    checks = [_CHECKS.get(type(codec).__name__) for codec in codecs]
    return tuple(
        each
        for codec, check in zip(codecs, checks, strict=True)
        for each in ((codec,) if check is None else (codec, follow(check)))
    )


def _load(module: str) -> Any:
    return optional.load(module, "zarr", "datasets.Zarr")


# zarr and numcodecs are optional dependencies, so their base classes are not available on import.
@cache
def _numcodecs_check(check: Check) -> Any:
    return new_class("ChunkCheck", (_NumcodecsCheck, _load("numcodecs.abc").Codec))(check)


@cache
def _zarr_check(check: Check) -> Any:
    return new_class("ChunkCheck", (_ZarrCheck, _load("zarr.abc.codec").BytesBytesCodec))(check)


class _NumcodecsCheck:
    """Pass-through codec of numcodecs; ValueError for a damaged chunk."""

    codec_id = "feedline_chunk_check"

    def __init__(self, check: Check) -> None:
        self._check = check

    def encode(self, buf: Any) -> Any:
        return buf

    def decode(self, buf: Any, out: Any = None) -> Any:  # noqa: ARG002 - numcodecs' signature
        self._check(buf)
        return buf


class _ZarrCheck:
    """Pass-through codec of zarr; ValueError for a damaged chunk."""

    is_fixed_size = False

    def __init__(self, check: Check) -> None:
        self._check = check

    async def decode(self, chunks_and_specs: Iterable[tuple[Any, Any]]) -> Iterable[Any]:
        chunks = [chunk for chunk, _ in chunks_and_specs]
        for chunk in chunks:
            if chunk is not None:
                self._check(chunk.as_numpy_array())
        return chunks

    def compute_encoded_size(self, nbytes: int, spec: Any) -> int:  # noqa: ARG002 - zarr's signature
        return nbytes
