"""Subclasses of users that override `__getitem__` alone: whole batches consist of its samples."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagonals import diagonal

import feedline as fl
from feedline.datasets import CSV, JSONL, Arrays, Files, Lines, Map, TokenFile


class Counted:
    """The samples of the base class, with their index."""

    def __getitem__(self, index: int) -> Any:
        return index, super().__getitem__(index)  # type: ignore[misc]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.csv").write_text("x\n" + "".join(f"{number}\n" for number in range(8)))
    np.arange(16, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    return tmp_path


def made(kind: type, folder: Path, name: str) -> Any:
    arguments: dict[str, tuple[Any, ...]] = {
        "Arrays": (np.arange(8),),
        "TokenFile": (folder / "tokens.bin", 2),
        "Map": (Arrays(np.arange(8)), str),
    }
    return kind(*arguments.get(name, (folder / "rows.csv",)))


@pytest.mark.parametrize(("base", "num_workers"), diagonal([Arrays, TokenFile, CSV, JSONL, Lines, Files, Map], [0, 2]))
def test_whole_batches_have_the_samples_of_the_subclass(base: Any, num_workers: int, folder: Path) -> None:
    if base is JSONL:
        (folder / "rows.csv").write_text("".join(f"{number}\n" for number in range(8)))
    kind = type("Own", (Counted, base), {})
    dataset = made(kind, folder, base.__name__)
    plain = made(base, folder, base.__name__)
    settings: dict[str, Any] = {"seed": 1, "num_workers": num_workers, "worker_method": "thread", "collate_fn": list}
    for start, batch in enumerate(fl.DataLoader(dataset, 1, **settings)):
        [(index, sample)] = batch
        assert index == start
        assert fl.testing.difference(sample, plain[index]) is None
    [batch] = fl.DataLoader(dataset, len(dataset), seed=1)
    assert list(batch[0]) == list(range(len(dataset)))


def test_a_subclass_that_overrides_both_is_read_at_once(folder: Path) -> None:
    class Own(Lines):
        def __getitem__(self, index: int) -> str:
            raise AssertionError("samples are read together")

        def __getitems__(self, indices: Any) -> list[str]:
            return [f"line {index}" for index in indices]

    [batch] = fl.DataLoader(Own(folder / "rows.csv"), 9)
    assert batch == [f"line {index}" for index in range(9)]


def test_its_draws_repeat_by_seed() -> None:
    class Noisy(Arrays):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index) + random.random()

    dataset = Noisy(np.arange(6.0))
    one, other = (list(fl.DataLoader(dataset, 3, seed=4)) for _ in range(2))
    assert fl.testing.difference(one, other) is None
