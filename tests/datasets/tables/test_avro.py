"""Avro: every codec and type of other writers' files, and damage by name."""

from __future__ import annotations

import datetime as dt
import io
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.orc
import pytest
import torch

import feedline as fl
from feedline.datasets import Arrow, Avro
from feedline.errors import ArgumentError, MissingExtraError, SampleError


def write_avro(path: Path, schema: Any, records: list[Any], **options: Any) -> Path:
    with path.open("wb") as file:
        fastavro.writer(file, schema, records, **options)
    return path


def record(**fields: Any) -> Any:
    return {"type": "record", "name": "row", "fields": [{"name": name, "type": kind} for name, kind in fields.items()]}


@pytest.mark.parametrize("codec", ["null", "deflate", "snappy", "bzip2", "xz"])
def test_avro_of_every_codec(tmp_path: Path, codec: str) -> None:
    rows = [{"x": i, "t": f"text {i}"} for i in range(1000)]
    path = write_avro(tmp_path / "a.avro", record(x="long", t="string"), rows, codec=codec, sync_interval=500)
    data = Avro(path)
    assert len(data.shard_sizes) > 10
    assert [(data[i]["x"].item(), data[i]["t"]) for i in (0, 500, -1)] == [(i, f"text {i}") for i in (0, 500, 999)]
    assert data.address(500) == (str(path), "row 500")


def test_a_codec_whose_package_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_avro(tmp_path / "a.avro", record(x="long"), [{"x": 1}], codec="deflate")

    def missing(*_: Any) -> Any:
        raise ValueError("zstandard codec is supported but you need to install zstandard")

    monkeypatch.setattr(fastavro, "reader", missing)
    with pytest.raises(MissingExtraError, match=r"a\.avro cannot be read: zstandard .* need to install zstandard"):
        Avro(path)


def test_types_of_avro(tmp_path: Path) -> None:
    inner = {"type": "record", "name": "inner", "fields": [{"name": "a", "type": ["null", "int"]}]}
    schema = record(
        flag="boolean",
        small="int",
        half="float",
        maybe=["null", "double"],
        day={"type": "int", "logicalType": "date"},
        at={"type": "long", "logicalType": "timestamp-micros"},
        local={"type": "long", "logicalType": "local-timestamp-millis"},
        clock={"type": "int", "logicalType": "time-millis"},
        price={"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 3},
        fixed={"type": "fixed", "name": "f", "size": 3},
        color={"type": "enum", "name": "e", "symbols": ["RED", "BLUE"]},
        id={"type": "string", "logicalType": "uuid"},
        list={"type": "array", "items": inner},
        again="inner",
        map={"type": "map", "values": "long"},
    )
    zone = dt.UTC
    row = {
        "flag": True,
        "small": -1,
        "half": 1.5,
        "maybe": None,
        "day": dt.date(1970, 1, 2),
        "at": dt.datetime(1970, 1, 1, 0, 0, 1, 5, zone),
        "local": dt.datetime(1970, 1, 1, 0, 0, 2),  # noqa: DTZ001 - has no zone
        "clock": dt.time(0, 0, 3),
        "price": Decimal("-460426.573"),
        "fixed": b"abc",
        "color": "BLUE",
        "id": uuid.UUID(int=5),
        "list": [{"a": 1}, {"a": None}],
        "again": {"a": 7},
        "map": {"k": 3},
    }
    data = Avro(write_avro(tmp_path / "a.avro", schema, [row]), nulls={"maybe": "nan", "list.a": -1})
    sample = data[0]
    read = {name: value.item() for name, value in sample.items() if isinstance(value, torch.Tensor) and not value.dim()}
    assert np.isnan(read.pop("maybe"))
    assert read == {
        "flag": True, "small": -1, "half": 1.5, "day": 1, "at": 1_000_005, "local": 2000, "clock": 3000,
        "price": -460426.573,
    }  # fmt: skip
    assert sample["small"].dtype == torch.int32
    assert (sample["fixed"], sample["color"], sample["id"]) == (b"abc", "BLUE", str(uuid.UUID(int=5)))
    assert [each["a"].item() for each in sample["list"]] == [1, -1]
    assert sample["again"]["a"].item() == 7
    assert [(each["key"], each["value"].item()) for each in sample["map"]] == [("k", 3)]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (["string", "int"], r"column 'x' of .*a\.avro is a union of string, int, which cannot become"),
        (
            ["null", {"type": "record", "name": "tree", "fields": [{"name": "up", "type": ["null", "tree"]}]}],
            r"column 'x\.up' of .* is the record tree, which contains itself",
        ),
        (["null", "row"], r"column 'x' of .* is the record row, which contains itself"),
    ],
)
def test_avro_types_that_tables_lack_are_refused(tmp_path: Path, kind: Any, message: str) -> None:
    path = write_avro(tmp_path / "a.avro", record(x=kind), [{"x": None if kind[0] == "null" else 1}])
    with pytest.raises(ArgumentError, match=message):
        Avro(path)


