"""Records in shards (MDS, LitData, TFRecord), most of them written by the formats' own libraries."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from peers import written
from writers.values import COUNT, examples, litdata_samples

import feedline as fl
from feedline.datasets import MDS, LitData, LitDataTokens, TFRecord
from formats.format import Format

CROP = fl.transforms.Compose([fl.transforms.RandomResizedCrop(6), fl.transforms.ToTensor()])
NESTED = 600

_SIZE = r"{} has \d+ bytes, its index says \d+; copy it again"
_INFLATED = r"{} cannot be decompressed to \d+ bytes"


def copied(script: str, folder: str) -> Callable[[Path], Any]:
    """Function that copies a folder written by the format's own library."""
    return lambda place: shutil.copytree(written(script) / folder, place, dirs_exist_ok=True)


def write_examples(place: Path) -> None:
    for name in ("one.tfrecord", "two.tfrecord"):
        shutil.copy(written("examples") / name, place / name)


def nested_row(i: int) -> dict[str, Any]:
    return {"id": i, "more": {"words": [f"ü{i}"] * (i % 4), "none": None if i % 2 else 1.5}}


def write_nested(place: Path) -> None:
    """Two chunks of nested rows in several record batches, one of them compressed."""
    rows = [nested_row(i) for i in range(NESTED)]
    chunks = [arrow_chunk(rows[:400], 256), arrow_chunk(rows[400:], 60, "zstd")]
    leaves = [{"type": None, "context": None, "children_spec": []}] * 2
    spec = [1, {"type": "builtins.dict", "context": '["id", "more"]', "children_spec": leaves}]
    index = {
        "chunks": [
            {"filename": f"chunk-{n}.bin", "chunk_bytes": len(chunk), "chunk_size": (400, 200)[n], "dim": None}
            for n, chunk in enumerate(chunks)
        ],
        "config": {"data_format": ["int", "json"], "data_spec": json.dumps(spec)},
    }
    (place / "index.json").write_text(json.dumps(index))
    for n, chunk in enumerate(chunks):
        (place / f"chunk-{n}.bin").write_bytes(chunk)


def arrow_chunk(rows: list[dict[str, Any]], size: int, compression: str | None = None) -> bytes:
    """A chunk in LitData's form for nested rows, in record batches of this size."""
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=size)
    ipc = sink.getvalue().to_pybytes()
    head = 4 * (len(rows) + 2)
    offsets = struct.pack(f"<{len(rows) + 2}I", len(rows), *[head] * (len(rows) + 1))
    return offsets + ipc + struct.pack("<I", len(ipc)) + b"LDARW01\0"


def _mds(folder: str, sample: Any = None, *, cut: Any, columns: list[str], **more: Any) -> Format:
    transform = {"transform": {"jpeg": CROP}} if more.get("random") else {}
    return Format(
        copied("mds", folder),
        lambda root, **store: MDS(root, columns=columns, **transform, **store),
        sample,
        COUNT,
        described_by="index.json",
        cut=cut,
        **{"data": "shard*", "collates": True, "lists": False, **more},
    )


def _litdata(folder: str, cut: Any = ("chunk-0-0.bin", -7, _SIZE), *, count: int = COUNT, **more: Any) -> Format:
    transform = {"transform": {"image": CROP}} if more.get("random") else {}
    found = {} if more.get("random") else {"sample": lambda i: litdata_samples(folder)[i]}
    return Format(
        copied("litdata_chunks", folder),
        lambda root, **store: LitData(root, **transform, **store),
        count=count,
        data="chunk*",
        described_by="index.json",
        cut=cut,
        lists=False,
        **{**found, **more},
    )


def _tfrecord(columns: Any, sample: Any = None, **more: Any) -> Format:
    transform = {"transform": {"image": CROP}} if more.get("random") else {}
    return Format(
        write_examples,
        lambda root, **store: TFRecord(f"{root}/{{one,two}}.tfrecord", columns, **transform, **store),
        sample,
        COUNT,
        cut=("two.tfrecord", -7, r"record \d+ of {}, .* was the file copied completely"),
        lists=False,
        **more,
    )


def _all_features(i: int) -> dict[str, Any]:
    """Every feature as the type of its list: numbers as tensors, bytes as they are."""
    example = examples()[i]
    return {
        "box": torch.tensor(example["box"][0]),
        "image": [example["image"][0]],
        "label": torch.tensor([example["label"][0]]),
        "many": torch.tensor(example["many"][0]),
        "name": [example["name"][0]],
        "raw": [example["raw"][0]],
    }


FORMATS = {
    "mds": _mds(
        "plain",
        lambda i: {"int": i, "str": "é" * i, "fixed_array": np.full((2, 3), i / 3, np.float32)},
        columns=["int", "str", "fixed_array"],
        cut=("shard.00001.mds", -7, _SIZE),
        together=2,
    ),
    "mds, images": _mds(
        "plain", columns=["jpeg", "int"], cut=("shard.00001.mds", -7, _SIZE), random=True, own_layout=False
    ),
    "mds, zstd": _mds(
        "zstd",
        lambda i: {"int": i, "str": "é" * i},
        columns=["int", "str"],
        cut=("shard.00001.mds.zstd", -7, _INFLATED),
    ),
    "mds, csv": _mds(
        "csv",
        lambda i: {"id": i - 5, "text": 'ü"' * i},
        columns=["id", "text"],
        cut=("shard.00001.csv", -7, _SIZE),
        data="shard*.csv",
    ),
    "litdata": _litdata("tuples", together=2),
    "litdata, leaves": _litdata("leaves", collates=False),
    "litdata, images": _litdata("images", count=8, random=True, own_layout=False),
    "litdata, rows": _litdata("rows", collates=False),
    "litdata, many rows": Format(
        write_nested,
        lambda root, **store: LitData(root, **store),
        nested_row,
        NESTED,
        data="chunk*",
        described_by="index.json",
        cut=("chunk-1.bin", -7, _SIZE),
        collates=False,
        lists=False,
    ),
    "litdata, batches": _litdata("batch"),
    "litdata, chunks": _litdata("chunk", ("chunk-0-1.zstd.bin", -7, _INFLATED)),
    "litdata, samples": _litdata("sample"),
    "litdata, tokens": Format(
        copied("litdata_chunks", "tokens"),
        lambda root, **store: LitDataTokens(root, 6, **store),
        count=50,
        data="chunk*",
        described_by="index.json",
        cut=("chunk-0-1.bin", -7, _SIZE),
        lists=False,
    ),
    "tfrecord": _tfrecord(
        {"label": "int64", "name": "text"},
        lambda i: {"label": torch.tensor(i - 3), "name": f"größe {i}"},
        together=2,
    ),
    "tfrecord, all features": _tfrecord(None, _all_features, collates=False, own_layout=False),
    "tfrecord, images": _tfrecord({"image": "image", "label": "int64"}, random=True, own_layout=False),
}
