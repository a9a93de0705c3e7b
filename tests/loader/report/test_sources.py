"""Libraries found in the code of a dataset, without running it."""

from __future__ import annotations

import io
import json
import sqlite3
import sys
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from simulated_pipeline import Pipeline
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

import feedline as fl
from feedline.core.dataset import Traits
from feedline.loader.report import diagnose
from feedline.loader.report.sources import SampleSource, shards_itself, source_of


class Photos(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return np.asarray(Image.open(f"{index}.jpg"))


class Opened(Photos):
    def __init__(self, file: Path) -> None:
        self.tokens = np.load(file, mmap_mode="r")

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.tokens[index : index + 2])


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        return bytes(answer.read())


class ByHelper(Photos):
    def __getitem__(self, index: int) -> Any:
        return self.parsed(fetch(f"http://nowhere/{index}"))

    def parsed(self, text: bytes) -> Any:
        return json.loads(text)


class Rows(Photos):
    def __getitem__(self, index: int) -> Any:
        return sqlite3.connect("rows.db").execute("select ?", (index,)).fetchone()


class Late(Photos):
    def __getitem__(self, index: int) -> Any:
        import zipfile

        return zipfile.ZipFile("samples.zip").read(str(index))


class Arrays(Photos):
    def __getitem__(self, index: int) -> Any:
        with zipfile.ZipFile("samples.zip") as file:
            return np.load(io.BytesIO(file.read(f"{index}.npy")))


class ByOpenCV(Photos):
    def __getitem__(self, index: int) -> Any:
        import cv2

        return cv2.cvtColor(cv2.imread(f"{index}.jpg"), cv2.COLOR_BGR2RGB)


class ByTorchvision(Photos):
    def __getitem__(self, index: int) -> Any:
        from torchvision.io import decode_jpeg, read_file

        return decode_jpeg(read_file(f"{index}.jpg"))


class Plain(Photos):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


@pytest.mark.parametrize(
    ("dataset", "call", "answer"),
    [
        (Photos(), "Image.open", "ImageFolder"),
        (ByHelper(), "urllib.request.urlopen", "cache="),
        (Rows(), "sqlite3.connect", "SQLManifest"),
        (Arrays(), "zipfile.ZipFile", "TarShards"),  # what decodes a member does not read the archive
        (Late(), "zipfile", "TarShards"),
        (ByOpenCV(), "cv2", "ImageFolder"),
        (ByTorchvision(), "torchvision.io", "ImageFolder"),
        (Subset(Photos(), [0]), "Image.open", "ImageFolder"),
    ],
    ids=["images", "requests", "sql", "arrays in an archive", "late-import", "opencv", "torchvision", "subset"],
)
def test_the_call_its_line_and_the_own_answer(dataset: Any, call: str, answer: str) -> None:
    source = source_of(dataset)
    assert source.call == call
    assert answer in source.own_reader
    file, _, line = source.where.partition(":")
    assert file == "test_sources.py"
    assert call.rpartition(".")[2] in Path(__file__).read_text(encoding="utf-8").splitlines()[int(line) - 1]


@pytest.mark.parametrize("dataset", [ByOpenCV(), ByTorchvision()], ids=["opencv", "torchvision"])
def test_the_verdict_says_what_the_own_way_would_gain(dataset: Any) -> None:
    """Nothing accelerates decoders of other libraries, so the verdict has to say that there is a faster way."""
    pipeline = Pipeline(fetch=(0, 60), step=(2, 4), workers=2)
    run = pipeline.run()
    verdict = diagnose(run.stats, pipeline.context(source=source_of(dataset)), run.recent)
    (advice,) = (advice for advice in verdict.advice if "feedline.datasets.ImageFolder" in advice.text)
    assert advice.gain > 1
    assert f"at most {advice.high:.1f} ×" in str(verdict)


class Frame(Photos):
    """Rows in memory, which were read from a file once."""

    def __init__(self, path: Path) -> None:
        self.frame = pd.read_parquet(path)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(pd.to_numeric(self.frame.iloc[index]).to_numpy())


class Listed(Frame):
    """Rows in memory that name files."""

    def __getitem__(self, index: int) -> Any:
        return np.load(self.frame.iloc[index, 0])


class Partly(Frame):
    def __getitem__(self, index: int) -> Any:
        return pd.read_parquet(self.frame.iloc[index, 0])


@pytest.mark.parametrize(
    ("kind", "call", "answer"),
    [(Frame, "DataFrame", "feedline.datasets.Arrays"), (Listed, "np.load", "ArrayFile"),
     (Partly, "pd.read_parquet", "feedline.datasets.Parquet")],
)  # fmt: skip
def test_a_table_in_memory_is_no_file(kind: type[Frame], call: str, answer: str, tmp_path: Path) -> None:
    pd.DataFrame({"a": [1, 2]}).to_parquet(tmp_path / "rows.parquet")
    source = source_of(kind(tmp_path / "rows.parquet"))
    assert source.call == call
    assert answer in source.own_reader


