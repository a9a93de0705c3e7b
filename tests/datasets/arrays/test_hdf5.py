from __future__ import annotations

import ctypes
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest
import torch
from format_cases import all_ways_agree, hidden
from preloaded import Preloaded
from torch.utils.data import DataLoader

import feedline as fl
from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead
from feedline.datasets import HDF5
from feedline.datasets.arrays import h5py_layout
from feedline.errors import ArgumentError, MissingExtraError, SampleError, StateError
from feedline.stores import files
from feedline.stores.local import RECHECK_S

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


@pytest.mark.parametrize(
    ("names", "cache_nbytes"),
    [
        *(("flat", 0), ("chunked", 0), ("chunked", 1 << 20)),
        *((["chunked", "part/labels"], 1 << 20), ({"x": "flat", "y": "flags"}, 0)),
    ],
)
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
    assert reader_of(dataset) is None


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
    assert reader_of(dataset) is None


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


def test_unwritten_values_are_the_fill_value_of_the_file(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "new.h5", "w") as file:
        file.create_dataset("zeros", (4, 2), "f4")
        file.create_dataset("nothing", (0, 2), "f4")
    assert HDF5(tmp_path / "new.h5", "zeros").__getitems__([1, 3])[0].tolist() == [0, 0]
    assert len(HDF5(tmp_path / "new.h5", "nothing")) == 0


def test_values_of_an_array_type_are_arrays(tmp_path: Path) -> None:
    """As MATLAB and programs in C write them: the type has a shape, too."""
    rows = np.arange(COUNT * 6, dtype=">i4").reshape(COUNT, 2, 3)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, chunks in (("whole", None), ("chunked", (7,))):
            file.create_dataset(name, (COUNT,), np.dtype((">i4", (2, 3))), chunks=chunks)[...] = rows
    with fsspec.open("memory://h5-array/a.h5", "wb") as remote:
        remote.write((tmp_path / "a.h5").read_bytes())
    for path in (tmp_path / "a.h5", "memory://h5-array/a.h5"):
        data = HDF5(path, ["whole", "chunked"])
        all_ways_agree(data, [3, -1, 17, 3, 0])
        assert [[part.tolist() for part in data[i]] for i in range(COUNT)] == [[row.tolist()] * 2 for row in rows]


@pytest.mark.parametrize("kind", ["offset", "precision", "exponent"])
def test_values_that_use_a_part_of_their_bits(tmp_path: Path, kind: str) -> None:
    """HDF5 converts them as it reads; the bytes of the file are other numbers."""
    stored = h5py.h5t.STD_I32LE.copy() if kind != "exponent" else h5py.h5t.IEEE_F32LE.copy()
    if kind == "exponent":
        stored.set_ebias(100)
    else:
        stored.set_precision(20)
        stored.set_offset(4 if kind == "offset" else 0)
    values = np.arange(COUNT, dtype=np.float32 if kind == "exponent" else np.int32) * 1000 - 7
    with h5py.File(tmp_path / "a.h5", "w") as file:
        space = h5py.h5s.create_simple((COUNT,))
        h5py.h5d.create(file.id, b"x", stored, space).write(h5py.h5s.ALL, h5py.h5s.ALL, values)
        expected = file["x"][:].tolist()
    assert expected == values.tolist()
    with fsspec.open("memory://h5-bits/a.h5", "wb") as remote:
        remote.write((tmp_path / "a.h5").read_bytes())
    for path in (tmp_path / "a.h5", "memory://h5-bits/a.h5"):
        data = HDF5(path, "x")
        assert [data[i].item() for i in range(COUNT)] == expected
        assert [each.item() for each in data.__getitems__([3, -1])] == [expected[3], expected[-1]]


