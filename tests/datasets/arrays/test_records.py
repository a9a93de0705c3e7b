from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest
import torch
import zarr
from format_cases import all_ways_agree
from numpy.lib import recfunctions
from torch.utils.data import default_collate

import feedline as fl
from feedline.datasets import HDF5, ArrayFile, Arrays, Zarr
from feedline.errors import ArgumentError, SampleError

COUNT = 50
NUMBERS = np.dtype([("energy", ">f4"), ("hit", [("x", "i2"), ("y", "?")]), ("track", "f8", (2, 3)), ("at", "M8[us]")])
NAMED = np.dtype([("id", "i8"), ("name", "S5")])
TIMES = np.array("2020-01-01", "M8[ms]") + np.arange(COUNT)


def records(dtype: np.dtype[Any]) -> Any:
    made = np.zeros(COUNT, dtype)
    if "name" in (dtype.names or ()):
        made["id"] = np.arange(COUNT)
        made["name"] = [b"n%d" % i for i in range(COUNT)]
        return made
    made["energy"] = np.arange(COUNT) / 3
    made["hit"]["x"] = np.arange(COUNT)
    made["hit"]["y"] = np.arange(COUNT) % 2
    made["track"] = np.arange(COUNT * 6).reshape(COUNT, 2, 3)
    made["at"] = np.array("2020-01-01", "M8[us]") + np.arange(COUNT)
    return made


def write_npy(folder: Path, rows: Any) -> str:
    np.save(folder / "rows.npy", rows)
    return "rows.npy"


def write_hdf5(folder: Path, rows: Any, **settings: Any) -> str:
    with h5py.File(folder / "rows.h5", "w") as file:
        dtype = _opaque(rows.dtype)
        file.create_dataset("rows", data=rows.astype(dtype), dtype=dtype, **settings)
    return "rows.h5"


