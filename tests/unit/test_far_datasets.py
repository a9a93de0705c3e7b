"""Arrays, chunks, files and pictures in stores give what they give on this machine, in every way to fetch them."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest
import torch
import zarr
from fsspec.implementations.memory import MemoryFileSystem

import feedline as fl
from far_cases import CASES, COUNT, CROP, ROWS, manifest
from feedline.datasets import HDF5, LMDB, ArrayFile, ImageFolder, Raw, TokenFile
from feedline.datasets import Zarr as ZarrStore
from feedline.errors import ArgumentError, SampleError
from feedline.gather import gathering
from feedline.rows import torch_empty
from feedline.stores import Cache, ObjectChangedError, ObjectNotFoundError, statistics
from format_cases import all_ways_agree, equal
from writers.values import jpeg

PLACES = [3, -1, 17, 3, 0, 8, 7, 20]


class Bucket:
    """Objects in memory, below `address`."""

    address = "memory://far"

    def __init__(self) -> None:
        self._system = fsspec.filesystem("memory")

    def put(self, folder: Path) -> str:
        """Nothing but what lies in a folder; the address."""
        MemoryFileSystem.store.clear()
        for path in folder.rglob("*"):
            if path.is_file():
                self.write(path.relative_to(folder).as_posix(), path.read_bytes())
        return self.address

    def write(self, name: str, data: bytes) -> None:
        self._system.pipe(f"/far/{name}", data)

    def read(self, name: str) -> bytes:
        data: bytes = self._system.cat_file(f"/far/{name}")
        return data

    def remove(self, name: str) -> None:
        self._system.rm(f"/far/{name}", recursive=True)

    def names(self) -> list[str]:
        return [name.removeprefix("/far/") for name in self._system.find("/far")]


@pytest.fixture(autouse=True)
def indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of remote objects is kept in the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    yield Bucket()
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def needs(name: str) -> bool:
    """Whether it cannot be read without a cache."""
    return CASES[name].needs_cache


def kept_in(tmp_path: Path, piece_nbytes: int = 4 << 20) -> Cache:
    return Cache(tmp_path / "cache", limit="100 MB", piece_nbytes=piece_nbytes)


def both(name: str, bucket: Bucket, folder: Path, **store: Any) -> tuple[Any, Any]:
    """The dataset on this machine, and that in the store."""
    case = CASES[name]
    case.write(folder)
    return case.open(str(folder)), case.open(bucket.put(folder), **store)


def places_in(dataset: Any) -> list[int]:
    return [place for place in PLACES if -len(dataset) <= place < len(dataset)]


@pytest.mark.parametrize(
    ("name", "cached"), [(name, cached) for name in CASES for cached in (False, True) if cached or not needs(name)]
)
def test_samples_are_those_of_this_machine(
    bucket: Bucket, folder: Path, tmp_path: Path, name: str, cached: bool
) -> None:
    near, far = both(name, bucket, folder, **({"cache": kept_in(tmp_path)} if cached else {}))
    assert len(far) == len(near)
    places = places_in(near)
    for fetch in (lambda data: data.__getitems__(places), lambda data: [data[at] for at in places]):
        torch.manual_seed(5)
        wanted = fetch(near)
        torch.manual_seed(5)
        assert equal(fetch(far), wanted)
    if gathering(near) is not None:
        batches = []
        for data in (near, far):
            torch.manual_seed(5)
            batches.append(gathering(data)(np.array(places), torch_empty))
        assert equal(*batches)
    if name not in ("pictures", "folder"):  # whose randomness goes on
        all_ways_agree(far, places)


@pytest.mark.parametrize("name", CASES)
def test_loaders_deliver_the_same_and_resume(bucket: Bucket, folder: Path, tmp_path: Path, name: str) -> None:
    near, far = both(name, bucket, folder, cache=kept_in(tmp_path))

    def loader(data: Any, workers: int = 0) -> Any:
        more = {"worker_method": "thread"} if workers else {}
        return fl.DataLoader(data, 2, shuffle=True, seed=3, num_workers=workers, collate_fn=list, **more)

    with loader(near) as whole:
        wanted = list(whole)
    with loader(far, 2) as first:
        begun = [batch for _, batch in zip(range(1), first, strict=False)]
        state = first.state_dict()
    with loader(far) as second:
        second.load_state_dict(state)
        assert equal(begun + list(second), wanted)


@pytest.mark.parametrize("name", [name for name in CASES if not needs(name)])
def test_what_is_wanted_is_what_is_read(bucket: Bucket, folder: Path, tmp_path: Path, name: str) -> None:
    """Once fetched ahead, nothing is asked of the store for data."""
    _, far = both(name, bucket, folder, cache=kept_in(tmp_path, piece_nbytes=64))
    places = np.array(places_in(far))
    if name.startswith(("hdf5", "zarr")):
        far.__getitems__([1])  # opens it
    wants = far.wants(places)
    assert wants
    for store, want in wants:
        store.fill(*want)
    before = statistics()
    far.__getitems__(places.tolist())
    after = statistics()
    if "all kinds" in name:  # texts and ragged rows lie where only the library knows
        return
    assert after.nbytes == before.nbytes


def test_nothing_is_wanted_without_a_cache(bucket: Bucket, folder: Path) -> None:
    for name in ("npy", "tokens", "documents", "hdf5", "zarr 3", "files", "folder"):
        (folder / name).mkdir()
        near, far = both(name, bucket, folder / name)
        for data in (near, far):
            assert data.wants(np.array([0, -1])) == []


@pytest.mark.parametrize("name", ["files", "folder", "zarr 3", "tokens"])
def test_a_batch_is_read_at_once(bucket: Bucket, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Six reads of one batch wait for each other: one after the other they would wait for ever."""
    if name == "tokens":
        for i in range(6):
            np.arange(20, dtype=np.uint16).tofile(folder / f"t{i}.bin")
        data = TokenFile([f"{bucket.put(folder)}/t{i}.bin" for i in range(6)], 20)
    else:
        CASES[name].write(folder)
        root = bucket.put(folder)
        data = ZarrStore(f"{root}/a.zarr", "part/deep") if name == "zarr 3" else CASES[name].open(root)
    data[0]
    meeting = threading.Barrier(6)
    plain = MemoryFileSystem.cat_file

    def cat_file(self: Any, path: str, *arguments: Any, **more: Any) -> Any:
        meeting.wait(30)
        return plain(self, path, *arguments, **more)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    places = range(6) if name == "tokens" else range(1, 7)
    assert len(data.__getitems__(list(places))) == 6