@pytest.mark.parametrize("dtype", ["S8", h5py.string_dtype("ascii"), h5py.string_dtype("utf-8", 8)])
def test_texts_are_utf8_whatever_their_type_declares(tmp_path: Path, dtype: Any) -> None:
    """h5py declares NumPy's bytes as ASCII, and so do most writers."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.array(["größe".encode(), b"b"], "S8").astype(dtype), dtype=dtype)
        file.create_dataset("bytes", data=np.array([b"a", b"\xff"], "S8").astype(dtype), dtype=dtype)
    data = HDF5(tmp_path / "a.h5", "x")
    assert [data[0], data[1]] == data.__getitems__([0, 1]) == ["größe", "b"]
    with pytest.raises(SampleError, match=r"rows 0 to 1 of 'bytes' in .*a\.h5 are not UTF-8 .* as uint8"):
        HDF5(tmp_path / "a.h5", "bytes")[0]


def test_texts_of_an_array_type_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (COUNT,), np.dtype(("S3", (2,))))
    with pytest.raises(ArgumentError, match=r"'x' in .*a\.h5 holds \('S3', \(2,\)\), which no tensor can hold"):
        HDF5(tmp_path / "a.h5", "x")


def test_texts_of_several_dimensions(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file.create_dataset("pairs", data=[[f"ä{i}", f"b{i}"] for i in range(5)], dtype=h5py.string_dtype())
        file.create_dataset("fixed", data=np.array([[[b"x", b"y"]]] * 5))
        ragged = file.create_dataset("ragged", (5, 2), h5py.vlen_dtype(np.int16))
        for i in range(5):
            ragged[i, 1] = np.arange(i)
    dataset = HDF5(tmp_path / "t.h5", ["pairs", "fixed", "ragged"])
    pair, fixed, rows = dataset[3]
    assert (pair, fixed) == (["ä3", "b3"], [["x", "y"]])
    assert [row.tolist() for row in rows] == [[], [0, 1, 2]]
    with fl.DataLoader(HDF5(tmp_path / "t.h5", "pairs"), 5) as loader:
        assert list(loader) == list(DataLoader(HDF5(tmp_path / "t.h5", "pairs"), 5))


class TestSeveralFiles:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        rows, start = ROWS.reshape(COUNT, 6), 0
        for name, count in (("a", 20), ("b", 0), ("c", 7), ("d", 23)):
            with h5py.File(tmp_path / f"{name}.h5", "w") as file:
                part = rows[start : start + count]
                file["flat"] = part
                file.create_dataset("chunked", data=part, chunks=(8, 2), maxshape=(None, 6), compression="gzip")
                file.create_dataset("words", data=[f"é{i}" for i in range(start, start + count)], dtype="T")
                start += count
        return tmp_path

    @pytest.mark.parametrize(
        ("names", "cache_nbytes"),
        [("flat", 0), ("chunked", 0), ({"x": "chunked", "word": "words"}, 1 << 20), (None, 1 << 20)],
    )
    def test_rows_come_one_after_the_other(self, folder: Path, names: Any, cache_nbytes: int) -> None:
        dataset = HDF5(folder / "*.h5", names, cache_nbytes=cache_nbytes)
        assert len(dataset) == COUNT
        all_ways_agree(dataset, [3, -1, 20, 3, 0, 49, 26, 27, 19, 21, 8, 7])
        for at in range(COUNT):
            sample = dataset[at]
            row = sample if isinstance(sample, torch.Tensor) else sample.get("x", sample.get("flat"))
            assert row.tolist() == ROWS[at].ravel().tolist()
            if names is None:
                assert (sample["words"], sample["chunked"].tolist()) == (f"é{at}", row.tolist())
        assert torch.equal(*(torch.cat([*DataLoader(HDF5(folder, "flat"), 9, num_workers=n)]) for n in (0, 2)))

    def test_the_forms_of_paths(self, folder: Path) -> None:
        paths = [folder / "d.h5", f"file://{folder}/a.h5"]
        assert HDF5(paths, "words").__getitems__([0, 23]) == ["é27", "é0"]
        assert len(HDF5(folder, "words")) == len(HDF5(f"{folder}/{{a,b,c,d}}.h5", "words")) == COUNT

    def test_shards_and_addresses(self, folder: Path) -> None:
        assert HDF5(folder, "chunked").shard_sizes.tolist() == [8, 8, 4, 7, 8, 8, 7]
        dataset = HDF5(folder, "flat")
        assert dataset.shard_sizes.tolist() == [20, 7, 23]
        assert dataset.paths == [str(folder / f"{name}.h5") for name in "abcd"]
        assert [dataset.address(i) for i in (0, 20, -1)] == [
            (str(folder / "a.h5"), "row 0"),
            (str(folder / "c.h5"), "row 0"),
            (str(folder / "d.h5"), "row 22"),
        ]

    def test_each_chunk_is_kept_for_its_file(self, folder: Path) -> None:
        dataset = HDF5(folder, "chunked")
        dataset.__getitems__(range(COUNT))
        caches = [dataset._rows(file)[0]._cache for file in (0, 2, 3)]
        assert {cache._whole.loads for cache in caches} == {7}

    def test_few_are_open_at_once(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "most_open_files", lambda: 2)
        dataset = HDF5([folder / "a.h5", folder / "c.h5", folder / "d.h5"] * 8, "flat")
        rows = dataset.__getitems__(range(len(dataset)))
        held = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        assert sum(each.suffix == ".h5" for each in held) <= 2 * 2
        assert torch.equal(torch.stack(rows), torch.from_numpy(np.tile(ROWS.reshape(COUNT, 6), (8, 1))))

    def test_files_that_do_not_go_together(self, folder: Path) -> None:
        with h5py.File(folder / "e.h5", "w") as file:
            file["flat"] = np.zeros((3, 6), "f8")
        with pytest.raises(ArgumentError, match=r"a.h5 has chunked, flat, words, but .*e.h5 has flat; name the"):
            HDF5(folder)
        with pytest.raises(
            ArgumentError, match=r"'flat' has rows of \(6,\), float32, in .*a.h5, but of \(6,\), float64"
        ):
            HDF5(folder, "flat")
        with pytest.raises(ArgumentError, match=r"e.h5 has no dataset 'words'; it has flat"):
            HDF5(folder, "words")


class TestOtherFiles:
    """Datasets whose data is in other files."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        with h5py.File(tmp_path / "b.h5", "w", userblock_size=1024) as file:
            file["first"] = np.full(90, -7)
            file["x"] = np.arange(10) * 10
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["much"] = np.arange(1000)
            file["linked"] = h5py.ExternalLink("b.h5", "/x")
            layout = h5py.VirtualLayout((20,), "i8")
            layout[:10] = h5py.VirtualSource("b.h5", "x", (10,))
            layout[10:] = h5py.VirtualSource(str(tmp_path / "b.h5"), "x", (10,))
            file.create_virtual_dataset("virtual", layout, fillvalue=-1)
        with h5py.File(tmp_path / "c.h5", "w") as file:
            layout = h5py.VirtualLayout((20,), "i8")
            layout[:] = h5py.VirtualSource("a.h5", "virtual", (20,))
            file.create_virtual_dataset("nested", layout, fillvalue=-1)
            raw = [(str(tmp_path / "raw.bin"), 0, h5py.h5f.UNLIMITED)]
            file.create_dataset("raw", data=np.arange(10), external=raw)
        return tmp_path

    def test_they_are_found(self, folder: Path) -> None:
        found = HDF5(folder / "a.h5", "linked").__getitems__(range(10))
        assert torch.stack(found).tolist() == list(range(0, 100, 10))
        for file, name in (("a", "virtual"), ("c", "nested")):
            dataset = HDF5(folder / f"{file}.h5", name)
            assert [dataset[1].item(), dataset[19].item()] == [10, 90]
        assert HDF5(folder / "c.h5", "raw")[7].item() == 7

    @pytest.mark.parametrize(("file", "name"), [("a", "virtual"), ("c", "nested")])
    def test_a_missing_source_is_no_fill_value(self, folder: Path, file: str, name: str) -> None:
        data = pickle.dumps(HDF5(folder / f"{file}.h5", name))
        (folder / "b.h5").rename(folder / "away.h5")
        reported = rf"data of /{name} in .*/{file}.h5 are in a file that does not exist: .*/b.h5 "
        with pytest.raises(FileNotFoundError, match=reported):
            HDF5(folder / f"{file}.h5", name)
        with pytest.raises(FileNotFoundError, match=reported):
            pickle.loads(data)[0]
        (folder / "b.h5").write_bytes((folder / "away.h5").read_bytes()[:1500])
        with pytest.raises(SampleError, match=r"b.h5 cannot be opened as an HDF5 file"):
            HDF5(folder / f"{file}.h5", name)
        with h5py.File(folder / "b.h5", "w") as other:
            other["y"] = 1
        with pytest.raises(SampleError, match=rf"/{name} in .* is a virtual dataset whose source x in .*b.h5 does no"):
            HDF5(folder / f"{file}.h5", name)

    def test_raw_files_and_links(self, folder: Path) -> None:
        (folder / "raw.bin").unlink()
        with pytest.raises(FileNotFoundError, match=r"data of /raw in .*c.h5 are in a file that does not exist: .*raw"):
            HDF5(folder / "c.h5", "raw")
        (folder / "b.h5").unlink()
        for names in ("linked", None):
            with pytest.raises(ArgumentError, match=r"'linked' in .*a.h5 is a link to /x in b.h5, which cannot be"):
                HDF5(folder / "a.h5", names)

    def test_sources_are_looked_for_where_the_library_does(self, preloaded: Preloaded, folder: Path) -> None:
        cases = {
            ("in", ""): True,
            ("away", ""): False,
            ("away", "${ORIGIN}/in"): True,
            ("away", "/nowhere:../in"): True,
            ("away", "/nowhere:${ORIGIN}/in"): False,  # it is expanded at the beginning only
        }
        for name in ("in", "away"):
            (folder / name).mkdir()
        (folder / "b.h5").rename(folder / "in/b.h5")
        # The library reads the variable once: each case needs a process that has not loaded it yet.
        program = (
            "import os\nfrom feedline.datasets import HDF5\n"
            f"for cwd, prefix in {[*cases]}:\n"
            "    if os.fork():\n        os.wait()\n        continue\n"
            "    os.chdir(cwd)\n    os.environ['HDF5_VDS_PREFIX'] = prefix\n    import h5py\n"
            "    try: found = HDF5('../a.h5', 'virtual')[1].item()\n    except FileNotFoundError: found = 'gone'\n"
            "    print(h5py.File('../a.h5')['virtual'][1], found, flush=True)\n    os._exit(0)\n"
        )
        code, found = preloaded.run_code(program, folder)
        assert code == 0, found
        assert found.splitlines() == ["10 10" if there else "-1 gone" for there in cases.values()]


