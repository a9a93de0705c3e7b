"""Tables: files of the peers' own writers are read back equal, as one stream for all workers and cuts."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from law_settings import Reason, law_settings
from torch.utils.data import DataLoader, default_collate

import datasets
import feedline as fl
from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead
from feedline.core.tensors import allocate_tensor
from feedline.core.tree import leaves
from feedline.datasets import CSV, JSONL, Arrow, CachedMap, Filter, HuggingFace, Lines, Map, Parquet, Zip

N = 50
FRESH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
NUMBERS = [
    pa.bool_(),
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
]
FLOATS = [pa.float16(), pa.float32(), pa.float64()]


def same(ours: Any, theirs: Any) -> bool:
    pairs = list(zip(leaves(ours), leaves(theirs), strict=True))
    return type(ours) is type(theirs) and all(
        a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else type(a) is type(b) and a == b
        for a, b in pairs
    )


def scalars() -> st.SearchStrategy[tuple[Any, st.SearchStrategy[Any]]]:
    """An Arrow type with its values."""

    def of(kind: Any) -> tuple[Any, st.SearchStrategy[Any]]:
        if kind == pa.bool_():
            return kind, st.booleans()
        if kind in FLOATS:
            return kind, st.floats(width=kind.bit_width, allow_nan=False)
        if kind == pa.string():
            return kind, st.text(max_size=5)
        if kind == pa.binary():
            return kind, st.binary(max_size=5)
        info = np.iinfo(kind.to_pandas_dtype())
        return kind, st.integers(int(info.min), int(info.max))

    return st.sampled_from([*NUMBERS, *FLOATS, pa.string(), pa.binary()]).map(of)


def nested(inner: Any) -> Any:
    kind, values = inner
    fixed = st.integers(1, 3).map(lambda n: (pa.list_(kind, n), st.lists(values, min_size=n, max_size=n)))
    ragged = st.just((pa.list_(kind), st.lists(values, max_size=3)))
    struct = st.just(
        (pa.struct({"p": kind, "q": pa.int8()}), st.fixed_dictionaries({"p": values, "q": st.integers(0, 9)}))
    )
    return fixed | ragged | struct


COLUMNS = scalars() | scalars().flatmap(nested) | scalars().flatmap(nested).flatmap(nested)


@st.composite
def tables(draw: Any) -> Any:
    rows = draw(st.integers(1, 12))
    arrays = {}
    for number in range(draw(st.integers(1, 3))):
        kind, values = draw(COLUMNS)
        arrays[f"c{number}"] = pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), kind)
    return pa.table(arrays)


def plain(value: Any) -> Any:
    """A sample of feedline in the form of pyarrow's `to_pylist`."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def outcome(fn: Callable[[], Any]) -> Any:
    try:
        return fn()
    except (RuntimeError, TypeError, IndexError) as error:
        return type(error)


