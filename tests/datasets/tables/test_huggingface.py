from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from datetime import datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from diagonals import diagonal_by_day
from recorder import Recorder
from torch.utils.data import DataLoader, default_collate

import datasets
import feedline as fl
from datasets import ClassLabel, Features, Image, List, Value
from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead
from feedline.core.tensors import allocate_tensor
from feedline.core.tree import leaves
from feedline.datasets import HuggingFace
from feedline.errors import ArgumentError, SampleError
from feedline.loader.building.foreign import adapt

N = 60
DTYPES = [
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bool",
]


@pytest.fixture(autouse=True)
def _no_progress_bars() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def same(ours: Any, theirs: Any) -> bool:
    pairs = list(zip(leaves(ours), leaves(theirs), strict=True))
    return type(ours) is type(theirs) and all(type(a) is type(b) and equal(a, b) for a, b in pairs)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(np.array_equal(a, b)) and getattr(a, "dtype", None) == getattr(b, "dtype", None)


def made() -> datasets.Dataset:
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {"text": [f"é{i}" for i in range(N)], "label": rng.integers(0, 2, N)}
    features: dict[str, Any] = {"text": Value("string"), "label": ClassLabel(names=["no", "yes"])}
    for dtype in DTYPES:
        values = rng.integers(0, 2 if dtype == "bool" else 100, (N, 3)).astype(dtype)
        columns |= {dtype: values[:, 0], f"list {dtype}": list(values), f"fixed {dtype}": list(values)}
        features |= {
            dtype: Value(dtype),
            f"list {dtype}": List(Value(dtype)),
            f"fixed {dtype}": List(Value(dtype), length=3),
        }
    return datasets.Dataset.from_dict(columns, features=Features(features))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> datasets.Dataset:
    folder = tmp_path_factory.mktemp("saved")
    datasets.concatenate_datasets([made().select(range(25)), made().select(range(25, N))]).save_to_disk(folder)
    return datasets.load_from_disk(folder)


@pytest.mark.parametrize(
    ("kind", "selection"), diagonal_by_day(["torch", "numpy", None], ["all", "shuffled", "sliced"])
)
def test_batches_are_those_of_torch_for_every_kind_of_column(saved: Any, kind: str | None, selection: str) -> None:
    chosen = {"all": saved, "shuffled": saved.shuffle(seed=1), "sliced": saved.select(range(10, 50))}[selection]
    for name in saved.column_names:
        dataset = chosen.select_columns([name]).with_format(kind)
        # datasets takes no negative indices in a list once rows were selected
        for indices in ([0, 39, 7, 7, 20], [3 if chosen._indices is not None else -1, 3]):
            theirs = default_collate(dataset.__getitems__(indices))
            ours = HuggingFace(dataset)
            assert same(default_collate(ours.__getitems__(indices)), theirs), name
            assert all(same(ours[i], dataset[i]) for i in indices), name
            read = reader_of(ours)
            if read is not None:
                empty = Recorder()
                batch = read(BatchRead(np.array(indices), empty))
                assert same(batch, theirs), name
                assert empty.holds(batch), name


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_gets_the_values_of_datasets(saved: Any, workers: int) -> None:
    texts = [[f"{i}", "é"] * (i % 3) for i in range(N)]
    ragged = [list(range(i % 5)) for i in range(N)]
    dataset = saved.shuffle(seed=2).add_column("words", texts).add_column("tokens", ragged)
    names = [name for name in dataset.column_names if "float16" not in name and "uint64" not in name]
    for chosen in (dataset.select_columns(names), torch.utils.data.Subset(dataset.select_columns(names), [9, 3, 59])):
        with fl.DataLoader(chosen, 7, collate_fn=list, num_workers=workers) as loader:
            ours = list(loader)
        theirs = list(DataLoader(chosen, 7, collate_fn=list))
        assert repr(ours) == repr(theirs)


