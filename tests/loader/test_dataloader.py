"""feedline's own arguments in a training loop."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_cases import Faulty, default_start_method
from torch.utils.data import DistributedSampler, IterableDataset, Subset, TensorDataset

import feedline as fl
from feedline.core.cursor import Cursor
from feedline.datasets import JSONL
from feedline.errors import WorkerError
from feedline.loader.dataloader import RunningPart
from feedline.samplers.adapters import as_index_sampler
from feedline.workers.threads import GlobalRngCheck

PLACES = [(0, "auto"), (2, "thread"), (2, "process")]


class Drawing:
    """Samples that are random draws only."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, int(fl.sample_rng().integers(1 << 30))


def lists(batches: Any) -> list[Any]:
    return [
        batch.tolist() if isinstance(batch, torch.Tensor) else [part.tolist() for part in batch] for batch in batches
    ]


@pytest.mark.parametrize(("workers", "method"), PLACES)
def test_bad_samples_are_left_out_counted_and_listed(workers: int, method: Any, tmp_path: Path) -> None:
    policy = fl.ErrorPolicy("skip", quarantine=tmp_path / "bad.jsonl")
    loader = fl.DataLoader(Faulty(), 3, num_workers=workers, worker_method=method, on_error=policy)
    with loader:
        assert lists(loader) == [[0, 1, 2], [5], [6, 7, 8], [9, 10, 11]]
        assert loader.stats().skipped == 2
        assert loader.stats().samples == 10
    lines = [json.loads(line) for line in policy_lines(policy)]
    assert [(line["index"], line["position"], line["replaced_by"]) for line in lines] == [(3, 3, None), (4, 4, None)]
    assert "ValueError: sample 3 is broken" in lines[0]["error"]


def policy_lines(policy: fl.ErrorPolicy) -> list[str]:
    assert policy.quarantine is not None
    return Path(policy.quarantine).read_text().splitlines()


@pytest.mark.parametrize(("workers", "method"), PLACES)
def test_bad_samples_are_replaced_by_the_next_index_that_works(workers: int, method: Any) -> None:
    with fl.DataLoader(Faulty(), 3, num_workers=workers, worker_method=method, on_error="replace") as loader:
        assert lists(loader) == [[0, 1, 2], [5, 5, 5], [6, 7, 8], [9, 10, 11]]
        assert loader.stats().skipped == 2


def test_a_batch_of_bad_samples_only_is_not_given() -> None:
    loader = fl.DataLoader(Subset(Faulty(), [3, 4, 5]), 2, on_error="skip")
    assert lists(loader) == [[5]]
    assert loader.state_dict()["epoch"] == 1


def test_skips_travel_with_the_state_and_the_limit_counts_on() -> None:
    policy = fl.ErrorPolicy("skip", limit=1)
    first = fl.DataLoader(Faulty(), 4, on_error=policy)
    assert next(iter(first)).tolist() == [0, 1, 2]
    state = json.loads(json.dumps(first.state_dict()))
    assert state["skipped"] == {"count": 1, "this_epoch": 1, "latest": [[0, 3, 3]], "shared": [0, 0]}
    second = fl.DataLoader(Faulty(), 4, on_error=policy)
    second.load_state_dict(state)
    with pytest.raises(fl.errors.ErrorLimitError, match=r"2 samples of epoch 0 failed.*limit=1"):
        list(second)


def test_without_a_policy_the_error_says_where_it_comes_from() -> None:
    with pytest.raises(ValueError, match="sample 3 is broken") as caught:
        list(fl.DataLoader(Faulty(), 4))
    assert any("sample 3 of Faulty (epoch 0, position 3, stage fetch)" in note for note in caught.value.__notes__)


class FaultyTogether(Faulty):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class FaultyTable(Faulty):
    traits = fl.Traits(uses_keys=False)

    def read_batch(self, request: fl.BatchRead) -> torch.Tensor:
        return torch.tensor([self[index] for index in request.indices.tolist()])


