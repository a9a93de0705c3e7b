from __future__ import annotations

import gc
import os
import pickle
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorder import Recorder
from rounds import rounds
from torch.utils.data import DataLoader, default_collate

import feedline as fl
from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead
from feedline.core.rng import addressed, derive
from feedline.core.tensors import allocate_tensor
from feedline.core.tree import leaves
from feedline.datasets import ArrayFile, Arrays, Raw, TokenFile
from feedline.errors import ArgumentError, SampleError, StateError
from feedline.stores.local import RECHECK_S

IMAGES = np.arange(10 * 2 * 3, dtype=np.uint8).reshape(10, 2, 3)
LABELS = np.arange(10, dtype=np.int32) - 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.save(tmp_path / "images.npy", IMAGES)
    np.save(tmp_path / "labels.npy", LABELS)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(IMAGES))
    (tmp_path / "bare.bin").write_bytes(b"header!" + IMAGES.tobytes())
    return tmp_path


def made(kind: str, folder: Path) -> Any:  # noqa: PLR0911 - one for each kind
    images, labels = folder / "images.npy", folder / "labels.npy"
    match kind:
        case "one file":
            return ArrayFile(images)
        case "files":
            return ArrayFile([str(images), labels])
        case "named files":
            return ArrayFile({"image": images, "label": labels})
        case "bare":
            return ArrayFile((Raw(folder / "bare.bin", "uint8", (2, 3), offset=7), labels))
        case "fortran":
            return ArrayFile(folder / "fortran.npy")
        case "array":
            return Arrays(LABELS)
        case "tensors":
            return Arrays((torch.from_numpy(IMAGES).float(), torch.ones(10, 2, dtype=torch.bfloat16)))
        case "swapped arrays":
            return Arrays({"x": np.asfortranarray(IMAGES.astype(">c16")), "y": LABELS.astype(">f4")[::-1]})
        case _:
            return Arrays({"x": IMAGES[:, ::-1], "y": torch.arange(10)})


KINDS = ["one file", "files", "named files", "bare", "fortran", "array", "tensors", "named arrays", "swapped arrays"]


def same(ours: Any, theirs: Any) -> bool:
    pairs = zip(leaves(ours), leaves(theirs), strict=True)
    return type(ours) is type(theirs) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=rounds(25, 40))
