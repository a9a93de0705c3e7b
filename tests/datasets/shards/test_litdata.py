from __future__ import annotations

import errno
import json
import pickle
import shutil
import struct
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from format_cases import all_ways_agree, equal, hidden
from hypothesis import given
from hypothesis import strategies as st
from peers import written
from torch.utils.data import DataLoader, default_collate
from writers.values import COUNT, litdata_samples

import feedline as fl
from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead
from feedline.datasets import LitData, LitDataTokens
from feedline.datasets.shards.litdata import LeafTree
from feedline.datasets.shards.litdata_types import decode_function, decode_nested
from feedline.errors import ArgumentError, MissingExtraError, SampleError
from feedline.stores import ObjectNotFoundError
from feedline.stores.cache.folder import Folder
from feedline.stores.files import Extent
from formats.records import arrow_chunk

SAMPLES = ["leaves", "tuples", "bare", "rows", "mixed", "batch", "chunk", "sample"]
_LEAF = {"type": None, "context": None, "children_spec": []}
TWO_KEYS_ONE_LEAF = {"type": "builtins.dict", "context": '["a", "b"]', "children_spec": [_LEAF]}
LIST_OF_STRINGS = struct.pack("<BI", 1, 2) + struct.pack("<I1sI2s", 1, b"a", 2, "ü".encode())


