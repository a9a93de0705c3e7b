"""Checks of a dataset's files, threads and random numbers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import DataLoader as TorchDataLoader

from feedline.cli.doctor.findings import Finding, Severity
from feedline.cli.doctor.search import attributes
from feedline.cli.plain import plain
from feedline.core.cgroups import Cgroup
from feedline.core.proc import meminfo
from feedline.core.rng_globals import restoring_globals
from feedline.datasets.formats import FORMATS, register_installed
from feedline.loader.dataloader import DataLoader
from feedline.loader.report.stats import seconds, size
from feedline.samplers import BatchIndexSampler, IndexSampler
from feedline.testing import difference
from feedline.workers.registry import POOLS

EXAMINING_S = 0.5
"""Seconds after which no further file is examined or read."""


PROBED_NBYTES = 32 << 20
"""Bytes that are read to measure a disk."""


SLOW_EPOCH_S = 60.0
"""Seconds of reading from which an epoch from disk is worth a note."""


THREADS = 4


PROBED_SAMPLES = 8


class NamedFiles(NamedTuple):
    """Local files of a dataset."""

    paths: list[Path]
    """Paths of the examined files."""
    nbytes: int
    """Size of all files, estimated from the examined ones."""
    number: int

    @classmethod
    def of(cls, dataset: Any) -> NamedFiles:
        """Files named by attributes of the dataset, singly or in lists."""
        names = list(dict.fromkeys(_names(dataset)))
        sizes, paths, deadline = list[int](), list[Path](), monotonic() + EXAMINING_S
        step = max(1, len(names) // 2000)
        for path in map(Path, names[::step]):
            if monotonic() > deadline:
                break
            if _is_file(path):
                paths.append(path)
                sizes.append(path.stat().st_size)
        number = len(names) if len(paths) > 1 else len(paths)
        return cls(paths, int(np.mean(sizes) * number) if sizes else 0, number)


def _names(dataset: Any) -> Iterator[str]:
    for _, value in attributes(dataset):
        values = value if isinstance(value, (list, tuple)) else [value]
        first = values[0] if values else None
        if isinstance(first, (tuple, list)) and first:  # torchvision: (path, label)
            values = [each[0] for each in values if isinstance(each, (tuple, list)) and each]
            first = values[0]
        if isinstance(first, (str, os.PathLike)) and os.sep in os.fspath(first) and _is_file(first):
            yield from (os.fspath(each) for each in values if isinstance(each, (str, os.PathLike)))


def _is_file(name: str | os.PathLike[str]) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # such as a text that is too long for a name
        return False


def files(dataset: Any) -> Iterator[Finding]:
    """Data size compared with free memory, disk rate, and missing indexes."""
    found = NamedFiles.of(dataset)
    if not found.paths:
        return
    left = Cgroup.of_process().memory_available()
    free = min(meminfo()["MemAvailable"], sys.maxsize if left is None else left)
    text = f"{found.number:,} files, {size(found.nbytes)}"
    if found.nbytes <= 0.8 * free:
        yield Finding("files", f"{text}: they fit into the page cache")
    else:
        rate = disk_rate(found.paths)
        epoch_s = found.nbytes / rate if rate else 0.0
        speed = f"; {size(int(rate))}/s: {seconds(epoch_s)} to read them all" if rate else ""
        severity = Severity.NOTE if epoch_s >= SLOW_EPOCH_S or not rate else Severity.GOOD
        remedy = "smaller files (feedline pack --shorter-side), a faster disk, or more memory"
        evidence = f"{text}, and {size(free)} of memory free: every epoch reads the disk{speed}"
        yield Finding("files", evidence, severity, remedy if severity is Severity.NOTE else "")
    yield from _unindexed(found.paths)


def keys_of(loader: TorchDataLoader[Any], most: int) -> list[Any]:
    """Arguments for `dataset[...]` of at most `most` samples, evenly spread.

    A sampler of the user's is asked if its keys are no integers, or if the dataset has no length.
    """
    batches: Any = None if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler
    order = loader.sampler if batches is None else batches
    length = length_of(loader.dataset)
    if not isinstance(order, SequentialSampler | RandomSampler | IndexSampler | BatchIndexSampler):
        drawn: Iterable[Any] = order if batches is None else chain.from_iterable(batches)
        keys = list(islice(drawn, most))
        if length is None or not all(hasattr(key, "__index__") for key in keys):
            return keys
    return list(map(int, np.linspace(0, (length or 0) - 1, min(most, length or 0), dtype=np.int64)))


def length_of(dataset: Any) -> int | None:
    """The length of a dataset; None without one."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def disk_rate(paths: list[Path]) -> float:
    """Reading rate without the page cache, in bytes per second.

    0 if less than 1 MiB could be read.
    """
    began, nbytes = monotonic(), 0
    for path in paths:
        try:
            with path.open("rb", buffering=0) as file:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                nbytes += len(file.read(PROBED_NBYTES - nbytes))
        except OSError:
            continue
        if nbytes >= PROBED_NBYTES or monotonic() - began > EXAMINING_S:
            break
    elapsed_s = monotonic() - began
    return nbytes / elapsed_s if nbytes >= 1 << 20 else 0.0


