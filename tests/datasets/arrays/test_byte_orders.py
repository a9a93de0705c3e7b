"""Array files whose numbers are stored in the other byte order, and files whose headers are wrong."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from format_cases import all_ways_agree, equal

from feedline.core.dataset import BatchRead
from feedline.core.tensors import allocate_tensor
from feedline.datasets import ArrayFile, Raw, TokenDocuments, TokenFile
from feedline.errors import SampleError

ROWS = np.arange(10 * 2 * 3).reshape(10, 2, 3)


def header(shape: str) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def put(folder: Path, root: str) -> str:
    """The folder, or an address that holds what is in it."""
    if root == "far":
        for path in folder.iterdir():
            fsspec.filesystem("memory").pipe(f"/orders/{path.name}", path.read_bytes())
        return "memory://orders"
    return str(folder)


@pytest.mark.parametrize("root", ["here", "far"])
class TestTheOtherByteOrder:
    @pytest.mark.parametrize("dtype", [">i2", ">i4", ">f8", ">c8"])
    def test_arrays(self, tmp_path: Path, root: str, dtype: str) -> None:
        np.save(tmp_path / "x.npy", ROWS.astype(dtype))
        np.save(tmp_path / "y.npy", ROWS[:, 0].astype(np.dtype(dtype).newbyteorder("<")))
        (tmp_path / "z.bin").write_bytes(ROWS.astype(dtype).tobytes())
        place = put(tmp_path, root)
        raw = Raw(f"{place}/z.bin", dtype, (2, 3))
        dataset = ArrayFile({"x": f"{place}/x.npy", "y": f"{place}/y.npy", "z": raw})
        native = torch.from_numpy(ROWS.astype(np.dtype(dtype).newbyteorder("=")))
        for data in (dataset, pickle.loads(pickle.dumps(dataset))):
            assert equal(data[-3], {"x": native[7], "y": native[7, 0], "z": native[7]})
            assert equal(data.read_batch(BatchRead(np.array([4, 0, 4]), allocate_tensor))["x"], native[[4, 0, 4]])
        all_ways_agree(dataset, [9, 0, -3, 0])

    def test_tokens(self, tmp_path: Path, root: str) -> None:
        np.save(tmp_path / "t.npy", np.arange(50, dtype=">u2"))
        np.save(tmp_path / "offsets.npy", np.array([0, 7, 50], ">i8"))
        place = put(tmp_path, root)
        for out_dtype, dtype in ((None, torch.uint16), ("int64", torch.int64)):
            dataset = TokenFile(f"{place}/t.npy", 8, stride=5, targets=True, out_dtype=out_dtype)
            assert equal(dataset[2], (torch.arange(10, 18).to(dtype), torch.arange(11, 19).to(dtype)))
            all_ways_agree(dataset, [3, 0, -1])
        documents = TokenDocuments(f"{place}/t.npy", f"{place}/offsets.npy")
        assert [document.tolist() for document in documents.__getitems__([1, 0])] == [[*range(7, 50)], [*range(7)]]


def test_columns_of_the_other_byte_order(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.asfortranarray(ROWS.astype(">i4")))
    assert equal(ArrayFile(tmp_path / "x.npy")[3], torch.from_numpy(ROWS[3].astype(np.int32)))


@pytest.mark.parametrize("read", [ArrayFile, lambda path: TokenFile(path, 2)])
class TestRefused:
    @pytest.mark.parametrize("shape", ["(-5,)", "(-1, -5)"])
    def test_a_negative_side(self, tmp_path: Path, read: Any, shape: str) -> None:
        (tmp_path / "x.npy").write_bytes(header(shape) + bytes(4))
        with pytest.raises(SampleError, match=r"x.npy is damaged: its header claims the shape \(-\d, ?(-5)?\)"):
            read(tmp_path / "x.npy")

    @pytest.mark.parametrize("shape", ["(5", "[" * 5000, "(3, {}[)"])
    def test_a_header_that_cannot_be_read(self, tmp_path: Path, read: Any, shape: str) -> None:
        (tmp_path / "x.npy").write_bytes(header(shape) + bytes(40))
        with pytest.raises(SampleError, match=r"x.npy is not a .npy file"):
            read(tmp_path / "x.npy")


def test_an_archive_of_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=ROWS)
    with zipfile.ZipFile(tmp_path / "x.npz") as archive:
        archive.extractall(tmp_path)
    assert len(ArrayFile(tmp_path / "x.npz")) == len(ArrayFile(tmp_path / "a.npy")) == 10
