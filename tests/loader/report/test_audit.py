"""Audit logs prove exactly-once over kills and other world sizes, and each planted fault is found and named."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diagonals import at_night
from rounds import rounds

import feedline as fl
from feedline.loader.monitoring import monitor
from feedline.loader.report.attempts import Audit
from feedline.loader.report.audit import audit
from feedline.loader.report.audit_log import RECORD_NBYTES, read_audit_log

N, KILLS = 211, rounds(12, 20)
DATA: Any = torch.utils.data.TensorDataset(torch.arange(N))


class Lanes(torch.utils.data.IterableDataset[Any]):
    """Eleven partitions of unequal length; one is empty."""

    num_partitions = 11

    def __iter__(self) -> Iterator[Any]:
        return self.partition(0, 0)

    def partition(self, partition: int, epoch: int) -> Iterator[Any]:
        yield from ((partition, number) for number in range(5 * partition % 17))


@pytest.fixture(autouse=True)
def _one_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a test live in one process, where two loaders would have two labels."""
    monkeypatch.setattr(monitor, "_register", lambda _monitor, name: name)


def loader(path: Path, rank: int, world: int, **more: Any) -> Any:
    arguments = {"batch_size": 4, "shuffle": True, "seed": 3, "distributed": (rank, world), "log": path, **more}
    return fl.DataLoader(DATA, **arguments)


def stream(path: Path, rank: int, world: int, **more: Any) -> Any:
    return fl.DataLoader(Lanes(), seed=3, distributed=(rank, world), log=path, **{"batch_size": 3, **more})


def batches(path: Path, rank: int, world: int, **more: Any) -> Any:
    order = fl.samplers.LengthBuckets([1 + number % 7 for number in range(N)], batch_size=5, seed=1)
    more.pop("batch_size", None)
    return fl.DataLoader(DATA, batch_sampler=order, seed=3, distributed=(rank, world), log=path, **more)


def job(make: Callable[..., Any], path: Path, world: int, steps: int, state: Any, lag: list[int], **more: Any) -> Any:
    """Ranks in lockstep that are killed after `steps`, rank r `lag[r]` steps before; the state after each step.

    Ranks of a stream begin the next epoch when all of them have ended this one.
    """
    ranks = [make(path, rank, world, **more) for rank in range(world)]
    for each in ranks:
        if state is not None:
            each.load_state_dict(state)
    iterators: list[Any] = [iter(each) for each in ranks]
    states = [fl.merge_states([each.state_dict() for each in ranks])]
    for step in range(steps):
        if all(iterator is None for iterator in iterators):
            iterators = [iter(each) for each in ranks]
        for rank, each in enumerate(ranks):
            if step < steps - lag[rank] and iterators[rank] is not None:
                try:
                    next(iterators[rank])
                except StopIteration:
                    iterators[rank] = None if make is stream else iter(each)
                    if make is not stream:
                        next(iterators[rank])
        if step < steps - max(lag):
            states.append([json.loads(json.dumps(each.state_dict())) for each in ranks])
    return [merged for each in states if (merged := merged_or_none(each)) is not None]


def merged_or_none(states: Any) -> Any:
    """The state of all ranks, unless one of them was in the next epoch already."""
    if not isinstance(states, list):
        return states
    return None if len({state["epoch"] for state in states}) > 1 else fl.merge_states(states)


def audited(folder: Path, **more: Any) -> Audit:
    return audit([record for path in sorted(folder.glob("*.audit")) for record in read_audit_log(path)], **more)


@pytest.mark.filterwarnings("ignore:.*cannot share equally")
@pytest.mark.parametrize("make", [loader, batches, stream])
@pytest.mark.parametrize("seed", [0, *at_night(1)])
def test_random_kills_and_worlds_lose_nothing_and_repeat_nothing(
    make: Callable[..., Any], seed: int, tmp_path: Path
) -> None:
    """Many kills in each case; ranks lag, and states are some steps old."""
    draw, state = random.Random(seed), None
    for _ in range(KILLS):
        world = draw.randint(1, 4)
        more = {"batch_size": draw.randint(1, 6), "in_order": True}
        lag = [draw.randint(0, 2) for _ in range(world)]
        states = job(make, tmp_path / "run.jsonl", world, draw.randint(3, 12), state, lag, **more)
        state = states[draw.randrange(max(0, len(states) - 3), len(states))]
    found = audited(tmp_path)
    assert not found.faults, found.faults
    assert found.attempts >= KILLS
    if make is loader:
        assert all(count <= N for count in found.proven.values())
        assert max(found.proven.values()) == N