@pytest.fixture(scope="module")
def folder() -> Path:
    return written("litdata_chunks")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A folder to damage."""
    return Path(shutil.copytree(folder / "tuples", tmp_path / "copy"))


def tree_of(sample: Any) -> LeafTree:
    kind = type(sample)
    children = tuple(map(tree_of, sample.values() if isinstance(sample, dict) else sample)) if kind is not int else ()
    keys = tuple(sample) if isinstance(sample, dict) else ()
    return LeafTree("" if kind is int else f"{kind.__module__}.{kind.__name__}", keys, children)


def spec_of(sample: Any) -> dict[str, Any]:
    """The structure of a sample as in `index.json`."""
    if not isinstance(sample, (dict, list)):
        return _LEAF
    keys, parts = (json.dumps([*sample]), sample.values()) if isinstance(sample, dict) else (None, sample)
    return {"type": f"builtins.{type(sample).__name__}", "context": keys, "children_spec": [*map(spec_of, parts)]}


def edit_index(folder: Path, change: Any) -> None:
    """Change the entries of the index."""
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


class TestSamples:
    @pytest.mark.parametrize("kind", SAMPLES)
    def test_files_of_litdata_are_read_back_equal(self, folder: Path, tmp_path: Path, kind: str) -> None:
        dataset = LitData(folder / kind, cache=tmp_path)
        assert dataset.shard_sizes.tolist() == [8, 8, 4]
        assert equal([dataset[i] for i in range(COUNT)], litdata_samples(kind))
        assert equal(dataset.__getitems__([19, 0, -2, 8]), [litdata_samples(kind)[i] for i in (19, 0, 18, 8)])

    def test_samples_are_memory_of_their_own(self, folder: Path) -> None:
        dataset = LitData(folder / "bare")
        dataset[3].fill_(99)
        assert dataset[3].tolist() == [[3, 3], [3, 3]]

    def test_images(self, folder: Path) -> None:
        assert LitData(folder / "images")[2]["image"].size == (24, 18)
        small = fl.transforms.Compose([fl.transforms.Resize((6, 5)), fl.transforms.ToTensor()])
        dataset = LitData(folder / "images", transform={"image": small})
        with fl.DataLoader(dataset, 4, num_workers=2) as loader:
            batch = next(iter(loader))
        assert batch["image"].shape == (4, 3, 6, 5)
        assert batch["label"].tolist() == [0, 1, 2, 3]

    def test_batches_of_images_are_made_in_place(self, folder: Path) -> None:
        crop = fl.transforms.Compose([fl.transforms.RandomResizedCrop(6), fl.transforms.ToTensor()])
        dataset = LitData(folder / "images", transform={"image": crop})
        torch.manual_seed(1)
        theirs = default_collate([dataset[i] for i in (3, -1, 2)])
        torch.manual_seed(1)
        assert equal(dataset.read_batch(BatchRead(np.array([3, -1, 2]), fl.core.tensors.allocate_tensor, None)), theirs)
        with fl.DataLoader(dataset, 4, seed=4) as loader, fl.DataLoader(dataset, 4, seed=4, on_error="skip") as slow:
            assert equal(list(loader), list(slow))
        for other in ({}, {"transform": {"image": lambda image: image.size}}, {"transform": str}):
            assert reader_of(LitData(folder / "images", **other)) is None

    @pytest.mark.parametrize(
        "sample",
        [{"a": 1, "b": (2, [3, {"c": 4}])}, [1, 2], (5,), 7, OrderedDict(z=(1, 2), a=[3])],
    )
    def test_batches_have_the_structure_of_default_collate(self, sample: Any) -> None:
        tree = tree_of(sample)
        leaves = torch.utils._pytree.tree_leaves(sample)  # type: ignore[attr-defined]
        assert equal(tree.fill(leaves[::-1]), sample)
        columns = [torch.tensor([leaf, leaf]) for leaf in leaves]
        assert equal(tree.collate(columns[::-1]), default_collate([sample, sample]))

    def test_transforms_by_leaf_and_of_the_whole(self, folder: Path) -> None:
        nested_leaf = LitData(folder / "tuples", transform={"1.1.x": lambda x: x.sum()})
        assert nested_leaf[3][1][1]["x"] == 9
        rows = LitData(folder / "rows", transform={"more.list": len, "text": str})
        assert rows[2] == {"id": 2, "text": "üü", "more": {"list": 2, "flag": True}}
        assert LitData(folder / "bare", transform=lambda x, rng: x.sum() + rng.integers(1))[3] == 12
        with pytest.raises(ArgumentError, match=r"transform= names 'y'; known fields of a sample are x, id"):
            LitData(folder / "batch", transform={"y": len})

    def test_transforms_of_leaves_in_table_rows(self, tmp_path: Path) -> None:
        rows: list[dict[str, Any]] = [{"view": [{"x": 1}, {"x": 2}], "a.b": 3, "a": {"c": 4}}] * 2
        chunk = arrow_chunk([*rows, {**rows[0], "view": []}], 3)
        config = {"data_format": ["int"] * 4, "data_spec": json.dumps([1, spec_of(rows[0])])}
        chunks = [{"filename": "chunk-0.bin", "chunk_bytes": len(chunk), "chunk_size": 3, "dim": None}]
        (tmp_path / "chunk-0.bin").write_bytes(chunk)
        (tmp_path / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
        data = LitData(tmp_path, transform={"view.1.x": str, "a.b": lambda x, rng: -x, "a.c": float})
        assert data[0] == data[1] == {"view": [{"x": 1}, {"x": "2"}], "a.b": -3, "a": {"c": 4.0}}
        with pytest.raises(SampleError, match=r"sample 2 of .*chunk-0.bin does not have the structure .*IndexError"):
            data[2]

    def test_pickle_is_never_read(self, folder: Path) -> None:
        with pytest.raises(
            ArgumentError, match=r"leaf 'any' of .*pickled is stored as pickle, .*; leave it out with col"
        ):
            LitData(folder / "pickled")
        dataset = LitData(folder / "pickled", columns=["id"])
        assert dataset[0] == {"id": 7}
        assert equal(pickle.loads(pickle.dumps(dataset)).__getitems__([0, 0]), [{"id": 7}, {"id": 7}])

    @pytest.mark.parametrize(
        ("kind", "leaves", "left"),
        [
            ("leaves", ["pil", "int"], lambda sample: {"int": sample["int"], "pil": sample["pil"]}),
            ("tuples", ["1.1.x"], lambda sample: ([{"x": sample[1][1]["x"]}],)),
            ("bare", [""], lambda sample: sample),
            (
                "rows",
                ["more.list", "id"],
                lambda sample: {"id": sample["id"], "more": {"list": sample["more"]["list"]}},
            ),
            ("mixed", ["mapping.deep"], lambda sample: {"mapping": {"deep": sample["mapping"]["deep"]}}),
            *((kind, ["id"], lambda sample: {"id": sample["id"]}) for kind in ("batch", "chunk", "sample")),
        ],
    )
    def test_leaves_that_are_chosen(
        self, folder: Path, tmp_path: Path, kind: str, leaves: list[str], left: Callable[[Any], Any]
    ) -> None:
        dataset = LitData(folder / kind, columns=leaves, cache=tmp_path)
        expected = [left(sample) for sample in litdata_samples(kind)]
        assert equal([dataset[i] for i in range(COUNT)], expected)
        assert equal(dataset.__getitems__([19, -2, 8]), [expected[i] for i in (19, 18, 8)])

    def test_samples_have_the_structure_that_is_left(self, folder: Path) -> None:
        whole = LitData(folder / "tuples")[3]
        picked = LitData(folder / "tuples", columns=("0", "1.1.x"), transform={"1.1.x": lambda x: x.sum()})
        assert picked[3] == (whole[0], [{"x": 9}])
        rows = LitData(folder / "rows", columns=("more.flag", "id"), transform={"id": str})
        assert rows[2] == {"id": "2", "more": {"flag": True}}
        small = fl.transforms.Compose([fl.transforms.Resize((6, 5)), fl.transforms.ToTensor()])
        images = LitData(folder / "images", columns=["image"], transform={"image": small})
        batch = images.read_batch(BatchRead(np.array([3, 1]), fl.core.tensors.allocate_tensor))
        assert equal(batch, default_collate([images[3], images[1]]))

    def test_leaves_that_are_not_there(self, folder: Path) -> None:
        with pytest.raises(ArgumentError, match=r"the samples of .*batch have no leaf 'y'; they have x, id"):
            LitData(folder / "batch", columns=["y"])
        with pytest.raises(ArgumentError, match=r"transform= names 'x'; known fields of a sample are id"):
            LitData(folder / "batch", columns=["id"], transform={"x": len})
        for leaves in ("id", []):
            with pytest.raises(ArgumentError, match=r"columns=.*: give a tuple of names, such as \('image', 'label'\)"):
                LitData(folder / "batch", columns=leaves)

    def test_files_come_as_bytes(self) -> None:
        for name in ("file:wav", "audio"):
            assert decode_function(name)(memoryview(b"RIFF")) == b"RIFF"
        with pytest.raises(ArgumentError, match=r"'hologram', which is not known"):
            decode_function("hologram")


class TestTokens:
    @pytest.mark.parametrize(("kind", "dtype"), [("tokens", torch.int64), ("words", torch.uint16)])
    @pytest.mark.parametrize("window", [1, 6, 30])
    def test_windows_are_those_of_litdata(self, folder: Path, kind: str, dtype: torch.dtype, window: int) -> None:
        dataset = LitDataTokens(folder / kind, window)
        index = json.loads((folder / kind / "index.json").read_text())
        expected, samples = [], iter(litdata_samples(kind))
        for chunk in index["chunks"]:
            tokens = torch.cat([torch.as_tensor(next(samples)) for _ in range(chunk["chunk_size"])])
            expected += [tokens[i * window : (i + 1) * window] for i in range(len(tokens) // window)]
        assert len(dataset) == len(expected)
        assert dataset.shard_sizes.sum() == len(expected)
        assert dataset[0].dtype == dtype
        assert equal([dataset[i] for i in range(len(dataset))], expected)
        all_ways_agree(dataset, [len(dataset) - 1, 0, -1])

    def test_each_kind_has_its_own_reader(self, folder: Path) -> None:
        with pytest.raises(ArgumentError, match=r"holds tokens: read it with datasets.LitDataTokens\(path, window\)"):
            LitData(folder / "tokens")
        with pytest.raises(ArgumentError, match=r"holds samples, not tokens: read it with datasets.LitData\(path\)"):
            LitDataTokens(folder / "bare", 3)

    def test_windows_that_cannot_be(self, folder: Path) -> None:
        with pytest.raises(ArgumentError, match="window=0 must be at least 1"):
            LitDataTokens(folder / "tokens", 0)
        with pytest.raises(ArgumentError, match=r"no chunk of .*tokens holds the 9999 tokens of a window"):
            LitDataTokens(folder / "tokens", 9999)
        for window in ("3", 3.0, None):
            with pytest.raises(ArgumentError, match=rf"window={window!r} must be an integer"):
                LitDataTokens(folder / "tokens", window)  # type: ignore[arg-type]

    def test_a_chunk_with_other_tokens(self, folder: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(folder / "tokens", tmp_path / "copy"))
        edit_index(copy, lambda index: index["chunks"][0].update(dim=30))
        with pytest.raises(SampleError, match=r"chunk-0-0.bin holds \d+ bytes of tokens, its index says 30 tokens of"):
            LitDataTokens(copy, 5)[0]


class TestProcesses:
    def test_it_pickles_by_path(self, folder: Path) -> None:
        dataset = LitData(folder / "tuples")
        dataset[0]
        data = pickle.dumps(dataset)
        assert len(data) < 4000
        assert equal(pickle.loads(data)[7], dataset[7])

    @pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning")
    @pytest.mark.parametrize("kind", ["batch", "sample", "bare"])
    def test_chunks_that_were_open_before_a_fork(self, folder: Path, kind: str) -> None:
        dataset = LitData(folder / kind)
        dataset[0]
        loader = DataLoader(dataset, 6, num_workers=2, multiprocessing_context="fork")
        samples = litdata_samples(kind)
        ours = [batch["x"] if isinstance(batch, dict) else batch for batch in loader]
        assert torch.equal(torch.cat(ours), torch.stack([s["x"] if isinstance(s, dict) else s for s in samples]))

    def test_missing_libraries(self, folder: Path, tmp_path: Path) -> None:
        for kind in ("batch", "chunk", "sample"):
            with hidden("cramjam"), pytest.raises(MissingExtraError, match=r"pip install 'feedline\[litdata\]'"):
                LitData(folder / kind, cache=tmp_path)[0]


class TestDamage:
    def test_what_is_not_there(self, tmp_path: Path, copy: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no LitData set: .*/index.json does not exist"):
            LitData(tmp_path)
        dataset = LitData(copy)
        (copy / "chunk-0-1.bin").unlink()
        assert dataset[0][0] == 0
        missing = r"copy/chunk-0-1.bin does not exist, but index.json lists it for 8 samples from number 8 on: copy"
        with pytest.raises(ObjectNotFoundError, match=missing):
            dataset[8]
        with pytest.raises(ObjectNotFoundError, match=missing):
            LitData(copy)

    def test_another_missing_file_is_not_taken_for_a_chunk(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def get(*_: Any) -> None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", "piece")

        dataset = LitData(folder / "chunk", cache=tmp_path)
        monkeypatch.setattr(Folder, "get", get)
        for read in (lambda: dataset[0], lambda: dataset._files.read([Extent(0, 0, 9)])):
            with pytest.raises(FileNotFoundError, match="No such file or directory: 'piece'"):
                read()

    def test_tokens_that_are_not_there(self, folder: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(folder / "tokens", tmp_path / "copy"))
        dataset = LitDataTokens(copy, 5)
        sizes = dataset.shard_sizes.tolist()
        (copy / "chunk-0-1.bin").unlink()
        missing = rf"copy/chunk-0-1.bin does not exist, .* lists it for {sizes[1]} samples from number {sizes[0]} on"
        with pytest.raises(ObjectNotFoundError, match=missing):
            dataset[sizes[0]]
        with pytest.raises(ObjectNotFoundError, match=missing):
            LitDataTokens(copy, 5)

    @pytest.mark.parametrize(
        "change",
        [
            lambda index: index.pop("chunks"),
            lambda index: index["config"].pop("data_format"),
            lambda index: index["config"].update(data_spec="[1"),
            lambda index: index["config"]["data_format"].pop(),
            lambda index: index["chunks"][0].update(filename="/etc/passwd"),
            lambda index: index["config"].update(data_spec=json.dumps([1, TWO_KEYS_ONE_LEAF])),
        ],
    )
    def test_an_index_of_something_else(self, copy: Path, change: Any) -> None:
        edit_index(copy, change)
        with pytest.raises(SampleError, match=r"copy/index.json is not an index of LitData chunks"):
            LitData(copy)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"encryption": {"algorithm": "fernet"}}, r"index.json: the chunks are encrypted, which is not supported"),
            (
                {"item_loader": "ParquetLoader"},
                r"written for ParquetLoader, .*read Parquet files with datasets.Parquet",
            ),
            (
                {"data_spec": json.dumps([1, {"type": "x.Custom", "context": None, "children_spec": []}])},
                r"samples hold a x.Custom; only dicts, lists and tuples are supported",
            ),
        ],
    )
    def test_what_is_not_read(self, copy: Path, change: dict[str, Any], message: str) -> None:
        edit_index(copy, lambda index: index["config"].update(change))
        with pytest.raises(ArgumentError, match=message):
            LitData(copy)

    def test_a_chunk_of_another_size(self, copy: Path) -> None:
        chunk = copy / "chunk-0-1.bin"
        chunk.write_bytes(chunk.read_bytes()[:-1])
        with pytest.raises(SampleError, match=r"chunk-0-1.bin has \d+ bytes, its index says \d+; copy it again"):
            LitData(copy)

    @pytest.mark.parametrize(("at", "value"), [(0, 9), (4, 2**32 - 1), (12, 0)])
    def test_offsets_that_lead_astray(self, copy: Path, at: int, value: int) -> None:
        damage(copy / "chunk-0-0.bin", at, struct.pack("<I", value))
        with pytest.raises(SampleError, match=r"chunk-0-0.bin is damaged: it does not hold the 8 samples"):
            LitData(copy)[0]

    def test_leaves_that_do_not_fill_their_sample(self, copy: Path) -> None:
        damage(copy / "chunk-0-0.bin", 4 * 10, struct.pack("<I", 1000))
        with pytest.raises(SampleError, match=r"sample 0 of .*chunk-0-0.bin is damaged: its leaves do not fill"):
            LitData(copy)[0]

    @pytest.mark.parametrize(
        ("kind", "at", "data", "message"),
        [
            ("batch", 8, b"\x09", r"chunk-0-0.bin is damaged: it does not hold the 8 samples"),
            (
                "batch",
                24 + 4 * 9 + 16,
                b"\xff" * 4,
                r"frame 0 of .* claims \d+ bytes that make \d+: the file is damaged",
            ),
            ("batch", 24 + 4 * 9 + 20, b"\x01\0\0\0", r"frame 0 of .* cannot be decompressed to 1 bytes"),
            ("batch", 24 + 4, b"\xff" * 4, r"sample [01] of .* is outside of its frame"),
            ("sample", 4 * 10, b"rubbish", r"sample 0 of .* cannot be decompressed \(it is not compressed with zstd\)"),
            ("rows", -12, b"\xff\xff\xff\x7f", r"chunk-0-0.bin has no valid Arrow file at its end"),
            ("chunk", 4, b"\xff" * 9, r"chunk-0-0.zstd.bin cannot be decompressed to \d+ bytes"),
        ],
    )
    def test_damaged_chunks_of_every_kind(
        self, folder: Path, tmp_path: Path, kind: str, at: int, data: bytes, message: str
    ) -> None:
        copy = Path(shutil.copytree(folder / kind, tmp_path / "copy"))
        damage(next(copy.glob("chunk-0-0.*")), at, data)
        with pytest.raises(SampleError, match=message):
            LitData(copy, cache=tmp_path / "cache").__getitems__([0, 1])

    def test_a_bomb_is_not_blown_up(self, folder: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(folder / "sample", tmp_path / "copy"))
        huge = b"\x28\xb5\x2f\xfd" + bytes([3 << 6 | 1 << 5]) + struct.pack("<Q", 1 << 40)
        damage(copy / "chunk-0-0.bin", 4 * 10, huge)
        with pytest.raises(
            SampleError, match=r"sample 0 of .* cannot be decompressed \(it claims 1099511627776 bytes\)"
        ):
            LitData(copy)[0]


def damage(path: Path, at: int, data: bytes) -> None:
    whole = bytearray(path.read_bytes())
    at %= len(whole)
    whole[at : at + len(data)] = data
    path.write_bytes(whole)


class TestLeaves:
    def test_ordered_dicts(self, copy: Path) -> None:
        leaf = {"type": None, "context": None, "children_spec": []}
        spec = {"type": "collections.OrderedDict", "context": '["b", "a", "c"]', "children_spec": [leaf] * 3}
        edit_index(copy, lambda index: index["config"].update(data_spec=json.dumps([1, spec])))
        sample = LitData(copy)[2]
        assert type(sample) is OrderedDict
        assert list(sample) == ["b", "a", "c"]

    @pytest.mark.parametrize(
        ("name", "data"),
        [
            ("tensor", struct.pack(">III", 0, 1, 3) + bytes(8)),
            ("tensor", struct.pack(">II", 99, 0)),
            ("tensor", struct.pack(">II", 0, 1 << 30)),
            ("numpy", struct.pack("<II", 14, 0) + bytes(8)),
            ("no_header_tensor:17", bytes(9)),
            ("int", bytes(7)),
            ("str", b"\xff"),
        ],
    )
    def test_damaged_leaves_are_refused(self, name: str, data: bytes) -> None:
        with pytest.raises((ValueError, LookupError, struct.error)):
            decode_function(name)(memoryview(data))

    @pytest.mark.parametrize(
        ("data", "value"),
        [
            (b'{"a": [1]}', {"a": [1]}),
            (LIST_OF_STRINGS, ["a", "ü"]),
            (struct.pack("<BIqq", 2, 2, -1, 5), [-1, 5]),
            (struct.pack("<BId", 3, 1, 0.5), [0.5]),
            (struct.pack("<BI2?", 4, 2, True, False), [True, False]),
            (struct.pack("<BII1s", 5, 1, 1, b"k") + b"\x0b", {"k": None}),
            (struct.pack("<BIII1s", 6, 1, 1, 1, b"k") + b"\x14\x01", [{"k": True}]),
            (struct.pack("<BI3s", 0, 3, b"[2]"), [2]),
            (struct.pack("<Bq", 8, -7), -7),
            (struct.pack("<B?", 10, True), True),
        ],
    )
    def test_nested_values(self, data: bytes, value: Any) -> None:
        assert equal(decode_nested(memoryview(data)), value)

    @given(st.binary(max_size=60))
    def test_rubbish_is_refused_or_read_but_never_more(self, data: bytes) -> None:
        with suppress(ValueError, LookupError, struct.error):
            decode_nested(memoryview(data))

    def test_nesting_is_bounded(self) -> None:
        deep = struct.pack("<BII", 5, 1, 0) * 5000
        with pytest.raises(ValueError, match="nested more than 64 deep"):
            decode_nested(memoryview(deep))

    def test_numpy_values(self) -> None:
        assert equal(decode_function("no_header_numpy:13")(memoryview(b"\1\0")), np.array([True, False]))
