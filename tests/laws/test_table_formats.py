"""The same rows in every format of tables: one table in every format, with every way to read a row."""

from __future__ import annotations

import datetime as dt
import io
import json
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fastavro
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
import torch
from format_cases import equal
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from law_settings import Reason, law_settings
from torch.utils.data import default_collate

import datasets
from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead
from feedline.core.tensors import allocate_tensor
from feedline.datasets import ORC, Arrow, Avro, HuggingFace, Parquet

FRESH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
NULLS = (0, "", b"", [])
EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - times without a zone


class Column(NamedTuple):
    """A column in the terms of Arrow and Avro, and its values."""

    arrow: Any
    avro: Any
    values: st.SearchStrategy[Any]


def _decimal(digits: int, scale: int) -> Column:
    values = st.integers(1 - 10**digits, 10**digits - 1).map(lambda number: Decimal(f"{number}e-{scale}"))
    avro = {"type": "bytes", "logicalType": "decimal", "precision": digits, "scale": scale}
    return Column(pa.decimal128(digits, scale), avro, values)


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5)
LONGS = st.integers(-(1 << 63), (1 << 63) - 1)
TIMES = st.datetimes(dt.datetime(1905, 1, 1), dt.datetime(2200, 1, 1))  # noqa: DTZ001


def _maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


def _union(kind: Any) -> list[Any]:
    return ["null", kind]


PAIR = {
    "type": "record",
    "name": "pair",
    "fields": [{"name": "a", "type": _union("long")}, {"name": "t", "type": _union("string")}],
}
COLUMNS = {
    "i": Column(pa.int32(), "int", st.integers(-(1 << 31), (1 << 31) - 1)),
    "n": Column(pa.int64(), "long", LONGS),
    "f": Column(pa.float64(), "double", st.floats(allow_nan=False)),
    "flag": Column(pa.bool_(), "boolean", st.booleans()),
    "d": _decimal(9, 3),
    "wide": _decimal(30, 12),
    "time": Column(pa.timestamp("us"), {"type": "long", "logicalType": "local-timestamp-micros"}, TIMES),
    "day": Column(pa.date32(), {"type": "int", "logicalType": "date"}, st.dates(dt.date(1905, 1, 1))),
    "s": Column(pa.string(), "string", TEXTS),
    "b": Column(pa.binary(), "bytes", st.binary(max_size=5)),
    "list": Column(
        pa.list_(pa.int64()), {"type": "array", "items": _union("long")}, st.lists(_maybe(LONGS), max_size=3)
    ),
    "texts": Column(
        pa.list_(pa.string()), {"type": "array", "items": _union("string")}, st.lists(_maybe(TEXTS), max_size=3)
    ),
    "pair": Column(
        pa.struct({"a": pa.int64(), "t": pa.string()}),
        PAIR,
        st.fixed_dictionaries({"a": _maybe(LONGS), "t": _maybe(TEXTS)}),
    ),
}


@st.composite
def tables(draw: Any) -> Any:
    rows = draw(st.integers(1, 9))
    names = draw(st.lists(st.sampled_from(list(COLUMNS)), min_size=1, max_size=5, unique=True))
    each = {name: draw(st.lists(_maybe(COLUMNS[name].values), min_size=rows, max_size=rows)) for name in names}
    return pa.table({name: pa.array(values, COLUMNS[name].arrow) for name, values in each.items()})


def _parquet(path: Path, table: Any, rows: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows)
    return path


def _arrow(path: Path, table: Any, rows: int) -> Path:
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def _far_arrow(path: Path, table: Any, rows: int) -> str:
    fsspec.filesystem("memory").pipe("/agree/t.arrow", _arrow(path, table, rows).read_bytes())
    return "memory://agree/t.arrow"


def _orc(path: Path, table: Any, _: int) -> Path:
    pyarrow.orc.write_table(table, path)
    return path


