"""Loaders that frameworks build, patched classes, and ranks that all read the same data."""

from __future__ import annotations

import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from diagonals import at_night
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, SequentialSampler, Subset

import feedline as fl
from feedline.loader import checks

TORCH = torch.utils.data.DataLoader
NUMBERS: Any = list(range(12))


class Drawing(torch.utils.data.Dataset[Any]):
    """Draws by position; one sample cannot be read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == 3:
            raise ValueError("sample 3 is broken")
        return index, int(fl.sample_rng().integers(1 << 30))


class Shard(BatchSampler):
    """Every second batch of a batch sampler, with the attributes of Accelerate's class."""

    def __init__(self, batch_sampler: Any, process_index: int) -> None:
        self.batch_sampler, self.process_index = batch_sampler, process_index

    def __iter__(self) -> Iterator[list[int]]:
        return (batch for number, batch in enumerate(self.batch_sampler) if number % 2 == self.process_index)


def rows(loader: Any) -> list[Any]:
    return [tuple(row) for batch in loader for row in zip(*(part.tolist() for part in batch), strict=True)]


def test_the_patch_reaches_every_module_and_is_undone() -> None:
    module = types.ModuleType("a_users_module")
    module.Loader = TORCH  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        with fl.patch_torch():
            assert torch.utils.data.DataLoader is torch.utils.data.dataloader.DataLoader is fl.DataLoader
            assert module.Loader is fl.DataLoader
            again = fl.patch_torch()
            again.undo()
            assert torch.utils.data.DataLoader is fl.DataLoader
        assert torch.utils.data.DataLoader is torch.utils.data.dataloader.DataLoader is module.Loader is TORCH
    finally:
        del sys.modules[module.__name__]


def test_a_loader_that_exists_already_is_reported() -> None:
    """Accelerate would return it unprepared."""
    loader = torch.utils.data.DataLoader(NUMBERS)
    with pytest.warns(UserWarning, match=r"loaders of torch's class exist already.*prepare"), fl.patch_torch():
        assert not isinstance(loader, torch.utils.data.DataLoader)


def test_a_patch_stays_until_it_is_undone() -> None:
    patch = fl.patch_torch()
    try:
        assert [batch.tolist() for batch in torch.utils.data.DataLoader(NUMBERS, 6)] == [NUMBERS[:6], NUMBERS[6:]]
    finally:
        patch.undo()
        patch.undo()
    assert torch.utils.data.DataLoader is TORCH


def test_a_subclass_that_calls_no_constructor_of_ours_keeps_its_own_ways() -> None:
    """As torchdata's StatefulDataLoader, if it is imported after the patch."""

    class Own(fl.DataLoader[Any]):
        def __init__(self, dataset: Any) -> None:
            TORCH.__init__(self, dataset, 5)

        def _get_iterator(self) -> Any:
            return iter(["its own"])

    loader = Own(NUMBERS)
    assert len(loader) == 3
    assert list(loader) == ["its own"]
    assert vars(loader).keys() == loader.__getstate__().keys()


def test_a_loader_built_from_the_batch_sampler_of_another_takes_over_its_arguments() -> None:
    first = fl.DataLoader(Drawing(), 2, shuffle=True, seed=4, on_error="skip", recovery=fl.Recovery(1))
    built = fl.DataLoader(Drawing(), batch_sampler=first.batch_sampler, num_workers=0)
    assert (built.seed, built.on_error, built.recovery) == (4, "skip", fl.Recovery(1))
    assert rows(built) == rows(first)
    plain = fl.DataLoader(Drawing(), batch_sampler=first.batch_sampler, seed=7)
    assert (plain.seed, plain.on_error) == (7, "raise")


def test_the_shares_of_a_rebuilt_loader_draw_different_numbers() -> None:
    first = fl.DataLoader(Drawing(), 2, seed=4, on_error="skip")
    shares = [fl.DataLoader(Drawing(), batch_sampler=Shard(first.batch_sampler, rank)) for rank in (0, 1)]
    seen = [row for share in shares for row in rows(share)]
    assert sorted(index for index, _ in seen) == [index for index in range(12) if index != 3]
    assert len({drawn for _, drawn in seen}) == 11


def rebuild_in(module_name: str, loader_class: Any) -> Any:
    """A function of a module of this name, which reads a loader's arguments as Accelerate does."""
    module = types.ModuleType(module_name)
    module.DataLoader = loader_class  # type: ignore[attr-defined]
    code = (
        "def prepare(loader):\n    return {k: getattr(loader, k) for k in ['num_workers', 'multiprocessing_context']}"
    )
    exec(code, vars(module))
    return module.prepare  # type: ignore[attr-defined]


def test_a_framework_that_is_about_to_build_torchs_loader_is_named() -> None:
    loader = fl.DataLoader(NUMBERS, 2, seed=4, on_error="skip", device="cpu")
    with pytest.warns(
        UserWarning, match=r"accelerate.*seed=4, on_error='skip', device='cpu', exact resume.*patch_torch"
    ):
        rebuild_in("accelerate.data_loader", TORCH)(loader)
    rebuild_in("accelerate.data_loader", fl.DataLoader)(loader)
    rebuild_in("a_users_module", TORCH)(loader)


