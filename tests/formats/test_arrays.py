"""Arrays, chunked arrays and databases in a store: what is special to each of them."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from format_cases import equal
from preloaded import Preloaded

from feedline.core.dataset import BatchRead
from feedline.core.tensors import allocate_tensor
from feedline.datasets import HDF5, LMDB, ArrayFile, Raw, TokenFile, Zarr
from feedline.errors import ArgumentError, SampleError
from feedline.stores import ObjectChangedError, ObjectNotFoundError, statistics
from formats.arrays import COUNT, FORMATS, ROWS, write_arrays, write_hdf5, write_lmdb
from formats.places import Memory, small_pieces


class TestArrays:
    def test_rows_stored_together_are_reported(self, memory: Memory, folder: Path) -> None:
        form = FORMATS["npy"]
        form.write(folder)
        near, far = form.open(str(folder)), form.open(memory.put(folder))
        assert near.shard_sizes.tolist() == far.shard_sizes.tolist() == [COUNT]
        np.save(folder / "wide.npy", np.zeros((5, 1 << 20), np.uint8))
        assert ArrayFile(f"{memory.put(folder)}/wide.npy").shard_sizes.tolist() == [4, 1]
        np.zeros(5 << 20, np.uint16).tofile(folder / "t.bin")
        tokens = TokenFile(f"{memory.put(folder)}/t.bin", 1 << 20)
        assert tokens.shard_sizes.tolist() == [2, 2, 1]
        assert TokenFile(folder / "t.bin", 1 << 20).shard_sizes.tolist() == [5]

    def test_here_and_there_at_once(self, memory: Memory, folder: Path) -> None:
        write_arrays(folder)
        data = ArrayFile([f"{memory.put(folder)}/x.npy", str(folder / "y.npy")])
        assert equal(
            data.read_batch(BatchRead(np.array([5, 1]), allocate_tensor)),
            ArrayFile([folder / "x.npy", folder / "y.npy"]).read_batch(BatchRead(np.array([5, 1]), allocate_tensor)),
        )

    def test_what_cannot_be_read(self, memory: Memory, folder: Path) -> None:
        write_arrays(folder)
        np.save(folder / "columns.npy", np.asfortranarray(ROWS))
        (folder / "junk.npy").write_bytes(b"junk" * 9)
        (folder / "cut.npy").write_bytes((folder / "x.npy").read_bytes()[:500])
        root = memory.put(folder)
        with pytest.raises(ObjectNotFoundError, match=r"memory://far/gone.npy"):
            ArrayFile(f"{root}/gone.npy")
        with pytest.raises(ArgumentError, match=r"far/columns.npy is in Fortran order.*ascontiguousarray"):
            ArrayFile(f"{root}/columns.npy")
        with pytest.raises(SampleError, match=r"far/junk.npy is not a .npy file"):
            ArrayFile(f"{root}/junk.npy")
        with pytest.raises(
            SampleError, match=r"far/cut.npy is truncated: the file has 500 bytes, its header requires \d+"
        ):
            ArrayFile(f"{root}/cut.npy")
        with pytest.raises(SampleError, match=r"far/raw.bin does not fit"):
            ArrayFile(Raw(f"{root}/raw.bin", np.int64, (7,)))
        with pytest.raises(ArgumentError, match=r"far/\?.npy matches 2 files: name one"):
            ArrayFile(f"{root}/?.npy")
        np.save(folder / "few.npy", np.zeros(3))
        memory.put(folder)
        with pytest.raises(ArgumentError, match=r"far/x.npy has 60, memory://far/few.npy has 3"):
            ArrayFile([f"{root}/x.npy", f"{root}/few.npy"])

    @pytest.mark.parametrize("cached", [False, True])
    def test_an_object_that_changes(self, memory: Memory, folder: Path, tmp_path: Path, cached: bool) -> None:
        np.save(folder / "x.npy", np.zeros((60, 1000)))
        far = ArrayFile(f"{memory.put(folder)}/x.npy", **({"cache": small_pieces(tmp_path)} if cached else {}))
        far[0]
        memory.write("x.npy", bytes(len(memory.read("x.npy"))))
        with pytest.raises(ObjectChangedError, match=r"memory://far/x.npy has changed.* create the dataset again"):
            far.__getitems__([30, 50])

    def test_tokens_that_are_none(self, memory: Memory, folder: Path) -> None:
        np.save(folder / "floats.npy", np.ones(9))
        with pytest.raises(
            ArgumentError, match=r"far/floats.npy holds float64 of 1 dimensions; tokens must be 1-D integers"
        ):
            TokenFile(f"{memory.put(folder)}/floats.npy", 4)
        with pytest.raises(ObjectNotFoundError, match=r"\*.tok: nothing matches"):
            TokenFile("memory://far/*.tok", 4)


class TestHDF5:
    def test_data_are_fetched_before_the_library_asks(
        self, memory: Memory, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_hdf5(folder)
        far = HDF5(f"{memory.put(folder)}/a.h5", ["flat", "chunked", "part/labels"])
        far[0]
        device = far._rows()[1]._prefetch_ranges.__self__._opened._device
        monkeypatch.setattr(device, "_from_blocks", lambda *_: pytest.fail("the library read by itself"))
        before = statistics().requests
        batch = far.read_batch(BatchRead(np.arange(8, COUNT, 8), allocate_tensor))
        assert torch.equal(batch[0], torch.from_numpy(ROWS[8::8]))
        assert torch.equal(batch[0], batch[1])
        assert statistics().requests - before <= 6  # one for each dataset, and each time a request for the version

    @pytest.mark.parametrize("how", ["gone", "changed"])
    def test_failures_of_the_store_come_through(self, memory: Memory, folder: Path, how: str) -> None:
        write_hdf5(folder)
        far = HDF5(f"{memory.put(folder)}/a.h5", ["flat", "chunked", "part/labels"])
        far[0]
        if how == "gone":
            memory.remove("a.h5")
        else:
            memory.write("a.h5", bytes(100))
        wanted = ObjectNotFoundError if how == "gone" else ObjectChangedError
        with pytest.raises(wanted, match=r"memory://far/a.h5"):
            far[40]
        with pytest.raises(wanted, match=r"memory://far/a.h5"):
            pickle.loads(pickle.dumps(far))[0]

    def test_what_cannot_be_read(self, memory: Memory, folder: Path) -> None:
        write_hdf5(folder)
        (folder / "junk.h5").write_bytes(b"junk" * 99)
        (folder / "cut.h5").write_bytes((folder / "a.h5").read_bytes()[:6000])
        root = memory.put(folder)
        with pytest.raises(ObjectNotFoundError, match=r"memory://far/gone.h5"):
            HDF5(f"{root}/gone.h5")
        for name, why in {"junk": "is text, not HDF5", "cut": "cannot be opened as an HDF5 file"}.items():
            with pytest.raises(SampleError, match=rf"far/{name}.h5 {why}"):
                HDF5(f"{root}/{name}.h5")
        with pytest.raises(
            ArgumentError, match=r"far/a.h5 has no dataset 'x'; it has chunked, events, flat, part/labels"
        ):
            HDF5(f"{root}/a.h5", "x")

    def test_several_files(self, memory: Memory, folder: Path) -> None:
        write_hdf5(folder)
        (folder / "b.h5").write_bytes((folder / "a.h5").read_bytes())
        root, names = memory.put(folder), ["flat", "chunked"]
        far, near = HDF5(root, names), HDF5(folder, names)
        places = [3, COUNT + 3, 2 * COUNT - 1, 0, COUNT, COUNT - 1]
        assert equal(far.__getitems__(places), near.__getitems__(places))
        assert equal(pickle.loads(pickle.dumps(far))[COUNT + 9], near[9])
        assert far.address(COUNT) == ("memory://far/b.h5", "row 0")
        assert equal(HDF5([folder / "a.h5", f"{root}/b.h5"], names).__getitems__(places), near.__getitems__(places))

    def test_data_in_other_files_are_refused(self, memory: Memory, folder: Path) -> None:
        write_hdf5(folder)
        for name, source in (("other", "elsewhere.h5"), ("own", ".")):
            with h5py.File(folder / "a.h5", "a") as file:
                layout = h5py.VirtualLayout((COUNT, 2, 3), "f4")
                layout[:] = h5py.VirtualSource(source, "flat", (COUNT, 2, 3))
                file.create_virtual_dataset(name, layout)
        with h5py.File(folder / "a.h5", "a") as file:
            file.create_dataset("outside", (COUNT,), "i4", external=[("raw.bin", 0, h5py.h5f.UNLIMITED)])
        root = memory.put(folder)
        assert HDF5(f"{root}/a.h5", "own")[9].tolist() == ROWS[9].tolist()
        for name in ("other", "outside"):
            with pytest.raises(ArgumentError, match=rf"the data of /{name} in memory://far/a.h5 are in other files"):
                HDF5(f"{root}/a.h5", name)

    def test_a_damaged_chunk_is_named_by_its_rows(self, memory: Memory, folder: Path) -> None:
        write_hdf5(folder)
        with h5py.File(folder / "a.h5", "r") as file:
            chunk = file["chunked"].id.get_chunk_info_by_coord((16, 0, 0))
        with open(folder / "a.h5", "r+b") as damaged:
            damaged.seek(chunk.byte_offset)
            damaged.write(bytes(chunk.size))
        far = HDF5(f"{memory.put(folder)}/a.h5", "chunked")
        for fetch in (far.__getitem__, lambda at: far.__getitems__([0, at, 50])):
            with pytest.raises(SampleError, match=r"rows 16 to 23 of 'chunked' in memory://far/a.h5 cannot be read"):
                fetch(20)
        assert far[15].tolist() == ROWS[15].tolist()

    def test_threads_share_it(self, memory: Memory, folder: Path) -> None:
        write_hdf5(folder)
        far = HDF5(f"{memory.put(folder)}/a.h5")
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

    def test_a_process_that_has_it_open_ends_well(self, preloaded: Preloaded, folder: Path) -> None:
        write_hdf5(folder)
        program = (
            "from feedline.datasets import HDF5\nimport gc, os, pickle\n"
            "kept = HDF5('local://a.h5', 'chunked'); print(kept[9].sum().item())\n"
            "other = HDF5('local://a.h5'); other[0]; del other; gc.collect(); print(kept[17].sum().item())\n"
            "copied = pickle.loads(pickle.dumps(kept)); os.remove('a.h5')\n"
            "try: copied[0]\nexcept FileNotFoundError as error: held = error; print(type(error).__name__)\n"
        )
        assert preloaded.run_code(program, folder) == (0, f"{ROWS[9].sum()}\n{ROWS[17].sum()}\nObjectNotFoundError\n")


class TestZarr:
    def test_a_store_that_is_an_array(self, memory: Memory, folder: Path) -> None:
        zarr.create_array(folder / "bare.zarr", data=ROWS, chunks=(5, 2, 3))
        far = Zarr(f"{memory.put(folder)}/bare.zarr")
        assert far[11].tolist() == ROWS[11].tolist()
        assert far.shard_sizes.tolist() == [5] * 12

    def test_chunks_that_were_never_written(self, memory: Memory, folder: Path, tmp_path: Path) -> None:
        zarr.create_array(folder / "holes.zarr", shape=(20, 2), chunks=(5, 2), dtype="i4", fill_value=7)[:5] = 1
        far = Zarr(f"{memory.put(folder)}/holes.zarr", cache=small_pieces(tmp_path, 4 << 20))
        assert [row.tolist() for row in far.__getitems__([0, 19])] == [[1, 1], [7, 7]]
        assert len(far.ranges(np.array([1, 19]))) == 0  # both are kept
        assert len(far.ranges(np.array([1, 8, 9]))) == 1

    def test_a_zip_file(self, memory: Memory, folder: Path, tmp_path: Path) -> None:
        with zarr.storage.ZipStore(folder / "a.zip", mode="w") as store:
            zarr.open_group(store, mode="w").create_array("x", data=ROWS, chunks=(5, 2, 3))
        address = f"{memory.put(folder)}/a.zip"
        assert Zarr(address, cache=small_pieces(tmp_path, 4 << 20))[20]["x"].tolist() == ROWS[20].tolist()
        with pytest.raises(ArgumentError, match=r"far/a.zip is read by a library that only opens files: give cache="):
            Zarr(address)

    def test_what_cannot_be_read(self, memory: Memory, folder: Path) -> None:
        FORMATS["zarr 3"].write(folder)
        far = FORMATS["zarr 3"].open(memory.put(folder))
        root = memory.root
        with pytest.raises(SampleError, match=r"far/gone.zarr cannot be opened as a Zarr store"):
            Zarr(f"{root}/gone.zarr")
        with pytest.raises(ArgumentError, match=r"far/a.zarr has no array 'z'; it has labels, sharded, x"):
            Zarr(f"{root}/a.zarr", "z")
        memory.write("a.zarr/x/c/2/0/0", b"rubbish" * 9)
        with pytest.raises(SampleError, match=r"rows 16 to 23 of 'x' in memory://far/a.zarr cannot be read"):
            far.__getitems__([0, 20, 50])


class TestLMDB:
    def test_it_needs_a_cache(self, memory: Memory, folder: Path) -> None:
        write_lmdb(folder, "texts")
        with pytest.raises(ArgumentError, match=r"far/texts/data.mdb is read by a library .*: give cache="):
            LMDB(f"{memory.put(folder)}/texts")

    def test_keys_are_enumerated_once(
        self, memory: Memory, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_lmdb(folder, "texts")
        address = f"{memory.put(folder)}/texts"
        assert LMDB(address, cache=small_pieces(tmp_path, 4 << 20))[3] == b"text 3"
        [index] = (tmp_path / "xdg/feedline/indexes").iterdir()
        assert index.name.endswith("-data.mdb.main.keys")
        with monkeypatch.context() as patched:
            patched.setattr("feedline.datasets.lmdb.dataset._enumerate_keys", lambda _: pytest.fail("enumerated again"))
            assert LMDB(address, cache=small_pieces(tmp_path, 4 << 20))[-1] == b"text 59"
        LMDB(address, cache=small_pieces(tmp_path, 4 << 20), index_dir=tmp_path / "own.keys")
        assert (tmp_path / "own.keys").exists()

    def test_what_cannot_be_read(self, memory: Memory, folder: Path, tmp_path: Path) -> None:
        write_lmdb(folder, "one.lmdb", subdir=False)
        memory.put(folder)
        memory.write("junk", b"junk" * 4000)
        memory.write("cut", memory.read("one.lmdb")[:8192])
        cache = small_pieces(tmp_path, 4 << 20)
        with pytest.raises(ObjectNotFoundError, match=r"memory://far/gone"):
            LMDB("memory://far/gone", cache=cache)
        with pytest.raises(SampleError, match=r"memory://far/junk cannot be opened as an LMDB environment"):
            LMDB("memory://far/junk", cache=cache)
        with pytest.raises(SampleError, match=r"memory://far/cut is truncated: the file has 8192 bytes"):
            LMDB("memory://far/cut", cache=cache)
        with pytest.raises(ArgumentError, match=r"LMDB reads one environment; memory://far/\* matches 4"):
            LMDB("memory://far/*", cache=cache)
