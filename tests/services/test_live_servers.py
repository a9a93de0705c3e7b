"""Live streams on real servers of NATS, Redis and PostgreSQL, and on the mock cluster of librdkafka for Kafka.

The laws of all live streams are in tests/streams/live/test_live.py; these tests are of laws that depend on the source.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from kafka_cluster import MockKafka
from live_sources import PARTITIONS, SOURCES, KafkaSource, Source
from nats_server import guarded_nats, nats_server
from redis_server import redis_server
from sasl_broker import sasl_broker

import feedline as fl
from feedline import errors, streams

_names = (f"live{number}" for number in count())
QUICK = {"decode": "json", "max_wait_s": 0.05}


class Credentials(NamedTuple):
    """A source whose address `mine` is refused from `withdraw()` on, while `others` is not."""

    source: Source
    mine: str
    withdraw: Callable[[], None]
    others: str


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> Source:
    fixture = {"kafka": "kafka", "postgres": "postgres"}.get(request.param, f"{request.param}_address")
    made: Source = SOURCES[request.param](request.getfixturevalue(fixture), next(_names))
    return made


def received(loader: Any, steps: int | None = None) -> list[int]:
    return [number for batch in islice(loader, steps) for number in batch.tolist()]


def test_every_kind_of_worker_delivers_all_and_epochs_continue(source: Source) -> None:
    source.send(range(30))
    for number, method in enumerate(("thread", "process")):  # the other tests have no workers
        stream = source.stream(until="latest", **QUICK)
        with fl.DataLoader(stream, 4, seed=0, num_workers=2, worker_method=method) as loader:
            known = 30 + number
            assert sorted(received(loader)) == list(range(known))
            source.send([known])
            assert received(loader) == [known]


def test_cuts_resume_on_other_ranks_and_workers(source: Source) -> None:
    source.send(range(40))
    with fl.DataLoader(source.stream(until="latest", **QUICK), 4, seed=0) as loader:
        seen = Counter(received(loader, 3))
        state = json.loads(json.dumps(loader.state_dict()))
    source.send(range(40, 50))
    states = []
    for rank in range(2):
        ranks = fl.RankPolicy((rank, 2), uneven="stop")
        with fl.DataLoader(source.stream(until="latest", **QUICK), 3, seed=0, distributed=ranks) as loader:
            loader.load_state_dict(state)
            seen.update(received(loader))
            states.append(loader.state_dict())
    last = fl.DataLoader(source.stream(until="latest", **QUICK), 3, seed=0)
    last.load_state_dict(fl.merge_states(states))
    seen.update(received(last))
    seen.update(received(last))
    assert seen == Counter(range(50))


def test_a_partial_batch_comes_when_the_time_is_up(source: Source) -> None:
    source.send([7])
    with fl.DataLoader(source.stream(**QUICK), 64, seed=0) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [7]
        source.send([8])
        assert next(iterator).tolist() == [8]


def test_a_group_continues_after_the_delivered_messages(source: Source) -> None:
    group = "größe 1=é"  # characters that keys of NATS cannot have
    if not source.keeps_groups:
        with pytest.raises(TypeError, match="group"):
            source.stream(group=group)
        return
    source.send(range(60))
    limits = streams.LiveLimits(commit_every_s=0)
    with fl.DataLoader(source.stream(group=group, limits=limits, **QUICK), 4, seed=0) as loader:
        iterator = iter(loader)
        before = [number for batch in islice(iterator, 5) for number in batch.tolist()]
        last = before[-len(before) // 5 :]
    again = received(fl.DataLoader(source.stream(group=group, until="latest", **QUICK), 4, seed=0))
    assert Counter(again) == Counter(range(60)) - Counter(before) + Counter(last), "the last batch was not done with"
    others = received(fl.DataLoader(source.stream(group="größe 1", until="latest", **QUICK), 4, seed=0))
    assert sorted(others) == list(range(60))
    assert received(fl.DataLoader(source.stream(group=group, until="latest", **QUICK), 4, seed=0)) == []


def test_messages_that_do_not_parse_are_named(source: Source, tmp_path: Path) -> None:
    source.send_texts([(0, b"1"), (0, b"{broken"), (0, b"3")])
    with pytest.raises(json.JSONDecodeError) as raised:
        received(fl.DataLoader(source.stream(until="latest", **QUICK), 1, seed=0))
    assert "cannot be decoded; on_error='skip' leaves out such messages" in "".join(raised.value.__notes__)
    policy = fl.ErrorPolicy("skip", quarantine=tmp_path / "bad.jsonl")
    loader = fl.DataLoader(source.stream(until="latest", **QUICK), 2, seed=0, on_error=policy)
    assert sorted(received(loader)) == [1, 3]
    (line,) = (tmp_path / "bad.jsonl").read_text().splitlines()
    assert json.loads(line)["index"] in "".join(raised.value.__notes__)


def test_reading_ahead_is_bounded(source: Source) -> None:
    """If the loop stops, only the buffer and one answer of the source are read; all else stays at the source."""
    source.send(range(4_500))
    stream = source.stream(limits=streams.LiveLimits(buffer=50), **QUICK)
    with fl.DataLoader(stream, 10, seed=0) as loader:
        iterator = iter(loader)
        seen = next(iterator).tolist()
        held = [len(buffer.messages) for buffer in stream.reader(stream.runs)._buffers.values()]
        assert max(held) <= 50 + 1024
        assert sum(held) < 3_500
        rest = (number for batch in iterator for number in batch.tolist())
        assert sorted([*seen, *islice(rest, 4_500 - len(seen))]) == list(range(4_500))


def test_new_messages_only(source: Source) -> None:
    source.send(range(6))
    with fl.DataLoader(source.stream(start="latest", stop_after=3, **QUICK), 4, seed=0) as loader:
        iterator = iter(loader)
        source.send(range(6, 9))
        assert sorted(number for batch in iterator for number in batch.tolist()) == [6, 7, 8]


def test_a_server_that_does_not_answer_is_named(source: Source) -> None:
    stream = source.stream(server=source.unreachable, limits=streams.LiveLimits(connect_s=0.3), **QUICK)
    with pytest.raises(errors.SourceUnavailableError, match=r"check (servers|server|source)=|source=") as raised:
        iter(fl.DataLoader(stream, 4, seed=0, distributed=fl.RankPolicy((1, 2), uneven="stop")))
    notes = "".join(raised.value.__notes__)
    assert "on rank 1 of 2" in notes
    if type(source).__name__ != "KafkaSource":  # only its brokers know the partitions
        assert "while opening partition 1 (epoch 0)" in notes


def test_messages_out_of_retention_are_named(source: Source) -> None:
    source.send(range(9))
    with fl.DataLoader(source.stream(**QUICK), 1, seed=0) as loader:
        next(iter(loader))
        state = loader.state_dict()
    if not hasattr(source, "trim"):
        return
    source.trim()
    resumed = fl.DataLoader(source.stream(until="latest", **QUICK), 1, seed=0)
    resumed.load_state_dict(state)
    with pytest.raises(
        errors.OffsetLostError, match=r"out of retention.*lost='skip' continues with the oldest message"
    ):
        iter(resumed)


def test_offsets_of_kafka_out_of_retention(kafka: Any) -> None:
    """The mock brokers keep five megabytes of a partition."""
    kafka.send("retained", [b"1"], 0)
    with fl.DataLoader(streams.Kafka("retained", servers=kafka.servers, max_wait_s=0.05), 1, seed=0) as loader:
        next(iter(loader))
        state = loader.state_dict()
    kafka.send("retained", [b"2" * 900_000] * 8, 0)
    resumed = fl.DataLoader(streams.Kafka("retained", servers=kafka.servers, until="latest"), 1, seed=0)
    resumed.load_state_dict(state)
    with pytest.raises(errors.OffsetLostError, match=r"retained\[0\]@0 is out of retention"):
        iter(resumed)


def test_topics_and_settings_of_kafka(kafka: Any) -> None:
    with pytest.raises(errors.SourceError, match=r"the topic 'nowhere' does not exist on .*make it, or check its name"):
        iter(fl.DataLoader(streams.Kafka("nowhere", servers=kafka.servers), 4))
    wrong = streams.Kafka("t", servers=kafka.servers, settings={"no.such": 1})
    with pytest.raises(errors.ArgumentError, match=r'refuses the settings of Kafka.*"no\.such"'):
        iter(fl.DataLoader(wrong, 4))


def test_servers_and_streams_of_nats(nats_address: str) -> None:
    with pytest.raises(errors.SourceError, match=r"stream 'nowhere': not found .* make the stream, or check its name"):
        iter(fl.DataLoader(streams.NATS("nowhere", servers=nats_address), 4))


class GuardedKafka(KafkaSource):
    """Topics behind a broker that asks for a password; `server` is password@address."""

    def stream(self, **more: Any) -> Any:
        password, _, address = more.pop("server").partition("@")
        settings = {"security.protocol": "sasl_plaintext", "sasl.mechanism": "PLAIN", "sasl.username": "me"}
        return super().stream(server=address, settings={**settings, "sasl.password": password}, **more)


def test_credentials_of_kafka(kafka: MockKafka) -> None:
    with sasl_broker(kafka.servers, "right") as (address, _):
        source = GuardedKafka(kafka, next(_names))
        source.send([7])
        assert received(fl.DataLoader(source.stream(server=f"right@{address}", until="latest", **QUICK), 4)) == [7]

        def ask_with_another() -> None:
            def ask(connect_s: float) -> None:
                limits = streams.LiveLimits(connect_s=connect_s)
                iter(fl.DataLoader(source.stream(server=f"wrong@{address}", limits=limits, **QUICK), 4))

            with suppress(errors.SourceUnavailableError):  # a busy machine may need longer
                ask(2.0)
            ask(60.0)

        with pytest.raises(errors.SourceAccessError, match=r"refuse the credentials.*Check sasl\.username") as raised:
            ask_with_another()
        assert "wrong" not in str(raised.value)


def test_credentials_of_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server(tmp_path, password="right") as address:
        with pytest.raises(errors.SourceAccessError, match=r"refuses the credentials: .*server='env:NAME'"):
            iter(fl.DataLoader(streams.Redis("k", server=address, until="latest"), 4))
        monkeypatch.setenv("REDIS_URL", address.replace("//", "//:right@"))
        assert received(fl.DataLoader(streams.Redis("k", server="env:REDIS_URL", until="latest"), 4)) == []


def test_credentials_of_nats(tmp_path: Path) -> None:
    with nats_server(tmp_path, password="right") as address:
        source = SOURCES["nats"](address.replace("//", "//me:right@"), "guarded")
        source.send([7])
        assert received(fl.DataLoader(source.stream(until="latest", **QUICK), 4)) == [7]
        for wrong in (address, address.replace("//", "//me:wrong@")):
            stream = source.stream(server=wrong, limits=streams.LiveLimits(connect_s=5), **QUICK)
            with pytest.raises(errors.SourceAccessError, match=r"credentials are refused.*in settings=") as raised:
                iter(fl.DataLoader(stream, 4))
            assert "wrong" not in str(raised.value)


@contextmanager
def redis_credentials(folder: Path, _: pytest.FixtureRequest) -> Iterator[Credentials]:
    with redis_server(folder, password="old") as address:

        def withdraw() -> None:
            with redis.Redis.from_url(address.replace("//", "//:old@")) as client:
                client.config_set("requirepass", "new")
                client.client_kill_filter(_type="normal", skipme=True)

        old, new = (address.replace("//", f"//:{password}@") for password in ("old", "new"))
        yield Credentials(SOURCES["redis"](old, "withdrawn"), old, withdraw, new)


@contextmanager
def nats_credentials(folder: Path, _: pytest.FixtureRequest) -> Iterator[Credentials]:
    with guarded_nats(folder) as (address, change):
        source = SOURCES["nats"](address("old"), "withdrawn")
        yield Credentials(source, address("old"), lambda: change("new"), address("new"))


@contextmanager
def postgres_credentials(_: Path, request: pytest.FixtureRequest) -> Iterator[Credentials]:
    address = request.getfixturevalue("postgres")
    source = SOURCES["postgres"](address, next(_names))
    source.send([])
    source.run("CREATE ROLE reader LOGIN", f"GRANT SELECT ON {source.name} TO reader")
    ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'reader'"
    yield Credentials(
        source, address.replace("postgres@", "reader@"), lambda: source.run("ALTER ROLE reader NOLOGIN", ended), address
    )
    source.run("DROP OWNED BY reader", "DROP ROLE reader")


@contextmanager
def kafka_credentials(_: Path, request: pytest.FixtureRequest) -> Iterator[Credentials]:
    kafka = request.getfixturevalue("kafka")
    with sasl_broker(kafka.servers, "old") as (address, change):
        source = GuardedKafka(kafka, next(_names))
        yield Credentials(source, f"old@{address}", lambda: change("new"), f"new@{address}")


CREDENTIALS = {
    "redis": redis_credentials, "nats": nats_credentials, "postgres": postgres_credentials, "kafka": kafka_credentials
}  # fmt: skip


@pytest.mark.parametrize("name", CREDENTIALS)
def test_credentials_that_are_withdrawn_from_a_running_stream(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The error is raised at once, not after the patience for a missing server, and nothing is lost."""
    with CREDENTIALS[name](tmp_path, request) as (source, mine, withdraw, others):
        source.send(range(12))
        ranks = fl.RankPolicy((1, 2), uneven="stop")
        whole = received(fl.DataLoader(source.stream(server=mine, until="latest", **QUICK), 2, distributed=ranks))
        assert len(whole) == 4
        stream = source.stream(server=mine, limits=streams.LiveLimits(patience_s=3600), **QUICK)
        with fl.DataLoader(stream, 2, seed=0, distributed=ranks) as loader:
            iterator = iter(loader)
            seen = next(iterator).tolist()
            withdraw()
            with pytest.raises(
                errors.SourceAccessError, match=r"(?s)(refuses? the credentials|are refused).*(source=|settings=|env:)"
            ) as raised:
                seen.extend(number for batch in iterator for number in batch.tolist())
            state = loader.state_dict()
        notes = " ".join(raised.value.__notes__)
        assert re.search(r"of partition (1 of 3|[13] of 4) \(epoch 0\)", notes)
        assert "on rank 1 of 2" in notes
        resumed = fl.DataLoader(source.stream(server=others, until="latest", **QUICK), 2, seed=0, distributed=ranks)
        resumed.load_state_dict(state)
        assert sorted(seen + received(resumed)) == sorted(whole)


