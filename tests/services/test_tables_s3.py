"""Parquet and Arrow in object storage, through the loader: what the files on the disk give, whatever happens."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ceph import S3
from fault_proxy import KINDS, FaultProxy, Faults
from torch.utils.data import DataLoader

import feedline as fl
from feedline import stores
from feedline.datasets import Arrow, Parquet
from feedline.errors import SampleError
from feedline.tree import leaves

FILES, ROWS, GROUP = 6, 500, 100
KEYS = {"access_key_id": stores.FromEnv("TEST_S3_KEY"), "secret_access_key": stores.FromEnv("TEST_S3_SECRET")}


def table(number: int) -> Any:
    rows = np.arange(number * ROWS, (number + 1) * ROWS)
    rng = np.random.default_rng(number)
    return pa.table(
        {
            "x": rows,
            "v": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(rows, 8).astype(np.float32)), 8),
            "text": [f"row {row}" for row in rows],
            "ballast": [rng.bytes(1000) for _ in rows],
        }
    )


def parquet(number: int) -> bytes:
    file = io.BytesIO()
    pq.write_table(table(number), file, row_group_size=GROUP)
    return file.getvalue()


def arrow(number: int) -> bytes:
    file, made = io.BytesIO(), table(number)
    new = pa.ipc.new_stream if number % 2 else pa.ipc.new_file
    with new(file, made.schema) as writer:
        writer.write_table(made, max_chunksize=GROUP)
    return file.getvalue()


class Source(NamedTuple):
    """A format, and where it lies: on the disk, and in a bucket."""

    dataset: Any
    folder: Path
    bucket: str

    def near(self) -> Any:
        return self.dataset(self.folder, ["x", "v"])

    def far(self, server: S3, columns: Any = ("x", "v"), **arguments: Any) -> Any:
        options = {"endpoint": server.endpoint, **KEYS}
        return self.dataset(f"s3://{self.bucket}/data", list(columns), options=options, **arguments)


@pytest.fixture(autouse=True)
def environment(s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEST_S3_KEY", s3.access_key_id)
    monkeypatch.setenv("TEST_S3_SECRET", s3.secret_access_key)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture(scope="module", params=["parquet", "arrow"])
def source(request: pytest.FixtureRequest, s3: S3, tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp(request.param)
    write = parquet if request.param == "parquet" else arrow
    objects = {f"data/part={n % 2}/{n}.{request.param}": write(n) for n in range(FILES)}
    for path, data in objects.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return Source(Parquet if request.param == "parquet" else Arrow, folder / "data", s3.bucket(objects))


def same(ours: Any, theirs: Any) -> bool:
    pairs = list(zip(leaves(ours), leaves(theirs), strict=True))
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def batches(dataset: Any, **workers: Any) -> list[Any]:
    with fl.DataLoader(dataset, 64, shuffle=True, seed=7, **workers) as loader:
        return list(loader)


@pytest.mark.parametrize("cached", [False, True], ids=["direct", "cached"])
@pytest.mark.parametrize("method", ["thread", "process"])
def test_batches_are_those_of_the_files(s3: S3, source: Source, method: str, cached: bool, tmp_path: Path) -> None:
    far = source.far(s3, cache=tmp_path / "cache" if cached else None)
    ours = batches(far, num_workers=2, worker_method=method)
    assert len(ours) == -(-FILES * ROWS // 64)
    assert all(map(same, ours, batches(source.near())))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes:UserWarning")
def test_torchs_own_loader_reads_it_too(s3: S3, source: Source, tmp_path: Path) -> None:
    far = source.far(s3, cache=tmp_path / "cache")
    assert far[3]["x"].item() >= 0  # open before the fork
    assert all(map(same, DataLoader(far, 100, num_workers=2), DataLoader(source.near(), 100)))


@pytest.mark.parametrize("method", ["thread", "process"])
def test_resumed_in_the_midst_of_an_epoch(s3: S3, source: Source, method: str, tmp_path: Path) -> None:
    far, whole = source.far(s3, cache=tmp_path / "cache", cache_nbytes=20_000), batches(source.near())
    workers: Any = {"num_workers": 2, "worker_method": method}
    with fl.DataLoader(far, 64, shuffle=True, seed=7, **workers) as loader:
        delivered = iter(loader)
        seen = [next(delivered) for _ in range(11)]
        state = json.loads(json.dumps(loader.state_dict()))
    with fl.DataLoader(pickle.loads(pickle.dumps(far)), 64, shuffle=True, seed=7, **workers) as loader:
        loader.load_state_dict(state)
        seen += list(loader)
    assert len(seen) == len(whole)
    assert all(map(same, seen, whole))


def test_faults_change_nothing(faulty_s3: tuple[S3, FaultProxy], source: Source, tmp_path: Path) -> None:
    server, proxy = faulty_s3
    kinds = tuple(kind for kind in KINDS if kind != "503 Retry-After")
    proxy.faults = Faults(share=0.05, slow_s=0.1, kinds=kinds)
    expected = batches(source.near())
    small = stores.Cache(tmp_path / "cache", piece_nbytes=50_000)
    for arguments in ({"cache": small}, {"cache_nbytes": 50_000}):
        for method in ("thread", "process"):
            far = source.far(server, **arguments)
            assert all(map(same, batches(far, num_workers=2, worker_method=method), expected))
    assert sum(proxy.happened[kind] for kind in kinds) > 5


def test_it_is_opened_again_by_one_listing(s3: S3, source: Source) -> None:
    source.far(s3)
    before = stores.statistics()
    source.far(s3)
    after = stores.statistics()
    # is it an object, what is in it, and of Parquet: is it a Delta table
    most = 3 if source.dataset is Parquet else 2
    assert (after.nbytes - before.nbytes, after.requests - before.requests <= most) == (0, True)


def test_of_parquet_little_is_read(s3: S3) -> None:
    bucket = s3.bucket({f"data/part={n % 2}/{n}.parquet": parquet(n) for n in range(FILES)})
    source = Source(Parquet, Path(), bucket)
    source.far(s3)
    before = stores.statistics().nbytes
    far = source.far(s3, ["x", "part"], filters=[("part", "=", 1), ("x", "<", 600)])
    assert [sample["x"].item() for sample in far.__getitems__(range(len(far)))] == list(range(500, 600))
    assert stores.statistics().nbytes - before < 5000
    assert len(source.far(s3, ["x"], filters=[("part", "=", 0)])) == FILES * ROWS // 2


@pytest.mark.parametrize(("cache_nbytes", "step", "share"), [(1 << 20, 10, 10), (0, 1000, 100)])
def test_of_arrow_little_is_read(s3: S3, cache_nbytes: int, step: int, share: int) -> None:
    objects = {f"data/{n}.arrow": arrow(n) for n in range(FILES)}
    source = Source(Arrow, Path(), s3.bucket(objects))
    far = source.far(s3, ["x", "v"], cache_nbytes=cache_nbytes)
    before = stores.statistics().nbytes
    places = list(range(0, len(far), step))
    assert [sample["x"].item() for sample in far.__getitems__(places)] == places
    assert stores.statistics().nbytes - before < sum(map(len, objects.values())) // share


def test_what_changed_or_went_is_named(s3: S3, source: Source) -> None:
    write, suffix = (parquet, "parquet") if source.dataset is Parquet else (arrow, "arrow")
    bucket = s3.bucket({f"data/{n}.{suffix}": write(n) for n in range(2)})
    far = source._replace(bucket=bucket).far(s3)
    s3.put(bucket, {f"data/0.{suffix}": write(3)})
    with pytest.raises(stores.ObjectChangedError, match=rf"s3://{bucket}/data/0\.{suffix}.* changed: version"):
        far[0]
    loader = fl.DataLoader(far, 100, num_workers=2, worker_method="process")
    with loader, pytest.raises(stores.ObjectChangedError, match=r"(?i)make the dataset anew"):
        list(loader)
    assert source._replace(bucket=bucket).far(s3)[0]["x"].item() == 3 * ROWS
    with pytest.raises(stores.ObjectNotFoundError, match=rf"s3://{bucket}/none\.{suffix}"):
        source.dataset(f"s3://{bucket}/none.{suffix}", options={"endpoint": s3.endpoint, **KEYS})
    s3.put(bucket, {f"data/1.{suffix}": write(1)[:-30]})
    with pytest.raises(SampleError, match=rf"s3://{bucket}/data/1\.{suffix}"):
        source._replace(bucket=bucket).far(s3)


def test_over_plain_http(source: Source, web: str, web_root: Path) -> None:
    suffix = "parquet" if source.dataset is Parquet else "arrow"
    (web_root / f"0.{suffix}").write_bytes((source.folder / f"part=0/0.{suffix}").read_bytes())
    far = source.dataset(f"{web}/0.{suffix}", ["x", "v"])
    assert all(map(same, batches(far), batches(source.dataset(source.folder / "part=0" / f"0.{suffix}", ["x", "v"]))))