@pytest.mark.parametrize("name", ["npy", "tokens", "hdf5 of all kinds", "zarr 3", "lmdb", "files", "folder"])
def test_worker_processes_open_it_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Through fsspec's own files: what lies in memory does not travel."""
    case = CASES[name]
    case.write(folder)
    monkeypatch.chdir(tmp_path)
    far = case.open("local://data", cache=kept_in(tmp_path))
    assert len(pickle.dumps(far)) < 12_000
    with fl.DataLoader(far, 7, seed=1, num_workers=2, worker_method="process", collate_fn=list) as loader:
        found = list(loader)
    with fl.DataLoader(case.open(str(folder)), 7, seed=1, collate_fn=list) as loader:
        assert equal(found, list(loader))


class TestArrays:
    def test_rows_that_lie_together_are_told(self, bucket: Bucket, folder: Path) -> None:
        near, far = both("npy", bucket, folder)
        assert near.shard_sizes.tolist() == far.shard_sizes.tolist() == [COUNT]
        np.save(folder / "wide.npy", np.zeros((5, 1 << 20), np.uint8))
        assert ArrayFile(f"{bucket.put(folder)}/wide.npy").shard_sizes.tolist() == [4, 1]
        np.zeros(5 << 20, np.uint16).tofile(folder / "t.bin")
        tokens = TokenFile(f"{bucket.put(folder)}/t.bin", 1 << 20)
        assert tokens.shard_sizes.tolist() == [2, 2, 1]
        assert TokenFile(folder / "t.bin", 1 << 20).shard_sizes.tolist() == [5]

    def test_here_and_there_at_once(self, bucket: Bucket, folder: Path) -> None:
        CASES["npy"].write(folder)
        data = ArrayFile([f"{bucket.put(folder)}/x.npy", str(folder / "y.npy")])
        assert equal(
            data.gather(np.array([5, 1]), torch_empty),
            ArrayFile([folder / "x.npy", folder / "y.npy"]).gather(np.array([5, 1]), torch_empty),
        )

    def test_what_cannot_be_read(self, bucket: Bucket, folder: Path) -> None:
        CASES["npy"].write(folder)
        np.save(folder / "columns.npy", np.asfortranarray(ROWS))
        (folder / "junk.npy").write_bytes(b"junk" * 9)
        (folder / "cut.npy").write_bytes((folder / "x.npy").read_bytes()[:500])
        root = bucket.put(folder)
        with pytest.raises(ObjectNotFoundError, match=r"memory://far/gone.npy"):
            ArrayFile(f"{root}/gone.npy")
        with pytest.raises(ArgumentError, match=r"far/columns.npy is in Fortran order.*ascontiguousarray"):
            ArrayFile(f"{root}/columns.npy")
        with pytest.raises(SampleError, match=r"far/junk.npy is not a .npy file"):
            ArrayFile(f"{root}/junk.npy")
        with pytest.raises(
            SampleError, match=r"far/cut.npy is truncated: the file has 500 bytes, its header wants \d+"
        ):
            ArrayFile(f"{root}/cut.npy")
        with pytest.raises(SampleError, match=r"far/raw.bin does not fit"):
            ArrayFile(Raw(f"{root}/raw.bin", np.int64, (7,)))
        with pytest.raises(ArgumentError, match=r"far/\?.npy stands for 2 files: name one"):
            ArrayFile(f"{root}/?.npy")
        np.save(folder / "few.npy", np.zeros(3))
        bucket.put(folder)
        with pytest.raises(ArgumentError, match=r"far/x.npy has 60, memory://far/few.npy has 3"):
            ArrayFile([f"{root}/x.npy", f"{root}/few.npy"])

    @pytest.mark.parametrize("cached", [False, True])
    def test_an_object_that_changes(self, bucket: Bucket, folder: Path, tmp_path: Path, cached: bool) -> None:
        np.save(folder / "x.npy", np.zeros((60, 1000)))
        far = ArrayFile(f"{bucket.put(folder)}/x.npy", **({"cache": kept_in(tmp_path, 1000)} if cached else {}))
        far[0]
        bucket.write("x.npy", bytes(len(bucket.read("x.npy"))))
        with pytest.raises(ObjectChangedError, match=r"memory://far/x.npy changed.* Make the dataset anew"):
            far.__getitems__([30, 50])

    def test_tokens_that_are_none(self, bucket: Bucket, folder: Path) -> None:
        np.save(folder / "floats.npy", np.ones(9))
        with pytest.raises(ArgumentError, match=r"far/floats.npy holds float64 of 1 dimensions; tokens are"):
            TokenFile(f"{bucket.put(folder)}/floats.npy", 4)
        with pytest.raises(ObjectNotFoundError, match=r"\*.tok: nothing matches"):
            TokenFile("memory://far/*.tok", 4)


