"""Reads mutated files of one format in forked children; none may crash, hang, or raise a foreign error.

Run by `test_hostile.py`, and for hours by `make fuzz`. Usage: hostile.py FORMAT COUNT SEED, with a format of the suite,
or "all". Prints how many inputs of each format were read and refused, by the class of the error. The files of an input
that fails stay in `hostile-FORMAT-SEED-NUMBER`.
"""

from __future__ import annotations

import importlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from feedline.errors import FeedlineError
from formats.format import Format, contents
from formats.repairs import repaired

PER_CHILD = 1000
PATIENCE_S = 60
MEMORY_NBYTES = 4 << 30
"""Address space in addition to the parent's: the sizes that files claim must not be allocated."""

NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 31, 1 << 40, (1 << 63) - 1)


SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Folders in memory are created and removed many times faster; None for the usual place."""


def formats() -> dict[str, Format]:
    families = ("arrays", "files", "outside", "records", "tables", "tars", "text")
    tables: list[dict[str, Format]] = [importlib.import_module(f"formats.{family}").FORMATS for family in families]
    return {name: form for table in tables for name, form in table.items()}


def mutated(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """A few changes, many of them at the beginning or end, where headers and footers are."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 12])):
        if not changed:
            break
        at = rng.choice([rng.randrange(len(changed)), min(rng.randrange(400), len(changed) - 1)])
        at = rng.choice([at, at, max(0, len(changed) - 1 - rng.randrange(400))])
        change(changed, at, others, rng)
    return bytes(changed)


def change(data: bytearray, at: int, others: list[bytes], rng: random.Random) -> None:
    act = rng.randrange(8)
    if act == 0:
        data[at] = rng.randrange(256)
    elif act == 1:
        data[at] ^= 1 << rng.randrange(8)
    elif act == 2:
        del data[at : at + rng.choice([1, 2, 8, 64])]
    elif act == 3:
        data[at:at] = rng.randbytes(rng.choice([1, 4, 8]))
    elif act == 4:
        del data[at:]
    elif act == 5:
        other = rng.choice(others)
        start = rng.randrange(len(other) + 1)
        piece = other[start : start + rng.randrange(64)]
        data[at : at + len(piece)] = piece
    else:
        size = rng.choice([1, 2, 4, 8])
        value = rng.choice(NUMBERS) % (1 << 8 * size)
        data[at : at + size] = value.to_bytes(size, rng.choice(["little", "little", "big"]))


def place(files: Mapping[str, bytes], folder: Path, rng: random.Random) -> None:
    """The corpus with one file changed, half of the time with checksums that fit."""
    victim, repairs = rng.choice(sorted(files)), rng.random() < 0.5
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == victim:
            data = mutated(data, list(files.values()), rng)
            data = repaired(name, data) if repairs else data
        path.write_bytes(data)


def read(form: Format, folder: Path, rng: random.Random) -> None:
    """A few samples, one by one and together."""
    dataset = form.open(str(folder))
    if not len(dataset):
        return
    chosen = [0, len(dataset) - 1, *(rng.randrange(len(dataset)) for _ in range(6))]
    for index in chosen[:3]:
        dataset[index]
    dataset.__getitems__(chosen)


def attempt(form: Format, folder: Path, rng: random.Random) -> str:
    try:
        read(form, folder, rng)
    except FeedlineError as error:
        return f"refused, {type(error).__name__}"
    except Exception as error:  # noqa: BLE001 - foreign errors are the findings
        return f"FOREIGN, {type(error).__name__}: {str(error)[:200]}"
    return "read"


def work(form: Format, files: Mapping[str, bytes], seed: int, numbers: range, root: Path, pipe: int) -> NoReturn:
    """Try the inputs of one child, and report the outcome of each."""
    nbytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    for number in numbers:
        signal.alarm(PATIENCE_S)
        rng, folder = random.Random(f"{seed} {number}"), root / str(number)
        place(files, folder, rng)
        outcome = attempt(form, folder, rng)
        os.write(pipe, outcome.replace("\n", " ").encode() + b"\n")
        if not outcome.startswith("FOREIGN"):
            shutil.rmtree(folder, ignore_errors=True)  # a thread may still write an index there
    os._exit(0)


def run_child(form: Format, files: Mapping[str, bytes], seed: int, numbers: range, root: Path) -> tuple[list[str], int]:
    """The outcomes, and how the child ended."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        work(form, files, seed, numbers, root, writer)
    os.close(writer)
    with os.fdopen(reader, errors="replace") as lines:
        outcomes = [line.rstrip() for line in lines]
    return outcomes, os.waitpid(pid, 0)[1]


class Run:
    """Inputs of one format; `root` is an empty folder."""

    def __init__(self, name: str, seed: int, root: Path) -> None:
        self.name, self.form, self.seed, self.root = name, formats()[name], seed, root
        self.counts, self.failures = Counter[str](), 0
        (root / "corpus").mkdir()
        self.form.write(root / "corpus")
        self.files = contents(root / "corpus")
        read(self.form, root / "corpus", random.Random(0))  # loads the libraries, once

    def inputs(self, numbers: range) -> int:
        """Try some of these inputs; the number of the next one."""
        outcomes, status = run_child(self.form, self.files, self.seed, numbers, self.root)
        for number, outcome in zip(numbers, outcomes, strict=False):
            self.counts[outcome.partition(":")[0]] += 1
            if outcome.startswith("FOREIGN"):
                self.fail(number, outcome)
        following = numbers.start + len(outcomes)
        shutil.rmtree(self.root / "cache", ignore_errors=True)
        if not status:
            return following
        self.fail(following, f"ends with status {status}")
        return following + 1

    def fail(self, number: int, why: str) -> None:
        self.failures += 1
        print(f"{self.name}, seed {self.seed}, input {number}: {why}", file=sys.stderr)
        shutil.move(self.root / str(number), f"hostile-{self.name}-{self.seed}-{number}")


def main(name: str, count: int, seed: int) -> int:
    """The number of failures."""
    start = time.monotonic()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
        run, done = Run(name, seed, Path(scratch)), 0
        while done < count:
            done = run.inputs(range(done, min(count, done + PER_CHILD)))
    print(f"{name}, {count} inputs in {time.monotonic() - start:.0f} s:", dict(run.counts), flush=True)
    return run.failures


if __name__ == "__main__":
    chosen = list(formats()) if sys.argv[1] == "all" else [sys.argv[1]]
    failed = sum(main(name, int(sys.argv[2]), int(sys.argv[3])) for name in chosen)
    if failed:
        raise SystemExit(f"{failed} inputs fail")
