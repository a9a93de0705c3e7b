"""Samples that are copied into the batch as soon as they are read."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import feedline as fl
from feedline.testing import difference

SHAPE = (3, 100, 100)


class Tensors(torch.utils.data.Dataset[Any]):
    """Samples of one large tensor and a number; `keep` returns what the dataset retains, and changes later."""

    def __init__(self, keep: Callable[[tuple[torch.Tensor, int]], Any] | None = None) -> None:
        self.keep, self.kept = keep, []  # type: list[Any]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        for each in self.kept:
            each.fill(-1) if hasattr(each, "fill") else each.fill_(-1)
        sample = torch.full(SHAPE, float(index)), index
        if self.keep is not None:
            self.kept.append(self.keep(sample))
        return sample


class Kept(Tensors):
    """Returns the tuples that it retains."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sample = super().__getitem__(index)
        self.kept.append(sample[0])
        return sample


class OneBuffer(Tensors):
    """Returns the same tensor each time."""

    buffer = torch.zeros(SHAPE)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.buffer.fill_(index), index


class Watched(Tensors):
    """Counts the earlier samples that are alive when the next one is read."""

    def __init__(self) -> None:
        super().__init__()
        self.earlier: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.alive.append(sum(each() is not None for each in self.earlier))
        sample = super().__getitem__(index)
        self.earlier.append(weakref.ref(sample[0]))
        return sample


class Unlike(Tensors):
    """Samples of several kinds in one batch."""

    def __getitem__(self, index: int) -> Any:
        pixels, number = super().__getitem__(index)
        return (pixels.double() if index == 2 else pixels, number) if index < 4 else (pixels, number, str(index))


HELD: dict[str, Callable[[], Tensors]] = {
    "by no other holder": Tensors,
    "as the tensor": lambda: Tensors(lambda sample: sample[0]),
    "as a view": lambda: Tensors(lambda sample: sample[0][0]),
    "as an alias": lambda: Tensors(lambda sample: sample[0].detach()),
    "as an array": lambda: Tensors(lambda sample: sample[0].numpy()),
    "as the sample": Kept,
    "as one buffer": OneBuffer,
    "but unlike": Unlike,
}


@pytest.mark.parametrize("held", HELD)
def test_batches_are_those_of_torchs_loader(held: str) -> None:
    assert difference(list(TorchDataLoader(HELD[held](), 4)), list(fl.DataLoader(HELD[held](), 4))) is None


def test_batches_of_processes_are_those_of_torchs_loader() -> None:
    for held in ("by no other holder", "as a view", "as one buffer"):
        expected = list(TorchDataLoader(HELD[held](), 4, num_workers=1))
        assert difference(expected, list(fl.DataLoader(HELD[held](), 4, num_workers=1))) is None


def test_memory_of_a_sample_is_free_for_the_next_one() -> None:
    dataset = Watched()
    list(fl.DataLoader(dataset, 4))
    assert dataset.alive == [0] * 12


def test_an_error_names_its_sample() -> None:
    class Failing(Tensors):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            if index == 6:
                raise ValueError("damaged")
            return super().__getitem__(index)

    loader = iter(fl.DataLoader(Failing(), 4))
    next(loader)
    with pytest.raises(ValueError, match="damaged") as error:
        next(loader)
    assert any("sample 6" in note for note in error.value.__notes__)


def test_an_error_names_its_field() -> None:
    class Uneven(Tensors):
        def __getitem__(self, index: int) -> Any:
            return *super().__getitem__(index), torch.zeros(1 + index % 2)

    with pytest.raises(RuntimeError) as error:
        next(iter(fl.DataLoader(Uneven(), 4)))
    assert any("batch[2]" in note for note in error.value.__notes__), error.value.__notes__
