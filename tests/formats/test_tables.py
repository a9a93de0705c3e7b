"""Parquet and Arrow in a store: what is special to their indexes, their buffers and their damage."""

from __future__ import annotations

import io
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from format_cases import equal

from feedline import stores
from feedline.datasets import Arrow, Parquet
from feedline.datasets.indexes import IndexFileWarning, key_of
from feedline.errors import ArgumentError, SampleError
from feedline.stores.fsspec import ForeignStore
from formats.places import Memory, Place
from formats.tables import arrow, parquet

N = 300
TABLE = pa.table(
    {
        "x": np.arange(N, dtype=np.float32),
        "s": [f"text {i}" for i in range(N)],
        "n": [{"a": i, "b": [i] * (i % 3)} for i in range(N)],
        "v": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2 * N, dtype=np.int16)), 2),
        "wide": [bytes(range(200)) * 40] * N,
    }
)


WRITERS: dict[str, tuple[type, str, Callable[[Any], bytes]]] = {
    "parquet": (Parquet, "parquet", parquet),
    "file": (Arrow, "arrow", arrow),
    "stream": (Arrow, "arrow", lambda table: arrow(table, stream=True)),
    "compressed": (Arrow, "arrow", lambda table: arrow(table, compression="zstd")),
}


class Both(Memory):
    """A store in memory, and a folder with the same content."""

    def __init__(self, folder: Path) -> None:
        super().__init__("memory://bucket")
        self.folder = folder

    def write(self, name: str, data: bytes) -> None:
        super().write(name, data)
        Place(str(self.folder)).write(name, data)


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Both]:
    place = Both(tmp_path / "files")
    yield place
    place.clear()


@pytest.fixture(params=WRITERS)
def written(request: pytest.FixtureRequest, bucket: Both) -> type:
    """Two files of the kind in the bucket, and the dataset that reads them."""
    dataset, suffix, write = WRITERS[request.param]
    bucket.write(f"0.{suffix}", write(TABLE.slice(0, 170)))
    bucket.write(f"1.{suffix}", write(TABLE.slice(170)))
    return dataset


def test_rows_of_unequal_lengths(written: type, bucket: Both) -> None:
    near, far = written(bucket.folder), written(bucket.root)
    order = np.random.default_rng(0).permutation(N).tolist()
    assert far.shard_sizes.tolist() == near.shard_sizes.tolist()
    assert equal(far.__getitems__(order), near.__getitems__(order))


def test_only_the_new_object_is_read(bucket: Both) -> None:
    bucket.write("a.parquet", parquet(TABLE.slice(0, 50)))
    bucket.write("b.parquet", parquet(TABLE.slice(50, 50)))
    Parquet(bucket.root)
    bucket.write("c.parquet", parquet(TABLE.slice(100, 3)))
    bucket.write("a.parquet", parquet(TABLE.slice(7, 1)))
    before = stores.statistics().nbytes
    dataset = Parquet(bucket.root, ["x"])
    assert stores.statistics().nbytes - before < 2 * 70_000
    assert [dataset[i]["x"].item() for i in (0, 1, -1)] == [7, 50, 102]


def test_a_damaged_or_missing_index_is_built_again(written: type, bucket: Both, tmp_path: Path) -> None:
    dataset = written(bucket.root, ["x"], index_dir=tmp_path / "here")
    (index,) = (tmp_path / "here").iterdir()
    index.unlink()
    assert pickle.loads(pickle.dumps(dataset))[200]["x"].item() == 200
    for damaged in (b"", b"nonsense", b"feedline arrays\n" + bytes(200)):
        index.write_bytes(damaged)
        assert written(bucket.root, ["x"], index_dir=tmp_path / "here")[5]["x"].item() == 5
        assert len(index.read_bytes()) > 300


def test_what_has_no_version_is_kept_in_no_index() -> None:
    assert key_of("ftp://host/a.parquet", stores.ObjectInfo("a.parquet", 5, "5 bytes")) is None
    keys = {key_of("s3://bucket/a.parquet", stores.ObjectInfo("a.parquet", 5, version)) for version in ("x", "y")}
    assert len(keys) == 2


def test_where_no_index_can_be_written_a_warning_says_so(written: type, bucket: Both, tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"")
    with pytest.warns(IndexFileWarning, match=r"the index .*taken/.* could not be written .* give index_dir="):
        dataset = written(bucket.root, ["x"], index_dir=tmp_path / "taken")
    assert dataset[299]["x"].item() == 299
    assert pickle.loads(pickle.dumps(dataset))[299]["x"].item() == 299


def test_only_the_chosen_columns_are_read(bucket: Both) -> None:
    bucket.write("a.parquet", parquet(TABLE, row_group_size=150))
    dataset = Parquet(bucket.root, ["x", "n"])
    before = stores.statistics()
    dataset.__getitems__([0, 299])
    after = stores.statistics()
    assert after.nbytes - before.nbytes < 20_000 < len(parquet(TABLE)) // 100
    assert dataset.decoded.loads == 2


