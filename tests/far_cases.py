"""Datasets whose data may lie in a store: how each is written, and opened, here or there."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import lmdb
import numpy as np
import zarr

from feedline import transforms as T
from feedline.datasets import HDF5, LMDB, ArrayFile, Files, ImageFolder, Raw, SQLManifest, TokenDocuments, TokenFile
from feedline.datasets import Zarr as ZarrStore
from writers.values import jpeg

COUNT = 60
ROWS = np.arange(COUNT * 6, dtype=np.float32).reshape(COUNT, 2, 3)
CROP = T.Compose([T.RandomResizedCrop(16), T.ToTensor()])


class Case(NamedTuple):
    """`write(folder)` makes the files; `open(root, **store)` opens them below a folder or an address."""

    write: Callable[[Path], object]
    open: Callable[..., Any]
    needs_cache: bool = False


def _arrays(folder: Path) -> None:
    np.save(folder / "x.npy", ROWS)
    np.save(folder / "y.npy", np.arange(COUNT))
    ROWS.astype("<f8").tofile(folder / "raw.bin")


def _tokens(folder: Path) -> None:
    np.arange(500, dtype=np.uint16).tofile(folder / "t0.bin")
    np.arange(1000, 1009, dtype=np.uint16).tofile(folder / "t1.bin")
    np.arange(2000, 2100, dtype=np.uint16).tofile(folder / "t2.bin")
    np.save(folder / "offsets.npy", np.array([0, 7, 7, 502, 600]))


def _hdf5(folder: Path) -> None:
    with h5py.File(folder / "a.h5", "w", userblock_size=512) as file:
        file["flat"] = ROWS
        file.create_dataset("chunked", data=ROWS, chunks=(8, 2, 2), compression="gzip")
        file["part/labels"] = np.arange(COUNT, dtype=">i4")
        file.create_dataset("words", data=[f"größe {i}" for i in range(COUNT)], chunks=(7,))
        ragged = file.create_dataset("ragged", (COUNT,), h5py.vlen_dtype(np.int16))
        for i in range(COUNT):
            ragged[i] = np.arange(i % 5)
        file.create_dataset("unwritten", (COUNT, 2), "f4", chunks=(5, 2))


def _zarr(folder: Path, version: int) -> None:
    group = zarr.open_group(folder / "a.zarr", mode="w", zarr_format=version)
    group.create_array("x", data=ROWS, chunks=(8, 2, 2))
    group.create_array("labels", data=np.arange(COUNT, dtype=">i4"), chunks=(COUNT,))
    group.create_group("part").create_array("deep", data=ROWS, chunks=(1, 2, 3))
    if version == 3:
        group.create_array("sharded", data=ROWS, chunks=(2, 1, 3), shards=(16, 2, 3))


def _lmdb(folder: Path, place: str, **settings: Any) -> None:
    with lmdb.open(str(folder / place), map_size=1 << 20, **settings) as held, held.begin(write=True) as transaction:
        for i in range(COUNT):
            transaction.put(b"%04d" % i, f"text {i}".encode())


def _files(folder: Path) -> None:
    for i in range(COUNT):
        (folder / f"{i:02}.txt").write_text(f"text {i}")
    with sqlite3.connect(folder / "list.db") as connection:
        connection.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, path TEXT, label INTEGER)")
        rows = [(i, f"{i:02}.txt", i % 3) for i in range(COUNT)]
        connection.executemany("INSERT INTO samples VALUES (?, ?, ?)", rows)
    connection.close()


def _pictures(folder: Path) -> None:
    for i in range(COUNT):
        path = folder / f"class {i % 3}" / ("deep" if i % 2 else "") / f"{i:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(i, (24, 18)))


def manifest(root: str, folder: str, **more: Any) -> SQLManifest:
    """The files below `root`, listed by the database in a folder of this machine."""
    query = "SELECT id, path, label FROM samples"
    return SQLManifest(f"{folder}/list.db", query, root=root, key="id", decode="text", **more)


CASES: dict[str, Case] = {
    "npy": Case(_arrays, lambda root, **more: ArrayFile({"x": f"{root}/x.npy", "y": f"{root}/y.npy"}, **more)),
    "raw": Case(_arrays, lambda root, **more: ArrayFile(Raw(f"{root}/raw.bin", "<f8", (2, 3), 48), **more)),
    "tokens": Case(_tokens, lambda root, **more: TokenFile(f"{root}/t?.bin", 9, targets=True, **more)),
    "tokens across files": Case(
        _tokens,
        lambda root, **more: TokenFile([f"{root}/t{i}.bin" for i in range(3)], 10, cross_files=True, **more),
    ),
    "documents": Case(
        _tokens,
        lambda root, **more: TokenDocuments([f"{root}/t{i}.bin" for i in range(3)], f"{root}/offsets.npy", **more),
    ),
    "hdf5": Case(_hdf5, lambda root, **more: HDF5(f"{root}/a.h5", ["flat", "chunked", "part/labels"], **more)),
    "hdf5, too large to keep": Case(
        _hdf5, lambda root, **more: HDF5(f"{root}/a.h5", "chunked", cache_nbytes=0, **more)
    ),
    "hdf5 of all kinds": Case(_hdf5, lambda root, **more: HDF5(f"{root}/a.h5", **more)),
    "zarr 2": Case(lambda folder: _zarr(folder, 2), lambda root, **more: ZarrStore(f"{root}/a.zarr", **more)),
    "zarr 3": Case(
        lambda folder: _zarr(folder, 3),
        lambda root, **more: ZarrStore(f"{root}/a.zarr", ["x", "labels", "sharded", "part/deep"], **more),
    ),
    "lmdb": Case(
        lambda folder: _lmdb(folder, "texts"), lambda root, **more: LMDB(f"{root}/texts", decode="text", **more), True
    ),
    "lmdb in one file": Case(
        lambda folder: _lmdb(folder, "one.lmdb", subdir=False),
        lambda root, **more: LMDB(f"{root}/one.lmdb", "{:04d}", **more),
        True,
    ),
    "files": Case(_files, lambda root, **more: Files(f"{root}/*.txt", decode="text", **more)),
    "pictures": Case(_pictures, lambda root, **more: Files(f"{root}/**/*.jpg", decode="image", transform=CROP, **more)),
    "folder": Case(_pictures, lambda root, **more: ImageFolder(root, CROP, **more)),
    "folder of images": Case(_pictures, lambda root, **more: ImageFolder(root, **more)),
}
"""By name; with random transforms where there are pictures."""
