from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from format_cases import all_ways_agree

import feedline as fl
from feedline.datasets import ArrayFile
from feedline.errors import ArgumentError, SampleError, StateError

COUNT = 50
IMAGES = np.arange(COUNT * 6, dtype=np.float32).reshape(COUNT, 2, 3)
LABELS = np.arange(COUNT, dtype=">i4")
SAVES: list[Callable[..., None]] = [np.savez, np.savez_compressed]


@pytest.fixture(params=["stored", "compressed"])
def save(request: pytest.FixtureRequest) -> Callable[..., None]:
    return SAVES[request.param == "compressed"]


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Function that writes to the archive and returns its address."""

    def put() -> str:
        if request.param == "local":
            return str(tmp_path / "a.npz")
        fsspec.filesystem("memory").put(str(tmp_path / "a.npz"), f"/{tmp_path.name}/a.npz")
        return f"memory://{tmp_path.name}/a.npz"

    return put


@pytest.mark.parametrize("method", ["thread", "process"])
def test_an_archive_gives_dicts(save: Any, place: Any, tmp_path: Path, method: Any) -> None:
    save(tmp_path / "a.npz", image=IMAGES, label=LABELS)
    dataset = ArrayFile(place())
    assert len(dataset) == COUNT
    all_ways_agree(dataset, [3, -1, 17, 3, 0, 49])
    assert torch.equal(dataset[17]["image"], torch.from_numpy(IMAGES[17]))
    assert list(dataset[17]) == ["image", "label"]
    with fl.DataLoader(pickle.loads(pickle.dumps(dataset)), 10, num_workers=2, worker_method=method) as loader:
        batches = list(loader)
    assert torch.equal(torch.cat([batch["image"] for batch in batches]), torch.from_numpy(IMAGES))
    assert torch.cat([batch["label"] for batch in batches]).tolist() == LABELS.tolist()


def test_arrays_by_name(save: Any, place: Any, tmp_path: Path) -> None:
    save(tmp_path / "a.npz", image=IMAGES, label=LABELS, few=LABELS[:3], one=np.array(5))
    path = place()
    assert ArrayFile(path, columns="label")[7].item() == 7
    assert [part.tolist() for part in ArrayFile(path, columns=["label", "image"])[7]] == [7, IMAGES[7].tolist()]
    assert ArrayFile(path, columns={"y": "few"})[2]["y"].item() == 2
    with pytest.raises(ArgumentError, match=r"a.npz has no array 'x'; it has image, label, few, one"):
        ArrayFile(path, columns="x")
    with pytest.raises(ArgumentError, match=r"image has 50, few has 3 in .*a.npz; name those to read with columns="):
        ArrayFile(path, columns=["image", "few"])
    with pytest.raises(SampleError, match=r"'one' in .*a.npz holds a single number"):
        ArrayFile(path)


def test_records_and_times(save: Any, place: Any, tmp_path: Path) -> None:
    rows = np.zeros(COUNT, [("id", "i8"), ("at", "M8[s]")])
    rows["id"] = np.arange(COUNT)
    save(tmp_path / "a.npz", rows=rows)
    assert {name: value.item() for name, value in ArrayFile(place(), columns="rows")[7].items()} == {"id": 7, "at": 0}


def test_objects_are_never_unpickled(save: Any, place: Any, tmp_path: Path) -> None:
    save(tmp_path / "a.npz", boxes=np.array([{}, None], object))
    with pytest.raises(ArgumentError, match=r"'boxes' in .*a.npz holds object"):
        ArrayFile(place())


def test_damage_is_named(save: Any, place: Any, tmp_path: Path) -> None:
    save(tmp_path / "a.npz", image=IMAGES)
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SampleError, match=r"a.npz cannot be read as a .npz archive .*written completely\?"):
        ArrayFile(place())


def test_an_encrypted_archive_is_named(save: Any, place: Any, tmp_path: Path) -> None:
    save(tmp_path / "a.npz", image=IMAGES)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[data.index(b"PK\1\2") + 8] |= 1  # the flag in the directory
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(SampleError, match=r"a.npz is encrypted: unpack it with its password"):
        ArrayFile(place())


def test_a_header_that_claims_too_much(save: Any, place: Any, tmp_path: Path) -> None:
    save(tmp_path / "a.npz", image=IMAGES)
    head = (tmp_path / "b.npy").open("wb")
    with head:
        np.lib.format.write_array_header_1_0(head, {"shape": (1 << 40,), "fortran_order": False, "descr": "<f8"})
    with zipfile.ZipFile(tmp_path / "a.npz", "w", 8 if save is np.savez_compressed else 0) as archive:
        archive.write(tmp_path / "b.npy", "image.npy")
    with pytest.raises(SampleError, match=r"'image' in .*a.npz is truncated"):
        ArrayFile(place())


def test_an_archive_that_has_changed_is_refused(save: Any, tmp_path: Path) -> None:
    save(tmp_path / "a.npz", image=IMAGES)
    data = pickle.dumps(ArrayFile(tmp_path / "a.npz"))
    save(tmp_path / "a.npz", image=IMAGES[:9])
    with pytest.raises(StateError):
        pickle.loads(data)[0]


def test_columns_are_those_of_an_archive(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", IMAGES)
    np.savez(tmp_path / "a.npz", image=IMAGES)
    with pytest.raises(ArgumentError, match=r"columns= names the arrays of one .npz archive"):
        ArrayFile(tmp_path / "a.npy", columns="image")
    with pytest.raises(SampleError, match=r"is a .npz archive: pass it alone"):
        ArrayFile([tmp_path / "a.npz"])


def test_an_archive_whose_directory_leads_out_of_the_file(place: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(100))
    data = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(data[:100] + data[300:])
    with pytest.raises(SampleError, match=r"a.npz cannot be read as a .npz archive"):
        ArrayFile(place())[0]
