from __future__ import annotations

import gzip
import os
import pickle
import resource
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from format_cases import all_ways_agree, equal, hidden
from hypothesis import given
from hypothesis import strategies as st
from peers import written
from record_files import masked, records
from torch.utils.data import default_collate
from writers.values import COUNT, examples, jpeg, random_image

import feedline as fl
from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead
from feedline.datasets import TFRecord, compression
from feedline.datasets.shards.tf_example import parse_example
from feedline.errors import ArgumentError, MissingExtraError, SampleError, StateError
from feedline.stores.local import RECHECK_S


@pytest.fixture(scope="module")
def folder() -> Path:
    return written("examples")


@pytest.fixture
def files(folder: Path, tmp_path: Path) -> list[Path]:
    """Copies, without index files."""
    found = []
    for name in ("one.tfrecord", "two.tfrecord"):
        found.append(tmp_path / name)
        found[-1].write_bytes((folder / name).read_bytes())
    return found


CODECS: dict[str, Any] = {"gz": gzip.compress, "zlib": zlib.compress}


class TestCompressed:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))

    @pytest.mark.parametrize("codec", CODECS)
    @pytest.mark.parametrize("check", [True, False])
    def test_a_compressed_file_is_read_like_the_plain_one(
        self, files: list[Path], tmp_path: Path, codec: str, check: bool
    ) -> None:
        plain = TFRecord(files[0])
        for name in (f"named.tfrecord.{codec}", "unnamed.tfrecord"):
            (tmp_path / name).write_bytes(CODECS[codec](files[0].read_bytes()))
            dataset = TFRecord(tmp_path / name, check_crc=check)
            assert dataset.paths == [str(tmp_path / name)]
            assert equal(list(dataset), list(plain))
            assert equal(pickle.loads(pickle.dumps(dataset))[7], plain[7])

    @pytest.mark.parametrize("codec", CODECS)
    def test_compressed_objects(
        self, files: list[Path], tmp_path: Path, codec: str, request: pytest.FixtureRequest
    ) -> None:
        system = fsspec.filesystem("memory")
        request.addfinalizer(lambda: system.rm("/packed", recursive=True))
        system.pipe(f"/packed/a.tfrecord.{codec}", CODECS[codec](files[0].read_bytes()))
        system.pipe("/packed/b.tfrecord", CODECS[codec](files[1].read_bytes()))
        addresses = [f"memory://packed/a.tfrecord.{codec}", "memory://packed/b.tfrecord"]
        assert equal(list(TFRecord(addresses[0])), list(TFRecord(files[0])))
        kind = {"gz": "GZIP", "zlib": "ZLIB"}[codec]
        with pytest.raises(SampleError, match=rf"b.tfrecord is compressed with {kind}.*pass compression='{kind}'"):
            TFRecord(addresses)
        dataset = TFRecord(addresses, compression=kind.lower())
        assert equal(list(dataset), list(TFRecord(files)))
        with fl.DataLoader(dataset, None, num_workers=2, shuffle=True, seed=0) as loader:
            assert len(list(loader)) == COUNT

    def test_a_compression_that_is_none(self, files: list[Path]) -> None:
        with pytest.raises(ArgumentError, match=r"compression='lzo' is neither 'GZIP', nor 'ZLIB'"):
            TFRecord(files, compression="lzo")
        with pytest.raises(SampleError, match=r"one.tfrecord cannot be decompressed: it is damaged"):
            TFRecord(files, compression="GZIP")

    @pytest.mark.parametrize("codec", CODECS)
    def test_truncated_files(self, files: list[Path], tmp_path: Path, codec: str) -> None:
        (tmp_path / "a.tfrecord").write_bytes(CODECS[codec](files[0].read_bytes())[:-20])
        with pytest.raises(SampleError, match=r"a.tfrecord cannot be decompressed: it is damaged, truncated"):
            TFRecord(tmp_path / "a.tfrecord")

    def test_bombs_do_not_fill_the_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compression, "ORDINARY_NBYTES", 1 << 20)
        (tmp_path / "a.tfrecord.gz").write_bytes(gzip.compress(records(bytes(1 << 23))))
        with pytest.raises(SampleError, match=r"a.tfrecord.gz has .* bytes and decompresses to more than .* bomb"):
            TFRecord(tmp_path / "a.tfrecord.gz")
        assert not list((tmp_path / "xdg").rglob("temporary/*"))


