"""Codecs, types and side files of the formats that only the reader of damaged files needs.

The rows are small, because a run reads each of them millions of times.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import shutil
import sqlite3
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import av
import cramjam
import h5py
import lmdb
import numcodecs
import numpy as np
import soundfile
import zarr
from peers import written
from tar_cases import npy, write_tar
from writers.values import jpeg, random_image

from feedline.datasets import (
    CSV,
    HDF5,
    JSONL,
    LMDB,
    MDS,
    ArrayFile,
    Arrays,
    CachedMap,
    Clips,
    Files,
    Lines,
    LitData,
    SQLManifest,
    TarShards,
    TFRecord,
    Waveforms,
    Zarr,
)
from feedline.datasets.webdataset import write_index
from formats import arrays
from formats.format import Format
from formats.records import copied

COUNT = 9


# Texts


_PACKERS: dict[str, Callable[[bytes], Any]] = {
    "gz": gzip.compress,
    "zst": cramjam.zstd.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


def _packed(name: str, data: bytes, folder: Path) -> None:
    (folder / name).write_bytes(bytes(_PACKERS[name.rpartition(".")[2]](data)))


_OBJECTS = "\n".join(json.dumps({"x": i, "t": "é" * i, "l": [i, None]}) for i in range(COUNT)).encode()
_ROWS = "x;t\n" + "".join(f'{i};"a\n""{i}"""\n' for i in range(COUNT))
_ESCAPED = "x\tt\n" + "".join(f'{i}\t"a\\"{i}"\n' for i in range(COUNT))


# Tars


def _tar_members() -> dict[str, bytes]:
    return {
        "a/0.jpg": jpeg(0),
        "a/0.cls": b"3",
        f"{'long' * 30}/1.jpg": jpeg(1),
        f"{'long' * 30}/1.cls": b"4",
        "ü/2.json": b'{"a": [1, 2.5, null]}',
        "ü/2.npy": npy(np.arange(6, dtype=np.float32)),
        "ü/2.txt": "größe".encode(),
    }


def _tar(form: int, folder: Path) -> None:
    write_tar(folder / "a.tar", _tar_members(), format=form)


def _packed_tar(ending: str, folder: Path) -> None:
    place = write_tar(folder / "a.tar", _tar_members())
    data = place.read_bytes()
    place.unlink()
    _packed(f"a.tar.{ending}", data, folder)


def _indexed_tar(folder: Path) -> None:
    place = write_tar(folder / "a.tar", {name: data for name, data in _tar_members().items() if "ü" not in name})
    write_index(place, checksum=True)


# Records


def _records_in(folder: Path, compression: str = "") -> None:
    data = (written("examples") / "one.tfrecord").read_bytes()
    (folder / "a.tfrecord").write_bytes(gzip.compress(data) if compression else data)


def _pick(script: str, name: str, dataset: Any, **more: Any) -> Format:
    return Format(copied(script, name), lambda root, **store: dataset(root, **more, **store))


# Arrays


def _npz(folder: Path) -> None:
    events = np.array([(i, i / 2) for i in range(COUNT)], [("id", ">i8"), ("time", "f4")])
    flags = np.arange(COUNT) % 2 == 0
    np.savez_compressed(folder / "a.npz", x=np.asfortranarray(np.ones((COUNT, 3))), events=events, flags=flags)


def _hdf5(folder: Path) -> None:
    """Headers with checksums, each kind of chunk index, and filters."""
    with h5py.File(folder / "a.h5", "w", libver="latest") as file:
        rows = np.arange(COUNT * 4, dtype=np.float32).reshape(COUNT, 4)
        file["flat"] = rows
        file.create_dataset("fixed", data=rows, chunks=(4, 4), fletcher32=True, shuffle=True, compression="lzf")
        file.create_dataset("grows", data=rows, chunks=(4, 2), maxshape=(None, 4), compression="gzip")
        file.create_dataset("tree", data=rows, chunks=(4, 2), maxshape=(None, None))
        file.create_dataset("scaled", data=rows.astype(int), chunks=(4, 4), scaleoffset=0)
        file.create_dataset("half", data=rows[:, 0].astype(np.float16))
        file.create_dataset("choice", data=rows[:, 0] > 3)
        file.create_dataset("words", data=[f"größe {i}" for i in range(COUNT)], chunks=(7,))
        file.create_dataset("bytes", data=np.array([b"a", b"bc"] * COUNT)[:COUNT])
        layout = h5py.VirtualLayout((COUNT, 4), "f4")
        layout[:] = h5py.VirtualSource(".", "flat", (COUNT, 4))
        file.create_virtual_dataset("virtual", layout)


