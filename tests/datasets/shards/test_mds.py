from __future__ import annotations

import io
import json
import pickle
import shutil
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from format_cases import all_ways_agree, equal, hidden
from peers import written
from torch.utils.data import DataLoader
from writers.values import COUNT, MDS_COLUMNS, jpeg, mds_samples, text_samples

import feedline as fl
from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead
from feedline.datasets import JSONL, MDS
from feedline.datasets.shards.mds_values import decode_function
from feedline.errors import ArgumentError, MissingExtraError, SampleError
from feedline.stores import ObjectNotFoundError
from formats.places import Memory


@pytest.fixture(scope="module")
def folder() -> Path:
    return written("mds")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A folder to damage."""
    return Path(shutil.copytree(folder / "plain", tmp_path / "copy"))


def edit_index(folder: Path, change: Any) -> None:
    """Change the entries of the index."""
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


def kept(cache: Path) -> list[Path]:
    """The files that a cache keeps."""
    return [path for path in (cache / "v1/objects").rglob("*") if path.is_file()]


def as_read(name: str, value: Any) -> Any:
    """A written value as Mosaic's own reader returns it."""
    if name in ("jpeg", "png"):
        file = io.BytesIO()
        value.save(file, name)
        return PIL.Image.open(file)
    if name == "jpegs":
        return [PIL.Image.open(io.BytesIO(each)) for each in value]
    if MDS_COLUMNS[name] == name and name.startswith(("uint", "int", "float")) and name != "int":
        return np.dtype(name).type(value)
    return value


class TestValues:
    @pytest.mark.parametrize("name", ["plain", "hashed", "zstd", "gz", "br", "bz2", "snappy"])
    def test_what_mosaic_writes_is_read_back_equal(self, folder: Path, tmp_path: Path, name: str) -> None:
        dataset = MDS(folder / name, cache=tmp_path)
        assert len(dataset) == COUNT
        assert dataset.shard_sizes.sum() == COUNT
        assert len(dataset.shard_sizes) > 1
        for ours, theirs in zip((dataset[i] for i in range(COUNT)), mds_samples(), strict=True):
            assert list(ours) == sorted(MDS_COLUMNS)
            for column, value in theirs.items():
                assert equal(ours[column], as_read(column, value)), column

    def test_values_are_memory_of_their_own(self, folder: Path) -> None:
        dataset = MDS(folder / "plain", columns=["fixed_array"])
        dataset[3]["fixed_array"][:] = 99
        assert dataset[3]["fixed_array"][0, 0] == 1

    def test_columns_pick_and_order(self, folder: Path) -> None:
        dataset = MDS(folder / "plain", columns=["str", "int"])
        assert list(dataset[2].items()) == [("str", "éé"), ("int", 2)]
        all_ways_agree(dataset, [19, 0, -3])
        with pytest.raises(ArgumentError, match=r"shards of .*plain have no column 'strings'; they have any_array, "):
            MDS(folder / "plain", columns=["strings"])

    @pytest.mark.parametrize("columns", ["jpeg", [], ("int", 3)])
    def test_columns_are_several_names(self, folder: Path, columns: Any) -> None:
        with pytest.raises(ArgumentError, match=r"columns=.*: give a tuple of names, such as \('image', 'label'\)"):
            MDS(folder / "plain", columns=columns)

    def test_pickle_is_never_read(self, folder: Path) -> None:
        with pytest.raises(
            ArgumentError, match=r"column 'any' of .* is encoded as pickle, .* leave it out with columns="
        ):
            MDS(folder / "pickled")
        assert MDS(folder / "pickled", columns=["id"])[0] == {"id": 7}

    @pytest.mark.parametrize(
        ("encoding", "data", "value"),
        [
            ("list[jpeg]", struct.pack("<III", 0, 1, len(jpeg(0))) + jpeg(0), [PIL.Image.open(io.BytesIO(jpeg(0)))]),
            ("jpegarray", struct.pack("<I", 0), []),
            ("str_decimal", b"1.50", Decimal("1.50")),
            ("ndarray:float64", bytes([2 << 2 | 3, *struct.pack("<QQ", 1, 1)]) + bytes(8), np.zeros((1, 1))),
        ],
    )
    def test_encodings_that_the_samples_lack(self, encoding: str, data: bytes, value: Any) -> None:
        assert equal(decode_function(encoding)(memoryview(data)), value)

    @pytest.mark.parametrize(
        ("encoding", "data"),
        [
            ("pil", struct.pack("<III", 1 << 20, 1 << 20, 3) + b"RGB"),
            ("pil", struct.pack("<III", 4, 4, 3) + b"RGB" + bytes(5)),
            ("list[png]", struct.pack("<III", 0, 1, 1000)),
            ("jpeg_array", struct.pack("<I", 1 << 31)),
            ("ndarray", bytes([7, 1 << 2, 1])),
            ("ndarray:int32", bytes([1 << 2, 5]) + bytes(7)),
            ("json", b"{"),
            ("int", b"123"),
            ("str", b"\xff"),
        ],
    )
    def test_damaged_values_are_refused(self, encoding: str, data: bytes) -> None:
        with pytest.raises((ValueError, LookupError, struct.error)):
            decode_function(encoding)(memoryview(data))


