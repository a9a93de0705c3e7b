"""A format from outside: IDX files, the arrays in which MNIST is published."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import feedline as fl

DTYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


class IDX(torch.utils.data.Dataset[torch.Tensor]):
    """Rows of IDX files as tensors.

    A file begins with two zeros, a type, the number of dimensions, and their sizes as big-endian integers.
    """

    traits = fl.Traits(thread_safe=True, is_random=False)

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        arrays = [_mapped(path) for path in self.paths]
        self.shard_sizes = np.array([len(array) for array in arrays], np.int64)
        self._ends = np.cumsum(self.shard_sizes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> torch.Tensor:
        shard, row = self._place(index)
        # Mapping a file is cheap, and an open map would not survive the way to a worker process.
        value = _mapped(self.paths[shard])[row]
        return torch.from_numpy(np.array(value, value.dtype.newbyteorder("=")))

    def address(self, index: int) -> tuple[str, str]:
        """File and place of a sample, for error messages."""
        shard, row = self._place(index)
        return self.paths[shard], f"row {row}"

    def _place(self, index: int) -> tuple[int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} rows")
        index %= len(self)
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - int(self._ends[shard] - self.shard_sizes[shard])


def _mapped(path: str) -> Any:
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    dtype, start = DTYPES.get(data[2]), 4 + 4 * data[3]
    shape = np.frombuffer(data[4:start], ">i4").tolist() if data[:2] == b"\0\0" and dtype else []
    if dtype is None or not shape or len(data) != start + int(np.prod(shape)) * np.dtype(dtype).itemsize:
        raise fl.errors.SampleError(f"{path} is not a whole IDX file: download it again")
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def count_rows(paths: Sequence[str]) -> fl.datasets.ShardSummary:
    """Samples and bytes of each file, for `feedline inspect`."""
    return fl.datasets.ShardSummary(
        "file", IDX(paths).shard_sizes.tolist(), [Path(path).stat().st_size for path in paths]
    )


FORMAT = fl.datasets.Format(
    "IDX", ("idx_dataset:IDX",), "IDX files", ("IDX(paths)",), names=("*-ubyte", "*.idx"), summarize=count_rows
)

fl.datasets.register_format("idx", FORMAT)
