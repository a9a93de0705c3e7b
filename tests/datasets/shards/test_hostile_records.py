"""Damaged and malicious records: each is refused by name, without allocating the memory that it claims."""

from __future__ import annotations

import io
import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from diagonals import diagonal
from odd_values import each_odd
from peers import written
from tar_cases import npy, write_tar

from feedline.datasets import MDS, Files, ImageFolder, LitData, LitDataTokens, TarShards
from feedline.datasets.compression import inflate
from feedline.datasets.decoding import ValueDecoder
from feedline.datasets.shards.litdata_types import decode_function as leaf_function
from feedline.datasets.shards.mds_values import decode_function as mds_function
from feedline.datasets.webdataset.columns import arrays
from feedline.errors import ArgumentError, FeedlineError, SampleError

DEEP = b"[" * 100_000


def png(broken: bool) -> bytes:
    """An image of several chunks, in which the name of the second one lost a bit."""
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (300, 300, 3)).astype(np.uint8)
    PIL.Image.fromarray(noise).save(file, "PNG")
    data = bytearray(file.getvalue())
    if broken:
        data[data.index(b"IDAT", data.index(b"IDAT") + 4)] ^= 0x80
    return bytes(data)


def avif() -> bytes:
    """Two thirds of an image."""
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3)).astype(np.uint8)
    PIL.Image.fromarray(noise).save(file, "AVIF")
    return file.getvalue()[: len(file.getvalue()) * 2 // 3]


def dds() -> bytes:
    """An image in a format that Pillow does not know yet."""
    head = bytearray(128)
    head[:8] = b"DDS " + struct.pack("<I", 124)
    head[12:20] = struct.pack("<II", 4, 4)
    head[76:88] = struct.pack("<II4s", 32, 4, b"ABCD")
    return bytes(head)


def header(shape: str, dtype: str = "<f4") -> bytes:
    """The head of a `.npy` file without the data that it claims."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def bomb(nbytes: int) -> bytes:
    """A `.npz` of an array of zeros."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as entry:
        entry.write(header(f"({nbytes},)", "|u1"))
        for _ in range(nbytes >> 20):
            entry.write(bytes(1 << 20))
    return file.getvalue()


def claims(data: bytes, nbytes: int) -> bytes:
    """A zip whose directory says that its one entry has so many bytes."""
    at = data.rindex(b"PK\x01\x02") + 24
    return data[:at] + struct.pack("<I", nbytes) + data[at + 4 :]


class TestImages:
    @pytest.mark.parametrize("data", [png(broken=True), avif(), dds(), b"no image"], ids=["png", "avif", "dds", "none"])
    def test_every_exception_of_pillow_is_reported_with_the_name(self, tmp_path: Path, data: bytes) -> None:
        (tmp_path / "a.png").write_bytes(data)
        message = r"a.png cannot be decoded as image \(\w+: .*\); rewrite it, or pass on_error='skip' to the loader"
        with pytest.raises(SampleError, match=message) as caught:
            Files(tmp_path / "a.png", decode="image")[0]
        assert "object at 0x" not in str(caught.value)

    @pytest.mark.parametrize("function", [mds_function("png"), leaf_function("jpeg")])
    def test_so_is_it_in_records(self, function: Callable[[memoryview], Any]) -> None:
        decoder = ValueDecoder(function, kind="png")
        assert decoder(memoryview(png(broken=False)), None, lambda: "here").size == (300, 300)
        with pytest.raises(SampleError, match=r"here cannot be decoded as png \(SyntaxError: "):
            decoder(memoryview(png(broken=True)), None, lambda: "here")

    def test_images_that_pillow_finds_too_large(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "a.png").write_bytes(png(broken=False))
        monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 1000)
        with pytest.raises(SampleError, match=r"; raise PIL.Image.MAX_IMAGE_PIXELS to read such large images.*skip"):
            Files(tmp_path / "a.png", decode="image")[0]

    def test_so_it_is_in_folders_and_tars(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tar = TarShards(write_tar(tmp_path / "a.tar", {"a.png": png(broken=False), "b.jpg": b"no image"}))
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder/a.png").write_bytes(png(broken=True))
        with pytest.raises(SampleError, match=r"a.png cannot be read as an image \(SyntaxError: .*; replace or remove"):
            ImageFolder(tmp_path)[0]
        with pytest.raises(SampleError, match=r"'b.jpg' cannot be decoded as jpg \(.*\); repair it, or pass") as caught:
            tar[1]
        assert "object at 0x" not in str(caught.value)
        monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 1000)
        with pytest.raises(SampleError, match=r"'a.png' cannot be .*; raise PIL.Image.MAX_IMAGE_PIXELS to read such"):
            tar[0]

    def test_a_bug_of_the_user_stays_what_it_is(self, tmp_path: Path) -> None:
        def wrong(_: Any) -> None:
            raise RuntimeError("mine")

        (tmp_path / "a.txt").write_bytes(b"x")
        with pytest.raises(RuntimeError, match="mine") as caught:
            Files(tmp_path / "a.txt", decode=wrong)[0]
        assert not isinstance(caught.value, SampleError)
        with pytest.raises(SampleError, match=r"a.txt cannot be decoded as int \(ValueError"):
            Files(tmp_path / "a.txt", decode=int)[0]