class TestImages:
    def test_batches_of_images_are_made_in_place(self, folder: Path) -> None:
        crop = fl.transforms.Compose([fl.transforms.RandomResizedCrop(6), fl.transforms.ToTensor()])
        dataset = MDS(folder / "plain", columns=["jpeg", "int", "str"], transform={"jpeg": crop})
        with (
            fl.DataLoader(dataset, 5, shuffle=True, seed=4) as loader,
            fl.DataLoader(dataset, 5, shuffle=True, seed=4, on_error="skip") as slow,
        ):
            assert loader.stats() is not None
            batches = list(loader)
            assert equal(batches, list(slow))
        assert batches[0]["jpeg"].shape == (5, 3, 6, 6)
        assert batches[0]["int"].dtype == torch.int64
        assert batches[0]["str"] == ["é" * i for i in batches[0]["int"].tolist()]
        torch.manual_seed(1)
        theirs = torch.utils.data.default_collate([dataset[i] for i in (3, 1, 2)])
        torch.manual_seed(1)
        assert equal(dataset.read_batch(BatchRead(np.array([3, 1, 2]), fl.core.tensors.allocate_tensor, None)), theirs)

    def test_other_transforms_see_each_value(self, folder: Path) -> None:
        dataset = MDS(folder / "plain", columns=["png", "int"], transform={"png": lambda image: image.size, "int": str})
        assert dataset[3] == {"png": (9, 7), "int": "3"}
        assert reader_of(dataset) is None

    def test_a_damaged_image_is_named(self, copy: Path) -> None:
        shard = copy / "shard.00000.mds"
        data = bytearray(shard.read_bytes())
        at = data.index(b"\xff\xd8\xff")
        data[at : at + 3] = b"bad"
        shard.write_bytes(data)
        crop = fl.transforms.Compose([fl.transforms.Resize((4, 4)), fl.transforms.ToTensor()])
        dataset = MDS(copy, columns=["jpeg"], transform={"jpeg": crop})
        for fetch in (
            lambda: dataset[0],
            lambda: dataset.read_batch(BatchRead(np.array([1, 0]), fl.core.tensors.allocate_tensor)),
        ):
            with pytest.raises(
                SampleError, match=r"column 'jpeg' of sample 0 of .*shard.00000.mds: .*could not be read"
            ):
                fetch()
        with pytest.raises(SampleError, match=r"column 'jpeg' of sample 0 of .* cannot be decoded as jpeg"):
            MDS(copy, columns=["jpeg"])[0]


