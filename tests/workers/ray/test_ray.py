"""Ray actors: the batches of every other pool, also after deaths of actors and nodes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray_cluster import MEMORY, cluster
from torch.utils.data import Dataset, IterableDataset
from undisturbed import Measurement, measured, was_slowed

import feedline as fl
from feedline.errors import ArgumentError, WorkerDiedError, WorkerError, WorkerStalledError
from feedline.loader.report import Verdict
from feedline.testing.difference import check_same
from feedline.workers import POOLS, ray_pool, register_pool, unregister_pool
from feedline.workers.ray import members

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
    pytest.mark.timeout(900),  # each actor imports torch, which takes a minute on a machine with ten times its load
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with cluster() as started:
        yield started


@pytest.fixture
def kinds() -> Iterator[None]:
    """The table of pools, restored after the test."""
    before = set(POOLS)
    yield
    for name in POOLS.keys() - before:
        unregister_pool(name)


class Drawn(Dataset[Any]):
    """Draws from every global generator, and names its worker."""

    def __init__(self, length: int = 24) -> None:
        self.length, self.marked = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        info = fl.get_worker_info()
        worker = (-1, 0, 0) if info is None else (info.id, info.num_workers, info.dataset.marked)
        return index, torch.rand(2), np.random.rand(), random.random(), worker  # noqa: NPY002


class Large(Dataset[Any]):
    """Rows of an array, with noise; a batch of four is half a megabyte."""

    def __init__(self) -> None:
        self.rows = torch.arange(64 * 16_384, dtype=torch.float64).reshape(64, 16_384)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] + float(fl.sample_rng().random()), index


class Slow(Dataset[int]):
    """Samples that take 5 ms."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> int:
        time.sleep(0.005)
        return index


class Sharded(IterableDataset[int]):
    def __iter__(self) -> Iterator[Any]:
        info = fl.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(start, 23, step):
            yield number, torch.rand(())