@pytest.mark.parametrize("dataset", [FaultyTogether(), FaultyTable()])
@pytest.mark.parametrize("seed", [None, 5])
def test_a_sample_that_fails_in_a_batch_is_found_and_named(dataset: Any, seed: int | None) -> None:
    with pytest.raises(ValueError, match="sample 3 is broken") as caught:
        list(fl.DataLoader(dataset, 4, seed=seed))
    name = type(dataset).__name__
    assert any(f"sample 3 of {name} (epoch 0, position 3, stage fetch)" in note for note in caught.value.__notes__)


class TooMany(Faulty):
    def __getitems__(self, indices: list[int]) -> list[int]:
        raise TypeError("not that many")


def test_a_batch_that_fails_as_no_sample_does_is_named_as_a_batch() -> None:
    with pytest.raises(TypeError, match="not that many") as caught:
        list(fl.DataLoader(Subset(TooMany(), [0, 1]), 2))
    assert any("(positions 0 to 1) of Subset" in note for note in caught.value.__notes__)


class Unreadable(Faulty):
    error: Exception = ValueError("nothing to read")

    def __getitem__(self, index: int) -> int:
        raise self.error


@pytest.mark.parametrize(("workers", "method"), PLACES)
@pytest.mark.parametrize("action", ["skip", "replace"])
def test_an_epoch_in_which_every_sample_fails_is_an_error(workers: int, method: Any, action: Any) -> None:
    policy = fl.ErrorPolicy(action, limit=None)
    with fl.DataLoader(Unreadable(), 4, num_workers=workers, worker_method=method, on_error=policy) as loader:
        for epoch in range(2):
            with pytest.raises(fl.errors.ErrorLimitError, match=rf"all 12 samples of epoch {epoch} failed.*to read"):
                list(loader)


ROWS = [{"label": 1}, {"label": 2}, {"label": None}, {"label": 4}, {"label": 5}, {"text": "x"}]


@pytest.mark.parametrize(("workers", "method"), PLACES)
@pytest.mark.parametrize(("action", "batches"), [("skip", [[1, 2], [4, 5]]), ("replace", [[1, 2, 4], [4, 5]])])
def test_a_sample_that_no_batch_can_hold_is_a_bad_one(workers: int, method: Any, action: Any, batches: Any) -> None:
    rows = Rows(ROWS[:5])
    with fl.DataLoader(rows, 3, num_workers=workers, worker_method=method, on_error=action) as loader:
        assert [batch["label"].tolist() for batch in loader] == batches
        assert loader.stats().skipped == 1


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


@pytest.mark.parametrize(("rows", "bad"), [([0, 1, 2], 2), ([0, 1, 5], 5)])
def test_a_sample_that_fits_into_no_batch_is_named(rows: list[int], bad: int) -> None:
    with pytest.raises(Exception, match=r".") as caught:
        next(iter(fl.DataLoader(Rows(ROWS), 3, sampler=rows)))
    assert any(f"sample {bad} of Rows (epoch 0, position 2, stage collate)" in n for n in caught.value.__notes__)


def test_a_sample_that_fits_into_no_batch_is_found_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"label": 1}\n{"label": null}\n')
    data = JSONL(tmp_path / "a.jsonl")
    with pytest.raises(Exception, match=r".") as caught:
        next(iter(fl.DataLoader(data, 2)))
    assert any(f"line 2 of {tmp_path / 'a.jsonl'}" in note for note in caught.value.__notes__)
    with fl.DataLoader(data, 2, on_error="skip") as loader:
        assert [batch["label"].tolist() for batch in loader] == [[1]]


def test_samples_that_do_not_fit_together_are_nobodys_fault() -> None:
    with pytest.raises(Exception, match=r"."):
        next(iter(fl.DataLoader(Rows(ROWS), 3, sampler=[0, 1, 5], on_error="skip")))


def test_an_end_of_an_epoch_may_fail_where_its_beginning_did_not() -> None:
    data = Subset(Faulty(), [0, 1, 3])
    first = fl.DataLoader(data, 2, on_error="skip")
    next(iter(first))
    second = fl.DataLoader(data, 2, on_error="skip")
    second.load_state_dict(first.state_dict())
    assert lists(second) == []


def test_a_missing_package_is_no_fault_of_a_sample() -> None:
    data = Unreadable()
    data.error = fl.errors.MissingExtraError("pip install 'feedline[mds]'")
    with pytest.raises(fl.errors.MissingExtraError, match="pip install"):
        list(fl.DataLoader(data, 4, on_error="skip"))


