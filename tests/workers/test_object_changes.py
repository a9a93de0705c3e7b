"""Changes of a worker's dataset that are recorded for its replacement, and those that are not."""

from __future__ import annotations

import copy
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from feedline.workers.object_changes import ObjectChanges, lost_changes, restore_objects


class Things(Dataset[Any]):
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


class Builder:
    def __init__(self, dataset: Any, collate_fn: Any = None) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn


def moved(builder: Builder, change: Any) -> tuple[Builder, bytes]:
    """A copy from before `change`, to which the changes were made; and the changes."""
    other = copy.deepcopy(builder)
    changes = ObjectChanges(builder)
    change()
    taken = changes.take()
    restore_objects(other, taken)
    return other, taken


def test_generators_draw_on_wherever_they_are() -> None:
    generators = [random.Random(1), np.random.RandomState(2), np.random.default_rng(3), torch.Generator()]
    things = Things(own=Things(generators=generators, named={"numpy": np.random.default_rng(5)}))
    builder = Builder(Subset(ConcatDataset([Things(), things]), [0]), Things(rng=random.Random(4)).__getitem__)

    def draw(builder: Builder) -> list[float]:
        own, collate = builder.dataset.dataset.datasets[1].own, builder.collate_fn.__self__
        python, legacy, numpy, torches = own.generators
        drawn = [python.random(), legacy.rand(), numpy.random(), own.named["numpy"].random(), collate.rng.random()]
        return [*drawn, torch.rand((), generator=torches).item()]

    other, changes = moved(builder, lambda: draw(builder))
    assert draw(other) == draw(builder)
    assert lost_changes(changes) == []


def test_plain_values_and_new_generators() -> None:
    things = Things(count=0, recent=[1], table={"a": (1,)}, small=np.zeros(3))
    things.same = things.recent

    def change() -> None:
        things.count, things.name = 7, "x"
        things.recent.append(2)
        things.table["b"] = (2, None)
        things.small += 1
        things.made = np.random.Generator(np.random.Philox(3))
        things.made.random()

    other, changes = moved(Builder(things), change)
    mine = vars(other.dataset)
    assert mine.pop("made").random() == things.made.random()
    assert mine.pop("small").tolist() == [1, 1, 1]
    assert mine == {"count": 7, "recent": [1, 2], "same": [1, 2], "table": {"a": (1,), "b": (2, None)}, "name": "x"}
    assert mine["same"] is mine["recent"]
    assert lost_changes(changes) == []


def test_nothing_is_recorded_of_what_does_not_change() -> None:
    things = Things(data=torch.arange(3), lock=threading.Lock(), numbers=list(range(9)), rng=random.Random(1))
    changes = ObjectChanges(Builder(things))
    assert changes.take() == b""
    things.rng.random()
    first = changes.take()
    assert first
    assert changes.take() is first


def test_a_flag_is_not_restored_without_the_file_that_it_is_about(tmp_path: Path) -> None:
    things = Things(is_open=False, file=None, rng=random.Random(1))

    def change() -> None:
        things.is_open, things.file = True, (tmp_path / "x").open("w")
        things.rng.random()

    other, changes = moved(Builder(things), change)
    things.file.close()
    assert (other.dataset.is_open, other.dataset.file) == (False, None)
    assert other.dataset.rng.random() == things.rng.random()
    assert lost_changes(changes) == []  # the replacement opens it itself


def test_a_descriptor_of_another_process_is_not_restored() -> None:
    things = Things(fd=None, first=-1)

    def change() -> None:
        things.fd, things.first = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_RDONLY)

    other, changes = moved(Builder(things), change)
    os.close(things.fd)
    os.close(things.first)
    assert (other.dataset.fd, other.dataset.first) == (None, -1)
    assert lost_changes(changes) == []


@pytest.mark.parametrize("shared", [np.frombuffer(bytearray(8), np.uint8), torch.zeros(3).share_memory_()])
def test_memory_that_may_be_shared_is_left_alone(shared: Any) -> None:
    things = Things(shared=shared)
    changes = ObjectChanges(Builder(things))
    things.shared += 1
    assert changes.take() == b""


def test_what_cannot_be_restored_is_named() -> None:
    things = Things(numbers=iter(range(3)), files=iter(()), total=1, big=np.zeros(10_000))

    def change() -> None:
        things.files, things.big, things.total = iter(()), np.ones(10_000), 5

    other, changes = moved(Builder(things), change)
    assert lost_changes(changes) == ["dataset.big", "dataset.files", "dataset.total"]
    assert other.dataset.total == 1