class Deadly(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            os._exit(3)
        return index


class Endless(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        while index == 3:
            time.sleep(1)
        return index


def noisy(number: int, rng: Any) -> tuple[int, float]:
    return number, float(rng.random())


def mark(worker_id: int) -> None:
    info = fl.get_worker_info()
    assert info is not None
    info.dataset.marked = 10 + worker_id  # type: ignore[attr-defined]


def assert_equal(one: Any, other: Any) -> None:
    check_same(one, other, "batches differ")


def pool_of(loader: Any) -> Any:
    return loader._fl_pools._latest


def await_start(pool: Any) -> None:
    while not all(worker.is_ready for worker in pool.processes):
        pool._step(1)


@pytest.mark.nightly
def test_the_promises_of_a_pool(nodes: Any) -> None:
    fl.testing.check_pool("ray", num_workers=1)


def test_without_a_seed_batches_equal_torchs_and_survive_a_kill(nodes: Any) -> None:
    """Batch b belongs to worker b modulo 2; a replacement continues with its random values, and so does a resume."""
    arguments: dict[str, Any] = {"num_workers": 2, "shuffle": True, "worker_init_fn": mark}
    torch.manual_seed(4)
    expected = list(torch.utils.data.DataLoader(Drawn(), 3, **arguments))
    torch.manual_seed(4)
    got = []
    with fl.DataLoader(Drawn(), 3, worker_method="ray", **arguments) as loader:
        for batch in loader:
            got.append(batch)
            if len(got) == 3:
                os.kill(pool_of(loader).processes[1].pid, signal.SIGKILL)
            if len(got) == 6:
                state = loader.state_dict()
        assert loader.stats().restarts == 1
    assert_equal(got, expected)
    torch.manual_seed(5)
    with fl.DataLoader(Drawn(), 3, worker_method="process", **arguments) as resumed:
        resumed.load_state_dict(state)
        assert_equal(list(resumed), expected[6:])


@pytest.mark.nightly
def test_a_stream_that_shards_itself(nodes: Any) -> None:
    torch.manual_seed(6)
    expected = list(torch.utils.data.DataLoader(Sharded(), 4, num_workers=2))
    torch.manual_seed(6)
    with fl.DataLoader(Sharded(), 4, num_workers=2, worker_method="ray") as loader:
        assert_equal(list(loader), expected)


@pytest.mark.nightly
def test_a_stream_with_steps_continues_within_its_buffers(nodes: Any) -> None:
    def made(**more: Any) -> Any:
        parts = [fl.streams.from_items([range(k, k + 7), range(k + 10, k + 15)], iter, seed=k) for k in (0, 100)]
        mixed = fl.streams.mix([each.map(noisy).shuffle(4) for each in parts], [1, 2], stop="each_once")
        return fl.DataLoader(mixed.shuffle(3), 3, seed=1, **more)

    expected = list(made())
    with made(num_workers=1, worker_method="ray", persistent_workers=True) as loader:
        assert loader.plan().workers == "1, in the pool 'ray'"
        got = list(islice(loader, 3))
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert_equal(got + list(loader), expected)
    resumed = made()
    resumed.load_state_dict(state)
    assert_equal(got + list(resumed), expected)


def test_batches_are_in_the_object_store_and_may_be_written_to(nodes: Any) -> None:
    with fl.DataLoader(Large(), 4, seed=1) as inline:
        expected = [values.clone() for values, _ in inline]
    with fl.DataLoader(Large(), 4, seed=1, num_workers=1, worker_method="ray", persistent_workers=True) as loader:
        batches = []
        for step, (values, _) in enumerate(loader):
            assert_equal(values, expected[step])
            values.zero_()
            batches.append(values)
            if step == 2:
                pool_of(loader).resize(2)
        pool = pool_of(loader)
        assert len(pool.members.all) == 2
        assert 0 < pool.statistics().lent_nbytes == sum(batch.nbytes for batch in batches)
        assert not any(values.any() for values in batches)
        del values, batches
        assert pool.statistics().lent_nbytes == 0
        await_start(pool)
        kept = [values for epoch in range(6) for values, _ in loader]  # more than the store may lend
        assert pool.statistics().lent_nbytes <= 0.3 * MEMORY < sum(values.nbytes for values in kept)
        assert pool._stored.copied > 0
        workers = pool.processes
        assert len({file.inode for worker in workers for file in worker.files}) == 1  # one copy of the rows
        pids = [worker.pid for worker in workers]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert_equal(kept[0].shape, expected[0].shape)
    assert torch.isfinite(torch.stack(kept)).all()  # batches outlive the loader


@pytest.mark.nightly
def test_a_dead_node_changes_nothing_and_a_cluster_that_is_too_small_is_named(nodes: Any, kinds: None) -> None:
    """Places for three workers on two nodes; one node dies with two of them, which is one death, and then the other.

    Ray gives the replacements to the dead nodes until it has missed them: such actors never run, and do not count.
    """
    here, there = (nodes.add_node(num_cpus=2, object_store_memory=MEMORY, resources={"host": n}) for n in (1, 2))
    register_pool("hosts", ray_pool(resources={"host": 1}, start_timeout_s=600))
    with fl.DataLoader(Large(), 4, seed=2) as inline:
        expected = list(inline)
    with fl.DataLoader(
        Large(), 4, seed=2, num_workers=3, worker_method="hosts", persistent_workers=True, prefetch_factor=2,
        recovery=fl.Recovery(deaths_per_epoch=1),
    ) as loader:  # fmt: skip
        batches = iter(loader)
        got = [next(batches)]
        pool = pool_of(loader)
        await_start(pool)
        assert len({worker.node_id for worker in pool.processes}) == 2
        got += [next(batches) for _ in range(2)]
        nodes.remove_node(there, allow_graceful=False)
        got += list(batches)
        assert_equal(got, expected)
        assert 1 <= loader.stats().restarts <= 2
        nodes.remove_node(here, allow_graceful=False)
        pool.members.start_timeout_s = 3
        with pytest.raises(WorkerError, match=r"no place for worker \d for 3 s. It asks for.* host 1 \(free 0 of 0\)"):
            list(loader)


SLOW = """
import sys
from pathlib import Path
from time import sleep


class Gate:
    def find_spec(self, name, *_):
        while name == "feedline" and not Path(__file__).with_name("open").exists():
            sleep(0.05)


sys.meta_path.insert(0, Gate())
"""
"""Module that Python imports at its start: feedline is not imported before a file exists."""


@pytest.mark.nightly
def test_an_actor_that_imports_for_long_has_a_place(nodes: Any, kinds: None, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    environment = {"env_vars": {"PYTHONPATH": str(tmp_path)}}
    register_pool("slow", ray_pool(start_timeout_s=600, runtime_env=environment))
    with fl.DataLoader(list(range(8)), 4, num_workers=1, worker_method="slow", seed=0) as loader:
        batches = iter(loader)
        pool = pool_of(loader)
        while pool.processes[0].node_id is None:
            pool._step(1)
        pool.members.start_timeout_s = 1e-3
        pool._check_placement()
        assert "has not opened the dataset yet" in pool._describe_workers()
        (tmp_path / "open").touch()
        assert torch.cat(list(batches)).tolist() == list(range(8))


@pytest.mark.nightly
def test_a_sample_that_kills_is_named(nodes: Any) -> None:
    with (
        fl.DataLoader(Deadly(), 2, num_workers=1, worker_method="ray", seed=0) as loader,
        pytest.raises(WorkerDiedError, match=r"sample 5 \(epoch 0, position 5\) kills a worker by itself"),
    ):
        list(loader)


@pytest.mark.nightly
def test_a_timeout_shows_where_each_actor_is(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_STACKS_S", 300)
    with (
        fl.DataLoader(Endless(), 2, num_workers=1, worker_method="ray", seed=0, timeout=2) as loader,
        pytest.raises(WorkerStalledError, match=r"timed out after 2 seconds(?s:.)*at sample 3 (?s:.)*__getitem__"),
    ):
        list(loader)


def test_bad_options(nodes: Any, kinds: None) -> None:
    with pytest.raises(ArgumentError, match="max_restarts: feedline names, replaces and calls its Ray actors itself"):
        ray_pool(max_restarts=3)
    with pytest.raises(ArgumentError, match="start_timeout_s must be positive; got 0"):
        ray_pool(start_timeout_s=0)
    register_pool("odd", ray_pool(cpus=3))
    with pytest.raises(ArgumentError, match=r"Ray refuses the options of worker 0: .*cpus"):
        iter(fl.DataLoader(Endless(), num_workers=1, worker_method="odd"))


@pytest.mark.nightly
def test_the_number_of_workers_adapts(nodes: Any) -> None:
    with fl.DataLoader(list(range(50)), num_workers="auto", worker_method="ray", seed=0) as loader:
        assert torch.cat(list(loader)).tolist() == list(range(50))


@pytest.mark.nightly
def test_the_waiting_for_actors_is_explained(nodes: Any) -> None:
    """Nine tenths of it at least, or the verdict says how much is not."""

    def verdict_of(loader: Any) -> Measurement[Verdict]:
        batches = iter(loader)
        next(batches)
        began, count = time.perf_counter(), 0
        for count, _ in enumerate(batches, 1):  # noqa: B007 - the last number is used
            time.sleep(0.001)
        elapsed_s, verdict = time.perf_counter() - began, loader.report()
        assert verdict.explained_share >= 0.9 or "Not explained: " in verdict.notes[-1]
        return Measurement(verdict, verdict, was_slowed(elapsed_s, count * 0.02))

    def is_right(verdict: Verdict) -> bool:
        workers = verdict.advice[0].arguments.get("num_workers", 0) if verdict.advice else 0
        return verdict.limiting_stage == "fetch" and verdict.explained_share >= 0.9 and workers > 1

    with fl.DataLoader(Slow(), 4, seed=0, num_workers=1, worker_method="ray", persistent_workers=True) as loader:
        measured(lambda: verdict_of(loader), is_right)
