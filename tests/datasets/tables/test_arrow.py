from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from recorder import Recorder
from torch.utils.data import DataLoader, default_collate

import feedline as fl
from feedline.collate.batch_reads import reader_of
from feedline.core import kernels
from feedline.core.dataset import BatchRead
from feedline.core.tree import leaves
from feedline.datasets import Arrow
from feedline.errors import ArgumentError, SampleError, StateError

N = 90
TABLE = pa.table(
    {"x": np.arange(N, dtype=np.float32), "flag": np.arange(N) % 3 == 0, "name": [str(i) for i in range(N)]}
)


def same(ours: Any, theirs: Any) -> bool:
    pairs = list(zip(leaves(ours), leaves(theirs), strict=True))
    return type(ours) is type(theirs) and all(
        a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs
    )


def write(
    path: Path, table: Any = TABLE, *, stream: bool = False, rows: int = 20, compression: str | None = None
) -> Path:
    path.parent.mkdir(exist_ok=True)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


@pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_files_and_streams_are_read_in_place(tmp_path: Path, stream: bool, compression: str | None) -> None:
    dataset = Arrow(write(tmp_path / "t.arrow", stream=stream, compression=compression))
    assert dataset.shard_sizes.tolist() == [20, 20, 20, 20, 10]
    indices, empty = [89, 0, -90, 41, 41], Recorder()
    theirs = default_collate([dataset[i] for i in indices])
    batch = dataset.read_batch(BatchRead(np.array(indices), empty))
    assert same(batch, theirs)
    assert empty.holds(batch)
    assert same(default_collate(dataset.__getitems__(indices)), theirs)
    assert (dataset[41]["x"].item(), dataset[42]["flag"].item(), dataset[-1]["name"]) == (41.0, True, "89")