def test_samples_of_a_bare_table_are_made_without_datasets(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("datasets was asked")

    monkeypatch.setattr(datasets.Dataset, "__getitems__", refuse)
    plain = saved.select_columns(["label", "text", "list int64", "fixed float32", "float64"])
    batches = list(fl.DataLoader(plain, 20, collate_fn=list))
    assert [len(batch) for batch in batches] == [20, 20, 20]
    with pytest.raises(AssertionError, match="was asked"):
        list(fl.DataLoader(plain, 20, collate_fn=list, accelerate=False))


def test_nulls_and_unequal_lists_without_a_format_equal_torchs() -> None:
    holes = datasets.Dataset.from_dict({"x": [1, None, 3], "words": [["a", None], None, []], "y": [[1.5], [None], []]})
    for collate_fn in (list, None):
        for dataset in (holes, holes.select_columns(["y"]), datasets.Dataset.from_dict({"v": [[1], [2, 3]]})):
            outcomes = []
            for loader_class in (fl.DataLoader, DataLoader):
                try:
                    outcomes.append(repr(list(loader_class(dataset, 3, collate_fn=collate_fn))))
                except Exception as error:  # noqa: BLE001 - compared below
                    outcomes.append(f"{type(error)} {error}")
            assert outcomes[0] == outcomes[1]


def test_the_common_columns_areadapted(saved: Any) -> None:
    for kind in ("torch", "numpy"):
        columns = ["label", "float32", "int64", "list int64", "fixed float32"]
        assert reader_of(HuggingFace(saved.with_format(kind, columns=columns))) is not None
    assert reader_of(HuggingFace(saved.select_columns(["label", "float64", "text", "bool"]))) is not None


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_gives_the_batches_of_torchs(saved: Any, workers: int) -> None:
    dataset = saved.shuffle(seed=3).with_format("torch", columns=["text", "label", "list int32"])
    ours = HuggingFace(dataset)
    assert ours.traits.thread_safe
    with fl.DataLoader(ours, 16, num_workers=workers) as loader:
        assert all(same(a, b) for a, b in zip(loader, DataLoader(dataset, 16), strict=True))
    assert all(same(a, b) for a, b in zip(DataLoader(ours, 16), DataLoader(dataset, 16), strict=True))


def test_samples_are_those_of_the_dataset(saved: Any) -> None:
    dataset = saved.with_format("torch")
    assert same(HuggingFace(dataset)[5], dataset[5])
    with pytest.raises(IndexError, match="100"):
        HuggingFace(dataset)[100]


DAY = datetime.fromisoformat("2020-01-02")
NO_NUMBERS: dict[str, Any] = {
    "timestamp[us]": DAY,
    "timestamp[us, tz=UTC]": DAY,
    "date32": DAY.date(),
    "date64": DAY,
    "time32[s]": time(1, 2, 3),
    "time64[us]": time(1, 2, 3),
    "duration[us]": timedelta(seconds=3),
    "decimal128(10, 2)": Decimal("1.25"),
}


@pytest.mark.parametrize(
    ("dtype", "kind", "listed"),
    [
        *((dtype, "numpy", False) for dtype in NO_NUMBERS),
        # For lists and other formats, the same function is called.
        *(("timestamp[us]", "torch", True), ("date64", "numpy", True), ("decimal128(10, 2)", None, False)),
    ],
)
def test_times_and_decimals_are_left_to_datasets(dtype: str, kind: str | None, listed: bool) -> None:
    feature, value = (List(Value(dtype)), [NO_NUMBERS[dtype]] * 2) if listed else (Value(dtype), NO_NUMBERS[dtype])
    dataset = datasets.Dataset.from_dict({"v": [value] * 4}, features=Features(v=feature)).with_format(kind)

    def seen(loader: Any) -> Any:
        try:
            return [repr(batch) for batch in loader]
        except (TypeError, RuntimeError) as error:  # there are no tensors of these
            return type(error)

    for loaded in (dataset, HuggingFace(dataset)):
        assert seen(fl.DataLoader(loaded, 2)) == seen(DataLoader(dataset, 2))
        assert seen(fl.DataLoader(loaded, 2, collate_fn=list)) == seen(DataLoader(dataset, 2, collate_fn=list))


def test_lists_of_other_lengths_can_be_padded() -> None:
    dataset = HuggingFace(datasets.Dataset.from_dict({"ids": [[1, 2], [3], []]}).with_format("torch"))
    padded = next(iter(fl.DataLoader(dataset, 2, collate_fn=fl.collate.pad())))
    assert padded["ids"].values.tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_missing_values_are_those_of_datasets(kind: str) -> None:
    dataset = datasets.Dataset.from_dict({"x": [1.0, None, 3.0], "i": [1, 2, 3]}).with_format(kind)
    ours = HuggingFace(dataset)
    for indices in ([0], [0, 1], [1, 2]):
        theirs = default_collate(dataset.__getitems__(indices))
        batch = ours.read_batch(BatchRead(np.array(indices), Recorder()))
        assert [(v.dtype, v.isnan().tolist()) for v in batch.values()] == [
            (v.dtype, v.isnan().tolist()) for v in theirs.values()
        ]


def test_transforms_images_and_odd_formats_go_through_datasets(tmp_path: Path) -> None:
    numbers = datasets.Dataset.from_dict({"x": [1, 2, 3], "y": [1.0, 2.0, 3.0]})
    doubled = numbers.with_transform(lambda batch: {"x": [value * 2 for value in batch["x"]]})
    blank = [PIL.Image.new("RGB", (4, 3), (i, 0, 0)) for i in range(3)]
    images = datasets.Dataset.from_dict({"image": blank}, features=Features({"image": Image()}))
    others = [
        doubled,
        images.with_format("torch"),
        numbers.with_format("torch", dtype=torch.float64),
        numbers.with_format("torch", columns=["x"], output_all_columns=True),
    ]
    for dataset in others:
        ours = HuggingFace(dataset)
        assert reader_of(ours) is None
        assert not ours.traits.thread_safe
        assert same(default_collate(ours.__getitems__([2, 0])), default_collate(dataset.__getitems__([2, 0])))
    assert isinstance(HuggingFace(images)[1]["image"], PIL.Image.Image)


@pytest.mark.parametrize("kind", ["torch", None])
def test_other_indices_mean_what_they_mean_to_datasets(saved: Any, kind: str | None) -> None:
    dataset = saved.select_columns(["int64", "text"]).with_format(kind)
    ours = HuggingFace(dataset)
    for index in (-1, 0, N - 1, np.int64(4), slice(2, 9, 3), [4, 1], range(3)):
        assert same(ours[index], dataset[index]), index
    assert same(list(ours["int64"]), list(dataset["int64"]))
    for wrong in (N, -N - 1, True, 1.5, None):
        with pytest.raises((IndexError, KeyError, TypeError)) as theirs:
            dataset[wrong]
        with pytest.raises(theirs.type, match=f"^{re.escape(str(theirs.value))}$"):
            ours[wrong]


def test_it_travels_by_path(saved: Any) -> None:
    ours = HuggingFace(saved.with_format("torch", columns=["int64"]))
    expected = ours.read_batch(BatchRead(np.array([3]), Recorder()))
    data = pickle.dumps(ours)
    assert len(data) < 20_000
    assert same(pickle.loads(data).read_batch(BatchRead(np.array([3]), Recorder())), expected)


@pytest.mark.parametrize("kind", [None, "torch"])
@pytest.mark.parametrize("value", ["ab", [1, 2]])
def test_damage_of_a_saved_table_is_not_left_to_datasets(tmp_path: Path, kind: str | None, value: Any) -> None:
    """`datasets` reads foreign memory, or ends the process."""
    datasets.Dataset.from_dict({"x": [value] * 9}).save_to_disk(str(tmp_path))
    (path,) = tmp_path.glob("*.arrow")
    offsets = np.arange(0, 20, 2, np.int32)
    damaged = np.where(offsets == 8, -9, offsets).astype(np.int32)
    path.write_bytes(path.read_bytes().replace(offsets.tobytes(), damaged.tobytes()))
    data = HuggingFace(datasets.load_from_disk(str(tmp_path)).with_format(kind))
    assert len(data.__getitems__([0, 8])) == 2

    def whole(rows: list[int]) -> Any:
        return data.read_batch(BatchRead(np.array(rows), allocate_tensor))

    def one_by_one(rows: list[int]) -> Any:
        return [data[row] for row in rows]

    for read in (data.__getitems__, whole, *[one_by_one] * (kind == "torch")):
        with pytest.raises(SampleError, match="column 'x' is outside of its column: the file is damaged"):
            read([0, 4])


@pytest.mark.parametrize("kind", [None, "torch"])
def test_a_text_of_a_saved_table_that_is_not_utf_8_is_named(tmp_path: Path, kind: str | None) -> None:
    datasets.Dataset.from_dict({"x": ["ab", "\u00fc", "cd"]}).save_to_disk(str(tmp_path))
    (path,) = tmp_path.glob("*.arrow")
    path.write_bytes(path.read_bytes().replace(b"ab\xc3\xbccd", b"ab\xff\xffcd"))
    data = HuggingFace(datasets.load_from_disk(str(tmp_path)).with_format(kind))
    with pytest.raises(SampleError, match="row 1: column 'x' is not UTF-8"):
        data.__getitems__([0, 1])


def test_a_saved_table_whose_buffers_are_too_short_is_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"x": [True] * 90}).save_to_disk(str(tmp_path))
    (path,) = tmp_path.glob("*.arrow")
    data = path.read_bytes()
    rows = (90).to_bytes(8, "little")
    assert data.count(rows) == 2  # of the record batch, and of its column
    path.write_bytes(data.replace(rows, (90_000).to_bytes(8, "little")))
    found = HuggingFace(datasets.load_from_disk(str(tmp_path)))
    with pytest.raises(SampleError, match="the Hugging Face table from row 0 on cannot be read: it is damaged"):
        found.__getitems__([0, 8])


