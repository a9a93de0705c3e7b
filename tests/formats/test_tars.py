"""Tars in a store: what is special to their indexes, their members and their damage."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from format_cases import equal
from image_cases import intervals, jpeg, photo
from tar_cases import image_members, image_shards, npy, write_tar

import feedline as fl
from feedline import transforms as T
from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead
from feedline.core.tensors import allocate_tensor
from feedline.datasets import TarShards, array_container
from feedline.datasets.webdataset import ShardError, write_index
from feedline.errors import ArgumentError, SampleError
from feedline.stores import ObjectChangedError, ObjectNotFoundError, RangeError
from feedline.stores.files import FileSet
from formats.places import Memory, small_pieces
from formats.tars import CENTER, CROP, PAIR, write_kinds

PLACES = [9, 3, 4, 3, -1, 0]


CASES: dict[str, dict[str, Any]] = {
    "dicts": {},
    "numbers": {"columns": ("__key__", "cls")},
    "crops": {"columns": PAIR, "transform": CROP},
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "xdg"


@pytest.fixture
def folder(folder: Path) -> Path:
    """Ten samples in shards of 4, 1 and 5; and a shard of all kinds of fields."""
    image_shards(folder, [4, 1, 5])
    write_kinds(folder)
    return folder


def put(memory: Memory, folder: Path) -> str:
    """The address of copies of the tars in a folder, without their indexes."""
    for path in folder.glob("*.tar"):
        memory.write(path.name, path.read_bytes())
    return memory.root


def both(memory: Memory, folder: Path, name: str, **store: Any) -> tuple[TarShards, TarShards]:
    near = TarShards(f"{folder}/train-*.tar", **CASES[name])
    return near, TarShards(f"{put(memory, folder)}/train-*.tar", **CASES[name], **store)


@pytest.mark.parametrize("name", ["dicts", "crops"])
def test_a_batch_is_read_at_once(memory: Memory, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, far = both(memory, folder, name)
    calls = list[int]()
    read = FileSet.read
    monkeypatch.setattr(FileSet, "read", lambda self, extents: (calls.append(len(extents)), read(self, extents))[1])
    far.__getitems__([0, 3, 4, 4, 9])
    assert calls == [8]
    if name == "crops":
        far.read_batch(BatchRead(np.array([0, 9]), allocate_tensor))
        assert calls == [8, 4]


def test_images_are_decoded_from_where_they_were_fetched_to(
    memory: Memory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tar(folder / "kinds.tar", {"0.npy": npy(np.asarray(photo(640, 480))), "0.jpg": jpeg(640, 480)})
    data = TarShards(f"{put(memory, folder)}/kinds.tar", ("npy", "jpg"), transform={"npy": CENTER, "jpg": CENTER})
    fetched: list[memoryview] = []
    sources: list[Any] = []
    read = FileSet.read

    def reading(self: FileSet, extents: Any) -> Any:
        fetched.extend(read(self, extents))
        return fetched

    monkeypatch.setattr(FileSet, "read", reading)
    monkeypatch.setattr(T.ImagePlan, "batch", lambda _, given, *rest: (sources.extend(given), torch.zeros(1))[1])
    reader_of(data)(BatchRead(np.array([0]), allocate_tensor))  # type: ignore[misc]
    for source in sources:
        assert any(np.shares_memory(np.asarray(source), np.frombuffer(view, np.uint8)) for view in fetched)


@pytest.mark.parametrize(
    ("name", "piece_nbytes"),
    [
        *(("dicts", 100), ("dicts", 1000), ("dicts", 5000), ("dicts", 1 << 20)),
        *(("numbers", 100), ("numbers", 5000), ("crops", 100), ("crops", 1000)),
    ],
)
def test_members_in_memory_are_views_of_their_pieces(
    memory: Memory, folder: Path, tmp_path: Path, name: str, piece_nbytes: int
) -> None:
    """Members in one piece, across two pieces, and longer than a piece; of some samples, and then of all."""
    near, far = both(memory, folder, name, cache=small_pieces(tmp_path, piece_nbytes))
    for _ in range(2):
        for places in ([1, 0], list(range(len(near)))):
            torch.manual_seed(0)
            wanted = near.__getitems__(places)
            torch.manual_seed(0)
            assert equal(far.__getitems__(places), wanted)


class TestWants:
    def test_a_sample_that_lacks_a_field_prefetches_the_others(
        self, memory: Memory, folder: Path, tmp_path: Path
    ) -> None:
        data = TarShards(f"{put(memory, folder)}/kinds.tar", ("json", "cls"), cache=small_pieces(tmp_path))
        assert [len(data.ranges(np.array([row]))) for row in (0, 1)] == [1, 2]
        with pytest.raises(SampleError, match=r"memory://far/kinds.tar: sample 's/0' has no json; it has jpg"):
            data[0]


class TestPlaces:
    def test_files_and_objects_mix(self, memory: Memory, folder: Path) -> None:
        root, near = put(memory, folder), TarShards(f"{folder}/train-*.tar", PAIR, transform=CROP)
        data = TarShards([f"{folder}/train-000.tar", f"{root}/train-00[12].tar"], PAIR, transform=CROP)
        torch.manual_seed(3)
        wanted = near.read_batch(BatchRead(np.array(PLACES), allocate_tensor))
        torch.manual_seed(3)
        assert equal(data.read_batch(BatchRead(np.array(PLACES), allocate_tensor)), wanted)
        assert equal(data.__getitems__([0, 9])[1][1], near[9][1])
        assert list(data.paths)[1] == "memory://far/train-001.tar"
        assert not Path(f"{folder}/train-001.tar.index.partial").exists()

    def test_a_folder_stands_for_its_tars(self, memory: Memory, folder: Path) -> None:
        (folder / "kinds.tar").unlink()
        data = TarShards(put(memory, folder), ("cls",))
        assert [number for (number,) in data] == list(range(10))
        assert TarShards(f"file://{folder}", ("cls",))[9] == (9,)

    def test_indexes_in_a_folder_of_ones_own(self, memory: Memory, folder: Path, tmp_path: Path, home: Path) -> None:
        data = TarShards(f"{put(memory, folder)}/train-*.tar", PAIR, transform=CENTER, index_dir=tmp_path / "own")
        names = sorted(path.name for path in (tmp_path / "own/far").iterdir())
        assert names == [f"train-00{number}.tar.index" for number in range(3)]
        assert not home.exists()
        assert equal(pickle.loads(pickle.dumps(data))[5], data[5])
        TarShards(folder, ("cls",), index_dir=tmp_path / "own")
        assert Path(f"{tmp_path}/own{folder}/train-000.tar.index").exists()
        assert not list(folder.glob("*.index"))

    def test_grids(self, memory: Memory, folder: Path) -> None:
        data = jpeg(640, 480, restart_marker_blocks=8)
        path = write_tar(folder / "kinds.tar", {"0.jpg": data, "0.cls": b"1", "1.jpg": jpeg(64, 64), "1.cls": b"2"})
        index = write_index(path, grids={"0.jpg": intervals(data)})
        memory.write("kinds.tar.index", index.read_bytes())
        far = TarShards(f"{put(memory, folder)}/kinds.tar", PAIR, transform=CROP)
        assert far._shards[0].index.has_grids
        batches = [list(fl.DataLoader(each, 2, seed=3)) for each in (far, TarShards(path, PAIR, transform=CROP))]
        assert equal(*batches)


class TestBadInput:
    def test_what_is_not_there(self, memory: Memory, folder: Path) -> None:
        root = put(memory, folder)
        with pytest.raises(ObjectNotFoundError, match=r"memory://far/train-003.tar"):
            TarShards(f"{root}/train-{{000..003}}.tar")
        with pytest.raises(FileNotFoundError, match=r"memory://far/val-\*.tar: nothing matches"):
            TarShards(f"{root}/val-*.tar")
        with pytest.raises(ArgumentError, match=r"memory://far/train-000.tar is listed twice"):
            TarShards([f"{root}/train-000.tar", f"{root}/train-*.tar"])

    def test_commands_are_refused_and_not_repeated(self) -> None:
        command = "pipe:curl -s -H 'Authorization: secret' https://example.org/train-{000..127}.tar"
        with pytest.raises(
            ArgumentError, match=r"'pipe:curl \.\.\.' is a command, .* give the address that"
        ) as refused:
            TarShards(command)
        assert "secret" not in str(refused.value)
        with pytest.raises(ArgumentError, match=r"'pipe: \.\.\.' is a command"):
            TarShards(["memory://far/x.tar", "pipe:"])

    @pytest.mark.parametrize("cached", [False, True])
    def test_an_object_that_is_replaced(self, memory: Memory, folder: Path, tmp_path: Path, cached: bool) -> None:
        _, far = both(memory, folder, "crops")
        if cached:
            far = TarShards("memory://far/train-*.tar", PAIR, transform=CROP, cache=small_pieces(tmp_path))
        memory.write("train-002.tar", (folder / "train-002.tar").read_bytes())
        for fetch in (
            lambda: far[9],
            lambda: far.__getitems__([0, 9]),
            lambda: far.read_batch(BatchRead(np.array([9]), allocate_tensor)),
        ):
            with pytest.raises(
                ObjectChangedError, match=r"memory://far/train-002.tar has changed since .*: .*create the dataset again"
            ):
                fetch()
        assert far[0][1] == 0

    def test_an_index_that_was_replaced_and_leads_beyond_the_object(
        self, memory: Memory, folder: Path, home: Path
    ) -> None:
        _, far = both(memory, folder, "numbers")
        [place] = home.rglob("*train-000.tar.index")
        reported, held = array_container.open_mapped(str(place))
        sizes = np.full_like(held["sizes"], 0xFFFF)
        array_container.write(str(place), reported, {**held, "sizes": sizes})
        fresh = pickle.loads(pickle.dumps(far))
        with pytest.raises((ShardError, RangeError), match=r"memory://far/train-000.tar"):
            fresh[0]

    @pytest.mark.parametrize(
        ("data", "what"),
        [(b"no image", "could not be read"), (jpeg(96, 72)[:900], "could not be read"), (b"", "could not be read")],
    )
    def test_images_that_cannot_be_read(self, memory: Memory, folder: Path, data: bytes, what: str) -> None:
        write_tar(folder / "train-000.tar", {**image_members(4), "0003.jpg": data})
        _, far = both(memory, folder, "crops")
        for fetch in (lambda: far[3], lambda: far.read_batch(BatchRead(np.array([0, 3]), allocate_tensor))):
            with pytest.raises(SampleError, match=rf"memory://far/train-000.tar: member '0003.jpg': .*{what}"):
                fetch()
        with fl.DataLoader(far, 5, on_error="skip") as loader:
            assert sum(len(labels) for _, labels in loader) == 9
            assert loader.stats().skipped == 1

    def test_a_truncated_one_gives_its_whole_samples_if_allowed(self, memory: Memory, folder: Path) -> None:
        os.truncate(folder / "train-002.tar", 7000)
        address = f"{put(memory, folder)}/train-002.tar"
        near = TarShards(folder / "train-002.tar", PAIR, transform=CENTER, allow_truncated=True)
        far = TarShards(address, PAIR, transform=CENTER, allow_truncated=True)
        assert len(far) == len(near) > 0
        assert equal([far[at] for at in range(len(far))], [near[at] for at in range(len(near))])
        with pytest.raises(ShardError, match=r"is truncated"):
            TarShards(address)
