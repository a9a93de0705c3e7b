"""Tars in stores give what they give on this machine, in every way to fetch them."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import feedline as fl
from feedline import transforms as T
from feedline.datasets import TarShards
from feedline.errors import ArgumentError, SampleError
from feedline.gather import gathering
from feedline.rows import torch_empty
from feedline.shards import ShardError, arrays, write_index
from feedline.stores import Cache, ObjectChangedError, ObjectNotFoundError, RangeError, Store, statistics
from feedline.stores.blobs import Blobs
from format_cases import equal
from picture_cases import encoded, intervals, jpeg, photo
from tar_cases import npy, picture_shards, pictures, write_tar

CROP = T.Compose([T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.ToTensor()])
CENTRE = T.Compose([T.Resize(40), T.CenterCrop(32)])
PAIR = ("jpg;png;jpeg", "cls")
PLACES = [9, 3, 4, 3, -1, 0]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg"


@pytest.fixture
def memory() -> Iterator[Any]:
    """A file system that is emptied."""
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten samples in shards of 4, 1 and 5; and a shard of all kinds of fields."""
    (tmp_path / "shards").mkdir()
    picture_shards(tmp_path / "shards", [4, 1, 5])
    members = {
        "s/0.jpg": jpeg(64, 48),
        "s/0.seg.PNG": encoded(photo(64, 48), "PNG"),
        "s/1.json": b'{"a": [1, 2.5, null]}',
        "s/0.cls": b"17",
        "s/1.txt": "größe".encode(),
        "s/0.npy": npy(np.arange(6, dtype=np.float32)),
        "s/0.bin": b"",
        "s/1.cls": b"3",
    }
    write_tar(tmp_path / "shards" / "kinds.tar", members)
    return tmp_path / "shards"


def put(memory: Any, folder: Path) -> str:
    """The address of copies of the tars in a folder, without their indexes."""
    for path in folder.glob("*.tar"):
        memory.pipe(f"/far/{path.name}", path.read_bytes())
    return "memory://far"


def cache_in(tmp_path: Path, piece_nbytes: int = 1000) -> Cache:
    return Cache(tmp_path / "cache", limit="100 MB", piece_nbytes=piece_nbytes)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dicts": ("train-*.tar", {}),
    "dicts of all kinds": ("kinds.tar", {}),
    "undecoded": ("kinds.tar", {"decode": False}),
    "own decoders": ("kinds.tar", {"decoders": {"jpg": len}}),
    "tuples": ("train-{000..002}.tar", {"fields": ("__key__", "cls", "jpg")}),
    "numbers": ("train-*.tar", {"fields": ("__key__", "cls")}),
    "crops": ("train-*.tar", {"fields": PAIR, "transform": CROP}),
    "crops of all": ("train-*.tar", {"transform": CROP}),
    "by field": ("train-*.tar", {"fields": PAIR, "transform": {"jpg": CENTRE}}),
    "one open": ("train-*.tar", {"fields": PAIR, "transform": CENTRE, "open_shards": 1}),
    "whole": ("train-*.tar", {"fields": ("cls",), "transform": lambda sample, rng: (*sample, rng.key)}),
}


def both(memory: Any, folder: Path, name: str, **store: Any) -> tuple[TarShards, TarShards]:
    pattern, arguments = CASES[name]
    return TarShards(f"{folder}/{pattern}", **arguments), TarShards(
        f"{put(memory, folder)}/{pattern}", **arguments, **store
    )


def places_in(data: TarShards) -> list[int]:
    return [place for place in PLACES if -len(data) <= place < len(data)]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_samples_and_batches_are_those_of_this_machine(
    memory: Any, folder: Path, tmp_path: Path, name: str, cached: bool
) -> None:
    near, far = both(memory, folder, name, **({"cache": cache_in(tmp_path)} if cached else {}))
    assert far.shard_sizes.tolist() == near.shard_sizes.tolist()
    assert [path.replace("memory://far", str(folder)) for path in far.paths] == list(near.paths)
    places = places_in(near)
    for fetch in (lambda data: data.__getitems__(places), lambda data: [data[at] for at in places]):
        outcomes = []
        for data in (near, far, pickle.loads(pickle.dumps(far)) if name != "whole" else far):
            torch.manual_seed(5)
            outcomes.append(fetch(data))
        assert equal(outcomes[1], outcomes[0])
        assert equal(outcomes[2], outcomes[0])
    assert (gathering(near) is None) == (gathering(far) is None)
    if gathering(near) is not None:
        batches = []
        for data in (near, far):
            torch.manual_seed(5)
            batches.append(gathering(data)(np.array(places), torch_empty))  # type: ignore[misc]
        assert equal(*batches)
    assert far.address(places[0])[1] == near.address(places[0])[1]


