"""Datasets, collate and init functions at module level, so that any start method can pass them on."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Counting(Dataset[int]):
    """`n` integers, each its own index."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.n:
            raise IndexError(f"{index} of {self.n}")
        return index

    def __len__(self) -> int:
        return self.n


class CountingStream(IterableDataset[int]):
    """`0 .. n - 1`, whole, from every worker."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))

    def __len__(self) -> int:
        return self.n


class UnevenStream(IterableDataset[int]):
    """Worker `i` yields `sizes[i]` numbers that name it: `1000 * i + k`."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return iter(range(1000 * info.id, 1000 * info.id + self.sizes[info.id]))

    def __len__(self) -> int:
        return sum(self.sizes)


class ShardedStream(IterableDataset[int]):
    """`0 .. n - 1` divided among the workers, as in torch's documentation."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.n)) if info is None else iter(range(info.id, self.n, info.num_workers))


class Failing(Dataset[Any]):
    """Raises `make_error()` at the indices `bad`."""

    def __init__(self, n: int, bad: set[int], make_error: Callable[[], BaseException]) -> None:
        self.n, self.bad, self.make_error = n, bad, make_error

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise self.make_error()
        return index

    def __len__(self) -> int:
        return self.n


class FailingStream(IterableDataset[Any]):
    """Raises as soon as its iterator is requested."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("stream cannot start")


class Strings(Dataset[Any]):
    """Pairs of a character and its index."""

    text = "12345"

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.text[index], index

    def __len__(self) -> int:
        return len(self.text)


class Dicts(Dataset[Any]):
    """Dictionaries that nest."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tensor": torch.full((4, 2), float(index)), "inner": {"number": index}}

    def __len__(self) -> int:
        return 4


Pair = namedtuple("Pair", ["positive", "negative"])  # noqa: PYI024 - both kinds of named tuple are tested


class Sample(NamedTuple):
    """A sample with named parts."""

    pair: Pair
    label: str
    tensor: torch.Tensor


class NamedTuples(Dataset[Any]):
    """Named tuples that nest."""

    def __getitem__(self, index: int) -> Sample:
        return Sample(Pair(index, -index), str(index), torch.full((3,), float(index)))

    def __len__(self) -> int:
        return 4


class CustomDict(dict[str, Any]):
    """A mapping type of the user's own."""


class CustomList(list[Any]):
    """A sequence type of the user's own."""


class Returning(Dataset[Any]):
    """The items of a list as samples."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


class Bulk(Dataset[Any]):
    """Takes a list of indices as one key: for samplers that yield lists with `batch_size=None`."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __getitem__(self, indices: list[int]) -> torch.Tensor:
        assert isinstance(indices, list)
        return torch.as_tensor(indices)

    def __len__(self) -> int:
        return self.n


class Many(Dataset[int]):
    """Has `__getitems__`, and refuses single indices."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __getitem__(self, index: int) -> int:
        raise AssertionError("asked one at a time although __getitems__ exists")

    def __getitems__(self, indices: list[int]) -> list[int]:
        assert all(type(index) is int for index in indices)
        return [index * 10 for index in indices]

    def __len__(self) -> int:
        return self.n


class Draws(Dataset[Any]):
    """The index and a draw from each of the three global generators: like the augmentation in most code."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    def __len__(self) -> int:
        return self.n


class IndexTypes(Dataset[str]):
    """Sample i is the name of the type of index i."""

    def __getitem__(self, index: object) -> str:
        return type(index).__name__

    def __len__(self) -> int:
        return 6


class ThreadCount(Dataset[int]):
    """The number of intra-op threads where the sample is made."""

    def __getitem__(self, index: int) -> int:
        return torch.get_num_threads()

    def __len__(self) -> int:
        return 2


class InnerLoader(Dataset[Any]):
    """Every sample is the result of another loader, which `__getitem__` creates."""

    def __init__(self, loader_class: type) -> None:
        self.loader_class = loader_class

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat(list(self.loader_class(Counting(index + 3), batch_size=2)))[: index + 1].sum()

    def __len__(self) -> int:
        return 4


