"""Epochs of a loader without workers that use the set-up of the epoch before."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, Dataset, RandomSampler, SequentialSampler, Subset, TensorDataset

import feedline as fl
from feedline.loader import plan as plan_module
from feedline.loader.building.builder import BatchBuilder


class Numbers(Dataset[Any]):
    """Samples with a random number each."""

    def __init__(self, length: int, factor: int = 1) -> None:
        self.length, self.factor = length, factor

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index * self.factor, torch.rand(())


def tensors(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length), torch.arange(2.0 * length).view(length, 2))


DATASETS: dict[str, Callable[[], Any]] = {
    "numbers": lambda: Numbers(7),
    "list": lambda: list(range(7)),
    "tensors": lambda: tensors(7),
    "subset": lambda: Subset(Numbers(9), [8, 1, 2, 3, 5]),
    "subset of tensors": lambda: Subset(tensors(9), [8, 1, 2, 3, 5]),
}


def grow(loader: Any) -> None:
    """One more sample."""
    dataset = loader.dataset
    if isinstance(dataset, list):
        dataset.append(70)
    elif isinstance(dataset, Subset):
        dataset.indices = [*dataset.indices, 4]
    elif isinstance(dataset, TensorDataset):
        dataset.tensors = tuple(torch.cat([each, each[:1]]) for each in dataset.tensors)
    else:
        dataset.length += 1


def change_content(loader: Any) -> None:
    """Other samples, of the same number."""
    dataset = loader.dataset
    if isinstance(dataset, list):
        dataset.reverse()
    elif isinstance(dataset, Subset):
        dataset.dataset = Numbers(9, factor=3)
    elif isinstance(dataset, TensorDataset):
        dataset.tensors = tuple(each.flip(0) for each in dataset.tensors)
    else:
        dataset.factor += 1


def require_gradients(loader: Any) -> None:
    if isinstance(loader.dataset, TensorDataset):
        loader.dataset.tensors[1].requires_grad_(True)


def read_many(loader: Any) -> None:
    """`__getitems__`, which draws in another order."""
    dataset = loader.dataset
    if isinstance(dataset, Numbers):
        dataset.__getitems__ = lambda indices: [dataset[index] for index in reversed(indices)]  # type: ignore[attr-defined]


def change_size(loader: Any) -> None:
    loader.batch_sampler.batch_size = 5 - loader.batch_sampler.batch_size


def drop_last(loader: Any) -> None:
    loader.batch_sampler.drop_last = not loader.batch_sampler.drop_last


def change_order(loader: Any) -> None:
    is_random = type(loader.batch_sampler.sampler) is RandomSampler
    loader.batch_sampler.sampler = (SequentialSampler if is_random else RandomSampler)(loader.dataset)


def change_collate(loader: Any) -> None:
    loader.collate_fn = lambda samples: (len(samples), repr(samples), torch.rand(()))


def give_generator(loader: Any) -> None:
    loader.generator = torch.Generator().manual_seed(5)


def leave_early(loader: Any) -> None:
    next(iter(loader))


def leave_and_keep(loader: Any) -> None:
    """An unfinished iteration that continues after the next epoch."""
    iterator = loader._kept = iter(loader)
    next(iterator)


CHANGES = [
    grow, change_content, require_gradients, read_many, change_size, drop_last, change_order, change_collate,
    give_generator, leave_early, leave_and_keep,
]  # fmt: skip


def seen(loader: Any) -> tuple[str, bool]:
    """All batches of an epoch as text, and whether one requires a gradient."""
    batches = list(loader)
    parts = [part for batch in batches if isinstance(batch, list) for part in batch]
    return repr(batches), any(isinstance(part, torch.Tensor) and part.requires_grad for part in parts)


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(DATASETS)),
    shuffle=st.booleans(),
    changes=st.lists(st.sampled_from([None, *CHANGES]), max_size=5),
)
def test_changes_between_epochs_take_effect_as_with_torch(name: str, shuffle: bool, changes: list[Any]) -> None:
    def run(make: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(1)
        loader = make(DATASETS[name](), batch_size=2, shuffle=shuffle)
        epochs = [seen(loader), seen(loader)]
        for change in changes:
            if change is not None:
                change(loader)
            epochs.append(seen(loader))
            epochs.append(repr(list(vars(loader).pop("_kept", []))))
        return [*epochs, torch.rand(())]

    assert run(fl.DataLoader) == run(DataLoader)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_used_set_up_resumes_exactly(seed: int | None, shuffle: bool) -> None:
    torch.manual_seed(2)
    loader = fl.DataLoader(Numbers(9), 2, shuffle=shuffle, seed=seed)
    for _ in range(3):
        list(loader)
    iterator = iter(loader)
    next(iterator)
    state = copy.deepcopy(loader.state_dict(random=True))
    rest = [repr(batch) for batch in iterator]
    epoch = loader.stats().epoch
    for _ in range(2):
        list(loader)
    loader.load_state_dict(state)
    assert [repr(batch) for batch in loader] == rest
    assert loader.stats().epoch == epoch == 3
    assert loader.stats().batches == 5 * 5 + 5 + 4


def test_further_epochs_choose_no_readers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    made = BatchBuilder.__init__
    monkeypatch.setattr(BatchBuilder, "__init__", lambda *given, **named: (built.append(1), made(*given, **named))[1])
    loader = fl.DataLoader(Numbers(4), 2)
    for _ in range(3):
        list(loader)
    next(iter(loader))
    list(loader)
    assert len(built) == 1
    loader.close()
    list(loader)
    assert len(built) == 2


class Around(Dataset[Any]):
    """Forwards what it lacks, such as `__getitems__`, to a dataset inside."""

    def __init__(self) -> None:
        self.replace(0)

    def replace(self, first: int) -> None:
        self.inner = Many(range(first, first + 4))

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


class Many(list[int]):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


def test_a_method_of_a_replaced_dataset_is_not_called_again() -> None:
    loader = fl.DataLoader(Around(), 2)
    for first in (0, 100, 200):
        loader.dataset.replace(first)  # type: ignore[attr-defined]
        assert torch.cat(list(loader)).tolist() == list(range(first, first + 4))


def test_an_interrupted_start_keeps_the_order_of_the_epoch_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    loader, other = (fl.DataLoader(list(range(8)), 2, shuffle=True) for _ in range(2))
    list(loader)
    iterator = iter(loader)
    seen = [next(iterator), next(iterator)]
    del iterator
    monkeypatch.setattr(plan_module, "draw_seed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    monkeypatch.undo()
    other.load_state_dict(loader.state_dict())
    assert sorted(torch.cat([*seen, *other]).tolist()) == list(range(8))


class Listed(Numbers):
    """Has a digest of its files."""

    listing_fingerprint = "a"


def test_files_that_have_changed_are_in_the_state() -> None:
    part = Listed(4)
    loader, other = (fl.DataLoader(ConcatDataset([part, Numbers(2)]), 2) for _ in range(2))
    list(loader)
    part.listing_fingerprint = "b"
    next(iter(loader))
    other.load_state_dict(loader.state_dict())
    assert len(list(other)) == 2


def test_threads_may_iterate_at_once() -> None:
    loader = fl.DataLoader(list(range(8)), 2, shuffle=True)

    def iterate(_: int) -> bool:
        return all(sorted(torch.cat(list(loader)).tolist()) == list(range(8)) for _ in range(200))

    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as threads:
            assert all(threads.map(iterate, range(3)))
    finally:
        sys.setswitchinterval(usual_s)
