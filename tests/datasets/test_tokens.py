from __future__ import annotations

import pickle
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

from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead
from feedline.datasets import Raw, TokenDocuments, TokenFile
from feedline.errors import ArgumentError, SampleError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    np.arange(1000, 1005, dtype=np.uint16).tofile(tmp_path / "b.bin")
    np.arange(2000, 2033, dtype=np.uint16).tofile(tmp_path / "c.bin")
    np.save(tmp_path / "tokens.npy", np.arange(50, dtype=np.uint32))
    return tmp_path


def three(folder: Path) -> list[Path]:
    return [folder / "a.bin", folder / "b.bin", folder / "c.bin"]


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    return type(ours) is type(theirs) and all(map(same, ours, theirs))


class TestWindows:
    @pytest.mark.parametrize("out_dtype", ["int64", np.int64, int, np.dtype("int64")])
    def test_an_output_by_the_name_of_its_dtype(self, folder: Path, out_dtype: Any) -> None:
        assert TokenFile(folder / "a.bin", np.int32(4), out_dtype=out_dtype)[2].dtype == torch.int64
        assert TokenDocuments(folder / "a.bin", [0, 3], out_dtype=out_dtype)[0].dtype == torch.int64

    def test_one_after_the_other(self, folder: Path) -> None:
        data = TokenFile(folder / "a.bin", 8)
        assert len(data) == 12
        assert data[1].tolist() == list(range(8, 16))
        assert data[-1].tolist() == list(range(88, 96))
        assert data[0].dtype == torch.uint16

    def test_stride(self, folder: Path) -> None:
        data = TokenFile(folder / "a.bin", 8, stride=3)
        assert len(data) == 31
        assert data[30].tolist() == list(range(90, 98))

    def test_targets_are_one_token_later(self, folder: Path) -> None:
        data = TokenFile(folder / "a.bin", 10, targets=True, out_dtype=torch.int64)
        x, y = data[8]
        assert len(data) == 9  # the tenth window has no last target
        assert x.tolist() == list(range(80, 90))
        assert y.tolist() == list(range(81, 91))
        assert x.dtype == y.dtype == torch.int64

    def test_files_are_not_crossed(self, folder: Path) -> None:
        data = TokenFile(three(folder), 10)
        assert len(data) == 10 + 0 + 3
        assert data[9].tolist() == list(range(90, 100))
        assert data[10].tolist() == list(range(2000, 2010))

    def test_files_are_crossed_on_request(self, folder: Path) -> None:
        data = TokenFile(three(folder), 10, stride=9, cross_files=True)
        stream = [*range(100), *range(1000, 1005), *range(2000, 2033)]
        assert len(data) == (138 - 10) // 9 + 1
        assert [data[i].tolist() for i in range(len(data))] == [stream[9 * i : 9 * i + 10] for i in range(len(data))]

    def test_a_pattern_names_files_in_order(self, folder: Path) -> None:
        data = TokenFile(str(folder / "?.bin"), 10)
        assert [data[i][0].item() for i in (0, 10)] == [0, 2000]

    def test_npy_says_its_dtype(self, folder: Path) -> None:
        assert TokenFile(folder / "tokens.npy", 5)[0].dtype == torch.uint32

    def test_a_header_is_passed_over(self, folder: Path) -> None:
        data = TokenFile(Raw(folder / "a.bin", np.uint16, offset=20), 5)
        assert data[0].tolist() == [10, 11, 12, 13, 14]

    def test_travels_by_path(self, folder: Path) -> None:
        data = TokenFile(three(folder), 10, targets=True)
        assert len(pickle.dumps(data)) < 3000
        assert same(pickle.loads(pickle.dumps(data))[3], data[3])


KINDS: dict[str, Any] = {
    "plain": {},
    "widened": {"out_dtype": torch.int64},
    "widened to int32": {"out_dtype": torch.int32},
    "targets": {"targets": True, "stride": 5},
}


@pytest.mark.parametrize(
    ("kind", "files", "cross"),
    # A window is made of its tokens, local or remote.
    [*((kind, 3, True) for kind in KINDS), *((next(iter(KINDS)), files, False) for files in (1, 3))],
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=rounds(25, 40))
@given(seed=st.integers(0, 1000), size=st.integers(1, 20))
def test_all_ways_to_fetch_agree(folder: Path, kind: str, files: int, cross: bool, seed: int, size: int) -> None:
    data, empty = TokenFile(three(folder)[:files], 7, cross_files=cross, **KINDS[kind]), Recorder()
    indices = np.random.default_rng(seed).integers(-len(data), len(data), size)
    theirs = default_collate([data[int(i)] for i in indices])
    read = reader_of(data)
    assert read is not None
    batch = read(BatchRead(indices, empty))
    assert same(batch, theirs)
    assert empty.holds(batch)
    assert same(default_collate(data.__getitems__(indices.tolist())), theirs)