class CustomBatch:
    """A batch type of the user's own, with the `pin_memory` hook that torch documents."""

    def __init__(self, samples: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.inputs = torch.stack([a for a, _ in samples])
        self.targets = torch.stack([b for _, b in samples])

    def pin_memory(self) -> CustomBatch:
        self.inputs, self.targets = self.inputs.pin_memory(), self.targets.pin_memory()
        return self


class Meeting:
    """A meeting point of `n` workers: none continues before all of them have arrived.

    It lives in the process of the test and holds only a path, so that every start method can pass it on.
    """

    def __init__(self, path: Path, n: int) -> None:
        self.path, self.n = str(path), n

    def attend(self) -> None:
        """Block until `n` callers from any processes are here."""
        with socket.socket(socket.AF_UNIX) as visitor:
            visitor.connect(self.path)
            visitor.recv(1)

    def host(self) -> threading.Thread:
        """Let one party of `n` callers in, on a thread of this process."""
        server = socket.socket(socket.AF_UNIX)
        server.bind(self.path)
        server.listen(self.n)
        thread = threading.Thread(target=self._serve, args=(server,), daemon=True)
        thread.start()
        return thread

    def _serve(self, server: socket.socket) -> None:
        with server:
            visitors = [server.accept()[0] for _ in range(self.n)]
        for visitor in visitors:
            visitor.close()


class WorkerFacts(Dataset[Any]):
    """The information that a worker has; none continues before all have arrived."""

    def __init__(self, meeting: Meeting, n: int) -> None:
        self.meeting, self.n = meeting, n

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.meeting.attend()
        info = get_worker_info()
        assert info is not None
        return {
            "id": info.id,
            "num_workers": info.num_workers,
            "pid": os.getpid(),
            "seed": info.seed,
            "initial_seed": torch.initial_seed(),
            "marked_by_init": getattr(info.dataset, "mark", None),
            "same_dataset": info.dataset is self,
        }

    def __len__(self) -> int:
        return self.n


class Gate:
    """A named pipe as a gate: `wait` blocks, without polling, until a process calls `open`."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def make(self) -> Gate:
        """Create the pipe."""
        os.mkfifo(self.path)
        return self

    def wait(self) -> None:
        """Block until `open` is called in any process."""
        with open(self.path, "rb"):
            pass

    def open(self) -> None:
        """Release the waiting caller (blocks until there is one)."""
        with open(self.path, "wb"):
            pass


class Gated(Dataset[int]):
    """`n` integers; the one at `slow` is returned only after the gate is opened."""

    def __init__(self, n: int, slow: int, gate: Gate) -> None:
        self.n, self.slow, self.gate = n, slow, gate

    def __getitem__(self, index: int) -> int:
        if index == self.slow:
            self.gate.wait()
        return index

    def __len__(self) -> int:
        return self.n


class Changing(Dataset[int]):
    """Samples are `offset` plus the index, which shows the copy of the dataset that a worker holds."""

    def __init__(self, n: int) -> None:
        self.n, self.offset = n, 0

    def __getitem__(self, index: int) -> int:
        return self.offset + index

    def __len__(self) -> int:
        return self.n


class TwoArguments(Exception):
    """An exception that cannot be made from one message."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"code {code}: {detail}")
        self.code, self.detail = code, detail


class KeywordOnly(Exception):
    """An exception whose constructor takes keywords only."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class WithMessage(Exception):
    """An exception whose `message` is of a class of its own, as in old libraries."""

    message = "unset"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message


def two_arguments() -> Exception:
    return TwoArguments(7, "odd constructor")


def keyword_only() -> Exception:
    return KeywordOnly(reason="odd constructor")


def with_message() -> Exception:
    return WithMessage(message="odd constructor")


def value_error() -> Exception:
    return ValueError("odd sample")


def key_error() -> Exception:
    return KeyError("missing\nkey")


def not_implemented() -> Exception:
    return NotImplementedError("no such sample")


def stop_iteration() -> Exception:
    return StopIteration("from a map-style dataset")


def collate_sum(samples: list[int]) -> int:
    """The sum of the samples: a plain number."""
    return sum(samples)


def collate_failing(samples: list[Any]) -> Any:
    raise ValueError(f"cannot collate {len(samples)} samples")


def collate_clone(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    return [sample.clone() for sample in samples]


def collate_packed(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    data = torch.stack([a for a, _ in samples], 1)
    return torch.nn.utils.rnn.pack_padded_sequence(data, torch.full((len(samples),), 3), enforce_sorted=False)


def init_seed(worker_id: int) -> None:
    torch.manual_seed(12345)


def init_mark(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker_id
    info.dataset.mark = worker_id  # type: ignore[attr-defined]


def init_failing(worker_id: int) -> None:
    raise RuntimeError("the init function cannot start")


class InitialSeed(Dataset[int]):
    """torch's seed where the sample is made."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __getitem__(self, index: int) -> int:
        return torch.initial_seed()

    def __len__(self) -> int:
        return self.n


class FirstDraw(Dataset[float]):
    """One draw from torch's global generator."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))

    def __len__(self) -> int:
        return self.n
