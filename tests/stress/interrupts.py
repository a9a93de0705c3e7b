"""Interrupts at random moments; run by test_interrupts.py. Prints leftovers and losses.

The arguments are the number of interrupts and a seed.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import psutil
import torch

import feedline

LONGEST_S = 0.5


class Numbers:
    """64 samples, each large enough to travel in a slot."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((5_000,), index)


RETRY_S = 0.0002

CODE_OF_THIS_SCRIPT: list[CodeType] = []
"""Functions that no interrupt may divide: they would lose a batch that was returned to them."""


def interrupt(_: int, frame: FrameType | None) -> None:
    if frame is not None and frame.f_code in CODE_OF_THIS_SCRIPT:
        signal.setitimer(signal.ITIMER_REAL, RETRY_S)
        return
    raise KeyboardInterrupt


def descriptors() -> dict[str, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[entry.name] = str(entry.readlink())
        except FileNotFoundError:
            continue
    return found


def left(before: dict[str, str]) -> list[str]:
    """Processes and descriptors that remain after half a minute."""
    gc.collect()
    end = time.monotonic() + 30
    while True:
        _, processes = psutil.wait_procs(psutil.Process().children(recursive=True), max(0.0, end - time.monotonic()))
        new = [f"descriptor {fd} -> {target}" for fd, target in descriptors().items() if before.get(fd) != target]
        if not (processes or new) or time.monotonic() > end:
            return [*map(str, processes), *new]


def make_and_close() -> None:
    """A whole life of a loader, interrupted anywhere."""
    loader = feedline.DataLoader(Numbers(), 8, num_workers=2)
    for _ in loader:
        pass
    loader.close()


def lifetime_s() -> float:
    """Lifetime of a loader without an interrupt, plus a few seconds, so that most interrupts hit."""
    start = time.perf_counter()
    make_and_close()
    return min(1.2 * (time.perf_counter() - start), LONGEST_S)


def go_on(longest_s: float) -> list[int]:
    """The first elements of all batches of one iterator, which continues after each interrupt."""
    seen: list[int] = []
    loader = feedline.DataLoader(Numbers(), 8, num_workers=2, seed=0)
    iterator: Any = iter(loader)
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0, longest_s))
    while True:
        try:
            batch = next(iterator)
            seen.append(int(batch[0, 0]))
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0, longest_s))
        except StopIteration:
            break
    signal.setitimer(signal.ITIMER_REAL, 0)
    loader.close()
    return seen


def report_unraisable(unraisable: Any) -> None:
    """Print an error that Python cannot raise.

    Python drops an interrupt within a callback of a weak reference or a destructor, so it does not count.
    """
    if unraisable.exc_type is not KeyboardInterrupt:
        print("unraisable:", unraisable.exc_value, unraisable.object, flush=True)


def main(count: int, seed: int) -> None:
    random.seed(seed)
    CODE_OF_THIS_SCRIPT.append(go_on.__code__)
    signal.signal(signal.SIGALRM, interrupt)
    sys.unraisablehook = report_unraisable
    make_and_close()
    longest_s = min(lifetime_s() for _ in range(3))
    before = descriptors()
    for number in range(count):
        delay_s = random.uniform(0, longest_s)
        try:
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            make_and_close()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            pass
        if remains := left(before):
            print(f"interrupt {number} after {delay_s:.6f} s left {remains}", flush=True)
        before = descriptors()
    for number in range(count // 4):
        if (seen := go_on(longest_s)) != list(range(0, 64, 8)):
            print(f"run {number} gave {seen}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