def _unindexed(paths: list[Path]) -> Iterator[Finding]:
    register_installed()
    for row in FORMATS.values():
        shards = [path for path in paths if row.index_suffix and row.matches(path.name)]
        missing = [path for path in shards if not path.with_name(path.name + row.index_suffix).exists()]
        if missing:
            evidence = f"{len(missing)} of {len(shards)} {row.label} have no index next to them ({missing[0].name})"
            yield Finding("index", evidence, Severity.NOTE, "feedline index writes them: random access without a scan")


def threads(loader: TorchDataLoader[Any]) -> Iterator[Finding]:
    """Samples read by several threads at once, compared with one thread."""
    dataset: Any = loader.dataset
    indices = [] if isinstance(dataset, IterableDataset) else keys_of(loader, PROBED_SAMPLES)
    if not indices:
        return

    def unsafe(evidence: str) -> Finding:
        if uses_threads(loader):
            return Finding("threads", evidence, Severity.BAD, "pass worker_method='process', or leave it out")
        return Finding("threads", evidence, Severity.NOTE, "keep worker_method='process' for it")

    with restoring_globals():
        alone = [dataset[index] for index in indices]
        if not all(map(is_equal, alone, [dataset[index] for index in indices])):
            return  # samples are random: no two reads are equal
        try:
            with ThreadPoolExecutor(THREADS) as pool:
                together = list(pool.map(dataset.__getitem__, indices * THREADS))
        except Exception as error:  # noqa: BLE001 - a dataset that is not thread-safe may raise anything
            yield unsafe(f"reading by {THREADS} threads raised {type(error).__name__}: {error}")
            return
    if all(map(is_equal, alone * THREADS, together)):
        yield Finding("threads", "read the same samples")
    else:
        yield unsafe(f"{THREADS} threads at once got other samples than one thread: the dataset is not thread-safe")


def uses_threads(loader: TorchDataLoader[Any]) -> bool:
    """True if the workers of the loader are threads by its `worker_method`."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return False
    kind = POOLS.get(loader.worker_method)  # None for "auto"
    return kind is not None and kind.shares_rng


class _RepeatedSample(Dataset[Any]):
    """One sample, many times."""

    def __init__(self, dataset: Any, key: Any) -> None:
        self.dataset, self.key = dataset, key

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.key]


def random_numbers(loader: TorchDataLoader[Any]) -> Iterator[Finding]:
    """Random samples of two workers, compared with each other."""
    dataset: Any = loader.dataset
    keys = [] if isinstance(dataset, IterableDataset) else keys_of(loader, 1)
    if not keys:
        return
    with restoring_globals():
        if is_equal(dataset[keys[0]], dataset[keys[0]]):
            return
        arguments: dict[str, Any] = {"worker_init_fn": loader.worker_init_fn, "accelerate": False}
        arguments |= {"num_workers": 2, "worker_method": "process", "collate_fn": _first}
        same = DataLoader(_RepeatedSample(dataset, keys[0]), 1, **arguments)
        with same:
            first, second = (sample for _, sample in zip(range(2), same, strict=False))
    if is_equal(first, second):
        remedy = "draw from torch, random or feedline.sample_rng(), and let worker_init_fn add the worker's number"
        yield Finding("random", "two workers draw the same random numbers", Severity.BAD, remedy)
    else:
        yield Finding("random", "workers draw numbers of their own")


def _first(samples: list[Any]) -> Any:
    return samples[0]


def is_equal(left: Any, right: Any) -> bool:
    """True if two samples or batches are equal in all their parts.

    NaN equals NaN. `plain` states how objects are compared.
    """
    return difference(plain(left), plain(right)) is None