@pytest.mark.parametrize("name", ["dicts", "crops", "whole"])
def test_loaders_deliver_the_same_and_resume(memory: Any, folder: Path, tmp_path: Path, name: str) -> None:
    near, far = both(memory, folder, name, cache=cache_in(tmp_path))

    def loader(data: Any, workers: int = 0) -> Any:
        more = {"worker_method": "thread"} if workers else {}
        order = fl.samplers.ShardShuffled(data.shard_sizes, seed=1, window=2)
        return fl.DataLoader(data, 2, sampler=order, seed=3, num_workers=workers, collate_fn=list, **more)

    with loader(near) as whole:
        wanted = list(whole)
    with loader(far, 2) as first:
        begun = [batch for _, batch in zip(range(2), first, strict=False)]
        state = first.state_dict()
    with loader(far) as second:
        second.load_state_dict(state)
        assert equal(begun + list(second), wanted)


@pytest.mark.parametrize("name", ["dicts", "crops"])
def test_a_batch_is_read_at_once(memory: Any, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, far = both(memory, folder, name)
    calls = list[int]()
    read = Blobs.read
    monkeypatch.setattr(Blobs, "read", lambda self, extents: (calls.append(len(extents)), read(self, extents))[1])
    far.__getitems__([0, 3, 4, 4, 9])
    assert calls == [8]
    if name == "crops":
        far.gather(np.array([0, 9]), torch_empty)
        assert calls == [8, 4]


def test_shards_are_read_concurrently(memory: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three shards of a batch are asked for before one of them answers."""
    _, far = both(memory, folder, "numbers")
    waiting = threading.Barrier(3, timeout=30)
    store: type[Store] = type(far._blobs[0].store)  # type: ignore[index, union-attr]
    read = store.read_many

    def together(*arguments: Any, **more: Any) -> Any:
        waiting.wait()
        return read(*arguments, **more)

    monkeypatch.setattr(store, "read_many", together)
    assert [number for _, number in far.__getitems__([0, 4, 9])] == [0, 4, 9]


def test_pictures_are_decoded_from_where_they_were_fetched_to(
    memory: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tar(folder / "kinds.tar", {"0.npy": npy(np.asarray(photo(640, 480))), "0.jpg": jpeg(640, 480)})
    data = TarShards(f"{put(memory, folder)}/kinds.tar", ("npy", "jpg"), {"npy": CENTRE, "jpg": CENTRE})
    fetched: list[memoryview] = []
    sources: list[Any] = []
    read = Blobs.read

    def reading(self: Blobs, extents: Any) -> Any:
        fetched.extend(read(self, extents))
        return fetched

    monkeypatch.setattr(Blobs, "read", reading)
    monkeypatch.setattr(T.ImagePlan, "batch", lambda _, given, *rest: (sources.extend(given), torch.zeros(1))[1])
    gathering(data)(np.array([0]), torch_empty)  # type: ignore[misc]
    for source in sources:
        assert any(np.shares_memory(np.asarray(source), np.frombuffer(view, np.uint8)) for view in fetched)


@pytest.mark.parametrize("name", ["dicts", "numbers", "crops"])
@pytest.mark.parametrize("piece_nbytes", [100, 1000, 5000, 1 << 20])
def test_what_is_in_memory_is_cut_out_of_its_pieces(
    memory: Any, folder: Path, tmp_path: Path, name: str, piece_nbytes: int
) -> None:
    """Members in one piece, across the border of two, and longer than any; of some samples, and then of all."""
    near, far = both(memory, folder, name, cache=cache_in(tmp_path, piece_nbytes=piece_nbytes))
    for _ in range(2):
        for places in ([1, 0], list(range(len(near)))):
            torch.manual_seed(0)
            wanted = near.__getitems__(places)
            torch.manual_seed(0)
            assert equal(far.__getitems__(places), wanted)


class TestWants:
    @pytest.mark.parametrize("name", ["dicts", "numbers", "crops"])
    def test_are_what_is_read(self, memory: Any, folder: Path, tmp_path: Path, name: str) -> None:
        """Once fetched ahead, nothing is asked of the store."""
        both(memory, folder, name)  # so that indexes are there
        _, far = both(memory, folder, name, cache=cache_in(tmp_path, piece_nbytes=64))
        for place in places_in(far):
            before = statistics().nbytes
            wants = far.wants(np.array([place]))
            assert statistics().nbytes == before
            for store, want in wants:
                store.fill(want.path, want.start, want.stop)
            before = statistics().nbytes
            far.__getitems__([place])
            assert statistics().nbytes == before

    def test_there_are_none_without_a_cache(self, memory: Any, folder: Path) -> None:
        near, far = both(memory, folder, "crops")
        assert near.wants(np.array([0, 9])) == far.wants(np.array([0, 9])) == []

    def test_a_sample_that_lacks_a_field_wants_what_it_has(self, memory: Any, folder: Path, tmp_path: Path) -> None:
        data = TarShards(f"{put(memory, folder)}/kinds.tar", ("json", "cls"), cache=cache_in(tmp_path))
        assert [len(data.wants(np.array([row]))) for row in (0, 1)] == [1, 2]
        with pytest.raises(SampleError, match=r"memory://far/kinds.tar: sample 's/0' has no json; it has jpg"):
            data[0]

    def test_loaders_prefetch(self, memory: Any, folder: Path, tmp_path: Path) -> None:
        near, far = both(memory, folder, "numbers", cache=cache_in(tmp_path))
        with (
            fl.DataLoader(far, 2, shuffle=True, seed=1) as ahead,
            fl.DataLoader(near, 2, shuffle=True, seed=1) as plain,
        ):
            assert equal(list(ahead), list(plain))


class TestPlaces:
    def test_files_and_objects_mix(self, memory: Any, folder: Path) -> None:
        root, near = put(memory, folder), TarShards(f"{folder}/train-*.tar", PAIR, CROP)
        data = TarShards([f"{folder}/train-000.tar", f"{root}/train-00[12].tar"], PAIR, CROP)
        torch.manual_seed(3)
        wanted = near.gather(np.array(PLACES), torch_empty)
        torch.manual_seed(3)
        assert equal(data.gather(np.array(PLACES), torch_empty), wanted)
        assert equal(data.__getitems__([0, 9])[1][1], near[9][1])
        assert list(data.paths)[1] == "memory://far/train-001.tar"
        assert not Path(f"{folder}/train-001.tar.index.partial").exists()

    def test_a_folder_stands_for_its_tars(self, memory: Any, folder: Path) -> None:
        (folder / "kinds.tar").unlink()
        data = TarShards(put(memory, folder), ("cls",))
        assert [number for (number,) in data] == list(range(10))
        assert TarShards(f"file://{folder}", ("cls",))[9] == (9,)

    def test_indexes_in_a_folder_of_ones_own(self, memory: Any, folder: Path, tmp_path: Path, home: Path) -> None:
        data = TarShards(f"{put(memory, folder)}/train-*.tar", PAIR, CENTRE, index=tmp_path / "own")
        names = sorted(path.name for path in (tmp_path / "own/far").iterdir())
        assert names == [f"train-00{number}.tar.index" for number in range(3)]
        assert not home.exists()
        assert equal(pickle.loads(pickle.dumps(data))[5], data[5])
        TarShards(folder, ("cls",), index=tmp_path / "own")
        assert Path(f"{tmp_path}/own{folder}/train-000.tar.index").exists()
        assert not list(folder.glob("*.index"))

    def test_grids(self, memory: Any, folder: Path) -> None:
        data = jpeg(640, 480, restart_marker_blocks=8)
        path = write_tar(folder / "kinds.tar", {"0.jpg": data, "0.cls": b"1", "1.jpg": jpeg(64, 64), "1.cls": b"2"})
        index = write_index(path, grids={"0.jpg": intervals(data)})
        memory.pipe("/far/kinds.tar.index", index.read_bytes())
        far = TarShards(f"{put(memory, folder)}/kinds.tar", PAIR, CROP)
        assert far._shards[0].index.has_grids
        batches = [list(fl.DataLoader(each, 2, seed=3)) for each in (far, TarShards(path, PAIR, CROP))]
        assert equal(*batches)


class TestBadInput:
    def test_what_is_not_there(self, memory: Any, folder: Path) -> None:
        root = put(memory, folder)
        with pytest.raises(ObjectNotFoundError, match=r"memory://far/train-003.tar"):
            TarShards(f"{root}/train-{{000..003}}.tar")
        with pytest.raises(FileNotFoundError, match=r"memory://far/val-\*.tar: nothing matches"):
            TarShards(f"{root}/val-*.tar")
        with pytest.raises(ArgumentError, match=r"memory://far/train-000.tar is named twice"):
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
    def test_an_object_that_is_replaced(self, memory: Any, folder: Path, tmp_path: Path, cached: bool) -> None:
        _, far = both(memory, folder, "crops")
        if cached:
            pattern, arguments = CASES["crops"]
            far = TarShards(f"memory://far/{pattern}", **arguments, cache=cache_in(tmp_path))
        memory.pipe("/far/train-002.tar", (folder / "train-002.tar").read_bytes())
        for fetch in (lambda: far[9], lambda: far.__getitems__([0, 9]), lambda: far.gather(np.array([9]), torch_empty)):
            with pytest.raises(ObjectChangedError, match=r"memory://far/train-002.tar changed: .*dataset anew"):
                fetch()
        assert far[0][1] == 0

    def test_an_object_that_is_gone(self, memory: Any, folder: Path) -> None:
        _, far = both(memory, folder, "crops")
        memory.rm("/far/train-001.tar")
        with pytest.raises(ObjectNotFoundError, match=r"memory://far/train-001.tar"):
            far.__getitems__([0, 4])

    def test_an_index_that_was_replaced_and_leads_beyond_the_object(
        self, memory: Any, folder: Path, home: Path
    ) -> None:
        _, far = both(memory, folder, "numbers")
        [place] = home.rglob("*train-000.tar.index")
        told, held = arrays.opened(str(place))
        sizes = np.full_like(held["sizes"], 0xFFFF)
        arrays.write(str(place), arrays.packed(told, {**held, "sizes": sizes}))
        fresh = pickle.loads(pickle.dumps(far))
        with pytest.raises((ShardError, RangeError), match=r"memory://far/train-000.tar"):
            fresh[0]

    @pytest.mark.parametrize(
        ("data", "what"),
        [(b"no picture", "could not be read"), (jpeg(96, 72)[:900], "could not be read"), (b"", "could not be read")],
    )
    def test_pictures_that_cannot_be_read(self, memory: Any, folder: Path, data: bytes, what: str) -> None:
        write_tar(folder / "train-000.tar", {**pictures(4), "0003.jpg": data})
        _, far = both(memory, folder, "crops")
        for fetch in (lambda: far[3], lambda: far.gather(np.array([0, 3]), torch_empty)):
            with pytest.raises(SampleError, match=rf"memory://far/train-000.tar: member '0003.jpg': .*{what}"):
                fetch()
        with fl.DataLoader(far, 5, on_error="skip") as loader:
            assert sum(len(labels) for _, labels in loader) == 9
            assert loader.stats().skipped == 1

    def test_truncated_ones(self, memory: Any, folder: Path) -> None:
        os.truncate(folder / "train-002.tar", 7000)
        address = f"{put(memory, folder)}/train-002.tar"
        with pytest.raises(ShardError, match=r"memory://far/train-002.tar is truncated: member .*allow_truncated=True"):
            TarShards(address)
        near = TarShards(folder / "train-002.tar", PAIR, CENTRE, allow_truncated=True)
        far = TarShards(address, PAIR, CENTRE, allow_truncated=True)
        assert len(far) == len(near) > 0
        assert equal([far[at] for at in range(len(far))], [near[at] for at in range(len(near))])
        with pytest.raises(ShardError, match=r"is truncated"):
            TarShards(address)
