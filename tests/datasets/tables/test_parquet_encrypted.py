"""Encrypted Parquet files: named as such without keys, and read with them."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

import feedline as fl
from feedline.datasets import Parquet
from feedline.errors import SampleError

ROWS = 300


class Kms(pe.KmsClient):
    """Wraps keys without a secret."""

    def __init__(self, _: Any) -> None:
        super().__init__()

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return base64.b64encode(master_key_identifier.encode() + b":" + key_bytes)

    def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
        name, _, key = base64.b64decode(wrapped_key).partition(b":")
        assert name.decode() == master_key_identifier
        return key


FACTORY = pe.CryptoFactory(Kms)


def keys() -> Any:
    return FACTORY.file_decryption_properties(pe.KmsConnectionConfig(), pe.DecryptionConfiguration())


def write(path: Path, table: Any, *, plain_footer: bool) -> None:
    config = pe.EncryptionConfiguration(footer_key="f", column_keys={"c": ["x"]}, plaintext_footer=plain_footer)
    properties = FACTORY.file_encryption_properties(pe.KmsConnectionConfig(), config)
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table, row_group_size=100)


@pytest.fixture(params=[False, True], ids=["encrypted footer", "plain footer"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    for number in range(2):
        table = pa.table({"x": range(ROWS * number, ROWS * (number + 1)), "s": [f"text {i}" for i in range(ROWS)]})
        write(tmp_path / f"{number}.parquet", table, plain_footer=request.param)
    return tmp_path


def test_without_keys_it_is_named(folder: Path) -> None:
    for number in range(2):
        with pytest.raises(SampleError, match=r"0\.parquet cannot be decrypted \(.*\); pass decryption=, a function"):
            Parquet(folder, ["x"])[number]


def test_plain_columns_need_no_keys(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"x": [1], "s": ["text"]}), plain_footer=True)
    assert Parquet(tmp_path, ["s"])[0] == {"s": "text"}


@pytest.mark.parametrize("place", ["local", "store"])
def test_with_keys_it_is_read(
    folder: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    root = str(folder)
    if place == "store":
        fsspec.filesystem("memory").put(f"{folder}/*.parquet", "/encrypted/")
        root = "memory://encrypted"
        request.addfinalizer(lambda: fsspec.filesystem("memory").rm("/encrypted", recursive=True))
    data = Parquet(root, decryption=keys)
    assert [sample["x"].item() for sample in data.__getitems__([599, 0, 250])] == [599, 0, 250]
    assert data[301] == {"x": data[301]["x"], "s": "text 1"}
    assert len(Parquet(root, decryption=keys, filters=[("x", "<", 50)])) == 50
    with fl.DataLoader(
        data, 100, num_workers=2, seed=0, worker_method="process" if place == "local" else "thread"
    ) as it:
        assert [x for batch in it for x in batch["x"].tolist()] == list(range(600))
    assert pickle.loads(pickle.dumps(data))[7]["x"].item() == 7
    assert not list(tmp_path.glob("xdg/**/*.index"))
