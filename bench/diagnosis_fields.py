"""Ten loops as users of ten fields write them, with one known bottleneck each.

Their datasets are plain code with the libraries of the field. They were written for `bench/diagnosis.py --fields` after
the model of the verdict, which was developed without them.
"""

from __future__ import annotations

import io
import re
import sqlite3
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from diagnosis_pipelines import Pipeline, Samples, plain_list, sleep_step

PROCESSES = {"worker_method": "process"}


class _Listed(Dataset[Any]):
    """A dataset of `length` samples below `folder`."""

    def __init__(self, folder: Path, length: int) -> None:
        self.folder, self.length = folder, length

    def __len__(self) -> int:
        return self.length


class Speech(_Listed):
    """Spectrograms of FLAC files."""

    def __getitem__(self, index: int) -> Any:
        import soundfile

        sound, _ = soundfile.read(self.folder / f"{index % 8}.flac", dtype="float32")
        frames = np.lib.stride_tricks.sliding_window_view(sound, 400)[::160] * np.hanning(400)
        return torch.from_numpy(np.log1p(np.abs(np.fft.rfft(frames))).astype(np.float32))


class Documents(_Listed):
    """Texts, which the collate function tokenizes."""

    def __getitem__(self, index: int) -> str:
        return f"Document {index}: it's a plain text, isn't it? " * 120


WORDS = re.compile(r"\w+|[^\w\s]")


def tokenize(texts: list[str]) -> Any:
    """Token numbers, padded to the longest text."""
    tokens = [[zlib.crc32(word.encode()) % 30_000 for word in WORDS.findall(text.lower())] for text in texts]
    longest = max(map(len, tokens))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in tokens])
    return padded, torch.arange(longest) < torch.tensor([len(row) for row in tokens])[:, None]


class Recordings(_Listed):
    """Normalized windows of a large array on disk."""

    def __getitem__(self, index: int) -> Any:
        array = np.memmap(self.folder / "signals.bin", dtype=np.float32, mode="r").reshape(-1, 64)
        window = np.array(array[(index * 37) % (len(array) - 4096) :][:4096])
        return torch.from_numpy((window - window.mean(0)) / (window.std(0) + 1e-6))


