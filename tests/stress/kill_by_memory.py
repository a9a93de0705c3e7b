"""A training process in the memory cgroup named by its argument, one of whose samples uses it up; run by a test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import feedline


class Greedy:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        hoard = []
        while index == 5:
            hoard.append(bytearray(8 << 20))
        return index


if __name__ == "__main__":
    Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
    for _ in feedline.DataLoader(Greedy(), 4, num_workers=2):
        pass