class _FilterClass(ctypes.Structure):
    """HDF5's H5Z_class2_t."""

    CALL = ctypes.CFUNCTYPE(
        ctypes.c_size_t,
        ctypes.c_uint,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
    )
    _fields_ = (
        ("version", ctypes.c_int),
        ("id", ctypes.c_int),
        ("encoder", ctypes.c_uint),
        ("decoder", ctypes.c_uint),
        ("name", ctypes.c_char_p),
        ("can_apply", ctypes.c_void_p),
        ("set_local", ctypes.c_void_p),
        ("filter", CALL),
    )


def _invert(_f: int, _n: int, _v: int, nbytes: int, _size: int, buffer: Any) -> int:
    """Filter that inverts all bits."""
    held = np.ctypeslib.as_array(ctypes.cast(buffer[0], ctypes.POINTER(ctypes.c_uint8)), (nbytes,))
    np.invert(held, out=held)
    return nbytes


# HDF5 keeps a registered filter, and this memory, until the process ends.
_INVERTS = _FilterClass(1, 300, 1, 1, b"inverted", None, None, _FilterClass.CALL(_invert))
_PLUGIN = _FilterClass(1, 302, 1, 1, b"inverted", None, None, _FilterClass.CALL(_invert))


def write_filtered(path: Path, code: int, mask: int = 0) -> Path:
    """Chunks of rows behind a filter, written without it."""
    with h5py.File(path, "w") as file:
        made = file.create_dataset(
            "x", ROWS.shape, "f4", chunks=(25, 2, 3), compression=code, allow_unknown_filter=True
        )
        for start in (0, 25):
            stored = ROWS[start : start + 25].view(np.uint8)
            made.id.write_direct_chunk((start, 0, 0), (stored if mask else ~stored).tobytes(), mask)
    return path


