"""States of datasets, their iterators, samplers and their iterators, as torchdata's StatefulDataLoader knows them."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diagonals import at_night, diagonal
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler, get_worker_info

import feedline as fl

LENGTH = 17
CREWS = [(2, False), (3, True)]


class Augmented(Dataset[Any]):
    """Keeps the generator of its augmentation in its state."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, float]:
        if index < 0:
            raise ValueError("a bad sample")
        return index, torch.rand((), generator=self.generator).item()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def shards(total: int = 3 * LENGTH) -> list[int]:
    info = get_worker_info()
    return list(range(total)) if info is None else list(range(info.id, total, info.num_workers))


class ShardIterator:
    """Draws from its own generator, which is its state."""

    def __init__(self) -> None:
        self.samples, self.at = shards(), 0
        self.generator = np.random.default_rng(2)

    def __iter__(self) -> ShardIterator:
        return self

    def __next__(self) -> tuple[int, float]:
        if self.at == len(self.samples):
            raise StopIteration
        self.at += 1
        return self.samples[self.at - 1], self.generator.random()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.generator.bit_generator.state = state["generator"]


class OfIterators(IterableDataset[Any]):
    """Its iterators have a state, it has none."""

    def __iter__(self) -> Iterator[Any]:
        return ShardIterator()


class OfBoth(OfIterators):
    """Has a state in addition to that of its iterators; `times` counts how often it was opened."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Iterator[Any]:
        self.times += 1
        return ShardIterator()

    def state_dict(self) -> dict[str, Any]:
        return {"times": self.times}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.times = state["times"] - 1


class Itself(ShardIterator, IterableDataset[Any]):  # type: ignore[misc]
    """The dataset is its own iterator; it begins again when it has ended."""

    def __init__(self) -> None:
        self.samples, self.at = list[int](), 0
        self.generator = np.random.default_rng(2)

    def __iter__(self) -> Itself:
        self.samples = shards()
        self.at = 0 if self.at == len(self.samples) else self.at
        return self


class Curriculum(Sampler[int]):
    """The training loop changes it, so its order cannot be repeated from the start of the epoch."""

    def __init__(self) -> None:
        self.step, self.at = 1, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 2 * LENGTH:
            self.at += 1
            yield self.at * self.step % LENGTH
        self.at = 0

    def __len__(self) -> int:
        return 2 * LENGTH

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.at = state["step"], state["at"]


class CountingIterator:
    def __init__(self, order: list[int]) -> None:
        self.order, self.at = order, 0

    def __iter__(self) -> CountingIterator:
        return self

    def __next__(self) -> int:
        if self.at == len(self.order):
            raise StopIteration
        self.at += 1
        return self.order[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"order": torch.tensor(self.order), "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = state["order"].tolist(), state["at"]


class Unrepeatable(Sampler[int]):
    """Shuffles by a source that nothing can repeat; its iterators hold the order in their state."""

    turns = 0

    def __iter__(self) -> Iterator[int]:
        Unrepeatable.turns += 1  # like os.urandom: all instances begin differently
        return CountingIterator(np.random.default_rng(Unrepeatable.turns).permutation(LENGTH).tolist())

    def __len__(self) -> int:
        return LENGTH


class Yielded(DistributedSampler[Any]):
    """torchdata's StatefulDistributedSampler, in short: its state is a number of items to skip."""

    def __init__(self) -> None:
        super().__init__(Augmented(), num_replicas=2, rank=1, shuffle=True)
        self.yielded = self.skipped = 0

    def __iter__(self) -> Iterator[int]:
        self.yielded, self.skipped = self.skipped, 0
        for index in islice(list(super().__iter__()), self.yielded, None):
            self.yielded += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["yielded"]


@dataclass(frozen=True)
class Case:
    """How a loader is made."""

    dataset: Callable[[], Any]
    sampler: Callable[[], Any] = lambda: None
    kind: str = "sampler"

    def loader(self, workers: int = 0, persistent: bool = False, **more: Any) -> Any:
        """A new loader, as in a new process."""
        torch.manual_seed(0)
        sampler = {} if self.sampler() is None else {self.kind: self.sampler()}
        size = {} if self.kind == "batch_sampler" else {"batch_size": 2}
        return fl.DataLoader(
            self.dataset(), num_workers=workers, persistent_workers=persistent, snapshot_every_n_steps=3,
            **size, **sampler, **more,
        )  # fmt: skip


CASES = {
    "map dataset": Case(Augmented),
    "map dataset, shuffled": Case(Augmented, lambda: RandomSampler(range(LENGTH))),
    "iterators": Case(OfIterators),
    "dataset and iterators": Case(OfBoth),
    "dataset as iterator": Case(Itself),
    "sampler": Case(Augmented, Curriculum),
    "sampler's iterator": Case(Augmented, Unrepeatable),
    "distributed sampler": Case(Augmented, Yielded),
    "generator": Case(Augmented, lambda: RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(4))),
}