@pytest.mark.parametrize("bad", ["ignore", "", None])
def test_an_unknown_policy_is_refused(bad: Any) -> None:
    with pytest.raises(fl.errors.ArgumentError, match="'raise', 'skip', 'replace'"):
        fl.DataLoader(Faulty(), on_error=bad)


@pytest.mark.parametrize("size", [0, -1, 2.5, "4"])
@pytest.mark.parametrize("taken", [0, 1])
def test_a_batch_size_that_was_set_to_no_positive_integer_is_refused(size: Any, taken: int) -> None:
    iterator = iter(loader := fl.DataLoader(range(12), 4))  # type: ignore[arg-type]
    batches = [next(iterator).tolist() for _ in range(taken)]
    loader.batch_sampler.batch_size = size  # type: ignore[union-attr]
    with pytest.raises(fl.errors.ArgumentError, match=f"batch_size must be an integer >= 1; it was set to {size!r}"):
        list(iterator if taken else loader)
    loader.batch_sampler.batch_size = 4  # type: ignore[union-attr]
    assert batches == [[0, 1, 2, 3]][:taken]
    assert len(list(loader)) == 3


def test_each_iteration_is_the_next_epoch_and_set_epoch_goes_back() -> None:
    loader = fl.DataLoader(Drawing(), 16, shuffle=True, seed=1)
    first, second = lists(loader), lists(loader)
    assert first != second
    loader.set_epoch(0)
    assert lists(loader) == first
    assert lists(loader) == second