class TestSequences:
    TYPES: dict[str, Any] = {  # noqa: RUF012 - a constant
        "id": "int64",
        "tags": ("text", (-1,)),
        "score": "float32",
        "boxes": ("float32", (4,)),
        "tokens": ("int64", (-1,)),
        "frames": ("image", (-1,)),
    }

    @pytest.fixture(params=["file", "memory"])
    def path(self, request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[str]:
        """Records of another library, which are SequenceExamples."""
        content = (folder / "sequences.bin").read_bytes()
        (tmp_path / "a.tfrecord").write_bytes(content)
        if request.param == "file":
            yield str(tmp_path / "a.tfrecord")
            return
        system = fsspec.filesystem("memory")
        system.pipe("/sequences/a.tfrecord", content)
        yield "memory://sequences/a.tfrecord"
        system.rm("/sequences", recursive=True)

    def test_everything_comes_as_it_was_written(self, path: str, tmp_path: Path) -> None:
        for i, sample in enumerate(TFRecord(path, index_dir=tmp_path / "index")):
            assert equal(sample["id"], torch.tensor([i]))
            assert sample["tags"] == [f"tag {k}".encode() for k in range(i)]
            assert ("score" in sample) == bool(i % 2)
            assert equal(sample["boxes"], [torch.tensor([t, 1.0, 2, 3]) for t in range(i)])
            assert equal(sample["tokens"], [torch.arange(t + 1) for t in range(i)])
            assert sample["frames"] == [[jpeg(t)] for t in range(i)]

    def test_chosen_features(self, path: str, tmp_path: Path) -> None:
        dataset = TFRecord(path, self.TYPES, defaults={"score": -1}, index_dir=tmp_path / "index")
        for i, sample in enumerate(dataset):
            assert sample["tags"] == [f"tag {k}" for k in range(i)]
            assert equal(sample["score"], torch.tensor(i / 2 if i % 2 else -1.0))
            assert equal(sample["boxes"], torch.tensor([[t, 1.0, 2, 3] for t in range(i)]).reshape(-1, 4))
            assert equal(sample["tokens"], [torch.arange(t + 1) for t in range(i)])
            assert [frame.size for frame in sample["frames"]] == [(9, 7)] * i
        with fl.DataLoader(dataset, None, num_workers=2) as loader:
            assert [len(sample["frames"]) for sample in loader] == [0, 1, 2, 3]

    def test_transforms_apply_to_each_value_of_a_list(self, path: str, tmp_path: Path) -> None:
        crop = fl.transforms.Compose([fl.transforms.RandomResizedCrop(6), fl.transforms.ToTensor()])
        types = {name: self.TYPES[name] for name in ("frames", "id")}
        dataset = TFRecord(path, types, transform={"frames": crop}, index_dir=tmp_path / "index")
        assert [frame.shape for frame in dataset[2]["frames"]] == [(3, 6, 6)] * 2
        with fl.DataLoader(dataset, 1, shuffle=True, seed=0, num_workers=2) as loader:
            first = list(loader)
        with fl.DataLoader(dataset, 1, shuffle=True, seed=0, num_workers=0) as loader:
            assert equal(list(loader), first)

    def test_optional_features(self, path: str, tmp_path: Path) -> None:
        def dataset(name: str, kind: Any, **options: Any) -> TFRecord:
            return TFRecord(path, {name: kind}, index_dir=tmp_path / "index", **options)

        with pytest.raises(SampleError, match=r"record 0 .* has no feature 'score'.*pass defaults=\{'score': value\}"):
            dataset("score", "float32")[0]
        filled = dataset("score", ("float32", (2, 2)), defaults={"score": 0.5})[0]
        assert equal(filled["score"], torch.full((2, 2), 0.5))
        assert equal(dataset("no", ("int64", (-1,)), defaults={"no": []})[0]["no"], torch.empty(0, dtype=torch.int64))
        assert dataset("no", "text", defaults={"no": "ü"})[0]["no"] == "ü"
        assert dataset("no", ("bytes", (2,)), defaults={"no": ["a", b"b"]})[0]["no"] == [b"a", b"b"]
        assert dataset("no", "image", defaults={"no": jpeg(3)})[0]["no"].size == (9, 7)
        for kind, value in (("uint8", 300), (("int64", (2,)), [1]), ("int64", "x"), ("text", 3), (("text", (2,)), "a")):
            with pytest.raises(ArgumentError, match=r"defaults\['no'\]"):
                dataset("no", kind, defaults={"no": value})
        with pytest.raises(ArgumentError, match=r"defaults names 'nein', which is not in columns"):
            dataset("no", "text", defaults={"nein": ""})
        with pytest.raises(ArgumentError, match=r"defaults= needs columns="):
            TFRecord(path, defaults={"no": 1}, index_dir=tmp_path / "index")

    def test_a_feature_without_a_list_is_as_good_as_missing(self, tmp_path: Path) -> None:
        # The map entries {"a": Feature()} and {"b": Feature(bytes_list=BytesList())}.
        features = b"".join(
            b"\x0a" + bytes([len(each)]) + each for each in (b"\x0a\x01a\x12\x00", b"\x0a\x01b\x12\x02\x0a\x00")
        )
        (tmp_path / "a.tfrecord").write_bytes(records(b"\x0a" + bytes([len(features)]) + features))
        types = {"a": "int64", "b": ("text", (-1,))}
        sample = TFRecord(tmp_path / "a.tfrecord", types, defaults={"a": 7, "b": ["default"]})[0]
        assert equal(sample, {"a": torch.tensor(7), "b": []})

    def test_types_that_do_not_fit(self, path: str, tmp_path: Path) -> None:
        cases = {
            ("frames", "image"): r"feature 'frames' of record 3 .* has 3 steps; make its type a list",
            ("tags", "text"): r"holds 3 bytes values instead of one bytes value; make its type a list",
            ("tags", ("text", (2,))): r"holds 3 bytes values instead of 2 bytes values",
            ("tokens", "int64"): r"step 1 of feature 'tokens' of record 3 .* holds 2 x int64",
            ("boxes", ("text", (-1,))): r"step 0 of feature 'boxes' .* holds 4 x float32 instead of one bytes value",
        }
        for (name, kind), message in cases.items():
            with pytest.raises(SampleError, match=message):
                TFRecord(path, {name: kind}, index_dir=tmp_path / "index")[3]


class TestExamples:
    def test_all_features_come_as_they_were_written(self, files: list[Path]) -> None:
        dataset = TFRecord(files)
        assert len(dataset) == COUNT
        assert dataset.shard_sizes.tolist() == [8, 12]
        for ours, theirs in zip((dataset[i] for i in range(COUNT)), examples(), strict=True):
            for name, (value, kind) in theirs.items():
                if kind == "byte":
                    assert ours[name] == [value]
                    continue
                dtype = torch.int64 if kind == "int" else torch.float32
                assert equal(ours[name], torch.tensor(value if isinstance(value, list) else [value], dtype=dtype))

    def test_features_become_the_requested_types(self, files: list[Path]) -> None:
        features = {
            "label": torch.int16,
            "box": ("float64", (2, 2)),
            "many": ("int64", (-1,)),
            "name": "text",
            "image": "image",
            "raw": (np.uint8, (2, 3)),
        }
        sample = TFRecord(files, features)[10]
        assert list(sample) == list(features)
        assert equal(sample["label"], torch.tensor(7, dtype=torch.int16))
        assert equal(sample["box"], torch.tensor([[5.0, 0], [-1.5, float(np.float32(1e30))]], dtype=torch.float64))
        assert sample["many"].tolist() == list(range(-10, 400, 7))
        assert sample["name"] == "größe 10"
        assert sample["image"].size == random_image(10, (24, 18)).size
        assert equal(sample["raw"], torch.full((2, 3), 10, dtype=torch.uint8))

    def test_transforms_by_feature_and_of_the_whole(self, files: list[Path]) -> None:
        small = fl.transforms.Compose([fl.transforms.Resize((8, 8)), fl.transforms.ToTensor()])
        dataset = TFRecord(
            files, {"image": "image", "label": "int64"}, transform={"image": small, "label": lambda y: y + 3}
        )
        assert dataset[4]["image"].shape == (3, 8, 8)
        assert dataset[4]["label"].item() == 4
        assert TFRecord(files, {"label": "int64"}, transform=lambda s: int(s["label"]))[4] == 1

    def test_batches_of_images_are_made_in_place(self, files: list[Path], tmp_path: Path) -> None:
        crop = fl.transforms.Compose([fl.transforms.RandomResizedCrop(6), fl.transforms.ToTensor()])
        features = {"image": "image", "label": "int64", "name": "text"}
        dataset = TFRecord(files, features, transform={"image": crop})
        (tmp_path / "bare.tfrecord").write_bytes(records(*(jpeg(i, (24, 18)) for i in range(20))))
        bare = TFRecord(tmp_path / "bare.tfrecord", decode="image", transform=crop)
        for each in (dataset, bare):
            torch.manual_seed(1)
            theirs = default_collate([each[i] for i in (3, -1, 12)])
            torch.manual_seed(1)
            assert equal(
                each.read_batch(BatchRead(np.array([3, -1, 12]), fl.core.tensors.allocate_tensor, None)), theirs
            )
            with fl.DataLoader(each, 6, seed=4) as loader, fl.DataLoader(each, 6, seed=4, on_error="skip") as slow:
                assert equal(list(loader), list(slow))
        for other in ({}, {"transform": str}, {"transform": {"image": crop, "label": abs}}):
            assert reader_of(TFRecord(files, features, **other)) is None
        (tmp_path / "bad.tfrecord").write_bytes(records(jpeg(0), b"no image"))
        bad = TFRecord(tmp_path / "bad.tfrecord", decode="image", transform=crop)
        with pytest.raises(SampleError, match=r"record 1 of .*bad.tfrecord: .*could not be read"):
            bad.read_batch(BatchRead(np.array([0, 1]), fl.core.tensors.allocate_tensor, None))

    def test_ways_to_fetch_agree(self, files: list[Path]) -> None:
        all_ways_agree(TFRecord(files, {"label": "int64", "name": "bytes"}), [19, 0, 7, 8, -1])

    def test_records_of_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "a.tfrecord").write_bytes(records(b"one", b"", "größe".encode()))
        assert list(TFRecord(tmp_path / "a.tfrecord", decode="text").__getitems__([0, 1, 2])) == ["one", "", "größe"]
        with pytest.raises(ArgumentError, match="but decode= does not"):
            TFRecord(tmp_path / "a.tfrecord", {"x": "int64"}, decode="text")

    def test_an_empty_file(self, files: list[Path], tmp_path: Path) -> None:
        (tmp_path / "empty.tfrecord").touch()
        assert len(TFRecord([tmp_path / "empty.tfrecord", *files])) == COUNT


