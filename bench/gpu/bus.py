"""Claim: the verdict names the bus where copies limit a loop, and predicts what a quarter of the bytes would gain.

Batches of 64 MiB of float32 lie in page-locked memory, and a thread hands them over, so that nothing but the copy takes
time. Steps take a share of the time of a copy. The remedy of the report is then taken: uint8, converted on the device.
With "cpu" as its argument the script runs without a GPU, to check itself, on the simulated bus of
bench/diagnosis_device.py.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

import feedline as fl

sys.path.insert(0, str(Path(__file__).parents[1]))
from diagnosis_device import SlowBus, on_bus

ON_CUDA = sys.argv[1:2] != ["cpu"]
DEVICE = "cuda" if ON_CUDA else "cpu"
NBYTES, BATCHES, ROUNDS = (64 << 20, 200, 3) if ON_CUDA else (1 << 16, 30, 1)
RATE = 4e6
"""Bytes per second of the simulated bus."""


class PageLocked(torch.utils.data.Dataset[torch.Tensor]):
    """The same batch again and again."""

    def __init__(self, batch: torch.Tensor) -> None:
        self.batch = batch.pin_memory() if ON_CUDA else batch

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= BATCHES:
            raise IndexError(index)
        return self.batch


class Run(NamedTuple):
    """One epoch."""

    batches_per_s: float
    stage: str
    gain: float
    """Predicted gain of a quarter of the bytes; 1 without that advice."""
    figures: str


Step = Callable[[torch.Tensor], None]


def run(batch: torch.Tensor, step: Step, place: AbstractContextManager[None], transform: Any = None) -> Run:
    """An epoch after one that starts everything."""
    delivery = fl.Delivery(DEVICE, transform=transform)
    thread = {"num_workers": 1, "worker_method": "thread", "persistent_workers": True}
    with place, fl.DataLoader(PageLocked(batch), batch_size=None, device=delivery, **thread) as loader:
        for _ in range(2):
            started = perf_counter()
            for moved in loader:
                step(moved)
            seconds = perf_counter() - started
        verdict, stats = loader.report(), loader.stats()
    gains = [advice.gain for advice in verdict.advice if "uint8" in advice.text]
    figures = f"{stats.copied_nbytes / stats.copy_s / 1e9:.2f} GB/s, {stats.hidden_copy_s / stats.copy_s:.0%} hidden"
    return Run(BATCHES / seconds, str(verdict.limiting_stage), float(gains[0] or 1) if gains else 1.0, figures)


def cycles_per_s() -> float:
    """Clock cycles of the device per second."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    begun.record()
    torch.cuda._sleep(100_000_000)
    ended.record()
    ended.synchronize()
    return 1e8 / (begun.elapsed_time(ended) / 1e3)


def copy_seconds() -> float:
    """Seconds of one copy of a batch."""
    if not ON_CUDA:
        return NBYTES / RATE
    host = torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device=DEVICE)
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (begun, ended):
        event.record()
        for _ in range(20):
            device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return begun.elapsed_time(ended) / 20e3


def main() -> None:
    if ON_CUDA and not torch.cuda.is_available():
        print("bench/gpu/bus.py: no CUDA device, nothing to measure")
        return
    copy_s, cycles = copy_seconds(), cycles_per_s() if ON_CUDA else 0.0
    floats, levels = torch.ones(NBYTES // 4), torch.ones(NBYTES // 4, dtype=torch.uint8)
    print(f"a copy of {NBYTES} bytes takes {1e3 * copy_s:.2f} ms, {NBYTES / copy_s / 1e9:.2f} GB/s", flush=True)
    for share in (0.1, 0.4, 2.0):  # of the time of a copy; the last one hides it
        pairs = []
        for number in range(ROUNDS):
            bus = SlowBus(RATE)

            def on_gpu(batch: torch.Tensor, share: float = share) -> None:
                torch.cuda._sleep(int(share * copy_s * cycles))
                batch[:1].sum().item()

            step: Step = on_gpu if ON_CUDA else bus.step(share * copy_s)
            before = run(floats, step, nullcontext() if ON_CUDA else on_bus(bus))
            after = run(levels, step, nullcontext() if ON_CUDA else on_bus(bus), transform=torch.Tensor.float)
            pairs.append((before, after.batches_per_s / before.batches_per_s))
            print(
                f"step of {share} copies, round {number}: {before.stage}, {before.batches_per_s:.0f} batches/s,"
                f" {before.figures}; predicted {before.gain:.2f}, measured {pairs[-1][1]:.2f}"
                f" ({after.stage}, {after.batches_per_s:.0f} batches/s, {after.figures})",
                flush=True,
            )
        measured, predicted = (
            statistics.median(values) for values in zip(*((m, b.gain) for b, m in pairs), strict=True)
        )
        stages = sorted({before.stage for before, _ in pairs})
        print(
            f"step of {share} copies: {', '.join(stages)}; predicted {predicted:.2f}, measured {measured:.2f},"
            f" error {predicted / measured - 1:+.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
