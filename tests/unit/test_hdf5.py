from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import feedline as fl
from feedline.datasets import HDF5
from feedline.errors import ArgumentError, MissingExtraError, SampleError, StateError
from format_cases import all_ways_agree, hidden

COUNT = 50
ROWS = np.arange(COUNT * 6, dtype=np.float32).reshape(COUNT, 2, 3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=512) as file:
        file["flat"] = ROWS
        file.create_dataset("chunked", data=ROWS, chunks=(8, 2, 2), compression="gzip", shuffle=True)
        file["part/labels"] = np.arange(COUNT, dtype=">i4")
        file["flags"] = np.arange(COUNT) % 2 == 0
        file.create_dataset("words", data=[f"größe {i}" for i in range(COUNT)], chunks=(7,))
        ragged = file.create_dataset("ragged", (COUNT,), h5py.vlen_dtype(np.int16))
        for i in range(COUNT):
            ragged[i] = np.arange(i % 5)
    return tmp_path / "a.h5"


@pytest.mark.parametrize("names", ["flat", "chunked", ["chunked", "part/labels"], {"x": "flat", "y": "flags"}])
@pytest.mark.parametrize("cache_nbytes", [0, 1 << 20])
def test_rows_are_those_of_the_file(path: Path, names: Any, cache_nbytes: int) -> None:
    dataset = HDF5(path, names, cache_nbytes=cache_nbytes)
    all_ways_agree(dataset, [3, -1, 17, 3, 0, 49, 8, 7])
    sample = dataset[17]
    first = sample if isinstance(sample, torch.Tensor) else sample["x"] if isinstance(sample, dict) else sample[0]
    assert first.tolist() == ROWS[17].tolist()


def test_samples_have_the_structure_of_the_names(path: Path) -> None:
    assert HDF5(path, ["part/labels", "flags"])[3] == (torch.tensor(3, dtype=torch.int32), torch.tensor(False))
    assert set(HDF5(path)[0]) == {"chunked", "flags", "flat", "ragged", "words"}


def test_texts_and_ragged_rows(path: Path) -> None:
    dataset = HDF5(path, {"word": "words", "row": "ragged"})
    all_ways_agree(dataset, [4, 0, -1])
    assert dataset[4]["word"] == "größe 4"
    assert dataset[4]["row"].tolist() == [0, 1, 2, 3]
    assert not hasattr(dataset, "gather")


def test_samples_are_memory_of_their_own(path: Path) -> None:
    for name in ("flat", "chunked"):
        dataset = HDF5(path, name)
        dataset[0].fill_(99)
        dataset.__getitems__([0])[0].fill_(99)
        assert dataset[0].tolist() == ROWS[0].tolist()


def test_a_transform_sees_each_sample(path: Path) -> None:
    dataset = HDF5(path, "flat", transform=lambda row, rng: row + rng.random())
    with fl.DataLoader(dataset, 10, seed=1) as loader:
        inline = list(loader)
    with fl.DataLoader(dataset, 10, seed=1, num_workers=2) as loader:
        assert all(map(torch.equal, inline, loader))
    assert not hasattr(dataset, "gather")


def test_chunks_are_shards(path: Path) -> None:
    assert HDF5(path, ["flat", "chunked"]).shard_sizes.tolist() == [8] * 6 + [2]
    assert HDF5(path, ["flat", "flags"]).shard_sizes.tolist() == [COUNT]


def test_each_chunk_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    dataset = HDF5(path, "chunked")
    rows: Any = dataset._rows()[0]
    plain = rows._read
    monkeypatch.setattr(rows, "_read", lambda spans: (read.extend(spans), plain(spans))[1])
    dataset.__getitems__([40, 1, 41, 0, 2])
    dataset.__getitems__([5, 47])
    assert sorted(read) == [(0, 8), (40, 48)]


def test_one_contiguous_dataset_needs_no_library_to_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = HDF5(path, "flat")
    assert dataset[0].sum() == ROWS[0].sum()
    monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda *_: pytest.fail("read through the library"))
    assert dataset[7].tolist() == ROWS[7].tolist()


def test_what_was_never_written_is_what_the_file_says(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "new.h5", "w") as file:
        file.create_dataset("zeros", (4, 2), "f4")
        file.create_dataset("nothing", (0, 2), "f4")
    assert HDF5(tmp_path / "new.h5", "zeros").__getitems__([1, 3])[0].tolist() == [0, 0]
    assert len(HDF5(tmp_path / "new.h5", "nothing")) == 0