class TestArrays:
    @pytest.mark.parametrize("shape", ["(8589934592,)", "(-5,)", "(-5, -5)", "(4611686018427387904, 4)"])
    def test_a_header_that_claims_missing_data(self, tmp_path: Path, shape: str) -> None:
        (tmp_path / "a.npy").write_bytes(header(shape) + b"xxxx")
        with pytest.raises(SampleError, match=r"a.npy cannot be decoded as npy \(ValueError: .*header"):
            Files(tmp_path / "a.npy", decode="npy")[0]
        tar = write_tar(tmp_path / "a.tar", {"a.npy": header(shape) + b"xxxx"})
        with pytest.raises(SampleError, match=r"a.tar: member 'a.npy' cannot be decoded as npy \(ValueError: .*header"):
            TarShards(tar)[0]

    @pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3), np.array(3), np.zeros((0, 3)), np.ones((2, 3)).T])
    @pytest.mark.parametrize("order", ["<", ">"])
    def test_arrays_of_both_byte_orders(self, tmp_path: Path, array: Any, order: str) -> None:
        np.save(tmp_path / "a.npy", array.astype(array.dtype.newbyteorder(order)))
        tensor = Files(tmp_path / "a.npy", decode="npy")[0]
        assert torch.equal(tensor, torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape)))
        assert tensor.is_contiguous()

    def test_a_bomb_among_the_arrays_of_a_tar(self, tmp_path: Path) -> None:
        tar = write_tar(tmp_path / "a.tar", {"a.npz": claims(bomb(1 << 20), 3 << 30)})
        with pytest.raises(
            SampleError, match=r"member 'a.npz' cannot .* claim to hold 3,221,225,472, like a decompress"
        ):
            TarShards(tar)[0]

    @pytest.mark.parametrize(
        "data",
        [
            b"PK\x03\x04 junk",
            b"junk",
            claims(bomb(1 << 20), 1000),
            bomb(1 << 20).replace(b"\x00" * 4 + b"x.npy", b"\x00" * 4 + b"y.npy", 1),
            bomb(1 << 20)[:200] + b"\xff" + bomb(1 << 20)[201:],
        ],
    )
    def test_damaged_archives(self, tmp_path: Path, data: bytes) -> None:
        tar = write_tar(tmp_path / "a.tar", {"a.npz": data})
        with pytest.raises(SampleError, match=r"a.tar: member 'a.npz' cannot be decoded as npz"):
            TarShards(tar)[0]

    def test_archives_hold_arrays_and_other_things(self) -> None:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("x.npy", npy(np.arange(3)))
            archive.writestr("note.txt", "text")
        found = arrays(memoryview(file.getvalue()))
        assert list(found) == ["x", "note.txt"]
        assert found["x"].tolist() == [0, 1, 2]  # type: ignore[union-attr]
        assert found["x"].flags.writeable  # type: ignore[union-attr]
        assert found["note.txt"] == b"text"