@pytest.mark.parametrize("version", ["", "v2."])
def test_what_ray_train_takes_apart_or_reads_ahead_is_named(version: str) -> None:
    """`tests/stress/test_ray_train.py` runs the real package."""
    ray = types.ModuleType(f"ray.train.{version}torch.train_loop_utils")
    exec("def read(loader):\n    loader.worker_init_fn\n\n\ndef begin(loader):\n    return iter(loader)", vars(ray))
    loader = fl.DataLoader(NUMBERS, 2, seed=4, distributed=(0, 2))
    with pytest.warns(
        UserWarning, match=r"ray.*seed=4, distributed=.*exact resume.*prepare_data_loader out.*get_device"
    ):
        ray.read(loader)  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="one batch ahead of the loop.*prepare_data_loader out"):
        ray.begin(loader)  # type: ignore[attr-defined]
    assert fl.DataLoader(NUMBERS, 2, num_workers=1, worker_init_fn=print).worker_init_fn is print


def loaded_by_lightning(loader: Any, state: Any) -> None:
    module = types.ModuleType("lightning.pytorch.utilities.combined_loader")
    exec("def load(loader, state):\n    loader.load_state_dict(state)", vars(module))
    module.load(loader, state)  # type: ignore[attr-defined]


STEPS: dict[str, dict[str, Any]] = {
    "seed": {"shuffle": True, "seed": 1},
    "drop_last": {"drop_last": True, "batch_size": 5},
    "generator": {"sampler": torch.utils.data.RandomSampler(NUMBERS, generator=torch.Generator().manual_seed(1))},
    "batches": {"batch_sampler": [[0, 1], [2], [3, 4]], "batch_size": 1},
}


@pytest.mark.parametrize("name", STEPS)
def test_lightning_continues_with_the_next_epoch_after_the_last_step_of_one(name: str) -> None:
    arguments = {"batch_size": 4, **STEPS[name]}
    loader = fl.DataLoader(NUMBERS, **arguments)
    for _ in zip(range(len(loader)), loader, strict=False):
        pass
    state = loader.state_dict()
    again, by_hand = fl.DataLoader(NUMBERS, **arguments), fl.DataLoader(NUMBERS, **arguments)
    by_hand.load_state_dict(state)
    assert list(by_hand) == []
    following = [batch.tolist() for batch in by_hand]
    loaded_by_lightning(again, state)
    assert [batch.tolist() for batch in again] == following


def test_lightning_continues_within_an_epoch() -> None:
    loader = fl.DataLoader(NUMBERS, 4)
    next(iter(loader))
    again = fl.DataLoader(NUMBERS, 4)
    loaded_by_lightning(again, loader.state_dict())
    assert [batch.tolist() for batch in again] == [[4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_set_after_iter_counts_until_the_first_batch(workers: int) -> None:
    loader = fl.DataLoader(NUMBERS, 4, shuffle=True, seed=1, num_workers=workers)
    whole = [[batch.tolist() for batch in loader] for _ in range(4)]
    sampler: Any = loader.sampler
    with fl.DataLoader(NUMBERS, 4, sampler=sampler, seed=1, num_workers=workers) as again:
        sampler.begin(0)
        batches = iter(again)
        sampler.set_epoch(2)
        assert [batch.tolist() for batch in batches] == whole[2]
        assert [batch.tolist() for batch in again] == whole[3]
        sampler.begin(0)
        sampler.set_epoch(1)
        batches = iter(again)
        sampler.set_epoch(1)
        assert [batch.tolist() for batch in batches] == whole[1]
        assert [batch.tolist() for batch in again] == whole[2]
    loader.close()


class Repeating(fl.DataLoader[Any]):
    """Like Ultralytics: one endless iterator, made by torch's hook."""

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        object.__setattr__(self, "batch_sampler", Endless(self.batch_sampler))
        self.iterator = self._get_iterator()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:
        return (next(self.iterator) for _ in range(len(self)))


class Endless:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_iterator_of_a_subclass_is_ours(workers: int, no_debris: Any) -> None:
    loader = Repeating(Drawing(), 4, on_error="skip", seed=1, num_workers=workers)
    epochs = [[index for index, _ in rows(loader)] for _ in range(2)]
    assert epochs == [[index for index in range(12) if index != 3]] * 2
    assert loader.state_dict()["position"] == 6
    assert loader.state_dict()["skipped"]["count"] == 2
    loader.iterator._shutdown_workers()


class Saveable(fl.DataLoader[Any]):
    """As `SaveableDataLoader` of SpeechBrain 1.1.2, whose checkpoints hold a number of batches.

    SpeechBrain lets the constructor of torch's iterators skip that number.
    """

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self._speechbrain_recovery_skip_to: int | None = None
        self._speechbrain_iterator: Any = None

    def __iter__(self) -> Iterator[Any]:
        self._speechbrain_iterator = super().__iter__()
        return self._speechbrain_iterator  # type: ignore[no-any-return]

    def save(self) -> int:
        return self._speechbrain_iterator._num_yielded  # type: ignore[no-any-return]


SAVEABLE: dict[str, dict[str, Any]] = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "seeded": {"shuffle": True, "seed": 1},
    "single": {"batch_size": None},
    "batches": {"batch_sampler": [[3, 1], [2], [4, 0], [5]], "batch_size": 1},
}


# Which batches are skipped is decided before they reach a worker.
@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *((name, 0) for name in SAVEABLE),
        *(("shuffled", 2), ("single", 2)),
        *at_night(("in order", 2), ("seeded", 2), ("batches", 2)),
    ],
)
def test_a_checkpoint_of_speechbrain_skips_the_batches_before_it(name: str, workers: int) -> None:
    arguments = {"batch_size": 2, "num_workers": workers, **SAVEABLE[name]}

    def epochs(loader: Any, number: int) -> list[Any]:
        torch.manual_seed(2)
        return [[torch.as_tensor(batch).tolist() for batch in loader] for _ in range(number)]

    first, second = epochs(Saveable(NUMBERS, **arguments), 2)
    loader = Saveable(NUMBERS, **arguments)
    for _ in zip(range(3), loader, strict=False):
        pass
    assert loader.save() == 3
    again = Saveable(NUMBERS, **arguments)
    again._speechbrain_recovery_skip_to = loader.save()
    assert epochs(again, 2) == [first[3:], second]
    assert again.save() == len(second)
    assert again._speechbrain_recovery_skip_to is None


