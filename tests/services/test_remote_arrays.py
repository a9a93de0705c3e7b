"""Arrays, chunks, files and pictures in a real S3: the batches are those of this machine, whoever loads them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ceph import S3
from fault_proxy import FaultProxy, Faults

import feedline as fl
from far_cases import CASES, COUNT, manifest
from feedline.datasets import HDF5, ArrayFile, Files, ImageFolder
from feedline.errors import SampleError
from feedline.stores import AccessDeniedError, FromEnv, ObjectChangedError, ObjectNotFoundError, StoreError, statistics
from format_cases import equal

KINDS = ("reset", "503", "slow", "truncated", "short")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case, in a folder of its own name."""
    folder = tmp_path_factory.mktemp("cases")
    for name, case in CASES.items():
        (folder / name).mkdir()
        case.write(folder / name)
    return folder


@pytest.fixture(scope="module")
def bucket(s3: S3, folder: Path) -> str:
    """The same in a bucket."""
    return s3.bucket(contents(folder))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.fixture(autouse=True)
def secret(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options may travel to workers if their secrets do not; indexes stay in the test's folder."""
    monkeypatch.setenv("FAR_SECRET", s3.secret_access_key)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def options(server: S3) -> dict[str, Any]:
    access = {"access_key_id": FromEnv("FAR_KEY"), "secret_access_key": FromEnv("FAR_SECRET")}
    return {"endpoint": server.endpoint, **access}


@pytest.fixture(autouse=True)
def key(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAR_KEY", s3.access_key_id)


def loader(data: Any, workers: int = 0, method: str = "auto") -> Any:
    return fl.DataLoader(data, 2, shuffle=True, seed=3, num_workers=workers, worker_method=method, collate_fn=list)


def epoch(data: Any) -> list[Any]:
    with loader(data) as whole:
        return list(whole)


@pytest.mark.parametrize(("workers", "method"), [(2, "process"), (2, "thread")])
@pytest.mark.parametrize("name", CASES)
def test_batches_are_those_of_this_machine_and_go_on_where_they_stopped(
    s3: S3, bucket: str, folder: Path, tmp_path: Path, name: str, workers: int, method: str
) -> None:
    case = CASES[name]
    kept = {"cache": tmp_path / "cache"} if case.needs_cache or method == "process" else {}
    far = case.open(f"s3://{bucket}/{name}", options=options(s3), **kept)
    with loader(far, workers, method) as first:
        begun = [batch for _, batch in zip(range(1), first, strict=False)]
        state = first.state_dict()
    with loader(far) as second:
        second.load_state_dict(state)
        assert equal(begun + list(second), epoch(case.open(str(folder / name))))


def test_a_manifest(s3: S3, bucket: str, folder: Path, tmp_path: Path) -> None:
    near, root = folder / "files", f"s3://{bucket}/files"
    wanted = epoch(manifest(str(near), str(near)))
    for more in ({}, {"cache": tmp_path / "cache"}):
        far = manifest(root, str(near), options=options(s3), **more)
        with loader(far, 2, "process") as loaded:
            assert equal(list(loaded), wanted)


@pytest.fixture
def faulty(faulty_s3: tuple[S3, FaultProxy]) -> Iterator[S3]:
    server, proxy = faulty_s3
    proxy.faults = Faults(share=0.05, slow_s=0.05, kinds=KINDS)
    yield server
    assert sum(proxy.happened[kind] for kind in KINDS)


def test_faults_on_one_request_in_twenty_change_nothing(faulty: S3, bucket: str, folder: Path, tmp_path: Path) -> None:
    for name, case in CASES.items():
        wanted = epoch(case.open(str(folder / name)))
        for kept in ({}, {"cache": tmp_path / "cache"}) if not case.needs_cache else ({"cache": tmp_path / "cache"},):
            far = case.open(f"s3://{bucket}/{name}", options=options(faulty), **kept)
            assert equal(epoch(far), wanted), name


def test_small_objects_cost_one_request_each(s3: S3, bucket: str) -> None:
    data = Files(f"s3://{bucket}/files/*.txt", options=options(s3))
    data[0]
    before = first_requests()
    data.__getitems__(list(range(COUNT)))
    assert first_requests() - before == COUNT


def first_requests() -> int:
    now = statistics()
    return now.requests - now.retries - now.hedges


def test_a_second_run_asks_for_no_data(s3: S3, bucket: str, tmp_path: Path) -> None:
    for name in ("npy", "tokens", "hdf5", "folder"):
        for run in range(2):
            far = CASES[name].open(f"s3://{bucket}/{name}", options=options(s3), cache=tmp_path / "cache")
            before = statistics().nbytes
            epoch(far)
            assert run == 0 or statistics().nbytes == before


def test_a_web_server_lists_nothing_and_need_not(web: str, web_root: Path, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, web_root / "cases", dirs_exist_ok=True)
    for name in ("npy", "tokens across files", "documents", "hdf5", "zarr 3", "lmdb in one file"):
        case, root = CASES[name], f"{web}/cases/{name}"
        far = case.open(root, cache=tmp_path / "cache")
        assert equal(epoch(far), epoch(case.open(str(folder / name)))), name
    far = Files([f"{web}/cases/files/{i:02}.txt" for i in range(COUNT)], decode="text")
    assert epoch(far) == epoch(CASES["files"].open(str(folder / "files")))
    with pytest.raises(StoreError, match="web servers do not list; name the objects"):
        ImageFolder(f"{web}/cases/folder")


class TestBadObjects:
    def test_missing(self, s3: S3, bucket: str, tmp_path: Path) -> None:
        more = {"options": options(s3), "cache": tmp_path / "cache"}
        for name, case in CASES.items():
            with pytest.raises((ObjectNotFoundError, FileNotFoundError, SampleError), match=f"s3://{bucket}/nowhere"):
                case.open(f"s3://{bucket}/nowhere/{name}", **more)

    def test_gone_later(self, s3: S3, folder: Path) -> None:
        """Files are told apart from what a manifest or a listing promises of them."""
        objects = contents(folder / "files")
        del objects["07.txt"]
        bucket = s3.bucket(objects)
        far = manifest(f"s3://{bucket}", str(folder / "files"), options=options(s3))
        with pytest.raises(ObjectNotFoundError, match=r"'07.txt' of row 7 \(id = 7\) of the query .* does not exist"):
            far.__getitems__([3, 7])
        with fl.DataLoader(far, 10, on_error="skip", num_workers=2, worker_method="process") as loaded:
            assert sum(len(batch["id"]) for batch in loaded) == COUNT - 1

    def test_changed(self, s3: S3, folder: Path, tmp_path: Path) -> None:
        np.save(tmp_path / "x.npy", np.zeros((1000, 100)))
        bucket = s3.bucket({"x.npy": (tmp_path / "x.npy").read_bytes(), **contents(folder / "hdf5")})
        rows = ArrayFile(f"s3://{bucket}/x.npy", options=options(s3))
        chunks = HDF5(f"s3://{bucket}/a.h5", "chunked", options=options(s3))
        rows[0], chunks[0]
        s3.put(bucket, {"x.npy": bytes(800_128), "a.h5": bytes(50_000)})
        with pytest.raises(ObjectChangedError, match=f"s3://{bucket}/x.npy.* changed"):
            rows.__getitems__([500, 900])
        with pytest.raises(ObjectChangedError, match=f"s3://{bucket}/a.h5.* changed"):
            chunks[50]

    def test_truncated(self, s3: S3, folder: Path) -> None:
        objects = {**contents(folder / "npy"), **contents(folder / "hdf5")}
        bucket = s3.bucket({name: data[: len(data) * 2 // 3] for name, data in objects.items()})
        with pytest.raises(SampleError, match=rf"s3://{bucket}/x.npy is truncated"):
            ArrayFile(f"s3://{bucket}/x.npy", options=options(s3))
        with pytest.raises(SampleError, match=rf"s3://{bucket}/a.h5 cannot be opened as an HDF5 file .*truncated"):
            HDF5(f"s3://{bucket}/a.h5", "flat", options=options(s3))

    def test_damaged_pictures_are_left_out(self, s3: S3, folder: Path) -> None:
        objects = contents(folder / "folder")
        names = sorted(objects)
        bucket = s3.bucket({**objects, names[3]: b"no picture", names[9]: objects[names[9]][:200]})
        far = ImageFolder(f"s3://{bucket}", fl.transforms.Resize((8, 8)), options=options(s3))
        with fl.DataLoader(far, 10, on_error="skip", seed=0, num_workers=2, worker_method="process") as loaded:
            assert sum(len(labels) for _, labels in loaded) == COUNT - 2

    def test_denied(self, s3: S3, bucket: str) -> None:
        wrong = {**options(s3), "secret_access_key": "wrong"}
        for name in ("npy", "hdf5", "zarr 3", "files", "folder"):
            with pytest.raises(AccessDeniedError, match=f"s3://{bucket}/"):
                CASES[name].open(f"s3://{bucket}/{name}", options=wrong)