def test_values_that_are_nested_too_deep(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match=r"member 'a.json' cannot be decoded as json \(RecursionError"):
        TarShards(write_tar(tmp_path / "a.tar", {"a.json": DEEP}))[0]
    with pytest.raises(SampleError, match=r"here cannot be decoded as json \(RecursionError"):
        ValueDecoder(leaf_function("json"), kind="json")(memoryview(DEEP), None, lambda: "here")


def test_a_leaf_that_is_cut_off() -> None:
    with pytest.raises(SampleError, match=r"here cannot be decoded as tensor \(error: unpack_from requires"):
        ValueDecoder(leaf_function("tensor"), kind="tensor")(memoryview(struct.pack(">II", 0, 9)), None, lambda: "here")


@pytest.mark.parametrize("kind", ["mds", "litdata_chunks"])
def test_an_index_that_is_nested_too_deep(tmp_path: Path, kind: str) -> None:
    (tmp_path / "index.json").write_bytes(b'{"shards": ' + DEEP)
    with pytest.raises(SampleError, match=r"index.json is not an index of .* \(RecursionError"):
        (MDS if kind == "mds" else LitData)(tmp_path)


class TestPromises:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"samples": 2**70}, r"the number of samples in shard.00001.mds is 1180591620717411303424\)"),
            ({"samples": -1}, r"the number of samples in shard.00001.mds is -1\)"),
            ({"samples": 10**18}, r"the number of samples in shard.00001.mds is 1000000000000000000, in \d+ bytes"),
            ({"samples": "2"}, r"the number of samples in shard.00001.mds is '2'"),
            ({"raw_data": {"bytes": -1}}, r"the size of shard.00001.mds is -1"),
            ({"raw_data": {"bytes": 2**64}}, r"the size of shard.00001.mds is 18446744073709551616"),
            ({"raw_data": {"basename": "a\0b"}}, r"no file can have the name 'a\\x00b'"),
            (
                {"column_sizes": [-4], "column_encodings": ["ndarray:float32:-1"], "column_names": ["x"]},
                r"no arrays of",
            ),
        ],
    )
    def test_of_mds(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        copy = Path(shutil.copytree(written("mds") / "plain", tmp_path / "copy"))
        index = json.loads((copy / "index.json").read_text())
        shard = index["shards"][1]
        raw = {**shard["raw_data"], **change.get("raw_data", {})}
        index["shards"][1] = {**shard, **change, "raw_data": raw}
        (copy / "index.json").write_text(json.dumps(index))
        with pytest.raises(SampleError, match=r"copy/index.json is not an index of MDS shards .*" + message):
            MDS(copy)

    @pytest.mark.parametrize(
        ("script", "kind", "open_dataset"),
        [
            ("mds", "csv", MDS),
            ("mds", "json-zstd", MDS),
            ("litdata_chunks", "tuples", LitData),
            ("litdata_chunks", "rows", LitData),
            ("litdata_chunks", "chunk", LitData),
            ("litdata_chunks", "tokens", partial(LitDataTokens, window=4)),
        ],
    )
    def test_with_any_value_at_any_place(self, tmp_path: Path, script: str, kind: str, open_dataset: Any) -> None:
        copy = Path(shutil.copytree(written(script) / kind, tmp_path / "copy"))
        index = json.loads((copy / "index.json").read_text())
        part = "shards" if script == "mds" else "chunks"
        index[part] = index[part][:1]
        for odd in each_odd(index):
            (copy / "index.json").write_text(json.dumps(odd))
            with suppress(FeedlineError):
                open_dataset(copy)[0]

    @pytest.mark.parametrize("encoding", ["ndarray:foo", "ndarray:O", "ndarray:f4,(9999999,99999)f4", "ndarray:U4"])
    def test_of_arrays_in_mds(self, tmp_path: Path, encoding: str) -> None:
        copy = Path(shutil.copytree(written("mds") / "plain", tmp_path / "copy"))
        index = json.loads((copy / "index.json").read_text())
        for shard in index["shards"]:
            shard["column_encodings"][0] = encoding
        (copy / "index.json").write_text(json.dumps(index))
        with pytest.raises(ArgumentError, match=r"is encoded as 'ndarray:.*', which is not known; leave it out with"):
            MDS(copy)
        assert MDS(copy, columns=["int"])[3] == {"int": 3}

    @pytest.mark.parametrize(
        ("change", "message", "kind"),
        [
            ({"chunk_size": 2**70}, r"the number of samples in chunk-0-1.bin is 1180591620717411303424\)", "tuples"),
            ({"chunk_size": -5}, r"the number of samples in chunk-0-1.bin is -5\)", "tokens"),
            (
                {"chunk_size": 10**12},
                r"the number of samples in chunk-0-1.bin is 1000000000000, in \d+ bytes",
                "tuples",
            ),
            ({"chunk_bytes": -1}, r"the size of chunk-0-1.bin is -1", "tokens"),
            ({"dim": -1}, r"the number of tokens in chunk-0-1.bin is -1", "tuples"),
            ({"filename": "a\0b"}, r"no file can have the name 'a\\x00b'", "tokens"),
        ],
    )
    def test_of_litdata(self, tmp_path: Path, kind: str, change: dict[str, Any], message: str) -> None:
        copy = Path(shutil.copytree(written("litdata_chunks") / kind, tmp_path / "copy"))
        index = json.loads((copy / "index.json").read_text())
        index["chunks"][1].update(change)
        (copy / "index.json").write_text(json.dumps(index))
        with pytest.raises(SampleError, match=r"copy/index.json is not an index of LitData chunks .*" + message):
            LitDataTokens(copy, 4) if kind == "tokens" else LitData(copy)

    @pytest.mark.parametrize(
        ("number", "kind"), diagonal(["99", "-1", "x", ""], ["no_header_tensor", "no_header_numpy"])
    )
    def test_of_leaves(self, tmp_path: Path, kind: str, number: str) -> None:
        with pytest.raises(ArgumentError, match=f"'{kind}:{number}', which is not known"):
            leaf_function(f"{kind}:{number}")
        copy = Path(shutil.copytree(written("litdata_chunks") / "tokens", tmp_path / "copy"))
        index = json.loads((copy / "index.json").read_text())
        index["config"]["data_format"] = [f"{kind}:{number}"]
        (copy / "index.json").write_text(json.dumps(index))
        with pytest.raises(ArgumentError, match=f"copy holds '{kind}:{number}', which is not known"):
            LitDataTokens(copy, 4)

    @pytest.mark.filterwarnings("ignore:decompressed, :feedline.stores.CacheWarning")
    def test_of_a_few_bytes_that_expand(self, tmp_path: Path) -> None:
        data = np.zeros(5000, np.uint8)
        for nbytes in (1 << 60, 5 << 30):
            with pytest.raises(
                SampleError, match=rf"shard has 5,000 bytes, and its index claims that they decompress to {nbytes:,}"
            ):
                inflate(data, "zstd", nbytes, "shard", "mds")
        copy = Path(shutil.copytree(written("mds") / "zstd", tmp_path / "copy"))
        index = json.loads((copy / "index.json").read_text())
        index["shards"][0]["raw_data"]["bytes"] = 1 << 60
        (copy / "index.json").write_text(json.dumps(index))
        with pytest.raises(
            SampleError, match=r"shard.00000.mds.zstd has .* suggests a decompression bomb; copy it again"
        ):
            MDS(copy, cache=tmp_path / "cache")[0]


def test_nested_rows_whose_offsets_lead_out_of_the_memory(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(written("litdata_chunks") / "rows", tmp_path / "copy"))
    for chunk in copy.glob("chunk*"):
        data = chunk.read_bytes()  # texts of 0, 2 and 4 bytes
        chunk.write_bytes(data.replace(struct.pack("<4i", 0, 0, 2, 6), struct.pack("<4i", 0, 0, -5, 6)))
    with pytest.raises(SampleError, match=r"has no valid Arrow file at its end .*; copy it again"):
        LitData(copy)[1]