def test_what_the_constructor_opens_counts(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(8))
    assert "TokenFile" in source_of(Opened(tmp_path / "tokens.npy")).own_reader


@pytest.mark.parametrize(
    "dataset", [Plain(), [1, 2], fl.datasets.Arrays(np.zeros((4, 2))), object()], ids=["plain", "list", "own", "object"]
)
def test_nothing_is_said_of_other_code(dataset: Any) -> None:
    assert source_of(dataset) == SampleSource()


class Downloads(Photos):
    """Photos that were downloaded once."""

    def __init__(self) -> None:
        self.download()

    def download(self) -> None:
        urllib.request.urlretrieve("http://nowhere/photos.zip", "photos.zip")


class Archived(Photos):
    def __init__(self) -> None:
        self.archive = opened_archive("samples.zip")

    def __getitem__(self, index: int) -> Any:
        return self.archive.read(str(index))


def opened_archive(path: str) -> Any:
    return zipfile.ZipFile(path)


def test_a_constructor_counts_by_what_it_keeps() -> None:
    assert source_of(Downloads.__new__(Downloads)).call == "Image.open"
    assert source_of(Archived.__new__(Archived)).call == "zipfile.ZipFile"

    class Read(Downloads):
        def __getitem__(self, index: int) -> Any:
            return torch.load(f"{index}.pt")

    assert source_of(Read.__new__(Read)) == SampleSource()


class Client:
    @property
    def session(self) -> Any:
        raise AssertionError("the user's code ran")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("the user's code ran")


CLIENT = Client()


class ByClient(Photos):
    def __getitem__(self, index: int) -> Any:
        return Image.open(CLIENT.session.get(CLIENT.any.place(index)))


def test_no_property_of_the_user_runs() -> None:
    assert source_of(ByClient()).call == "Image.open"


def test_a_package_of_the_user_named_datasets_is_not_hugging_faces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "datasets.arrow_dataset", raising=False)
    monkeypatch.setattr(Whole, "__module__", "datasets.mine")
    monkeypatch.setattr(fetch, "__module__", "datasets.util")
    monkeypatch.setattr(Plain, "__getitem__", lambda self, index: fetch(str(index)))
    assert not shards_itself(Whole())
    assert source_of(Plain()) == SampleSource()


def test_a_stream_of_hugging_face_has_work_for_its_shards() -> None:
    import datasets as huggingface

    table = huggingface.Dataset.from_dict({"x": list(range(12))})
    for shards in (1, 3):
        loader = fl.DataLoader(table.to_iterable_dataset(num_shards=shards), 4)
        context = loader._fl_pools.context(loader)
        assert (context.most_workers, context.shards_itself, context.source) == (shards, True, SampleSource())


class Whole(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Shared(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(0 if info is None else info.id, 4, 1 if info is None else info.num_workers))


class Named(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(torch.utils.data.get_worker_info().id))


def test_a_stream_that_asks_for_its_worker_shares_itself_out() -> None:
    assert [shards_itself(stream) for stream in (Whole(), Shared(), Named())] == [False, True, True]


class Waits(Dataset[torch.Tensor]):
    traits = Traits(thread_safe=True, is_random=False, reads_batches=False)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def test_the_setup_of_a_loader_is_described() -> None:
    def stack(samples: list[Any]) -> Any:
        return torch.stack(samples)

    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 40, 40)
    loader = fl.DataLoader(
        Waits(), 4, sampler=sampler, collate_fn=stack, num_workers=2, prefetch_factor=3, in_order=False
    )
    context = loader._fl_pools.context(loader)
    assert (context.dataset, context.sampler, context.collate_fn) == ("Waits", "WeightedRandomSampler", "stack")
    assert (context.num_workers, context.prefetch_factor, context.in_order) == (2, 3, False)
    assert (context.epoch_batches, context.thread_safe, context.shards_itself) == (10, True, True)
    assert 0 < context.cpus <= 4096
    stream = fl.DataLoader(Whole(), 4)
    assert not stream._fl_pools.context(stream).shards_itself
    assert stream._fl_pools.context(stream).epoch_batches is None


def test_a_loader_that_adapts_is_described_with_its_present_workers() -> None:
    with fl.DataLoader(Waits(), 4, num_workers="auto", worker_method="thread") as loader:
        list(loader)
        tuner = loader._fl_pools._flow.tuner
        assert tuner is not None
        tuner.workers = 7
        context = loader._fl_pools.context(loader)
        assert (context.num_workers, context.adapts) == (7, True)
        assert not any("num_workers" in advice.arguments for advice in loader.report().advice)
