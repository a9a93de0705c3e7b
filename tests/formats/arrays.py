"""Arrays, tokens and chunked arrays: the suite's corpora of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import torch
import zarr

from feedline.datasets import HDF5, LMDB, ArrayFile, Raw, TokenDocuments, TokenFile, Zarr
from formats.format import Format

COUNT = 60
ROWS = np.arange(COUNT * 6, dtype=np.float32).reshape(COUNT, 2, 3)
STREAM = np.concatenate([np.arange(200), np.arange(1000, 1009), np.arange(2000, 2100)]).astype(np.uint16)
"""The tokens of all three files, one after the other."""
OFFSETS = [0, 7, 7, 202, 300]
_TOKEN_FILES = (0, 200, 209, 309)


def write_arrays(folder: Path) -> None:
    np.save(folder / "x.npy", ROWS)
    np.save(folder / "y.npy", np.arange(COUNT))
    np.save(folder / "events.npy", np.array([(i, i / 2) for i in range(COUNT)], [("id", ">i8"), ("time", "f4")]))
    ROWS.astype("<f8").tofile(folder / "raw.bin")


def write_npz(folder: Path) -> None:
    np.savez(folder / "a.npz", x=ROWS, y=np.arange(COUNT), few=np.arange(3))


def write_tokens(folder: Path) -> None:
    for number in range(3):
        STREAM[_TOKEN_FILES[number] : _TOKEN_FILES[number + 1]].tofile(folder / f"t{number}.bin")
    np.save(folder / "offsets.npy", np.array(OFFSETS))


def write_hdf5(folder: Path, name: str = "a.h5") -> None:
    with h5py.File(folder / name, "w", userblock_size=512) as file:
        file["flat"] = ROWS
        file.create_dataset("chunked", data=ROWS, chunks=(8, 2, 2), compression="gzip")
        file["part/labels"] = np.arange(COUNT, dtype=">i4")
        file.create_dataset("words", data=[f"größe {i}" for i in range(COUNT)], chunks=(7,))
        ragged = file.create_dataset("ragged", (COUNT,), h5py.vlen_dtype(np.int16))
        for i in range(COUNT):
            ragged[i] = np.arange(i % 5)
        events = np.array([(i, i / 2) for i in range(COUNT)], [("id", ">i8"), ("time", "f4")])
        file.create_dataset("events", data=events, chunks=(8,))
        file.create_dataset("unwritten", (COUNT, 2), "f4", chunks=(5, 2))


def write_zarr(folder: Path, version: int) -> None:
    group = zarr.open_group(folder / "a.zarr", mode="w", zarr_format=version)
    group.create_array("x", data=ROWS, chunks=(8, 2, 2))
    group.create_array("labels", data=np.arange(COUNT, dtype=">i4"), chunks=(COUNT,))
    group.create_group("part").create_array("deep", data=ROWS, chunks=(15, 2, 3))
    if version == 3:
        group.create_array("sharded", data=ROWS, chunks=(2, 1, 3), shards=(20, 2, 3))


def write_lmdb(folder: Path, place: str, **settings: Any) -> None:
    with lmdb.open(str(folder / place), map_size=1 << 20, **settings) as held, held.begin(write=True) as transaction:
        for i in range(COUNT):
            transaction.put(b"%04d" % i, f"text {i}".encode())


def row(i: int) -> Any:
    return torch.from_numpy(ROWS[i])


def _label(i: int) -> Any:
    return torch.tensor(i, dtype=torch.int32)


def _window(i: int) -> Any:
    """Nine tokens and those after them; no window crosses the end of a file."""
    starts = [*range(0, 190, 9), *range(209, 308, 9)]
    start = starts[i]
    return torch.from_numpy(STREAM[start : start + 9]), torch.from_numpy(STREAM[start + 1 : start + 10])


_HDF5: dict[str, Any] = {
    "described_by": "*.h5",
    "opened_late": True,
    "indexed": False,
    "cut": ("b.h5", 0.66, "{} cannot be opened as an HDF5 file"),
}
# A missing chunk has the fill value.
_ZARR: dict[str, Any] = {"described_by": "*.z*", "opened_late": True, "versions": "never", "gone": ""}


def _two_hdf5(folder: Path) -> None:
    write_hdf5(folder)
    write_hdf5(folder, "b.h5")


def _hdf5(root: str) -> list[str]:
    return [f"{root}/a.h5", f"{root}/b.h5"]


FORMATS = {
    "npy": Format(
        write_arrays,
        lambda root, **store: ArrayFile({"x": f"{root}/x.npy", "y": f"{root}/y.npy"}, **store),
        lambda i: {"x": row(i), "y": torch.tensor(i)},
        COUNT,
        data="[xy].npy",
        described_by="[xy].npy",
        indexed=False,
        cut=("x.npy", 0.66, r"{} is truncated: the file has \d+ bytes, its header requires \d+"),
        lists=False,
    ),
    "npy of records": Format(
        write_arrays,
        lambda root, **store: ArrayFile(f"{root}/events.npy", **store),
        lambda i: {"id": torch.tensor(i), "time": torch.tensor(i / 2)},
        COUNT,
        data="events.npy",
        described_by="events.npy",
        indexed=False,
        cut=("events.npy", 0.66, r"{} is truncated: the file has \d+ bytes, its header requires \d+"),
        lists=False,
        own_layout=False,
    ),
    "npz": Format(
        write_npz,
        lambda root, **store: ArrayFile(f"{root}/a.npz", columns=["x", "y"], **store),
        lambda i: (row(i), torch.tensor(i)),
        COUNT,
        data="a.npz",
        described_by="a.npz",
        indexed=False,
        cut=("a.npz", 0.66, "{} cannot be read as a .npz archive"),
        lists=False,
    ),
    "raw": Format(
        write_arrays,
        lambda root, **store: ArrayFile(Raw(f"{root}/raw.bin", "<f8", (2, 3), 48), **store),
        lambda i: row(i + 1).double(),
        COUNT - 1,
        data="raw.bin",
        cut=("raw.bin", -7, "{} does not fit"),
        lists=False,
    ),
    "tokens": Format(
        write_tokens,
        lambda root, **store: TokenFile(f"{root}/t?.bin", 9, targets=True, **store),
        _window,
        33,
        data="t?.bin",
        described_by="t0.bin",  # its first bytes are no header
        together=2,
    ),
    "tokens across files": Format(
        write_tokens,
        lambda root, **store: TokenFile([f"{root}/t{i}.bin" for i in range(3)], 10, cross_files=True, **store),
        lambda i: torch.from_numpy(STREAM[10 * i : 10 * i + 10]),
        30,
        data="t?.bin",
        described_by="t0.bin",
        lists=False,
    ),
    "documents": Format(
        write_tokens,
        lambda root, **store: TokenDocuments([f"{root}/t{i}.bin" for i in range(3)], f"{root}/offsets.npy", **store),
        lambda i: torch.from_numpy(STREAM[OFFSETS[i] : OFFSETS[i + 1]]),
        4,
        data="t?.bin",
        described_by="offsets.npy",
        indexed=False,
        collates=False,
        lists=False,
    ),
    "hdf5": Format(
        _two_hdf5,
        lambda root, **store: HDF5(_hdf5(root), ["flat", "chunked", "part/labels"], **store),
        lambda i: (row(i % COUNT), row(i % COUNT), _label(i % COUNT)),
        2 * COUNT,
        lists=False,
        **_HDF5,
    ),
    "hdf5, too large to keep": Format(
        _two_hdf5,
        lambda root, **store: HDF5(_hdf5(root), "chunked", cache_nbytes=0, **store),
        lambda i: row(i % COUNT),
        2 * COUNT,
        **_HDF5,
    ),
    "hdf5 of all kinds": Format(
        _two_hdf5,
        lambda root, **store: HDF5(root, **store),
        lambda i: {
            "chunked": row(i % COUNT),
            "events": {"id": torch.tensor(i % COUNT), "time": torch.tensor(i % COUNT / 2)},
            "flat": row(i % COUNT),
            "ragged": torch.arange(i % COUNT % 5, dtype=torch.int16),
            "unwritten": torch.zeros(2),
            "words": f"größe {i % COUNT}",
        },
        2 * COUNT,
        collates=False,
        looks_up=True,
        **_HDF5,
    ),
    "zarr 2": Format(
        lambda folder: write_zarr(folder, 2),
        lambda root, **store: Zarr(f"{root}/a.zarr", **store),
        lambda i: {"labels": _label(i), "x": row(i)},
        COUNT,
        data="a.zarr/[lx]*/[0-9]*",
        **_ZARR,
    ),
    "zarr 3": Format(
        lambda folder: write_zarr(folder, 3),
        lambda root, **store: Zarr(f"{root}/a.zarr", ["x", "labels", "sharded", "part/deep"], **store),
        lambda i: (row(i), _label(i), row(i), row(i)),
        COUNT,
        data="*/c/*",
        lists=False,
        **_ZARR,
    ),
    "lmdb": Format(
        lambda folder: write_lmdb(folder, "texts"),
        lambda root, **store: LMDB(f"{root}/texts", decode="text", **store),
        lambda i: f"text {i}",
        COUNT,
        data="*/data.mdb",
        cut=("texts/data.mdb", 8192, r"{} is truncated: the file has \d+ bytes"),
        needs_cache=True,
    ),
    "lmdb in one file": Format(
        lambda folder: write_lmdb(folder, "one.lmdb", subdir=False),
        lambda root, **store: LMDB(f"{root}/one.lmdb", "{:04d}", **store),
        lambda i: b"text %d" % i,
        COUNT,
        data="one.lmdb",
        cut=("one.lmdb", 8192, r"{} is truncated: the file has \d+ bytes"),
        needs_cache=True,
        lists=False,
    ),
}
