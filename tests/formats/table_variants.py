"""Codecs, types and metadata of tables that only the reader of damaged files needs."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq

import datasets
from feedline.datasets import ORC, Arrow, Avro, HuggingFace, Parquet
from feedline.errors import SampleError
from formats.format import Format

COUNT = 9


def _plain() -> dict[str, Any]:
    """A column of each type that all three table libraries write."""
    return {
        "i": pa.array(range(COUNT), pa.int32()),
        "b": pa.array([i % 2 == 0 for i in range(COUNT)]),
        "s": pa.array([f"ü{i % 3}" for i in range(COUNT)]),
        "z": pa.array([b"\0" * i for i in range(COUNT)]),
        "l": pa.array([[i] * (i % 3) for i in range(COUNT)]),
        "n": pa.array([{"a": i, "t": [str(i)]} for i in range(COUNT)]),
        "at": pa.array([dt.datetime(2020, 1, 1 + i) for i in range(COUNT)], pa.timestamp("us")),  # noqa: DTZ001
        "day": pa.array([dt.date(2020, 1, 1 + i) for i in range(COUNT)]),
        "d": pa.array([Decimal(i) / 4 for i in range(COUNT)], pa.decimal128(9, 2)),
        "o": pa.array([None if i % 3 == 0 else i / 2 for i in range(COUNT)]),
    }


def _rare() -> dict[str, Any]:
    """Types of Arrow that have layouts of their own."""
    words = pa.array([f"w{i % 2}" for i in range(COUNT)])
    lists = [[i, i] for i in range(COUNT)]
    return {
        "dict": words.dictionary_encode(),
        "view": words.cast(pa.string_view()),
        "large": words.cast(pa.large_string()),
        "binary": pa.array([b"longer than twelve bytes"] * COUNT, pa.binary_view()),
        "half": pa.array(np.arange(COUNT, dtype=np.float16)),
        "wide": pa.array(lists, pa.large_list(pa.int8())),
        "fixed": pa.array(lists, pa.list_(pa.int16(), 2)),
        "list_view": pa.array(lists, pa.list_view(pa.int32())),
        "bytes": pa.array([b"abc"] * COUNT, pa.binary(3)),
        "map": pa.array([[("k", i)] for i in range(COUNT)], pa.map_(pa.string(), pa.int64())),
        "nested": pa.array([{"d": f"w{i % 2}"} for i in range(COUNT)]).cast(
            pa.struct([("d", pa.dictionary(pa.int8(), pa.string()))])
        ),
        "small": pa.array([Decimal(i) for i in range(COUNT)], pa.decimal256(40, 3)),
    }


def _parquet(**options: Any) -> Callable[[Path], object]:
    return lambda folder: pq.write_table(pa.table(_plain()), folder / "a.parquet", row_group_size=5, **options)


def _arrow(columns: Callable[[], dict[str, Any]], *, stream: bool = False, **options: Any) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        table = pa.table(columns())
        new = pa.ipc.new_stream if stream else pa.ipc.new_file
        with new(folder / "a.arrow", table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
            writer.write_table(table, max_chunksize=5)

    return write


def _orc(codec: str) -> Callable[[Path], object]:
    return lambda folder: pyarrow.orc.write_table(pa.table(_plain()), folder / "a.orc", compression=codec, batch_size=5)


_AVRO: Any = {
    "type": "record",
    "name": "row",
    "fields": [
        {"name": "flag", "type": "boolean"},
        {"name": "maybe", "type": ["null", "double"]},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 3}},
        {"name": "fixed", "type": {"type": "fixed", "name": "f", "size": 3}},
        {"name": "color", "type": {"type": "enum", "name": "e", "symbols": ["RED", "BLUE"]}},
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "map", "type": {"type": "map", "values": "long"}},
    ],
}


def _avro(codec: str, folder: Path) -> None:
    rows = [
        {
            "flag": i % 2 == 0,
            "maybe": None if i % 2 else i / 3,
            "day": dt.date(2020, 1, 1 + i),
            "at": dt.datetime(2020, 1, 1 + i, tzinfo=dt.UTC),
            "price": Decimal(i) / 8,
            "fixed": b"abc",
            "color": "RED",
            "id": f"00000000-0000-0000-0000-00000000000{i}",
            "map": {"k": i},
        }
        for i in range(COUNT)
    ]
    with (folder / "a.avro").open("wb") as file:
        fastavro.writer(file, _AVRO, rows, codec=codec, sync_interval=100)


def _delta(folder: Path) -> None:
    """A checkpoint and a commit behind it."""
    for number in range(3):
        pq.write_table(pa.table({"x": [number, 10 + number]}), folder / f"{number}.parquet")
    fields = [{"name": name, "type": "long", "nullable": True, "metadata": {}} for name in ("x", "p")]
    metadata = {
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": ["p"],
        "configuration": {},
    }
    adds = [{"path": f"{number}.parquet", "partitionValues": {"p": str(number)}} for number in range(3)]
    log = folder / "_delta_log"
    log.mkdir()
    pairs = pa.map_(pa.string(), pa.string())
    kinds = {
        "metaData": pa.struct(
            {"schemaString": pa.string(), "partitionColumns": pa.list_(pa.string()), "configuration": pairs}
        ),
        "add": pa.struct({"path": pa.string(), "partitionValues": pairs}),
        "protocol": pa.struct({"minReaderVersion": pa.int32()}),
    }
    state: list[dict[str, Any]] = [
        {"metaData": {**metadata, "configuration": []}},
        {"protocol": {"minReaderVersion": 1}},
        *({"add": {**add, "partitionValues": [*add["partitionValues"].items()]}} for add in adds[:2]),
    ]
    columns = {name: pa.array([each.get(name) for each in state], kind) for name, kind in kinds.items()}
    pq.write_table(pa.table(columns), log / f"{1:020}.checkpoint.parquet")
    later = [{"remove": {"path": "0.parquet", "deletionVector": None}}, {"add": adds[2]}, {"metaData": metadata}]
    (log / f"{2:020}.json").write_text("\n".join(map(json.dumps, later)))


_FILE = {
    "type": "record",
    "name": "r2",
    "fields": [
        {"name": "content", "type": "int"},
        {"name": "file_path", "type": "string"},
        {"name": "file_format", "type": "string"},
        {
            "name": "partition",
            "type": {"type": "record", "name": "r102", "fields": [{"name": "p", "type": ["null", "long"]}]},
        },
    ],
}


def _iceberg(folder: Path) -> None:
    def write(name: str, kind: str, fields: dict[str, Any], rows: list[Any]) -> None:
        schema = {"type": "record", "name": kind, "fields": [{"name": n, "type": t} for n, t in fields.items()]}
        with (folder / "metadata" / name).open("wb") as file:
            fastavro.writer(file, schema, rows)

    (folder / "metadata").mkdir()
    (folder / "data").mkdir()
    number = {b"PARQUET:field_id": b"1"}
    for i in range(2):
        table = pa.table([[i, 10 + i]], schema=pa.schema([pa.field("x", pa.int64(), metadata=number)]))
        pq.write_table(table, folder / f"data/{i}.parquet")
    at = "s3://elsewhere/t"
    files = [
        {"content": 0, "file_path": f"{at}/data/{i}.parquet", "file_format": "PARQUET", "partition": {"p": i}}
        for i in range(2)
    ]
    entries = [{"status": 1, "data_file": file} for file in files]
    write("m.avro", "manifest_entry", {"status": "int", "data_file": _FILE}, entries)
    listing = {"manifest_path": "string", "content": "int", "partition_spec_id": "int"}
    manifest = {"manifest_path": f"{at}/metadata/m.avro", "content": 0, "partition_spec_id": 0}
    write("l.avro", "manifest_file", listing, [manifest])
    member = {"id": 4, "name": "a", "type": "long"}
    metadata = {
        "location": at,
        "current-snapshot-id": 7,
        "snapshots": [{"snapshot-id": 7, "manifest-list": f"{at}/metadata/l.avro"}],
        "current-schema-id": 0,
        "schemas": [
            {
                "schema-id": 0,
                "fields": [
                    {"id": 1, "name": "x", "type": "long"},
                    {"id": 2, "name": "p", "type": "long"},
                    {"id": 3, "name": "s", "type": {"type": "struct", "fields": [member]}},
                ],
            }
        ],
        "partition-specs": [
            {"spec-id": 0, "fields": [{"source-id": 2, "transform": "identity", "name": "p"}]},
        ],
    }
    (folder / "metadata/00000-aa.metadata.json").write_text(json.dumps(metadata))
    (folder / "metadata/version-hint.text").write_text("0")


def _saved(folder: Path) -> None:
    names = ("i", "b", "s", "l")
    columns = {name: value.to_pylist() for name, value in _plain().items() if name in names}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "a"))


def _loaded(kind: str | None, root: str, **_: Any) -> HuggingFace:
    try:
        found = datasets.load_from_disk(f"{root}/a")
    except Exception as error:
        raise SampleError("datasets does not load it") from error
    return _Batches(found.with_format(kind))


class _Batches(HuggingFace):
    """Samples as those of a batch: `datasets` itself reads single ones."""

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]


FORMATS: dict[str, Format] = {
    **{f"hugging face, {kind}": Format(_saved, partial(_loaded, kind), collates=False) for kind in (None, "torch")},
    **{
        f"parquet, {name}": Format(
            _parquet(**options), lambda root, **store: Parquet(f"{root}/a.parquet", nulls={"o": -1}, **store)
        )
        for name, options in {
            "snappy": {"compression": "snappy", "data_page_version": "2.0", "write_page_checksum": True},
            "zstd": {"compression": "zstd", "use_dictionary": False},
            "lz4": {"compression": "lz4", "write_page_index": True},
            "deltas": {
                "use_dictionary": False,
                "column_encoding": {
                    "i": "DELTA_BINARY_PACKED",
                    "s": "DELTA_BYTE_ARRAY",
                    "z": "DELTA_LENGTH_BYTE_ARRAY",
                    "o": "BYTE_STREAM_SPLIT",
                },
            },
        }.items()
    },
    "parquet, filtered": Format(
        _parquet(),
        lambda root, **store: Parquet(f"{root}/a.parquet", ["i", "s"], filters=[("i", ">", 2)], **store),
    ),
    "delta": Format(_delta, lambda root, **store: Parquet(root, **store)),
    "iceberg": Format(_iceberg, lambda root, **store: Parquet(root, ["x", "p"], nulls=0, **store)),
    "arrow, types": Format(_arrow(_plain), lambda root, **store: Arrow(f"{root}/a.arrow", nulls={"o": -1}, **store)),
    "arrow, layouts": Format(_arrow(_rare), lambda root, **store: Arrow(f"{root}/a.arrow", **store)),
    "arrow stream, layouts": Format(
        _arrow(_rare, stream=True, emit_dictionary_deltas=True), lambda root, **store: Arrow(f"{root}/a.arrow", **store)
    ),
    "arrow stream, lz4": Format(
        _arrow(_plain, stream=True, compression="lz4"),
        lambda root, **store: Arrow(f"{root}/a.arrow", nulls={"o": -1}, **store),
    ),
    **{
        f"orc, {codec}": Format(
            _orc(codec), lambda root, **store: ORC(f"{root}/a.orc", nulls={"o": -1}, **store), collates=False
        )
        for codec in ("uncompressed", "snappy", "zstd", "lz4")
    },
    **{
        f"avro, {codec}": Format(
            partial(_avro, codec), lambda root, **store: Avro(f"{root}/a.avro", nulls={"maybe": -1}, **store)
        )
        for codec in ("null", "deflate", "snappy", "bzip2")
    },
}