class TestFilters:
    @pytest.mark.parametrize("remote", [False, True])
    @pytest.mark.parametrize(("code", "name"), [(32026, r"blosc2 \(32026\)"), (301, r".*\(301\)")])
    def test_a_filter_that_is_not_installed_is_no_damage(
        self, tmp_path: Path, code: int, name: str, remote: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(h5py_layout, "find_spec", lambda _: None)
        path = str(write_filtered(tmp_path / "f.h5", code))
        if remote:
            fsspec.filesystem("memory").put(path, "/filtered/f.h5")
            path = "memory://filtered/f.h5"
        with pytest.raises(MissingExtraError, match=rf"/x in .*f.h5 is compressed by the filter {name}.* hdf5plugin"):
            HDF5(path, "x")

    def test_a_source_of_a_virtual_dataset(self, tmp_path: Path) -> None:
        write_filtered(tmp_path / "f.h5", 301)
        layout = h5py.VirtualLayout(ROWS.shape, "f4")
        layout[:] = h5py.VirtualSource(tmp_path / "f.h5", "x", ROWS.shape)
        with h5py.File(tmp_path / "virtual.h5", "w") as file:
            file.create_virtual_dataset("all", layout)
        with pytest.raises(MissingExtraError, match=r"/x in .* is compressed by the filter"):
            HDF5(tmp_path / "virtual.h5", "all")

    def test_chunks_that_were_stored_without_it(self, tmp_path: Path) -> None:
        dataset = HDF5(write_filtered(tmp_path / "f.h5", 301, mask=1), "x")
        assert dataset[30].tolist() == ROWS[30].tolist()

    def test_a_registered_filter_works_in_workers(self, tmp_path: Path) -> None:
        h5py.h5z.register_filter(ctypes.addressof(_INVERTS))
        dataset = HDF5(write_filtered(tmp_path / "f.h5", 300), "x")
        with fl.DataLoader(dataset, 10, num_workers=2, worker_method="process") as loader:
            assert torch.equal(torch.cat(list(loader)), torch.from_numpy(ROWS))

    def test_hdf5plugin_is_imported_where_it_is_needed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        registers = f"import h5py\nh5py.h5z.register_filter({ctypes.addressof(_PLUGIN)})\n"
        (tmp_path / "hdf5plugin.py").write_text(registers)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, "hdf5plugin", None)
        monkeypatch.delitem(sys.modules, "hdf5plugin")
        dataset = HDF5(write_filtered(tmp_path / "f.h5", 302), "x")
        assert dataset[30].tolist() == ROWS[30].tolist()


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
        with pytest.raises(StateError, match=r"'flat' in .*a.h5 has changed .* had 50 rows .* has 7 of \(2, 3\) now"):
            pickle.loads(data)[0]

    def test_a_mapped_file_that_is_cut_short_while_it_is_read(self, path: Path) -> None:
        dataset = HDF5(path, "flat")
        assert dataset[0].tolist() == ROWS[0].tolist()
        os.truncate(path, 100)
        time.sleep(1.5 * RECHECK_S)
        with pytest.raises(StateError, match=r"a.h5 has changed since this dataset was made"):
            dataset[0]


