"""Damaged streams of ORC files are errors, whatever pyarrow's reader would do; undamaged ones are read."""

from __future__ import annotations

import datetime as dt
import io
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.orc
import pytest
from diagonals import diagonal_by_day
from hypothesis import given
from hypothesis import strategies as st
from orc_parts import DATA, DICTIONARY_DATA, LENGTH, PRESENT, ROW_INDEX, SECONDARY, ORCParts, varint

from feedline.core.run_lengths import run_length_values
from feedline.datasets import ORC
from feedline.datasets.tables import orc_stripes
from feedline.datasets.tables.orc_layout import ORCType, read_layout
from feedline.errors import SampleError

N = 3000
TABLE = pa.table(
    {
        "number": pa.array([i * i % 1000 for i in range(N)], pa.int64()),
        "flag": [None if i % 7 == 0 else i % 2 == 0 for i in range(N)],
        "byte": pa.array([i % 100 for i in range(N)], pa.int8()),
        "text": [None if i % 5 == 0 else f"text {i % 50}" * (i % 4) for i in range(N)],
        "data": [bytes([i % 256]) * (i % 9) for i in range(N)],
        "list": [None if i % 11 == 0 else [i] * (i % 5) for i in range(N)],
        "deep": [[[str(j)] * (j % 3) for j in range(i % 4)] for i in range(N)],
        "flags": [[None, True, False][: i % 4] for i in range(N)],
        "halves": [[i / 2] * (i % 3) for i in range(N)],
        "struct": [None if i % 3 == 0 else {"a": i, "t": [f"t{i % 7}"]} for i in range(N)],
        "structs": [[{"a": i, "d": Decimal(i) / 4}] * (i % 3) for i in range(N)],
        "map": pa.array([[(f"k{j}", i) for j in range(i % 3)] for i in range(N)], pa.map_(pa.string(), pa.int64())),
        "time": pa.array([i * 1_234_567 for i in range(N)], pa.timestamp("ns")),
        "day": [dt.date(2020, 1, 1 + i % 28) for i in range(N)],
        "price": pa.array([Decimal(i) / 4 for i in range(N)], pa.decimal128(9, 2)),
        "wide": pa.array([Decimal(-i) / 8 for i in range(N)], pa.decimal128(30, 3)),
    }
)
CODECS = ("uncompressed", "zlib", "snappy", "lz4", "zstd")


def orc(table: Any = TABLE, **options: Any) -> bytes:
    file = io.BytesIO()
    pyarrow.orc.write_table(table, file, **{"compression": "zlib", **options})
    return file.getvalue()


def decoded(path: Path, data: bytes) -> Any:
    path.write_bytes(data)
    chunks = ORC(path).chunks
    return [chunks.decoded(number) for number in range(len(chunks.sizes))]