def test_complete_epochs_are_proven_against_the_schedule(tmp_path: Path) -> None:
    ranks = [loader(tmp_path / "run.jsonl", rank, 3) for rank in range(3)]
    for _ in range(2):
        for each in ranks:
            list(each)
    found = audited(tmp_path, indices_at=lambda epoch, places: ranks[0].sampler.take(epoch, 0, N)[places])
    assert not found.faults
    assert found.proven == {("TensorDataset", 0): N, ("TensorDataset", 1): N}


@pytest.mark.parametrize(("n", "size", "world"), [(5, 4, 2), (3, 2, 4), (1, 1, 3)])
@pytest.mark.parametrize("batched", [False, True])
def test_an_epoch_of_one_padded_batch_is_proven(n: int, size: int, world: int, batched: bool, tmp_path: Path) -> None:
    order = fl.samplers.LengthBuckets([1] * n, batch_size=size)
    kind = {"batch_sampler": order} if batched else {"batch_size": size, "shuffle": True}
    for rank in range(world):
        ours: Any = fl.DataLoader(list(range(n)), seed=3, distributed=(rank, world), log=tmp_path / "run", **kind)
        for _ in range(2):
            list(ours)
    found = audited(tmp_path)
    assert (found.faults, len(found.proven)) == ([], 2)


@pytest.mark.filterwarnings("ignore:.*has no partitions")
def test_a_stream_without_partitions_is_proven(tmp_path: Path) -> None:
    class Plain(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(40))

    def ranks(world: int) -> list[Any]:
        return [
            fl.DataLoader(Plain(), 4, seed=0, distributed=(rank, world), log=tmp_path / "run.jsonl")
            for rank in range(world)
        ]

    first = ranks(2)
    for each in map(iter, first):
        for _ in range(3):
            next(each)
    state = first[1].state_dict()
    for each in ranks(3):
        each.load_state_dict(state)
        for _ in range(2):
            list(each)
    found = audited(tmp_path)
    assert not found.faults
    assert found.proven["Plain", 0] in range(40, 43)


def test_batches_out_of_order_are_proven(tmp_path: Path) -> None:
    made = loader(tmp_path / "run.jsonl", 0, 1, num_workers=2, worker_method="thread", in_order=False)
    for _ in range(2):
        list(made)
    made.close()
    found = audited(tmp_path)
    assert not found.faults
    assert set(found.proven.values()) == {N}


def test_an_epoch_that_the_loop_leaves_is_a_note(tmp_path: Path) -> None:
    made = loader(tmp_path / "run.jsonl", 0, 1)
    for _ in zip(range(5), made, strict=False):
        pass
    list(made)
    found = audited(tmp_path)
    assert not found.faults
    assert found.notes == ["TensorDataset: the loop left epoch 0 at position 20 of 211"]