class TestProcesses:
    def test_it_pickles_by_path(self, path: Path) -> None:
        dataset = HDF5(path, ["flat", "words"])
        dataset[0]
        data = pickle.dumps(dataset)
        assert len(data) < 1500
        assert pickle.loads(data)[5][1] == "größe 5"

    @pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning")
    @pytest.mark.parametrize("name", ["flat", "chunked"])
    def test_a_file_that_was_open_before_a_fork(self, path: Path, name: str) -> None:
        dataset = HDF5(path, name)
        dataset[0]
        loader = DataLoader(dataset, 10, num_workers=2, multiprocessing_context="fork")
        assert torch.equal(torch.cat(list(loader)), torch.from_numpy(ROWS))
        assert dataset[9].tolist() == ROWS[9].tolist()

    def test_a_file_that_has_changed_is_refused(self, path: Path) -> None:
        data = pickle.dumps(HDF5(path, "flat"))
        with h5py.File(path, "w") as file:
            file["flat"] = ROWS[:7]
        with pytest.raises(StateError, match=r"'flat' in .*a.h5 had 50 rows of \(2, 3\) .* has 7 of \(2, 3\) now"):
            pickle.loads(data)[0]


class TestDamage:
    def test_what_is_not_there(self, path: Path, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no such file: .*gone.h5"):
            HDF5(tmp_path / "gone.h5", "x")
        with pytest.raises(ArgumentError, match=r"a.h5 has no dataset 'x'; it has chunked, flags, flat, part/labels"):
            HDF5(path, "x")
        with pytest.raises(ArgumentError, match=r"has no dataset 'part'"):
            HDF5(path, "part")

    def test_what_does_not_fit(self, path: Path) -> None:
        with h5py.File(path, "a") as file:
            file["few"] = np.arange(3)
            file["one"] = 1.0
            file["pairs"] = np.zeros(COUNT, [("a", "i4"), ("b", "f4")])
        with pytest.raises(ArgumentError, match=r"one length, but in .*a.h5 'flat' has 50, 'few' has 3"):
            HDF5(path, ["flat", "few"])
        with pytest.raises(ArgumentError, match=r"'one' in .*a.h5 is a single value"):
            HDF5(path, "one")
        with pytest.raises(ArgumentError, match=r"'pairs' in .* holds .*, which no tensor can hold"):
            HDF5(path, "pairs")

    def test_a_file_that_is_none_of_these(self, tmp_path: Path) -> None:
        (tmp_path / "b.h5").write_bytes(b"nothing of the kind")
        with pytest.raises(SampleError, match=r"b.h5 cannot be opened as an HDF5 file .*written to its end\?"):
            HDF5(tmp_path / "b.h5", "x")

    def test_a_damaged_chunk_is_named_by_its_rows(self, path: Path) -> None:
        with h5py.File(path, "r") as file:
            chunk = file["chunked"].id.get_chunk_info_by_coord((16, 0, 0))
        with open(path, "r+b") as damaged:
            damaged.seek(chunk.byte_offset)
            damaged.write(bytes(chunk.size))
        dataset = HDF5(path, "chunked")
        with pytest.raises(SampleError, match=r"rows 16 to 23 of 'chunked' in .*a.h5 cannot be read .*on_error='skip'"):
            dataset[20]
        with fl.DataLoader(dataset, 10, on_error="skip") as loader:
            assert sum(map(len, loader)) == COUNT - 8

    def test_a_truncated_file(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "c.h5", "w") as file:
            file["x"] = np.arange(100_000)
        os.truncate(tmp_path / "c.h5", 10_000)
        with pytest.raises(SampleError, match=r"c.h5 cannot be opened as an HDF5 file .*truncated"):
            HDF5(tmp_path / "c.h5", "x")

    @pytest.mark.parametrize("index", [COUNT, -COUNT - 1])
    def test_an_index_out_of_range(self, path: Path, index: int) -> None:
        dataset = HDF5(path, "chunked")
        for fetch in (
            dataset.__getitem__,
            lambda i: dataset.__getitems__([i]),
            lambda i: dataset.gather(np.array([i]), 0),
        ):
            with pytest.raises(IndexError, match=rf"index {index} is out of range for HDF5 with 50 samples"):
                fetch(index)

    def test_a_missing_library(self, path: Path) -> None:
        with hidden("h5py"), pytest.raises(MissingExtraError, match=r"pip install 'feedline\[hdf5\]'"):
            HDF5(path, "flat")
