"""Time of `feedline doctor` for the machine, and of `feedline lint` for trees of code, start of Python included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

ROUNDS = 3

TREES = ("utils", "distributed")
"""Folders of torch: the second one has several times the code of its repository of examples."""


def main() -> None:
    """Print a line for each command."""
    print(f"doctor (machine part): {seconds_of('doctor'):.1f} s")
    for name in TREES:
        tree = Path(torch.__file__).parent / name
        files = list(tree.rglob("*.py"))
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        took_s = seconds_of("lint", str(tree))
        print(f"lint of torch.{name}, {len(files):,} files with {lines:,} lines: {took_s:.1f} s")


def seconds_of(*arguments: str) -> float:
    """Median wall time of a command."""
    program = f"import sys; sys.argv = ['feedline', *{arguments!r}]; from feedline.cli import main; main()"
    times = []
    for _ in range(ROUNDS):
        began = perf_counter()
        subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
        )
        times.append(perf_counter() - began)
    return median(times)


if __name__ == "__main__":
    main()
