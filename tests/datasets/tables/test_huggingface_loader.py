"""Hugging Face's own objects, given to the loader as they are."""

from __future__ import annotations

import gc
import warnings
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import datasets
import feedline as fl
from feedline.datasets.tables import huggingface_rows
from feedline.loader.building.builder import BatchBuilder
from feedline.testing import difference


def table(**more: Any) -> Any:
    columns = {"x": [[float(i), -1.0] for i in range(50)], "y": list(range(50)), "name": [str(i) for i in range(50)]}
    return datasets.Dataset.from_dict({**columns, **more})


def numbers() -> Any:
    """Columns of many types in two parts of unequal record batches."""
    kinds = ("int8", "uint8", "int16", "uint32", "int64", "float32", "float64", "bool")
    columns = {f"{kind} {copy}": [i % 2 * (copy + 1) for i in range(50)] for kind in kinds for copy in range(2)}
    features = datasets.Features({name: datasets.Value(name.split()[0]) for name in columns})
    columns = {name: [bool(x) for x in xs] if "bool" in name else xs for name, xs in columns.items()}
    part = datasets.Dataset.from_dict(columns, features)
    return datasets.concatenate_datasets([part, part.select(range(13))])


MADE = {
    "plain": table,
    "as torch": lambda: table().with_format("torch"),
    "as numpy, some columns": lambda: table().with_format("numpy", columns=["y"]),
    "shuffled and selected": lambda: table().shuffle(seed=1).select(range(5, 45)).with_format("torch"),
    "transformed": lambda: table().with_transform(lambda rows: {"z": [2 * y for y in rows["y"]]}),
    "numbers of many types": numbers,
    "numbers of many types as torch": lambda: numbers().with_format("torch"),
    "numbers of many types as numpy, selected": lambda: numbers().shuffle(seed=1).with_format("numpy"),
    "numbers with nulls": lambda: table(late=[None] + [1.5] * 49).select(range(1, 50)),
    "with a list of bool": lambda: table(flags=[[True, False]] * 50).with_format("torch"),
}


@pytest.mark.parametrize(("name", "workers"), [*((name, 0) for name in MADE), *((name, 2) for name in [*MADE][::3])])
def test_batches_are_those_of_torchs_loader(name: str, workers: int) -> None:
    def batches(cls: Any, **more: Any) -> list[Any]:
        return list(cls(MADE[name](), batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(0), **more))

    assert difference(batches(TorchDataLoader), batches(fl.DataLoader, num_workers=workers)) is None


@pytest.mark.parametrize("kind", ["torch", "numpy", None])
def test_columns_come_in_the_order_of_the_table(kind: str | None) -> None:
    """As from `datasets`, in whatever order the format names them: users unpack `batch.values()`."""
    made = table()
    made = made.with_format(kind, columns=made.column_names[::-1])
    expected, batch = (next(iter(cls(made, 4))) for cls in (TorchDataLoader, fl.DataLoader))
    assert list(batch) == list(expected)
    assert list(fl.datasets.HuggingFace(made)[0]) == list(made[0])


def test_a_table_is_gathered_whole() -> None:
    assert BatchBuilder(table().with_format("torch")).vectorized
    assert not BatchBuilder(MADE["transformed"]()).vectorized


def test_loaders_of_one_table_look_up_its_chunks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    look_up = huggingface_rows.table_chunks
    monkeypatch.setattr(huggingface_rows, "table_chunks", lambda *args: calls.append(1) or look_up(*args))
    whole = table().with_format("torch")
    epochs = [[batch["y"].tolist() for batch in fl.DataLoader(whole, 10)] for _ in range(3)]
    assert epochs == [[list(range(i, i + 10)) for i in range(0, 50, 10)]] * 3
    assert len(calls) == 1
    kept = len(huggingface_rows._opened)
    del whole
    gc.collect()
    assert len(huggingface_rows._opened) < kept


def test_columns_of_a_table_with_nulls_and_chunks_of_many_sizes() -> None:
    parts = [
        datasets.Dataset.from_dict({"i": rows, "f": [None if i == 3 else i / 2 for i in rows]})
        for rows in ([0, 1], [2], [3, 4, 5], [6, 7])
    ]
    whole = datasets.concatenate_datasets(parts).select(range(1, 8))
    assert [whole[i] for i in range(7)] == fl.datasets.HuggingFace(whole).__getitems__(range(7))


@pytest.mark.parametrize("buffered", [False, True])
def test_a_stream_loses_nothing_on_resume(buffered: bool) -> None:
    def stream() -> Any:
        made = table().to_iterable_dataset(num_shards=4)
        return made.shuffle(seed=3, buffer_size=8) if buffered else made

    whole = [batch["y"].tolist() for batch in fl.DataLoader(stream(), batch_size=4)]
    for cut in (1, 5, 9):
        loader = fl.DataLoader(stream(), batch_size=4)
        begun = [batch["y"].tolist() for batch in islice(loader, cut)]
        state = loader.state_dict()
        again = fl.DataLoader(stream(), batch_size=4)
        again.load_state_dict(state)
        rest = [batch["y"].tolist() for batch in again]
        assert begun + rest == whole


def test_a_stream_is_inherited_by_forked_workers() -> None:
    with fl.DataLoader(table().to_iterable_dataset(num_shards=2), batch_size=10, num_workers=2) as loader:
        for _ in range(2):
            assert sorted(y for batch in loader for y in batch["y"].tolist()) == list(range(50))


@pytest.mark.nightly
def test_a_stream_is_pointed_to_ours_once_where_workers_are_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Python 3.14 on Linux."""
    monkeypatch.setattr("multiprocessing.get_start_method", lambda allow_none: None)
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["forkserver", "spawn", "fork"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fl.DataLoader(table().to_iterable_dataset(num_shards=2), batch_size=10, num_workers=1) as loader:
            for _ in range(2):
                assert sorted(y for batch in loader for y in batch["y"].tolist()) == list(range(50))
        with fl.DataLoader(fl.datasets.HuggingFaceStream(loader.dataset), batch_size=10, num_workers=1) as loader:
            assert sorted(y for batch in loader for y in batch["y"].tolist()) == list(range(50))
    (warning,) = caught
    assert "Give feedline.datasets.HuggingFaceStream(dataset)" in str(warning.message)


def test_ranks_that_will_have_unequal_numbers_of_batches_are_reported() -> None:
    stream = fl.datasets.HuggingFaceStream(table().to_iterable_dataset(num_shards=5))
    with pytest.warns(
        UserWarning, match="HuggingFaceStream has 5 partitions, which 2 ranks cannot share equally"
    ) as caught:
        batches = _twice(fl.DataLoader(stream, batch_size=4, distributed=(0, 2)))
    assert batches == 18  # in three partitions of ten samples
    assert len(caught) == 1


def _twice(loader: Any) -> int:
    return sum(len(list(loader)) for _ in range(2))


@pytest.mark.parametrize("how", [{}, {"collate_fn": list}])
def test_a_format_set_in_the_loop_applies_to_the_next_batch(how: dict[str, Any]) -> None:
    def run(loader_class: Any) -> list[Any]:
        dataset, batches = table(), []
        for number, batch in enumerate(loader_class(dataset, 10, **how)):
            batches.append(batch)
            if number == 0:
                dataset.set_format("torch", columns=["y"])
            if number == 1:
                dataset.set_transform(lambda rows: {"z": [2 * y for y in rows["y"]]})
        return batches

    assert not difference(run(fl.DataLoader), run(TorchDataLoader))