@pytest.mark.parametrize(
    ("coded", "written"),
    diagonal_by_day([*product(CODECS, [0]), ("zstd", None)], [*product([0.0, 1.0], ["0.11", "0.12"])]),
)
def test_undamaged_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coded: tuple[str, int | None], written: tuple[float, str]
) -> None:
    (codec, few_items), (words, version) = coded, written
    if few_items is not None:  # so that the items of short lists are counted, too
        monkeypatch.setattr(orc_stripes, "_FEW_ITEMS", few_items)
    options = {"dictionary_key_size_threshold": words, "file_version": version, "stripe_size": 20_000}
    path = tmp_path / "a.orc"
    path.write_bytes(orc(compression=codec, batch_size=500, **options))
    names = [name for name in TABLE.column_names if TABLE[name].null_count == 0 and name != "flags"]
    data, rows = ORC(path, names), TABLE.select(names).to_pylist()
    for at in (0, 1, N // 2, N - 1):
        sample, row = data[at], rows[at]
        assert (sample["number"].item(), sample["data"], sample["deep"]) == (row["number"], row["data"], row["deep"])
        assert (sample["price"].item(), sample["wide"].item()) == (float(row["price"]), float(row["wide"]))
        assert [tuple(each.values()) for each in sample["map"]] == row["map"]
        assert sample["halves"].tolist() == row["halves"]
    assert len(decoded(path, path.read_bytes())) == len(data.shard_sizes)
    assert len(decoded(path, ORCParts(path.read_bytes()).joined())) == len(data.shard_sizes)


def lengths_of(values: Sequence[int], version: int) -> bytes:
    """A run of at most 128 integers of 64 bits."""
    if version == 1:
        return bytes([256 - len(values)]) + b"".join(map(varint, values))
    return bytes([0x40 | 31 << 1, len(values) - 1]) + np.array(values, ">u8").tobytes()


DAMAGE = [
    ("text", LENGTH, [(1 << 64) - 1, 5], "claims a length of -1 bytes"),
    ("text", LENGTH, [1 << 40], "claims 1099511627776 bytes, and has at most"),
    ("text", LENGTH, [(1 << 63) - 1] * 2, "claims 9223372036854775807 bytes"),
    ("data", LENGTH, [(1 << 64) - 9, 9], "claims a length of -9 bytes"),
    ("list", LENGTH, [1 << 50], "claims 1125899906842624 items, and has at most"),
    ("list", LENGTH, [(1 << 64) - 1], "claims a length of -1 items"),
    ("map", LENGTH, [1 << 50], "claims 1125899906842624 items, and has at most"),
    ("deep", LENGTH, [1 << 50], "claims 1125899906842624 items, and has at most"),
    ("structs", LENGTH, [1 << 50], "claims 1125899906842624 items, and has at most"),
    ("price", SECONDARY, [3], "claims decimals of scales from -2 to 0"),
    ("wide", SECONDARY, [1 << 40], "claims decimals of scales from 0 to 549755813888"),
]


@pytest.mark.parametrize(("name", "kind", "values", "problem"), DAMAGE)
@pytest.mark.parametrize(("codec", "version"), [("uncompressed", 1), ("zlib", 2)])
def test_lengths_and_scales_that_end_the_process_are_errors(
    tmp_path: Path, codec: str, version: int, name: str, kind: int, values: list[int], problem: str
) -> None:
    parts = ORCParts(orc(TABLE.select([name])[:50], compression=codec, file_version=f"0.1{version}"))
    first = next(stream for stream in parts.stripes[0].streams if stream.kind == kind)
    first.content = lengths_of([*values, *[0] * (50 - len(values))], version)
    with pytest.raises(SampleError, match=rf"stripe 0 of .*a\.orc cannot be read: .*column '{name}' {problem}"):
        decoded(tmp_path / "a.orc", parts.joined())


def test_a_dictionary_that_claims_too_many_words_is_an_error(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"] * 100})
    parts = ORCParts(orc(table, dictionary_key_size_threshold=1.0))
    encoding = parts.stripes[0].encodings[1]
    assert encoding[2] == 2
    encoding[2] = (1 << 32) - 1
    with pytest.raises(SampleError, match=r"column 'text' claims a dictionary of 4294967295 words, and has 2"):
        decoded(tmp_path / "a.orc", parts.joined())


def test_a_type_that_is_no_number_is_none() -> None:
    parts = ORCParts(orc(pa.table({"x": [1]})))
    at = [number for number, _, _ in parts.footer].index(4) + 1
    parts.footer[at] = (4, 2, b"\x0a\x01\x04")
    data = parts.joined()
    layout = read_layout(len(data), lambda ranges: [memoryview(data)[start:stop] for start, stop in ranges])
    assert layout.types == [(ORCType.STRUCT, [1]), (ORCType.BOOLEAN, [])]


FILES = [
    orc(TABLE[:60], compression="uncompressed", dictionary_key_size_threshold=words, file_version=version)
    for words, version in product([0.0, 1.0], ["0.11", "0.12"])
]


@given(st.data())
def test_damaged_streams_never_end_the_process(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    parts = ORCParts(data.draw(st.sampled_from(FILES)))
    stream = data.draw(st.sampled_from([each for each in parts.stripes[0].streams if each.kind < ROW_INDEX]))
    changed = bytearray(stream.content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(changed) - 1)))
        changed[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    stream.content = bytes(changed)
    assert stream.kind in (PRESENT, DATA, LENGTH, DICTIONARY_DATA, SECONDARY)
    with suppress(SampleError):
        decoded(tmp_path_factory.getbasetemp() / "a.orc", parts.joined())


@given(st.sampled_from([1, 2]), st.binary(min_size=1, max_size=40), st.integers(1, 8))
def test_integers_are_those_of_pyarrow(version: int, data: bytes, rows: int) -> None:
    """Otherwise a check of the lengths would prove nothing about what pyarrow reads."""
    parts = ORCParts(
        orc(pa.table({"x": pa.array(range(rows))}), compression="uncompressed", file_version=f"0.1{version}")
    )
    next(stream for stream in parts.stripes[0].streams if stream.kind == DATA).content = data
    try:
        values = run_length_values(data, version, signed=True)
    except ValueError:
        return
    if len(values) >= rows:
        read = pyarrow.orc.ORCFile(io.BytesIO(parts.joined())).read()["x"].to_pylist()
        assert read == values[:rows].tolist()
