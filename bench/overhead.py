"""Overhead of a loader per batch and per epoch, with an empty dataset; and the cost of telemetry.

bench/overhead.py            # everything
bench/overhead.py epochs     # short epochs, and new loaders
bench/overhead.py kinds      # whole loops without workers, over batches of several kinds
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import feedline as fl
from feedline.core.cursor import Cursor
from feedline.core.telemetry import Span
from feedline.loader.report import Totals
from feedline.loader.report.audit_log import AuditLog
from harness import Contest
from loaders import rate


class Empty(Dataset[int]):
    """Samples that cost nothing."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def contest(batch_size: int, workers: int, method: str) -> None:
    dataset = Empty(batch_size * (20_000 if batch_size == 1 else 4_000))
    arguments: dict[str, Any] = {"batch_size": batch_size, "num_workers": workers}
    where = "inline" if workers == 0 else f"{workers} {method}"
    race = Contest(f"overhead, batch {batch_size}, {where}", unit="batches/s", baseline="torch")
    race.measure("torch", rate(lambda: DataLoader(dataset, **arguments), most_s=0.7))
    race.measure("feedline", rate(lambda: fl.DataLoader(dataset, worker_method=method, **arguments), most_s=0.7))
    race.run(rounds=7).publish()


class Made(Dataset[Any]):
    """Samples of one kind."""

    def __init__(self, length: int, make: Callable[[int], Any]) -> None:
        self.length, self.make = length, make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Stream(IterableDataset[int]):
    """Integers, one after the other."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def tokens(index: int) -> dict[str, Any]:
    """What tokenizers return, with a label."""
    return {
        "input_ids": torch.zeros(64, dtype=torch.long),
        "attention_mask": torch.ones(64, dtype=torch.long),
        "labels": torch.zeros(64, dtype=torch.long),
        "index": index,
    }


def target(index: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """An image, and what is in it."""
    return torch.zeros(3, 32, 32), {"boxes": torch.zeros(5, 4), "labels": torch.zeros(5, dtype=torch.long), "id": index}


def in_columns(samples: list[Any]) -> Any:
    """The usual collate function of detection."""
    return tuple(zip(*samples, strict=True))


def kinds() -> None:
    """Whole loops, the first batch included, over samples that users make."""
    numbers = Made(3200, lambda index: {"numbers": list(range(index, index + 3000))})
    loops: dict[str, tuple[Any, int | None, Any]] = {
        "dicts of tokens": (Made(6400, tokens), 32, None),
        "single dicts of tokens": (Made(6400, tokens), None, None),
        "detection targets": (Made(6400, target), 32, in_columns),
        "lists of 3,000 integers": (numbers, 32, list),
        "a stream of integers": (Stream(64_000), 32, None),
        "a stream of single integers": (Stream(8_000), None, None),
    }
    for name, (dataset, batch_size, collate_fn) in loops.items():
        number = dataset.length // (batch_size or 1)
        race = Contest(f"whole loops, {name}, inline", unit="batches/s", baseline="torch")
        for maker, made in (("torch", DataLoader), ("feedline", fl.DataLoader)):

            def loop(made: Any = made, dataset: Any = dataset, **arguments: Any) -> None:
                for _ in made(dataset, **arguments):
                    pass

            race.add(maker, partial(loop, batch_size=batch_size, collate_fn=collate_fn), work=number)
        race.run(rounds=9).publish()


def short_epochs(workers: int, dataset: Any, name: str = "", **order: Any) -> None:
    """Epochs of a few batches; worker processes persist. Those with a name are only shown."""
    arguments: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "persistent_workers": workers > 0, **order}
    where = "inline" if workers == 0 else f"{workers} persistent processes"
    race = Contest(f"overhead, short epochs{name}, {where}", unit="epochs/s", baseline="torch")
    with fl.DataLoader(dataset, worker_method="process", **arguments) as feedlines:
        for maker, loader in (("torch", DataLoader(dataset, **arguments)), ("feedline", feedlines)):
            race.add(maker, lambda loader=loader: [list(loader) for _ in range(200)], work=200)  # type: ignore[misc]
        outcome = race.run(rounds=7)
    outcome.show() if name else outcome.publish()


def all_short_epochs() -> None:
    for workers in (0, 2):
        short_epochs(workers, Empty(8))
    tensors = TensorDataset(torch.rand(8, 4), torch.arange(8))
    short_epochs(0, Empty(8), ", shuffled", shuffle=True)
    short_epochs(0, tensors, " of tensors")
    short_epochs(0, list(torch.rand(32, 4)), " of a list, eight batches")


def new_loaders(name: str, use: Callable[[Any], object]) -> None:
    """Loaders that are made, used and dropped."""
    race = Contest(f"overhead, {name}", unit="loaders/s", baseline="torch")
    for maker, made in (("torch", DataLoader), ("feedline", fl.DataLoader)):
        race.add(maker, lambda made=made: [use(made(Empty(8), 4)) for _ in range(500)], work=500)  # type: ignore[misc]
    race.run(rounds=7).show()


def telemetry() -> None:
    """Recording the spans of one batch, compared with a batch of 1 ms: the share must stay below 1 %."""
    totals, spans = (
        Totals(),
        [Span(stage, 0, 1000, 0) for stage in ("fetch", "collate", "serialize", "receive", "wait")],
    )
    race = Contest("telemetry per batch", unit="s", baseline="a batch of 1 ms")
    race.measure("a batch of 1 ms", lambda: 1e-3)
    race.add("five spans added up", lambda: [totals.add(spans, 32) for _ in range(1000)], work=1000)
    race.run().publish()


def audit() -> None:
    """Recording the delivered positions of one batch, digests included, compared with a batch of 1 ms."""
    dataset = Empty(256 * 4_000)
    with tempfile.TemporaryDirectory() as folder:
        loader = fl.DataLoader(dataset, batch_size=256, shuffle=True, seed=0, log=Path(folder) / "run.jsonl")
        iter(loader)
        plan, identity = loader._fl_plan, loader._fl_monitor.identity
        assert plan is not None
        requests = list(plan.requests(Cursor(0), Cursor, 0))

        def record() -> None:
            log, cursor = AuditLog(Path(folder) / "audit", identity, plan, dataset, resumed=False), Cursor(0)
            for request in requests:
                log.add(request, cursor, None)
                cursor = cursor.after(request.start, request.stop)
            log.flush(ended=True)

        race = Contest("audit log per batch", unit="s", baseline="a batch of 1 ms")
        race.measure("a batch of 1 ms", lambda: 1e-3)
        race.add("positions and digest of 256 samples", record, work=len(requests))
        race.run().publish()


if __name__ == "__main__":
    only = sys.argv[1:]
    if not only:
        for size in (1, 256):
            contest(size, 0, "auto")
            contest(size, 2, "thread")
            contest(size, 2, "process")
        telemetry()
        audit()
    if only in ([], ["kinds"]):
        kinds()
    if only in ([], ["epochs"]):
        all_short_epochs()
        new_loaders("new loaders", type)
        new_loaders("new loaders with a short epoch each", list)