@given(indices=st.lists(st.integers(-10, 9), min_size=1, max_size=12))
def test_all_ways_to_fetch_agree(kind: str, folder: Path, indices: list[int]) -> None:
    dataset, empty = made(kind, folder), Recorder()
    theirs = default_collate([dataset[i] for i in indices])
    read = reader_of(dataset)
    assert read is not None
    batch = read(BatchRead(np.array(indices), empty))
    assert same(batch, theirs)
    assert empty.holds(batch)
    assert same(default_collate(dataset.__getitems__(indices)), theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_works_in_torchs_own_loader(kind: str, folder: Path) -> None:
    dataset = made(kind, folder)
    batches = list(DataLoader(dataset, batch_size=4))
    assert same(batches[2], default_collate([dataset[8], dataset[9]]))


def test_samples_have_the_structure_of_the_sources(folder: Path) -> None:
    assert made("one file", folder)[3].tolist() == IMAGES[3].tolist()
    assert isinstance(made("files", folder)[3], tuple)
    assert made("named files", folder)[-1]["label"].item() == 4
    assert len(made("bare", folder)) == 10


def test_numbers_in_the_other_byte_order() -> None:
    dataset = Arrays((IMAGES.astype(">f4"), LABELS.astype(">i2"), LABELS.astype(">i8")[::-1]))
    for sample in (dataset[3], dataset.__getitems__([3])[0], pickle.loads(pickle.dumps(dataset))[-7]):
        assert sample[0].tolist() == IMAGES[3].tolist()
        assert sample[1].item() == -2
    assert dataset.read_batch(BatchRead(np.array([1, -1]), allocate_tensor))[2].tolist() == [3, -5]


def test_samples_are_memory_of_their_own(folder: Path) -> None:
    held = IMAGES.copy()
    for dataset in (made("one file", folder), Arrays(held)):
        dataset[0].fill_(99)
        dataset.__getitems__([0])[0].fill_(99)
        assert dataset[0].tolist() == IMAGES[0].tolist()


@pytest.mark.parametrize("index", [10, -11])
def test_an_index_out_of_range_is_named(folder: Path, index: int) -> None:
    dataset = made("files", folder)
    for fetch in (dataset.__getitem__, lambda i: dataset.__getitems__([0, i])):
        with pytest.raises(IndexError, match=rf"{index} is out of range for .*10 (samples|rows)"):
            fetch(index)


@pytest.mark.parametrize("index", [1.0, "1", None, [1]])
def test_an_index_that_is_no_integer_is_refused(folder: Path, index: Any) -> None:
    dataset = made("one file", folder)
    with pytest.raises(TypeError):
        dataset[index]
    with pytest.raises(TypeError):
        dataset.__getitems__([index])


class TestPickling:
    def test_files_travel_by_path(self, folder: Path) -> None:
        np.save(folder / "large.npy", np.zeros((1000, 1000), np.uint8))
        data = pickle.dumps(ArrayFile(folder / "large.npy"))
        assert len(data) < 2000
        assert len(pickle.loads(data)) == 1000

    def test_files_are_found_from_another_directory(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)
        data = pickle.dumps(ArrayFile("labels.npy"))
        monkeypatch.chdir("/")
        assert pickle.loads(data)[0].item() == -5

    @pytest.mark.parametrize("changed", [LABELS[:7], LABELS + 1])
    def test_a_file_that_has_changed_is_refused(self, folder: Path, changed: Any) -> None:
        data = pickle.dumps(ArrayFile(folder / "labels.npy"))
        np.save(folder / "labels.npy", changed)
        with pytest.raises(StateError, match=r"labels.npy has changed since this dataset was made"):
            pickle.loads(data)[0]

    def test_arrays_travel_out_of_band(self) -> None:
        buffers: list[Any] = []
        dataset = Arrays((np.zeros((1000, 100)), torch.ones(1000, 100, dtype=torch.bfloat16)))
        data = pickle.dumps(dataset, protocol=5, buffer_callback=buffers.append)
        assert len(data) < 2000
        assert len(buffers) == 2
        assert same(pickle.loads(data, buffers=buffers)[5], dataset[5])


class TestTransform:
    def test_one_argument_gets_the_sample(self) -> None:
        dataset = Arrays(LABELS, transform=lambda label: label.item() * 2)
        assert dataset[0] == -10
        assert dataset.__getitems__([0, 1]) == [-10, -8]

    def test_two_arguments_get_the_generator_of_the_samples_row(self) -> None:
        dataset = Arrays(LABELS, transform=lambda label, rng: (label.item(), rng.integers(1 << 60)))
        keys = [derive(7, i) for i in range(3)]
        with addressed(keys) as address:
            together = dataset.__getitems__([4, 5, 6])
            one_by_one = []
            for address.row, index in enumerate((4, 5, 6)):
                one_by_one.append(dataset[index])
        assert together == one_by_one
        assert len({drawn for _, drawn in together}) == 3

    def test_a_second_argument_with_a_default_is_left_alone(self) -> None:
        assert Arrays(LABELS, transform=lambda label, factor=3: label.item() * factor)[0] == -15
        assert Arrays(LABELS, transform=str)[0] == "tensor(-5, dtype=torch.int32)"

    def test_switches_gather_off(self) -> None:
        assert reader_of(Arrays(LABELS, transform=lambda label: label)) is None


class TestBadInput:
    def test_a_truncated_file(self, folder: Path) -> None:
        os.truncate(folder / "images.npy", 150)
        with pytest.raises(
            SampleError, match=r"images.npy is truncated: the file has 150 bytes, its header requires 188"
        ):
            ArrayFile(folder / "images.npy")

    def test_a_file_that_is_not_npy(self, folder: Path) -> None:
        with pytest.raises(SampleError, match=r"bare.bin is not a .npy file .*Raw\(path, dtype\)"):
            ArrayFile(folder / "bare.bin")

    def test_a_file_that_is_missing(self, folder: Path) -> None:
        with pytest.raises(FileNotFoundError, match="absent"):
            ArrayFile(folder / "absent.npy")

    def test_bare_numbers_that_do_not_fit(self, folder: Path) -> None:
        with pytest.raises(SampleError, match=r"the file has 67 bytes, which is not 8 plus a multiple of the 6 bytes"):
            ArrayFile(Raw(folder / "bare.bin", "uint8", (2, 3), offset=8))
        with pytest.raises(SampleError, match="has 67 bytes"):
            ArrayFile(Raw(folder / "bare.bin", "uint8", offset=100))
        with pytest.raises(ArgumentError, match="at least one byte, and the offset must not be negative"):
            ArrayFile(Raw(folder / "bare.bin", "uint8", (0,)))

    def test_unequal_lengths(self, folder: Path) -> None:
        np.save(folder / "short.npy", LABELS[:4])
        with pytest.raises(ArgumentError, match=r"images.npy has 10, .*short.npy has 4"):
            ArrayFile((folder / "images.npy", folder / "short.npy"))
        with pytest.raises(ArgumentError, match="x has 10, y has 4"):
            Arrays({"x": LABELS, "y": LABELS[:4]})

    def test_dtypes_that_no_tensor_has(self, folder: Path) -> None:
        np.save(folder / "text.npy", np.array(["a", "b"]))
        np.save(folder / "objects.npy", np.array([None, {}]), allow_pickle=True)
        np.save(folder / "single.npy", np.array(3))
        with pytest.raises(ArgumentError, match=r"text\.npy holds <U1"):
            ArrayFile(folder / "text.npy")
        with pytest.raises(ArgumentError, match="holds object"):
            ArrayFile(folder / "objects.npy")
        with pytest.raises(SampleError, match="single number"):
            ArrayFile(folder / "single.npy")

    @pytest.mark.parametrize(
        "source", [np.array("a"), np.array(["a"]), [[1, 2]], torch.tensor(3), torch.ones(3, requires_grad=True), 5]
    )
    def test_what_is_no_array(self, source: Any) -> None:
        with pytest.raises(ArgumentError, match="array 0 must be"):
            Arrays(source)

    def test_a_mask_is_not_dropped(self) -> None:
        with pytest.raises(ArgumentError, match=r"x is a masked array, .*; pass array\.filled\(value\)"):
            Arrays({"x": np.ma.masked_array([1, 2], [False, True])})

    @pytest.mark.parametrize("source", [(), {}])
    def test_nothing(self, source: Any) -> None:
        with pytest.raises(ArgumentError, match="at least one"):
            Arrays(source)


def test_a_file_without_rows_is_empty(folder: Path) -> None:
    np.save(folder / "none.npy", LABELS[:0])
    (folder / "none.bin").touch()
    assert len(ArrayFile(folder / "none.npy")) == len(ArrayFile(Raw(folder / "none.bin", "f4", (3,)))) == 0


def test_dropping_the_dataset_closes_its_files(folder: Path) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(folder))

    dataset = made("files", folder)
    assert mapped() == 2
    del dataset
    gc.collect()
    assert mapped() == 0


