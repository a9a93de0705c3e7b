"""Clients of live streams that fail, and sources that lose messages, with fake connections."""

from __future__ import annotations

import dataclasses
import os
import resource
import sqlite3
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from line_server import LineServer, line_server
from torch.utils.data import DataLoader as TorchDataLoader

import feedline as fl
from feedline import errors, streams
from feedline.streams.live.kafka import KafkaClient
from feedline.streams.live.reader import LiveReader
from feedline.streams.live.redis import RedisClient
from feedline.streams.live.sql import SQLClient
from feedline.streams.live.terms import LiveLimits, LiveOptions, MessageRun, RetainedRange

TERMS = LiveOptions(None, "bytes", "earliest", 0.02, None, None, "raise", LiveLimits(patience_s=0))


@pytest.fixture
def server() -> Iterator[LineServer]:
    with line_server() as server:
        yield server


class Client:
    """Messages m0, m1, ... in pairs; the second poll of the first client raises after it has taken a pair."""

    made = 0

    def __init__(self, error: Exception) -> None:
        self.error, self.polls, self.at = error, 0, {0: 0}
        type(self).made += 1
        self.is_first = self.made == 1

    def seek(self, partition: int, place: int) -> None:
        if partition == 1 and self.is_first:
            raise self.error
        self.at[partition] = place

    def poll(self, partitions: list[int], most: int, timeout_s: float) -> list[MessageRun]:
        self.polls += 1
        first = self.at[0]
        self.at[0] += 2
        if self.is_first and self.polls == 2:
            raise self.error
        messages = [f"m{first}", f"m{first + 1}"]
        return [MessageRun(0, messages, [first + 1, first + 2]) for partition in partitions if partition == 0]

    def close(self) -> None:
        pass