class TestFeatures:
    @pytest.mark.parametrize(
        ("features", "message"),
        [
            ({"gone": "int64"}, r"record 2 of .*one.tfrecord has no feature 'gone'; it has box, image, label"),
            ({"box": "int64"}, r"feature 'box' of record 2 of .* holds 4 x float32, which do not make int64 of shape"),
            ({"box": ("float32", (3, -1))}, r"holds 4 x float32, which do not make float32 of shape \(3, -1\)"),
            ({"label": "bytes"}, r"feature 'label' .* holds 1 x int64 instead of one bytes value"),
            (
                {"label": "uint8"},
                r"feature 'label' .* holds numbers that uint8 cannot represent; request a wider dtype",
            ),
            (
                {"box": ("int64", (4,))},
                r"feature 'box' of record 2 .* holds .*, which int64 cannot represent; request a float",
            ),
            ({"raw": ("int32", (2, 3))}, r"feature 'raw' .* holds 6 bytes, which do not make int32"),
            ({"name": "image"}, r"feature 'name' of record 2 .* cannot be decoded as image .*on_error='skip'"),
        ],
    )
    def test_what_does_not_fit_is_named(self, files: list[Path], features: Any, message: str) -> None:
        with pytest.raises(SampleError, match=message):
            TFRecord(files, features)[2]

    @pytest.mark.parametrize(
        ("number", "dtype"),
        [
            (3.7, "int64"),
            (3.7, "bool"),
            (2.0, "bool"),
            (-1.0, "uint8"),
            (256.0, "uint8"),
            (1e30, "uint8"),
            (2.0**63, "int64"),
            (2.0**64, "uint64"),
            (float("nan"), "int32"),
            (float("-inf"), "int32"),
        ],
    )
    def test_numbers_that_are_no_integers_are_refused(self, tmp_path: Path, number: float, dtype: str) -> None:
        value = field(2, field(1, struct.pack("<ff", 1.0, number)))
        (tmp_path / "a.tfrecord").write_bytes(records(example({"x": value})))
        with pytest.raises(
            SampleError, match=rf"feature 'x' .* holds \S+, which {dtype} cannot represent; request a float"
        ):
            TFRecord(tmp_path / "a.tfrecord", {"x": (dtype, (2,))})[0]

    @pytest.mark.parametrize(
        ("number", "dtype"), [(3.0, "int64"), (-(2.0**63), "int64"), (2.0**63, "uint64"), (1, "bool"), (0.1, "float64")]
    )
    def test_whole_numbers_are_taken(self, tmp_path: Path, number: float, dtype: str) -> None:
        (tmp_path / "a.tfrecord").write_bytes(records(example({"x": field(2, field(1, struct.pack("<f", number)))})))
        assert TFRecord(tmp_path / "a.tfrecord", {"x": dtype})[0]["x"].item() == np.float32(number)

    @pytest.mark.parametrize(
        ("number", "dtype", "taken"),
        [
            *((2**53, "float64", True), (2**53 + 1, "float64", False), (-(2**53) - 1, "complex128", False)),
            *((2**24, "float32", True), (2**24 + 1, "float32", False), (-(2**63), "float32", True)),
            *((2**63 - 1, "float64", False), (70_000, "float16", False), (-(2**63), "float16", False)),
            *((-1, "uint64", False), (2**63, "int64", False), (2**63, "float32", True), (2**64 - 1, "float64", False)),
        ],
    )
    def test_integers_are_never_rounded(self, tmp_path: Path, number: int, dtype: str, taken: bool) -> None:
        default = {"defaults": {"x": number}} if number >= 2**63 else {}
        features = {} if default else {"x": field(3, field(1, varint(number % 2**64)))}
        (tmp_path / "a.tfrecord").write_bytes(records(example(features)))
        if taken:
            assert TFRecord(tmp_path / "a.tfrecord", {"x": dtype}, **default)[0]["x"].item() == number
            return
        with pytest.raises((SampleError, ArgumentError), match=rf"holds numbers that {dtype} cannot represent"):
            TFRecord(tmp_path / "a.tfrecord", {"x": dtype}, **default)[0]

    @pytest.mark.parametrize("raw", [True, False])
    def test_no_numbers_make_an_empty_tensor(self, tmp_path: Path, raw: bool) -> None:
        value = field(1, field(1, b"")) if raw else field(2, b"")
        (tmp_path / "a.tfrecord").write_bytes(records(example({"x": value})))
        for shape in ((-1, 4), (0, 4), (-1,)):
            sample = TFRecord(tmp_path / "a.tfrecord", {"x": ("float32", shape)})[0]
            assert equal(sample["x"], torch.empty([max(side, 0) for side in shape]))
        with pytest.raises(SampleError, match=r"holds 0 .*, which do not make float32 of shape \(\)"):
            TFRecord(tmp_path / "a.tfrecord", {"x": "float32"})[0]

    @pytest.mark.parametrize(
        "feature",
        [
            *("imag", "datetime64[s]", object, ("int64",), ("int64", (2,), 3)),
            *(("int64", shape) for shape in ((-1, -1), (-1, 0), 3, "3", (2.0,), (-2,), None)),
        ],
    )
    def test_impossible_types(self, files: list[Path], feature: Any) -> None:
        with pytest.raises(ArgumentError, match=r"columns\['x'\]=.* is neither a dtype"):
            TFRecord(files, {"x": feature})

    def test_features_have_to_be_described_by_name(self, files: list[Path]) -> None:
        for features in (["label"], "label", {"label"}):
            with pytest.raises(ArgumentError, match=r"columns=.*label.*: pass a dict from the name of each feature"):
                TFRecord(files, features)  # type: ignore[arg-type]

    def test_a_transform_of_an_unknown_feature(self, files: list[Path]) -> None:
        with pytest.raises(ArgumentError, match=r"transform= names 'x'; known fields of a sample are label"):
            TFRecord(files, {"label": "int64"}, transform={"x": abs})