def test_messages_that_are_too_large_are_named_with_their_place(source: Source) -> None:
    source.send_texts([(0, b"1"), (0, b'"' + b"x" * 2000 + b'"'), (0, b"3")])
    terms = {"until": "latest", "limits": streams.LiveLimits(message_nbytes=1000), **QUICK}
    with pytest.raises(errors.MessageTooLargeError, match=r"larger than LiveLimits\.message_nbytes.*1,000") as raised:
        received(fl.DataLoader(source.stream(**terms), 1))
    assert "on_error='skip' leaves out such messages" in "".join(raised.value.__notes__)
    assert sorted(received(fl.DataLoader(source.stream(**terms), 1, on_error="skip"))) == [1, 3]


def test_more_ranks_than_partitions_are_named(source: Source) -> None:
    source.send(range(4))
    stream = source.stream(until="latest", **QUICK)
    count = stream.num_partitions
    said = rf"{count} partitions, fewer than the {count + 1} ranks: rank {count} would have no data"
    with pytest.raises(errors.ArgumentError, match=said) as raised:
        iter(fl.DataLoader(stream, 1, distributed=fl.RankPolicy((1, count + 1))))
    assert f"on rank 1 of {count + 1}" in "".join(raised.value.__notes__)


def test_errors_of_ranks_name_rank_partition_and_place(source: Source) -> None:
    source.send_texts([(0, b"1"), (1, b"{broken"), (2, b"3")])
    found = []
    for rank in range(2):
        stream = source.stream(until="latest", **QUICK)
        loader = fl.DataLoader(stream, 1, seed=0, distributed=fl.RankPolicy((rank, 2), uneven="stop"))
        try:
            received(loader)
        except json.JSONDecodeError as error:
            found.append((rank, "\n".join(error.__notes__)))
    ((rank, notes),) = found
    assert re.search(r"(@|id = )\S+ cannot be decoded", notes)
    (partition,) = re.findall(r"of partition (\d) of \d \(epoch 0\)", notes)
    assert f"on rank {int(partition) % 2} of 2" in notes
    assert rank == int(partition) % 2


