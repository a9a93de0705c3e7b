"""Compressed shards: decompressed once into a folder of the machine, within the size that was promised, and checked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline import extras
from feedline.datasets.files import Pathlike
from feedline.datasets.sidecars import stamp
from feedline.errors import ArgumentError, SampleError

_CODECS = {"br": "brotli", "bz2": "bzip2", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}
_XXHASHES = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")


def inflated(data: Any, codec: str, nbytes: int, where: str, extra: str) -> NDArray[np.uint8]:
    """The `nbytes` bytes that were compressed with `codec`; SampleError for fewer, more, or damaged ones."""
    if codec not in _CODECS:
        raise ArgumentError(f"{where} is compressed with {codec!r}; known are {', '.join(_CODECS)}")
    cramjam = extras.load("cramjam", extra, f"reading {codec}-compressed shards")
    module = getattr(cramjam, _CODECS[codec])
    out = np.empty(nbytes, np.uint8)
    try:
        count = (module.decompress_raw_into if codec == "snappy" else module.decompress_into)(data, out)
    except cramjam.DecompressionError as error:
        raise SampleError(f"{where} cannot be decompressed to {nbytes} bytes ({error}); copy it again") from error
    if count != nbytes:
        raise SampleError(f"{where} holds {count} bytes where its index promises {nbytes}; copy it again")
    return out


def inflated_file(
    path: Path, codec: str, nbytes: int, extra: str, folder: Pathlike | None, hashes: Mapping[str, str] | None = None
) -> Path:
    """A file with what `path` holds decompressed, made on first use; `hashes` are those of the result."""
    place = _place(path, folder)
    if not (place.exists() and place.stat().st_size == nbytes):
        data = inflated(np.fromfile(path, np.uint8), codec, nbytes, str(path), extra)
        refuse_other(data, hashes or {}, str(path))
        place.parent.mkdir(parents=True, exist_ok=True)
        _write(place, data)
    return place


def refuse_other(data: NDArray[np.uint8], hashes: Mapping[str, str], where: str) -> None:
    """SampleError if the data have not these hashes, hex digests by the name of the algorithm."""
    for name, wanted in hashes.items():
        found = _digest(name, data, where)
        if found != wanted:
            raise SampleError(f"{where} is damaged: its {name} is {found}, its index promises {wanted}; copy it again")


def _digest(name: str, data: NDArray[np.uint8], where: str) -> str:
    if name in hashlib.algorithms_guaranteed and not name.startswith("shake"):
        return hashlib.new(name, data.data, usedforsecurity=False).hexdigest()
    if name not in _XXHASHES:
        raise ArgumentError(f"{where} has hashes of the kind {name!r}, which is not known; give check_hashes=False")
    digest: str = getattr(extras.load("xxhash", "mds", f"checking {name} hashes"), name)(data).hexdigest()
    return digest


def _place(path: Path, folder: Pathlike | None) -> Path:
    """Where the decompressed file lies: another place for another state of the compressed one."""
    key = hashlib.sha256(repr((str(path.resolve()), *stamp(path))).encode()).hexdigest()[:24]
    return (_default_folder() if folder is None else Path(folder)) / f"{key}-{path.stem}"


def _default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "feedline", "inflated")


def _write(place: Path, data: NDArray[np.uint8]) -> None:
    """Whole or not at all; of two processes that write the same, the later one wins."""
    with NamedTemporaryFile(dir=place.parent, prefix=f".{place.name}.", delete=False) as file:
        try:
            file.write(data.data)
            file.close()
            Path(file.name).replace(place)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
