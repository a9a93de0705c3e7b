"""Tensors on a device other than the CPU are gathered there, without a Python call per sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

import feedline as fl
from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead
from feedline.core.devices import take_rows
from feedline.core.tensors import allocate_tensor


def there() -> TensorDataset:
    return TensorDataset(torch.zeros(20, 3, device="meta"), torch.zeros(20, dtype=torch.int64, device="meta"))


WRAPPED = {
    "TensorDataset": there,
    "tensor": lambda: torch.zeros(20, 3, device="meta"),
    "Subset": lambda: Subset(there(), range(4, 18)),
    "ConcatDataset": lambda: ConcatDataset([there(), there()]),
    "StackDataset": lambda: StackDataset(x=there(), y=there()),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_batches_are_gathered_there(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorDataset, "__getitem__", None)  # no sample is asked for
    dataset: Any = WRAPPED[kind]()
    with fl.DataLoader(dataset, batch_size=6, shuffle=True, seed=0) as loader:
        assert loader.plan().accelerated
        batch = next(iter(loader))
    while not isinstance(batch, torch.Tensor):
        batch = batch["x"] if isinstance(batch, dict) else batch[0]
    assert (batch.device.type, batch.shape) == ("meta", (6, 3))


def test_an_index_out_of_range_is_named() -> None:
    reader = reader_of(there())
    assert reader is not None
    with pytest.raises(IndexError, match="index 20 is out of range for TensorDataset with 20 samples"):
        reader(BatchRead(np.array([3, 20]), allocate_tensor))


def test_rows_are_those_of_the_places() -> None:
    rows = torch.arange(12.0).reshape(4, 3)
    assert torch.equal(take_rows([rows], np.array([3, 0, 3]))[0], rows[[3, 0, 3]])
