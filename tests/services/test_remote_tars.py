"""Tars in a real S3 bucket and on a real web server, through loaders with threads and processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ceph import S3
from fault_proxy import FaultProxy, Faults

import feedline as fl
from feedline import transforms as T
from feedline.datasets import TarShards
from feedline.rows import torch_empty
from feedline.shards import ShardError
from feedline.stores import AccessDeniedError, Cache, FromEnv, ObjectChangedError, ObjectNotFoundError
from format_cases import equal
from packing_cases import feedline
from tar_cases import picture_shards, pictures, write_tar

CROP = T.Compose([T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.ToTensor()])
SIZES = [7, 1, 12, 9, 11]
PAIR = ("jpg", "cls")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty samples in five shards, with their indexes."""
    folder = tmp_path_factory.mktemp("shards")
    picture_shards(folder, SIZES)
    TarShards(folder)
    return folder


@pytest.fixture(scope="module")
def bucket(s3: S3, folder: Path) -> str:
    return s3.bucket({f"train/{path.name}": path.read_bytes() for path in folder.glob("*.tar")})


@pytest.fixture
def options(s3: S3, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Those of the server, such that they reach other processes."""
    return travelling(s3, monkeypatch)


def travelling(server: S3, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("TARS_KEY", server.access_key_id)
    monkeypatch.setenv("TARS_SECRET", server.secret_access_key)
    keys = {"access_key_id": FromEnv("TARS_KEY"), "secret_access_key": FromEnv("TARS_SECRET")}
    return {"endpoint": server.endpoint, **keys}


def batches(data: TarShards, *, workers: int = 0, method: str = "thread", shards: bool = False) -> list[Any]:
    with loading(data, workers, method, shards=shards) as loader:
        return list(loader)


def loading(data: TarShards, workers: int = 0, method: str = "thread", *, shards: bool = False) -> Any:
    order = fl.samplers.ShardShuffled(data.shard_sizes.tolist(), 5, 2) if shards else fl.samplers.Shuffled(len(data), 5)
    how: Any = {"num_workers": workers, "worker_method": method} if workers else {}
    return fl.DataLoader(data, 6, sampler=order, seed=7, **how)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("method", ["thread", "process"])
def test_loaders_deliver_what_files_give(
    folder: Path, bucket: str, options: dict[str, Any], tmp_path: Path, method: str, cached: bool
) -> None:
    cache = Cache(tmp_path / "cache", limit="100 MB", piece_nbytes=50_000) if cached else None
    near = TarShards(folder, PAIR, CROP)
    far = TarShards(f"s3://{bucket}/train/train-{{000..004}}.tar", PAIR, CROP, cache=cache, options=options)
    for shards in (False, True):
        assert equal(batches(far, workers=2, method=method, shards=shards), batches(near, shards=shards))


@pytest.mark.parametrize("method", ["thread", "process"])
def test_a_run_goes_on_exactly(folder: Path, bucket: str, options: dict[str, Any], tmp_path: Path, method: str) -> None:
    wanted = batches(TarShards(folder, PAIR, CROP))
    far = TarShards(f"s3://{bucket}/train", PAIR, CROP, cache=tmp_path / "cache", options=options)
    with loading(far, 2, method) as first:
        begun = [batch for _, batch in zip(range(3), first, strict=False)]
        state = json.loads(json.dumps(first.state_dict()))
    with loading(TarShards(f"s3://{bucket}/train", PAIR, CROP, options=options)) as second:
        second.load_state_dict(state)
        assert equal(begun + list(second), wanted)


@pytest.mark.parametrize("cached", [False, True])
def test_faults_change_nothing(
    folder: Path,
    bucket: str,
    faulty_s3: tuple[S3, FaultProxy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cached: bool,
) -> None:
    server, proxy = faulty_s3
    kinds = ("reset", "503", "slow", "truncated", "short")
    proxy.faults = Faults(share=0.05, slow_s=0.05, kinds=kinds)
    store = {"options": travelling(server, monkeypatch), "cache": tmp_path / "cache" if cached else None}
    far = TarShards(f"s3://{bucket}/train/*.tar", PAIR, CROP, **store)  # type: ignore[arg-type]
    wanted = batches(TarShards(folder, PAIR, CROP))
    for _ in range(3):
        assert equal(batches(far, workers=2), wanted)
    if not cached:
        assert sum(proxy.happened[kind] for kind in kinds)


def test_a_batch_costs_one_request_for_each_shard(bucket: str, options: dict[str, Any]) -> None:
    far = TarShards(f"s3://{bucket}/train", PAIR, CROP, options=options)
    before = fl.stores.statistics().requests
    far.gather(np.array([0, 7, 8, 20, 29]), torch_empty)
    assert fl.stores.statistics().requests - before == len(SIZES)


def test_what_changes_goes_or_is_cut(s3: S3, options: dict[str, Any], tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", pictures(4))
    bucket = s3.bucket({"x.tar": path.read_bytes()})
    address = f"s3://{bucket}/x.tar"
    data = TarShards(address, PAIR, CROP, options=options)
    s3.put(bucket, {"x.tar": write_tar(tmp_path / "x.tar", pictures(4, 4)).read_bytes()})
    with pytest.raises(ObjectChangedError, match=rf"{address} changed: .* make the dataset anew"):
        data.gather(np.array([1]), torch_empty)
    assert TarShards(address, PAIR, CROP, options=options)[0][1] == 4
    s3.put(bucket, {"x.tar": path.read_bytes()[:-11_000]})
    with pytest.raises(ShardError, match=rf"{address} is truncated: member .* allow_truncated=True"):
        TarShards(address, options=options)
    assert 0 < len(TarShards(address, options=options, allow_truncated=True)) < 4
    with pytest.raises(ObjectNotFoundError, match=rf"s3://{bucket}/y.tar"):
        TarShards(f"s3://{bucket}/{{x,y}}.tar", options=options)
    stranger = s3.other_user().options
    with pytest.raises(AccessDeniedError, match=address):
        TarShards(address, options=stranger)


def test_indexes_made_by_the_command_and_put_beside_the_objects(
    s3: S3, folder: Path, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("ACCESS_KEY_ID", s3.access_key_id),
        ("SECRET_ACCESS_KEY", s3.secret_access_key),
        ("ENDPOINT_URL", s3.endpoint),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    bucket = s3.bucket({path.name: path.read_bytes() for path in folder.glob("*.tar")})
    assert feedline("index", f"s3://{bucket}/*.tar", "--into", tmp_path / "in").exit_code == 0
    assert feedline("index", f"s3://{bucket}/*.tar", "--into", tmp_path / "in", "--check").exit_code == 0
    s3.put(bucket, {path.name: path.read_bytes() for path in (tmp_path / "in" / bucket).iterdir()})
    before = fl.stores.statistics().nbytes
    data = TarShards(f"s3://{bucket}", PAIR, CROP, options=options)
    indexes = sum(path.stat().st_size for path in (tmp_path / "in" / bucket).iterdir())
    assert fl.stores.statistics().nbytes - before == indexes
    assert len(data) == sum(SIZES)


@pytest.mark.parametrize("method", ["thread", "process"])
def test_a_web_server(web: str, web_root: Path, folder: Path, tmp_path: Path, method: str) -> None:
    for path in folder.glob("train-*"):  # with indexes, which carry the times of the files
        (web_root / path.name).write_bytes(path.read_bytes())
    far = TarShards(f"{web}/train-{{000..004}}.tar", PAIR, CROP, cache=tmp_path / "cache")
    near = TarShards(folder, PAIR, CROP)
    assert equal(batches(far, workers=2, method=method), batches(near))
    with pytest.raises(ObjectNotFoundError, match=r"train-005.tar"):
        TarShards(f"{web}/train-{{000..005}}.tar")
