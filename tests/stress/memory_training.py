"""A training process that measures its memory and that of its descendants; run by test_memory.py."""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import feedline as fl

MIB = 1 << 20


class InMemory:
    """Rows of a large array; a batch reads every byte of its rows."""

    def __init__(self, mib: int, shared: bool) -> None:
        rows = np.ones((mib * 16, MIB // 16), dtype=np.uint8)
        self.rows = fl.share(rows) if shared else rows

    def __getitem__(self, index: int) -> int:
        return int(self.rows[index].sum())

    def __len__(self) -> int:
        return len(self.rows)


class Small:
    """Samples that cost nothing to keep, large enough to fill a few slots."""

    def __getitem__(self, index: int) -> Any:
        return np.full(64 * 1024, index, dtype=np.uint8)

    def __len__(self) -> int:
        return 64


def family() -> list[psutil.Process]:
    """All other processes of the session that this process leads: its descendants."""
    kin = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() == os.getsid(process.pid):
                kin.append(process)
        except ProcessLookupError:
            continue
    return kin


def pss(process: psutil.Process) -> int:
    """The bytes of a process, shared ones divided among those that share them.

    Files that are mapped, such as libraries, are left out: other programs share them, and come and go.
    """
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def weigh_shares(mib: int, workers: int, method: str, shared: bool) -> dict[str, float]:
    """The proportional set size of this process and of its family, in MiB, when every worker has read the dataset."""
    dataset: Any = InMemory(mib, shared)
    context = "fork" if method == "fork" else None
    with fl.DataLoader(
        dataset,
        batch_size=4,
        num_workers=workers,
        worker_method="process",
        multiprocessing_context=context,
        persistent_workers=True,  # others end after the last batch
    ) as loader:
        iterator = iter(loader)
        for _ in range(len(loader)):
            next(iterator)
        kin = family()
        return {
            "self": pss(psutil.Process()) / MIB,
            "family": sum(map(pss, kin)) / MIB,
            "processes": len(kin),
        }


def weigh_epochs(epochs: int, workers: int, persistent: bool) -> list[list[dict[str, float]]]:
    """The memory of this process and its family after each epoch of the second fifth of all, and of the last one."""
    dataset: Any = Small()
    me = psutil.Process()
    early, late = range(epochs // 5, 2 * epochs // 5), range(4 * epochs // 5, epochs)
    weights: list[list[dict[str, float]]] = [[], []]
    with fl.DataLoader(
        dataset, batch_size=8, num_workers=workers, worker_method="process", persistent_workers=persistent
    ) as loader:
        for epoch in range(epochs):
            for _ in loader:
                pass
            gc.collect()
            if epoch in early or epoch in late:
                weights[epoch in late].append(
                    {
                        "rss": me.memory_info().rss / MIB,
                        "family": sum(map(pss, family())) / MIB,
                        "descriptors": me.num_fds(),
                        "threads": me.num_threads(),
                    }
                )
    return weights


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["shares", "epochs"])
    parser.add_argument("--mib", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--method", choices=["process", "fork"], default="process")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--epochs", type=int, default=50)
    args = parser.parse_args()
    if args.what == "shares":
        print(json.dumps(weigh_shares(args.mib, args.workers, args.method, args.shared)))
    else:
        for persistent in (False, True):
            print(json.dumps(weigh_epochs(args.epochs, args.workers, persistent)))


if __name__ == "__main__":
    main()
