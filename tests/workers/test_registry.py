"""The table of pools: a kind from outside is chosen by its name, and unknown names are refused."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extensions import registered
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

import executor_pool
import feedline as fl
from feedline.errors import ArgumentError
from feedline.testing import check_dataset
from feedline.workers import POOLS, PoolKind, register_pool, unregister_pool
from feedline.workers.base import RetainedResources

DATA = TensorDataset(torch.arange(40))
INLINE = "none; batches are built in the training process"
SOURCE = Path(fl.__file__).parent


class Noise(TensorDataset):
    """Draws from numpy's global generator."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0] + np.random.rand()  # noqa: NPY002


class Counting(IterableDataset[int]):
    """Splits itself by torch's worker information."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(20) if info is None else range(info.id, 20, info.num_workers))


class Partitions(Counting):
    num_partitions = 4

    def partition(self, partition: int, epoch: int) -> Iterator[int]:
        return iter(range(100 * epoch + 10 * partition, 100 * epoch + 10 * partition + 7))


@pytest.fixture(scope="module", autouse=True)
def executor() -> Iterator[None]:
    """The pool "executor" of the examples."""
    with registered():
        yield


@pytest.fixture
def table() -> Iterator[dict[str, PoolKind]]:
    """The table of pools, restored after the test."""
    before = set(POOLS)
    yield POOLS
    for name in POOLS.keys() - before:
        unregister_pool(name)


def batches(dataset: Any, **arguments: Any) -> list[Any]:
    with fl.DataLoader(dataset, batch_size=3, **arguments) as loader:
        return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def test_a_pool_from_outside_serves_partitions_in_order() -> None:
    alone = batches(Partitions())
    assert batches(Partitions(), num_workers=2, worker_method="executor") == alone
    assert batches(Partitions(), num_workers=1, worker_method="executor") == alone


def test_a_stream_that_asks_for_its_worker_has_one_partition_in_a_pool_that_cannot_host_several() -> None:
    assert batches(Counting(), num_workers=2, worker_method="executor") == batches(Counting())


def test_a_pool_from_outside_keeps_the_promises_of_a_dataset() -> None:
    check_dataset(DATA, methods=("executor",))


def test_a_pool_that_cannot_be_resized_is_not() -> None:
    """ExecutorPool.resize raises: a loader with num_workers="auto" would meet that after 32 batches."""
    with fl.DataLoader(TensorDataset(torch.arange(300)), num_workers="auto", worker_method="executor") as loader:
        assert sum(1 for _ in loader) == 300


def test_shared_generators_are_noticed_in_a_pool_from_outside() -> None:
    with pytest.warns(UserWarning, match=r"Noise draws from numpy\.random"):
        batches(Noise(torch.arange(12)), seed=1, num_workers=2, worker_method="executor")


def test_arguments_that_a_kind_does_not_accept_are_refused() -> None:
    for arguments in ({"worker_init_fn": print}, {"multiprocessing_context": "spawn"}):
        with pytest.raises(ArgumentError, match=f"{next(iter(arguments))} is for worker processes"):
            fl.DataLoader(DATA, num_workers=2, worker_method="executor", **arguments)  # type: ignore[arg-type]


def test_accepted_arguments_reach_the_pool(table: dict[str, PoolKind]) -> None:
    seen: list[Any] = []

    def open_pool(builder: Any, options: Any) -> Any:
        seen.append(options)
        return executor_pool.ExecutorPool(builder, options)

    accepts = frozenset({"worker_init_fn"})
    register_pool("mine", PoolKind(open_pool, accepts=accepts, prepare=lambda: seen.append("now")))
    loader = fl.DataLoader(DATA, 8, num_workers=2, timeout=5, worker_method="mine", worker_init_fn=print, seed=2)
    assert seen == ["now"]
    assert len(list(loader)) == 5
    assert seen[1].worker_init_fn is print
    assert (seen[1].num_workers, seen[1].timeout_s, seen[1].partitions) == (2, 5, False)


@pytest.mark.parametrize("name", ["threads", "inline", ""])
def test_an_unknown_method_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"one of 'auto', 'thread', 'process'.*executor'; got '" + name):
        fl.DataLoader(DATA, num_workers=2, worker_method=name)


def test_an_unregistered_kind_is_named_when_the_loader_is_iterated(table: dict[str, PoolKind]) -> None:
    register_pool("mine", executor_pool.KIND)
    loader = fl.DataLoader(DATA, num_workers=2, worker_method="mine")
    del table["mine"]
    with pytest.raises(ArgumentError, match="got 'mine'"):
        iter(loader)


@pytest.mark.parametrize("name", ["", "auto", 3, ["mine"]], ids=repr)
def test_names_that_no_kind_can_have(name: Any) -> None:
    with pytest.raises(ArgumentError, match="must be a string other than"):
        register_pool(name, executor_pool.KIND)


def test_a_name_belongs_to_one_kind(table: dict[str, PoolKind]) -> None:
    register_pool("mine", executor_pool.KIND)
    register_pool("mine", executor_pool.KIND)
    with pytest.raises(ArgumentError, match="another kind of pool is already named 'mine'"):
        register_pool("mine", replace(executor_pool.KIND, needs_pickle=True))
    with pytest.raises(ArgumentError, match="another kind of pool is already named 'process'"):
        register_pool("process", executor_pool.KIND)


def test_what_is_no_kind_of_use() -> None:
    with pytest.raises(ArgumentError, match=r"must be a feedline\.workers\.PoolKind; got type"):
        register_pool("mine", executor_pool.ExecutorPool)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"PoolKind\(open=\.\.\.\) must be a function of .*, not None"):
        register_pool("mine", PoolKind(None))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="works_ahead=False"):
        register_pool("mine", replace(executor_pool.KIND, works_ahead=False))


def test_retained_resources_are_made_once_and_closed() -> None:
    closed = []

    class Resource:
        def close(self) -> None:
            closed.append(self)

    retained = RetainedResources()
    first = retained.get(Resource)
    assert retained.get(Resource) is first
    retained.close()
    retained.close()
    assert closed == [first]
    assert retained.get(Resource) is not first


def test_no_kind_is_compared_by_its_name() -> None:
    compared = re.compile(r"""[!=]=\s*["'](thread|process|inline)["']|["'](thread|process|inline)["']\s*[!=]=""")
    files = [*SOURCE.rglob("*.py")]
    assert len(files) > 100
    assert not [str(path) for path in files if compared.search(path.read_text())]