def every(*left_out: str, half: int) -> Any:
    """All cases but those left out: inline, and with worker processes, which are new and persistent ones in turn.

    Processes run one `half` of the cases, two and two, and the others at night.
    """
    cases = [(name, case) for name, case in CASES.items() if name not in left_out]
    crews = [(case, (0, False)) for case in cases] + diagonal(cases, CREWS)
    late = {len(cases) + at for at in range(len(cases)) if at // 2 % 2 != half}
    return pytest.mark.parametrize(("case", "workers", "persistent"), [
        pytest.param(
            case, workers, persistent,
            id=f"{name}, {workers}{', persistent' * persistent}",
            marks=[pytest.mark.nightly] if at in late else [],
        )
        for at, ((name, case), (workers, persistent)) in enumerate(crews)
    ])  # fmt: skip


def plain(batch: Any) -> Any:
    return [part.tolist() for part in batch]


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every(half=0)
def test_a_cut_epoch_continues(case: Case, workers: int, persistent: bool) -> None:
    with case.loader(workers, persistent) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
        rest = [plain(batch) for batch in batches]
    with case.loader(workers, persistent) as again:
        again.load_state_dict(through_a_file(json.loads(json.dumps(state))))
        assert [plain(batch) for batch in again] == rest


# Their orders come from torch's global generator and a counter, which no state of the loader includes.
@every("map dataset, shuffled", "sampler's iterator", half=1)
def test_the_epoch_after_a_cut_one_is_the_same(case: Case, workers: int, persistent: bool) -> None:
    with case.loader(workers, persistent) as loader:
        for _ in zip(range(3), loader, strict=False):
            pass
        state = loader.state_dict()
        loader.load_state_dict(state)
        list(loader)
        following = [plain(batch) for batch in loader]
    with case.loader(workers, persistent) as again:
        again.load_state_dict(state)
        list(again)
        assert [plain(batch) for batch in again] == following


@every("map dataset, shuffled", "sampler's iterator", "dataset as iterator", half=0)
def test_a_finished_epoch_is_followed_by_the_next(case: Case, workers: int, persistent: bool) -> None:
    with case.loader(workers, persistent) as loader:
        list(loader)
        state = loader.state_dict()
        following = [plain(batch) for batch in loader]
    with case.loader(workers, persistent) as again:
        again.load_state_dict(through_a_file(state))
        assert [plain(batch) for batch in again] == following


# A training loop moves the first, and the second has no state before its first sample.
@every("sampler", "dataset as iterator", half=1)
def test_loading_on_the_way_rewinds_the_same_loader(case: Case, workers: int, persistent: bool) -> None:
    with case.loader(workers, persistent) as loader:
        batches = iter(loader)
        start = loader.state_dict()
        seen = [plain(batch) for batch in islice(batches, 4)]
        middle = loader.state_dict()
        loader.load_state_dict(middle)
        loader.load_state_dict(middle)
        seen += [plain(batch) for batch in loader]
        loader.load_state_dict(start)
        assert [plain(batch) for batch in loader] == seen


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_from_before_the_first_iteration_starts_the_first_epoch(workers: int) -> None:
    case = CASES["map dataset"]
    with case.loader(workers) as loader, case.loader(workers) as again:
        again.load_state_dict(loader.state_dict())
        assert [plain(batch) for batch in again] == [plain(batch) for batch in loader]


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 3)])
def test_another_number_of_workers_keeps_the_order_of_a_stateful_dataset(before: int, after: int) -> None:
    case = CASES["generator"]
    with case.loader(before) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
        rest = [plain(batch)[0] for batch in batches]
    with case.loader(after) as again:
        again.load_state_dict(state)
        assert [plain(batch)[0] for batch in again] == rest


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_loaded_after_an_error_continues_with_the_failed_batch(workers: int) -> None:
    dataset = Augmented()
    with fl.DataLoader(dataset, 1, sampler=[0, 1, -1, 3], num_workers=workers) as loader:
        batches = iter(loader)
        next(batches)
        next(batches)
        with pytest.raises(ValueError, match="a bad sample"):
            next(batches)
        state = loader.state_dict()
    assert state["position"] == 2
    with fl.DataLoader(dataset, 1, sampler=[0, 1, -1, 3], num_workers=workers, on_error="skip") as again:
        again.load_state_dict(state)
        assert [plain(batch)[0] for batch in again] == [[3]]


class Odd:
    """A value for pickle, but not for JSON."""

    def __init__(self, value: int) -> None:
        self.value = value