@pytest.mark.parametrize("read", [ArrayFile, lambda path: TokenFile(path, 2048)])
def test_a_file_that_is_cut_short_while_it_is_read(tmp_path: Path, read: Any) -> None:
    np.save(tmp_path / "x.npy", np.zeros(1 << 20, np.int32))
    dataset = read(tmp_path / "x.npy")
    assert dataset[0] is not None
    assert dataset.read_batch(BatchRead(np.arange(2), allocate_tensor)) is not None
    os.truncate(tmp_path / "x.npy", 5000)
    time.sleep(2 * RECHECK_S)
    refused = pytest.raises(StateError, match=r"x.npy has changed since this dataset")
    with fl.DataLoader(dataset, 256) as loader, refused:
        list(loader)


def test_a_file_of_this_machine_and_one_in_a_store(folder: Path) -> None:
    fsspec.filesystem("memory").pipe("/mixed/images.npy", (folder / "images.npy").read_bytes())
    dataset = ArrayFile({"x": "memory://mixed/images.npy", "y": folder / "labels.npy"})
    batch = dataset.read_batch(BatchRead(np.array([7, -1, 0]), allocate_tensor))
    assert np.array_equal(batch["x"], IMAGES[[7, 9, 0]])
    assert np.array_equal(batch["y"], LABELS[[7, 9, 0]])
    assert np.array_equal(dataset[4]["x"], IMAGES[4])
    with pytest.raises(IndexError, match=r"10 is out of range for .*10 samples"):
        dataset.read_batch(BatchRead(np.array([10]), allocate_tensor))


def test_a_file_that_is_removed_while_it_is_read_stays_readable(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", IMAGES)
    dataset = ArrayFile(tmp_path / "x.npy")
    assert dataset[1].equal(torch.from_numpy(IMAGES[1]))
    (tmp_path / "x.npy").unlink()
    time.sleep(2 * RECHECK_S)
    assert dataset[1].equal(torch.from_numpy(IMAGES[1]))


def test_data_behind_an_array_is_an_error(tmp_path: Path) -> None:
    """NumPy reads the first of several arrays, and no rows that were appended without a new header."""
    array = np.arange(12, dtype=np.float32).reshape(6, 2)
    with open(tmp_path / "a.npy", "wb") as file:
        np.save(file, array)
        alone = file.tell()
        np.save(file, array)
    whole = (tmp_path / "a.npy").read_bytes()
    system = fsspec.filesystem("memory")
    for data in (whole, whole[:alone] + array[:1].tobytes()):
        (tmp_path / "a.npy").write_bytes(data)
        system.pipe("/behind/a.npy", data)
        for place in (tmp_path / "a.npy", "memory://behind/a.npy"):
            count = len(data) - alone
            with pytest.raises(SampleError, match=rf"a\.npy has {count} bytes behind its array of shape \(6, 2\)"):
                ArrayFile(place)
    system.rm("/behind", recursive=True)
    (tmp_path / "a.npy").write_bytes(whole[:alone] + bytes(5000))  # a file may be filled up to whole blocks
    assert len(ArrayFile(tmp_path / "a.npy")) == 6
    (tmp_path / "a.npy").write_bytes(whole[:alone])
    assert len(ArrayFile(tmp_path / "a.npy")) == 6
