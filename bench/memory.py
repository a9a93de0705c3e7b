"""Memory of four worker processes over a large dataset: an array, its shared copy, a list, packed strings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
from torch.utils.data import DataLoader

import feedline as fl
from harness import Contest

WORKERS = 4
GIB = 1 << 30


class Array:
    """One GiB of rows, and as few samples as it takes to read all of it."""

    def __init__(self, shared: bool) -> None:
        rows = np.ones((1024, GIB // 4 // 1024), np.float32)
        self.rows = fl.share(rows) if shared else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> float:
        return float(self.rows[index].sum())


class Strings:
    """Ten million file names as Python objects: reading one writes its reference count and copies its page."""

    def __init__(self, strings: Any) -> None:
        self.strings = strings

    def __len__(self) -> int:
        return len(self.strings) // 1000

    def __getitem__(self, index: int) -> int:
        return sum(map(len, (self.strings[i] for i in range(index * 1000, index * 1000 + 1000))))


def pss_gib(loader_class: Callable[..., Any], dataset: Any) -> float:
    """Proportional set size of this process and its descendants, after every sample was read."""
    loader = loader_class(dataset, batch_size=4, num_workers=WORKERS, persistent_workers=True)
    batches = iter(loader)
    for _ in batches:
        pass
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    total = sum(process.memory_full_info().pss for process in processes if process.is_running())
    del batches, loader
    return total / GIB


def in_child(loader: str, kind: str) -> float:
    """`pss_gib` in a process of its own, so that measurements do not affect each other."""

    command = [sys.executable, __file__, loader, kind]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def made(kind: str) -> Any:
    if kind in ("array", "shared array"):
        return Array(shared=kind == "shared array")
    names = [f"train/{i % 1000:05d}/{i:09d}.jpg" for i in range(10_000_000)]
    return Strings(names if kind == "list" else fl.datasets.PackedStrings(names))


def slope_kib_per_epoch(epochs: int = 50) -> float:
    """Growth of this process and its descendants per epoch, by least squares, after five epochs."""
    loader = fl.DataLoader(np.ones((512, 4096), np.float32), 16, shuffle=True, num_workers=2, worker_method="process")
    sizes = []
    for _ in range(epochs):
        for _ in loader:
            pass
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        sizes.append(sum(process.memory_info().rss for process in processes) / 1024)
    loader.close()
    return float(np.polyfit(range(len(sizes) - 5), sizes[5:], 1)[0])


def main() -> None:
    for kind in ("array", "shared array", "list", "packed"):
        race = Contest(f"memory of 4 workers, {kind}", unit="GiB", baseline="torch")
        for name in ("torch", "feedline"):
            race.measure(name, lambda name=name, kind=kind: in_child(name, kind))
        race.run(rounds=1, warm_up=0).publish("psutil")
    race = Contest("growth over 50 epochs", unit="KiB per epoch", baseline="one page")
    race.measure("one page", lambda: 4.0)
    race.measure("feedline, 2 processes", slope_kib_per_epoch)
    race.run(rounds=1, warm_up=0).publish("psutil")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        chosen = {"torch": DataLoader, "feedline": fl.DataLoader}[sys.argv[1]]
        print(pss_gib(chosen, made(sys.argv[2])))
        sys.stdout.flush()
        os._exit(0)
    main()