class TestDamage:
    def test_what_is_not_there(self, path: Path, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no such file: .*gone.h5"):
            HDF5(tmp_path / "gone.h5", "x")
        with pytest.raises(ArgumentError, match=r"a.h5 has no dataset 'x'; it has chunked, flags, flat, part/labels"):
            HDF5(path, "x")
        with pytest.raises(ArgumentError, match=r"has no dataset 'part'"):
            HDF5(path, "part")

    def test_names_that_are_not_utf8(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file[b"gr\xf6\xdfe"] = file["x"] = np.arange(6)
        dataset = HDF5(tmp_path / "a.h5")
        assert {name.encode(errors="surrogateescape") for name in dataset[3]} == {b"gr\xf6\xdfe", b"x"}
        assert pickle.loads(pickle.dumps(HDF5(tmp_path / "a.h5", "gr\udcf6\udcdfe")))[3].item() == 3
        with pytest.raises(ArgumentError, match=r"has no dataset 'y'; it has gr\\xf6\\xdfe, x"):
            HDF5(tmp_path / "a.h5", "y")

    @pytest.mark.parametrize(
        ("begin", "message"),
        [(b"PAR1", "is a Parquet file, not HDF5; read it with Parquet"), (b"CDF\1", "is a NetCDF file of version 3")],
    )
    def test_another_format_is_named(self, tmp_path: Path, begin: bytes, message: str) -> None:
        (tmp_path / "a.h5").write_bytes(begin + bytes(100))
        with pytest.raises(SampleError, match=rf"a\.h5 {message}"):
            HDF5(tmp_path / "a.h5")

    def test_arrays_in_groups_have_to_be_named(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["df/block0_values"], file["df/axis0"] = np.arange(6), np.arange(2)
        with pytest.raises(ArgumentError, match=r"a\.h5 has no array at its top level; name arrays of its groups with"):
            HDF5(tmp_path / "a.h5")
        assert HDF5(tmp_path / "a.h5", "df/block0_values")[5].item() == 5

    def test_what_does_not_fit(self, path: Path) -> None:
        with h5py.File(path, "a") as file:
            file["few"] = np.arange(3)
            file["one"] = 1.0
            file["pairs"] = np.zeros(COUNT, [("a", "i4"), ("b", "V4")])
        with pytest.raises(ArgumentError, match=r"one length, but in .*a.h5 'flat' has 50, 'few' has 3"):
            HDF5(path, ["flat", "few"])
        fsspec.filesystem("memory").put(str(path), "/single/a.h5")
        for place in (path, "memory://single/a.h5"):
            with pytest.raises(ArgumentError, match=r"'one' in .*a.h5 is a single value"):
                HDF5(place, "one")
        with pytest.raises(ArgumentError, match=r"'pairs' in .* holds the field b of .*, which no tensor can hold"):
            HDF5(path, "pairs")

    def test_a_type_that_the_library_does_not_read(self, path: Path) -> None:
        with h5py.File(path, "a") as file:
            h5py.h5d.create(file.id, b"times", h5py.h5t.UNIX_D64LE, h5py.h5s.create_simple((COUNT,)))
        with pytest.raises(ArgumentError, match=r"'times' in .*a.h5 has a type that h5py does not read .*Time64Col"):
            HDF5(path, "times")

    def test_a_file_that_is_none_of_these(self, tmp_path: Path) -> None:
        (tmp_path / "b.h5").write_bytes(b"\0nothing of the kind")
        with pytest.raises(SampleError, match=r"b.h5 cannot be opened as an HDF5 file .*written completely\?"):
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
            lambda i: dataset.read_batch(BatchRead(np.array([i]), 0)),
        ):
            with pytest.raises(IndexError, match=rf"index {index} is out of range for HDF5 with 50 samples"):
                fetch(index)

    def test_a_missing_library(self, path: Path) -> None:
        with hidden("h5py"), pytest.raises(MissingExtraError, match=r"pip install 'feedline\[hdf5\]'"):
            HDF5(path, "flat")


@pytest.mark.parametrize("signature", [b"HEAP", b"TREE"])
def test_damaged_metadata_is_named(tmp_path: Path, signature: bytes) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(5)
    data = (tmp_path / "a.h5").read_bytes()
    (tmp_path / "a.h5").write_bytes(data.replace(signature, b"HOLE"))
    for columns in (None, "x"):
        with pytest.raises(SampleError, match=r"a.h5 cannot be read: it is damaged .*; copy it again"):
            HDF5(tmp_path / "a.h5", columns)[0]


@pytest.mark.parametrize("column", ["words", "ragged", "contiguous"])
def test_a_damaged_heap_is_an_error_although_hdf5_would_read_it_forever(column: str, tmp_path: Path) -> None:
    path, count = tmp_path / "a.h5", 2000
    with h5py.File(path, "w", userblock_size=512) as file:
        words = np.array([f"word {i}" * (i % 9) for i in range(count)], object)
        if column == "words":
            file.create_dataset("words", data=words, dtype=h5py.string_dtype(), chunks=(100,), compression="gzip")
        elif column == "contiguous":
            file.create_dataset("contiguous", data=words, dtype=h5py.string_dtype())
        else:
            rows = file.create_dataset("ragged", (count,), h5py.vlen_dtype(np.int16), chunks=(100,))
            rows[:] = np.array([np.arange(1 + i % 9, dtype=np.int16) for i in range(count)], object)
    whole = path.read_bytes()
    memory = fsspec.filesystem("memory")
    heaps = [at for at in range(0, len(whole), 8) if whole.startswith(b"GCOL", at)]
    assert heaps
    # The first page of a heap, zeros from an object on, and objects that lead out of it.
    damages = [(16, bytes(4080)), (1024, bytes(3072)), (24, b"\xff" * 8), (24, b"\xe0" + b"\xff" * 7)]
    for start, damage in damages:
        data = bytearray(whole)
        for at in heaps:
            data[at + start : at + start + len(damage)] = damage
        path.write_bytes(data)
        memory.pipe("/heaps/a.h5", bytes(data))
        for place in (path, "memory://heaps/a.h5"):
            with pytest.raises(SampleError, match=r"a\.h5 is damaged: the heap of its strings .* copy it again"):
                HDF5(place, column).__getitems__(list(range(count)))
    memory.rm("/heaps", recursive=True)


def test_a_virtual_dataset_with_a_damaged_list_of_sources_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((20,), "i8")
        for number in range(2):
            file[f"part{number}"] = np.arange(10)
            layout[number * 10 : number * 10 + 10] = h5py.VirtualSource(file[f"part{number}"])
        file.create_virtual_dataset("all", layout)
    assert HDF5(path, "all")[19] == 9
    data = bytearray(path.read_bytes())
    at = data.find(b"GCOL") + 16
    data[at : at + 4080] = bytes(4080)
    path.write_bytes(data)
    for columns in ("all", None):
        with pytest.raises(SampleError, match=r"a\.h5 is damaged: the heap"):
            HDF5(path, columns)
