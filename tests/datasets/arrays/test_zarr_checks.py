"""Damaged Blosc frames are refused before c-blosc reads them, wherever a store has them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numcodecs  # type: ignore[import-untyped]
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec
from zarr.codecs.numcodecs import Blosc

from feedline.datasets import Zarr
from feedline.datasets.arrays.zarr_checks import check_frame
from feedline.errors import SampleError

ROWS = np.arange(400, dtype=np.float32).reshape(100, 4) % 97

LAYOUTS: dict[str, dict[str, Any]] = {
    "2": {"zarr_format": 2, "compressors": numcodecs.Blosc("lz4", 5, 1, 512)},
    "2, as a filter": {"zarr_format": 2, "filters": [numcodecs.Blosc("zstd", 5, 2)], "compressors": None},
    "2, column by column": {"zarr_format": 2, "compressors": numcodecs.Blosc("blosclz"), "order": "F"},
    "3": {"compressors": BloscCodec(cname="lz4", shuffle="shuffle")},
    "3, by numcodecs": {"compressors": lambda: Blosc(cname="zlib", shuffle=1)},
    "3, in shards": {"compressors": BloscCodec(cname="zstd"), "chunks": (25, 4), "shards": (50, 4)},
}


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_frames_are_read_and_those_of_another_length_refused(layout: str, tmp_path: Path) -> None:
    compressors = LAYOUTS[layout]["compressors"]
    compressors = compressors() if callable(compressors) else compressors  # its constructor warns
    zarr.create_array(
        tmp_path / "a.zarr", data=ROWS, **{"chunks": (50, 4)} | LAYOUTS[layout] | {"compressors": compressors}
    )
    dataset = Zarr(tmp_path / "a.zarr", cache_nbytes=0)
    assert np.array_equal(np.stack([dataset[i].numpy() for i in range(0, 100, 7)]), ROWS[::7])
    chunk = next(path for name in ("0.0", "c/0/0") if (path := tmp_path / "a.zarr" / name).exists())
    data = bytearray(chunk.read_bytes())
    data[12:16] = (1 << 20).to_bytes(4, "little")  # a length that is not there, as in a truncated chunk
    chunk.write_bytes(data)
    with pytest.raises(SampleError, match=r"rows 3 to 3 of '' in .*a.zarr cannot be read .*Blosc frame has 1048576"):
        dataset[3]
    assert dataset[60].tolist() == ROWS[60].tolist()


def _frame(*, flags: int = 0, itemsize: int = 4, nbytes: int = 64, block: int = 32, offset: int = 24) -> bytes:
    body = struct.pack("<2i", 24, offset) + bytes(12)
    return struct.pack("<4B3i", 2, 1, flags, itemsize, nbytes, block, 36) + body


def test_headers_and_offsets() -> None:
    check_frame(_frame())
    check_frame(_frame(flags=2, nbytes=20, block=20))
    check_frame(struct.pack("<4B3i", 2, 1, 2, 4, 0, 0, 16))
    for damaged in (
        _frame()[:15],
        _frame()[:-1],
        _frame() + b"\0",
        b"\x09" + _frame()[1:],
        _frame(itemsize=0),
        _frame(nbytes=-1),
        _frame(block=0),
        _frame(block=-32),
        _frame(block=65),
        _frame(flags=2),
        _frame(block=4),
        _frame(offset=23),
        _frame(offset=33),
    ):
        with pytest.raises(ValueError, match="Blosc frame"):
            check_frame(damaged)


@pytest.mark.parametrize("compressor", numcodecs.blosc.list_compressors())
@pytest.mark.parametrize("shuffle", [0, 1, 2])
def test_frames_of_all_compressors_pass(compressor: str, shuffle: int) -> None:
    for data in (b"", b"a", ROWS, np.random.default_rng(0).bytes(3000)):
        for level in (0, 1, 9):
            check_frame(numcodecs.Blosc(compressor, level, shuffle, 512).encode(data))
