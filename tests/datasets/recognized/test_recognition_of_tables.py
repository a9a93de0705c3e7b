"""Tables of Hugging Face's datasets, passed as they are: batches are those of torch's loader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, random_split
from vision_cases import assert_same, seeded

import datasets
import feedline as fl

ROWS = 60


@pytest.fixture(scope="module")
def table() -> Any:
    rng = np.random.default_rng(0)
    columns = {
        "x": rng.random(ROWS, np.float32),
        "features": list(rng.random((ROWS, 8))),
        "label": rng.integers(0, 10, ROWS),
        "text": ["", "zero\0", "größer als das Übrige", *(f"row {number}" for number in range(3, ROWS))],
    }
    return datasets.Dataset.from_dict(columns)


def batches(loader_class: Any, dataset: Any, **arguments: Any) -> list[Any]:
    seeded(0)
    return list(loader_class(dataset, batch_size=16, shuffle=True, **arguments))


def compare(dataset: Any, **arguments: Any) -> None:
    assert_same(
        batches(fl.DataLoader, dataset, **arguments), batches(torch.utils.data.DataLoader, dataset, **arguments)
    )


WITHOUT_PYTHON = {
    "torch": lambda table: table.with_format("torch"),
    "torch, some columns": lambda table: table.with_format("torch", columns=["x", "label"]),
    "torch, selected": lambda table: table.with_format("torch").select(range(50, 3, -2)),
    "torch, shuffled": lambda table: table.with_format("torch").shuffle(seed=1),
    "numpy": lambda table: table.with_format("numpy"),
    "numpy, texts only": lambda table: table.select_columns("text").with_format("numpy"),
    "no format": lambda table: table.remove_columns("features"),
    "no format, lists": lambda table: table,
    "subset": lambda table: Subset(table.with_format("torch"), [5, 3, 3, 59]),
    "split": lambda table: random_split(table.with_format("torch"), [20, 40])[1],
    "both": lambda table: ConcatDataset([table.with_format("torch"), Subset(table.with_format("torch"), [1, 2])]),
}

WITH_PYTHON = {
    "lists of texts": lambda table: table.add_column("words", [["a", "b"]] * ROWS),
    "a transform": lambda table: table.with_transform(lambda rows: {"x": [value * 2 for value in rows["x"]]}),
    "all columns": lambda table: table.with_format("torch", columns=["x"], output_all_columns=True),
}


@pytest.mark.parametrize("form", WITHOUT_PYTHON)
def test_tables_are_read_in_whole_batches(table: Any, form: str) -> None:
    dataset = WITHOUT_PYTHON[form](table)
    compare(dataset)
    assert fl.DataLoader(dataset).plan().accelerated


@pytest.mark.parametrize("form", WITH_PYTHON)
def test_what_datasets_has_to_format_is_read_by_it(table: Any, form: str) -> None:
    dataset = WITH_PYTHON[form](table)
    compare(dataset)
    plan = fl.DataLoader(dataset).plan()
    assert not plan.accelerated
    assert "need the code of Hugging Face's datasets" in str(plan)


def test_texts_have_numpys_type_in_its_format(table: Any) -> None:
    (batch,) = fl.DataLoader(table.select([1, 2]).with_format("numpy"), batch_size=2)
    assert [type(text) for text in batch["text"]] == [np.str_, np.str_]
    assert batch["text"][0] == "zero"


def test_tables_in_worker_processes(table: Any) -> None:
    compare(table.with_format("torch"), num_workers=2)


def test_nothing_is_looked_at_on_request(table: Any) -> None:
    dataset = table.with_format("torch")
    assert_same(batches(fl.DataLoader, dataset, accelerate=False), batches(torch.utils.data.DataLoader, dataset))
    assert not fl.DataLoader(dataset, accelerate=False).plan().accelerated
