"""A format from outside: Avro files, read record by record with fastavro."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import torch

import feedline as fl


class Avro(torch.utils.data.Dataset[dict[str, Any]]):
    """Records of Avro files as dicts.

    Records lie in compressed blocks. The constructor scans the blocks of each file once; a sample reads its block.
    """

    traits = fl.Traits(thread_safe=True, is_random=False)

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        self._blocks: list[tuple[str, int]] = []
        counts, sizes = [0], []
        for path in self.paths:
            with open(path, "rb") as file:
                blocks = [(block.offset, block.num_records) for block in fastavro.block_reader(file)]
            self._blocks += [(path, offset) for offset, _ in blocks]
            counts += [count for _, count in blocks]
            sizes.append(sum(count for _, count in blocks))
        self._ends = np.cumsum(counts)
        self.shard_sizes = np.array(sizes, np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} Avro records")
        index %= len(self)
        block = int(np.searchsorted(self._ends, index, side="right")) - 1
        path, offset = self._blocks[block]
        with open(path, "rb") as file:
            for candidate in fastavro.block_reader(file):
                if candidate.offset == offset:
                    record: Any = list(candidate)[index - int(self._ends[block])]
                    return dict(record)
        raise LookupError(f"{path} has no block at byte {offset} any more: create the dataset again")

    def address(self, index: int) -> tuple[str, str]:
        """File and place of a sample, for error messages."""
        block = int(np.searchsorted(self._ends, index % len(self), side="right")) - 1
        path, offset = self._blocks[block]
        return path, f"record {index % len(self) - int(self._ends[block])} of the block at byte {offset}"


def count_records(paths: Sequence[str]) -> fl.datasets.ShardSummary:
    """Samples and bytes of each file, for `feedline inspect`."""
    return fl.datasets.ShardSummary(
        "file", Avro(paths).shard_sizes.tolist(), [Path(path).stat().st_size for path in paths]
    )


FORMAT = fl.datasets.Format(
    "Avro", ("avro_dataset:Avro",), "Avro files", ("Avro(paths)",), names=("*.avro",), summarize=count_records
)

fl.datasets.register_format("avro", FORMAT)
