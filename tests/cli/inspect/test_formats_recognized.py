"""`feedline inspect` of formats other than tars: recognition by file names and markers, and their orders."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from format_cases import hidden
from packing_cases import class_folders, feedline, inspected
from peers import written
from tar_cases import write_tar
from typer.testing import CliRunner

from feedline.cli.app import app
from feedline.cli.inspect.formats import format_of
from feedline.cli.inspect.order import RankLayout, compare_windows
from feedline.datasets import Parquet
from feedline.datasets.formats import FORMATS, KeptShards, ShardSummary
from feedline.errors import ArgumentError, MissingExtraError
from feedline.samplers import ShardShuffled

TABLE = pa.table({"x": np.arange(600.0), "text": [f"row {i}" * 9 for i in range(600)]})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("xdg")))


def parquet(folder: Path) -> None:
    pq.write_table(TABLE, folder / "a.parquet", row_group_size=50)


def hive(folder: Path) -> None:
    (folder / "year=2024").mkdir()
    pq.write_table(TABLE, folder / "year=2024" / "a.parquet", row_group_size=50)
    (folder / "_SUCCESS").touch()


def arrow(folder: Path) -> None:
    with pa.ipc.new_file(folder / "a.arrow", TABLE.schema) as file:
        file.write_table(TABLE, max_chunksize=50)


def jsonl(folder: Path) -> None:
    for name in "ab":
        (folder / f"{name}.jsonl").write_text("".join(f'{{"x": {i}}}\n' for i in range(300)))


def csv(folder: Path) -> None:
    for name in "ab":
        (folder / f"{name}.csv").write_text("x\n" + "".join(f"{i}\n" for i in range(300)))


def packed(write: Callable[[Path], None], folder: Path) -> None:
    write(folder)
    for path in folder.iterdir():
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()


def feather(folder: Path) -> None:
    arrow(folder)
    for path in folder.glob("*.arrow"):
        path.rename(path.with_suffix(".feather"))


def hdf5(folder: Path) -> None:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(6000.0).reshape(600, 10), chunks=(50, 10), compression="gzip")


def zarr_(folder: Path) -> None:
    zarr.open_group(folder, mode="w").create_array("x", data=np.arange(6000.0).reshape(600, 10), chunks=(50, 10))


WRITERS: dict[str, tuple[Callable[[Path], None], int]] = {
    "parquet": (parquet, 12),
    "arrow": (arrow, 12),
    "jsonl": (jsonl, 2),
    "csv": (csv, 2),
    "jsonl.gz": (partial(packed, jsonl), 2),
    "csv.gz": (partial(packed, csv), 2),
    "arrow.feather": (feather, 12),
    "hdf5": (hdf5, 12),
    "zarr": (zarr_, 12),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize("format_", WRITERS)
def test_shards_of_a_folder_and_what_reading_them_brings(format_: str, folder: Path) -> None:
    write, number = WRITERS[format_]
    write(folder)
    before = sorted(folder.rglob("*"))
    found = inspected(folder, "--order", "--window", 2, "--batch-size", 32)
    assert sorted(folder.rglob("*")) == before, "inspecting writes nothing"
    assert (found["format"], found["samples"], len(found["shards"])) == (
        FORMATS[format_.partition(".")[0]].label,
        600,
        number,
    )
    on_disk = sum(path.stat().st_size for path in before if path.is_file())
    assert 0.5 * on_disk < found["nbytes"] <= on_disk
    mixing = ShardShuffled(found["shards"], 0, 2).mixing(32)
    at = next(each for each in found["order"]["windows"] if each["window"] == 2)
    assert (at["same_shard_pairs"], at["shards_per_batch"]) == (mixing.same_shard_pairs, mixing.shards_per_batch)
    assert at["nbytes_per_sample"] == pytest.approx(found["nbytes"] / 600), "everything fits into what is kept"


@pytest.mark.parametrize("format_", [each for each in WRITERS if not each.endswith(".gz")])
def test_stores_tell_the_same(format_: str, folder: Path, memory: Any) -> None:
    WRITERS[format_][0](folder)
    near, far = inspected(folder, "--order"), inspected(put(memory, folder, format_), "--order")
    for same in ("format", "samples", "shards", "nbytes"):
        assert near[same] == far[same]
    for ours, theirs in zip(near["order"]["windows"], far["order"]["windows"], strict=True):
        assert ours == pytest.approx(theirs)


def test_compressed_tars_are_shards(tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()
    for name in "ab":
        write_tar(tmp_path / "plain.tar", {f"{i}.{field}": b"x" for i in range(3) for field in ("txt", "cls")})
        (tmp_path / "tars" / f"{name}.tar.gz").write_bytes(gzip.compress((tmp_path / "plain.tar").read_bytes()))
    found = inspected(tmp_path / "tars")
    assert (found["format"], found["samples"], found["shards"]) == (FORMATS["tar"].label, 6, [3, 3])
    assert inspected(tmp_path / "tars" / "a.tar.gz")["shards"] == [3]


def test_an_npz_archive(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((7, 3)), y=np.arange(7))
    found = inspected(tmp_path / "a.npz")
    assert (found["format"], found["samples"]) == (FORMATS["npy"].label, 7)


def test_parquet_in_folders_that_name_columns(folder: Path) -> None:
    hive(folder)
    found = inspected(folder, "--order")
    assert found["format"] == FORMATS["parquet"].label
    assert found["shards"] == Parquet(str(folder)).shard_sizes.tolist()


@pytest.mark.parametrize(("name", "is_whole"), [("plain", False), ("zstd", True)])
def test_mds(name: str, is_whole: bool) -> None:
    folder = written("mds") / name
    found = inspected(folder, "--order")
    assert (found["format"], found["samples"]) == (FORMATS["mds"].label, 20)
    assert (found["order"]["kept_nbytes"] is not None) == is_whole
    stored = sum(path.stat().st_size for path in folder.iterdir() if ".mds" in path.name)
    assert found["nbytes"] == stored
    assert found["order"]["windows"][0]["nbytes_per_sample"] == pytest.approx(stored / 20)


@pytest.mark.parametrize("name", ["leaves", "chunk", "batch", "sample", "rows", "tokens"])
def test_litdata(name: str) -> None:
    folder = written("litdata_chunks") / name
    found = inspected(folder, "--order")
    assert found["format"] == FORMATS["litdata"].label
    assert len(found["shards"]) > 1
    assert (found["order"]["kept_nbytes"] is not None) == (name == "chunk")


def test_tfrecord() -> None:
    found = inspected(written("examples"), "--order")
    assert found["format"] == FORMATS["tfrecord"].label
    assert len(found["shards"]) == 2


@pytest.mark.parametrize("suffix", ["npy", "h5", "lmdb", "bin"])
def test_what_has_no_shards_is_reported_so_in_words(folder: Path, suffix: str) -> None:
    path = folder / f"a.{suffix}"
    if suffix == "npy":
        np.save(path, np.zeros((600, 3)))
    elif suffix == "h5":
        with h5py.File(path, "w") as file:
            file["x"] = np.zeros((600, 3))
    elif suffix == "lmdb":
        lmdb.open(str(path), map_size=1 << 20).close()
    else:
        path.write_bytes(bytes(6000))
    found = inspected(path, "--order")
    assert found["order"] is None
    assert "there are no shards here" in found["notes"][0]
    assert found["samples"] in (600, None)


def test_row_groups_that_are_not_kept_are_read_again() -> None:
    shards = ShardSummary("row group", [100] * 40, [5000] * 40, KeptShards(10_000, [10_000] * 40))
    found = compare_windows(shards, 4, 32)
    assert found is not None
    one, four, *_, all_ = found.windows
    assert one.nbytes_per_sample == pytest.approx(50)
    kept_one = ShardShuffled([100] * 40, 0, 4).nbytes_per_sample([5000] * 40, 32, kept_shards=1)
    assert four.nbytes_per_sample == pytest.approx(kept_one)
    assert all_.nbytes_per_sample > 10 * four.nbytes_per_sample / 4
    assert four.window_nbytes == 40_000


@pytest.mark.parametrize(
    ("window", "kept"),
    [(3, 1), (6, 3), (12, 6), *(pytest.param(*case, marks=pytest.mark.nightly) for case in [(3, 6), (12, 1)])],
)
def test_row_groups_are_read_as_often_as_announced(folder: Path, window: int, kept: int) -> None:
    pq.write_table(TABLE.select(["x"]), folder / "a.parquet", row_group_size=50)  # all of one size
    order, announced_reads, read = ShardShuffled([50] * 12, 0, window), 0.0, 0
    for epoch in range(5):
        rows = Parquet(str(folder), cache_nbytes=50 * 8 * kept)
        for start in range(0, 600, 20):
            rows.__getitems__(order.take(epoch, start, min(start + 20, 600)).tolist())
        read += rows.decoded.loads
        announced_reads += order.nbytes_per_sample([1] * 12, 20, epoch, kept_shards=kept) * 600
    assert announced_reads == pytest.approx(read, rel=0.15)


def test_formats_are_distinguished_by_their_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"has no files of a known format: .*\*\.parquet.*LitData.*MDS"):
        feedline("inspect", folder)
    (folder / "labels.csv").write_text("x\n1\n")
    assert format_of([str(folder)]) is FORMATS["csv"]
    class_folders(folder)
    assert format_of([str(folder)]) is FORMATS["imagefolder"]
    write_tar(folder / "a.tar", {"0.txt": b""})
    assert format_of([str(folder)]) is FORMATS["tar"]
    other = tmp_path / "other.jsonl"
    other.write_text("{}\n")
    with pytest.raises(ArgumentError, match=r"holds tar shards, .* holds JSONL: inspect one format"):
        format_of([str(folder), str(other)])
    assert format_of(["s3://bucket/train.tfrecord-00000-of-00016"]) is FORMATS["tfrecord"]
    assert format_of(["s3://bucket/train-{000..127}.tar"]) is FORMATS["tar"]
    assert format_of(["s3://bucket/rows.ndjson.gz"]) is FORMATS["jsonl"]
    assert format_of(["s3://bucket/stream.arrows"]) is FORMATS["arrow"]
    (folder / "x.xyz").touch()
    with pytest.raises(ArgumentError, match=r"x\.xyz has no known format"):
        format_of([str(folder / "x.xyz")])


def test_a_missing_package_is_named_with_its_command(folder: Path) -> None:
    parquet(folder)
    with hidden("pyarrow"), pytest.raises(MissingExtraError, match=r"pip install 'feedline\[arrow\]'$"):
        feedline("inspect", folder, "--order")


def test_no_sheet_of_tables(folder: Path) -> None:
    parquet(folder)
    with pytest.raises(
        ArgumentError, match=r"--contact-sheet draws samples of these formats only: images, tar shards; .*: Parquet"
    ):
        feedline("inspect", folder, "--contact-sheet", folder / "sheet.png")


@pytest.mark.parametrize("columns", [50, 100])
def test_the_table_fits_the_terminal(folder: Path, columns: int) -> None:
    parquet(folder)
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["inspect", str(folder), "--order"])
    output = result.output
    lines = output.splitlines()
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines)
    assert "row groups" in output


def put(memory: Any, folder: Path, format_: str) -> str:
    root = "/far.zarr" if format_ == "zarr" else "/far"
    for path in folder.rglob("*"):
        if path.is_file():
            memory.pipe(f"{root}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return f"memory:/{root}"


def test_each_node_reads_its_share_of_the_shards() -> None:
    shards = ShardSummary("tar", [100] * 4000, [1_000_000] * 4000)
    found = compare_windows(shards, 8, 32, RankLayout(256, 32))
    assert found is not None
    assert found.ranks is not None
    assert found.ranks.shards_per_node <= 4000 / 32 + 2
    assert found.ranks.nbytes_per_node == found.ranks.shards_per_node * 1_000_000
    assert (found.ranks.open_shards, found.ranks.global_batch_size) == (8, 8192)
    assert 0 < found.ranks.same_shard_pairs < 1
    with pytest.raises(ArgumentError, match="--world-size 256: these ranks cannot be divided equally among --nodes 3"):
        compare_windows(shards, 8, 32, RankLayout(256, 3))


@pytest.mark.parametrize("columns", [40, 80])
def test_shares_of_nodes_are_printed(tmp_path: Path, columns: int) -> None:
    pq.write_table(pa.table({"x": list(range(4000))}), tmp_path / "a.parquet", row_group_size=100)
    run = CliRunner(env={"COLUMNS": str(columns)}).invoke
    result = run(app, ["inspect", str(tmp_path), "--order", "--world-size", "8", "--nodes", "4"])
    assert "8 ranks on 4 nodes" in " ".join(result.output.split())
    assert max(map(len, result.output.splitlines())) <= columns
    summary = json.loads(
        run(app, ["inspect", str(tmp_path), "--order", "--world-size", "8", "--nodes", "4", "--json"]).stdout
    )
    assert summary["order"]["ranks"]["shards_per_node"] <= 12
