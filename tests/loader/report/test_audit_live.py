"""Audit logs of live streams: exactly-once over kills, epochs and world sizes, and each planted fault is found."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from line_server import LineServer, line_server

import feedline as fl
from feedline import streams
from feedline.loader.monitoring import monitor
from feedline.loader.report.attempts import Audit
from feedline.loader.report.audit import audit
from feedline.loader.report.audit_log import read_audit_log

SERVERS = 5


@pytest.fixture
def servers() -> Iterator[list[LineServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(line_server()) for _ in range(SERVERS)]


@pytest.fixture(autouse=True)
def _one_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a test live in one process, where two loaders would have two labels."""
    monkeypatch.setattr(monitor, "_register", lambda _monitor, name: name)


def fill(servers: list[LineServer], start: int, stop: int) -> None:
    for place, server in enumerate(servers):
        server.send([str(n).encode() for n in range(start, stop) if n % len(servers) == place])


def loader(servers: list[LineServer], log: Path, ranks: tuple[int, int] = (0, 1), size: int = 3, **more: Any) -> Any:
    more = {"decode": int, "max_wait_s": 0.02, "until": "latest", **more}
    stream = streams.SocketLines([server.address for server in servers], **more)
    policy = fl.RankPolicy(ranks, uneven="stop" if ranks[1] > 1 else "allow")
    return fl.DataLoader(stream, size, seed=0, distributed=policy, log=log)


def records(folder: Path) -> list[dict[str, Any]]:
    return [record for path in sorted(folder.glob("*.audit")) for record in read_audit_log(path)]


def audited(folder: Path) -> Audit:
    return audit(records(folder))


def numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]


def test_kills_epochs_and_other_worlds_are_proven(servers: list[LineServer], tmp_path: Path) -> None:
    """Each of 15 attempts continues from a state that is up to three attempts old."""
    draw, states = random.Random(1), list[Any]()
    for attempt in range(15):
        fill(servers, 60 * attempt, 60 * attempt + 60)
        world = draw.randint(1, 3)
        path, size = tmp_path / "run.jsonl", draw.randint(1, 5)
        # No batch is cut short on a busy machine: the ranks would then end their epochs after other steps.
        ranks = [loader(servers, path, (rank, world), size, max_wait_s=30) for rank in range(world)]
        del states[len(states) - draw.randrange(min(3, len(states) or 1)) :]
        state = states[-1] if states else None
        for steps in draw.choices((None, 2, 1, 0), k=2):
            for each in ranks:
                if state is not None:
                    each.load_state_dict(state)
            iterations = [iter(each) for each in ranks]
            for iteration in iterations:
                numbers(islice(iteration, steps))
            if len({each.state_dict()["epoch"] for each in ranks}) > 1:
                # How much of each server the last world has read depends on arrival, so a rank may have less left than
                # these steps. Ranks that agree would end together.
                for iteration in iterations:
                    numbers(iteration)
            state = None
            states.append(fl.merge_states([json.loads(json.dumps(each.state_dict())) for each in ranks]))
        for each in ranks:
            each.close()
    found = audited(tmp_path)
    assert not found.faults, found.faults
    assert found.attempts >= 15


def test_epochs_that_continue_each_other_are_proven_one_by_one(servers: list[LineServer], tmp_path: Path) -> None:
    made, seen, each = loader(servers, tmp_path / "run.jsonl"), Counter[int](), []
    for epoch in range(3):
        fill(servers, 40 * epoch, 40 * epoch + 40)
        drawn = numbers(islice(made, 4) if epoch == 1 else made)  # one epoch is left early
        each.append(len(drawn))
        seen.update(drawn)
    assert seen == Counter(range(120))
    found = audited(tmp_path)
    assert not found.faults
    assert list(found.proven.values()) == each
    made.close()


def test_a_resumed_loader_reads_a_partition_only_in_its_next_epoch(servers: list[LineServer], tmp_path: Path) -> None:
    """Its record there says nothing of the state, which the loader has loaded in the epoch before."""
    servers = servers[:2]
    fill(servers, 0, 12)
    first = loader(servers, tmp_path / "run.jsonl", size=1, max_wait_s=30)
    iterator = iter(first)
    before: list[int] = []
    while len({number % 2 for number in before}) < 2:  # one message of each partition, or more
        before += numbers(islice(iterator, 1))
    state = first.state_dict()
    assert sorted(before + numbers(iterator)) == list(range(12))
    first.close()
    resumed = loader(servers, tmp_path / "run.jsonl", size=1, max_wait_s=30)
    resumed.load_state_dict(state)
    after = numbers(islice(resumed, 1))
    assert sorted(before + after + numbers(resumed)) == list(range(12))
    resumed.close()
    # Whether the other partition was asked for messages, too, and has a record, is a matter of time.
    found = audit(record for record in records(tmp_path) if record["start"] < record["stop"])
    assert not found.faults, found.faults
    assert sum(found.proven.values()) == 12