@pytest.mark.parametrize(
    ("how", "cache_nbytes", "wanted_nbytes"),
    [
        ("file", 1 << 20, 100 * (4 + 4)),
        ("stream", 1 << 20, 100 * (4 + 4)),
        ("compressed", 1 << 20, range(100, 1000)),
        ("file", 0, 3 * (4 + 4)),
        ("stream", 0, 3 * (4 + 4)),
        ("compressed", 0, range(100, 1000)),
    ],
)
def test_only_the_buffers_of_the_chosen_columns_are_read(
    bucket: Both, monkeypatch: pytest.MonkeyPatch, how: str, cache_nbytes: int, wanted_nbytes: int | range
) -> None:
    """Bytes of the record batches of three rows, 100 rows each; only those of these rows if nothing is cached."""
    wide = np.random.default_rng(0).bytes(N * 8000)
    table = TABLE.set_column(4, "wide", pa.array([wide[8000 * row :][:8000] for row in range(N)]))
    bucket.write("a.arrow", arrow(table, stream=how == "stream", compression="lz4" if how == "compressed" else None))
    dataset, read_many = Arrow(bucket.root, ["v", "x"], cache_nbytes=cache_nbytes), ForeignStore.read_many
    asked: list[tuple[int, int]] = []

    def recorded(store: ForeignStore, path: str, ranges: Any, **more: Any) -> Any:
        asked.extend(ranges)
        return read_many(store, path, ranges, **more)

    monkeypatch.setattr(ForeignStore, "read_many", recorded)
    before = stores.statistics().nbytes
    assert [sample["x"].item() for sample in dataset.__getitems__([0, 45, 299])] == [0, 45, 299]
    asked_nbytes = sum(stop - start for start, stop in asked)
    assert asked_nbytes in wanted_nbytes if isinstance(wanted_nbytes, range) else asked_nbytes == wanted_nbytes
    assert stores.statistics().nbytes - before < 5000 < len(wide) // 100


def test_files_and_objects_mix(bucket: Both) -> None:
    bucket.write("a.parquet", parquet(TABLE.slice(0, 50)))
    bucket.write("a.arrow", arrow(TABLE.slice(0, 50)))
    for dataset, suffix in ((Parquet, "parquet"), (Arrow, "arrow")):
        mixed = dataset([f"{bucket.root}/a.{suffix}", bucket.folder / f"a.{suffix}"], ["x"])
        assert [mixed[i]["x"].item() for i in (7, 57)] == [7, 7]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_what_is_not_there_is_named(bucket: Both, suffix: str) -> None:
    bucket.write("other.txt", b"")
    dataset = Parquet if suffix == "parquet" else Arrow
    with pytest.raises(stores.ObjectNotFoundError, match=rf"memory://bucket/{suffix}/none\.x.* no such object"):
        dataset(f"{bucket.root}/{suffix}/none.x")
    with pytest.raises(stores.ObjectNotFoundError, match=rf"no object in it matches \*\*/\*\.{{?{suffix}"):
        dataset(f"{bucket.root}/")
    with pytest.raises(ArgumentError, match="neither obstore nor fsspec"):
        dataset(f"nothing-like-it://bucket/x.{suffix}")


