"""MDS, LitData, TFRecord and texts in object storage, through the loader: what the files give, whatever happens."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ceph import S3
from fault_proxy import KINDS, FaultProxy, Faults
from torch.utils.data import DataLoader

import feedline as fl
from feedline import stores
from feedline.datasets import CSV, TFRecord
from feedline.errors import SampleError
from format_cases import equal
from record_cases import CASES

KEYS = {"access_key_id": stores.FromEnv("TEST_S3_KEY"), "secret_access_key": stores.FromEnv("TEST_S3_SECRET")}


class Source(NamedTuple):
    """A dataset, and where it lies: on the disk, and in a bucket."""

    case: str
    folder: Path
    bucket: str

    def near(self) -> Any:
        return CASES[self.case][1](self.folder)

    def far(self, server: S3, **arguments: Any) -> Any:
        options = {"endpoint": server.endpoint, **KEYS}
        return CASES[self.case][1](f"s3://{self.bucket}/data", options=options, **arguments)


@pytest.fixture(autouse=True)
def environment(s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEST_S3_KEY", s3.access_key_id)
    monkeypatch.setenv("TEST_S3_SECRET", s3.secret_access_key)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture(scope="module")
def source_of(s3: S3, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Source]:
    """What writes the dataset of a case, once."""
    known: dict[str, Source] = {}

    def source_of(case: str) -> Source:
        if case not in known:
            folder = tmp_path_factory.mktemp("data")
            CASES[case][0](folder)
            known[case] = Source(case, folder, s3.bucket(objects(folder)))
        return known[case]

    return source_of


def objects(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and "index" not in path.suffix)
    return {f"data/{path.relative_to(folder)}": path.read_bytes() for path in files}


@pytest.fixture
def source(request: pytest.FixtureRequest, source_of: Callable[[str], Source]) -> Source:
    return source_of(request.param)


every_case = pytest.mark.parametrize("source", CASES, indirect=True)
some_cases = pytest.mark.parametrize(
    "source",
    ["mds, pictures", "mds, zstd", "litdata, many rows", "litdata, tokens", "tfrecord, pictures", "jsonl"],
    indirect=True,
)


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def batches(dataset: Any, **workers: Any) -> list[Any]:
    """An epoch; of samples that do not collate, as lists."""
    collate = None if "crop" in str(getattr(dataset, "gather", "")) or isinstance(dataset[0], torch.Tensor) else as_list
    with fl.DataLoader(dataset, 4, shuffle=True, seed=7, collate_fn=collate, **workers) as loader:
        return list(loader)


@every_case
def test_batches_are_those_of_the_files(s3: S3, source: Source, tmp_path: Path) -> None:
    expected = batches(source.near())
    for method, arguments in (("thread", {}), ("process", {"cache": tmp_path / "cache"})):
        found = batches(source.far(s3, **arguments), num_workers=2, worker_method=method)
        assert equal(found, expected)


@pytest.mark.parametrize(
    "source", ["mds, pictures", "litdata, pictures", "tfrecord, pictures", "litdata, tokens"], indirect=True
)
def test_whole_batches_are_gathered_in_workers(s3: S3, source: Source, tmp_path: Path) -> None:
    def epoch(dataset: Any, **workers: Any) -> list[Any]:
        assert hasattr(dataset, "gather")
        with fl.DataLoader(dataset, 4, shuffle=True, seed=7, **workers) as loader:
            return list(loader)

    far = source.far(s3, cache=tmp_path / "cache")
    expected = epoch(source.near())
    for method in ("thread", "process"):
        assert equal(epoch(far, num_workers=2, worker_method=method), expected)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes:UserWarning")
@some_cases
def test_torchs_own_loader_reads_it_too(s3: S3, source: Source) -> None:
    far, near = source.far(s3), source.near()
    assert len([far[0]]) == 1  # open before the fork
    if "pictures" in source.case:  # drawn from torch's own generators
        assert len(list(DataLoader(far, 8, num_workers=2))) == -(-len(near) // 8)
    else:
        ours, theirs = (list(DataLoader(each, 8, num_workers=2, collate_fn=as_list)) for each in (far, near))
        assert equal(ours, theirs)


@pytest.mark.parametrize("method", ["thread", "process"])
@some_cases
def test_resumed_in_the_midst_of_an_epoch(s3: S3, source: Source, method: str, tmp_path: Path) -> None:
    far, near = source.far(s3, cache=tmp_path / "cache"), source.near()
    settings: Any = {"shuffle": True, "seed": 3, "collate_fn": as_list}
    workers: Any = {"num_workers": 2, "worker_method": method}
    with fl.DataLoader(near, 4, **settings) as loader:
        whole = list(loader)
    with fl.DataLoader(far, 4, **settings, **workers) as loader:
        delivered = iter(loader)
        seen = [next(delivered) for _ in range(2)]
        state = json.loads(json.dumps(loader.state_dict()))
    with fl.DataLoader(pickle.loads(pickle.dumps(far)), 4, **settings, **workers) as loader:
        loader.load_state_dict(state)
        seen += list(loader)
    assert equal(seen, whole)


@some_cases
def test_faults_change_nothing(faulty_s3: tuple[S3, FaultProxy], source: Source, tmp_path: Path) -> None:
    server, proxy = faulty_s3
    kinds = tuple(kind for kind in KINDS if kind != "503 Retry-After")
    proxy.faults = Faults(share=0.05, slow_s=0.1, kinds=kinds)
    expected = batches(source.near())
    for number in range(2):
        assert equal(batches(source.far(server), num_workers=2, worker_method="thread"), expected)
        small = stores.Cache(tmp_path / f"cache {number}", piece_nbytes=500)
        assert equal(batches(source.far(server, cache=small), num_workers=2, worker_method="process"), expected)


def test_it_is_opened_again_by_few_requests(s3: S3, source_of: Callable[[str], Source]) -> None:
    for case in ("mds", "litdata, batches", "tfrecord", "csv"):
        source = source_of(case)
        source.far(s3)
        before = stores.statistics()
        far = source.far(s3)
        after = stores.statistics()
        assert after.nbytes - before.nbytes < 100_000  # index.json
        assert after.requests - before.requests <= len(far.shard_sizes) + 4


def test_a_batch_costs_one_request_for_each_shard_at_most(s3: S3, source_of: Callable[[str], Source]) -> None:
    far = source_of("mds").far(s3)
    far.__getitems__([0])
    before = stores.statistics().requests
    far.__getitems__(list(range(len(far))))
    assert stores.statistics().requests - before <= len(far.shard_sizes)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("mds", "shard.00000.mds"),
        ("mds, zstd", "shard.00000.mds.zstd"),
        ("litdata, batches", "chunk-0-0.bin"),
        ("litdata, tokens", "chunk-0-0.bin"),
        ("tfrecord", "one.tfrecord"),
        ("jsonl", "0.jsonl"),
    ],
)
def test_what_changed_or_went_is_named(s3: S3, source_of: Callable[[str], Source], case: str, name: str) -> None:
    source = source_of(case)
    data = objects(source.folder)
    moved = source._replace(bucket=s3.bucket(data))
    far = moved.far(s3)
    s3.put(moved.bucket, {f"data/{name}": data[f"data/{name}"] + b"?"})
    with pytest.raises(stores.ObjectChangedError, match=rf"s3://{moved.bucket}/data/{name}.* changed: version"):
        far[0]
    loader = fl.DataLoader(far, 4, num_workers=2, worker_method="process", collate_fn=as_list)
    with loader, pytest.raises(stores.ObjectChangedError, match=r"(?i)make the dataset anew"):
        list(loader)
    empty = source._replace(bucket=s3.bucket())
    with pytest.raises(stores.ObjectNotFoundError, match=rf"s3://{empty.bucket}/data"):
        empty.far(s3)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("mds", "shard.00000.mds"),
        ("mds, zstd", "shard.00000.mds.zstd"),
        ("litdata, batches", "chunk-0-0.bin"),
        ("litdata, tokens", "chunk-0-0.bin"),
        ("tfrecord", "one.tfrecord"),
    ],
)
def test_what_is_cut_off_or_missing_is_named(s3: S3, source_of: Callable[[str], Source], case: str, name: str) -> None:
    source = source_of(case)
    data = objects(source.folder)
    half = data[f"data/{name}"][: len(data[f"data/{name}"]) // 2]
    cut = source._replace(bucket=s3.bucket({**data, f"data/{name}": half}))
    with pytest.raises(SampleError, match=rf"s3://{cut.bucket}/data/{name}"):
        cut.far(s3)[0]
    del data[f"data/{name}"]
    gone = source._replace(bucket=s3.bucket(data))
    if case == "tfrecord":  # nothing promises it
        assert len(gone.far(s3)) == 12
    else:
        with pytest.raises(stores.ObjectNotFoundError, match=rf"s3://{gone.bucket}/data/{name}"):
            gone.far(s3)


@pytest.mark.parametrize("case", ["mds", "litdata, many rows", "tfrecord", "csv"])
def test_over_plain_http(source_of: Callable[[str], Source], web: str, web_root: Path, case: str) -> None:
    source = source_of(case)
    shutil.copytree(source.folder, web_root / case.partition(",")[0], dirs_exist_ok=True)
    address = f"{web}/{case.partition(',')[0]}"
    if case == "tfrecord":
        far = TFRecord(f"{address}/{{one,two}}.tfrecord", {"label": "int64", "name": "text"})
    elif case == "csv":
        far = CSV(f"{address}/{{0..2}}.csv", {"x": int, "name": str})
    else:
        far = CASES[case][1](address)
    indices = [0, 5, len(far) - 1, 5]
    assert equal(far.__getitems__(indices), source.near().__getitems__(indices))