def test_a_seed_does_not_touch_the_generators_of_the_process() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    list(fl.DataLoader(Drawing(), 4, shuffle=True, seed=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_of_a_subset_each_draw_their_own() -> None:
    indices, drawn = next(iter(fl.DataLoader(Subset(Drawing(), range(8)), 8, seed=1)))
    assert len(set(drawn.tolist())) == len(indices) == 8


def test_distributed_sampler_is_followed_and_its_epoch_advances_by_itself() -> None:
    sampler = DistributedSampler(range(10), num_replicas=2, rank=1, seed=4)
    loader = fl.DataLoader(list(range(10)), 2, sampler=sampler)
    for epoch in range(3):
        mine = [index for batch in loader for index in batch.tolist()]
        theirs = DistributedSampler(range(10), num_replicas=2, rank=1, seed=4)
        theirs.set_epoch(epoch)
        assert mine == list(theirs)


@pytest.mark.parametrize("ours", [True, False])
def test_an_epoch_set_again_is_read_again(ours: bool) -> None:
    def order() -> Any:
        return fl.samplers.Shuffled(10, 4) if ours else DistributedSampler(range(10), num_replicas=2, rank=1, seed=4)

    sampler, theirs = order(), order()
    loader = fl.DataLoader(list(range(10)), 2, sampler=sampler)
    for epoch in (0, 0, 1, 1, 0):  # a trainer that evaluates twice per epoch
        sampler.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert [index for batch in loader for index in batch.tolist()] == list(theirs)
    theirs.set_epoch(1)
    assert [index for batch in loader for index in batch.tolist()] == list(theirs)


def test_two_ways_to_split_the_data_contradict_each_other() -> None:
    sampler = DistributedSampler(range(10), num_replicas=2, rank=1)
    with pytest.raises(fl.errors.ArgumentError, match="Remove one of them"):
        iter(fl.DataLoader(list(range(10)), sampler=sampler, distributed=(0, 2)))


@pytest.mark.parametrize("bad", ["all", (2, 2), (0,), 3, (-1, 2)])
def test_a_wrong_rank_is_refused(bad: Any) -> None:
    with pytest.raises(fl.errors.ArgumentError, match="distributed"):
        fl.DataLoader([1, 2], distributed=bad)


def test_rank_and_world_size_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert lists(fl.DataLoader(list(range(8)), 2, distributed="auto")) == [[2, 3], [6, 7]]
    monkeypatch.delenv("RANK")
    with pytest.raises(fl.errors.ArgumentError, match="torchrun"):
        fl.DataLoader([1, 2], distributed="auto")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_begins_the_epoch_that_the_loader_would_begin(clone: Any) -> None:
    loader = fl.DataLoader(Drawing(), 4, shuffle=True, seed=2)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    twin = clone(loader)
    rest = lists(batches)
    assert lists(twin) == lists(loader)
    loader.load_state_dict(state)
    assert lists(clone(loader)) == lists(loader) == rest


def test_a_new_loader_has_no_part_of_an_iteration() -> None:
    loader = fl.DataLoader(Drawing(), 4, shuffle=True)
    assert not RUNNING & vars(loader).keys()
    next(iter(loader))
    assert {"_fl_pools", "_fl_monitor", "_fl_live"} <= vars(loader).keys()
    assert not RUNNING & vars(copy.copy(loader)).keys()
    assert not RUNNING & vars(Whole.from_state(dict(vars(loader)))).keys()


RUNNING = {"_fl_pools", "_fl_progress", "_fl_plan", "_fl_live", "_fl_monitor", "_fl_contract", "_fl_step"}


class Whole(fl.DataLoader[Any]):
    """Takes the whole dictionary of another loader."""

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Whole:
        loader = cls.__new__(cls)
        loader.__setstate__(state)
        return loader


def test_all_threads_get_the_same_part_of_a_loader() -> None:
    at_once = threading.Barrier(2, timeout=60)

    def make() -> list[int]:
        at_once.wait()
        return []

    class Holder:
        part = RunningPart(make)

    holder = Holder()
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: holder.part, range(2))
    assert first is second is holder.part


def test_a_copy_may_be_made_after_a_framework_took_a_state_for_several_batches() -> None:
    loader = fl.DataLoader(Drawing(), 4, seed=2)
    next(iter(loader))
    loader._fl_step.at(loader._fl_progress, 1, 2, dict)
    assert lists(copy.deepcopy(loader)) == lists(pickle.loads(pickle.dumps(loader)))


def test_integers_of_numpy_are_integers() -> None:
    arguments = {"num_workers": np.int64(1), "prefetch_factor": np.int64(2), "worker_method": "process"}
    with fl.DataLoader(Drawing(), 4, seed=2, **arguments) as loader:
        assert lists(loader) == lists(fl.DataLoader(Drawing(), 4, seed=2))


class Keyed:
    """Samples of keys that cannot be sliced as lists are; the dataset has no length."""

    def __getitem__(self, key: Any) -> int:
        if key["a"] == 2:
            raise ValueError
        return int(key["a"])


class Key(dict[Any, Any]):
    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(repr(key) if isinstance(key, slice) else key)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_may_yield_any_object(workers: int) -> None:
    keys = [Key(a=1), Key(a=3)]
    with fl.DataLoader(Keyed(), batch_size=None, sampler=keys, num_workers=workers, worker_method="process") as loader:
        assert list(loader) == [1, 3]


class Endless:
    def __getitem__(self, index: int) -> int:
        return 1 // index


def test_a_dataset_without_a_length_has_no_neighbors() -> None:
    with fl.DataLoader(Endless(), 2, sampler=[0, 1], on_error="replace") as loader:
        assert lists(loader) == [[1]]


class Counted(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return 11


@pytest.mark.filterwarnings("ignore:Counted has no partitions")
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [None, 2, 3])
def test_the_length_of_a_stream_is_that_of_the_rank(batch_size: int | None, drop_last: bool) -> None:
    drop = {} if batch_size is None else {"drop_last": drop_last}
    for rank in range(3):
        loader = fl.DataLoader(Counted(), batch_size, distributed=(rank, 3), **drop)
        assert len(loader) == len(list(loader))
    everything = fl.RankPolicy(ranks=(1, 3), reads_all=True)
    assert len(fl.DataLoader(Counted(), distributed=everything)) == len(Counted())


@pytest.mark.parametrize("in_memory", [True, False])
def test_workers_by_measurement_change_nothing(in_memory: bool) -> None:
    dataset = TensorDataset(torch.arange(640)) if in_memory else Drawing()
    expected = lists(fl.DataLoader(dataset, 4, shuffle=True, seed=2))
    with fl.DataLoader(dataset, 4, shuffle=True, seed=2, num_workers="auto") as loader:
        assert lists(loader) == expected


def test_a_pool_that_grows_and_shrinks_leaves_the_stream_alone() -> None:
    dataset = list(range(200))
    with fl.DataLoader(dataset, 2, shuffle=True, seed=2, num_workers=2, worker_method="process") as loader:
        seen = []
        for number, batch in enumerate(loader):
            seen.append(batch.tolist())
            if number in (10, 30, 50):
                loader._fl_pools._latest.resize({10: 4, 30: 1, 50: 2}[number])
    assert seen == lists(fl.DataLoader(dataset, 2, shuffle=True, seed=2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seed": "one"}, "seed must be a whole number"),
        ({"worker_method": "mpi"}, "'auto', 'thread', 'process'"),
        (
            {"worker_method": "thread", "num_workers": 1, "worker_init_fn": print},
            "worker_init_fn is for worker processes",
        ),
        ({"device": "nowhere"}, "device='nowhere'"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(fl.errors.ArgumentError, match=words):
        fl.DataLoader([1, 2, 3], **arguments)


def test_an_index_that_the_dataset_does_not_have_is_named_with_the_length() -> None:
    with pytest.raises(IndexError) as caught:
        list(fl.DataLoader([1, 2, 3], sampler=[0, 7]))
    assert any("sample 7" in note and "the dataset has 3 samples" in note for note in caught.value.__notes__)


def public_attributes(loader: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(loader).items() if not name.startswith("_")}


REBUILDS = [
    {},
    {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True, "seed": 3, "shuffle": True},
    {"num_workers": "auto", "on_error": "skip", "distributed": (0, 2), "device": "cpu"},
    {"num_workers": 1, "worker_method": "thread", "in_order": False, "recovery": fl.Recovery()},
]


@pytest.mark.parametrize("arguments", REBUILDS)
def test_public_attributes_are_arguments_or_torchs(arguments: dict[str, Any]) -> None:
    loader = fl.DataLoader(Drawing(), 4, **arguments)
    torchs = public_attributes(torch.utils.data.DataLoader(Drawing(), 4))
    assert set(public_attributes(loader)) - set(torchs) <= set(inspect.signature(fl.DataLoader).parameters)
    loader.close()


@pytest.mark.parametrize("arguments", REBUILDS)
def test_a_loader_can_be_rebuilt_from_its_public_attributes(arguments: dict[str, Any]) -> None:
    loader = fl.DataLoader(Drawing(), 4, **arguments)
    attributes = public_attributes(loader)
    for name in ("batch_size", "drop_last", "sampler", "dataset_kind"):  # implied by batch_sampler, or torch's own
        attributes.pop(name, None)
    rebuilt = fl.DataLoader(**attributes)
    assert {name: getattr(rebuilt, name) for name in attributes} == attributes
    assert len(rebuilt) == len(loader)
    loader.close()
    rebuilt.close()


def test_report_and_stats_speak_before_the_first_batch() -> None:
    loader = fl.DataLoader([1, 2, 3])
    assert loader.stats().batches == 0
    assert "No batch" in str(loader.report())


@pytest.mark.parametrize("batches", [False, True])
def test_the_rest_of_an_epoch_is_counted_from_any_cursor(batches: bool) -> None:
    """A state of another batch size or world size ends anywhere within a batch."""
    places = [Cursor(0, position) for position in range(13)]
    places += [Cursor(0, 2, ((4, 5), (8, 11))), Cursor(0, 0, ((5, 12),)), Cursor(0, 3, ((12, 13),))]
    for size, world, drop_last in product((1, 3, 5), (1, 2, 3), (False, True)):
        kind: Any = {"batch_sampler": fl.samplers.LengthBuckets([1] * 13, batch_size=1, drop_last=drop_last)}
        more = kind if batches else {"batch_size": size, "drop_last": drop_last}
        loader: Any = fl.DataLoader(list(range(13)), seed=0, distributed=(world - 1, world), **more)
        plan = loader._fl_make_plan(None)
        for cursor in places:
            assert plan.remaining(cursor) == len(list(plan.schedule.requests(cursor))), (cursor, size, world)


def test_a_resume_with_another_batch_size_knows_its_rest() -> None:
    made: Any = fl.DataLoader(list(range(85)), 10, seed=0)
    next(iter(made))
    resumed: Any = fl.DataLoader(list(range(85)), 30, seed=0)
    resumed.load_state_dict(made.state_dict())
    iterator = iter(resumed)
    assert len(iterator) == len(list(iterator)) == 3


def test_asking_on_after_the_end_and_closing_within_the_loop_leave_the_state_alone() -> None:
    loader = fl.DataLoader(Drawing(), 4, seed=1)
    batches = iter(loader)
    assert len(list(batches)) == 4
    assert [next(batches, None), next(batches, None)] == [None, None]
    assert loader.state_dict()["epoch"] == 1
    for number, _ in enumerate(loader):
        if number == 1:
            loader.close()
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 8)


class Gated(Drawing):
    """The first sample waits for the gate."""

    traits = fl.Traits(thread_safe=True)

    def __init__(self) -> None:
        self.gate = threading.Event()

    def __getitem__(self, index: int) -> int:
        if index == 0:
            self.gate.wait()
        return index


@pytest.mark.parametrize("in_order", [True, False])
def test_a_timeout_loses_nothing(in_order: bool) -> None:
    dataset = Gated()
    loader = fl.DataLoader(
        Subset(dataset, [0]), 1, num_workers=1, worker_method="thread", timeout=0.01, in_order=in_order
    )
    with loader:
        batches = iter(loader)
        with pytest.raises(fl.errors.WorkerStalledError, match=r"timed out after 0\.01 seconds"):
            next(batches)
        dataset.gate.set()
        loader._fl_pools._latest._timeout_s = 0
        assert lists(batches) == [[0]]


def test_threads_that_are_ending_do_not_keep_the_pool_from_closing(no_debris: Any) -> None:
    dataset = Gated()
    loader = fl.DataLoader(Subset(dataset, [0, 1, 2, 0, 3, 0]), 1, num_workers=2, worker_method="thread")
    iter(loader)
    pool = loader._fl_pools._latest
    pool.resize(1)
    dataset.gate.set()
    loader.close()


def test_setting_the_epoch_of_a_loaded_state_keeps_it() -> None:
    first = fl.DataLoader(Drawing(), 4, shuffle=True, seed=1)
    batches = iter(first)
    next(batches)
    second = fl.DataLoader(Drawing(), 4, shuffle=True, seed=1)
    second.load_state_dict(first.state_dict())
    second.set_epoch(0)
    assert lists(second) == lists(batches)
    with pytest.raises(fl.errors.ArgumentError, match="epoch must be >= 0"):
        second.set_epoch(-1)


def test_a_loaded_state_survives_an_iteration_that_could_not_start() -> None:
    first = fl.DataLoader(Drawing(), 4, seed=1)
    next(iter(first))
    second = fl.DataLoader(Drawing(), 4, seed=1, timeout=1)
    second.load_state_dict(first.state_dict())
    with pytest.raises(AssertionError):
        iter(second)
    second.timeout = 0
    assert [batch[0][0] for batch in lists(second)] == [4, 8, 12]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position": 1000}, "position"),
        ({"order": '{"seed": "x"}'}, "seed"),
        ({"order": 3}, "order"),
        ({"order": None}, "order"),
    ],
)
def test_a_state_that_cannot_be_taken_up_is_refused_when_it_is_loaded(change: dict[str, Any], words: str) -> None:
    shuffled = "order" in change
    first = fl.DataLoader(Drawing(), 4, shuffle=shuffled)
    next(iter(first))
    state = {**first.state_dict(), **change}
    if state.get("order", 0) is None:
        del state["order"]
    with pytest.raises(fl.errors.StateError, match=words):
        fl.DataLoader(Drawing(), 4, shuffle=shuffled).load_state_dict(state)


class Legacy(Drawing):
    """Draws from torch's global generator."""

    traits = fl.Traits(thread_safe=True)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def test_threads_never_seed_what_they_share_and_say_so_when_a_transform_draws_from_it() -> None:
    with (
        pytest.warns(UserWarning, match=r"Legacy draws from torch, which all worker threads share"),
        fl.DataLoader(Legacy(), 4, seed=1, num_workers=2) as loader,
    ):
        drawn = [value for batch in loader for value in batch.tolist()]
    assert len(set(drawn)) == len(drawn)


class Dice:
    """Sampler that draws each index from torch's global generator."""

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(40, ())) for _ in range(64))


