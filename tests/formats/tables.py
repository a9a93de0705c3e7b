"""Parquet and Arrow: the suite's corpora of them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq
import torch

from feedline.datasets import ORC, Arrow, Avro, Parquet
from formats.format import Format

COUNT = 300
TABLE = pa.table(
    {
        "x": np.arange(COUNT, dtype=np.float32),
        "s": [f"text {i}" for i in range(COUNT)],
        "n": [{"a": i, "b": [i, -i]} for i in range(COUNT)],
        "v": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2 * COUNT, dtype=np.int16)), 2),
        "wide": [bytes(range(250))] * COUNT,
    }
)


def parquet(table: Any = TABLE, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **{"row_group_size": 40, "compression": "none", "use_dictionary": ["s"], **options})
    return file.getvalue()


def arrow(table: Any = TABLE, *, stream: bool = False, rows: int = 40, compression: str | None = None) -> bytes:
    file = io.BytesIO()
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(file, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return file.getvalue()


def orc(table: Any = TABLE) -> bytes:
    file = io.BytesIO()
    plain = table.set_column(3, "v", table["v"].combine_chunks().cast(pa.list_(pa.int16())))  # ORC has no fixed lists
    for batch in (plain,):
        pyarrow.orc.write_table(batch, file, compression="zlib", stripe_size=4096, batch_size=40)
    return file.getvalue()


SCHEMA: Any = {
    "type": "record",
    "name": "row",
    "fields": [
        {"name": "x", "type": "float"},
        {"name": "s", "type": "string"},
        {"name": "n", "type": {"type": "record", "name": "n", "fields": [
            {"name": "a", "type": "long"}, {"name": "b", "type": {"type": "array", "items": "long"}},
        ]}},
        {"name": "v", "type": {"type": "array", "items": "int"}},
        {"name": "wide", "type": "bytes"},
    ],
}  # fmt: skip


def avro(table: Any = TABLE, codec: str = "deflate") -> bytes:
    file = io.BytesIO()
    fastavro.writer(file, SCHEMA, table.to_pylist(), codec=codec, sync_interval=10_000)
    return file.getvalue()


def _two(suffix: str, encode: Callable[[Any], bytes]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / f"0.{suffix}").write_bytes(encode(TABLE.slice(0, 170)))
        (folder / f"1.{suffix}").write_bytes(encode(TABLE.slice(170)))

    return write


def _in_folders(folder: Path) -> None:
    for number in range(2):
        (folder / f"part={number}").mkdir()
        (folder / f"part={number}/a.parquet").write_bytes(parquet(TABLE.slice(60 * number, 60)))


def _row(i: int) -> dict[str, Any]:
    return {
        **_numbers(i),
        "s": f"text {i}",
        "n": {"a": torch.tensor(i), "b": torch.tensor([i, -i])},
        "wide": bytes(range(250)),
    }


def _numbers(i: int) -> dict[str, Any]:
    return {"v": torch.tensor([2 * i, 2 * i + 1], dtype=torch.int16), "x": torch.tensor(float(i))}


def _avro_row(i: int) -> dict[str, Any]:
    row = _row(i)
    return {name: row[name].to(torch.int32) if name == "v" else row[name] for name in ("x", "v", "s", "n", "wide")}


def _format(
    dataset: Any, encode: Callable[[Any], bytes], columns: list[str] | None = None, samples: Any = None, **more: Any
) -> Format:
    suffix = dataset.__name__.lower()
    return Format(
        _two(suffix, encode),
        lambda root, **store: dataset([f"{root}/0.{suffix}", f"{root}/1.{suffix}"], columns, **store),
        samples or _numbers if columns else lambda i: {name: _row(i)[name] for name in TABLE.column_names},
        COUNT,
        **{"cut": (f"1.{suffix}", -20, "{} cannot be read: it is damaged"), "lists": False, **more},
    )


FORMATS = {
    "parquet": _format(Parquet, parquet),
    "parquet, chosen columns": _format(Parquet, parquet, ["v", "x"], together=8),
    "arrow": _format(Arrow, arrow),
    "arrow, chosen columns": _format(Arrow, arrow, ["v", "x"], together=8),
    "arrow stream": _format(Arrow, lambda table: arrow(table, stream=True), ["v", "x"], together=8),
    "arrow, compressed": _format(Arrow, lambda table: arrow(table, compression="zstd"), ["v", "x"], together=8),
    "orc": _format(ORC, orc),
    "orc, chosen columns": _format(ORC, orc, ["v", "x"]),
    "avro": _format(Avro, avro, ["x", "v", "s", "n", "wide"], samples=_avro_row),
    "parquet in folders": Format(
        _in_folders,
        lambda root, **store: Parquet(root, ["x", "part"], **store),
        lambda i: {"x": torch.tensor(float(i)), "part": torch.tensor(i // 60)},
        120,
        cut=("part=1/a.parquet", -20, "{} cannot be read: it is damaged"),
    ),
}