ERRORS = [errors.SourceAccessError("refused"), errors.SourceUnavailableError("away"), KeyError("bare")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_any_error_of_a_poll_loses_no_message(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(Client, "made", 0)
    reader = LiveReader(lambda: Client(error), TERMS, lambda place: place, "source")
    reader.open(0, 0, None)
    seen = reader.draw(0, 2)[0]
    with pytest.raises(type(error)):
        reader.draw(0, 2)
    assert [*seen, *reader.draw(0, 2)[0], *reader.draw(0, 2)[0]] == [f"m{number}" for number in range(6)]


def test_a_partition_that_cannot_be_opened_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "made", 0)
    reader = LiveReader(lambda: Client(ERRORS[1]), TERMS, lambda place: place, "source")
    reader.open(0, 0, None)
    assert reader.draw(0, 2)[0] == ["m0", "m1"]
    with pytest.raises(errors.SourceUnavailableError):
        reader.open(1, 0, None)
    assert reader.draw(0, 2)[0] == ["m2", "m3"]
    assert Client.made == 2, "connected again, with all partitions"


class Note:
    """A message of librdkafka, or one of its errors."""

    def __init__(self, offset: int, name: str = "") -> None:
        self.place, self.said = offset, name

    def error(self) -> Any:
        return (
            SimpleNamespace(code=lambda: self.said, name=lambda: self.said, str=lambda: self.said)
            if self.said
            else None
        )

    def offset(self) -> int:
        return self.place

    def value(self) -> bytes:
        return b"v"


def kafka_client(lost: str) -> Any:
    client: Any = object.__new__(KafkaClient)
    client._kafka = SimpleNamespace(KafkaError=SimpleNamespace(_PARTITION_EOF="eof"))
    client._noted = []
    client._stream = SimpleNamespace(terms=dataclasses.replace(TERMS, lost=lost), topic="t", servers="h:1")
    client.sought = []
    client.retained = lambda _: RetainedRange(40, 50)
    client.seek = lambda *place: client.sought.append(place)
    return client


def test_an_end_of_a_kafka_partition_is_passed_by_later_messages() -> None:
    chunk = kafka_client("raise")._chunk
    assert chunk(0, [Note(10, "eof"), Note(10), Note(11)])[2:] == ([11, 12], None)
    assert chunk(0, [Note(10), Note(11, "eof")])[2:] == ([11], 11)


def test_kafka_offsets_that_are_lost_within_an_epoch_obey_lost() -> None:
    lost = [Note(10), Note(-1, "OFFSET_OUT_OF_RANGE")]
    with pytest.raises(errors.OffsetLostError, match="out of retention"):
        kafka_client("raise")._chunk(3, lost)
    client = kafka_client("skip")
    with pytest.warns(UserWarning, match=r"t\[3\]: .*continuing with the oldest message, at 40"):
        assert client._chunk(3, lost).places == [11]
    assert client.sought == [(3, 40)]


class FakeRedis:
    """One stream with the entries of these numbers."""

    def __init__(self, *numbers: int, last: int) -> None:
        self.numbers, self.last, self.deleted = list(numbers), last, 0

    def xinfo_stream(self, _: str) -> dict[str, Any]:
        return {
            "entries-added": self.last, "length": len(self.numbers), "last-generated-id": f"{self.last}-0".encode(),
            "first-entry": (f"{self.numbers[0]}-0".encode(), {}) if self.numbers else None,
            "max-deleted-entry-id": f"{self.deleted}-0".encode(),
        }  # fmt: skip

    def xread(self, behind: dict[bytes, str], count: int, block: int | None) -> Any:
        ((key, after),) = behind.items()
        found = [number for number in self.numbers if number > int(after.partition("-")[0])][:count]
        return [(key, [(f"{number}-0".encode(), {b"data": b"%d" % number}) for number in found])] if found else []

    def close(self) -> None:
        pass


class RedisStream(streams.Redis):
    fake: Any

    def open_client(self) -> RedisClient:
        client: Any = object.__new__(RedisClient)
        client._stream, client._client, client._places, client._field = self, self.fake, {}, b"data"
        client._ask = lambda question: question()
        return client  # type: ignore[no-any-return]


def redis_flow(fake: FakeRedis, **more: Any) -> Any:
    stream = RedisStream("k", server="redis://h", max_wait_s=0.01, decode=int, **more)
    stream.fake = fake
    return stream.partition(0, 0)


def drawn(flow: Any, times: int) -> list[int]:
    return [number for _ in range(times) for number in flow.draw(2).samples]


@pytest.mark.parametrize(
    ("numbers", "deleted"), [([1, 2, 3], 0), ([], 0), ([2], 3), ([], 3)], ids=["whole", "trimmed", "newest", "all"]
)
def test_a_redis_stream_ends_before_entries_that_were_deleted(numbers: list[int], deleted: int) -> None:
    fake = FakeRedis(*numbers, last=3)
    fake.deleted = deleted
    flow = redis_flow(fake, until="latest")
    seen = []
    for _ in range(20):  # a flow that does not end would give empty draws forever
        try:
            seen += drawn(flow, 1)
        except StopIteration:
            assert seen == numbers
            return
    raise AssertionError("the flow does not end")


def test_redis_entries_that_are_trimmed_within_an_epoch_are_noticed() -> None:
    fake = FakeRedis(1, 2, last=2)
    flow = redis_flow(fake)
    assert drawn(flow, 2) == [1, 2]
    fake.numbers, fake.last = [6, 7], 7
    with pytest.raises(errors.OffsetLostError, match="k@2-0 is out of retention"):
        drawn(flow, 2)
    fake.numbers, fake.last = [1, 2], 2
    flow = redis_flow(fake, lost="skip")
    assert drawn(flow, 2) == [1, 2]
    fake.numbers, fake.last = [6, 7], 7
    with pytest.warns(UserWarning, match="continuing with the oldest message"):
        assert drawn(flow, 2) == [6, 7]
    assert flow.state_dict()["place"] == ["7-0", 7]
    fake.numbers, fake.last = [], 9
    with pytest.warns(UserWarning, match="continuing with the oldest message"):
        assert drawn(flow, 2) == []


def test_redis_entries_that_are_deleted_once_read_are_not_lost() -> None:
    fake = FakeRedis(1, 2, last=2)
    flow = redis_flow(fake)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert drawn(flow, 2) == [1, 2]
        fake.numbers, fake.last = [3, 4, 5], 5  # the stream trims what was read
        assert drawn(flow, 3) == [3, 4, 5]
        fake.numbers, fake.last, fake.deleted = [6, 9], 9, 8  # others have deleted single entries
        assert drawn(flow, 2) == [6, 9]


@pytest.fixture
def database(tmp_path: Path) -> str:
    path = tmp_path / "rows.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table t(id integer primary key, shared int)")
        connection.executemany("insert into t(shared) values (?)", [(number // 5,) for number in range(40)])
    connection.close()
    return str(path)


def rows(database: str, cls: Any = streams.SQLRows, query: str = "select id, shared from t", **more: Any) -> Any:
    return cls(database, query, until="latest", settle_s=0, max_wait_s=0.05, **more)


@pytest.mark.parametrize("size", [3, 5, 10])
def test_rows_of_equal_keys_are_refused(database: str, size: int) -> None:
    with pytest.raises(errors.SourceError, match=r"have the key shared = \d, so .*a value of its own in each row"):
        list(fl.DataLoader(rows(database, key="shared"), size))
    # Rows 5, 10, ... have keys of their own, and the limit falls between two of them.
    alone = rows(database, query="select * from t where id % 5 = 0", key="shared")
    assert sum(len(batch["id"]) for batch in fl.DataLoader(alone, size)) == 8


def test_the_case_of_a_key_is_that_of_the_database(database: str) -> None:
    assert sum(len(batch["id"]) for batch in fl.DataLoader(rows(database, key="ID"), 7)) == 40
    with pytest.raises(errors.SourceError, match="id"):
        list(fl.DataLoader(rows(database, query="select shared from t"), 7))


class Committing(SQLClient):
    """A client of a source with groups."""

    broker: dict[int, list[int]]
    is_away = False

    def commit(self, places: Any) -> None:
        if self.is_away:
            raise errors.SourceUnavailableError("closed connection")
        for number, place in places.items():
            self.broker.setdefault(number, []).append(place)

    def committed(self, partition: int) -> None:
        return None


class Grouped(streams.SQLRows):
    def open_client(self) -> SQLClient:
        client = Committing(self)
        client.is_away = type(self).is_away
        return client

    is_away = False


def grouped(database: str) -> Any:
    stream = rows(database, Grouped, partitions=2)
    stream.terms = dataclasses.replace(stream.terms, group="g", limits=LiveLimits(commit_every_s=1000))
    return stream


def test_a_commit_has_the_partitions_of_its_rank(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broker: dict[int, list[int]] = {}
    monkeypatch.setattr(Committing, "broker", broker, raising=False)

    def begun(rank: int, state: Any = None) -> Any:
        stream = grouped(database)
        loader = fl.DataLoader(stream, 4, seed=0, distributed=(rank, 2))
        if state is not None:
            loader.load_state_dict(state)
        next(iter(loader))
        return stream, loader

    first = [begun(rank) for rank in (0, 1)]
    merged = fl.merge_states([loader.state_dict() for _, loader in first])
    second = [begun(rank, merged) for rank in (0, 1)]
    states = [loader.state_dict() for _, loader in second]
    for (stream, loader), state in zip(second, states, strict=True):
        stream.commit(state)
        loader.close()
    for _, loader in first:
        loader.close()
    latest = {number: places[-1] for number, places in broker.items()}
    assert latest == {0: 16, 1: 15}
    broker.clear()
    grouped(database).commit(fl.merge_states(states))
    assert broker == {0: [16], 1: [15]}, "a process that has not read the stream commits all"


def test_a_connection_for_commits_that_was_lost_is_replaced(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broker: dict[int, list[int]] = {}
    monkeypatch.setattr(Committing, "broker", broker, raising=False)
    monkeypatch.setattr(Grouped, "is_away", True)
    stream = grouped(database)
    with pytest.raises(errors.SourceUnavailableError):
        stream.acknowledge({0: {"place": 4}}, now=True)
    monkeypatch.setattr(Grouped, "is_away", False)
    stream.acknowledge({1: {"place": 3}}, now=True)
    assert broker == {0: [4], 1: [3]}


def test_torchs_loader_continues_after_the_last_row_that_it_has_taken(database: str) -> None:
    loader = TorchDataLoader(rows(database), batch_size=10)
    seen = [next(iter(loader))["id"].tolist() for _ in range(3)]
    assert seen == [list(range(first, first + 10)) for first in (1, 11, 21)]


def test_lines_that_are_too_long_are_left_out_with_all_of_their_parts(server: LineServer) -> None:
    server.send([b"0", b"1", b"2" * 700_000, b"3", b"4" * 300_000, b"5"])
    terms: dict[str, Any] = {"decode": int, "max_wait_s": 0.05, "until": "latest"}
    stream = streams.SocketLines(server.address, limits=LiveLimits(message_nbytes=1000), **terms)
    with pytest.raises(errors.MessageTooLargeError, match="line 2 has more than"):
        list(fl.DataLoader(stream, 2))
    loader = fl.DataLoader(stream, 2, on_error="skip", seed=0)
    assert [number for batch in loader for number in batch.tolist()] == [0, 1, 3, 5]
    assert loader.state_dict()["partitions"]
    whole = streams.SocketLines(server.address, **{**terms, "decode": "bytes"})
    assert [len(line) for batch in fl.DataLoader(whole, 2) for line in batch] == [1, 1, 700_000, 1, 300_000, 1]


def test_sockets_with_numbers_above_1024_are_read(server: LineServer) -> None:
    server.send([b"1", b"2"])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        stream = streams.SocketLines(server.address, decode=int, max_wait_s=0.05, stop_after=2)
        assert [batch.tolist() for batch in fl.DataLoader(stream, 2)] == [[1, 2]]
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