def test_draws_of_a_sampler_are_not_taken_for_those_of_the_dataset() -> None:
    order = as_index_sampler(Dice())
    order.begin(0)

    def build(_request: Any, _allocate: Any) -> Any:
        training = threading.Thread(target=order.take, args=(0, 0, 1))
        training.start()
        training.join()
        return len(order._items)

    state = torch.get_rng_state()
    assert GlobalRngCheck(build, Drawing())(None, None) == 1
    assert not torch.equal(state, torch.get_rng_state())


def test_seeds_of_another_loader_are_not_taken_for_draws_of_the_dataset() -> None:
    """As those of the second loader of `zip(first, second)`, while the first one builds its first batch."""
    second = fl.DataLoader(Drawing(), 4, num_workers=1, worker_method="thread")

    def build(_request: Any, _allocate: Any) -> Any:
        return len(next(iter(second))[0])

    state = torch.get_rng_state()
    with second:
        assert GlobalRngCheck(build, Drawing())(None, None) == 4
    assert not torch.equal(state, torch.get_rng_state())


def test_without_reseeding_inline_batches_still_differ() -> None:
    drawn = [value for batch in fl.DataLoader(Legacy(), 4, seed=1, worker_method="thread") for value in batch.tolist()]
    assert len(set(drawn)) == len(drawn)


