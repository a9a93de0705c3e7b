"""One setting of a loader, and its measurement in rounds."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median
from time import perf_counter, sleep
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from feedline.cli.target import as_feedline, as_torch
from feedline.core import proc, tree
from feedline.core.histogram import add_counts
from feedline.errors import ArgumentError
from feedline.loader.dataloader import DataLoader
from feedline.loader.report.stats import StageTimes


class Setting(NamedTuple):
    """Arguments that a trial changes; None keeps the loader's own value."""

    num_workers: int | None = None
    worker_method: str | None = None
    prefetch_factor: int | None = None
    batch_size: int | None = None
    is_torch: bool = False
    """Measure torch's DataLoader in place of feedline's."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the setting that replace those of the user's loader."""
        changed = {name: value for name, value in zip(self._fields[:4], self[:4], strict=True) if value is not None}
        if self.num_workers == 0:
            changed.pop("prefetch_factor", None)
        return changed

    def describe(self) -> str:
        """Arguments as in code; "as is" for the user's own setting."""
        words = [f"{name}={value!r}" for name, value in self.arguments.items()]
        return ", ".join(words) or "as is"

    def make(self, loader: TorchDataLoader[Any]) -> TorchDataLoader[Any]:
        """A copy of the user's loader with this setting."""
        changes = self.arguments
        if self.is_torch:
            changes.pop("worker_method", None)
            return as_torch(loader, **changes)
        return as_feedline(loader, **changes)


class Round(NamedTuple):
    """Measurement of one part of an epoch."""

    samples: int
    """Samples received after the warm-up."""
    seconds: float
    """Wall time of these samples, steps included."""
    wait_s: float
    """Part of `seconds` spent waiting for batches."""
    nbytes: int
    """Bytes of the tensors and arrays in these samples."""
    first_s: float
    """Time to the first batch, start of workers included."""
    cpu_s: float
    """CPU time of all processes over the whole round."""
    delivered: int
    """Samples received in the whole round, over which `cpu_s` counts."""
    memory_nbytes: int
    waits_s: tuple[float, ...]
    """Wait for each batch after the warm-up."""
    stages: Mapping[str, StageTimes] = MappingProxyType({})
    """Times of the stages, warm-up included; torch's loader has none."""


FIGURES = (
    "samples_per_s", "mb_per_s", "wait_share", "first_batch_s", "wait_p50_s", "wait_p95_s", "wait_p99_s",
    "serialization_share", "cpu_s_per_1000", "memory_nbytes", "spread_share",
)  # fmt: skip
"""Names that thresholds use."""


_SENT = ("serialize", "receive")


_WORKED = ("fetch", "collate", *_SENT)


@dataclass(slots=True)
class Trial:
    """A setting with its rounds; `error` says why it cannot run."""

    setting: Setting
    rounds: list[Round] = field(default_factory=list)
    error: str = ""
    num_workers: int | None = None
    """Workers of the loader, once it was made."""

    @property
    def samples_per_s(self) -> float:
        """Median over the rounds; 0 without rounds."""
        return median(part.samples / part.seconds for part in self.rounds) if self.rounds else 0.0

    @property
    def spread(self) -> float:
        """Half of the range of the rounds' samples per second."""
        rates = [part.samples / part.seconds for part in self.rounds]
        return (max(rates) - min(rates)) / 2 if rates else 0.0

    def histograms(self) -> dict[str, tuple[int, ...]]:
        """Histogram of the times of each stage, over all rounds."""
        names = dict.fromkeys(stage for part in self.rounds for stage in part.stages)
        return {
            name: add_counts([part.stages[name].histogram for part in self.rounds if name in part.stages])
            for name in names
        }

    def serialization_share(self) -> float:
        """Share of the work on batches that is packing and unpacking."""
        worked, sent = (
            sum(part.stages[stage].total_s for part in self.rounds for stage in stages if stage in part.stages)
            for stages in (_WORKED, _SENT)
        )
        return sent / worked if worked else 0.0

    def figures(self) -> Mapping[str, float]:
        """Values of `FIGURES` by name; empty without rounds."""
        if not self.rounds:
            return {}
        waits = np.array([wait for part in self.rounds for wait in part.waits_s])
        seconds = sum(part.seconds for part in self.rounds)
        values = (
            self.samples_per_s,
            sum(part.nbytes for part in self.rounds) / seconds / 1e6,
            sum(part.wait_s for part in self.rounds) / seconds,
            median(part.first_s for part in self.rounds),
            *(float(np.quantile(waits, quantile)) for quantile in (0.5, 0.95, 0.99)),
            self.serialization_share(),
            1000 * sum(part.cpu_s for part in self.rounds) / max(sum(part.delivered for part in self.rounds), 1),
            max(part.memory_nbytes for part in self.rounds),
            self.spread / self.samples_per_s if self.samples_per_s else 0.0,
        )
        return dict(zip(FIGURES, values, strict=True))

    @property
    def label(self) -> str:
        """Name of the setting in tables."""
        return f"torch, {self.setting.describe()}" if self.setting.is_torch else self.setting.describe()

    def run(self, loader: TorchDataLoader[Any], seconds: float, step_s: float) -> None:
        """Add a round, or record the error of the loader.

        After an error, no further round is measured.
        """
        if self.error:
            return
        try:
            with warnings.catch_warnings():  # a sweep tries more workers than CPUs on purpose
                warnings.filterwarnings("ignore", "This DataLoader will create")
                made = self.setting.make(loader)
            self.num_workers = made.num_workers
            try:
                self.rounds.append(measure(made, seconds, step_s))
            finally:
                _close(made)
        except Exception as error:  # noqa: BLE001 - any error of user code ends this trial, and the others continue
            self.error = f"{type(error).__name__}: {error}".splitlines()[0]


