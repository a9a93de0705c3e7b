"""Single formats in a real S3 or on a web server: requests, torch's own loader, failures in workers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pytest
from ceph import S3
from format_cases import equal
from packing_cases import feedline
from tar_cases import image_shards
from torch.utils.data import DataLoader

import feedline as fl
from feedline.datasets import Arrow, ImageFolder, Parquet, TarShards
from feedline.stores import ObjectChangedError, ObjectNotFoundError, StoreError, statistics
from formats.files import COUNT, manifest, write_texts
from formats.format import contents, epoch
from formats.places import Bucket, options
from formats.suite import FORMATS
from formats.tables import arrow, parquet
from formats.tars import CENTER, PAIR

ROWS, GROUP, FILES = 500, 100, 6
SIZES = [7, 1, 12, 9, 11]


@pytest.fixture(autouse=True)
def keys(s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Worker processes find the keys in the environment, and the command where it looks for them."""
    for name, value in (("KEY", s3.access_key_id), ("SECRET", s3.secret_access_key)):
        monkeypatch.setenv(f"SUITE_{name}", value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_access_key)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture(scope="module")
def bucket(s3: S3) -> str:
    return s3.bucket()


@pytest.fixture
def put(s3: S3, bucket: str) -> Callable[[dict[str, bytes]], Bucket]:
    """Function that puts files into a new folder of the bucket."""

    def put(files: dict[str, bytes]) -> Bucket:
        place = Bucket(s3, bucket, uuid4().hex)
        place.fill(files)
        return place

    return put


@pytest.fixture
def filled(put: Callable[[dict[str, bytes]], Bucket], tmp_path: Path) -> Callable[[str], tuple[Any, Bucket, Path]]:
    """Function that opens a format of the suite with files in the bucket; with the place and the folder."""

    def filled(name: str) -> tuple[Any, Bucket, Path]:
        folder = tmp_path / name
        folder.mkdir()
        FORMATS[name].write(folder)
        place = put(contents(folder))
        return lambda **more: FORMATS[name].open(place.root, **place.store, **more), place, folder

    return filled


def table(number: int) -> Any:
    rows, rng = np.arange(number * ROWS, (number + 1) * ROWS), np.random.default_rng(number)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(rows, 8).astype(np.float32)), 8)
    return pa.table({"x": rows, "v": vectors, "ballast": [rng.bytes(1000) for _ in rows]})


def first_requests() -> int:
    now = statistics()
    return now.requests - now.retries - now.hedges


@pytest.mark.parametrize("name", ["parquet, chosen columns", "mds, zstd", "jsonl"])
def test_torchs_own_loader_reads_it_too(filled: Any, name: str) -> None:
    opened, _, _ = filled(name)
    far = opened()
    assert len([far[0]]) == 1  # open before the fork
    batches = DataLoader(far, 8, num_workers=2, collate_fn=list)
    assert equal([sample for batch in batches for sample in batch], epoch(far))


@pytest.mark.parametrize("name", ["parquet, chosen columns", "mds, zstd", "jsonl"])
def test_worker_processes_name_an_object_that_changed(filled: Any, name: str) -> None:
    opened, place, folder = filled(name)
    far = opened()
    for file, data in contents(folder).items():
        place.write(file, data + b"?")
    loader = fl.DataLoader(far, 4, num_workers=2, worker_method="process", collate_fn=list)
    with loader, pytest.raises(ObjectChangedError, match=r"(?i)create the dataset again"):
        list(loader)


def test_damaged_images_are_left_out(filled: Any) -> None:
    _, place, folder = filled("folder")
    names = sorted(contents(folder))
    place.write(names[3], b"no image")
    place.write(names[9], contents(folder)[names[9]][:200])
    far = ImageFolder(place.root, fl.transforms.Resize((8, 8)), **place.store)
    with fl.DataLoader(far, 10, on_error="skip", seed=0, num_workers=2, worker_method="process") as loaded:
        assert sum(len(labels) for _, labels in loaded) == COUNT - 2


def test_rows_of_a_manifest_with_missing_files_are_left_out(put: Any, tmp_path: Path) -> None:
    write_texts(tmp_path)
    place = put({name: data for name, data in contents(tmp_path).items() if name != "07.txt"})
    far = manifest(place.root, **place.store)
    with pytest.raises(ObjectNotFoundError, match=r"'07.txt' of row 7 \(id = 7\) of the query .* does not exist"):
        far.__getitems__([3, 7])
    with fl.DataLoader(far, 10, on_error="skip", num_workers=2, worker_method="process") as loaded:
        assert sum(len(batch["id"]) for batch in loaded) == COUNT - 1