class TestFiles:
    def test_patterns_and_folders(self, files: list[Path]) -> None:
        for _ in range(2):  # index files are no records
            assert len(TFRecord(files[0].parent)) == COUNT
        assert len(TFRecord(str(files[0].parent / "{one,two}.tfrecord"))) == COUNT

    def test_the_index_is_made_once_and_checks_every_record(self, files: list[Path]) -> None:
        TFRecord(files)
        assert (files[0].parent / ".one.tfrecord.index").exists()
        with hidden("google_crc32c"):
            assert len(TFRecord(files)) == COUNT

    def test_the_index_can_be_in_another_folder(self, files: list[Path], tmp_path: Path) -> None:
        TFRecord(files, index_dir=tmp_path / "indexes")
        assert sorted(path.name[16:] for path in (tmp_path / "indexes").iterdir()) == [
            "-one.tfrecord.index",
            "-two.tfrecord.index",
        ]
        assert not (files[0].parent / ".one.tfrecord.index").exists()

    def test_it_pickles_by_path(self, files: list[Path]) -> None:
        dataset = TFRecord(files)
        dataset[0]
        data = pickle.dumps(dataset)
        assert len(data) < 2000
        assert equal(pickle.loads(data)[9], dataset[9])

    def test_a_file_that_has_changed_is_refused(self, files: list[Path]) -> None:
        data = pickle.dumps(TFRecord(files))
        files[1].write_bytes(files[0].read_bytes())
        dataset = pickle.loads(data)
        assert len(dataset[0]) == len(examples()[0])
        with pytest.raises(
            StateError, match=r"two.tfrecord has changed since this dataset was made: .*create the dataset again"
        ):
            dataset[10]

    def test_a_missing_index_is_reported(self, files: list[Path]) -> None:
        dataset = TFRecord(files)
        (files[0].parent / ".one.tfrecord.index").unlink()
        with pytest.raises(StateError, match=r"the index .*.one.tfrecord.index was removed or replaced"):
            dataset[0]

    def test_more_files_than_may_be_open(self, tmp_path: Path) -> None:
        for number in range(600):
            (tmp_path / f"{number:03}.tfrecord").write_bytes(records(b"%d" % number))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        dataset = TFRecord(tmp_path, decode=int)
        held = len(list(Path("/proc/self/fd").iterdir()))
        # Earlier tests of this process may have left some open, until their garbage is collected.
        limit = max(256, 2 * held)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            dataset = TFRecord(tmp_path, decode=int)
            assert [dataset[i] for i in range(600)] == list(range(600))
            assert len(list(Path("/proc/self/fd").iterdir())) - held < 0.3 * limit < 600
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_a_missing_library(self, files: list[Path]) -> None:
        with hidden("google_crc32c"), pytest.raises(MissingExtraError, match=r"pip install 'feedline\[tfrecord\]'"):
            TFRecord(files)
        with hidden("google_crc32c"):
            assert len(TFRecord(files, check_crc=False)) == COUNT

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no such file: .*gone.tfrecord"):
            TFRecord(tmp_path / "gone.tfrecord")