def test_a_checkpoint_of_speechbrain_with_more_batches_than_the_epoch_has_ends_it() -> None:
    loader = Saveable(NUMBERS, 4)
    loader._speechbrain_recovery_skip_to = 9
    assert [len(list(loader)) for _ in range(2)] == [0, 3]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_are_shut_down_under_torchs_name(persistent: bool, no_debris: Any) -> None:
    loader = fl.DataLoader(NUMBERS, 2, num_workers=1, persistent_workers=persistent)
    iterator: Any = iter(loader)
    next(iterator)
    workers = iterator._workers
    iterator._shutdown_workers()
    assert not any(worker.is_alive() for worker in workers)
    assert len(list(loader)) == 6
    loader.close()


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    checks._warn_of_equal_data.cache_clear()
    yield
    checks._warn_of_equal_data.cache_clear()


@pytest.mark.usefixtures("two_ranks")
def test_ranks_that_all_read_every_partition_are_reported() -> None:
    stream = fl.streams.from_items([range(3), range(3, 6)], iter)
    with pytest.warns(UserWarning, match=r"one of 2 ranks.*all of SampleStream.*distributed='auto' to share"):
        assert len(list(fl.DataLoader(stream, None))) == 6


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("arguments", [{}, {"shuffle": True}, {"shuffle": True, "seed": 1}])
def test_ranks_that_all_read_everything_are_reported_once(arguments: dict[str, Any]) -> None:
    loader = fl.DataLoader(NUMBERS, 2, **arguments)
    with pytest.warns(UserWarning, match=r"one of 2 ranks.*distributed='auto'.*DistributedSampler"):
        list(loader)
    list(loader)
    list(fl.DataLoader(NUMBERS, 2))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


SHARED: dict[str, Any] = {
    "distributed": lambda: fl.DataLoader(NUMBERS, 2, distributed="auto"),
    "on purpose": lambda: fl.DataLoader(NUMBERS, 2, distributed=(0, 1)),
    "sampler": lambda: fl.DataLoader(NUMBERS, 2, sampler=SequentialSampler(NUMBERS)),
    "distributed sampler": lambda: fl.DataLoader(NUMBERS, 2, sampler=DistributedSampler(NUMBERS, 2, 1)),
    "batch sampler": lambda: fl.DataLoader(NUMBERS, batch_sampler=[[0], [1]]),
    "stream": lambda: fl.DataLoader(Stream(), 2),
    "partitions": lambda: fl.DataLoader(fl.streams.from_items([range(3), range(3)], iter), 2, distributed="auto"),
    "subset": lambda: fl.DataLoader(Subset(NUMBERS, range(1, 12, 2)), 2),
}


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("name", SHARED)
def test_ranks_that_share_the_data_are_left_in_peace(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(SHARED[name]())


def test_importing_feedline_is_silent_and_collects_no_garbage_of_torch() -> None:
    """In a fresh interpreter; patching torch is silent, too."""
    script = """
import gc
import torch.utils.data

before = gc.get_stats()[2]["collections"]
import feedline

print(gc.get_stats()[2]["collections"] - before, gc.isenabled())
feedline.patch_torch()
assert torch.utils.data.DataLoader is feedline.DataLoader
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["0", "True"]