class TestShards:
    def test_compressed_shards_are_decompressed_once(self, folder: Path, tmp_path: Path) -> None:
        first = MDS(folder / "zstd", columns=["int"], cache=tmp_path)
        assert [first[i]["int"] for i in range(COUNT)] == list(range(COUNT))
        assert len(kept(tmp_path)) == len(first.shard_sizes)
        with hidden("cramjam"):
            assert MDS(folder / "zstd", columns=["int"], cache=tmp_path)[5] == {"int": 5}

    def test_the_users_cache_folder_is_the_default(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        MDS(folder / "gz", columns=["int"])[0]
        assert len(kept(tmp_path / "feedline/decompressed")) == 1

    def test_half_a_decompressed_file_is_made_again(self, folder: Path, tmp_path: Path) -> None:
        MDS(folder / "zstd", columns=["int"], cache=tmp_path)[0]
        (file,) = kept(tmp_path)
        file.write_bytes(b"half")
        assert MDS(folder / "zstd", columns=["int"], cache=tmp_path)[0] == {"int": 0}

    def test_a_damaged_compressed_shard(self, folder: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(folder / "zstd", tmp_path / "copy"))
        shard = copy / "shard.00001.mds.zstd"
        shard.write_bytes(shard.read_bytes()[:-9])
        dataset = MDS(copy, columns=["int"], cache=tmp_path / "cache")
        with pytest.raises(
            SampleError, match=r"shard.00001.mds.zstd cannot be decompressed to \d+ bytes .*copy it again"
        ):
            dataset[int(dataset.shard_sizes[0])]
        assert dataset[0] == {"int": 0}

    def test_a_bomb_is_not_blown_up(self, folder: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(folder / "gz", tmp_path / "copy"))
        edit_index(copy, lambda index: index["shards"][0]["raw_data"].update(bytes=1000))
        with pytest.raises(SampleError, match=r"shard.00000.mds.gz cannot be decompressed to 1000 bytes"):
            MDS(copy, columns=["int"], cache=tmp_path / "cache")[0]

    def test_hashes_of_what_was_decompressed(self, folder: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(folder / "zstd", tmp_path / "copy"))
        edit_index(copy, lambda index: index["shards"][0]["raw_data"]["hashes"].update(sha1="0" * 40))
        with pytest.raises(SampleError, match=r"shard.00000.mds.zstd is damaged: its sha1 is \w+, its index says 000"):
            MDS(copy, columns=["int"], cache=tmp_path / "cache")[0]

    def test_hashes_of_the_others_on_demand(self, folder: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(folder / "hashed", tmp_path / "copy"))
        assert len(MDS(copy, check_hashes=True)) == COUNT
        data = bytearray((copy / "shard.00001.mds").read_bytes())
        data[-1] ^= 1
        (copy / "shard.00001.mds").write_bytes(data)
        assert len(MDS(copy)) == COUNT
        with pytest.raises(SampleError, match=r"shard.00001.mds is damaged: its sha1 is"):
            MDS(copy, check_hashes=True)
        with hidden("xxhash"), pytest.raises(MissingExtraError, match=r"pip install 'feedline\[mds\]'"):
            MDS(folder / "hashed", check_hashes=True)

    def test_a_missing_library(self, folder: Path, tmp_path: Path) -> None:
        with hidden("cramjam"), pytest.raises(MissingExtraError, match=r"pip install 'feedline\[mds\]'"):
            MDS(folder / "br", columns=["int"], cache=tmp_path)[0]

    def test_it_pickles_by_path(self, folder: Path) -> None:
        dataset = MDS(folder / "plain", columns=["int", "str"])
        dataset[0]
        data = pickle.dumps(dataset)
        assert len(data) < 5000
        assert pickle.loads(data)[7] == dataset[7]

    @pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning")
    def test_shards_that_were_open_before_a_fork(self, folder: Path) -> None:
        dataset = MDS(folder / "plain", columns=["int"])
        dataset[0]
        loader = DataLoader(dataset, 4, num_workers=2, multiprocessing_context="fork")
        assert torch.cat([batch["int"] for batch in loader]).tolist() == list(range(COUNT))


class TestDamage:
    def test_what_is_not_there(self, tmp_path: Path, copy: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no MDS data set: .*/index.json does not exist"):
            MDS(tmp_path)
        dataset = MDS(copy)
        first, *_ = dataset.shard_sizes
        (copy / "shard.00001.mds").unlink()
        assert dataset[0]["int"] == 0
        missing = (
            rf"copy/shard.00001.mds does not exist, but index.json lists it for \d samples from number {first} on: copy"
        )
        with pytest.raises(ObjectNotFoundError, match=missing):
            dataset[int(first)]
        with pytest.raises(ObjectNotFoundError, match=missing):
            MDS(copy)

    def test_a_missing_shard_of_a_merged_index(self, copy: Path, tmp_path: Path) -> None:
        root = tmp_path / "root"
        shutil.copytree(copy, root / "part")
        (root / "part/index.json").rename(root / "index.json")
        edit_index(root, lambda index: [_in_part(shard) for shard in index["shards"]])
        assert MDS(root, columns=["int"])[0] == {"int": 0}
        shutil.rmtree(root / "part")
        with pytest.raises(
            ObjectNotFoundError, match=r"root/part/shard.00000.mds does not exist, but index.json lists"
        ):
            MDS(root)

    def test_a_folder_that_is_named_twice(self, copy: Path) -> None:
        with pytest.raises(ArgumentError, match=r"copy is listed twice; its samples would be duplicated"):
            MDS([copy, copy.parent / "." / "copy"])

    @pytest.mark.parametrize(
        "change",
        [
            lambda index: index.pop("shards"),
            lambda index: index["shards"][0].pop("samples"),
            lambda index: index["shards"][0].update(column_sizes=[]),
            lambda index: index["shards"][0].update(column_encodings="x"),
            lambda index: index["shards"][0]["raw_data"].update(basename="../../etc/passwd"),
            lambda index: index["shards"][0]["raw_data"].update(basename=".."),
        ],
    )
    def test_an_index_of_something_else(self, copy: Path, change: Any) -> None:
        edit_index(copy, change)
        with pytest.raises(SampleError, match=r"copy/index.json is not an index of MDS shards"):
            MDS(copy)

    def test_formats_that_are_not_read(self, copy: Path) -> None:
        edit_index(copy, lambda index: index["shards"][0].update(format="arrow"))
        with pytest.raises(ArgumentError, match=r"index.json: shards of format arrow version 2; MDS reads"):
            MDS(copy)

    def test_a_shard_of_another_size(self, copy: Path) -> None:
        shard = copy / "shard.00000.mds"
        shard.write_bytes(shard.read_bytes()[:-1])
        with pytest.raises(SampleError, match=r"shard.00000.mds has \d+ bytes, its index says \d+; copy it again"):
            MDS(copy)[0]

    @pytest.mark.parametrize(("at", "value"), [(0, 10**6), (4, 2**32 - 1), (8, 0)])
    def test_offsets_that_lead_astray(self, copy: Path, at: int, value: int) -> None:
        shard = copy / "shard.00000.mds"
        data = bytearray(shard.read_bytes())
        data[at : at + 4] = struct.pack("<I", value)
        shard.write_bytes(data)
        with pytest.raises(SampleError, match=r"shard.00000.mds is damaged: it does not hold the \d+ samples"):
            MDS(copy)[0]

    def test_columns_that_do_not_fill_their_sample(self, copy: Path) -> None:
        shard = copy / "shard.00000.mds"
        data = bytearray(shard.read_bytes())
        begin = struct.unpack_from("<I", data, 4)[0]
        data[begin : begin + 4] = struct.pack("<I", 77_777)
        shard.write_bytes(data)
        with pytest.raises(SampleError, match=r"sample 0 of .*shard.00000.mds is damaged \(its columns take \d+ bytes"):
            MDS(copy)[0]


def _in_part(shard: dict[str, Any]) -> None:
    shard["raw_data"]["basename"] = f"part/{shard['raw_data']['basename']}"


class TestText:
    """Shards of lines, whose samples a second file locates."""

    @pytest.mark.parametrize("ending", ["", "-zstd"])
    @pytest.mark.parametrize("form", ["json", "csv", "tsv", "xsv"])
    def test_what_mosaic_writes_is_read_back_equal(self, folder: Path, tmp_path: Path, form: str, ending: str) -> None:
        dataset = MDS(folder / f"{form}{ending}", cache=tmp_path)
        assert len(dataset.shard_sizes) > 2
        assert [dataset[i] for i in range(COUNT)] == list(text_samples())
        assert pickle.loads(pickle.dumps(dataset))[7] == dataset[7]
        all_ways_agree(dataset, [19, 0, -3])

    def test_columns_and_transforms(self, folder: Path) -> None:
        for form in ("json", "csv"):
            dataset = MDS(folder / form, columns=["text", "id"], transform={"text": len})
            assert list(dataset[2].items()) == [("text", 4), ("id", -3)]
            with pytest.raises(ArgumentError, match="have no column 'label'; they have id, score, text"):
                MDS(folder / form, columns=["label"])

    def test_json_shards_are_also_files_of_json_lines(self, folder: Path, tmp_path: Path) -> None:
        for name, ending in (("json", "json"), ("json-zstd", "json.zstd")):
            dataset = JSONL(f"{folder}/{name}/shard.*.{ending}", index_dir=tmp_path / "index")
            assert list(dataset) == list(text_samples())

    def test_one_index_of_several_formats(self, folder: Path, tmp_path: Path) -> None:
        merged: list[dict[str, Any]] = []
        for form in ("csv", "json"):
            shutil.copytree(folder / form, tmp_path / form)
            for shard in json.loads((folder / form / "index.json").read_text())["shards"]:
                for key in ("raw_data", "raw_meta"):
                    shard[key]["basename"] = f"{form}/{shard[key]['basename']}"
                merged.append(shard)
        (tmp_path / "index.json").write_text(json.dumps({"shards": merged, "version": 2}))
        dataset = MDS(tmp_path)
        assert [dataset[i] for i in range(2 * COUNT)] == 2 * list(text_samples())

    @pytest.mark.parametrize("name", ["csv-zstd", "json"])
    def test_shards_in_a_store(self, folder: Path, tmp_path: Path, name: str) -> None:
        dataset = MDS(Memory("memory://texts").put(folder / name), cache=tmp_path)
        assert [dataset[i] for i in range(COUNT)] == list(text_samples())

    def test_a_file_of_offsets_that_is_missing_or_damaged(self, folder: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(folder / "csv", tmp_path / "copy"))
        meta = copy / "shard.00000.csv.meta"
        data = bytearray(meta.read_bytes())
        data[4] = 255
        meta.write_bytes(data)
        with pytest.raises(SampleError, match=r"shard.00000.csv.meta is damaged: it does not hold the \d+ samples"):
            MDS(copy)[0]
        meta.unlink()
        with pytest.raises(ObjectNotFoundError, match=r"shard.00000.csv.meta does not exist, but index.json lists it"):
            MDS(copy)

    def test_hashes_of_offsets_are_checked(self, folder: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(folder / "csv", tmp_path / "copy"))
        edit_index(copy, lambda index: index["shards"][1]["raw_meta"]["hashes"].update(sha1="0" * 40))
        with pytest.raises(SampleError, match=r"shard.00001.csv.meta is damaged: its sha1 is"):
            MDS(copy, check_hashes=True)

    @pytest.mark.parametrize(
        ("form", "old", "new", "message"),
        [
            ("csv", b"-5,0.0,", b"-5;0.0,", r"sample 0 of .* is damaged \(it has 2 columns of 3\)"),
            ("csv", b"-5,0.0,\n", b"-5,0.0, ", r"sample 0 of .* is damaged \(its line does not end\)"),
            ("csv", b"-5,", b"5-,", r"column 'id' of sample 0 of .* cannot be decoded as int .*5-"),
            ("json", b'{"id": -5', b'{"it": -5', r"sample 0 of .* is damaged \(it has no column 'id'\)"),
            ("json", b'{"id"', b'["id"', r"sample 0 of .* is damaged"),
        ],
    )
    def test_damaged_lines_are_named(
        self, folder: Path, tmp_path: Path, form: str, old: bytes, new: bytes, message: str
    ) -> None:
        copy = Path(shutil.copytree(folder / form, tmp_path / "copy"))
        shard = copy / f"shard.00000.{form}"
        shard.write_bytes(shard.read_bytes().replace(old, new))
        with pytest.raises(SampleError, match=message):
            MDS(copy)[0]

    @pytest.mark.parametrize("change", [{"separator": ""}, {"newline": 3}, {"column_encodings": []}])
    def test_an_index_that_no_writer_leaves(self, folder: Path, tmp_path: Path, change: dict[str, Any]) -> None:
        copy = Path(shutil.copytree(folder / "xsv", tmp_path / "copy"))
        edit_index(copy, lambda index: index["shards"][0].update(change))
        with pytest.raises(SampleError, match=r"index\.json is not an index of MDS shards"):
            MDS(copy)
