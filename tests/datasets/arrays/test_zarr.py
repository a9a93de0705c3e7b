from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import zarr
from diagonals import diagonal
from format_cases import all_ways_agree, hidden
from torch.utils.data import DataLoader
from web_servers import Handler, serving

import feedline as fl
from feedline.datasets import Zarr
from feedline.errors import ArgumentError, MissingExtraError, SampleError, StateError

COUNT = 50
ROWS = np.arange(COUNT * 6, dtype=np.float32).reshape(COUNT, 2, 3)


def filled(path: Path, version: int) -> Path:
    group = zarr.open_group(path, mode="w", zarr_format=version)
    group.create_array("x", data=ROWS, chunks=(8, 2, 2))
    group.create_array("labels", data=np.arange(COUNT, dtype=">i4"), chunks=(COUNT,))
    if version == 3:
        group.create_array("sharded", data=ROWS, chunks=(2, 1, 3), shards=(16, 2, 3))
    return path


@pytest.fixture(params=[2, 3])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return filled(tmp_path / "a.zarr", request.param)


@pytest.mark.parametrize(("names", "cache_nbytes"), diagonal(["x", ["x", "labels"], {"data": "x"}, None], [0, 1 << 20]))
def test_rows_are_those_of_the_store(store: Path, names: Any, cache_nbytes: int) -> None:
    dataset = Zarr(store, names, cache_nbytes=cache_nbytes)
    all_ways_agree(dataset, [3, -1, 17, 3, 0, 49, 8, 7])
    first = dataset[17]
    while not isinstance(first, torch.Tensor):
        first = first[0] if isinstance(first, tuple) else first.get("x", first.get("data"))
    assert first.tolist() == ROWS[17].tolist()


def test_a_store_that_is_an_array(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "bare.zarr", data=ROWS, chunks=(5, 2, 3))
    dataset = Zarr(tmp_path / "bare.zarr")
    assert dataset[11].tolist() == ROWS[11].tolist()
    assert dataset.shard_sizes.tolist() == [5] * 10
    with pytest.raises(ArgumentError, match=r"bare.zarr has no array 'x'; it has itself \(columns=None\)"):
        Zarr(tmp_path / "bare.zarr", "x")


class FolderHandler(Handler):
    """Serves the files of a folder, without listings."""

    def do_GET(self) -> None:
        file = self.state / self.path.lstrip("/")
        self.answer(200, file.read_bytes()) if file.is_file() else self.answer(404)


def test_a_web_server_does_not_list_arrays(store: Path) -> None:
    with serving(FolderHandler, store.parent) as server:
        address, options = f"{server.url}/a.zarr", {"allow_http": True}
        assert Zarr(address, "labels", options=options)[3].item() == 3
        with pytest.raises(
            ArgumentError, match=r"a\.zarr has no array 'y'; its other arrays cannot be listed on a web"
        ):
            Zarr(address, "y", options=options)
        with pytest.raises(ArgumentError, match=r"the arrays of .*a\.zarr cannot be listed on a web .*with columns="):
            Zarr(address, options=options)


def test_shards_are_read_whole(tmp_path: Path) -> None:
    dataset = Zarr(filled(tmp_path / "b.zarr", 3), "sharded")
    assert dataset.shard_sizes.tolist() == [16, 16, 16, 2]
    all_ways_agree(dataset, [0, 49, 15, 16])


def test_a_zip_file(tmp_path: Path) -> None:
    filled(tmp_path / "c.zarr", 2)
    packed = shutil.make_archive(str(tmp_path / "c"), "zip", tmp_path / "c.zarr")
    assert Zarr(packed, "x")[20].tolist() == ROWS[20].tolist()


def test_texts(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "d.zarr", mode="w", zarr_format=2)
    group.create_array("words", data=np.array([f"größe {i}" for i in range(9)]), chunks=(4,))
    dataset = Zarr(tmp_path / "d.zarr", "words")
    all_ways_agree(dataset, [5, 0, -1])
    assert dataset[5] == "größe 5"


def test_several_stores(store: Path, tmp_path: Path) -> None:
    packed = shutil.make_archive(str(tmp_path / "c"), "zip", filled(tmp_path / "c.zarr", 2))
    dataset = Zarr([store, packed], ["x", "labels"])
    assert len(dataset) == 2 * COUNT
    all_ways_agree(dataset, [3, -1, COUNT + 3, COUNT, COUNT - 1])
    assert dataset[COUNT + 7][0].tolist() == ROWS[7].tolist()
    assert dataset.address(-1) == (packed, f"row {COUNT - 1}")
    before = dataset.content_fingerprint
    chunk = next(path for path in (store / "x/2.0.0", store / "x/c/2/0/0") if path.exists())
    chunk.write_bytes(chunk.read_bytes() + b"more")
    assert dataset.content_fingerprint != before


