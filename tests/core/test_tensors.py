"""Settings that tensors need."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import feedline as fl
from feedline.core.rng import sample_rng, torch_keys
from feedline.core.tensors import _has_numpy, allocate_tensor, expect_torch_load, numpy_view

TEXT = "You are using `torch.load` with `weights_only=False` (the current default value), which uses"


def warn(module: str) -> None:
    warnings.warn_explicit(TEXT, FutureWarning, "a.py", 1, module)


@pytest.mark.parametrize("version", ["2.4.0", "2.5.1+cu124"])
def test_torchs_own_calls_of_torch_load_do_not_warn_and_those_of_users_do(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expect_torch_load(version)
        warn("torch.storage")
        with pytest.raises(FutureWarning):
            warn("train")


def test_newer_versions_need_no_filter() -> None:
    with warnings.catch_warnings():
        filters = list(warnings.filters)
        for version in ("2.6.0", "2.13.0+cpu", "3.0.0a0"):
            expect_torch_load(version)
        assert warnings.filters == filters


@pytest.fixture
def default_device() -> Iterator[None]:
    """A default device that is not the CPU, met before any other use of NumPy."""
    _has_numpy.cache_clear()
    with torch.device("meta"):
        yield
    _has_numpy.cache_clear()


USES: list[Callable[[], Any]] = [
    lambda: numpy_view(torch.full((2,), 1.5, device="cpu")).tolist() == [1.5, 1.5],
    lambda: allocate_tensor((2,), torch.float32).is_cpu,
    lambda: len(torch_keys(3)) == 3 and sample_rng(),
    lambda: fl.images.read_one(np.zeros((9, 9, 3), np.uint8), fl.images.Recipe((4, 4), fl.images.RandomBox())).is_cpu,
    lambda: fl.collate.pad()([torch.full((n,), 0.5, device="cpu") for n in (1, 2)]).mask.tolist()[0] == [True, False],
    lambda: fl.transforms.ToTensor()(np.full((2, 2, 3), 255, np.uint8)).max() == 1,
]


@pytest.mark.usefixtures("default_device")
@pytest.mark.parametrize("use", USES)
def test_a_default_device_does_not_matter(use: Callable[[], Any]) -> None:
    assert use()


@pytest.mark.usefixtures("default_device")
def test_records_of_a_file_arrive_under_a_default_device(tmp_path: Path) -> None:
    np.save(tmp_path / "records.npy", np.array([(1.5, 2.5), (3.5, 4.5)], [("x", "f4"), ("y", "f8")]))
    with fl.DataLoader(fl.datasets.ArrayFile(tmp_path / "records.npy"), 2, seed=0) as loader:
        (batch,) = [{name: column.tolist() for name, column in batch.items()} for batch in loader]
    assert batch == {"x": [1.5, 3.5], "y": [2.5, 4.5]}