def _zarr_codecs(version: int, folder: Path) -> None:
    rows = np.arange(COUNT * 2, dtype=np.int16).reshape(COUNT, 2)
    group = zarr.open_group(folder / "a.zarr", mode="w", zarr_format=version)
    if version == 2:
        for name, codec in {"blosc": numcodecs.Blosc(), "lz4": numcodecs.LZ4(), "zlib": numcodecs.Zlib()}.items():
            group.create_array(name, data=rows, chunks=(4, 2), compressors=codec)
        group.create_array("delta", data=rows, chunks=(4, 2), filters=numcodecs.Delta("i2"))
        group.create_array("words", data=np.array([f"größe {i}" for i in range(COUNT)]), chunks=(4,))
        return
    codecs: dict[str, Any] = {"blosc": zarr.codecs.BloscCodec(), "gzip": zarr.codecs.GzipCodec()}
    for name, codec in codecs.items():
        group.create_array(name, data=rows, chunks=(4, 2), compressors=[codec, zarr.codecs.Crc32cCodec()])
    group.create_array("words", data=np.array([f"größe {i}" for i in range(COUNT)], "T"), chunks=(4,))
    group.create_array("turned", data=rows, chunks=(4, 2), filters=[zarr.codecs.TransposeCodec(order=(1, 0))])


def _zarr_zip(folder: Path) -> None:
    arrays.write_zarr(folder, 3)
    shutil.make_archive(str(folder / "b.zarr"), "zip", folder / "a.zarr")
    shutil.rmtree(folder / "a.zarr")


def _lmdb(folder: Path) -> None:
    """Values on overflow pages, in a named database."""
    with lmdb.open(str(folder / "a"), map_size=1 << 20, max_dbs=3) as held:
        named = held.open_db(b"named")
        with held.begin(write=True) as transaction:
            for i in range(COUNT):
                transaction.put(b"%d" % i, bytes([i]) * (3000 * (i % 3) + 1), db=named)


# Media


def _images(kind: str, folder: Path) -> None:
    for i in range(2):
        random_image(i, (24, 18)).save(folder / f"{i}.{kind}")