def test_a_killed_process_has_lost_no_record(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        for number, _ in enumerate(loader(tmp_path / "run.jsonl", 0, 1)):
            if number == 16:
                os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (record,) = read_audit_log(tmp_path / "run.jsonl.audit")
    assert (record["start"], record["stop"], record["batches"]) == (0, 4 * 17, 17)
    assert (tmp_path / "run.jsonl.audit").stat().st_size == RECORD_NBYTES


# Faults: each is planted into a run of three ranks that is killed once and resumed by two.


Change = Callable[[list[Any]], list[Any]]
"""A change of the requests of the rest of an epoch."""


def two_jobs(folder: Path, changes: dict[tuple[int, int], Change] | None = None) -> None:
    """Three ranks up to step 9, killed, and resumed from step 6 by two ranks to the end of the epoch.

    `changes` has the change of the requests of an attempt's rank.
    """

    def begun(made: Any, attempt: int, rank: int) -> Any:
        iteration = iter(made)
        change = (changes or {}).get((attempt, rank))
        if change is not None:
            iteration._requests = iter(change(list(iteration._requests)))
        return iteration

    ranks = [loader(folder / "run.jsonl", rank, 3) for rank in range(3)]
    iterations = [begun(each, 0, rank) for rank, each in enumerate(ranks)]
    for step in range(9):
        for each in iterations:
            next(each)
        if step == 5:
            state = ranks[2].state_dict()
    resumed = [loader(folder / "run.jsonl", rank, 2) for rank in range(2)]
    for rank, each in enumerate(resumed):
        each.load_state_dict({**state, "position": 72, "delivered_ahead": []})
        list(begun(each, 1, rank))


def edited(folder: Path, name: str, change: Change) -> None:
    path = folder / f"run.{name}.jsonl.audit"
    path.write_text("".join(json.dumps(record) + "\n" for record in change(read_audit_log(path))))


def changed(**fields: Any) -> Change:
    """The second record with other fields."""
    return lambda records: [records[0], {**records[1], **fields}]


def cut(stop: int, start: int) -> Change:
    """The second record as two, of which one ends at `stop` and one begins at `start`."""
    parts = {"stop": stop, "even": False}, {"start": start, "even": False}
    return lambda records: [records[0], *({**records[1], **part} for part in parts)]


FAULTS: dict[str, tuple[str, str, Change, str]] = {
    "no log": ("lost", "rank2", lambda r: [], "positions 0 to 71: the rows of rank 2 of 3, which has no audit log"),
    "no log of a resumed rank": (
        "lost",
        "rank1",
        lambda r: r[:1],
        "positions 72 to 210: the rows of rank 1 of 2",
    ),
    "no first log": ("lost", "rank0", lambda r: r[1:], "positions 0 to 71: the rows of rank 0 of 3"),
    "no end": ("lost", "rank1", changed(stop=200, settled=200), "positions 200 to 210: the rows of rank 1 of 2"),
    "no start": ("lost", "rank1", changed(start=80), "positions 72 to 79: the rows of rank 1 of 2"),
    "a gap": ("lost", "rank0", cut(120, 128), "positions 120 to 127: the rows of rank 0 of 2"),
    "an overlap": ("twice", "rank0", cut(128, 120), "positions 120 to 127: the rows of rank 0 of 2"),
    "a record twice": ("twice", "rank0", lambda r: [*r, r[1]], "positions 72 to 210: the rows of rank 0 of 2"),
    "a sum": ("other", "rank1", changed(sums=[70, 1, 2, 3]), "other rows than the rank's share"),
    "a count": ("other", "rank1", changed(sums=[1, 1, 1, 1]), "rank 1 of 2, positions 72 to 210: other rows"),
    "a digest": ("other", "rank1", changed(digest=5), "rank 1 of 2, positions 72 to 210: other indices"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_logs_is_found(name: str, tmp_path: Path) -> None:
    kind, rank, change, said = FAULTS[name]
    two_jobs(tmp_path)
    assert not audited(tmp_path, indices_at=_order).faults
    edited(tmp_path, rank, change)
    assert_found(audited(tmp_path, indices_at=_order), kind, said)


def assert_found(found: Audit, kind: str, said: str) -> None:
    assert [fault.text for fault in found.faults if fault.kind == kind and said in fault.text], found.faults
    assert not found.proven


def _order(epoch: int, places: Any) -> Any:
    return fl.samplers.Shuffled(N, 3).take(epoch, 0, N)[places]


def drops(which: int) -> Change:
    return lambda requests: requests[:which] + requests[which + 1 :]


def doubles(which: int) -> Change:
    return lambda requests: [*requests[:which], requests[which], *requests[which:]]


def shifted(requests: list[Any]) -> list[Any]:
    """Each request with the rows of the rank before."""
    return [each._replace(positions=[place - 4 for place in each.positions]) for each in requests]


def other_indices(requests: list[Any]) -> list[Any]:
    return [each._replace(indices=(each.indices + 1) % N) for each in requests]


LOADER_FAULTS: dict[str, tuple[str, int, int, Any, str]] = {
    "a batch left out": ("lost", 0, 1, drops(2), "positions 24 to 35: the rows of rank 1 of 3"),
    "a batch left out by a resumed rank": ("lost", 1, 0, drops(3), "positions 96 to 103: the rows of rank 0 of 2"),
    "the first batch left out": ("lost", 1, 1, drops(0), "positions 72 to 79: the rows of rank 1 of 2"),
    "a batch twice": ("twice", 0, 2, doubles(3), "positions 36 to 47: the rows of rank 2 of 3"),
    "rows of another rank": ("other", 1, 1, shifted, "rank 1 of 2"),
    "other samples": ("other", 1, 0, other_indices, "rank 0 of 2, positions 72 to 210: other indices"),
}


@pytest.mark.parametrize("name", LOADER_FAULTS)
def test_a_fault_of_a_loader_is_found(name: str, tmp_path: Path) -> None:
    kind, attempt, rank, change, said = LOADER_FAULTS[name]

    two_jobs(tmp_path, {(attempt, rank): change})
    for record in tmp_path.glob("*.audit"):
        assert record.stat().st_size % RECORD_NBYTES == 0
    assert_found(audited(tmp_path, indices_at=_order), kind, said)


def test_a_rank_with_another_seed_is_found(tmp_path: Path) -> None:
    for each in [iter(loader(tmp_path / "run.jsonl", rank, 3, seed=3 + (rank == 1))) for rank in range(3)]:
        next(each)
    assert_found(audited(tmp_path), "other", "rank 1 read another dataset or order")


def test_two_processes_of_one_rank_are_found(tmp_path: Path) -> None:
    for number, each in enumerate([iter(loader(tmp_path / f"run{k}.jsonl", k // 2, 2)) for k in range(3)]):
        for _ in range(3 + number):
            next(each)
    paths = sorted(tmp_path.glob("*.audit"))
    first = read_audit_log(paths[0])[0]["seen_s"] + 5
    records = [{**record, "seen_s": first} for path in paths for record in read_audit_log(path)]
    assert_found(audit(records), "twice", "two processes read as rank 0 of 2")


def test_ranks_that_begin_at_different_positions_are_found(tmp_path: Path) -> None:
    ranks = [loader(tmp_path / "run.jsonl", rank, 2) for rank in range(2)]
    ranks[1].load_state_dict({**ranks[1].state_dict(), "position": 40})
    for each in [iter(each) for each in ranks]:
        next(each)
    records = [record for path in sorted(tmp_path.glob("*.audit")) for record in read_audit_log(path)]
    late = max(record["seen_s"] for record in records) + 5
    found = audit([{**record, "seen_s": late} for record in records])
    assert_found(found, "other", "rank 1 began at position 40 of epoch 0 as one of 2 ranks, while others")


@pytest.mark.filterwarnings("ignore:.*cannot share equally")
@pytest.mark.parametrize(
    ("kind", "partition", "fields", "said"),
    [
        ("lost", 3, None, "partition 3 from sample 0 on"),
        ("lost", 5, {"start": 4}, "samples 0 to 3 of partition 5"),
        ("lost", 7, {"ended": False}, "partition 7 from sample 1 on"),
        ("twice", 5, ("rank", "instance", "started_s"), "of partition 5: by ranks 0 and 1"),
    ],
    ids=["no partition", "start", "end", "twice"],
)
def test_a_fault_of_a_stream_is_found(kind: str, partition: int, fields: Any, said: str, tmp_path: Path) -> None:
    ranks = [stream(tmp_path / "run.jsonl", rank, 2) for rank in range(2)]
    for _ in range(2):
        for each in ranks:
            list(each)
    records = [record for path in sorted(tmp_path.glob("*.audit")) for record in read_audit_log(path)]
    assert not audit(records).faults
    planted = [record for record in records if (record["epoch"], record["partition"]) == (0, partition)]
    kept = [record for record in records if record not in planted or kind == "twice"]
    if kind == "twice":  # another rank has delivered the same samples
        other = next(record for record in records if record["rank"] == 0)
        fields = {name: other[name] for name in fields}
    found = audit([*kept, *({**record, **fields} for record in planted if fields is not None)])
    assert [fault for fault in found.faults if fault.kind == kind and said in fault.text], found.faults
    assert ("Lanes", 0) not in found.proven


def all_records(folder: Path) -> list[dict[str, Any]]:
    return [record for path in sorted(folder.glob("*.audit")) for record in read_audit_log(path)]


@pytest.mark.filterwarnings("ignore:.*cannot share equally")
def test_the_end_of_the_only_epoch_of_a_stream_is_checked(tmp_path: Path) -> None:
    ranks = [stream(tmp_path / "run.jsonl", rank, 2) for rank in range(2)]
    for each in ranks:
        list(each)
    records = all_records(tmp_path)
    assert audit(records).proven == {("Lanes", 0): sum(5 * n % 17 for n in range(11))}
    for name, number in (("rank", 1), ("partition", 7)):
        found = audit([record for record in records if record[name] != number])
        assert "partition 7 from sample 0 on: no rank has read its end" in [fault.text for fault in found.faults]
        assert not found.proven
    killed = [{**record, "over": False, "ended": False} for record in records if record["rank"] == 0]
    found = audit(killed)
    assert (found.faults, found.notes) == ([], ["Lanes: rank 1 has no audit log of the last attempt"])


def test_what_a_stream_leaves_is_a_note(tmp_path: Path) -> None:
    made = stream(tmp_path / "run.jsonl", 0, 1)
    for _ in zip(range(3), made, strict=False):
        pass
    list(made)
    found = audited(tmp_path)
    assert not found.faults
    assert [note[:57] for note in found.notes] == ["Lanes: the loop left epoch 0 before the end of partition "]
    records = [{**record, "over": True, "stops": True} for record in all_records(tmp_path)]
    assert [note[:46] for note in audit(records).notes] == ["Lanes: uneven='stop' left out partition 1 from"]


def test_a_partition_ends_with_its_mark_and_not_with_the_epoch(tmp_path: Path) -> None:
    """As with `RankPolicy(uneven="stop")`, where the epoch ends with the first rank that has no batch."""
    made = stream(tmp_path / "run.jsonl", 0, 1)
    iteration = iter(made)
    next(iteration)
    log = iteration._progress.audit
    log.flush(ended=True)
    records = all_records(tmp_path)
    assert [(record["ended"], record["over"]) for record in records if record["stop"]] == [(False, True)]


def test_a_restarted_container_is_another_process(tmp_path: Path) -> None:
    """It has the same host and process id."""
    made = loader(tmp_path / "run.jsonl", 0, 1)
    for _ in zip(range(5), made, strict=False):
        pass
    made.set_epoch(1)
    list(made)
    assert not audited(tmp_path).faults  # the loop has left the epoch
    records = all_records(tmp_path)
    assert [record["epoch"] for record in records] == [0, 1]
    records[1]["process"] = "another"
    assert [fault.text for fault in audit(records).faults] == ["positions 20 to 210: all rows"]


def test_loaders_of_one_label_are_audited_apart(tmp_path: Path) -> None:
    """Each is made in a function: the label of the first is free again when the second begins."""
    small = torch.utils.data.TensorDataset(torch.arange(60))
    for rank in range(2):
        list(loader(tmp_path / "run.jsonl", rank, 2))
        list(fl.DataLoader(small, 4, seed=3, distributed=(rank, 2), log=tmp_path / "run.jsonl"))
    records = all_records(tmp_path)
    names = [("TensorDataset", 0), ("TensorDataset-2", 0)]
    assert audit(records).proven == dict(zip(names, (N, 60), strict=True))
    assert audit(records[::-1]).proven == audit(records).proven
    lost = audit([record for record in records if (record["rank"], record["length"]) != (1, N)])
    assert ["the rows of rank 1 of 2, which has no audit log" in fault.text for fault in lost.faults] == [True]
    assert lost.proven == {names[1]: 60}
    labels = [{**record, "loader": f"TensorDataset-{5 - record['rank']}"} for record in records]
    assert list(audit(labels).proven.values()) == [N, 60]


def test_two_equal_loaders_of_a_process_are_audited_apart(tmp_path: Path) -> None:
    for _ in range(2):
        list(loader(tmp_path / "run.jsonl", 0, 1))
    records = all_records(tmp_path)
    assert len(audit(records).proven) == 1  # the second run replaces the first
    records[1]["loader"] = "TensorDataset-3"
    assert len(audit(records).proven) == 2


def ahead(folder: Path, starts: range) -> Any:
    """A loader whose log has batches delivered ahead, as from workers that are slow at some samples."""
    made = fl.DataLoader(list(range(N)), 1, seed=3, in_order=False, log=folder / "run.jsonl")
    iteration: Any = iter(made)
    requests = list(iteration._requests)
    iteration._requests = iter([requests[place] for place in starts])
    list(zip(starts, iteration, strict=False))
    return made


def test_gaps_of_a_killed_attempt_are_no_loss_and_any_number_is_resumed(tmp_path: Path) -> None:
    first = ahead(tmp_path, range(1, 41, 2))
    found = audited(tmp_path)
    assert (found.faults, list(found.proven.values())) == ([], [0])
    resumed = fl.DataLoader(list(range(N)), 1, seed=3, in_order=False, log=tmp_path / "run.jsonl")
    resumed.load_state_dict(first.state_dict())
    list(resumed)
    found = audited(tmp_path)
    assert (found.faults, list(found.proven.values())) == ([], [N])