def test_works_in_torchs_own_loader(folder: Path) -> None:
    batches = list(DataLoader(TokenFile(folder / "a.bin", 10, targets=True), batch_size=4))
    assert [tuple(x.shape) for x, _ in batches] == [(4, 10), (4, 10), (1, 10)]
    assert batches[1][1][0].tolist() == list(range(41, 51))


@pytest.mark.parametrize("index", [12, -13])
def test_an_index_out_of_range_is_named(folder: Path, index: int) -> None:
    with pytest.raises(IndexError, match=f"{index} is out of range for TokenFile with 12 samples"):
        TokenFile(folder / "a.bin", 8)[index]


class TestBadInput:
    def test_no_file(self, folder: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"\*\.tok"):
            TokenFile(str(folder / "*.tok"), 8)
        with pytest.raises(FileNotFoundError, match="absent"):
            TokenFile(folder / "absent.bin", 8)
        with pytest.raises(FileNotFoundError, match="the list of paths is empty"):
            TokenFile([], 8)

    def test_half_a_token(self, folder: Path) -> None:
        (folder / "odd.bin").write_bytes(b"abc")
        with pytest.raises(SampleError, match=r"odd.bin does not fit: the file has 3 bytes"):
            TokenFile(folder / "odd.bin", 1)

    @pytest.mark.parametrize(
        ("begin", "message"),
        [
            (
                np.array([20240520, 1, 9], "<i4").tobytes(),
                r"a token file of llm\.c.*Raw\(path, 'uint16', offset=1024\)",
            ),
            (
                np.array([20240801, 7, 9], "<i4").tobytes(),
                r"a token file of llm\.c.*Raw\(path, 'uint32', offset=1024\)",
            ),
            (b"MMIDIDX\0\0", r"an index of Megatron.*read the \.bin file"),
            (b"\x28\xb5\x2f\xfd", r"compressed by zstd.*decompress it"),
            (b"PAR1", "a Parquet file.*read it with Parquet"),
        ],
    )
    def test_formats_with_headers_are_no_tokens(self, folder: Path, begin: bytes, message: str) -> None:
        """Without the check, the header would be read as tokens."""
        data = begin.ljust(1024, b"\0") + bytes(100)
        (folder / "b.bin").write_bytes(data)
        system = fsspec.filesystem("memory")
        system.pipe("/headers/b.bin", data)
        for paths in (folder, [folder / "a.bin", folder / "b.bin"], "memory://headers/*.bin"):
            with pytest.raises(SampleError, match=f"b.bin is {message}"):
                TokenFile(paths, 10, dtype="uint16") if paths != folder else TokenDocuments(folder / "b.bin", [0, 10])
        assert len(TokenFile(Raw(folder / "b.bin", "uint16", offset=1024), 10)) == 5
        assert len(TokenFile(folder / "b.bin", 100, dtype="uint8")) == 11
        system.rm("/headers", recursive=True)

    def test_different_dtypes(self, folder: Path) -> None:
        with pytest.raises(ArgumentError, match=r"tokens.npy holds uint32, but .*a.bin holds uint16"):
            TokenFile([folder / "a.bin", folder / "tokens.npy"], 4)
        with pytest.raises(ArgumentError, match="holds uint32, but the argument dtype says uint16"):
            TokenFile(folder / "tokens.npy", 4, dtype="uint16")

    def test_no_tokens(self, folder: Path) -> None:
        np.save(folder / "floats.npy", np.ones(9))
        np.save(folder / "table.npy", np.ones((9, 2), np.int32))
        for name in ("floats", "table"):
            with pytest.raises(ArgumentError, match="tokens must be 1-D integers"):
                TokenFile(folder / f"{name}.npy", 4)

    def test_an_output_that_cannot_hold_them(self, folder: Path) -> None:
        for dtype in (torch.int16, torch.uint8, torch.bfloat16, "int16"):
            with pytest.raises(ArgumentError, match="cannot represent all values of the stored uint16"):
                TokenFile(folder / "a.bin", 4, out_dtype=dtype)

    @pytest.mark.parametrize("stored", ["int64", "uint64", "uint32"])
    def test_floats_that_cannot_hold_them(self, folder: Path, stored: str) -> None:
        np.full(9, 2**31 + 1, stored).tofile(folder / "large.bin")
        for out_dtype in ("float32", "float64", "complex128"):
            if stored == "uint32" and out_dtype != "float32":
                assert TokenFile(folder / "large.bin", 4, dtype=stored, out_dtype=out_dtype)[0][0] == 2**31 + 1
            else:
                with pytest.raises(ArgumentError, match=f"cannot represent all values of the stored {stored}"):
                    TokenFile(folder / "large.bin", 4, dtype=stored, out_dtype=out_dtype)

    @pytest.mark.parametrize("out_dtype", ["text", "U4", 64, ["int64"]])
    def test_an_output_of_no_dtype(self, folder: Path, out_dtype: Any) -> None:
        with pytest.raises(ArgumentError, match=r"out_dtype=.* is not a torch dtype: give torch.int64, or its name"):
            TokenFile(folder / "a.bin", 4, out_dtype=out_dtype)

    def test_no_window_fits(self, folder: Path) -> None:
        with pytest.raises(ArgumentError, match="no file has 101 tokens, the length of a window with targets"):
            TokenFile(three(folder), 100, targets=True)

    @pytest.mark.parametrize("arguments", [{"window": 0}, {"window": 4, "stride": 0}])
    def test_sizes(self, folder: Path, arguments: dict[str, int]) -> None:
        with pytest.raises(ArgumentError, match="at least 1"):
            TokenFile(folder / "a.bin", **arguments)

    @pytest.mark.parametrize("arguments", [{"window": "3"}, {"window": 3.0}, {"window": 4, "stride": 2.5}])
    def test_sizes_that_are_no_integers(self, folder: Path, arguments: dict[str, Any]) -> None:
        with pytest.raises(ArgumentError, match=r"(window|stride)=\S+ must be an integer"):
            TokenFile(folder / "a.bin", **arguments)


