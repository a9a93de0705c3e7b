"""Plan of how a loader reads its dataset, and where; for `DataLoader.plan()`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from torch.utils.data import IterableDataset

from feedline.collate.batch_reads import READERS, reader_of
from feedline.collate.default import is_standard, registered_for_plain_values
from feedline.core.dataset import has_read_batch
from feedline.core.recognition import Recognition
from feedline.core.wrapping import columns, wrap
from feedline.loader.building.builder import BatchBuilder
from feedline.loader.building.foreign import recognize
from feedline.loader.pools import builder_of, kind_for_stream, kind_of
from feedline.workers.base import PoolKind
from feedline.workers.registry import AUTO, INLINE, POOLS, PROCESSES

_WHOLE_BATCHES = "whole batches are read without Python per sample"
_INTO_BATCH = "the kernels write samples into the batch"
_SINGLE = "the kernels make samples, which are then collated"
_ORIGINAL = "samples are read by the dataset's own code"
_IN_WORKERS = "; in the workers, the kernels decode JPEGs for Pillow and execute torchvision's Compose on them"


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """Plan of how a loader reads its dataset, and where.

    `print(loader.plan())` shows it. `accelerated` is True if feedline reads data in place of the dataset's own code.
    `summary` says how batches are made, `workers` where. `recognition` has the name of the dataset, the reason why its
    own code runs, its transforms with their reasons, and the same for the parts of torch's wrappers.
    """

    accelerated: bool
    summary: str
    recognition: Recognition
    workers: str = ""

    def __str__(self) -> str:
        places = [f"workers: {self.workers}"] if self.workers else []
        lines = [*_describe(self.recognition, ""), f"batches: {self.summary}", *places]
        return "\n".join(piece for line in lines for piece in _wrapped(line, columns(otherwise=_UNWRAPPED_COLUMNS)))


_UNWRAPPED_COLUMNS = 1 << 16
"""Width outside of terminals: lines stay whole, so that they can be searched."""


def _wrapped(line: str, width: int) -> list[str]:
    """`line`, wrapped to `width`; continuation lines are indented further."""
    indent = line[: len(line) - len(line.lstrip())]
    return wrap(line, width, subsequent_indent=indent + "    ")


def read_plan(loader: Any) -> ReadingPlan:
    """The plan of a loader, for the present state of its dataset."""
    builder = builder_of(loader)
    partitions = loader.num_workers if isinstance(loader.dataset, IterableDataset) else 0
    kind = kind_for_stream(kind_of(loader, builder, measure=False), builder, partitions)
    return replace(_plan_reading(loader, builder, kind), workers=_describe_workers(loader, kind))


def _describe_workers(loader: Any, kind: PoolKind) -> str:
    if kind is INLINE:
        cannot = f" (the pool {loader._fl.worker_method!r} cannot host a dataset that shards itself)" * (
            loader.num_workers > 0
        )
        return f"none; batches are built in the training process{cannot}"
    name = next((name for name, each in POOLS.items() if each is kind), "")
    number = f"{loader.num_workers}{' to begin with' * loader._fl_adapts}"
    return f"{number}, in the pool {name!r}{', chosen by feedline' * (loader._fl.worker_method == AUTO)}"


def _plan_reading(loader: Any, builder: Any, kind: PoolKind) -> ReadingPlan:
    dataset = loader.dataset
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        return ReadingPlan(False, _ORIGINAL, Recognition(name, None, "an iterable dataset has an iterator of its own"))
    if builder.vectorized:
        return ReadingPlan(True, _WHOLE_BATCHES, Recognition(name, None))
    if not loader._fl.accelerate:
        return ReadingPlan(False, _ORIGINAL, Recognition(name, None, "accelerate=False"))
    if builder.collate_fn is None and (registered := _bypassed_functions(dataset)):
        reason = f"a collate function that is registered with torch, for {registered}, may apply to its samples"
        return ReadingPlan(False, _ORIGINAL, Recognition(name, None, reason))
    found = recognize(dataset)
    if found.reader is not None and isinstance(builder, BatchBuilder) and builder.accelerated:
        is_direct = builder.collate_fn is None and builder.batched and builder.action == "raise"
        return ReadingPlan(True, _INTO_BATCH if is_direct else _SINGLE, found)
    if reader_of(dataset) is not None:
        reason = "whole batches need the default collate_fn, and a batch_size"
        return ReadingPlan(False, _ORIGINAL, Recognition(name, None, reason))
    return ReadingPlan(False, _ORIGINAL + _IN_WORKERS * _accelerates_pillow(kind), found)


def _bypassed_functions(dataset: Any) -> str:
    """Registered types that keep whole batches from being read; empty without them."""
    has_reader = type(dataset) in READERS or has_read_batch(dataset)
    return ", ".join(registered_for_plain_values()) if has_reader and not is_standard() else ""


def _accelerates_pillow(kind: PoolKind) -> bool:
    """True if Pillow is in use, and worker processes can accelerate it."""
    if "PIL.Image" not in sys.modules or kind is not PROCESSES:
        return False
    obstacle: str | None = import_module(_PILLOW).pillow_obstacle()
    return obstacle is None


_PILLOW = "feedline.images.accelerate"
"""Imported late, as the workers do: most loaders do without the image kernels."""


def _describe(found: Recognition, indent: str) -> Iterator[str]:
    verdict = "read by its own code" if found.reason else "read by feedline"
    yield f"{indent}{found.name}: {verdict}{f' ({found.reason})' * bool(found.reason)}"
    yield from (f"{indent}  {finding}" for finding in found.findings)
    for part in found.parts:
        yield from _describe(part, indent + "  ")