def _video(codec: str, suffix: str, folder: Path) -> None:
    with av.open(str(folder / f"a.{suffix}"), "w") as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 32, 32, "yuv420p", 3
        for at in range(6):
            pixels = np.random.default_rng(at).integers(0, 256, (32, 32, 3), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        container.mux(stream.encode())


_CODECS = {"mp4": "mpeg4", "avi": "mpeg4", "webm": "libvpx", "ts": "mpeg2video", "mov": "mpeg4"}
_SUBTYPES = {**dict.fromkeys(("wav", "mp3", "aiff", "au", "caf", "w64")), "ogg": "VORBIS", "opus": "OPUS"}
_RATE = 8000


def _sound(suffix: str, subtype: str | None, folder: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, (_RATE // 4, 2))
    soundfile.write(folder / f"a.{suffix}", noise, _RATE, subtype, format="OGG" if suffix == "opus" else None)


# Databases


def _database(folder: Path) -> None:
    (folder / "files").mkdir()
    for i in range(3):
        (folder / f"files/{i}.txt").write_text(f"text {i}")
    with sqlite3.connect(folder / "list.db") as connection:
        connection.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, path TEXT, label REAL)")
        connection.executemany("INSERT INTO samples VALUES (?, ?, ?)", [(i, f"{i}.txt", i / 2) for i in range(3)])
    connection.close()


def _manifest(root: str, **_: Any) -> SQLManifest:
    query = "SELECT id, path, label FROM samples"
    return SQLManifest(f"{root}/list.db", query, root=f"{root}/files", key="id", decode="text")


# Results of a function


_RESULTS = Arrays({"x": np.arange(COUNT)})


def _doubled(sample: Any) -> Any:
    return {"y": 2 * sample["x"], "t": "ü", "l": [1, 2.5, None]}


def _results(root: str, **_: Any) -> CachedMap:
    return CachedMap(_RESULTS, _doubled, root)


FORMATS: dict[str, Format] = {
    "cached results": Format(lambda folder: _results(str(folder)).fill(), _results, collates=False),
    **{
        f"{name}, {ending}": Format(partial(_packed, f"a.{name}.{ending}", data), dataset)
        for (name, data, dataset), ending in zip(
            (
                ("txt", _OBJECTS, lambda root, **store: Lines(root + "/a.txt.gz", **store)),
                ("jsonl", _OBJECTS, lambda root, **store: JSONL(root + "/a.jsonl.zst", **store)),
                ("csv", _ROWS.encode(), lambda root, **store: CSV(root + "/a.csv.bz2", delimiter=";", **store)),
                ("csv", _ROWS.encode(), lambda root, **store: CSV(root + "/a.csv.xz", delimiter=";", **store)),
            ),
            ("gz", "zst", "bz2", "xz"),
            strict=True,
        )
    },
    "csv, escaped": Format(
        lambda folder: (folder / "a.csv").write_text(_ESCAPED),
        lambda root, **store: CSV(f"{root}/a.csv", {"x": float, "t": str}, delimiter="\t", escape="\\", **store),
    ),
    "csv, utf-16": Format(
        lambda folder: (folder / "a.csv").write_bytes(_ROWS.encode("utf-16")),
        lambda root, **store: CSV(f"{root}/a.csv", delimiter=";", encoding="utf-16", **store),
    ),
    **{
        f"tar, {name}": Format(
            partial(_tar, form), lambda root, **store: TarShards(f"{root}/a.tar", **store), collates=False
        )
        for name, form in {"gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}.items()
    },
    "tar, truncated": Format(
        partial(_tar, tarfile.USTAR_FORMAT),
        lambda root, **store: TarShards(f"{root}/a.tar", allow_truncated=True, **store),
        collates=False,
    ),
    **{
        f"tar, {ending}": Format(
            partial(_packed_tar, ending),
            lambda root, ending=ending, **store: TarShards(f"{root}/a.tar.{ending}", **store),
            collates=False,
        )
        for ending in _PACKERS
    },
    "tar, index": Format(
        _indexed_tar, lambda root, **store: TarShards(f"{root}/a.tar", ["jpg", "cls"], **store), collates=False
    ),
    "tfrecord, gzip": Format(
        partial(_records_in, compression="gz"),
        lambda root, **store: TFRecord(f"{root}/a.tfrecord", compression="gzip", **store),
        collates=False,
    ),
    "tfrecord, unchecked": Format(
        _records_in,
        lambda root, **store: TFRecord(f"{root}/a.tfrecord", check_crc=False, **store),
        collates=False,
    ),
    **{f"mds, all of {name}": _pick("mds", name, MDS, check_hashes=name == "hashed") for name in ("plain", "hashed")},
    **{f"mds, packed by {name}": _pick("mds", name, MDS) for name in ("gz", "br", "bz2", "snappy")},
    **{f"mds, {name}": _pick("mds", name, MDS) for name in ("json", "tsv", "xsv", "json-zstd")},
    **{f"litdata, {name}": _pick("litdata_chunks", name, LitData) for name in ("mixed", "bare")},
    "npz, packed": Format(_npz, lambda root, **store: ArrayFile(f"{root}/a.npz", **store)),
    "hdf5, latest": Format(_hdf5, lambda root, **store: HDF5(f"{root}/a.h5", **store)),
    **{
        f"zarr {version}, codecs": Format(
            partial(_zarr_codecs, version), lambda root, **store: Zarr(f"{root}/a.zarr", **store)
        )
        for version in (2, 3)
    },
    "zarr, zip": Format(_zarr_zip, lambda root, **store: Zarr(f"{root}/b.zarr.zip", **store)),
    "lmdb, named": Format(_lmdb, lambda root, **store: LMDB(f"{root}/a", database="named", **store), needs_cache=True),
    **{
        f"images, {kind}": Format(
            partial(_images, kind), lambda root, **store: Files(f"{root}/*.*", decode="image", **store), collates=False
        )
        for kind in ("png", "webp", "gif", "tiff", "bmp", "ppm", "ico", "jp2")
    },
    **{
        f"videos, {suffix}": Format(
            partial(_video, codec, suffix),
            lambda root, suffix=suffix, **store: Clips(f"{root}/a.{suffix}", frames=2, sampling="sliding", **store),
        )
        for suffix, codec in _CODECS.items()
    },
    **{
        f"sounds, {suffix}": Format(
            partial(_sound, suffix, subtype),
            lambda root, suffix=suffix, **store: Waveforms(
                f"{root}/a.{suffix}", seconds=0.05, sampling="sliding", channels=None, **store
            ),
        )
        for suffix, subtype in _SUBTYPES.items()
    },
    "database": Format(_database, _manifest),
}