def test_bad_samples_of_gathered_datasets_follow_the_policy_too() -> None:
    data = TensorDataset(torch.arange(4))
    loader = fl.DataLoader(data, 2, sampler=[0, 1, 20, 2], on_error="skip")
    assert lists(loader) == [[[0, 1]], [[2]]]


def test_padded_rows_of_a_rank_are_plain_integers_that_can_be_replaced() -> None:
    loader = fl.DataLoader(Faulty(), 8, sampler=fl.samplers.Subset([5, 6, 3]), distributed=(1, 2), on_error="replace")
    assert lists(loader) == [[5, 5]]


def test_ranks_divide_an_endless_order() -> None:
    order = fl.samplers.Infinite(fl.samplers.Shuffled(5, 1))
    ranks = [fl.DataLoader(list(range(5)), 2, sampler=order, distributed=(rank, 2)) for rank in range(2)]
    batches = [[batch.tolist() for batch in islice(rank, 4)] for rank in ranks]
    assert [row for step in zip(*batches, strict=True) for batch in step for row in batch] == order.take(
        0, 0, 16
    ).tolist()


def test_the_epoch_set_on_a_sampler_of_ours_counts() -> None:
    sampler = fl.samplers.Shuffled(16, 0)
    loader = fl.DataLoader(list(range(16)), 16, sampler=sampler)
    sampler.set_epoch(3)
    assert lists(loader) == [sampler.take(3, 0, 16).tolist()]
    assert lists(loader) == [sampler.take(4, 0, 16).tolist()]


