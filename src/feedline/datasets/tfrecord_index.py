"""Where the records of a TFRecord file lie: found in one pass, checked on the way, kept in a side-car.

A record is its length (uint64), the masked CRC-32C of that, its bytes, and their masked CRC-32C; all little endian.
"""

from __future__ import annotations

import os
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline import extras
from feedline.datasets.files import Pathlike
from feedline.datasets.sidecars import Columns, SideCar
from feedline.errors import SampleError

HEAD_NBYTES, TAIL_NBYTES = 12, 4
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x78\x01": "zlib", b"\x78\x9c": "zlib", b"\x78\xda": "zlib"}


def indexed(path: str, check: bool, folder: Pathlike | None) -> SideCar:
    """`starts`: where each record begins, and where the last one ends. SampleError names the first damaged one."""
    parent, name = os.path.split(path)
    # A hidden file: patterns for the records must not match it.
    return SideCar(Path(folder or parent, f".{name}.index"), path, partial(_scanned, path, check))


def mapped(path: str) -> NDArray[np.uint8]:
    """The bytes of the file."""
    if Path(path).stat().st_size == 0:
        return np.empty(0, np.uint8)
    whole: NDArray[np.uint8] = np.memmap(path, np.uint8, "r").view(np.ndarray)
    return whole


def _scanned(path: str, check: bool) -> Columns:
    data, starts, at = mapped(path), [0], 0
    _refuse_compressed(path, data)
    checksum = extras.load("google_crc32c", "tfrecord", "datasets.TFRecord(check=True)").value if check else None
    while at < len(data):
        at = _after(path, data, at, len(starts) - 1, checksum)
        starts.append(at)
    return {"starts": np.array(starts, np.int64)}


def _after(path: str, data: NDArray[np.uint8], at: int, number: int, checksum: Any) -> int:
    """Where the record that begins here ends."""
    where = f"record {number} of {path}, at byte {at},"
    if len(data) - at < HEAD_NBYTES + TAIL_NBYTES:
        raise SampleError(f"{where} is cut off after {len(data) - at} bytes; was the file copied whole?")
    length, length_crc = struct.unpack_from("<QI", data.data, at)
    if checksum and _masked(checksum(data[at : at + 8])) != length_crc:
        raise SampleError(
            f"{where} has a damaged length (checksum mismatch): this is no TFRecord file, or a broken one"
        )
    start, stop = at + HEAD_NBYTES, at + HEAD_NBYTES + length
    if stop + TAIL_NBYTES > len(data):
        raise SampleError(f"{where} wants {length} bytes of the {len(data) - start} left; was the file copied whole?")
    if checksum and _masked(checksum(data[start:stop])) != struct.unpack_from("<I", data.data, stop)[0]:
        raise SampleError(
            f"{where} is damaged (checksum mismatch): copy the file again, or give check=False to keep it"
        )
    return int(stop + TAIL_NBYTES)


def _masked(crc: int) -> int:
    """As TensorFlow stores checksums, so that the checksum of data that hold checksums stays a good one."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _refuse_compressed(path: str, data: NDArray[np.uint8]) -> None:
    kind = _COMPRESSED.get(data[:2].tobytes())
    # The length of a record may begin with these bytes, too; then it has five more bytes of zeros.
    if kind and data[2:8].any():
        raise SampleError(
            f"{path} is compressed with {kind}, and there is no way to one record of it: decompress it once"
            " (gunzip --keep, or zlib-flate), then give the result"
        )