def test_nothing_is_copied_on_opening(tmp_path: Path) -> None:
    before = pa.total_allocated_bytes()
    dataset = Arrow(write(tmp_path / "t.arrow", pa.table({"x": np.zeros(1 << 20)}), rows=1 << 16), ["x"])
    assert dataset[5]["x"].item() == 0
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_a_table_in_memory_travels_out_of_band() -> None:
    dataset = Arrow(pa.concat_tables([TABLE, TABLE]))
    buffers: list[Any] = []
    data = pickle.dumps(dataset, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 5000
    assert buffers
    again = pickle.loads(data, buffers=buffers)
    assert (len(again), again[100]["name"]) == (180, "10")


def test_files_travel_by_path(tmp_path: Path) -> None:
    path = write(tmp_path / "t.arrow")
    data = pickle.dumps(Arrow(path))
    assert len(data) < 2000
    assert pickle.loads(data)[3]["name"] == "3"
    write(path, TABLE.slice(1))
    with pytest.raises(StateError, match=r"t\.arrow has changed since this dataset was made"):
        pickle.loads(data)[3]


def test_works_in_both_loaders(tmp_path: Path) -> None:
    dataset = Arrow([write(tmp_path / "a.arrow"), write(tmp_path / "b.arrow", rows=7)])
    assert reader_of(dataset) is not None
    for ours, theirs in zip(fl.DataLoader(dataset, 32, num_workers=2), DataLoader(dataset, 32), strict=True):
        assert same(ours, theirs)


@pytest.mark.parametrize("kind", ["int64", "float32", "bool"])
def test_rows_next_to_a_null_can_be_read(kind: str) -> None:
    dataset = Arrow(pa.table({"x": pa.array([1, None, 0]).cast(kind)}))
    assert [dataset[0]["x"].item(), dataset[2]["x"].item()] == [1, 0]
    with pytest.raises(SampleError, match="column 'x' is null"):
        dataset[1]


def test_nulls_are_named_by_file_and_row(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", TABLE.select(["x"]))
    write(tmp_path / "b.arrow", pa.table({"x": pa.array([1.0, 2.0, None], pa.float32())}), rows=2)
    with pytest.raises(SampleError, match=r"b\.arrow, row 2: column 'x' is null; pass nulls=\{'x': 'nan'\}"):
        Arrow(tmp_path)[92]
    assert Arrow(tmp_path, nulls=5)[92]["x"].item() == 5
    with pytest.raises(SampleError, match="row 1 of the table: column 'x' is null"):
        Arrow(pa.table({"x": [0, None]}))[1]


def test_arrays_that_begin_between_bytes_and_rows() -> None:
    table = pa.table({"flag": [True, False, None, True] * 5, "s": [["a"], ["b", "c"]] * 10}).slice(3, 9)
    dataset = Arrow(table, nulls={"flag": 1})
    assert [sample["flag"].item() for sample in dataset.__getitems__(range(4))] == [True, True, False, True]
    assert [sample["s"] for sample in dataset.__getitems__(range(2))] == [["b", "c"], ["a"]]


@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0 and nothing behind", b"something else\0"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.arrow").write_bytes(content)
    with pytest.raises(SampleError, match=r"bad\.arrow cannot be read: it is damaged"):
        Arrow(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.arrow")
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(SampleError, match=r"bad\.arrow cannot be read: it is damaged"):
        Arrow(path)


def test_files_of_another_schema_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow")
    write(tmp_path / "b.arrow", pa.table({"x": np.arange(3)}))
    with pytest.raises(SampleError, match=r"b\.arrow and .*a\.arrow do not have the same columns: flag, name differs"):
        Arrow(tmp_path)
    with pytest.raises(SampleError, match=r"column 'x' is float in .*a\.arrow, but int64 in .*b\.arrow"):
        Arrow(tmp_path, ["x"])


def test_a_missing_column_names_the_existing_ones() -> None:
    with pytest.raises(ArgumentError, match="column 'y' is not in the table; there are x, flag, name"):
        Arrow(TABLE, ["y"])
    with pytest.raises(ArgumentError, match="no column is left to read from the table"):
        Arrow(TABLE, [])


def test_texts_that_are_not_utf8_are_named() -> None:
    array = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff"))
    with pytest.raises(SampleError, match=r"row 0 of the table: column 's' is not UTF-8 .* store it as binary"):
        Arrow(pa.table({"s": array}))[0]


def test_other_layouts_of_text_and_bytes() -> None:
    kinds = [pa.string_view(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string()]
    columns = {str(i): pa.array(["one", "a longer text than twelve bytes"]).cast(kind) for i, kind in enumerate(kinds)}
    columns |= {"4": pa.array([b"ab", b"cd"], pa.binary(2)), "5": pa.array([b"x", b"y"], pa.large_binary())}
    sample = Arrow(pa.table(columns))[1]
    assert list(sample.values()) == ["a longer text than twelve bytes"] * 4 + [b"cd", b"y"]


@pytest.mark.filterwarnings("ignore::feedline.core.kernels.SlowKernelsWarning")
def test_rows_are_the_same_without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TABLE.append_column("v", pa.array([[i, i + 1] for i in range(N)]))
    dataset = Arrow(pa.concat_tables([table, table.slice(5), table.slice(7, 3)]))
    indices = np.random.default_rng(0).integers(0, len(dataset), 50)
    expected = dataset.read_batch(BatchRead(indices, Recorder()))
    monkeypatch.setattr(kernels, "native", None)
    assert same(dataset.read_batch(BatchRead(indices, Recorder())), expected)


def test_a_state_is_refused_for_files_in_another_order(tmp_path: Path) -> None:
    """For a copy elsewhere, also in a store, the state is accepted; a table in memory has no files to compare."""
    paths = [write(tmp_path / f"{name}.arrow", TABLE.slice(start, 45)) for name, start in (("a", 0), ("b", 45))]
    state = fl.DataLoader(Arrow(paths), 8, shuffle=True, seed=1).state_dict()
    with pytest.raises(StateError, match="in another order"):
        fl.DataLoader(Arrow(paths[::-1]), 8, shuffle=True, seed=1).load_state_dict(state)
    other = [write(tmp_path / f"other/{path.name}", TABLE.slice(0, 45), rows=7) for path in paths]
    with pytest.raises(StateError, match="in another order"):  # as many rows, in other record batches
        fl.DataLoader(Arrow(other), 8, shuffle=True, seed=1).load_state_dict(state)
    system = fsspec.filesystem("memory")
    for path in paths:
        system.pipe(f"/fingerprint/{path.name}", path.read_bytes())
    far = Arrow([f"memory://fingerprint/{path.name}" for path in paths], ["x"], index_dir=tmp_path)
    system.rm("/fingerprint", recursive=True)
    fl.DataLoader(far, 8, shuffle=True, seed=1).load_state_dict(state)
    assert Arrow(TABLE).listing_fingerprint is None
    assert fl.DataLoader(Arrow(TABLE), 8, seed=1).state_dict()["fingerprint"]["listing"] is None


def test_a_failed_transform_names_file_and_row(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.arrow", TABLE.slice(0, rows)) for name, rows in (("a", 50), ("b", 30))]

    def fail(sample: Any) -> Any:
        raise ValueError("no such thing")

    data = Arrow(paths, transform=fail)
    assert data.address(-1) == (str(paths[1]), "row 29")
    assert Arrow(TABLE).address(31) == ("the table", "row 31")
    with pytest.raises(ValueError, match="no such thing") as caught:
        next(iter(fl.DataLoader(data, 1, sampler=[75])))
    assert f", row 25 of {paths[1]};" in caught.value.__notes__[0]
