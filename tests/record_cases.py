"""Datasets of records in shards, as folders that can be put anywhere: how each is opened, at a path or an address."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import feedline as fl
from feedline.datasets import CSV, JSONL, MDS, Lines, LitData, LitDataTokens, TFRecord
from peers import written

CROP = fl.transforms.Compose([fl.transforms.RandomResizedCrop(6), fl.transforms.ToTensor()])
ROWS = 600

Open = Callable[..., Any]


def _mds(folder: str, **arguments: Any) -> tuple[Callable[[Path], Any], Open]:
    return _copied("mds", folder), lambda root, **more: MDS(root, **arguments, **more)


def _litdata(folder: str, **arguments: Any) -> tuple[Callable[[Path], Any], Open]:
    return _copied("litdata_chunks", folder), lambda root, **more: LitData(root, **arguments, **more)


def _copied(script: str, folder: str) -> Callable[[Path], Any]:
    return lambda place: shutil.copytree(written(script) / folder, place, dirs_exist_ok=True)


def _examples(place: Path) -> None:
    for name in ("one.tfrecord", "two.tfrecord"):
        shutil.copy(written("examples") / name, place / name)


def _texts(place: Path) -> None:
    for number in range(3):
        rows = [json.dumps({"x": i, "t": "é\t" * i}) for i in range(10 * number, 10 * number + 8)]
        (place / f"{number}.jsonl").write_text("\r\n".join([*rows[:3], "", " ", *rows[3:]]) + "\n" * number)
        quoted = [f'{i},"{i}\n""deep"" é"' if i % 3 == number else f"{i},plain {i}" for i in range(9)]
        (place / f"{number}.csv").write_text("\n".join(["x,name", *quoted, ""]))
        (place / f"{number}.txt").write_bytes(b"\xef\xbb\xbf" * (number == 1) + b"one\r\n\ntwo\nlast without an end")


def arrow_chunk(rows: list[dict[str, Any]], size: int, compression: str | None = None) -> bytes:
    """A chunk in LitData's form for nested rows, in record batches of this size."""
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=size)
    ipc = sink.getvalue().to_pybytes()
    head = 4 * (len(rows) + 2)
    return struct.pack(f"<{len(rows) + 2}I", len(rows), *[head] * (len(rows) + 1)) + ipc + _mark(ipc)


def _mark(ipc: bytes) -> bytes:
    return struct.pack("<I", len(ipc)) + b"LDARW01\0"


def nested_row(i: int) -> dict[str, Any]:
    """Row i of the folder with many nested rows."""
    return {"id": i, "more": {"words": [f"ü{i}"] * (i % 4), "none": None if i % 2 else 1.5}}


def write_nested(place: Path) -> None:
    """Two chunks of 600 nested rows in several batches, one of them compressed."""
    rows = [nested_row(i) for i in range(ROWS)]
    chunks = [arrow_chunk(rows[:400], 256), arrow_chunk(rows[400:], 60, "zstd")]
    told = {
        "chunks": [
            {"filename": f"chunk-{n}.bin", "chunk_bytes": len(chunk), "chunk_size": (400, 200)[n], "dim": None}
            for n, chunk in enumerate(chunks)
        ],
        "config": {
            "data_format": ["int", "json"],
            "data_spec": json.dumps(
                [1, {"type": "builtins.dict", "context": '["id", "more"]', "children_spec": _LEAVES}]
            ),
        },
    }
    (place / "index.json").write_text(json.dumps(told))
    for n, chunk in enumerate(chunks):
        (place / f"chunk-{n}.bin").write_bytes(chunk)


_LEAVES = [{"type": None, "context": None, "children_spec": []}] * 2

CASES: dict[str, tuple[Callable[[Path], Any], Open]] = {
    "mds": _mds("plain", columns=["int", "str", "fixed_array"]),
    "mds, pictures": _mds("plain", columns=["jpeg", "int"], transform={"jpeg": CROP}),
    "mds, zstd": _mds("zstd", columns=["int", "str"]),
    "litdata": _litdata("tuples"),
    "litdata, leaves": _litdata("leaves"),
    "litdata, pictures": _litdata("pictures", transform={"image": CROP}),
    "litdata, rows": _litdata("rows"),
    "litdata, many rows": (write_nested, lambda root, **more: LitData(root, **more)),
    "litdata, batches": _litdata("batch"),
    "litdata, chunks": _litdata("chunk"),
    "litdata, samples": _litdata("sample"),
    "litdata, tokens": (_copied("litdata_chunks", "tokens"), lambda root, **more: LitDataTokens(root, 6, **more)),
    "tfrecord": (_examples, lambda root, **more: TFRecord(root, {"label": "int64", "name": "text"}, **more)),
    "tfrecord, all features": (_examples, lambda root, **more: TFRecord(root, **more)),
    "tfrecord, pictures": (
        _examples,
        lambda root, **more: TFRecord(root, {"image": "image", "label": "int64"}, transform={"image": CROP}, **more),
    ),
    "lines": (_texts, lambda root, **more: Lines(f"{root}/*.txt", **more)),
    "jsonl": (_texts, lambda root, **more: JSONL(f"{root}/{{0..2}}.jsonl", **more)),
    "csv": (_texts, lambda root, **more: CSV(f"{root}/*.csv", {"x": int, "name": str}, **more)),
}
"""By name: what writes the files into a folder, and what opens them below a folder or address."""


def order(dataset: Any) -> list[int]:
    """Some indices of a dataset, back and forth, one of them twice."""
    drawn = np.random.default_rng(7).permutation(len(dataset)).tolist()
    return [*drawn[:40], drawn[0], -1]