def _opaque(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype with its times marked, which h5py stores as opaque values only."""
    if dtype.names is not None:
        return np.dtype([(name, _opaque(dtype[name])) for name in dtype.names])
    return h5py.opaque_dtype(dtype) if dtype.kind == "M" else dtype


def write_chunked_hdf5(folder: Path, rows: Any) -> str:
    return write_hdf5(folder, rows, chunks=(7,), compression="gzip")


def write_zarr(folder: Path, rows: Any) -> str:
    if "track" in (rows.dtype.names or ()):  # the library opens no nested records, and no fields that are arrays
        rows = recfunctions.repack_fields(rows[["energy", "at"]])
    group = zarr.open_group(folder / "rows.zarr", mode="w", zarr_format=2)
    group.create_array("rows", shape=rows.shape, dtype=rows.dtype, chunks=(7,), compressors=None)[:] = rows
    return "rows.zarr"


WRITERS = {
    "npy": (write_npy, ArrayFile),
    "hdf5": (write_hdf5, lambda path: HDF5(path, "rows")),
    "chunked hdf5": (write_chunked_hdf5, lambda path: HDF5(path, "rows")),
    "zarr": (write_zarr, lambda path: Zarr(path, "rows")),
}


@pytest.fixture(params=WRITERS)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Any, bool], Any]:
    """Function that writes rows to a file, and opens it on disk or in a store."""
    write, dataset = WRITERS[request.param]

    def make(rows: Any, remote: bool) -> Any:
        name = write(tmp_path, rows)
        if not remote:
            return dataset(str(tmp_path / name))
        fsspec.filesystem("memory").put(str(tmp_path / name), f"/{tmp_path.name}/{name}", recursive=True)
        return dataset(f"memory://{tmp_path.name}/{name}")

    return make


def expected(rows: Any, index: int) -> Any:
    """One row as h5py or NumPy gives it, as a sample."""
    row = rows[index]
    return {
        "energy": torch.tensor(float(row["energy"])),
        "hit": {"x": torch.tensor(int(row["hit"]["x"]), dtype=torch.int16), "y": torch.tensor(bool(row["hit"]["y"]))},
        "track": torch.from_numpy(row["track"].copy()),
        "at": torch.tensor(int(row["at"].astype("i8"))),
    }


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[name], theirs[name]) for name in theirs)
    return bool(ours.dtype == theirs.dtype and torch.equal(ours, theirs))


@pytest.mark.parametrize("remote", [False, True])
def test_records_are_dicts_of_their_fields(opened: Any, remote: bool) -> None:
    rows = records(NUMBERS)
    dataset = opened(rows, remote)
    indices = [3, -1, 17, 3, 0, 49]
    all_ways_agree(dataset, indices)
    fields = list(dataset[17])
    assert set(fields) >= {"energy", "at"}
    assert same(dataset[17], {name: expected(rows, 17)[name] for name in fields})
    # Memory for batches is given by the workers, wherever the rows are.
    with fl.DataLoader(dataset, 10, num_workers=1, worker_method="thread" if remote else "process") as loader:
        wanted = default_collate([expected(rows, i) for i in range(10, 20)])
        assert same(list(loader)[1], {name: wanted[name] for name in fields})


@pytest.mark.parametrize("remote", [False, True])
def test_names_in_records_are_bytes(opened: Any, remote: bool) -> None:
    dataset = opened(records(NAMED), remote)
    assert dataset[11] == {"id": torch.tensor(11), "name": b"n11"}
    batch = next(iter(fl.DataLoader(dataset, 3)))
    assert batch["name"] == [b"n0", b"n1", b"n2"]
    assert batch["id"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("remote", "order"), [(False, ">"), (True, "<")])
def test_times_are_counts_of_their_unit(opened: Any, order: str, remote: bool) -> None:
    times = TIMES.astype(TIMES.dtype.newbyteorder(order))
    times[4] = np.datetime64("NaT", np.datetime_data(TIMES.dtype)[0])
    dataset = opened(times, remote)
    all_ways_agree(dataset, [3, -1, 17])
    assert dataset[17].item() == TIMES[17].astype("i8")
    assert dataset[4].item() == np.iinfo(np.int64).min
    assert dataset[17].dtype == torch.int64


@pytest.mark.parametrize("dtype", [[("a", "i4"), ("b", [("c", "O")])], [("a", "V3")], [("a", "f16")]])
def test_a_field_that_no_sample_holds_is_named(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(ArgumentError, match=r"array 0 must be .* got 1-D the field (a|b\.c) of"):
        Arrays(np.zeros(3, dtype))
    np.save(tmp_path / "a.npy", np.zeros(3, dtype), allow_pickle=True)
    with pytest.raises(ArgumentError, match=r"a\.npy holds the field (a|b\.c) of"):
        ArrayFile(tmp_path / "a.npy")


def test_objects_are_named_whatever_their_pickle_takes(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}] * 50, object), allow_pickle=True)
    with pytest.raises(ArgumentError, match=r"a\.npy holds object, which torch does not support"):
        ArrayFile(tmp_path / "a.npy")


def test_names_that_are_not_latin(tmp_path: Path) -> None:
    rows = np.array([(1, 2, 3)], [("é", "i4"), ("重さ", "i4"), ("\\u0041", "i4")])
    with pytest.warns(UserWarning, match="format 3.0"):
        np.save(tmp_path / "a.npy", rows)
    assert {name: value.item() for name, value in ArrayFile(tmp_path / "a.npy")[0].items()} == {
        "é": 1,
        "重さ": 2,
        "\\u0041": 3,
    }


def test_records_in_memory() -> None:
    rows = records(NUMBERS)
    dataset = Arrays({"event": rows, "since": TIMES - TIMES[0]})
    all_ways_agree(dataset, [3, -1, 17])
    assert same(dataset[-2]["event"], expected(rows, 48))
    assert dataset[7]["since"].item() == 7
    with pytest.raises(IndexError, match="50"):
        dataset.__getitems__([50])


def test_texts_of_variable_length_in_records(tmp_path: Path) -> None:
    dtype = np.dtype([("id", "i4"), ("word", h5py.string_dtype())])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["words"] = np.array([(i, f"größe {i}") for i in range(COUNT)], dtype)
        ragged = [("id", "i4"), ("each", h5py.vlen_dtype("f4"))]
        file.create_dataset("ragged", (COUNT,), ragged)
        file.create_dataset("bad", data=np.array([(i, b"\xff") for i in range(COUNT)], dtype))
    dataset = HDF5(tmp_path / "a.h5", "words")
    assert dataset[7] == {"id": torch.tensor(7), "word": "größe 7"}
    with pytest.raises(ArgumentError, match=r"'ragged' in .* holds the field each of object"):
        HDF5(tmp_path / "a.h5", "ragged")
    with pytest.raises(SampleError, match=r"rows 0 to .* of 'bad' in .* are not UTF-8"):
        HDF5(tmp_path / "a.h5", "bad")[0]
