"""Sixteen loops with one known bottleneck each: twelve synthetic, four with real data."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

import feedline as fl

BATCH = 8


def compute(seconds: float) -> None:
    """Work in Python, for this much CPU time."""
    deadline = time.thread_time() + seconds
    while time.thread_time() < deadline:
        sum(range(200))


def sleep_step(seconds: float) -> Callable[[Any], None]:
    """A step that waits, as for a device."""
    return lambda _: time.sleep(seconds)


def compute_step(seconds: float) -> Callable[[Any], None]:
    """A step that computes in this process."""
    return lambda _: compute(seconds)


@dataclass(frozen=True)
class Samples(Dataset[Any]):
    """Samples that wait and compute."""

    length: int
    wait_s: float = 0.0
    cpu_s: float = 0.0
    slow_every: int = 0
    slow_s: float = 0.0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.wait_s:
            time.sleep(self.wait_s)
        if self.cpu_s:
            compute(self.cpu_s)
        if self.slow_every and index % self.slow_every == self.slow_every // 2:
            time.sleep(self.slow_s)
        return torch.zeros(8)


class Records(Samples):
    """Samples of many small Python objects."""

    def __getitem__(self, index: int) -> Any:
        return {"numbers": list(range(1000 + index, 4000 + index))}


class Compressed(Samples):
    """Samples that are inflated, which releases Python's lock."""

    data = zlib.compress(np.random.default_rng(0).integers(0, 40, 600_000, dtype=np.uint8).tobytes(), 1)

    def __getitem__(self, index: int) -> Any:
        return torch.frombuffer(bytearray(zlib.decompress(self.data)[:1024]), dtype=torch.uint8)


class SlowOrder(Sampler[int]):
    """A sampler that computes each index."""

    def __init__(self, length: int, seconds: float) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            compute(self.seconds)
            yield index


def slow_collate(samples: list[Any]) -> Any:
    """Stacking with a lot of Python."""
    compute(0.03)
    return torch.stack(samples)


def plain_list(samples: list[Any]) -> list[Any]:
    """The samples as they are."""
    return samples


@dataclass(frozen=True)
class Pipeline:
    """A loop with a known limit.

    `stages` are those that the verdict may name.
    """

    name: str
    stages: tuple[str, ...]
    loader: Mapping[str, Any]
    step: Callable[[Any], None] = field(default_factory=lambda: sleep_step(0.005))
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the loop after a remedy that is code; by default a dataset that takes no time."""

    def __post_init__(self) -> None:
        if not self.fixed:
            object.__setattr__(self, "fixed", {"dataset": Samples(len(self.loader["dataset"]))})

    def make(self, **changes: Any) -> fl.DataLoader[Any]:
        """The loop's loader, with changed arguments."""
        return fl.DataLoader(**{"batch_size": BATCH, **self.loader, **changes})


def synthetic() -> list[Pipeline]:
    """Twelve loops that sleep and compute."""
    processes = {"worker_method": "process", "num_workers": 2}
    return [
        Pipeline("inline, samples compute", ("fetch",), {"dataset": Samples(1200, 0, 0.002)}, sleep_step(0.008)),
        Pipeline("inline, samples wait", ("fetch",), {"dataset": Samples(1200, 0.003)}, sleep_step(0.006)),
        Pipeline("2 workers, samples wait", ("fetch",), {"dataset": Samples(1600, 0.008), **processes}),
        Pipeline("1 worker, wait and compute", ("fetch",),
                 {"dataset": Samples(960, 0.004, 0.0005), **processes, "num_workers": 1}),
        Pipeline("slow collate", ("collate",),
                 {"dataset": Samples(1200), **processes, "collate_fn": slow_collate}, sleep_step(0.005),
                 {"collate_fn": None}),
        Pipeline("Python objects", ("serialize", "receive", "overhead"),
                 {"dataset": Records(4000), **processes, "batch_size": 32, "collate_fn": plain_list}, sleep_step(0.001),
                 {"dataset": Samples(4000), "collate_fn": None}),
        Pipeline("slow sampler", ("sample",),
                 {"dataset": Samples(1200), **processes, "sampler": SlowOrder(1200, 0.002)}, sleep_step(0.004),
                 {"sampler": None}),
        Pipeline("stragglers", ("straggler",),
                 {"dataset": Samples(2400, 0.0005, 0, 136, 0.12), **processes, "num_workers": 4}, sleep_step(0.01)),
        Pipeline("threads under the lock", ("fetch",),
                 {"dataset": Samples(1600, 0, 0.001), "num_workers": 2, "worker_method": "thread"}, sleep_step(0.002)),
        Pipeline("the step computes", ("step",), {"dataset": Samples(1600, 0.0002), **processes}, compute_step(0.012)),
        Pipeline("short epochs", ("startup",), {"dataset": Samples(96, 0.0002), **processes}, sleep_step(0.004),
                 ),
        Pipeline("decompression", ("fetch",),
                 {"dataset": Compressed(960), **processes, "num_workers": 1}, sleep_step(0.002)),
    ]  # fmt: skip