@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=FRESH)
@given(table=tables(), group=st.integers(1, 5), data=st.data())
def test_files_of_pyarrow_are_read_back_equal(tmp_path: Path, table: Any, group: int, data: Any) -> None:
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=group)
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=group)
    indices = data.draw(st.lists(st.integers(-len(table), len(table) - 1), min_size=1, max_size=8))
    rows = table.to_pylist()
    for dataset in (Parquet(tmp_path / "t.parquet"), Arrow(tmp_path / "t.arrow"), Arrow(table)):
        assert [plain(dataset[i]) for i in range(len(dataset))] == rows
        assert [plain(sample) for sample in dataset.__getitems__(indices)] == [rows[i] for i in indices]
        theirs = outcome(lambda d=dataset: default_collate([d[i] for i in indices]))
        ours = outcome(lambda d=dataset: d.read_batch(BatchRead(np.array(indices), allocate_tensor)))
        assert ours is theirs if isinstance(theirs, type) else same(ours, theirs)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # of datasets: float64 to float32
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")  # of theirs, once per process
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=FRESH)
@given(table=tables(), data=st.data())
def test_files_of_datasets_are_read_back_equal(tmp_path_factory: Any, table: Any, data: Any) -> None:
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("saved")
    datasets.Dataset(table, fingerprint="drawn").save_to_disk(folder)
    kept = datasets.load_from_disk(folder)
    indices = data.draw(st.lists(st.integers(0, len(table) - 1), min_size=1, max_size=8))
    for dataset in (kept.with_format("torch"), kept.with_format("numpy"), kept):
        ours = HuggingFace(dataset)
        read = reader_of(ours)
        if read is not None:
            theirs = outcome(lambda d=dataset: default_collate(d.__getitems__(indices)))
            batch = outcome(lambda r=read: r(BatchRead(np.array(indices), allocate_tensor)))
            assert batch is theirs if isinstance(theirs, type) else same(batch, theirs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    rows = [{"x": i, "y": i / 4, "s": f"row {i}", "v": [i, i + 1]} for i in range(N)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "t.parquet", row_group_size=9)
    with pa.ipc.new_file(folder / "t.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "t.csv").write_text("x,s\n" + "".join(f'{i},"row {i}"\n' for i in range(N)))
    (folder / "t.txt").write_text("".join(f"row {i}\n" for i in range(N)))
    datasets.disable_progress_bars()
    datasets.Dataset(table).save_to_disk(folder / "hf")
    return folder


def shifted(sample: Any, rng: Any) -> Any:
    return sample["x"] + rng.random()


def odd(sample: Any) -> bool:
    return bool(sample["x"] % 2)


def doubled(sample: Any) -> Any:
    return {"x": sample["x"] * 2, "s": sample["s"]}


DATASETS: dict[str, Callable[[Path], Any]] = {
    "parquet": lambda folder: Parquet(folder / "t.parquet"),
    "parquet, small cache": lambda folder: Parquet(folder / "t.parquet", cache_nbytes=1),
    "parquet, filtered": lambda folder: Parquet(folder / "t.parquet", filters=[("x", ">", 7)]),
    "parquet, random": lambda folder: Parquet(folder / "t.parquet", transform=shifted),
    "arrow": lambda folder: Arrow(folder / "t.arrow"),
    "table": lambda folder: Arrow(pa.table({"x": np.arange(N)})),
    "hugging face, torch": lambda folder: HuggingFace(datasets.load_from_disk(folder / "hf").with_format("torch")),
    "hugging face, python": lambda folder: HuggingFace(datasets.load_from_disk(folder / "hf").shuffle(seed=0)),
    "lines": lambda folder: Lines(folder / "t.txt"),
    "jsonl": lambda folder: JSONL(folder / "t.jsonl"),
    "csv": lambda folder: CSV(folder / "t.csv", {"x": int, "s": str}),
    "zip": lambda folder: Zip(Parquet(folder / "t.parquet"), Arrow(folder / "t.arrow", ["x"])),
    "map": lambda folder: Map(Arrow(folder / "t.arrow"), shifted),
    "filter": lambda folder: Filter(Arrow(folder / "t.arrow"), odd, index_dir=folder / "filters"),
    "cached map": lambda folder: CachedMap(Parquet(folder / "t.parquet"), doubled, folder / "cached"),
}
RANDOM = {"parquet, random", "map"}


@pytest.mark.parametrize("name", DATASETS)
def test_all_workers_agree_and_resume_is_exact(folder: Path, name: str) -> None:
    dataset = DATASETS[name](folder)
    arguments: Any = {"batch_size": 7, "shuffle": True, "seed": 5}
    with fl.DataLoader(dataset, **arguments) as loader:
        whole = list(loader)
    seen: list[Any] = []
    state = None
    for method, cut in (("process", 2), ("thread", 1), ("thread", None)):
        with fl.DataLoader(dataset, **arguments, num_workers=2, worker_method=method) as loader:
            if state is not None:
                loader.load_state_dict(state)
            seen += islice(loader, cut)
            state = json.loads(json.dumps(loader.state_dict()))
    assert len(seen) == len(whole)
    assert all(map(same, seen, whole))


@pytest.mark.parametrize("name", [name for name in DATASETS if name not in RANDOM])
def test_torchs_own_loader_gives_equal_batches(folder: Path, name: str) -> None:
    dataset = DATASETS[name](folder)
    ours, theirs = list(fl.DataLoader(dataset, 7)), list(DataLoader(dataset, 7))
    assert len(ours) == len(theirs)
    assert all(map(same, ours, theirs))