def test_a_truncated_object_is_named(written: type, bucket: Both) -> None:
    (path,) = (path for path in bucket.system.find("/bucket") if "/1." in path)
    data = bucket.system.cat(path)
    for cut in (0, 3, 7, 9, 100, len(data) // 2, -1, -20):
        bucket.system.pipe(path, data[:cut])
        with pytest.raises(SampleError, match=r"memory://bucket/1\.\w+ cannot be read: it is damaged"):
            written(bucket.root)


def test_a_damaged_page_is_named_with_its_row_group(bucket: Both) -> None:
    data = bytearray(parquet(TABLE.select(["x"]), write_page_checksum=True, use_dictionary=False))
    data[300] ^= 0xFF
    bucket.write("bad.parquet", bytes(data))
    dataset = Parquet(bucket.root)
    assert dataset[299]["x"].item() == 299
    with pytest.raises(SampleError, match=r"row group \d of memory://bucket/bad\.parquet cannot be read"):
        dataset.__getitems__(range(100))


def test_a_null_is_named_by_object_and_row(bucket: Both) -> None:
    table = pa.table({"x": [1.0, 2.0, None, 4.0]})
    bucket.write("a.parquet", parquet(table, row_group_size=2))
    bucket.write("a.arrow", arrow(table, rows=2))
    with pytest.raises(SampleError, match=r"memory://bucket/a\.parquet, row 2 \(row group 1\): column 'x' is null"):
        Parquet(bucket.root)[2]
    with pytest.raises(SampleError, match=r"memory://bucket/a\.arrow, row 2: column 'x' is null"):
        Arrow(bucket.root)[2]


def test_another_schema_is_named(written: type, bucket: Both) -> None:
    (path,) = (path for path in bucket.system.find("/bucket") if "/1." in path)
    write = parquet if written is Parquet else arrow
    bucket.system.pipe(path, write(pa.table({"x": [1]})))
    with pytest.raises(SampleError, match=r"column 'x' is float in memory://bucket/0.*int64 in memory://bucket/1"):
        written(bucket.root, ["x"])


def test_footers_that_are_longer_than_what_is_read_first(bucket: Both) -> None:
    wide = pa.table({f"column {i}": np.arange(50) + i for i in range(120)})
    bucket.write("wide.parquet", parquet(wide, row_group_size=5))
    bucket.write("wide.arrow", arrow(wide, rows=5))
    assert len(bucket.system.cat("/bucket/wide.parquet")) > 150_000
    for dataset in (Parquet(bucket.root, ["column 77"]), Arrow(bucket.root, ["column 77"])):
        assert [sample["column 77"].item() for sample in dataset.__getitems__([0, 49])] == [77, 126]


def test_first_reading_is_reported(bucket: Both, caplog: pytest.LogCaptureFixture) -> None:
    bucket.write("a.parquet", parquet(TABLE))
    bucket.write("a.arrow", arrow(TABLE, stream=True))
    with caplog.at_level(logging.INFO, "feedline"):
        Parquet(bucket.root)
        Arrow(bucket.root)
    assert "reading the Parquet footers of 1 files, beginning with memory://bucket/a.parquet" in caplog.text
    assert "memory://bucket/a.arrow is an Arrow stream, which has no table of contents" in caplog.text


def test_an_object_without_rows_or_row_groups(bucket: Both) -> None:
    for suffix, dataset, write in (("parquet", Parquet, parquet), ("arrow", Arrow, arrow)):
        bucket.write(f"0.{suffix}", write(TABLE.slice(0, 0)))
        assert len(dataset(bucket.root)) == 0
        bucket.write(f"1.{suffix}", write(TABLE.slice(5, 1)))
        assert dataset(bucket.root)[0]["x"].item() == 5


def test_a_fork_reads_for_itself(written: type, bucket: Both) -> None:
    dataset = written(bucket.root, ["x"])
    assert dataset[0]["x"].item() == 0
    child = os.fork()
    if child == 0:
        os._exit(0 if dataset[299]["x"].item() == 299 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_two_readers_are_refused(bucket: Both) -> None:
    for name, value in {"cache": "/nowhere", "options": {}}.items():
        with pytest.raises(ArgumentError, match=f"{name}= cannot be combined with filesystem="):
            Parquet("x.parquet", filesystem=pa.fs.LocalFileSystem(), **{name: value})


class TestDictionaries:
    """Dictionaries of Arrow have their own messages, which a batch needs as well."""

    @staticmethod
    def batches() -> list[Any]:
        texts = [["a", "b", "a"], ["b", "c", "d"], ["e", "e", "f"]]
        arrays = [pa.array(each).dictionary_encode() for each in texts]
        return [pa.record_batch({"t": each, "x": pa.array([1, 2, 3])}) for each in arrays]

    @pytest.mark.parametrize("deltas", [False, True], ids=["replaced", "deltas"])
    def test_that_change_within_a_stream(self, bucket: Both, deltas: bool) -> None:
        file, batches = io.BytesIO(), self.batches()
        if deltas:
            grown = [pa.array(list("abcdef")[:count]) for count in (2, 4, 6)]
            codes = [[0, 1, 0], [1, 2, 3], [4, 4, 5]]
            arrays = [
                pa.DictionaryArray.from_arrays(pa.array(c, pa.int32()), g) for c, g in zip(codes, grown, strict=True)
            ]
            batches = [pa.record_batch({"t": each, "x": pa.array([1, 2, 3])}) for each in arrays]
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=deltas)
        with pa.ipc.new_stream(file, batches[0].schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
        bucket.write("t.arrow", file.getvalue())
        dataset = Arrow(bucket.root)
        assert "".join(sample["t"] for sample in dataset.__getitems__(range(9))) == "ababcdeef"
        assert dataset[8]["t"] == "f"
        assert Arrow(bucket.folder).__getitems__([4])[0]["t"] == "c"

    def test_of_a_file(self, bucket: Both) -> None:
        table = pa.Table.from_batches(self.batches()).unify_dictionaries()
        bucket.write("t.arrow", arrow(table))
        assert "".join(sample["t"] for sample in Arrow(bucket.root).__getitems__(range(9))) == "ababcdeef"
