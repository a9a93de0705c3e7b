"""Reads mutated files of one format in forked children; none may crash, hang, or raise a foreign error.

Run by `test_hostile.py`, and for hours by `make fuzz`. Usage: hostile.py FORMAT... COUNT SEED, with formats of
`formats`, or "all". A count such as "60s" stands for seconds of the CPU for each format. Prints how many inputs of each
format were read and refused, by the class of the error. The files of an input that fails stay in
`hostile-FORMAT-SEED-NUMBER`. A run continues where the last one with this seed ended: `hostile-SEED.json` has the
number of the next input of each format.

An input is damaged in one of three places: a file of this machine, an object of a store, or a file that feedline keeps
about one of them. What can be read gives equal values in every way and each time: one by one, together, as a batch, and
from a new dataset in other memory.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import importlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import PIL.Image
import torch
from torch.utils.data import default_collate

from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead
from feedline.core.tensors import allocate_tensor
from feedline.errors import FeedlineError
from formats.format import Format, contents
from formats.places import Memory, small_pieces
from formats.repairs import repaired
from formats.structures import restructured

PER_CHILD = 1000
CPU_S = 5
PATIENCE_S = 120
"""Limits of one input. That of the clock is for waiting forever; a busy machine must not reach it."""

KEPT_FAILURES = 3
"""Failures of one kind whose files are kept."""

MEMORY_NBYTES = 4 << 30
"""Address space in addition to the parent's: the sizes that files claim must not be allocated."""

NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 31, 1 << 40, (1 << 63) - 1)


SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Folders in memory are created and removed many times faster; None for the usual place."""


def formats() -> dict[str, Format]:
    families = (
        "arrays",
        "files",
        "media",
        "outside",
        "records",
        "tables",
        "tars",
        "text",
        "variants",
        "table_variants",
    )
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
    act = rng.randrange(11)
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
        order: Any = rng.choice(["little", "little", "big"])
        if act < 8:
            value = rng.choice(NUMBERS)
        else:  # a length, an offset or a count is wrong by little, or that of something else
            at -= at % size
            before = int.from_bytes(data[at : at + size], order)
            start = rng.randrange(0, len(data), size)
            there = int.from_bytes(data[start : start + size], order)
            value = rng.choice([before + rng.choice([1, -1, 8, -8, 64]), before * 2, before // 2, -before, there])
        data[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, order)


def damaged(files: Mapping[str, bytes], rng: random.Random, repaired_share: float = 0.5) -> tuple[str, bytes]:
    """The name of one of the files, and its damaged content; in a share of the cases, with checksums that fit."""
    # By content: the names of what is kept depend on the time.
    by_content = sorted(files, key=lambda name: (len(files[name]), files[name]))
    victim, others = rng.choice(by_content), list(files.values())

    def change_bytes(data: bytes, rng: random.Random) -> bytes:
        return mutated(data, others, rng)

    data = files[victim]
    if rng.random() >= repaired_share:
        return victim, change_bytes(data, rng)
    changed = restructured(victim, data, change_bytes, rng) if rng.random() < 0.6 else change_bytes(data, rng)
    return victim, repaired(victim, changed)


def write(files: Mapping[str, bytes], folder: Path) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def read(form: Format, root: str, rng: random.Random, **store: Any) -> list[bytes]:
    """Digests of a few samples, read one by one and together; AssertionError if they differ."""
    dataset = form.open(root, **store)
    if not len(dataset):
        return [b"empty"]
    chosen = [0, len(dataset) - 1, *(rng.randrange(len(dataset)) for _ in range(6))]
    single = [dataset[index] for index in chosen[:3]]
    many = dataset.__getitems__(chosen)
    digests = list(map(digest, many))
    if not form.random:
        assert digests[:3] == list(map(digest, single)), "samples that are read together differ"
        check_batch(dataset, chosen, many)
    return digests


def check_batch(dataset: Any, chosen: list[int], samples: list[Any]) -> None:
    """Raise AssertionError if a batch is not the collated samples."""
    reader = reader_of(dataset)
    if reader is None:
        return
    try:
        collated = default_collate(samples)
    except Exception:  # noqa: BLE001 - damaged samples may have shapes of all kinds
        return
    batch = reader(BatchRead(np.array(chosen, np.int64), allocate_tensor))
    assert digest(batch) == digest(collated), "a batch differs from its samples"


def digest(value: Any) -> bytes:
    """A digest of all bits and types in a value."""
    found = hashlib.blake2b(digest_size=16)
    _feed(value, found.update)
    return found.digest()


def _feed(value: Any, update: Any) -> None:
    update(type(value).__name__.encode())
    if isinstance(value, Mapping):
        for key, each in value.items():
            update(repr(key).encode())
            _feed(each, update)
    elif isinstance(value, (list, tuple)):
        update(b"%d" % len(value))
        for each in value:
            _feed(each, update)
    elif isinstance(value, torch.Tensor):
        update(f"{value.dtype} {tuple(value.shape)}".encode())
        if value.numel():
            update(value.reshape(-1).contiguous().view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        update(f"{value.dtype} {value.shape}".encode())
        update(value.tobytes())
    elif isinstance(value, PIL.Image.Image):
        update(f"{value.mode} {value.size}".encode())
        update(value.tobytes())
    else:
        update(repr(value).encode("utf-8", "surrogatepass"))


_LIBC, _M_PERTURB = ctypes.CDLL(None), -6


def read_again(form: Format, root: str, seed: int, fill: int, store: Mapping[str, Any]) -> list[bytes]:
    """`read` with known states of the global generators, and new memory that is filled with a byte."""
    _LIBC.mallopt(_M_PERTURB, fill)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - transforms may draw from it
    return read(form, root, random.Random(seed), **store)


class Corpus:
    """The files of a format on this machine and in a store, what feedline keeps about them, and some samples."""

    def __init__(self, form: Format, root: Path) -> None:
        self.form, self.memory, self.folder = form, Memory(), root / "corpus"
        self.folder.mkdir()
        form.write(self.folder)
        self.files = contents(self.folder)
        self.memory.fill({f"corpus/{name}": data for name, data in self.files.items()})
        self.has_indexes = False
        self.roots = {"file": str(self.folder), "store": f"{self.memory.root}/corpus"}
        self.expected, self.kept = dict[str, list[bytes]](), dict[str, dict[str, bytes]]()
        for place in [*self.roots]:
            try:
                self.expected[place] = self.read(place, root / place)
                if place == "file" and len(contents(self.folder)) > len(self.files):
                    self.has_indexes = True
                    self.read(place, root / place)
            except (FeedlineError, OSError):
                if place == "file":
                    raise
                del self.roots[place]  # the library of this format reads files only
            else:
                self.kept[place] = {name: data for name, data in contents(root / place).items() if data}

    def read(self, place: str, kept: Path) -> list[bytes]:
        """Read the undamaged files, with what is kept in a folder."""
        os.environ["XDG_CACHE_HOME"] = str(kept / "user")
        store = {"cache": small_pieces(kept)} if place == "store" else {"index_dir": kept} if self.has_indexes else {}
        return read_again(self.form, self.roots[place], 0, 0, store)

    def attempt(self, folder: Path, key: str) -> str:
        """Read one damaged input, whose files are in a folder."""
        rng = random.Random(key)
        place = rng.choice([*self.roots])
        is_kept = bool(self.kept[place]) and rng.random() < 0.2
        try:
            return self._attempt_kept(place, folder, rng) if is_kept else self._attempt_files(place, folder, rng)
        except Exception as error:  # noqa: BLE001 - foreign errors are the findings
            return f"FOREIGN, {describe(error)}"

    def _attempt_files(self, place: str, folder: Path, rng: random.Random) -> str:
        name, data = damaged(self.files, rng)
        files, root, store = {**self.files, name: data}, str(folder), dict[str, Any]()
        if place == "file":
            write(files, folder)
        else:
            write({name: data}, folder)  # to look at it after a failure
            root = f"{self.memory.root}/damaged"
            self.memory.fill({f"damaged/{name}": data for name, data in files.items()})
            if self.form.needs_cache or rng.random() < 0.3:
                store = {"cache": small_pieces(folder)}
        seed = rng.randrange(1 << 30)
        try:
            first = read_again(self.form, root, seed, 0x55, store)
        except FeedlineError as error:
            return f"refused, {type(error).__name__}"
        assert first == read_again(self.form, root, seed, 0xAA, store), "the same files give other values"
        return "read"

    def _attempt_kept(self, place: str, folder: Path, rng: random.Random) -> str:
        """Damage of an index or of a cached piece is noticed and repaired: its checksums do not fit."""
        name, data = damaged(self.kept[place], rng, repaired_share=0)
        write({**self.kept[place], name: data}, folder)
        try:
            found = self.read(place, folder)
        except FeedlineError as error:
            raise AssertionError(f"damage of the kept {name} is not repaired: {error}") from error
        finally:
            os.environ["XDG_CACHE_HOME"] = str(folder.parent / "cache")
        assert found == self.expected[place], f"damage of the kept {name} changes samples"
        return "read, kept"


def describe(error: Exception) -> str:
    """An error, and the last line of feedline that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/feedline/" in frame.filename] or frames
    at = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
    return f"{type(error).__name__} at {at}: {str(error)[:200]}".replace("\n", " ")


