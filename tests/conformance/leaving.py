"""A training process that ends in the way its arguments name; run by test_torch_exits.py.

It writes the pids of its workers to stdout once the first batch is there, waits for a line on stdin, and goes on.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, get_worker_info


def is_last_worker() -> bool:
    info = get_worker_info()
    return info is not None and info.id == info.num_workers - 1


class Rows(Dataset[Any]):
    """Forty integers; the act named `act` happens at index 9."""

    def __init__(self, act: str | None) -> None:
        self.act = act

    def __getitem__(self, index: int) -> Any:
        if index == 9:
            misbehave(self.act)
        return torch.tensor([index])

    def __len__(self) -> int:
        return 40


class Stream(IterableDataset[Any]):
    """Twenty integers from every worker; the last worker performs the act named `act` at its tenth."""

    def __init__(self, act: str | None) -> None:
        self.act = act

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for index in range(20):
            if index == 9 and is_last_worker():
                misbehave(self.act)
            yield torch.tensor([index + 1000 * (info.id if info else 0)])


def misbehave(act: str | None) -> None:
    if act == "worker_error":
        raise RuntimeError("worker error")
    if act == "worker_segfault":
        with open(os.devnull, "w") as silent:  # the crash report of the worker is expected
            os.dup2(silent.fileno(), 2)
        ctypes.string_at(0)
    if act == "worker_exit":
        os._exit(7)


def loader_class(name: str) -> type[torch.utils.data.DataLoader[Any]]:
    if name == "torch":
        return torch.utils.data.DataLoader
    import feedline

    return feedline.DataLoader


def leave(how: str, workers: list[Any]) -> None:
    """End this process, or one of its workers, in the middle of the loop."""
    if how == "loader_error":
        raise RuntimeError("loader error")
    if how == "loader_exit":
        sys.exit(5)
    if how == "loader_kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "loader_interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if how == "worker_kill":
        os.kill(workers[-1].pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("loader")
    parser.add_argument("how")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--hold", action="store_true", help="keep a reference to the iterator until the end")
    parser.add_argument("--persistent", action="store_true")
    args = parser.parse_args()
    dataset: Any = (Stream if args.stream else Rows)(args.how)
    loader = loader_class(args.loader)(dataset, num_workers=args.workers, persistent_workers=args.persistent)
    iterator: Any = iter(loader)
    workers = list(iterator._workers) if args.workers else []
    count = 0
    for count, _ in enumerate(iterator, 1):
        if count == 1:
            if not args.hold:
                del iterator, loader
            print(json.dumps([worker.pid for worker in workers]), flush=True)
            sys.stdin.readline()
        if count == 3:
            leave(args.how, workers)
            if args.how == "break":
                break
    gc.collect()
    print(count, flush=True)


if __name__ == "__main__":
    main()
