"""A `datasets.IterableDataset` itself, resumed in mid-epoch: later epochs are complete."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

import datasets
import feedline as fl


def stream() -> Any:
    return datasets.Dataset.from_dict({"x": list(range(12))}).to_iterable_dataset(num_shards=2)


def numbers(loader: Any) -> list[int]:
    return [int(x) for batch in loader for x in batch["x"]]


@pytest.mark.filterwarnings("ignore:the workers are forked:UserWarning")
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_the_epochs_after_a_resumed_one_begin_at_the_beginning(workers: int, persistent: bool) -> None:
    def make() -> Any:
        return fl.DataLoader(stream(), 2, num_workers=workers, persistent_workers=persistent)

    with make() as loader, make() as again:
        begun = [int(x) for batch in islice(loader, 2) for x in batch["x"]]
        again.load_state_dict(loader.state_dict())
        assert sorted(begun + numbers(again)) == list(range(12))
        assert sorted(numbers(again)) == list(range(12))
        assert sorted(numbers(again)) == list(range(12))
