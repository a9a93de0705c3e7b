"""A loop that hangs at one sample until a file exists."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

import feedline as fl


class Gated(Dataset[int]):
    """The numbers 0 to 39. Sample 20 waits until the file exists."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        while index == 20 and not self.gate.exists():
            time.sleep(0.005)
        return index

    def address(self, index: int) -> str:
        return f"line {index}"


@contextmanager
def hanging_loop(gate: Path, hangs: Callable[[fl.DataLoader[Any]], bool], **arguments: Any) -> Iterator[Any]:
    """A loader whose loop, in another thread, waits for its sixth batch as soon as `hangs(loader)` is true."""
    loader = fl.DataLoader(Gated(gate), 4, **arguments)

    def train() -> None:
        with loader:
            for _ in loader:
                pass

    training = threading.Thread(target=train)
    training.start()
    try:
        end = time.monotonic() + 60
        while not hangs(loader):
            assert time.monotonic() < end
            time.sleep(0.01)
        yield loader
    finally:
        gate.touch()
        training.join()