def test_what_is_no_dataset_is_refused() -> None:
    dataset = datasets.Dataset.from_dict({"x": [1]})
    with pytest.raises(ArgumentError, match=r"dict of splits \(train\): pass one, such as ds\['train'\]"):
        HuggingFace(datasets.DatasetDict({"train": dataset}))
    with pytest.raises(ArgumentError, match="use HuggingFaceStream for streams"):
        HuggingFace(dataset.to_iterable_dataset())
    with pytest.raises(ArgumentError, match=r"reads datasets\.Dataset, not list"):
        HuggingFace([1, 2])


def test_a_bare_dataset_is_recognized() -> None:
    dataset = datasets.Dataset.from_dict({"x": [1]})
    assert isinstance(adapt(dataset), HuggingFace)
    assert adapt([1]) == [1]


class TestImages:
    @pytest.fixture
    def images(self, tmp_path: Path) -> Any:
        rng = np.random.default_rng(0)
        paths = []
        for i in range(12):
            paths.append(str(tmp_path / f"{i}.png"))
            PIL.Image.fromarray(rng.integers(0, 256, (20 + i, 30, 3), np.uint8)).save(paths[-1])
        features = Features({"name": Value("string"), "image": Image(), "label": Value("int64")})
        columns = {"name": [str(i) for i in range(12)], "image": paths, "label": list(range(12))}
        return datasets.Dataset.from_dict(columns, features=features)

    @pytest.mark.parametrize("stored", ["path", "bytes"])
    def test_a_transform_of_our_own_works_on_the_stored_bytes(self, images: Any, tmp_path: Path, stored: str) -> None:
        if stored == "bytes":
            images.save_to_disk(tmp_path / "saved")
            images = datasets.load_from_disk(tmp_path / "saved")
        transform = fl.transforms.imagenet_eval(16)
        dataset, empty = HuggingFace(images.shuffle(seed=0), {"image": transform}), Recorder()
        expected = [transform(sample["image"]) for sample in images.shuffle(seed=0)]
        assert list(dataset[3]) == ["name", "image", "label"]
        assert torch.equal(dataset[3]["image"], expected[3])
        read = reader_of(dataset)
        assert read is not None
        batch = read(BatchRead(np.array([5, 0, -1]), empty))
        assert torch.equal(batch["image"], torch.stack([expected[i] for i in (5, 0, -1)]))
        assert same(batch, default_collate(dataset.__getitems__([5, 0, -1])))

    def test_random_crops_follow_the_seed(self, images: Any) -> None:
        dataset = HuggingFace(images, {"image": fl.transforms.imagenet_train(8)})
        found = []
        for arguments in ({}, {"num_workers": 2}, {"num_workers": 2, "worker_method": "process"}, {"on_error": "skip"}):
            with fl.DataLoader(dataset, 5, seed=1, shuffle=True, **arguments) as loader:
                found.append(list(loader))
        for other in found[1:]:
            assert all(same(a, b) for a, b in zip(found[0], other, strict=True))

    def test_images_alone(self, images: Any) -> None:
        dataset = HuggingFace(images.select_columns(["image"]), {"image": fl.transforms.imagenet_eval(16)})
        assert next(iter(fl.DataLoader(dataset, 4)))["image"].shape == (4, 3, 16, 16)

    def test_foreign_transforms_get_the_values_of_datasets(self, images: Any) -> None:
        by_column = HuggingFace(images, {"image": lambda image: image.size, "label": lambda label: -label})
        assert (by_column[2]["image"], by_column[2]["label"]) == ((30, 22), -2)
        assert reader_of(by_column) is None
        whole = HuggingFace(images, lambda sample: sample["label"])
        assert whole.__getitems__([3, 4]) == [3, 4]
        with pytest.raises(ArgumentError, match=r"transform= names 'photo'; known fields .* name, image, label"):
            HuggingFace(images, {"photo": len})

    def test_bad_images_are_named(self, images: Any, tmp_path: Path) -> None:
        (tmp_path / "3.png").write_bytes(b"no image")
        dataset = HuggingFace(images, {"image": fl.transforms.imagenet_eval(16)})
        for fetch in (dataset.__getitem__, lambda i: dataset.read_batch(BatchRead(np.array([0, i]), Recorder()))):
            with pytest.raises(SampleError, match="sample 3 of the Hugging Face dataset, column 'image'"):
                fetch(3)
        missing = datasets.Dataset.from_dict({"image": [None]}, features=Features({"image": Image()}))
        with pytest.raises(SampleError, match="column 'image' is null"):
            HuggingFace(missing, {"image": fl.transforms.imagenet_eval(16)})[0]