class TestDocuments:
    def test_documents_of_any_length_over_files(self, folder: Path) -> None:
        data = TokenDocuments(three(folder), np.array([0, 3, 3, 102, 138]), out_dtype=torch.int64)
        assert len(data) == 4
        assert data.lengths.tolist() == [3, 0, 99, 36]
        assert data[0].tolist() == [0, 1, 2]
        assert data[1].tolist() == []
        assert data[2].tolist() == [*range(3, 100), 1000, 1001]
        assert data[-1].tolist() == [1002, 1003, 1004, *range(2000, 2033)]
        assert [len(document) for document in data.__getitems__([1, 0])] == [0, 3]

    def test_an_empty_document_at_the_end(self, folder: Path) -> None:
        data = TokenDocuments(three(folder), [0, 138, 138])
        assert data[1].tolist() == data.__getitems__([1])[0].tolist() == []

    def test_offsets_from_a_file(self, folder: Path) -> None:
        np.save(folder / "offsets.npy", np.array([0, 10, 50], np.uint32))
        data = TokenDocuments(folder / "tokens.npy", folder / "offsets.npy")
        assert pickle.loads(pickle.dumps(data))[1].tolist() == list(range(10, 50))

    @pytest.mark.parametrize("offsets", [[0, 200], [5, 3], [-1, 3], [], [[0], [1]]])
    def test_offsets_are_checked(self, folder: Path, offsets: list[Any]) -> None:
        with pytest.raises(ArgumentError, match="offsets"):
            TokenDocuments(folder / "a.bin", np.array(offsets, np.int64))

    def test_offsets_in_a_list(self, folder: Path) -> None:
        assert TokenDocuments(folder / "a.bin", [0, 2, 5]).lengths.tolist() == [2, 3]
        assert TokenDocuments(folder / "a.bin", torch.tensor([0, 2, 5])).lengths.tolist() == [2, 3]
        with pytest.raises(ArgumentError, match="offsets must be n"):
            TokenDocuments(folder / "a.bin", [])

    @pytest.mark.parametrize("offsets", [[0, 2.7], np.array([0.0, 2.0]), ["0", "2"], [False, True], [0, None]])
    def test_offsets_that_are_no_integers(self, folder: Path, offsets: Any) -> None:
        with pytest.raises(ArgumentError, match="offsets must be integer token positions, not"):
            TokenDocuments(folder / "a.bin", offsets)

    def test_an_index_out_of_range_is_named(self, folder: Path) -> None:
        with pytest.raises(IndexError, match="2 is out of range for TokenDocuments with 2 samples"):
            TokenDocuments(folder / "a.bin", np.array([0, 1, 2]))[2]