def test_fields_of_redis(redis_address: str) -> None:
    source = SOURCES["redis"](redis_address, next(_names))
    source.send([5])
    missing = streams.Redis([source.name + "-2"], server=redis_address, field="body", decode="json", until="latest")
    with pytest.raises(errors.SampleError, match="the entry has no field 'body', but data: pass field="):
        received(fl.DataLoader(missing, 1))
    whole = streams.Redis(
        [source.name + "-2"], server=redis_address, field=None, until="latest", decode=lambda entry: int(entry[b"data"])
    )
    assert received(fl.DataLoader(whole, 1)) == [5]


def test_rows_of_slow_transactions_are_waited_for(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction takes a key; another one takes the next key and ends first."""
    from adbc_driver_postgresql import dbapi

    now_s = 0.0
    monkeypatch.setattr("feedline.streams.live.sql.monotonic", lambda: now_s)
    source = SOURCES["postgres"](postgres, next(_names))
    source.send([])
    with closing(source.stream(settle_s=2.0).open_client()) as client:

        def drawn() -> list[int]:
            runs = client.poll(range(PARTITIONS), 8, 0.0)
            return sorted(json.loads(row["content"]) for run in runs for row in run.messages)

        for partition in range(PARTITIONS):
            client.seek(partition, 0)
        with dbapi.connect(postgres) as slow, slow.cursor() as cursor:
            cursor.execute(f"INSERT INTO {source.name} (content) VALUES ('1')")
            source.send([2])
            assert drawn() == [], "the key was just seen"
            slow.commit()
        now_s = 2.0
        assert drawn() == [1, 2]


@pytest.mark.parametrize("kind", ["postgres", "sqlite"])
def test_no_negative_key_is_left_out(kind: str, postgres: str, tmp_path: Path) -> None:
    from adbc_driver_postgresql import dbapi

    name, file = next(_names), tmp_path / "rows.db"

    def run(statement: str) -> None:
        with closing(dbapi.connect(postgres) if kind == "postgres" else sqlite3.connect(file)) as connection:
            with closing(connection.cursor()) as cursor:
                cursor.execute(statement)
            connection.commit()

    run(f"CREATE TABLE {name} (id bigint PRIMARY KEY)")
    address, decode = postgres if kind == "postgres" else file, itemgetter("id")
    stream = streams.SQLRows(
        address, f"SELECT id FROM {name}", partitions=3, decode=decode, settle_s=0, every_s=0.02, until="latest",
        max_wait_s=0.05,
    )  # fmt: skip
    with fl.DataLoader(stream, 2, seed=0) as loader:
        assert received(loader) == [], "the table is empty"
        run(f"INSERT INTO {name} VALUES {', '.join(f'({key})' for key in range(-8, -1))}")
        assert sorted(received(loader)) == list(range(-8, -1))
        run(f"INSERT INTO {name} VALUES {', '.join(f'({key})' for key in range(-1, 5))}")
        assert sorted(received(loader)) == list(range(-1, 5))
    later = fl.DataLoader(stream, 2, seed=0)
    assert sorted(received(later)) == list(range(-8, 5))


def test_faults_of_a_database_are_named(postgres: str) -> None:
    with pytest.raises(errors.SourceError, match=r"refuses the query: .*nowhere"):
        iter(fl.DataLoader(streams.SQLRows(postgres, "SELECT id FROM nowhere"), 4))
    absent = postgres.replace("postgres@", "stranger@")
    with pytest.raises(errors.SourceAccessError, match="refuses the credentials"):
        iter(fl.DataLoader(streams.SQLRows(absent, "SELECT 1 AS id"), 4))


def test_partitions_are_those_of_the_source(source: Source) -> None:
    source.send([1])
    assert source.stream(**QUICK).num_partitions == (4 if type(source).__name__ == "KafkaSource" else PARTITIONS)