class TestDamage:
    @pytest.mark.parametrize(
        ("at", "message"),
        [
            (0, r"record 0 of .*, at byte 0, has a damaged length \(checksum mismatch\)"),
            (15, r"record 0 of .* is damaged \(checksum mismatch\).*check_crc=False"),
            (40, r"record 1 of .*, at byte 21, is damaged"),
        ],
    )
    def test_a_flipped_bit_is_found(self, tmp_path: Path, at: int, message: str) -> None:
        data = bytearray(records(b"hello", b"something longer"))
        data[at] ^= 4
        (tmp_path / "a.tfrecord").write_bytes(data)
        with pytest.raises(SampleError, match=message):
            TFRecord(tmp_path / "a.tfrecord", decode="bytes")

    def test_check_can_be_left_out(self, tmp_path: Path) -> None:
        data = bytearray(records(b"hello"))
        data[12] ^= 1
        (tmp_path / "a.tfrecord").write_bytes(data)
        assert TFRecord(tmp_path / "a.tfrecord", decode="bytes", check_crc=False)[0] == b"iello"

    def test_an_index_that_was_made_without_is_made_again_to_check(self, tmp_path: Path) -> None:
        data = bytearray(records(b"hello", b"more"))
        path, place = tmp_path / "a.tfrecord", tmp_path / ".a.tfrecord.index"
        path.write_bytes(data)
        TFRecord(path, decode="bytes", check_crc=False)
        unchecked = place.read_bytes()
        assert len(TFRecord(path, decode="bytes")) == 2
        checked = place.read_bytes()
        assert checked != unchecked
        assert len(TFRecord(path, decode="bytes", check_crc=False)) == 2
        assert place.read_bytes() == checked
        data[12] ^= 1
        path.write_bytes(data)
        assert TFRecord(path, decode="bytes", check_crc=False)[0] == b"iello"
        for _ in range(2):
            with pytest.raises(SampleError, match=r"record 0 of .* is damaged \(checksum mismatch\)"):
                TFRecord(path, decode="bytes")

    def test_a_file_that_is_truncated_while_it_is_open(self, tmp_path: Path) -> None:
        path = tmp_path / "a.tfrecord"
        path.write_bytes(records(*[bytes(50_000)] * 4))
        dataset = TFRecord(path, decode="bytes")
        assert len(dataset[3]) == 50_000
        for rest in (60_000, 0):
            os.truncate(path, rest)
            time.sleep(2 * RECHECK_S)
            with (
                fl.DataLoader(dataset, batch_size=4, collate_fn=len) as loader,
                pytest.raises(StateError, match=rf"a.tfrecord has changed .* has {rest} now.*create the dataset again"),
            ):
                list(loader)
        (tmp_path / "b.tfrecord").write_bytes(records(b"whole"))
        path.write_bytes(records(*[bytes(50_000)] * 4))
        both = TFRecord(tmp_path, decode="bytes")
        assert len(both[3]) == 50_000
        os.truncate(path, 0)
        time.sleep(2 * RECHECK_S)
        with fl.DataLoader(both, batch_size=5, collate_fn=list, on_error="skip") as loader:
            assert list(loader) == [[b"whole"]]

    @pytest.mark.parametrize("left", [3, 20, 30, 50])
    def test_a_file_that_was_cut_off(self, tmp_path: Path, left: int) -> None:
        (tmp_path / "a.tfrecord").write_bytes(records(b"hello", b"something much longer")[:left])
        with pytest.raises(SampleError, match=r"record [01] of .*was the file copied completely\?"):
            TFRecord(tmp_path / "a.tfrecord", decode="bytes")

    @pytest.mark.parametrize("check", [True, False])
    def test_a_length_from_hell(self, tmp_path: Path, check: bool) -> None:
        head = struct.pack("<Q", 2**64 - 8)
        (tmp_path / "a.tfrecord").write_bytes(head + masked(head) + bytes(40))
        with pytest.raises(SampleError, match=r"claims 18446744073709551608 bytes, but 40 are left"):
            TFRecord(tmp_path / "a.tfrecord", decode="bytes", check_crc=check)

    def test_a_record_as_long_as_a_gzip_file_begins_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "a.tfrecord").write_bytes(records(bytes(0x8B1F)))
        assert len(TFRecord(tmp_path / "a.tfrecord", decode="bytes")[0]) == 0x8B1F

    def test_records_that_are_no_examples(self, tmp_path: Path) -> None:
        (tmp_path / "a.tfrecord").write_bytes(records(b"\x0a\xff\xff\x03", b"\xff" * 20, b"\x0b"))
        dataset = TFRecord(tmp_path / "a.tfrecord")
        for number in range(3):
            with pytest.raises(
                SampleError, match=rf"record {number} of .* is not a tf.train.Example \(.*decode='bytes'"
            ):
                dataset[number]


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(features: dict[str, bytes]) -> bytes:
    return field(1, b"".join(field(1, field(1, k.encode()) + field(2, v)) for k, v in features.items()))