def _avro(path: Path, table: Any, rows: int) -> Path:
    fields = [{"name": name, "type": _union(COLUMNS[name].avro)} for name in table.column_names]
    with path.open("wb") as file:
        writer = fastavro.write.Writer(file, {"type": "record", "name": "row", "fields": fields})
        for number, row in enumerate(table.to_pylist(), start=1):
            writer.write(row)
            if number % rows == 0:
                writer.dump()
        writer.flush()
    return path


def _delta(folder: Path, table: Any, rows: int) -> Path:
    """With a file that was removed again."""
    _parquet(folder / "0.parquet", table, rows)
    _parquet(folder / "gone.parquet", table, rows)
    fields = [{"name": name, "type": "any", "nullable": True, "metadata": {}} for name in table.column_names]
    schema = json.dumps({"type": "struct", "fields": fields})
    actions = [{"metaData": {"schemaString": schema, "partitionColumns": [], "configuration": {}}}]
    actions += [{"add": {"path": path, "partitionValues": {}}} for path in ("0.parquet", "gone.parquet")]
    _lines(folder / f"_delta_log/{0:020}.json", actions)
    _lines(folder / f"_delta_log/{1:020}.json", [{"remove": {"path": "gone.parquet"}}])
    return folder


def _lines(path: Path, actions: Sequence[Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(map(json.dumps, actions)))


def _iceberg(folder: Path, table: Any, rows: int) -> Path:
    _parquet(folder / "data/0.parquet", table, rows)
    (folder / "metadata").mkdir(exist_ok=True)
    parts = ["content", "file_path", "file_format"]
    kinds = [{"name": name, "type": "int" if name == "content" else "string"} for name in parts]
    file = {"content": 0, "file_path": f"{folder}/data/0.parquet", "file_format": "PARQUET"}
    kind = {"type": "record", "name": "r2", "fields": kinds}
    _records(folder / "metadata/m0.avro", {"status": "int", "data_file": kind}, {"status": 1, "data_file": file})
    listed = {"manifest_path": f"{folder}/metadata/m0.avro", "content": 0}
    _records(folder / "metadata/snap.avro", {"manifest_path": "string", "content": "int"}, listed)
    fields = [{"id": number, "name": name, "type": "any"} for number, name in enumerate(table.column_names)]
    described = {
        "location": str(folder),
        "current-snapshot-id": 1,
        "snapshots": [{"snapshot-id": 1, "manifest-list": f"{folder}/metadata/snap.avro"}],
        "current-schema-id": 0,
        "schemas": [{"schema-id": 0, "fields": fields}],
    }
    (folder / "metadata/00001-aa.metadata.json").write_text(json.dumps(described))
    return folder


def _records(path: Path, kinds: Any, record: Any) -> None:
    file = io.BytesIO()
    schema = {"type": "record", "name": "r", "fields": [{"name": name, "type": kind} for name, kind in kinds.items()]}
    fastavro.writer(file, schema, [record])
    path.write_bytes(file.getvalue())


FORMATS: dict[str, tuple[Callable[..., Any], Callable[[Path, Any, int], Any]]] = {
    "parquet": (Parquet, lambda folder, table, rows: _parquet(folder / "t.parquet", table, rows)),
    "arrow": (Arrow, lambda folder, table, rows: _arrow(folder / "t.arrow", table, rows)),
    "arrow in a store": (Arrow, lambda folder, table, rows: _far_arrow(folder / "far.arrow", table, rows)),
    "rows in a store": (
        partial(Arrow, cache_nbytes=0),
        lambda folder, table, rows: _far_arrow(folder / "far.arrow", table, rows),
    ),
    "table": (Arrow, lambda _, table, rows: table),
    "orc": (ORC, lambda folder, table, rows: _orc(folder / "t.orc", table, rows)),
    "avro": (Avro, lambda folder, table, rows: _avro(folder / "t.avro", table, rows)),
    "delta": (Parquet, lambda folder, table, rows: _delta(folder / "delta", table, rows)),
    "iceberg": (Parquet, lambda folder, table, rows: _iceberg(folder / "iceberg", table, rows)),
}


def expected(value: Any, kind: Any) -> Any:
    """The sample of a value of `to_pylist`, without tensors; times are microseconds."""
    if pa.types.is_struct(kind):
        return {field.name: expected(None if value is None else value[field.name], field.type) for field in kind}
    if pa.types.is_list(kind):
        return [expected(each, kind.value_type) for each in value or []]
    if value is None:
        return "" if pa.types.is_string(kind) else b"" if pa.types.is_binary(kind) else 0
    if isinstance(value, dt.datetime):
        return (value - EPOCH) // dt.timedelta(microseconds=1)
    if isinstance(value, dt.date):
        return (value - EPOCH.date()).days
    return float(value) if isinstance(value, Decimal) else value


def plain(value: Any, unit: int) -> Any:
    """A sample without tensors; `unit` is the number of its time units in a microsecond."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if unit == 1 else value.item() // unit
    if isinstance(value, dict):
        return {name: plain(each, unit) for name, each in value.items()}
    return [plain(each, unit) for each in value] if isinstance(value, list) else value


def rows_of(dataset: Any, indices: Sequence[int]) -> list[Any]:
    units = {name: 1000 if "[ns" in getattr(kind, "counts", "") else 1 for name, kind in dataset.kind.fields}
    samples = dataset.__getitems__(indices)
    return [{name: plain(value, units[name]) for name, value in sample.items()} for sample in samples]


def outcome(fn: Callable[[], Any]) -> Any:
    try:
        return fn()
    except (RuntimeError, TypeError) as error:
        return type(error)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    datasets.disable_progress_bars()
    yield tmp_path
    fsspec.filesystem("memory").store.clear()


@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=FRESH)
@given(table=tables(), group=st.integers(1, 4), data=st.data())
def test_every_format_gives_the_same_rows(folder: Path, table: Any, group: int, data: st.DataObject) -> None:
    columns = data.draw(st.none() | st.permutations(table.column_names).map(lambda names: names[:2]))
    indices = data.draw(st.lists(st.integers(-len(table), len(table) - 1), min_size=1, max_size=6))
    chosen = table if columns is None else table.select(columns)
    wanted = [{f.name: expected(row[f.name], f.type) for f in chosen.schema} for row in chosen.to_pylist()]
    for name, (reader, write) in FORMATS.items():
        nulls = tuple(value for value in NULLS if _fits(value, chosen.schema))
        dataset = reader(write(folder, table, group), columns, nulls=nulls)
        assert len(dataset) == len(table), name
        assert rows_of(dataset, indices) == [wanted[index] for index in indices], name
        _all_ways_agree(dataset, indices)
    kept = datasets.Dataset(table, fingerprint="drawn")
    dataset = HuggingFace(kept if columns is None else kept.select_columns(columns))
    rows = dataset.__getitems__(indices)
    assert [{f.name: expected(row[f.name], f.type) for f in chosen.schema} for row in rows] == [
        wanted[index] for index in indices
    ]
    _all_ways_agree(dataset, indices)


def _fits(value: Any, schema: Any) -> bool:
    """A value that no column can hold would be refused."""
    leaves = [leaf for field in schema for leaf in _leaves(field.type)]
    return any(expected(None, leaf) == value and type(expected(None, leaf)) is type(value) for leaf in leaves)


def _leaves(kind: Any) -> list[Any]:
    if pa.types.is_struct(kind):
        return [leaf for field in kind for leaf in _leaves(field.type)]
    return [kind, *_leaves(kind.value_type)] if pa.types.is_list(kind) else [kind]


def _all_ways_agree(dataset: Any, indices: list[int]) -> None:
    """Rows one by one, many at once, and as a batch; or the same error from each."""
    one_by_one = [dataset[index] for index in indices]
    assert equal(dataset.__getitems__(indices), one_by_one)
    read = reader_of(dataset)
    if read is not None:
        ours = outcome(lambda: read(BatchRead(np.array(indices), allocate_tensor)))
        theirs = outcome(lambda: default_collate(one_by_one))
        assert ours is theirs if isinstance(theirs, type) else equal(ours, theirs)
