"""Damaged chunks are refused and named before they reach a library that could crash or raise anything."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any

import h5py
import numcodecs  # type: ignore[import-untyped]
import numpy as np
import pytest
import zarr
from diagonals import diagonal
from zarr.codecs import BloscCodec, GzipCodec
from zarr.codecs.numcodecs import Blosc

from feedline.datasets import Zarr
from feedline.datasets.arrays.frames import check_bitshuffle, check_blosc
from feedline.datasets.arrays.h5py_layout import row_reader
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


WORDS = np.array([f"word {number}" for number in range(100)], object)
COUNTED: dict[str, tuple[dict[str, Any], str]] = {
    "2": ({"zarr_format": 2, "compressors": None}, "0"),
    "2, filtered": ({"zarr_format": 2, "compressors": numcodecs.Zlib()}, "0"),
    "3": ({"compressors": None}, "c/0"),
    "3, compressed": ({"compressors": GzipCodec()}, "c/0"),
    "3, in shards": ({"compressors": None, "chunks": (25,), "shards": (50,)}, "c/0"),
}


@pytest.mark.filterwarnings("ignore:The data type .* does not have a Zarr V3 specification")
@pytest.mark.parametrize("layout", COUNTED)
def test_a_chunk_of_texts_cannot_claim_more_of_them_than_it_has_bytes(layout: str, tmp_path: Path) -> None:
    """numcodecs allocates memory for the claimed number of texts, up to 32 GiB, before it reads the first."""
    options, key = COUNTED[layout]
    array = zarr.create_array(tmp_path / "a.zarr", shape=(100,), dtype=str, **{"chunks": (50,)} | options)
    array[:] = WORDS
    dataset = Zarr(tmp_path / "a.zarr", cache_nbytes=0)
    assert [dataset[row] for row in (0, 49, 50, 99)] == [WORDS[row] for row in (0, 49, 50, 99)]
    path = tmp_path / "a.zarr" / key
    data = path.read_bytes()
    plain = {"2, filtered": zlib.decompress, "3, compressed": gzip.decompress}.get(layout, bytes)(data)
    claimed = struct.pack("<I", 1 << 20) + plain[4:]
    path.write_bytes({"2, filtered": zlib.compress, "3, compressed": gzip.compress}.get(layout, bytes)(claimed))
    with pytest.raises(SampleError, match=r"rows 3 to 3 of '' in .*a.zarr cannot be read .*claims 1048576 values"):
        dataset[3]
    assert dataset[60] == WORDS[60]


@pytest.mark.parametrize(
    "codec", [numcodecs.LZMA(), numcodecs.BZ2(), numcodecs.LZ4(), numcodecs.Zstd()], ids=lambda codec: codec.codec_id
)
def test_damage_of_every_compressor_is_named(codec: Any, tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", data=ROWS, chunks=(50, 4), zarr_format=2, compressors=codec)
    dataset, chunk = Zarr(tmp_path / "a.zarr", cache_nbytes=0), tmp_path / "a.zarr" / "0.0"
    whole = chunk.read_bytes()
    for damaged in (whole[:-9], b"", bytes(8) + whole[8:], whole[: len(whole) // 2] + bytes(len(whole) // 2)):
        chunk.write_bytes(damaged)
        with pytest.raises(SampleError, match=r"rows 3 to 3 of '' in .*a.zarr cannot be read"):
            dataset[3]
    assert dataset[60].tolist() == ROWS[60].tolist()


def _frame(*, flags: int = 0, itemsize: int = 4, nbytes: int = 64, block: int = 32, offset: int = 24) -> bytes:
    body = struct.pack("<2i", 24, offset) + bytes(12)
    return struct.pack("<4B3i", 2, 1, flags, itemsize, nbytes, block, 36) + body


def test_headers_and_offsets() -> None:
    check_blosc(_frame())
    check_blosc(_frame(flags=2, nbytes=20, block=20))
    check_blosc(struct.pack("<4B3i", 2, 1, 2, 4, 0, 0, 16))
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
            check_blosc(damaged)


@pytest.mark.parametrize(("compressor", "shuffle"), diagonal(numcodecs.blosc.list_compressors(), [0, 1, 2]))
def test_frames_of_all_compressors_pass(compressor: str, shuffle: int) -> None:
    for data in (b"", b"a", ROWS, np.random.default_rng(0).bytes(3000)):
        for level in (0, 1, 9):
            check_blosc(numcodecs.Blosc(compressor, level, shuffle, 512).encode(data))


BITSHUFFLE = struct.pack(">QI", 6000, 4096) + b"".join(
    (len(block)).to_bytes(4, "big") + block for block in (bytes(9), bytes(200))
)
"""A chunk of 6,000 bytes: a whole block, a shorter one, and 16 bytes that are copied, for elements of 4 bytes."""


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("code", [32001, 32008])
def test_chunks_of_hdf5_are_checked_before_a_filter_reads_them(code: int, shuffle: bool, tmp_path: Path) -> None:
    """The filters themselves are not installed: HDF5 says so once a chunk has passed."""
    whole = numcodecs.Blosc("lz4").encode(ROWS.repeat(4)[:1500]) if code == 32001 else BITSHUFFLE + bytes(16)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        settings.set_chunk((50, 30))
        if shuffle:
            settings.set_shuffle()
        settings.set_filter(code, h5py.h5z.FLAG_OPTIONAL, (0, 4, 4, 0, 2))
        space = h5py.h5s.create_simple((110, 40))
        dataset = h5py.Dataset(h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, settings))
        read = row_reader(dataset)
        assert not next(read([(0, 50)])).any()  # nothing is written there yet
        dataset.id.write_direct_chunk((0, 0), whole)
        dataset.id.write_direct_chunk((0, 30), whole)
        with pytest.raises(OSError, match=r"filter|plugin"):
            next(read([(3, 4)]))
        dataset.id.write_direct_chunk((0, 30), bytes(6000))  # at an edge, where HDF5 may leave a chunk as it is
        with pytest.raises(OSError, match=r"filter|plugin"):
            next(read([(3, 4)]))
        dataset.id.write_direct_chunk((0, 30), whole[:-1])
        with pytest.raises(ValueError, match=r"Blosc frame|a chunk of bitshuffle"):
            next(read([(3, 4)]))
        dataset.id.write_direct_chunk((50, 0), whole)
        dataset.id.write_direct_chunk((50, 30), whole[:-1], 1 << shuffle)  # says that the filter was left out
        with pytest.raises(OSError, match=r"filter|plugin"):
            next(read([(50, 60)]))
        dataset.id.write_direct_chunk((100, 0), whole[:9])
        with pytest.raises(ValueError, match=r"of 9 bytes has no header"):
            next(read([(60, 110)]))


def test_blocks_of_bitshuffle() -> None:
    """150 bytes: two blocks of 64, one of 16, and 6 bytes that are copied."""
    blocks = (5).to_bytes(4, "big") + bytes(5) + bytes(4) + (2).to_bytes(4, "big") + bytes(2)
    sound = struct.pack(">QI", 150, 64) + blocks + bytes(6)
    check_bitshuffle(sound, 2, 150)
    check_bitshuffle(struct.pack(">QI", 6, 64) + bytes(6), 4)
    smaller_blocks = struct.pack(">QI", 144, 32) + blocks
    for damaged in (
        sound[:11],
        sound + b"\0",
        sound[:-1],
        sound[:11] + b"\x07" + sound[12:],
        bytes(12) + sound[12:],
        smaller_blocks,
        struct.pack(">QI", 128, 64),
    ):
        with pytest.raises(ValueError, match="bitshuffle"):
            check_bitshuffle(damaged, 2)
    with pytest.raises(ValueError, match="claims to hold 150 bytes, but the chunk has 151"):
        check_bitshuffle(sound, 2, 151)