class OfOddStates(Augmented):
    """Has a state of a class of its own."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, index: int) -> int:
        self.count += 1
        return self.count

    def state_dict(self) -> Any:
        return {"odd": Odd(self.count), "tensor": torch.tensor([self.count], dtype=torch.bfloat16)}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["odd"].value
        assert int(state["tensor"]) == self.count


@pytest.mark.parametrize("workers", [0, 2])
def test_states_that_only_pickle_holds_survive_a_file(workers: int) -> None:
    with fl.DataLoader(OfOddStates(), 2, num_workers=workers) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        file = io.BytesIO()
        torch.save(loader.state_dict(), file)
        rest = [batch.tolist() for batch in batches]
    file.seek(0)
    with fl.DataLoader(OfOddStates(), 2, num_workers=workers) as again:
        again.load_state_dict(torch.load(file, weights_only=False))
        assert [batch.tolist() for batch in again] == rest


class OfAnotherProtocol(Augmented):
    """As litdata's datasets, whose state counts workers."""

    def state_dict(self, num_samples_yielded: int, num_workers: int) -> dict[str, Any]:  # type: ignore[override]
        raise AssertionError


def test_a_state_dict_with_arguments_is_another_protocol() -> None:
    loader = fl.DataLoader(OfAnotherProtocol(), 2)
    next(iter(loader))
    assert loader.state_dict()["position"] == 2


def test_a_state_of_torchdata_is_refused_by_name() -> None:
    theirs = {"_sampler_iter_yielded": 3, "_num_yielded": 3, "_iterator_finished": False}
    with pytest.raises(fl.errors.StateError, match="torchdata"):
        fl.DataLoader([1, 2, 3]).load_state_dict(theirs)


class Deadly(Augmented):
    """Kills its worker at one sample, the first time only."""

    def __init__(self, once: Path) -> None:
        super().__init__()
        self.once = once

    def __getitem__(self, index: int) -> tuple[int, float]:
        if index == 11 and get_worker_info() is not None and not self.once.exists():
            self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("resumed", [False, True])
def test_the_state_of_a_dataset_outlives_a_killed_worker(tmp_path: Path, resumed: bool) -> None:
    def received(*, dies: bool) -> list[Any]:
        once = tmp_path / "once"
        once.unlink(missing_ok=True) if dies else once.touch()
        state, seen = None, []
        for cut in (2, None) if resumed else (None,):
            with fl.DataLoader(Deadly(once), 2, num_workers=2) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                seen += [plain(batch) for batch in islice(loader, cut)]
                state = loader.state_dict()
        assert once.exists()
        return seen

    assert received(dies=True) == received(dies=False)


class Threaded(Augmented):
    traits = fl.Traits(thread_safe=True)

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item()


def test_threads_do_not_take_up_the_generators_of_processes() -> None:
    with fl.DataLoader(Threaded(), 2, num_workers=2, worker_method="process") as loader:
        next(iter(loader))
        state = loader.state_dict()
    with fl.DataLoader(Threaded(), 2, num_workers=2, worker_method="thread") as again:
        again.load_state_dict(state)
        torch.manual_seed(5)
        batches = [plain(batch) for batch in again]
    drawn = sorted(value for _, values in batches for value in values)
    torch.manual_seed(5)
    assert drawn == sorted(torch.rand(()).item() for _ in range(LENGTH - 2))


class Lasting(IterableDataset[int]):
    """Six samples for each worker and epoch; the count of all epochs is in its state."""

    def __init__(self) -> None:
        self.total = self.at = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        while self.at < 6:
            self.at, self.total = self.at + 1, self.total + 1
            yield (0 if info is None else info.id * 1_000) + self.total
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total, self.at = state["total"], state["at"]


# Two samples give full batches, four a short one.
@pytest.mark.parametrize(("workers", "size"), [(0, 2), (0, 4), (2, 4), *at_night((2, 2))])
def test_a_dataset_that_workers_keep_continues_in_later_epochs(workers: int, size: int) -> None:
    def loader() -> Any:
        return fl.DataLoader(Lasting(), size, num_workers=workers, persistent_workers=workers > 0)

    def epoch(loader: Any) -> list[list[int]]:
        return [batch.tolist() for batch in loader]

    with loader() as whole:
        epochs = [epoch(whole) for _ in range(4)]
    with loader() as cut, loader() as again:
        assert epoch(cut) == epochs[0]
        states = [cut.state_dict(), *(through_a_file(cut.state_dict()) for _ in cut)]
        for number, state in enumerate(states):  # also before some workers have delivered any batch
            again.load_state_dict(state)
            assert [epoch(again), epoch(again)] == [epochs[1][number:], epochs[2]]
