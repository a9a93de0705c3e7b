"""Tables read by many threads, while caches evict, copies are made, and the loader closes."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fastavro
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
from diagonals import diagonal, diagonal_by_day

import feedline as fl
from feedline.core.caches import LoadingCache
from feedline.datasets import CSV, JSONL, ORC, Arrow, Avro, Parquet

N = 600
TABLE = pa.table({"x": np.arange(N), "t": [f"text {i}" for i in range(N)]})
SCHEMA: Any = {
    "type": "record",
    "name": "row",
    "fields": [{"name": "x", "type": "long"}, {"name": "t", "type": "string"}],
}


def parquet(table: Any, file: Any) -> None:
    pq.write_table(table, file, row_group_size=20)


def arrow(table: Any, file: Any) -> None:
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=20)


def orc(table: Any, file: Any) -> None:
    pyarrow.orc.write_table(table, file, stripe_size=1 << 10, batch_size=20)


def avro(table: Any, file: Any) -> None:
    fastavro.writer(file, SCHEMA, table.to_pylist(), sync_interval=300)


def csv(table: Any, file: Any) -> None:
    file.write(b"x,t\n" + b"".join(b"%d,%s\n" % (row["x"], row["t"].encode()) for row in table.to_pylist()))


def jsonl(table: Any, file: Any) -> None:
    file.write(b"".join(b'{"x": %d, "t": "%s"}\n' % (row["x"], row["t"].encode()) for row in table.to_pylist()))


FORMATS: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], None]]] = {
    "parquet": (lambda path: Parquet(path, cache_nbytes=2000), parquet),
    "arrow": (lambda path: Arrow(path, cache_nbytes=2000), arrow),
    "orc": (lambda path: ORC(path, cache_nbytes=2000), orc),
    "avro": (lambda path: Avro(path, cache_nbytes=2000), avro),
    "csv": (lambda path: CSV(path, {"x": int, "t": str}), csv),
    "jsonl": (JSONL, jsonl),
}


@pytest.fixture(params=FORMATS)
def opened(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Any]]:
    """Opens a format, local or in a store."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    dataset, write = FORMATS[request.param]
    file = io.BytesIO()
    write(TABLE, file)
    (tmp_path / f"t.{request.param}").write_bytes(file.getvalue())
    system = fsspec.filesystem("memory")
    system.pipe(f"/threads/t.{request.param}", file.getvalue())
    roots = {"local": str(tmp_path), "store": "memory://threads"}
    yield lambda place: dataset(f"{roots[place]}/t.{request.param}")
    system.rm("/threads", recursive=True)


def check(sample: Any, at: int) -> None:
    assert (int(sample["x"]), sample["t"]) == (at, f"text {at}")


def test_chunks_that_another_thread_decodes_and_evicts_meanwhile(
    opened: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, looks = opened("store"), np.random.default_rng(0)
    monkeypatch.setattr(LoadingCache, "__contains__", lambda *_: bool(looks.integers(2)))
    for at, sample in enumerate(data.__getitems__(range(N))):
        check(sample, at)


@pytest.mark.parametrize(("opened", "place"), diagonal_by_day([*FORMATS], ["local", "store"]), indirect=["opened"])
def test_threads_share_a_dataset_whose_cache_is_too_small(opened: Callable[[str], Any], place: str) -> None:
    data, started = opened(place), threading.Barrier(6)

    def read(number: int) -> None:
        rng = np.random.default_rng(number)
        started.wait()
        for _ in range(8):
            indices = rng.integers(0, N, 15).tolist()
            for at, sample in zip(indices, data.__getitems__(indices), strict=True):
                check(sample, at)
            check(data[indices[0]], indices[0])
            if number == 0:  # copies while others read
                check(pickle.loads(pickle.dumps(data))[indices[1]], indices[1])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(read, range(6)))


@pytest.mark.parametrize(("opened", "place"), diagonal([*FORMATS], ["local", "store"]), indirect=["opened"])
def test_a_loader_that_closes_leaves_the_dataset_to_others(opened: Callable[[str], Any], place: str) -> None:
    data, stop = opened(place), threading.Event()

    def read() -> int:
        count = 0
        while not stop.is_set():
            check(data[count % N], count % N)
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(read)
        for _ in range(3):
            with fl.DataLoader(data, 7, num_workers=2, worker_method="thread", shuffle=True, seed=0) as loader:
                for batch, _ in zip(loader, range(3), strict=False):
                    for x, text in zip(batch["x"].tolist(), batch["t"], strict=True):
                        assert text == f"text {x}"
        stop.set()
        assert other.result() > 0
    check(data[0], 0)