class TestHDF5:
    def test_data_are_fetched_before_the_library_asks(
        self, bucket: Bucket, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, far = both("hdf5", bucket, folder)
        far[0]
        device = far._rows()[1]._wanting.__self__._far.device
        monkeypatch.setattr(device, "_from_blocks", lambda *_: pytest.fail("the library read by itself"))
        before = statistics().requests
        batch = far.gather(np.arange(8, COUNT, 8), torch_empty)
        assert torch.equal(batch[0], torch.from_numpy(ROWS[8::8]))
        assert torch.equal(batch[0], batch[1])
        assert statistics().requests - before <= 6  # for each dataset one, and each time a look at the version

    @pytest.mark.parametrize("how", ["gone", "changed"])
    def test_failures_of_the_store_come_through(self, bucket: Bucket, folder: Path, how: str) -> None:
        _, far = both("hdf5", bucket, folder)
        far[0]
        if how == "gone":
            bucket.remove("a.h5")
        else:
            bucket.write("a.h5", bytes(100))
        wanted = ObjectNotFoundError if how == "gone" else ObjectChangedError
        with pytest.raises(wanted, match=r"memory://far/a.h5"):
            far[40]
        with pytest.raises(wanted, match=r"memory://far/a.h5"):
            pickle.loads(pickle.dumps(far))[0]

    def test_what_cannot_be_read(self, bucket: Bucket, folder: Path) -> None:
        CASES["hdf5"].write(folder)
        (folder / "junk.h5").write_bytes(b"junk" * 99)
        (folder / "cut.h5").write_bytes((folder / "a.h5").read_bytes()[:6000])
        root = bucket.put(folder)
        with pytest.raises(ObjectNotFoundError, match=r"memory://far/gone.h5"):
            HDF5(f"{root}/gone.h5")
        for name in ("junk", "cut"):
            with pytest.raises(SampleError, match=rf"far/{name}.h5 cannot be opened as an HDF5 file"):
                HDF5(f"{root}/{name}.h5")
        with pytest.raises(ArgumentError, match=r"far/a.h5 has no dataset 'x'; it has chunked, flat, part/labels"):
            HDF5(f"{root}/a.h5", "x")

    def test_several_files(self, bucket: Bucket, folder: Path) -> None:
        CASES["hdf5"].write(folder)
        (folder / "b.h5").write_bytes((folder / "a.h5").read_bytes())
        root, names = bucket.put(folder), ["flat", "chunked"]
        far, near = HDF5(root, names), HDF5(folder, names)
        places = [3, COUNT + 3, 2 * COUNT - 1, 0, COUNT, COUNT - 1]
        assert equal(far.__getitems__(places), near.__getitems__(places))
        assert equal(pickle.loads(pickle.dumps(far))[COUNT + 9], near[9])
        assert far.address(COUNT) == ("memory://far/b.h5", "row 0")
        assert equal(HDF5([folder / "a.h5", f"{root}/b.h5"], names).__getitems__(places), near.__getitems__(places))

    def test_data_in_other_files_are_refused(self, bucket: Bucket, folder: Path) -> None:
        CASES["hdf5"].write(folder)
        for name, source in (("other", "elsewhere.h5"), ("own", ".")):
            with h5py.File(folder / "a.h5", "a") as file:
                layout = h5py.VirtualLayout((COUNT, 2, 3), "f4")
                layout[:] = h5py.VirtualSource(source, "flat", (COUNT, 2, 3))
                file.create_virtual_dataset(name, layout)
        with h5py.File(folder / "a.h5", "a") as file:
            file.create_dataset("outside", (COUNT,), "i4", external=[("raw.bin", 0, h5py.h5f.UNLIMITED)])
        root = bucket.put(folder)
        assert HDF5(f"{root}/a.h5", "own")[9].tolist() == ROWS[9].tolist()
        for name in ("other", "outside"):
            with pytest.raises(ArgumentError, match=rf"the data of /{name} in memory://far/a.h5 lie in other files"):
                HDF5(f"{root}/a.h5", name)

    def test_a_damaged_chunk_is_named_by_its_rows(self, bucket: Bucket, folder: Path) -> None:
        CASES["hdf5"].write(folder)
        with h5py.File(folder / "a.h5", "r") as file:
            chunk = file["chunked"].id.get_chunk_info_by_coord((16, 0, 0))
        with open(folder / "a.h5", "r+b") as damaged:
            damaged.seek(chunk.byte_offset)
            damaged.write(bytes(chunk.size))
        far = HDF5(f"{bucket.put(folder)}/a.h5", "chunked")
        for fetch in (far.__getitem__, lambda at: far.__getitems__([0, at, 50])):
            with pytest.raises(SampleError, match=r"rows 16 to 23 of 'chunked' in memory://far/a.h5 cannot be read"):
                fetch(20)
        assert far[15].tolist() == ROWS[15].tolist()

    def test_threads_share_it(self, bucket: Bucket, folder: Path) -> None:
        _, far = both("hdf5 of all kinds", bucket, folder)
        found: dict[int, Any] = {}

        def read(start: int) -> None:
            found[start] = [far[at] for at in range(start, COUNT, 4)]

        threads = [threading.Thread(target=read, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wanted = HDF5(folder / "a.h5")
        assert all(equal(found[start], [wanted[at] for at in range(start, COUNT, 4)]) for start in range(4))

    def test_a_process_that_has_it_open_ends_well(self, folder: Path) -> None:
        CASES["hdf5"].write(folder)
        program = (
            "from feedline.datasets import HDF5\nimport gc, os, pickle\n"
            "kept = HDF5('local://a.h5', 'chunked'); print(kept[9].sum().item())\n"
            "other = HDF5('local://a.h5'); other[0]; del other; gc.collect(); print(kept[17].sum().item())\n"
            "copied = pickle.loads(pickle.dumps(kept)); os.remove('a.h5')\n"
            "try: copied[0]\nexcept FileNotFoundError as error: held = error; print(type(error).__name__)\n"
        )
        ended = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (0, f"{ROWS[9].sum()}\n{ROWS[17].sum()}\nObjectNotFoundError\n"), (
            ended.stderr
        )


class TestZarr:
    def test_a_store_that_is_an_array(self, bucket: Bucket, folder: Path) -> None:
        zarr.create_array(folder / "bare.zarr", data=ROWS, chunks=(5, 2, 3))
        far = ZarrStore(f"{bucket.put(folder)}/bare.zarr")
        assert far[11].tolist() == ROWS[11].tolist()
        assert far.shard_sizes.tolist() == [5] * 12

    def test_chunks_that_were_never_written(self, bucket: Bucket, folder: Path, tmp_path: Path) -> None:
        zarr.create_array(folder / "holes.zarr", shape=(20, 2), chunks=(5, 2), dtype="i4", fill_value=7)[:5] = 1
        far = ZarrStore(f"{bucket.put(folder)}/holes.zarr", cache=kept_in(tmp_path))
        assert [row.tolist() for row in far.__getitems__([0, 19])] == [[1, 1], [7, 7]]
        assert len(far.wants(np.array([1, 19]))) == 0  # both are kept
        assert len(far.wants(np.array([1, 8, 9]))) == 1

    def test_a_zip_file(self, bucket: Bucket, folder: Path, tmp_path: Path) -> None:
        with zarr.storage.ZipStore(folder / "a.zip", mode="w") as store:
            zarr.open_group(store, mode="w").create_array("x", data=ROWS, chunks=(5, 2, 3))
        address = f"{bucket.put(folder)}/a.zip"
        assert ZarrStore(address, cache=kept_in(tmp_path))[20]["x"].tolist() == ROWS[20].tolist()
        with pytest.raises(ArgumentError, match=r"far/a.zip is read by a library that opens files only: give cache="):
            ZarrStore(address)

    def test_what_cannot_be_read(self, bucket: Bucket, folder: Path) -> None:
        _, far = both("zarr 3", bucket, folder)
        root = bucket.address
        with pytest.raises(SampleError, match=r"far/gone.zarr cannot be opened as a Zarr store"):
            ZarrStore(f"{root}/gone.zarr")
        with pytest.raises(ArgumentError, match=r"far/a.zarr has no array 'z'; it has labels, sharded, x"):
            ZarrStore(f"{root}/a.zarr", "z")
        bucket.write("a.zarr/x/c/2/0/0", b"rubbish" * 9)
        with pytest.raises(SampleError, match=r"rows 16 to 23 of 'x' in memory://far/a.zarr cannot be read"):
            far.__getitems__([0, 20, 50])


class TestLMDB:
    def test_it_needs_a_cache(self, bucket: Bucket, folder: Path) -> None:
        CASES["lmdb"].write(folder)
        with pytest.raises(ArgumentError, match=r"far/texts/data.mdb is read by a library .*: give cache="):
            LMDB(f"{bucket.put(folder)}/texts")

    def test_keys_are_enumerated_once(
        self, bucket: Bucket, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        CASES["lmdb"].write(folder)
        address = f"{bucket.put(folder)}/texts"
        assert LMDB(address, cache=kept_in(tmp_path))[3] == b"text 3"
        [index] = (tmp_path / "xdg/feedline/indexes").iterdir()
        assert index.name.endswith("-data.mdb.main.keys")
        with monkeypatch.context() as patched:
            patched.setattr("feedline.datasets.lmdb._enumerated", lambda _: pytest.fail("enumerated again"))
            assert LMDB(address, cache=kept_in(tmp_path))[-1] == b"text 59"
        LMDB(address, cache=kept_in(tmp_path), index=tmp_path / "own.keys")
        assert (tmp_path / "own.keys").exists()

    def test_what_cannot_be_read(self, bucket: Bucket, folder: Path, tmp_path: Path) -> None:
        CASES["lmdb in one file"].write(folder)
        bucket.put(folder)
        bucket.write("junk", b"junk" * 4000)
        bucket.write("cut", bucket.read("one.lmdb")[:8192])
        cache = kept_in(tmp_path)
        with pytest.raises(ObjectNotFoundError, match=r"memory://far/gone"):
            LMDB("memory://far/gone", cache=cache)
        with pytest.raises(SampleError, match=r"memory://far/junk cannot be opened as an LMDB environment"):
            LMDB("memory://far/junk", cache=cache)
        with pytest.raises(SampleError, match=r"memory://far/cut is truncated: the file has 8192 bytes"):
            LMDB("memory://far/cut", cache=cache)
        with pytest.raises(ArgumentError, match=r"LMDB reads one environment; memory://far/\* stands for 4"):
            LMDB("memory://far/*", cache=cache)


class TestFiles:
    def test_a_manifest_of_objects(self, bucket: Bucket, folder: Path, tmp_path: Path) -> None:
        CASES["files"].write(folder)
        root, near = bucket.put(folder), manifest(str(folder), str(folder))
        for store in ({}, {"cache": kept_in(tmp_path)}):
            far = manifest(root, str(folder), **store)
            all_ways_agree(far, PLACES)
            assert equal(far.__getitems__(PLACES), near.__getitems__(PLACES))
            assert len(far.wants(np.array(PLACES))) == (len(PLACES) if store else 0)
        bucket.remove("03.txt")
        gone = r"'03.txt' of row 3 \(id = 3\) of the query .* does not exist: it was moved or deleted"
        far = manifest(root, str(folder))
        for fetch in (far.__getitem__, lambda at: far.__getitems__([0, at])):
            with pytest.raises(ObjectNotFoundError, match=gone):
                fetch(3)
        with fl.DataLoader(far, 10, on_error="skip") as loader:
            assert sum(len(batch["id"]) for batch in loader) == COUNT - 1

    def test_an_object_that_is_gone_or_damaged(self, bucket: Bucket, folder: Path) -> None:
        _, far = both("pictures", bucket, folder)
        names = list(far.paths)
        bucket.remove(names[1].removeprefix("far/"))
        bucket.write(names[2].removeprefix("far/"), b"no picture")
        for fetch in (lambda at: far[at], lambda at: far.gather(np.array([0, at]), torch_empty, None)):
            with pytest.raises(ObjectNotFoundError, match=rf"memory://{names[1]} does not exist: it was moved or dele"):
                fetch(1)
            with pytest.raises(SampleError, match=rf"memory://{names[2]}"):
                fetch(2)

    def test_paths_do_not_lead_out(self, bucket: Bucket, folder: Path) -> None:
        CASES["files"].write(folder)
        data = manifest(bucket.put(folder), str(folder))
        data._columns["path"] = manifest(bucket.address, str(folder))._columns["path"]
        with pytest.raises(SampleError, match=r"'../x' is no path within a store"):
            data._files("../x", None, lambda: "x")


class TestImageFolder:
    def test_order_and_classes_are_those_of_this_machine(self, bucket: Bucket, folder: Path) -> None:
        for name in ("b/2.jpg", "b/10.JPG", "a/x/1.png", "a/x-y/1.png", "a/x.y/0.png", "a/z.jpeg", "a/n.txt", "0.jpg"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(1, (24, 18)))
        near, far = ImageFolder(folder), ImageFolder(bucket.put(folder))
        assert (far.classes, far.class_to_idx, far.targets) == (near.classes, near.class_to_idx, near.targets)
        assert far.samples == [(path.replace(str(folder), "memory://far"), label) for path, label in near.samples]
        assert far.find_classes(far.root) == near.find_classes(near.root)
        raw = ImageFolder(
            bucket.address, is_valid_file=lambda path: path.startswith("memory://far/a/x"), allow_empty=True
        )
        assert [path for path, _ in raw.samples] == [path for path, _ in far.samples if "/a/x" in path]
        assert pickle.loads(pickle.dumps(far))[0][0].size == (24, 18)

    def test_a_subclass_finds_other_classes(self, bucket: Bucket, folder: Path, tmp_path: Path) -> None:
        class Two(ImageFolder):
            def find_classes(self, _: Any) -> tuple[list[str], dict[str, int]]:
                return ["odd", "even"], {"class 2": 5, "class 0": 5, "nowhere": 1}

        CASES["folder"].write(folder)
        near = Two(folder, allow_empty=True)
        far = Two(bucket.put(folder), CROP, allow_empty=True, cache=kept_in(tmp_path))
        assert [path.removeprefix("memory://far") for path, _ in far.samples] == [
            path.removeprefix(str(folder)) for path, _ in near.samples
        ]
        assert far.__getitems__([30])[0][1] == 5

    def test_a_kept_listing_spares_the_next(
        self, bucket: Bucket, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        CASES["folder"].write(folder)
        kept, root = tmp_path / "listing", bucket.put(folder)
        first = ImageFolder(root, CROP, listing=kept, cache=kept_in(tmp_path))
        monkeypatch.setattr(MemoryFileSystem, "find", lambda *_, **__: pytest.fail("listed again"))
        again = ImageFolder(root, CROP, listing=kept, cache=kept_in(tmp_path))
        assert list(again.samples) == list(first.samples)
        assert again.classes == first.classes
        assert (
            [want for _, want in again.wants(np.array([3]))] == [want for _, want in first.wants(np.array([3]))] != []
        )
        monkeypatch.undo()
        assert len(ImageFolder(root, listing=kept, extensions=(".png",), allow_empty=True)) == 0
        ImageFolder(folder, listing=tmp_path / "local")
        with pytest.raises(SampleError, match=r"local is not the listing of an ImageFolder in a store: give listing="):
            ImageFolder(root, listing=tmp_path / "local")

    def test_a_loader_of_ones_own_gets_a_file(self, bucket: Bucket, folder: Path) -> None:
        CASES["folder"].write(folder)
        data = ImageFolder(bucket.put(folder), loader=lambda file: file.read(2))
        assert data[0] == (b"\xff\xd8", 0)

    def test_samples_can_be_assigned_below_the_root(self, bucket: Bucket, folder: Path, tmp_path: Path) -> None:
        CASES["folder"].write(folder)
        data = ImageFolder(bucket.put(folder), CROP, cache=kept_in(tmp_path))
        data.samples = [*data.samples[7:9], ("memory://elsewhere/x.jpg", 3)]
        assert data[1][1] == data.samples[1][1]
        assert data.wants(np.array([0]))[0][1].stop is None
        with pytest.raises(SampleError, match=r"memory://elsewhere/x.jpg does not lie below memory://far"):
            data[2]

    def test_pictures_that_are_gone_changed_or_none(self, bucket: Bucket, folder: Path, tmp_path: Path) -> None:
        CASES["folder"].write(folder)
        root = bucket.put(folder)
        fused, plain = ImageFolder(root, CROP), ImageFolder(root)
        known = ImageFolder(root, CROP, cache=kept_in(tmp_path))
        names = [path.removeprefix("memory://far/") for path, _ in plain.samples[:3]]
        bucket.remove(names[1])
        bucket.write(names[2], b"no picture")
        batches = [lambda at: fused.gather(np.array([0, at]), torch_empty, None), fused.__getitem__, plain.__getitem__]
        for fetch in (*batches, lambda at: plain.__getitems__([0, at])):
            with pytest.raises(
                ObjectNotFoundError, match=rf"{names[1]} \(sample 1 of the ImageFolder memory://far\) is"
            ):
                fetch(1)
            with pytest.raises(SampleError) as raised:
                fetch(2)
            assert f"{names[2]} (sample 2 of the ImageFolder memory://far)" in raised.value.__notes__[0]
        with pytest.raises(ObjectChangedError, match=f"{names[2]} changed"):
            known[2]
        with fl.DataLoader(fused, 10, on_error="skip") as loader:
            assert sum(len(labels) for _, labels in loader) == COUNT - 2

    def test_no_pictures(self, bucket: Bucket, folder: Path) -> None:
        bucket.write("loose.jpg", jpeg(1))
        with pytest.raises(FileNotFoundError, match=r"memory://far holds no class folders: pictures lie in root/class"):
            ImageFolder(bucket.address)
        bucket.write("c/readme.txt", b"")
        with pytest.raises(FileNotFoundError, match=r"no file that ends with .* in the class folder c of memory://far"):
            ImageFolder(bucket.address)