def test_what_was_rolled_back_does_not_count(servers: list[LineServer], tmp_path: Path) -> None:
    fill(servers, 0, 40)
    first = loader(servers, tmp_path / "run.jsonl")
    iterator = iter(first)
    before = numbers(islice(iterator, 3))
    state = first.state_dict()
    numbers(islice(iterator, 5))
    first.close()
    resumed = loader(servers, tmp_path / "run.jsonl")
    resumed.load_state_dict(state)
    assert Counter(before + numbers(resumed)) == Counter(range(40))
    found = audited(tmp_path)
    assert not found.faults
    assert list(found.proven.values()) == [40]


@pytest.mark.parametrize(("every_s", "again"), [(0.0, 0), (1000.0, 9)])
def test_a_run_without_a_state_continues_at_committed_places(
    every_s: float, again: int, servers: list[LineServer], tmp_path: Path
) -> None:
    """Messages delivered after the latest commit are delivered again, and the audit reports it."""
    servers[0].send([str(n).encode() for n in range(40)])
    limits = streams.LiveLimits(commit_every_s=every_s)
    for steps in (4, None):
        made = loader(servers[:1], tmp_path / "run.jsonl", group="train", limits=limits)
        iterator = iter(made)
        numbers(islice(iterator, steps))
        if steps:
            servers[0].acks["train"] = 12 - again  # as if the process were killed: closing commits what is left
            made.dataset._commits.pending.clear()
        made.close()
    found = audited(tmp_path)
    said = f"messages from {12 - again} to 12 of partition 0: rank 0 began at a committed place, without a state"
    assert [fault.text for fault in found.faults] == ([said] if again else [])


def planted(servers: list[LineServer], folder: Path) -> list[dict[str, Any]]:
    """The records of two ranks over two epochs."""
    for epoch in range(2):
        fill(servers, 40 * epoch, 40 * epoch + 40)
        if not epoch:
            ranks = [loader(servers, folder / "run.jsonl", (rank, 2)) for rank in range(2)]
        for each in ranks:
            numbers(each)
    for each in ranks:
        each.close()
    return records(folder)


FAULTS: dict[str, tuple[str, Any, str]] = {
    "no log of a partition": (
        "lost",
        lambda r: None if r["epoch"] == 0 else r,
        "the first 8 messages of partition 3, up to 8: no rank",
    ),
    "a later start": ("lost", lambda r: _at(r, 10, None), "messages from 8 to 10 of partition 3: rank 1 began after"),
    "an earlier end": ("lost", lambda r: _at(r, None, 5), "messages from 5 to 8 of partition 3"),
    "an earlier start": ("twice", lambda r: _at(r, 6, None), "messages from 6 to 8 of partition 3: by rank 1 again"),
    "a later end": ("twice", lambda r: _at(r, None, 11), "messages from 8 to 11 of partition 3: by rank 1 again"),
    "two ranks": ("twice", "copy", "messages from 0 to 8 of partition 3: by ranks 0 and 1"),
}


def _at(record: dict[str, Any], begun: int | None, reached: int | None) -> dict[str, Any]:
    """The record of the second epoch with another start, or that of the first with another end."""
    start, stop = record["places"]
    if begun is not None and record["epoch"] == 1:
        return {**record, "places": [begun, stop]}
    if reached is not None and record["epoch"] == 0:
        return {**record, "places": [start, reached]}
    return record


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, servers: list[LineServer], tmp_path: Path) -> None:
    kind, change, said = FAULTS[name]
    whole = planted(servers, tmp_path)
    assert not audit(whole).faults
    assert sum(audit(whole).proven.values()) == 80
    changed = []
    for record in whole:
        if record["partition"] != 3:
            changed.append(record)
        elif change == "copy":
            other = next(each for each in whole if each["rank"] == 0 and each["epoch"] == record["epoch"])
            changed += [record, {**record, **{field: other[field] for field in ("rank", "instance", "started_s")}}]
        else:
            changed += [planted for planted in [change(record)] if planted is not None]
    found = audit(changed)
    assert [fault for fault in found.faults if fault.kind == kind and said in fault.text], found.faults
    assert len(found.proven) < 2


def test_a_partition_without_any_record_is_a_note(servers: list[LineServer], tmp_path: Path) -> None:
    whole = planted(servers, tmp_path)
    found = audit([record for record in whole if record["partition"] != 4])
    assert not found.faults
    assert found.notes == ["SocketLines: no rank has a record of partition 4"]


def test_messages_that_the_source_has_deleted_are_lost(servers: list[LineServer], tmp_path: Path) -> None:
    servers[0].send([str(n).encode() for n in range(20)])
    made = loader(servers[:1], tmp_path / "run.jsonl", lost="skip")
    numbers(islice(made, 1))
    servers[0].drop(10)
    with pytest.warns(UserWarning, match="continuing with the oldest message"):
        assert numbers(made) == list(range(10, 20))
    found = audited(tmp_path)
    assert [fault.text for fault in found.faults] == ["messages from 3 to 10 of partition 0: rank 0 began after them"]
    made.close()