def measure(
    loader: TorchDataLoader[Any], seconds: float, step_s: float, *, due_s: float = inf, over_s: float = inf
) -> Round:
    """Iterate for about `seconds` after the warm-up, over several epochs if needed.

    Batches arrive in clusters of one per worker. The first cluster is the warm-up, and only whole clusters count. Each
    step sleeps for `step_s`, like a loop that waits for a device. `due_s` and `over_s` are times of `perf_counter`. The
    round ends with the first whole cluster after `due_s`, or with the first batch after `over_s`, even if no whole
    cluster was measured: the round then has no samples. Raises `ArgumentError` if the loader has no batches.
    """
    pid, began, cpu = os.getpid(), perf_counter(), proc.tree_cpu_s(os.getpid())
    cluster = max(1, loader.num_workers)
    first_s, waits, samples, nbytes, delivered = 0.0, list[float](), 0, 0, 0
    start = wait_from = began
    counted, rows_of = (0, 0.0, 0, 0), _counter(loader)
    batches = _endless(loader)
    for number, batch in enumerate(batches):
        now = perf_counter()
        rows = rows_of(batch)
        delivered += rows
        if number == 0:
            first_s = now - began
        if number == cluster - 1:
            start = now
        elif number >= cluster:
            waits.append(now - wait_from)
            samples, nbytes = samples + rows, nbytes + sum(array.nbytes for array in tree.arrays(batch))
        ends_cluster = bool(waits) and len(waits) % cluster == 0
        if ends_cluster:
            counted = samples, now - start, nbytes, len(waits)
        if now >= over_s or (ends_cluster and (now - start >= seconds or now >= due_s)):
            break
        sleep(step_s)
        wait_from = perf_counter()
    used_s = proc.tree_cpu_s(pid) - cpu
    # Not in the loop: it takes a while, in which workers would build batches that cost the measurement nothing.
    memory = proc.tree_nbytes(pid)
    batches.close()  # only now may workers end
    stages = loader.stats().stages if isinstance(loader, DataLoader) else {}
    samples, elapsed_s, nbytes, number = counted
    kept = tuple(waits[:number])
    return Round(samples, elapsed_s, sum(kept), nbytes, first_s, used_s, delivered, memory, kept, stages)


def _endless(loader: TorchDataLoader[Any]) -> Generator[Any, None, None]:
    """Batches of epoch after epoch; `ArgumentError` if an epoch has none."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ArgumentError(
                "the loader has no batches: its dataset is empty, or drop_last=True drops its only batch"
            )


def _counter(loader: TorchDataLoader[Any]) -> Callable[[Any], int]:
    """Function that returns the number of samples of each batch.

    feedline's loader counts them. Torch's does not: there, the batch is searched for the batch size.
    """
    size = loader.batch_size
    if not isinstance(loader, DataLoader) or (size is None and loader.batch_sampler is None):
        return lambda batch: _rows(batch, size)
    totals = loader._fl_monitor.whole
    before = totals.samples

    def count(_: Any) -> int:
        nonlocal before
        rows, before = totals.samples - before, totals.samples
        return rows

    return count


def _rows(batch: Any, size: int | None) -> int:
    """Number of samples in a batch, `size` if it has that length."""
    lengths = list(_lengths(batch))
    return size if size in lengths else next(iter(lengths), 1)


def _lengths(batch: Any) -> Iterator[int]:
    """Possible numbers of samples in a batch, the likely ones first."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        if batch.ndim:
            yield int(batch.shape[0])
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _lengths(part)
    elif isinstance(batch, (list, tuple)) and batch:
        is_flat = isinstance(batch[0], (str, bytes, int, float))
        if is_flat:
            yield len(batch)
        elif isinstance(batch[0], (list, tuple)):  # of tuple(zip(*samples))
            yield len(batch[0])
        for part in () if is_flat else batch:
            yield from _lengths(part)
        yield len(batch)


def _close(loader: TorchDataLoader[Any]) -> None:
    close = getattr(loader, "close", None)
    if close is not None:
        close()
    else:
        loader._iterator = None  # ends persistent workers of torch