class TestProcesses:
    def test_it_pickles_by_path(self, store: Path) -> None:
        dataset = Zarr(store, "x")
        dataset[0]
        data = pickle.dumps(dataset)
        assert len(data) < 1500
        assert pickle.loads(data)[5].tolist() == ROWS[5].tolist()

    @pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning")
    def test_a_store_that_was_open_before_a_fork(self, store: Path) -> None:
        dataset = Zarr(store, "x")
        dataset[0]
        loader = DataLoader(dataset, 10, num_workers=2, multiprocessing_context="fork")
        assert torch.equal(torch.cat(list(loader)), torch.from_numpy(ROWS))
        assert dataset[9].tolist() == ROWS[9].tolist()

    def test_a_store_that_has_changed_is_refused(self, store: Path) -> None:
        data = pickle.dumps(Zarr(store, "x"))
        zarr.open_group(store, mode="w").create_array("x", data=ROWS[:7])
        with pytest.raises(StateError, match=r"'x' in .*a.zarr has changed .* had 50 rows .* has 7 of \(2, 3\) now"):
            pickle.loads(data)[0]


class TestDamage:
    def test_what_is_not_there(self, store: Path, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no such store: .*gone.zarr"):
            Zarr(tmp_path / "gone.zarr")
        with pytest.raises(ArgumentError, match=r"a.zarr has no array 'y'; it has labels"):
            Zarr(store, "y")

    def test_what_is_no_store(self, tmp_path: Path) -> None:
        (tmp_path / "file.zarr").write_bytes(b"junk")
        (tmp_path / "empty").mkdir()
        for name in ("file.zarr", "empty"):
            with pytest.raises(SampleError, match=rf"{name} cannot be opened as a Zarr store .*written completely\?"):
                Zarr(tmp_path / name)

    @pytest.mark.filterwarnings("ignore")  # zarr's, of codecs without a specification
    def test_an_array_that_cannot_be_opened_is_named(self, store: Path) -> None:
        if (store / "x/.zarray").exists():
            reported = store / "labels/.zarray"
            found = json.loads(reported.read_text()) | {"dtype": "|O", "filters": [{"id": "pickle"}]}
        else:
            reported = store / "labels/zarr.json"
            found = json.loads(reported.read_text()) | {"codecs": [{"name": "numcodecs.pickle", "configuration": {}}]}
        reported.write_text(json.dumps(found))
        with pytest.raises(
            SampleError, match=r"'labels' in .*a.zarr cannot be opened \(.*pickle.* Otherwise name other"
        ):
            Zarr(store, ["x", "labels"])
        with pytest.raises(SampleError, match=r"arrays of .*a.zarr cannot be listed.*; name the arrays to read with c"):
            Zarr(store)
        assert Zarr(store, "x")[3].tolist() == ROWS[3].tolist()

    def test_paths_that_are_none(self, store: Path) -> None:
        with pytest.raises(ArgumentError, match="7 is not a path"):
            Zarr(7)  # type: ignore[arg-type]
        with pytest.raises(FileNotFoundError, match="the list of paths is empty"):
            Zarr([])
        with pytest.raises(FileNotFoundError, match=r"no such store: .*gone.zarr"):
            Zarr([store, store.with_name("gone.zarr")], "x")

    def test_a_damaged_chunk_is_named_by_its_rows(self, store: Path) -> None:
        chunk = next(path for path in (store / "x/2.0.0", store / "x/c/2/0/0") if path.exists())
        chunk.write_bytes(b"rubbish" * 9)
        dataset = Zarr(store, "x")
        with pytest.raises(SampleError, match=r"rows 16 to 23 of 'x' in .*a.zarr cannot be read .*on_error='skip'"):
            dataset[20]
        with fl.DataLoader(dataset, 10, on_error="skip") as loader:
            assert sum(map(len, loader)) == COUNT - 8

    def test_a_missing_library(self, store: Path) -> None:
        with hidden("zarr"), pytest.raises(MissingExtraError, match=r"pip install 'feedline\[zarr\]'"):
            Zarr(store)


@pytest.mark.parametrize(("key", "what"), [("attributes.json", "an N5 container"), ("manifest.ocdbt", "a database of")])
def test_a_store_of_another_format_is_named(key: str, what: str, tmp_path: Path) -> None:
    (tmp_path / key).write_text('{"n5": "4.0.0"}')
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/other/{key}", b"{}")
    for place in (str(tmp_path), "memory://other"):
        with pytest.raises(SampleError, match=f"is {what}.*, not a Zarr store; copy its arrays .* tensorstore"):
            Zarr(place)
    memory.rm("/other", recursive=True)