def test_types_of_one_name_are_distinguished_by_their_namespaces(tmp_path: Path) -> None:
    def kind(member: str, **more: Any) -> Any:
        return {"type": "record", "name": "R", "fields": [{"name": member, "type": "long"}], **more}

    columns = {"x": kind("x", namespace="a"), "y": kind("y", namespace="b"), "z": kind("z"), "a": "a.R", "r": "R"}
    inner = {"type": "record", "name": "I", "namespace": "b", "fields": [{"name": "y", "type": "R"}]}
    schema = {**record(**columns, i=inner), "namespace": "own"}
    row = {"x": {"x": 1}, "y": {"y": 2}, "z": {"z": 3}, "a": {"x": 4}, "r": {"z": 5}, "i": {"y": {"y": 6}}}
    (sample,) = Avro(write_avro(tmp_path / "a.avro", schema, [row]), nulls=0)
    assert sample == row


def test_avro_values_that_are_no_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"a\.avro holds values that are not records, such as 'long'"):
        Avro(write_avro(tmp_path / "a.avro", "long", [1]))


def test_a_null_of_avro_is_named(tmp_path: Path) -> None:
    path = write_avro(tmp_path / "a.avro", record(x=["null", "long"]), [{"x": 1}, {"x": None}])
    with pytest.raises(SampleError, match=r"a\.avro, row 1: column 'x' is null"):
        Avro(path)[1]


@pytest.mark.parametrize("cut", [0, 3, 30, 0.5, -1, -20])
def test_truncated_avro_is_named(tmp_path: Path, cut: float) -> None:
    rows = [{"x": i} for i in range(1000)]
    data = write_avro(tmp_path / "a.avro", record(x="long"), rows, sync_interval=100).read_bytes()
    (tmp_path / "a.avro").write_bytes(data[: int(len(data) * cut) if isinstance(cut, float) else cut])
    with pytest.raises(SampleError, match=r"a\.avro cannot be read: it is damaged, truncated, or not Avro"):
        Avro(tmp_path)


def test_a_damaged_block_of_avro_is_named(tmp_path: Path) -> None:
    rows = [{"x": f"text {i}"} for i in range(100)]
    path = write_avro(tmp_path / "a.avro", record(x="string"), rows, sync_interval=100, codec="deflate")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(SampleError, match=r"a\.avro"):
        Avro(path).__getitems__(range(100))


def test_images_in_avro(tmp_path: Path) -> None:
    import PIL.Image

    file = io.BytesIO()
    PIL.Image.new("RGB", (40, 30), "red").save(file, "PNG")
    path = write_avro(
        tmp_path / "a.avro", record(image="bytes", label="long"), [{"image": file.getvalue(), "label": 3}]
    )
    data = Avro(path, transform={"image": fl.transforms.Resize((8, 8))})
    assert data[0]["image"].shape == (8, 8, 3)


def test_an_empty_file(tmp_path: Path) -> None:
    assert len(Avro(write_avro(tmp_path / "a.avro", record(x="long"), []))) == 0
    assert len(Arrow(pa.table({"x": pa.array([], pa.int64())}))) == 0


@pytest.mark.parametrize("word", ["type", "fields", "name"])
def test_an_avro_schema_that_is_none(tmp_path: Path, word: str) -> None:
    nested = record(y="long") | {"name": "inner"}
    path = write_avro(tmp_path / "a.avro", record(x=nested), [{"x": {"y": 1}}])
    head, _, rest = path.read_bytes().rpartition(f'"{word}"'.encode())
    path.write_bytes(head + f'"{word[::-1]}"'.encode() + rest)
    with pytest.raises(SampleError, match=r"a\.avro cannot be read: it is damaged"):
        Avro(path)[0]


@pytest.mark.parametrize("codec", ["deflate", "snappy", "bzip2", "xz"])
def test_damaged_content_of_a_block_is_named(tmp_path: Path, codec: str) -> None:
    path = write_avro(tmp_path / "a.avro", record(t="string"), [{"t": "text" * 100}], codec=codec)
    data = bytearray(path.read_bytes())
    data[-30:-20] = b"\xff" * 10  # before the marker of 16 bytes
    path.write_bytes(data)
    with pytest.raises(SampleError, match=r"a\.avro.* cannot be read: it is damaged"):
        Avro(path)[0]