@pytest.mark.parametrize(
    "arguments", [{"batch_size": None}, {"sampler": [1, 2, 3]}, {"dataset": {"a": 1, "b": 2}, "sampler": ["a", "b"]}]
)
def test_measuring_asks_for_nothing_that_the_order_does_not_ask_for(arguments: dict[str, Any]) -> None:
    dataset = arguments.pop("dataset", {0: "bad", 1: 1, 2: 2, 3: 3} if "sampler" in arguments else [1, 2, 3])
    with fl.DataLoader(dataset, num_workers="auto", **arguments) as loader:
        assert len(list(loader)) == len(arguments.get("sampler", dataset))


def test_an_empty_batch_with_a_seed() -> None:
    assert list(fl.DataLoader([1, 2], batch_sampler=[[0], [], [1]], collate_fn=list, seed=0)) == [[1], [], [2]]


def test_a_collate_function_that_wraps_a_builtin_draws_by_the_seed() -> None:
    @functools.wraps(list)  # which copies the `__module__` of builtins
    def noisy(samples: list[Any]) -> list[float]:
        return torch.rand(len(samples)).tolist()

    class Plain(list[int]):
        traits = fl.Traits(is_random=False)

    first, second = (list(fl.DataLoader(Plain(range(4)), 2, collate_fn=noisy, seed=0)) for _ in range(2))
    assert first == second


