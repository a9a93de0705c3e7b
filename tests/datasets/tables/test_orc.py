"""ORC: every codec and type of other writers' files, only the chosen columns, and damage by name."""

from __future__ import annotations

import datetime as dt
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
import torch

import feedline as fl
from feedline.datasets import ORC, Parquet
from feedline.errors import SampleError
from feedline.stores.fsspec import ForeignStore

N = 5000
TABLE = pa.table(
    {
        **{f"column {number}": np.arange(N) + number for number in range(40)},
        "text": [f"text {i}" for i in range(N)],
        "list": [[i] * (i % 3) for i in range(N)],
    }
)


def write_orc(path: Path, table: Any, **options: Any) -> Path:
    pyarrow.orc.write_table(table, path, **{"stripe_size": 1 << 16, "batch_size": 500, **options})
    return path


@pytest.mark.parametrize("codec", ["uncompressed", "zlib", "snappy", "lz4", "zstd"])
def test_orc_of_every_codec(tmp_path: Path, codec: str) -> None:
    data = ORC(write_orc(tmp_path / "a.orc", TABLE, compression=codec), ["text", "column 7", "list"])
    assert data.shard_sizes.sum() == N
    for at in (0, 1, N // 2, N - 1):
        sample = data[at]
        assert (sample["text"], sample["column 7"].item()) == (f"text {at}", at + 7)
        assert sample["list"].tolist() == [at] * (at % 3)


@pytest.mark.parametrize("codec", ["uncompressed", "lz4"])
def test_of_orc_objects_only_the_chosen_columns_are_read(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    wide = TABLE.append_column("noise", pa.array([np.random.default_rng(i).bytes(100) for i in range(N)]))
    data = write_orc(tmp_path / "a.orc", wide, compression=codec).read_bytes()
    system, read_many = fsspec.filesystem("memory"), ForeignStore.read_many
    system.pipe("/orc/a.orc", data)
    request.addfinalizer(lambda: system.rm("/orc", recursive=True))
    far = ORC("memory://orc/a.orc", ["column 3"], index_dir=tmp_path)
    asked: list[tuple[int, int]] = []

    def recorded(store: ForeignStore, path: str, ranges: Any, **more: Any) -> Any:
        asked.extend(ranges)
        return read_many(store, path, ranges, **more)

    monkeypatch.setattr(ForeignStore, "read_many", recorded)
    assert far[0]["column 3"].item() == 3
    assert 0 < sum(stop - start for start, stop in asked) < len(data) // len(far.shard_sizes) // 10
    assert pickle.loads(pickle.dumps(far))[N - 1]["column 3"].item() == N + 2


def test_types_of_orc(tmp_path: Path) -> None:
    table = pa.table(
        {
            "flag": [True, None],
            "byte": pa.array([1, 2], pa.int8()),
            "day": [dt.date(1970, 1, 2), dt.date(1970, 1, 3)],
            "time": pa.array([1, 2], pa.timestamp("ns")),
            "price": pa.array([Decimal("1.10"), Decimal("-460426.573")], pa.decimal128(12, 3)),
            "map": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
            "data": [b"\0\1", b""],
        }
    )
    data = ORC(write_orc(tmp_path / "a.orc", table), nulls=0)
    first, second = data[0], data[1]
    assert (first["flag"].item(), second["flag"].item(), second["byte"].dtype) == (True, False, torch.int8)
    assert (first["day"].item(), second["time"].item(), second["price"].item()) == (1, 2, -460426.573)
    assert first["map"] == [{"key": "a", "value": 1}]
    assert first["data"] == b"\0\1"


def test_orc_with_a_loader_equals_parquet(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet", row_group_size=500)
    pairs = []
    columns = ["text", "column 9", "list"]
    for data in (ORC(write_orc(tmp_path / "a.orc", TABLE), columns), Parquet(tmp_path / "a.parquet", columns)):
        arguments: Any = {"shuffle": True, "seed": 1, "num_workers": 2, "worker_method": "thread"}
        with fl.DataLoader(data, 500, **arguments, collate_fn=fl.collate.ragged()) as loader:
            pairs.append(list(loader))
    for mine, other in zip(*pairs, strict=True):
        assert mine["text"] == other["text"]
        assert torch.equal(torch.as_tensor(mine["column 9"]), torch.as_tensor(other["column 9"]))


@pytest.mark.parametrize("cut", [0, 3, 100, 0.5, -1, -20])
def test_truncated_orc_is_named(tmp_path: Path, cut: float) -> None:
    data = write_orc(tmp_path / "a.orc", TABLE).read_bytes()
    (tmp_path / "a.orc").write_bytes(data[: int(len(data) * cut) if isinstance(cut, float) else cut])
    with pytest.raises(SampleError, match=r"a\.orc cannot be read: it is damaged, truncated, or not ORC"):
        ORC(tmp_path)


@pytest.mark.parametrize("rows", [5, N])
def test_orc_files_that_cat_has_joined_are_named(tmp_path: Path, rows: int) -> None:
    """The last footer has the places of stripes in the last file, so rows of the first one would be read."""
    data = write_orc(tmp_path / "a.orc", TABLE[:rows]).read_bytes()
    assert len(ORC(tmp_path)) == rows
    for joined in (data * 2, data * 3):
        (tmp_path / "a.orc").write_bytes(joined)
        place = len(joined) - len(data)
        with pytest.raises(SampleError, match=rf"a\.orc .*several files, .* the last one begins at byte {place}\)"):
            ORC(tmp_path)


def test_orc_files_of_other_columns_are_refused(tmp_path: Path) -> None:
    write_orc(tmp_path / "a.orc", pa.table({"x": [1]}))
    write_orc(tmp_path / "b.orc", pa.table({"x": [1.5]}))
    with pytest.raises(SampleError, match=r"column 'x' is int64 in .*a\.orc, but double in .*b\.orc"):
        ORC(tmp_path)


def test_an_empty_orc_file(tmp_path: Path) -> None:
    assert len(ORC(write_orc(tmp_path / "a.orc", pa.table({"x": pa.array([], pa.int64())})))) == 0


def test_an_impossible_compression_block_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    path = write_orc(tmp_path / "a.orc", TABLE[:10], compression="zlib")
    data, block = path.read_bytes(), b"\x10\x01\x18\x80\x80\x04"  # zlib, 64 KiB
    at = data.rindex(block, len(data) - data[-1])
    script = data[at:-1].replace(block, b"\x10\x01\x18\xff\xff\xff\xff\x0f")
    path.write_bytes(data[:at] + script + bytes([data[-1] + 2]))
    with pytest.raises(SampleError, match=r"a\.orc cannot be read: it is damaged.* claims blocks of 4294967295 bytes"):
        ORC(path)