class TestRequests:
    def test_small_objects_cost_one_each(self, filled: Any) -> None:
        opened, _, _ = filled("files")
        data = opened()
        data[0]
        before = first_requests()
        data.__getitems__(list(range(COUNT)))
        assert first_requests() - before == COUNT

    @pytest.mark.parametrize("name", ["mds", "tar, crops"])
    def test_a_batch_costs_one_for_each_shard(self, filled: Any, name: str) -> None:
        far = filled(name)[0]()
        far.__getitems__([0])
        before = statistics().requests
        far.__getitems__(list(range(len(far))))
        assert statistics().requests - before <= len(far.shard_sizes)

    @pytest.mark.parametrize("name", ["mds", "litdata, batches", "tfrecord", "csv", "parquet in folders"])
    def test_opening_again_costs_few(self, filled: Any, name: str) -> None:
        opened, _, _ = filled(name)
        opened()
        before = statistics()
        far = opened()
        after = statistics()
        assert after.nbytes - before.nbytes < 100_000  # index.json
        # for folders of Parquet: is it an object, its listing, is it a table of Hudi, Delta or Iceberg
        most = 5 if name == "parquet in folders" else len(far.shard_sizes) + 4
        assert after.requests - before.requests <= most

    def test_of_parquet_little_is_read(self, put: Any) -> None:
        place = put({f"part={n % 2}/{n}.parquet": parquet(table(n), row_group_size=GROUP) for n in range(FILES)})
        Parquet(place.root, **place.store)
        before = statistics().nbytes
        far = Parquet(place.root, ["x", "part"], filters=[("part", "=", 1), ("x", "<", 600)], **place.store)
        assert [sample["x"].item() for sample in far.__getitems__(range(len(far)))] == list(range(500, 600))
        assert statistics().nbytes - before < 5000
        assert len(Parquet(place.root, ["x"], filters=[("part", "=", 0)], **place.store)) == FILES * ROWS // 2

    @pytest.mark.parametrize(("cache_nbytes", "step", "share"), [(1 << 20, 10, 10), (0, 1000, 100)])
    def test_of_arrow_little_is_read(self, put: Any, cache_nbytes: int, step: int, share: int) -> None:
        objects = {f"{n}.arrow": arrow(table(n), stream=bool(n % 2), rows=GROUP) for n in range(FILES)}
        place = put(objects)
        far = Arrow(place.root, ["x", "v"], cache_nbytes=cache_nbytes, **place.store)
        before = statistics().nbytes
        places = list(range(0, len(far), step))
        assert [sample["x"].item() for sample in far.__getitems__(places)] == places
        assert statistics().nbytes - before < sum(map(len, objects.values())) // share


@pytest.mark.parametrize("markers", [[], ["/"], ["", "/_SUCCESS"], ["/", "/year=1/"], ["_$folder$"]], ids=str)
def test_markers_of_folders_are_no_data(put: Any, markers: list[str]) -> None:
    """Spark, consoles and rclone leave empty objects that stand for folders."""
    place = put({f"lake/t.parquet{marker}": b"" for marker in markers})
    place.fill({f"lake/t.parquet/year=1/{n}.parquet": parquet(table(n)) for n in range(2)})
    for path in ("lake/t.parquet", "lake/t.parquet/", "lake", "lake/**/*.parquet"):
        data = Parquet(f"{place.root}/{path}", ["x", "year"], **place.store)
        assert [data[at]["x"].item() for at in (0, -1)] == [0, 2 * ROWS - 1]
        assert data[0]["year"].item() == 1


class TestTars:
    def test_indexes_made_by_the_command_and_put_next_to_the_objects(self, s3: S3, tmp_path: Path) -> None:
        (tmp_path / "tars").mkdir()
        image_shards(tmp_path / "tars", SIZES)
        bucket = s3.bucket(contents(tmp_path / "tars"))
        assert feedline("index", f"s3://{bucket}/*.tar", "--into", tmp_path / "in").exit_code == 0
        assert feedline("index", f"s3://{bucket}/*.tar", "--into", tmp_path / "in", "--check").exit_code == 0
        indexes = contents(tmp_path / "in" / bucket)
        s3.put(bucket, indexes)
        before = statistics().nbytes
        data = TarShards(f"s3://{bucket}", PAIR, transform=CENTER, options=options(s3))
        assert statistics().nbytes - before == sum(map(len, indexes.values()))
        assert len(data) == sum(SIZES)

    def test_shards_with_indexes_on_a_web_server(self, web: str, web_root: Path, tmp_path: Path) -> None:
        image_shards(tmp_path, SIZES)
        near = TarShards(
            f"{tmp_path}/*.tar", PAIR, transform=CENTER
        )  # writes indexes, which carry the times of the files
        for path in tmp_path.glob("train-*"):
            shutil.copy(path, web_root)
        far = TarShards(f"{web}/train-{{000..004}}.tar", PAIR, transform=CENTER, cache=tmp_path / "cache")
        assert equal(epoch(far, num_workers=2, worker_method="process"), epoch(near))
        with pytest.raises(ObjectNotFoundError, match=r"train-005.tar"):
            TarShards(f"{web}/train-{{000..005}}.tar")


def test_a_web_server_does_not_list(web: str) -> None:
    with pytest.raises(StoreError, match="web servers do not list; name the objects"):
        ImageFolder(f"{web}/cases/folder")