class Photos(Dataset[Any]):
    """JPEG files, decoded by Pillow as most code does."""

    def __init__(self, folder: Path, length: int) -> None:
        self.paths = [folder / f"{number % 8}.jpg" for number in range(length)]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        image = Image.open(self.paths[index]).convert("RGB").resize((160, 160), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.asarray(image).copy())


class Rows(Dataset[Any]):
    """Rows of a table, each read with its row group."""

    def __init__(self, path: Path, length: int) -> None:
        self.path, self.length = path, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        import pyarrow.parquet as pq

        table = pq.ParquetFile(self.path).read_row_group(index % 8, use_threads=False)
        return torch.tensor([column[index % table.num_rows].as_py() for column in table.columns])


class Tokens(Dataset[Any]):
    """Windows of tokens, each with a load of the whole file."""

    def __init__(self, path: Path, length: int) -> None:
        self.path, self.length = path, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(np.load(self.path)[index * 64 : index * 64 + 64].astype(np.int64))


class Remote(Dataset[Any]):
    """Objects of a server, one request each."""

    def __init__(self, url: str, length: int) -> None:
        self.url, self.length = url, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        with urllib.request.urlopen(f"{self.url}/{index}") as answer:
            return torch.frombuffer(bytearray(answer.read()), dtype=torch.uint8)


class _SlowServer(BaseHTTPRequestHandler):
    """4 KiB after 25 ms."""

    def do_GET(self) -> None:
        time.sleep(0.025)
        self.send_response(200)
        self.send_header("Content-Length", "4096")
        self.end_headers()
        self.wfile.write(bytes(4096))

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def real(folder: Path, url: str) -> list[Pipeline]:
    """Four loops on files below `folder` and the server at `url`."""
    one = {"worker_method": "process", "num_workers": 1}
    return [
        Pipeline("images: JPEG by Pillow", ("decode", "fetch"), {"dataset": Photos(folder, 240), **one},
                 sleep_step(0.01)),
        Pipeline("table: Parquet by rows", ("fetch",), {"dataset": Rows(folder / "rows.parquet", 640)},
                 sleep_step(0.01)),
        Pipeline("tokens: np.load each time", ("fetch",), {"dataset": Tokens(folder / "tokens.npy", 800), **one},
                 sleep_step(0.004)),
        Pipeline("remote: HTTP by sample", ("fetch",), {"dataset": Remote(url, 480), **one, "num_workers": 2},
                 sleep_step(0.01)),
    ]  # fmt: skip


def write_files(folder: Path) -> None:
    """Images, a table, and tokens."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    source = np.random.default_rng(0)
    for number in range(8):
        small = source.integers(0, 255, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(small).resize((2000, 1600)).save(folder / f"{number}.jpg", quality=85)
    table = pa.table({f"column {number}": source.random(24_000) for number in range(6)})
    pq.write_table(table, folder / "rows.parquet", row_group_size=3_000)
    np.save(folder / "tokens.npy", source.integers(0, 50_000, 8_000_000, dtype=np.uint16))


@contextmanager
def server() -> Iterator[str]:
    """URL of a slow server in a process of its own, which takes no lock of the loop's."""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def temporary_folder() -> TemporaryDirectory[str]:
    """A folder for the files of the real pipelines."""
    return TemporaryDirectory(prefix="feedline-diagnosis-")


if __name__ == "__main__":
    ThreadingHTTPServer.request_queue_size = 128  # with the default of 5, a connection may wait a second for its turn
    listening = ThreadingHTTPServer(("127.0.0.1", 0), _SlowServer)
    print(listening.server_port, flush=True)
    listening.serve_forever()