def work(corpus: Corpus, seed: int, numbers: range, root: Path, pipe: int) -> NoReturn:
    """Try the inputs of one child, and report the outcome of each."""
    nbytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    faulthandler.enable(os.dup(2))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # some libraries write there for each input
    for number in numbers:
        signal.alarm(PATIENCE_S)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        outcome = corpus.attempt(root / str(number), f"{seed} {number}")
        os.write(pipe, outcome.encode(errors="replace") + b"\n")
        if not outcome.startswith("FOREIGN"):
            shutil.rmtree(root / str(number), ignore_errors=True)  # a thread may still write an index there
    os._exit(0)


def run_child(corpus: Corpus, seed: int, numbers: range, root: Path) -> tuple[list[str], int]:
    """The outcomes, and how the child ended."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        work(corpus, seed, numbers, root, writer)
    os.close(writer)
    with os.fdopen(reader, errors="replace") as lines:
        outcomes = [line.rstrip() for line in lines]
    return outcomes, os.waitpid(pid, 0)[1]


class Run:
    """Inputs of one format; `root` is an empty folder."""

    def __init__(self, name: str, seed: int, root: Path) -> None:
        self.name, self.seed, self.root = name, seed, root
        self.counts, self.failures = Counter[str](), Counter[str]()
        torch.set_num_threads(1)  # a fork has no threads of OpenMP, and would wait for them
        self.corpus = Corpus(formats()[name], root)  # also loads the libraries, once

    def inputs(self, numbers: range) -> int:
        """Try some of these inputs; the number of the next one."""
        outcomes, status = run_child(self.corpus, self.seed, numbers, self.root)
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
        """Report a failure, and keep the files of the first few of a kind."""
        kind = why.partition(":")[0]
        self.failures[kind] += 1
        folder = self.root / str(number)
        if self.failures[kind] > KEPT_FAILURES:
            shutil.rmtree(folder, ignore_errors=True)
            return
        print(f"{self.name}, seed {self.seed}, input {number}: {why}", file=sys.stderr, flush=True)
        shutil.move(folder, f"hostile-{self.name}-{self.seed}-{number}")


def main(name: str, amount: str, seed: int) -> int:
    """The number of failures among so many inputs, or in so many seconds of the CPU, such as "60s"."""
    state, start = Path(f"hostile-{seed}.json"), _children_s()
    count, seconds = (1 << 60, float(amount[:-1])) if amount.endswith("s") else (int(amount), float("inf"))
    first = following = _done(state).get(name, 0)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
        run, share = Run(name, seed, Path(scratch)), 100
        while following < first + count and _children_s() < start + seconds:
            following = run.inputs(range(following, min(first + count, following + share)))
            share = PER_CHILD if seconds == float("inf") else 100
    state.write_text(json.dumps({**_done(state), name: following}))
    print(f"{name}, {following - first} inputs in {_children_s() - start:.0f} s:", dict(run.counts), flush=True)
    return run.failures.total()


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _done(state: Path) -> dict[str, int]:
    """The number of the next input of each format."""
    done: dict[str, int] = json.loads(state.read_text()) if state.exists() else {}
    return done


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable()
    *chosen, count, number = sys.argv[1:]
    failed = sum(main(name, count, int(number)) for name in (formats() if chosen == ["all"] else chosen))
    if failed:
        raise SystemExit(f"{failed} inputs fail")