class TestWire:
    @given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), st.integers(0, 40))
    def test_integers_packed_or_not(self, values: list[int], split: int) -> None:
        packed = field(1, b"".join(map(varint, values[:split])))
        loose = b"".join(varint(1 << 3) + varint(value) for value in values[split:])
        assert parse_example(example({"x": field(3, packed + loose)}))["x"].tolist() == values  # type: ignore[union-attr]

    @given(st.lists(st.floats(width=32, allow_nan=False), max_size=40), st.integers(0, 40))
    def test_floats_packed_or_not(self, values: list[float], split: int) -> None:
        packed = field(1, struct.pack(f"<{len(values[:split])}f", *values[:split]))
        loose = b"".join(varint(1 << 3 | 5) + struct.pack("<f", value) for value in values[split:])
        assert parse_example(example({"x": field(2, packed + loose)}))["x"].tolist() == values  # type: ignore[union-attr]

    @given(st.dictionaries(st.text(max_size=5), st.lists(st.binary(max_size=5), max_size=5), max_size=5))
    def test_bytes_and_names(self, features: dict[str, list[bytes]]) -> None:
        lists = {name: field(1, b"".join(field(1, value) for value in values)) for name, values in features.items()}
        assert parse_example(example(lists)) == features

    def test_fields_of_later_versions_are_passed_over(self) -> None:
        later = varint(9 << 3) + varint(5) + field(8, b"new") + varint(7 << 3 | 1) + bytes(8)
        assert parse_example(later + example({"x": later + field(1, field(1, b"v"))}) + later) == {"x": [b"v"]}

    @given(st.binary(max_size=60))
    def test_rubbish_is_refused_or_read_but_never_more(self, data: bytes) -> None:
        with suppress(ValueError):
            parse_example(data)

    @given(st.binary(max_size=30), st.integers(0, 200), st.integers(0, 255))
    def test_damage_is_refused_or_read_but_never_more(self, value: bytes, at: int, byte: int) -> None:
        data = bytearray(example({"a": field(1, field(1, value)), "b": field(3, field(1, varint(-5) * 6))}))
        data[at % len(data)] = byte
        with suppress(ValueError):
            parse_example(bytes(data))
