from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from image_cases import encoded, intervals, jpeg, photo, rgb
from PIL import Image
from recorder import Recorder
from tar_cases import image_members, image_shards, npy, write_tar
from torch.utils.data import DataLoader, default_collate

import feedline as fl
from feedline import transforms as T
from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead
from feedline.core.tensors import allocate_tensor
from feedline.datasets import TarShards, compression
from feedline.datasets.webdataset import ShardError, write_index
from feedline.datasets.webdataset import shards as tars
from feedline.errors import ArgumentError, SampleError, SampleIndexError, StateError
from feedline.testing import difference

CROP = T.Compose([T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.ToTensor()])
CENTER = T.Compose([T.Resize(40), T.CenterCrop(32)])
KINDS = ["jpg", "seg.png", "cls", "id", "txt", "json", "jsonl", "npy", "emb.npy", "npz", "flac", "bin"]
PAIR = ("jpg;png;jpeg", "cls")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten samples in shards of 4, 1 and 5."""
    folder = tmp_path_factory.mktemp("shards")
    image_shards(folder, [4, 1, 5])
    return folder


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One sample with a field of each kind."""
    npz = io.BytesIO()
    np.savez(npz, a=np.arange(3), b=np.ones(2))
    members = {
        "s/0.jpg": jpeg(64, 48),
        "s/0.seg.PNG": encoded(photo(64, 48), "PNG"),
        "s/0.cls": b"17\n",
        "s/0.id": b" -3",
        "s/0.txt": "größe".encode(),
        "s/0.json": b'{"a": [1, 2.5, null]}',
        "s/0.jsonl": b'{"a": 1}\n\n{"a": 2}\n',
        "s/0.npy": npy(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "s/0.emb.npy": npy(np.asfortranarray(np.arange(6).reshape(2, 3))),
        "s/0.npz": npz.getvalue(),
        "s/0.flac": b"fLaC",
        "s/0.bin": b"",
    }
    return write_tar(tmp_path_factory.mktemp("kinds") / "kinds.tar", members)


def same(ours: Any, theirs: Any) -> bool:
    return difference(ours, theirs) is None


class TestSamples:
    def test_dicts_of_all_fields(self, kinds: Path) -> None:
        sample = TarShards(kinds)[0]
        assert list(sample) == ["__key__", *KINDS]
        assert np.array_equal(np.asarray(sample.pop("jpg")), np.asarray(rgb(jpeg(64, 48))))
        assert isinstance(sample["seg.png"], Image.Image)
        assert sample.pop("seg.png").mode == "RGB"
        assert same(sample.pop("npy"), np.arange(6, dtype=np.float32).reshape(2, 3))
        assert same(sample.pop("emb.npy"), np.arange(6).reshape(2, 3))
        assert sample["npz"]["a"].tolist() == [0, 1, 2]
        assert sample.pop("npz")["b"].tolist() == [1, 1]
        assert sample == {
            "__key__": "s/0",
            "cls": 17,
            "id": -3,
            "txt": "größe",
            "json": {"a": [1, 2.5, None]},
            "jsonl": [{"a": 1}, {"a": 2}],
            "flac": b"fLaC",
            "bin": b"",
        }

    def test_arrays_are_samples_of_their_own(self, kinds: Path) -> None:
        array = TarShards(kinds, ("npy",))[0][0]
        array[...] = 7
        assert TarShards(kinds, ("npy",))[0][0].tolist() == [[0, 1, 2], [3, 4, 5]]

    def test_tuples_of_chosen_fields(self, kinds: Path) -> None:
        data = TarShards(kinds, ("__key__", "tiff; TXT", "cls", "__shard__"))
        assert data[0] == ("s/0", "größe", 17, str(kinds))
        assert data.columns == ("__key__", "tiff; TXT", "cls", "__shard__")

    def test_undecoded(self, kinds: Path) -> None:
        sample = TarShards(kinds, decode=False)[0]
        assert sample["jpg"] == jpeg(64, 48)
        assert sample["cls"] == b"17\n"
        assert TarShards(kinds, ("jpg",), transform={"jpg": CENTER}, decode=False)[0][0].shape == (32, 32, 3)

    def test_decoders_of_ones_own(self, kinds: Path) -> None:
        own = {"FLAC": len, "seg.png": lambda data: (type(data), data[:4]), "json": bytes.decode}
        sample = TarShards(kinds, decode=own)[0]
        assert sample["flac"] == 4
        assert sample["seg.png"] == (bytes, b"\x89PNG")
        assert json.loads(sample["json"]) == {"a": [1, 2.5, None]}
        assert TarShards(kinds, ("jpg",), transform={"jpg": type}, decode={"jpg": len})[0] == (int,)
        with pytest.raises(ArgumentError, match="decode='image': give a dict of functions by field or extension"):
            TarShards(kinds, decode="image")

    def test_order_and_addresses(self, folder: Path) -> None:
        data = TarShards(folder, ("cls",))
        assert [data[at][0] for at in range(10)] == list(range(10))
        assert data[-1] == (9,)
        assert data.shard_sizes.tolist() == [4, 1, 5]
        assert data.address(4) == (str(folder / "train-001.tar"), "0004")
        assert data.__getitems__([7, -10]) == [(7,), (0,)]
        assert repr(data) == "<TarShards: 10 samples in 3 tars>"

    def test_ways_to_name_shards(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)
        ways: list[Any] = [
            folder,
            "train-{000..002}.tar",
            "train-00{0,1,2}.tar",
            str(folder / "train-*.tar"),
            [folder / "train-000.tar", "train-00[12].tar"],
        ]
        for way in ways:
            assert list(TarShards(way).paths) == [str(folder / f"train-00{number}.tar") for number in range(3)]
        back = TarShards(["train-002.tar", "train-000.tar"], ("cls",))
        monkeypatch.chdir("/")
        assert [back[at][0] for at in (0, 5)] == [5, 0]


class TestTransforms:
    def test_of_whole_samples(self, kinds: Path) -> None:
        assert TarShards(kinds, ("cls", "jpg"), transform=lambda sample: (sample[1].size, sample[0]))[0] == (
            (64, 48),
            17,
        )
        assert TarShards(kinds, transform=lambda sample: sample["txt"])[0] == "größe"

    def test_of_fields(self, kinds: Path) -> None:
        by_field = {"jpg": lambda image: image.size, "cls": lambda number, rng: (number, rng.key)}
        for data in (TarShards(kinds, ("png;jpg", "cls"), transform=by_field), TarShards(kinds, transform=by_field)):
            [[sample]] = fl.DataLoader(data, batch_size=1, seed=5, collate_fn=list)
            size, (number, key) = sample if isinstance(sample, tuple) else (sample["jpg"], sample["cls"])
            assert (size, number) == ((64, 48), 17)
            assert key == keys_of(5)[0]

    def test_of_alternatives(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "x.tar", {"0.jpg": jpeg(8, 8), "1.png": jpeg(8, 8), "2.txt": b"word"})
        spec, own = "JPG; png;txt", {"JPG": lambda _: "A", "png": lambda _, rng: ("B", rng.key), "txt": str.upper}
        data = TarShards(path, (spec,), transform=own)
        [batch] = fl.DataLoader(data, batch_size=3, seed=5, collate_fn=list)
        assert batch == [("A",), (("B", keys_of(5, 2)[1]),), ("WORD",)]
        assert reader_of(data) is None
        shared = TarShards(path, (spec,), transform={spec: type, "png": own["png"]})
        assert [shared[at][0] for at in (0, 2)] == [Image.Image, str]
        for every in ({spec: type}, {"txt": type}, dict.fromkeys(own, type)):
            data = TarShards(path, (spec,), transform=every)
            assert [data[at][0] for at in range(3)] == [Image.Image, Image.Image, str]
        with pytest.raises(
            ArgumentError, match=r"transform names 'JPG' and 'txt' of the column .* but not 'png': give"
        ):
            TarShards(path, (spec,), transform={"JPG": type, "txt": type})

    def test_ours_alone_is_for_all_images_and_they_share_their_draws(self, kinds: Path) -> None:
        sample = TarShards(kinds, transform=T.RandomResizedCrop(24))[0]
        assert sample["jpg"].shape == sample["seg.png"].shape == (24, 24, 3)
        assert abs(sample["jpg"].astype(int) - sample["seg.png"].astype(int)).mean() < 8  # one box, but for the JPEG
        assert sample["npy"].shape == (2, 3)
        assert sample["cls"] == 17

    def test_fused_is_what_the_transform_makes_of_the_image(self, folder: Path) -> None:
        data = TarShards(folder, PAIR, transform=CENTER)
        assert np.array_equal(data[3][0], CENTER(jpeg(96, 72, 3, quality=85)))

    @pytest.mark.parametrize("transform", [CROP, CENTER, {"jpg": CROP}, {"jpg;png;jpeg": CENTER}])
    def test_a_gather_is_the_collation_of_samples(self, folder: Path, transform: Any) -> None:
        data, recorder = TarShards(folder, PAIR, transform=transform), Recorder()
        read = reader_of(data)
        assert read is not None
        torch.manual_seed(7)
        batch = read(BatchRead(np.array([9, 3, 4, 3, -1]), recorder))
        torch.manual_seed(7)
        samples = [data[at] for at in (9, 3, 4, 3, -1)]
        wanted = default_collate([(torch.as_tensor(image), number) for image, number in samples])
        assert isinstance(batch, list)
        assert same(batch, wanted)
        assert recorder.holds(batch)

    def test_other_fields_are_collated(self, kinds: Path) -> None:
        fields = ("__key__", "cls", "txt", "npy", "json", "bin")
        data = TarShards(kinds, fields, decode={"json": lambda _: {"a": [1, 2.5]}})
        read = reader_of(data)
        assert read is not None
        batch = read(BatchRead(np.array([0, 0]), allocate_tensor))
        assert same(batch, default_collate([data[0], data[0]]))
        assert batch[0] == ("s/0", "s/0")
        assert batch[3].shape == (2, 2, 3)

    def test_what_must_be_seen_one_by_one_is_not_gathered(self, kinds: Path) -> None:
        for data in (
            TarShards(kinds),
            TarShards(kinds, ("jpg",)),
            TarShards(kinds, ("jpg", "cls"), transform=T.Resize(30)),
            TarShards(kinds, ("jpg", "cls"), transform={"jpg": CROP, "cls": str}),
            TarShards(kinds, ("cls",), transform=lambda sample: sample),
            TarShards(kinds, ("cls",), decode=False),
        ):
            assert reader_of(data) is None

    def test_a_subclass_that_makes_its_own_samples(self, folder: Path) -> None:
        class Doubled(TarShards):
            def __getitem__(self, index: int) -> Any:
                return super().__getitem__(index) * 2

        data = Doubled(folder, ("cls",))
        assert reader_of(data) is None
        assert data.__getitems__([3]) == [(3, 3)]

    def test_ready_pixels(self, tmp_path: Path) -> None:
        photos = [np.asarray(photo(90 + at, 60, at)) for at in range(4)]
        members = {f"{at}.npy": npy(pixels) for at, pixels in enumerate(photos)}
        data = TarShards(write_tar(tmp_path / "x.tar", members), ("jpg;npy",), transform=CROP)
        plain = TarShards(tmp_path / "x.tar", ("npy",), transform=CENTER)
        [batch] = fl.DataLoader(data, batch_size=4, seed=3)
        keys = keys_of(3, 4)
        for at, pixels in enumerate(photos):
            assert torch.equal(batch[0][at], CROP(pixels, fl.SampleRng(keys[at])))
            assert np.array_equal(plain[at][0], CENTER(pixels))
        assert TarShards(tmp_path / "x.tar", transform=CENTER)[1]["npy"].shape == (32, 32, 3)

    def test_images_are_read_in_place_in_the_tar(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_tar(tmp_path / "x.tar", {"0.npy": npy(np.asarray(photo(640, 480))), "0.jpg": jpeg(640, 480)})
        data = TarShards(path, ("npy", "jpg"), transform={"npy": CENTER, "jpg": CENTER})
        sources: list[Any] = []
        monkeypatch.setattr(T.ImagePlan, "batch", lambda _, given, *rest: (sources.extend(given), torch.zeros(1))[1])
        reader_of(data)(BatchRead(np.array([0]), allocate_tensor))  # type: ignore[misc]
        memory = np.frombuffer(data._shards[0]._file.data, np.uint8)
        for source in sources:
            assert np.shares_memory(np.asarray(source), memory)

    def test_grids_are_handed_on(self, tmp_path: Path) -> None:
        data = jpeg(640, 480, restart_marker_blocks=8)
        path = write_tar(tmp_path / "x.tar", {"0.jpg": data, "0.cls": b"1", "1.jpg": jpeg(64, 64), "1.cls": b"2"})
        write_index(path, grids={"0.jpg": intervals(data)})
        gridded = TarShards(path, ("jpg", "cls"), transform=CROP)
        assert gridded._shards[0].index.has_grids
        [batch] = fl.DataLoader(gridded, batch_size=2, seed=3)
        write_index(path)
        [plain] = fl.DataLoader(TarShards(path, ("jpg", "cls"), transform=CROP), batch_size=2, seed=3)
        assert same(batch, plain)
        alone = [image for image, _ in fl.DataLoader(gridded, batch_size=None, seed=3)]
        assert same(list(batch[0]), alone)

    def test_orientation(self, tmp_path: Path) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        path = write_tar(tmp_path / "x.tar", {"0.jpg": encoded(photo(80, 60), exif=exif)})
        assert TarShards(path)[0]["jpg"].size == (80, 60)
        assert TarShards(path, apply_exif_orientation=True)[0]["jpg"].size == (60, 80)


def keys_of(seed: int, count: int = 1) -> list[int]:
    """The keys of the first samples of epoch 0."""

    class Keys(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return count

        def __getitem__(self, index: int) -> int:
            return fl.sample_rng().key

    return list(fl.DataLoader(Keys(), batch_size=None, seed=seed))


class TestManyShards:
    def test_few_are_open_at_a_time(self, folder: Path) -> None:
        data = TarShards(folder, PAIR, transform=CENTER, open_files=1)
        whole = TarShards(folder, PAIR, transform=CENTER)
        for _ in range(2):
            assert same(
                data.read_batch(BatchRead(np.arange(10), allocate_tensor)),
                whole.read_batch(BatchRead(np.arange(10), allocate_tensor)),
            )
            assert data._shards.open_count == 1

    def test_shard_shuffled_order(self, folder: Path) -> None:
        data = TarShards(folder, PAIR, transform=CENTER)
        sampler = fl.samplers.ShardShuffled(data.shard_sizes, seed=1, window=1)
        labels = torch.cat([numbers for _, numbers in fl.DataLoader(data, batch_size=3, sampler=sampler)])
        assert sorted(labels.tolist()) == list(range(10))
        assert np.count_nonzero(np.diff(np.searchsorted([4, 5, 10], labels.numpy(), side="right"))) == 2

    def test_indexes_are_made_once(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        TarShards(folder)
        monkeypatch.setattr(tars, "find_index", None)
        assert len(TarShards(folder)) == 10

    def test_travels_by_path(self, folder: Path) -> None:
        data = TarShards(folder, PAIR, transform=CENTER)
        data[0]
        assert len(pickle.dumps(data)) < 3000
        assert same(pickle.loads(pickle.dumps(data))[5], data[5])

    def test_conformance(self, folder: Path) -> None:
        fl.testing.check_dataset(TarShards(folder, PAIR, transform=CROP))
        fl.testing.check_dataset(TarShards(folder, transform={"jpg": CROP}))

    def test_torchs_own_loader(self, folder: Path) -> None:
        batches = list(
            DataLoader(
                TarShards(folder, PAIR, transform=CROP), batch_size=4, num_workers=1, multiprocessing_context="fork"
            )
        )
        assert torch.cat([labels for _, labels in batches]).tolist() == list(range(10))
        assert batches[0][0].shape == (4, 3, 32, 32)


@pytest.mark.parametrize("pattern", ["*", "*.tar*", "x*", "**/*"])
def test_patterns_do_not_match_the_indexes(tmp_path: Path, pattern: str) -> None:
    for name in ("x0", "x1"):
        write_tar(tmp_path / f"{name}.tar", {f"{name}.txt": name.encode()})
    with gzip.open(tmp_path / "x2.tar.gz", "wb") as file:
        file.write(write_tar(tmp_path.with_name("x2.tar"), {"x2.txt": b"x2"}).read_bytes())
    for _ in range(2):
        assert [sample[0] for sample in TarShards(tmp_path / pattern, ["txt"])] == ["x0", "x1", "x2"]
    assert len(list(tmp_path.glob("*.index"))) == 3
    with pytest.raises(ArgumentError, match="is listed twice"):
        TarShards([tmp_path / "x0.tar"] * 2)


class TestBadInput:
    def test_shards_that_are_not_there(self, tmp_path: Path) -> None:
        write_tar(tmp_path / "train-000.tar", {"a.txt": b""})
        with pytest.raises(FileNotFoundError, match=r"no such file: .*train-001.tar"):
            TarShards(str(tmp_path / "train-{000..001}.tar"))
        with pytest.raises(FileNotFoundError, match=r"matches none"):
            TarShards(str(tmp_path / "val-*.tar"))

    def test_arguments(self, folder: Path) -> None:
        wrong: list[tuple[str, dict[str, Any]]] = [
            (r"train-000.tar is listed twice", {"paths": [folder / "train-000.tar", folder / "train-*.tar"]}),
            (r"columns='jpg': give a tuple of names", {"columns": "jpg"}),
            (r"columns=\(\): give a tuple", {"columns": ()}),
            (r"field 'jpg;' has an empty name", {"columns": ("jpg;",)}),
            (
                r"transform names the field 'png'; fields are cls, jpg",
                {"columns": ("jpg", "cls"), "transform": {"png": CROP}},
            ),
            (r"transform must be a callable or a dict of callables by field, not int", {"transform": 3}),
            (
                r"transform names 'jgp', but no sample has this field; fields are cls, jpg. Did you mean 'jpg'\?",
                {"transform": {"jgp": CROP}},
            ),
            (
                r"columns names 'jpgg;png', but no sample has this field; fields are __key__, __shard__, cls, jpg. D",
                {"columns": ("cls", "jpgg;png")},
            ),
            (r"open_files=0 must be at least 1", {"open_files": 0}),
        ]
        for message, arguments in wrong:
            with pytest.raises(ArgumentError, match=message):
                TarShards(**{"paths": folder, **arguments})

    def test_tars_without_samples(self, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match=r"no samples in .*x.tar"):
            TarShards(write_tar(tmp_path / "x.tar", {"README": b""}))

    def test_an_index_out_of_range(self, folder: Path) -> None:
        data = TarShards(folder, PAIR, transform=CENTER)
        with pytest.raises(SampleIndexError, match=r"index 10 is out of range for TarShards with 10"):
            data[10]
        with pytest.raises(SampleIndexError, match=r"index -11"):
            data.read_batch(BatchRead(np.array([-11]), allocate_tensor))

    def test_fields_of_some_samples_only(self, tmp_path: Path) -> None:
        one = write_tar(tmp_path / "1.tar", {"a.txt": b"1", "b.CLS": b"2"})
        two = write_tar(tmp_path / "2.tar", {"c.json": b"3", "c.pth": b"", "d.json": b"4"})
        data = TarShards([one, two], transform={"json": str})
        assert (data[0]["txt"], data[3]["json"]) == ("1", "4")
        with pytest.raises(ArgumentError, match=r"'pth' would have to be unpickled"):
            data[2]
        assert TarShards([one, two], ("TXT;CLS;json", "__key__"))[2] == (3, "c")

    def test_pickles_of_all_samples_are_refused_at_once(self, tmp_path: Path) -> None:
        held = {f"{number}.{field}": b"" for number in range(2) for field in ("txt", "pth")}
        path = write_tar(tmp_path / "x.tar", held)
        with pytest.raises(ArgumentError, match=r"field 'pth' would have to be unpickled"):
            TarShards(path)
        assert len(TarShards(path, decode={"pth": len})) == len(TarShards(path, decode=False)) == 2

    def test_whole_numbers_that_no_tensor_holds_are_named(self, tmp_path: Path) -> None:
        most, least = str(2**63 - 1).encode(), str(-(2**63)).encode()
        path = write_tar(tmp_path / "x.tar", {"a.cls": most, "b.cls": least, "c.cls": str(2**63).encode()})
        for fields in (None, ("cls",)):
            data = TarShards(path, fields)
            assert len(data.__getitems__([0, 1])) == 2
            with pytest.raises(
                SampleError, match=r"x.tar: member 'c.cls' .*a number of 19 digits does not fit into int64"
            ):
                data[2]
            with fl.DataLoader(data, 3, on_error="skip") as loader:
                assert sum(len(next(iter(batch.values() if fields is None else batch))) for batch in loader) == 2
        assert TarShards(path, decode={"cls": int})[2]["cls"] == 2**63

    @pytest.mark.parametrize("field", ["pyd", "pickle", "meta.pkl", "pth", "pt"])
    def test_pickles(self, tmp_path: Path, field: str) -> None:
        path = write_tar(tmp_path / "x.tar", {f"0.{field}": pickle.dumps(os.system), "0.cls": b"1"})
        refused = rf"field '{field}' would have to be unpickled.*decode={{'{field}': function_of_the_bytes}}"
        with pytest.raises(ArgumentError, match=refused):
            TarShards(path, (field, "cls"))
        with pytest.raises(ArgumentError, match=refused):
            TarShards(path)[0]
        assert TarShards(path, ("cls",))[0] == (1,)
        assert TarShards(path, decode={field: len})[0][field] == len(pickle.dumps(os.system))

    @pytest.mark.parametrize(
        ("name", "data", "what"),
        [
            ("0.cls", b"cat", r"as cls \(ValueError: invalid literal"),
            ("0.json", b"{", r"as json \(JSONDecodeError"),
            ("0.txt", b"\xff", r"as txt \(UnicodeDecodeError"),
            ("0.jpg", b"", r"as jpg \(UnidentifiedImageError"),
            ("0.png", jpeg(64, 64)[:1000], r"as png \(OSError: .*truncated"),
            ("0.npy", npy(np.zeros(5))[:-1], r"as npy \(ValueError: the .npy array is truncated: 167 bytes, .* 168\)"),
            ("0.npy", npy(np.array([{}], object)), r"as npy \(ValueError: .*holds Python objects"),
            ("0.npy", b"\x93NUMPY", r"as npy \(ValueError: not a .npy array"),
            ("0.npz", b"PK", r"as npz \("),
        ],
    )
    def test_members_that_cannot_be_decoded(self, tmp_path: Path, name: str, data: bytes, what: str) -> None:
        path = write_tar(tmp_path / "x.tar", {name: data})
        with pytest.raises(SampleError, match=rf"x.tar: member '{name}' cannot be decoded {what}.*on_error='skip'"):
            TarShards(path)[0]

    @pytest.mark.parametrize(
        ("name", "data", "what"),
        [
            ("3.jpg", b"no image", "could not be read"),
            ("3.jpg", b"", "could not be read"),
            ("3.npy", npy(np.zeros((4, 4, 3), np.float32)), r"float32 of shape \(4, 4, 3\) is not an image"),
            ("3.npy", npy(np.zeros((4, 4), np.uint8)), r"uint8 of shape \(4, 4\) is not an image"),
            ("3.npy", npy(np.zeros((0, 4, 3), np.uint8)), r"\(0, 4, 3\) is not an image"),
            ("3.npy", b"junk", "not a .npy array"),
        ],
    )
    @pytest.mark.parametrize("transform", [CROP, T.Compose([CROP, T.RandomErasing()])], ids=["fused", "stages"])
    def test_images_that_cannot_be_read(
        self, tmp_path: Path, name: str, data: bytes, what: str, transform: Any
    ) -> None:
        path = write_tar(tmp_path / "x.tar", {**image_members(3), name: data})
        shards = TarShards(path, ("jpg;npy",), transform=transform)
        with pytest.raises(SampleError, match=rf"x.tar: member '{name}': .*{what}"):
            shards[3]
        with pytest.raises(SampleError, match=rf"x.tar: member '{name}': .*{what}"):
            shards.read_batch(BatchRead(np.array([0, 2, 3]), allocate_tensor))

    def test_missing_halves(self, tmp_path: Path) -> None:
        members = image_members(4)
        del members["0002.cls"]
        data = TarShards(write_tar(tmp_path / "x.tar", members), PAIR, transform=CENTER)
        message = r"x.tar: sample '0002' has no cls; it has jpg. Repack the sample .*on_error='skip'"
        with pytest.raises(SampleError, match=message):
            data[2]
        with pytest.raises(SampleError, match=message):
            list(fl.DataLoader(data, batch_size=4))
        with fl.DataLoader(data, batch_size=4, on_error="skip", seed=0) as loader:
            [[_, labels]] = loader
            assert labels.tolist() == [0, 1, 3]
            assert loader.stats().skipped == 1

    def test_truncated_shards(self, tmp_path: Path) -> None:
        path = image_shards(tmp_path, [3])[0]
        path.write_bytes(path.read_bytes()[:-11_000])
        with pytest.raises(ShardError, match=r"train-000.tar is truncated: member .*allow_truncated=True"):
            TarShards(path)
        data = TarShards(path, PAIR, transform=CENTER, allow_truncated=True)
        assert 0 < len(data) < 3
        assert same(pickle.loads(pickle.dumps(data))[0], data[0])

    def test_a_shard_that_is_replaced_while_it_is_used(self, tmp_path: Path) -> None:
        paths = image_shards(tmp_path, [3, 3])
        data = TarShards(paths, PAIR, transform=CENTER)
        data[0]
        write_tar(paths[0], image_members(3, 7))
        with pytest.raises(StateError, match=r"train-000.tar has changed since this dataset was made"):
            data.read_batch(BatchRead(np.array([3, 0]), allocate_tensor))
        with pytest.raises(StateError, match=r"train-000.tar has changed since this dataset was made"):
            pickle.loads(pickle.dumps(data))[0]
        os.truncate(paths[1], 600)
        with pytest.raises(StateError, match=r"train-001.tar"):
            data[3]


PACKED: dict[str, Any] = {
    "tar.gz": gzip.compress,
    "tgz": gzip.compress,
    "tar.bz2": bz2.compress,
    "tar.xz": lzma.compress,
    "tar.zst": lambda data: bytes(pa.compress(data, "zstd", asbytes=True)),
}


class TestCompressed:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))

    @pytest.mark.parametrize("ending", PACKED)
    def test_a_compressed_tar_is_read_like_the_plain_one(
        self, tmp_path: Path, ending: str, request: pytest.FixtureRequest
    ) -> None:
        plain = write_tar(tmp_path / "x.tar", image_members(6))
        packed = tmp_path / f"x.{ending}"
        packed.write_bytes(PACKED[ending](plain.read_bytes()))
        system = fsspec.filesystem("memory")
        request.addfinalizer(lambda: system.rm("/tars", recursive=True))
        system.pipe(f"/tars/x.{ending}", packed.read_bytes())
        wanted = list(TarShards(plain, PAIR, transform={"jpg;png;jpeg": CENTER}))
        for path in (str(packed), f"memory://tars/x.{ending}"):
            dataset = TarShards(path, PAIR, transform={"jpg;png;jpeg": CENTER})
            assert dataset.paths == [path]
            assert dataset.address(0)[0] == path
            assert difference(list(dataset), wanted) is None
            with fl.DataLoader(dataset, 2, num_workers=2, shuffle=True, seed=0) as loader:
                assert sorted(y for _, ys in loader for y in ys.tolist()) == list(range(6))
        assert (tmp_path / f"x.{ending}.index").exists()

    def test_plain_and_compressed_tars_mix(self, folder: Path, tmp_path: Path) -> None:
        second = tmp_path / "second.tar.gz"
        second.write_bytes(gzip.compress((folder / "train-002.tar").read_bytes()))
        dataset = TarShards([folder / "train-000.tar", second], ["cls"])
        assert [y for (y,) in dataset] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        again = TarShards([folder / "train-000.tar", second], ["cls"])
        assert again.listing_fingerprint == dataset.listing_fingerprint

    def test_damaged_compressed_tars(self, tmp_path: Path) -> None:
        (tmp_path / "x.tar.gz").write_bytes(gzip.compress(bytes(5000))[:-9])
        with pytest.raises(SampleError, match=r"x.tar.gz cannot be decompressed: it is damaged, truncated"):
            TarShards(tmp_path / "x.tar.gz")


class TestGzipFields:
    @pytest.fixture
    def packed(self, kinds: Path, tmp_path: Path) -> Path:
        """The members of `kinds`, each compressed."""
        with tarfile.open(kinds) as tar:
            members = {f"{each.name}.gz": tar.extractfile(each).read() for each in tar}  # type: ignore[union-attr]
        return write_tar(tmp_path / "kinds.tar", {name: gzip.compress(data) for name, data in members.items()})

    def test_members_are_decompressed_and_decoded_by_the_rest_of_their_name(self, kinds: Path, packed: Path) -> None:
        plain, ours = TarShards(kinds)[0], TarShards(packed)[0]
        assert set(ours) == {name if name.startswith("__") else f"{name}.gz" for name in plain}
        for name, value in plain.items():
            other = ours[name if name.startswith("__") else f"{name}.gz"]
            if isinstance(value, Image.Image):
                value, other = np.asarray(value), np.asarray(other)
            np.testing.assert_equal(other, value)

    def test_batches_and_own_decoders(self, packed: Path, kinds: Path) -> None:
        chosen = TarShards(packed, ["cls.gz", "jpg.gz", "json.gz"], transform={"jpg.gz": CENTER}, decode={"json": len})
        ((cls, image, json_nbytes),) = list(fl.DataLoader(chosen, 1))
        assert (cls.tolist(), json_nbytes.tolist()) == ([17], [len(b'{"a": [1, 2.5, null]}')])
        np.testing.assert_equal(image[0].numpy(), TarShards(kinds, ["jpg"], transform={"jpg": CENTER})[0][0])
        assert TarShards(packed, ["txt.gz"], decode={"gz": bytes})[0][0][:2] == b"\x1f\x8b"
        assert TarShards(packed, ["txt.gz"], decode=False)[0][0][:2] == b"\x1f\x8b"

    def test_refused_and_damaged_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_tar(tmp_path / "a.tar", {"0.pkl.gz": b"x", "0.cls.gz": gzip.compress(b"9" * 30), "0.txt.gz": b"x"})
        with pytest.raises(ArgumentError, match=r"field 'pkl' would have to be unpickled"):
            TarShards(path)
        with pytest.raises(SampleError, match=r"member '0.cls.gz' cannot be decoded .*does not fit into int64"):
            TarShards(path, ["cls.gz"])[0]
        with pytest.raises(SampleError, match=r"member '0.txt.gz' cannot be decoded as gz"):
            TarShards(path, ["txt.gz"])[0]
        monkeypatch.setattr(compression, "ORDINARY_NBYTES", 1 << 10)
        bomb = write_tar(tmp_path / "b.tar", {"0.txt.gz": gzip.compress(bytes(1 << 20))})
        with pytest.raises(SampleError, match=r"member '0.txt.gz' .*like a decompression bomb"):
            TarShards(bomb, ["txt.gz"])[0]