class Shards(IterableDataset[Any]):
    """Images of tars, which are divided among the workers."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __iter__(self) -> Iterator[Any]:
        from PIL import Image

        info = get_worker_info()
        for path in self.paths if info is None else self.paths[info.id :: info.num_workers]:
            with tarfile.open(path) as tar:
                for member in tar:
                    data = tar.extractfile(member)
                    assert data is not None
                    image = Image.open(io.BytesIO(data.read())).convert("RGB").resize((128, 128))
                    yield torch.from_numpy(np.asarray(image).copy())


class KeyValues(_Listed):
    """Compressed values of an LMDB."""

    environment: Any = None

    def __getitem__(self, index: int) -> Any:
        import lmdb

        if self.environment is None:
            self.environment = lmdb.open(str(self.folder / "values.lmdb"), readonly=True, lock=False)
        with self.environment.begin() as transaction:
            value = transaction.get(f"{index % 64:04}".encode())
        return torch.frombuffer(bytearray(zlib.decompress(value)[:4096]), dtype=torch.uint8)


class Rows(_Listed):
    """Rows of a SQLite table without an index, each found by a scan."""

    def __getitem__(self, index: int) -> Any:
        connection = sqlite3.connect(self.folder / "rows.db")
        (value,) = connection.execute("select value from samples where name = ?", (f"name {index % 4000}",)).fetchone()
        connection.close()
        return torch.tensor(value)


class Nodes(_Listed):
    """Numbers of nodes of a graph, whose neighbors the collate function samples."""

    def __getitem__(self, index: int) -> int:
        return index % 20_000


class Neighbors:
    """Two hops of sampled neighbors of each node, with their features."""

    def __init__(self, nodes: int) -> None:
        source = np.random.default_rng(0)
        self.edges = source.integers(0, nodes, (nodes, 30))
        self.features = source.random((nodes, 64), dtype=np.float32)

    def __call__(self, nodes: list[int]) -> Any:
        source = np.random.default_rng(nodes[0])
        hops = [np.array(nodes)]
        for fanout in (10, 5):
            hops.append(np.concatenate([source.choice(self.edges[node], fanout, replace=False) for node in hops[-1]]))
        kept, inverse = np.unique(np.concatenate(hops), return_inverse=True)
        return torch.from_numpy(self.features[kept]), torch.from_numpy(inverse)


class Prepared:
    """A batch of neighbors that already exists, and only has to be sent."""

    def __init__(self, neighbors: Neighbors, number: int) -> None:
        self.batch = neighbors(list(range(number)))

    def __call__(self, _: list[int]) -> Any:
        return self.batch


class Prioritized(Sampler[list[int]]):
    """Batches of transitions, drawn by their current priorities."""

    def __init__(self, transitions: int, batches: int) -> None:
        self.priorities = np.random.default_rng(0).random(transitions)
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        source = np.random.default_rng(1)
        for _ in range(self.batches):
            shares = self.priorities**0.6
            drawn = source.choice(len(shares), 32, p=shares / shares.sum())
            self.priorities[drawn] *= 0.9
            yield drawn.tolist()


class Windows(Dataset[Any]):
    """Rolling windows of a data frame, with features of the calendar."""

    def __init__(self, length: int) -> None:
        import pandas as pd

        hours = pd.date_range("2020-01-01", periods=length + 48, freq="h")
        self.frame = pd.DataFrame({"load": np.random.default_rng(0).random(len(hours))}, index=hours)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        window = self.frame.iloc[index : index + 48]
        columns = [
            window["load"],
            window["load"].rolling(6, min_periods=1).mean(),
            window.index.hour,
            window.index.dayofweek,
        ]
        return torch.from_numpy(np.stack([np.asarray(column, dtype=np.float32) for column in columns]))


class Downloads(Dataset[Any]):
    """Objects of a server, each fetched with requests."""

    def __init__(self, url: str, length: int) -> None:
        self.url, self.length = url, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        import requests

        return torch.frombuffer(bytearray(requests.get(f"{self.url}/{index}", timeout=60).content), dtype=torch.uint8)


def fields(folder: Path, url: str) -> list[Pipeline]:
    """Ten loops on files below `folder` and the server at `url`."""
    one, two = {**PROCESSES, "num_workers": 1}, {**PROCESSES, "num_workers": 2}
    neighbors = Neighbors(20_000)
    # Each tar is read five times: an epoch of 640 images is over before its workers have started.
    shards = Shards([folder / f"{number}.tar" for number in range(8)] * 5)
    return [
        Pipeline("audio: FLAC to spectrograms", ("fetch",), {"dataset": Speech(folder, 480)}, sleep_step(0.01)),
        Pipeline("text: tokenized while collating", ("collate",),
                 {"dataset": Documents(folder, 4800), **one, "batch_size": 16, "collate_fn": tokenize},
                 sleep_step(0.002), {"collate_fn": plain_list}),
        Pipeline("signals: windows of a memmap", ("fetch",), {"dataset": Recordings(folder, 1200), "shuffle": True},
                 sleep_step(0.005)),
        Pipeline("tars: a stream of images", ("decode", "fetch"), {"dataset": shards, **one}, sleep_step(0.003),
                 {"dataset": Samples(3200)}),
        Pipeline("LMDB: compressed values", ("fetch",), {"dataset": KeyValues(folder, 1600), **one}, sleep_step(0.002)),
        Pipeline("SQLite: a scan for each row", ("fetch",), {"dataset": Rows(folder, 4800), "batch_size": 16},
                 sleep_step(0.002)),
        Pipeline("graph: neighbors while collating", ("collate",),
                 {"dataset": Nodes(folder, 25_600), **one, "batch_size": 128, "collate_fn": neighbors},
                 sleep_step(0.003), {"collate_fn": Prepared(neighbors, 128)}),
        Pipeline("replay: prioritized batches", ("sample",),
                 {"dataset": Samples(400_000), **two, "batch_size": 1, "batch_sampler": Prioritized(400_000, 200)},
                 sleep_step(0.003), {"batch_sampler": None, "batch_size": 2000}),
        Pipeline("time series: windows on threads", ("fetch",),
                 {"dataset": Windows(3200), "num_workers": 2, "worker_method": "thread"}, sleep_step(0.001)),
        Pipeline("HTTP: requests on threads", ("fetch",),
                 {"dataset": Downloads(url, 480), "num_workers": 2, "worker_method": "thread"}, sleep_step(0.005)),
    ]  # fmt: skip


def write_field_files(folder: Path) -> None:
    """Sounds, signals, tars, an LMDB, and a table."""
    import lmdb
    import soundfile
    from PIL import Image

    source = np.random.default_rng(0)
    for number in range(8):
        soundfile.write(folder / f"{number}.flac", source.normal(0, 0.05, 16_000 * 3).astype(np.float32), 16_000)
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for image in range(80):
                stream = io.BytesIO()
                small = source.integers(0, 255, (20, 25, 3), dtype=np.uint8)
                Image.fromarray(small).resize((500, 400)).save(stream, "JPEG")
                member = tarfile.TarInfo(f"{image:04}.jpg")
                member.size = stream.tell()
                stream.seek(0)
                tar.addfile(member, stream)
    source.random(64 * 40_000, dtype=np.float32).tofile(folder / "signals.bin")
    with lmdb.open(str(folder / "values.lmdb"), map_size=1 << 28) as environment, environment.begin(write=True) as put:
        for number in range(64):
            value = source.integers(0, 40, 300_000, dtype=np.uint8).tobytes()
            put.put(f"{number:04}".encode(), zlib.compress(value, 1))
    with sqlite3.connect(folder / "rows.db") as connection:
        connection.execute("create table samples (name text, value real)")
        connection.executemany(
            "insert into samples values (?, ?)", [(f"name {number}", float(number)) for number in range(4000)]
        )
    connection.close()