def test_a_stream_has_no_policy_for_errors() -> None:
    with pytest.raises(fl.errors.ArgumentError, match="map-style"):
        fl.DataLoader(Stream(), on_error="skip")


class Breaking(IterableDataset[int]):
    """An iterator that raises once and can go on."""

    def __iter__(self) -> Any:
        return Broken()


class Broken:
    def __init__(self) -> None:
        self.number = -1

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        self.number += 1
        if self.number == 3:
            raise ValueError("number 3")
        if self.number >= 8:
            raise StopIteration
        return self.number


def test_a_stream_that_raised_and_continues_loses_one_batch_only_and_can_be_resumed() -> None:
    loader = fl.DataLoader(Breaking(), 2)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(ValueError, match="number 3"):
        next(batches)
    assert next(batches).tolist() == [4, 5]
    state = json.loads(json.dumps(loader.state_dict()))
    assert lists(batches) == [[6, 7]]
    again = fl.DataLoader(Breaking(), 2)
    again.load_state_dict(state)
    assert lists(again) == [[6, 7]]


def test_a_trace_of_the_latest_batches(tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(20))
    loader = fl.DataLoader(data, 4, num_workers=2, worker_method="thread", seed=0, distributed=(1, 2), shuffle=True)
    loader.trace(tmp_path / "before.json")
    assert json.loads((tmp_path / "before.json").read_text())["traceEvents"] == []
    for _ in loader:
        pass
    loader.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1}
    assert [event["name"] for event in events].count("fetch") == 3
    assert {"wait", "step"} <= {event["name"] for event in events}


@pytest.mark.parametrize("splits", [True, False])
def test_auto_prepares_processes_only_where_it_may_choose_them(splits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server imports torch, which wastes memory where threads share the work on a batch."""
    monkeypatch.setattr("feedline.loader.building.builder.BatchBuilder.supports_threads", property(lambda _: splits))
    started = list[bool]()
    monkeypatch.setattr("feedline.workers.process.fork_server.start", lambda: started.append(True))
    data = TensorDataset(torch.arange(4))
    data.traits = fl.Traits(thread_safe=True)  # type: ignore[attr-defined]
    fl.DataLoader(data, num_workers="auto")
    assert not started  # workers are forked from this process
    with default_start_method("spawn"):
        fl.DataLoader(data, num_workers="auto")
    assert bool(started) != splits


class _Threads(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return threading.get_ident()


@pytest.mark.parametrize("method", ["thread", "process", "auto"])
def test_without_workers_their_kind_does_not_matter(method: Any) -> None:
    batches = list(fl.DataLoader(_Threads(), 2, num_workers=0, worker_method=method))
    assert {int(thread) for batch in batches for thread in batch} == {threading.get_ident()}


@pytest.mark.parametrize("method", ["thread", "process"])
def test_a_forked_child_gets_persistent_workers_of_its_own(method: Any) -> None:
    dataset = TensorDataset(torch.arange(10))
    arguments: dict[str, Any] = {"num_workers": 1, "worker_method": method, "persistent_workers": True}
    with fl.DataLoader(dataset, 5, **arguments) as loader:
        list(loader)
        iterator = iter(loader)
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)  # instead of a wait for workers that this process does not have
            try:
                with pytest.raises(WorkerError, match="forked from it"):
                    list(islice(iterator, 3))
                found = [batch.tolist() for (batch,) in loader]
                loader.close()
                os._exit(0 if found == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(list(loader)) == 2


class Deadly:
    """Its samples end their worker while a file exists."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if self.file.exists():
            os._exit(3)
        return index


def test_persistent_workers_that_died_too_often_are_replaced_in_the_next_epoch(tmp_path: Path) -> None:
    (tmp_path / "kill").touch()
    dataset, recovery = Deadly(tmp_path / "kill"), fl.Recovery(deaths_per_epoch=0)
    with fl.DataLoader(dataset, 2, num_workers=1, persistent_workers=True, recovery=recovery) as loader:
        with pytest.raises(fl.errors.WorkerDiedError):
            list(loader)
        (tmp_path / "kill").unlink()
        assert lists(loader) == [[0, 1], [2, 3]]
