from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from format_cases import all_ways_agree
from writers.values import jpeg

import feedline as fl
from feedline.core.dataset import BatchRead
from feedline.datasets import Files
from feedline.errors import ArgumentError, SampleError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(i, (24, 18)))
        np.save(tmp_path / f"{i}.npy", np.full((2, 2), i))
    return tmp_path


def test_files_are_bytes_by_default(folder: Path) -> None:
    assert Files([folder / "1.txt", folder / "0.txt"]).__getitems__([0, 1]) == [b"text 1", b"text 0"]
    assert Files(folder / "*.txt", decode="text")[-1] == "text 5"
    assert Files(str(folder / "{2,1}.npy"), decode="npy")[0].tolist() == [[2, 2], [2, 2]]
    assert Files(folder / "3.jpg", decode="image")[0].size == (24, 18)
    assert Files(folder / "*.txt", decode=len)[0] == 6


def test_paths_tell_which_is_which(folder: Path) -> None:
    assert [Path("/", path).name for path in Files(folder / "*.npy").paths] == [f"{i}.npy" for i in range(6)]


def test_ways_to_fetch_agree(folder: Path) -> None:
    small = fl.transforms.Compose([fl.transforms.Resize((5, 5)), fl.transforms.ToTensor()])
    for dataset in (Files(folder / "*.txt"), Files(folder / "*.jpg", decode="image", transform=small)):
        all_ways_agree(dataset, [5, 0, -2])


def test_a_file_with_an_address_below_file(folder: Path) -> None:
    assert Files(f"file://{folder}/2.txt".removeprefix("file://"), decode="text")[0] == "text 2"


def test_an_index_above_int64_is_not_counted_from_the_end(folder: Path) -> None:
    with pytest.raises(IndexError, match="index 18446744073709551615 is out of range"):
        Files(folder / "*.txt").__getitems__(np.array([0, 2**64 - 1], np.uint64))  # type: ignore[arg-type]


def test_it_pickles_by_path(folder: Path) -> None:
    dataset = Files(folder / "*.txt", decode="text", transform=str.upper)
    assert pickle.loads(pickle.dumps(dataset))[3] == "TEXT 3"


def test_a_missing_or_damaged_file_is_named(folder: Path) -> None:
    dataset = Files(folder / "*.jpg", decode="image", transform=fl.transforms.Resize((5, 5)))
    (folder / "1.jpg").unlink()
    (folder / "2.jpg").write_bytes(b"no image")
    for fetch in (
        lambda i: dataset[i],
        lambda i: dataset.read_batch(BatchRead(np.array([0, i]), fl.core.tensors.allocate_tensor)),
    ):
        with pytest.raises(FileNotFoundError, match=r"/1.jpg does not exist: it was moved or deleted; restore it, or"):
            fetch(1)
        with pytest.raises(SampleError, match=r"/2.jpg.* could not be read"):
            fetch(2)
    with fl.DataLoader(dataset, 6, on_error="skip") as loader:
        assert next(iter(loader)).shape == (4, 5, 5, 3)


def test_what_names_no_file(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no files"):
        Files(folder / "*.png")
    with pytest.raises(FileNotFoundError, match=r"no such file: .*gone.txt"):
        Files([folder / "0.txt", folder / "gone.txt"])


def test_files_of_several_stores_are_refused(folder: Path) -> None:
    with pytest.raises(ArgumentError, match=r"all files must be in one store, but are in memory://, s3://bucket"):
        Files(["s3://bucket/a.txt", "memory://b.txt"])


@pytest.mark.parametrize("pattern", ["*", "**", ""])
def test_hidden_files_are_no_samples(tmp_path: Path, pattern: str) -> None:
    import fsspec

    for name in ("a.txt", ".a.txt", ".DS_Store"):
        (tmp_path / name).write_text(name)
        fsspec.filesystem("memory").pipe(f"/hidden/{name}", name.encode())
    for root in (tmp_path, "memory://hidden"):
        assert list(Files(f"{root}/{pattern}", decode="text")) == ["a.txt"]
        assert list(Files(f"{root}/.DS_Store", decode="text")) == [".DS_Store"]


def test_objects_of_a_store(folder: Path) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    for i in range(3):
        files.pipe(f"/words/{i}.txt", f"text {i}".encode())
        files.pipe(f"/words/{i}.jpg", jpeg(i, (24, 18)))
    dataset = Files([f"memory://words/{i}.txt" for i in range(3)], decode="text")
    assert [dataset[i] for i in range(3)] == ["text 0", "text 1", "text 2"]
    small = fl.transforms.Compose([fl.transforms.Resize((5, 5)), fl.transforms.ToTensor()])
    images = Files([f"memory://words/{i}.jpg" for i in range(3)], decode="image", transform=small)
    with fl.DataLoader(images, 3) as loader:
        assert torch.equal(next(iter(loader)), torch.stack([images[i] for i in range(3)]))