@pytest.mark.parametrize(
    ("dataset", "arguments", "said"),
    [
        (DATA, {}, INLINE),
        (DATA, {"num_workers": 2, "worker_method": "process"}, "2, in the pool 'process'"),
        (Noise(torch.arange(4)), {"num_workers": 1}, "1, in the pool 'process', chosen by feedline"),
        (Partitions(), {"num_workers": 2, "worker_method": "thread"}, "2, in the pool 'thread'"),
        (
            Counting(),
            {"num_workers": 2, "worker_method": "thread"},
            f"{INLINE} (the pool 'thread' cannot host a dataset that shards itself)",
        ),
    ],
)
def test_the_plan_of_a_loader_names_its_pool_and_fits_a_terminal(
    dataset: Any, arguments: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = fl.DataLoader(dataset, batch_size=2, **arguments).plan()
    assert plan.workers == said
    assert str(plan).endswith(f"\nworkers: {said}")
    whole = str(plan)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 40
    assert " ".join(" ".join(lines).split()) == " ".join(whole.split())


def test_workers_of_other_machines_are_not_compared_with_the_cpus_of_this_one() -> None:
    """torch warns of more workers than CPUs, which are those of the cluster here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = fl.DataLoader(DATA, num_workers=500, worker_method="ray").plan()
    assert plan.workers == "500, in the pool 'ray'"
