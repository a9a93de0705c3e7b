"""Live streams lose and repeat nothing: over cuts, kinds of workers, ranks, deaths of workers, and lost connections."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from line_server import LineServer, line_server
from torch.utils.data import DataLoader as TorchDataLoader

import feedline as fl
from feedline import errors, streams

HANDS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2, "worker_method": "thread"},
    {"num_workers": 2, "worker_method": "process"},
]
NAMES = ["inline", "thread", "process"]


@pytest.fixture
def servers() -> Iterator[list[LineServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(line_server()) for _ in range(3)]


def fill(servers: list[LineServer], start: int, stop: int) -> None:
    """The numbers from start to stop, divided among the servers."""
    for place, server in enumerate(servers):
        server.send([str(n).encode() for n in range(start, stop) if n % len(servers) == place])


def lines(servers: list[LineServer], **more: Any) -> Any:
    more = {"decode": int, "max_wait_s": 0.05, "until": "latest", **more}
    return streams.SocketLines([server.address for server in servers], **more)


def received(loader: Any, count: int | None = None) -> list[int]:
    return [number for batch in islice(loader, count) for number in batch.tolist()]


@pytest.mark.parametrize("hands", HANDS, ids=NAMES)
def test_epochs_continue_each_other(no_debris: object, servers: list[LineServer], hands: dict[str, Any]) -> None:
    fill(servers, 0, 50)
    with fl.DataLoader(lines(servers), 4, seed=0, **hands) as loader:
        assert sorted(received(loader)) == list(range(50))
        fill(servers, 50, 61)
        part = received(loader, 1)  # left early: messages that were not delivered belong to the next epoch
        rest = received(loader)
        assert sorted(part + rest) == list(range(50, 61))
        assert received(loader) == []


@pytest.mark.parametrize("hands", HANDS, ids=NAMES)
def test_each_cut_resumes_exactly_with_other_workers(servers: list[LineServer], hands: dict[str, Any]) -> None:
    fill(servers, 0, 40)
    for cut in (0, 1, 3, 7):
        with fl.DataLoader(lines(servers), 4, seed=0, **hands) as loader:
            iterator = iter(loader)
            before = [number for batch in islice(iterator, cut) for number in batch.tolist()]
            state = json.loads(json.dumps(loader.state_dict()))
        resumed = fl.DataLoader(lines(servers), 5, seed=0)
        resumed.load_state_dict(state)
        assert Counter(before + received(resumed)) == Counter(range(40))


def test_a_state_holds_the_start_of_partitions_that_gave_nothing_yet(servers: list[LineServer]) -> None:
    fill(servers, 0, 9)
    loader = fl.DataLoader(lines(servers, start="latest", until=None), 2, seed=0)
    iter(loader)
    state = loader.state_dict()
    loader.close()
    fill(servers, 9, 15)
    resumed = fl.DataLoader(lines(servers, start="latest", stop_after=6, until=None), 2, seed=0)
    resumed.load_state_dict(state)
    assert sorted(received(resumed)) == list(range(9, 15))


def test_ranks_share_the_partitions_and_another_world_size_continues(servers: list[LineServer]) -> None:
    fill(servers, 0, 60)
    seen: Counter[int] = Counter()
    state = None
    for world in (2, 3, 1):
        states = []
        for rank in range(world):
            each = fl.DataLoader(lines(servers), 3, seed=0, distributed=fl.RankPolicy((rank, world), uneven="stop"))
            if state is not None:
                each.load_state_dict(state)
            seen.update(received(each, None if world == 1 else 2))
            states.append(each.state_dict())
            each.close()
        state = fl.merge_states(states)
    assert seen == Counter(range(60))


def test_states_of_ranks_merge_after_epochs_of_their_own(servers: list[LineServer]) -> None:
    """A rank's marks of the partitions of others are old, and must not replace newer ones."""
    state, seen = None, Counter[int]()
    for leg in range(4):
        fill(servers, 12 * leg, 12 * leg + 12)
        states = []
        for rank in range(2):
            each = fl.DataLoader(lines(servers), 3, seed=0, distributed=fl.RankPolicy((rank, 2), uneven="stop"))
            if state is not None:
                each.load_state_dict(state)
            seen.update(received(each))
            seen.update(received(each))
            states.append(each.state_dict())
            each.close()
        state = fl.merge_states(states)
    assert seen == Counter(range(48))


def test_a_batch_is_delivered_when_the_time_is_up(servers: list[LineServer]) -> None:
    servers[0].send([b"1", b"2", b"3"])
    loader = fl.DataLoader(lines(servers, until=None, max_wait_s=0.05), 100)
    assert next(iter(loader)).tolist() == [1, 2, 3]
    loader.close()


@pytest.mark.parametrize("hands", HANDS[:2], ids=NAMES[:2])
def test_partitions_without_messages_do_not_delay_the_others(servers: list[LineServer], hands: dict[str, Any]) -> None:
    servers[2].send([str(n).encode() for n in range(400)])
    with fl.DataLoader(lines(servers, until=None, max_wait_s=30.0), 10, **hands) as loader:
        assert received(loader, 40) == list(range(400))


def test_what_is_read_ahead_is_bounded() -> None:
    with line_server() as server:
        server.send([b"7" * 100] * 20_000)
        stream = lines([server], until=None, decode="bytes", limits=streams.LiveLimits(buffer=50))
        with fl.DataLoader(stream, 10) as loader:
            iterator = iter(loader)
            next(iterator)
            (buffer,) = stream.reader(stream.runs)._buffers.values()
            assert len(buffer.messages) < 50 + (1 << 18) // 100


def test_places_are_committed_once_the_loop_comes_back(servers: list[LineServer]) -> None:
    server = servers[0]
    server.send([str(n).encode() for n in range(20)])
    limits = streams.LiveLimits(commit_every_s=0)
    with fl.DataLoader(lines([server], group="train", limits=limits), 4) as loader:
        iterator = iter(loader)
        next(iterator)
        assert server.acks == {}
        next(iterator)
        assert server.acks == {"train": 4}
    again = fl.DataLoader(lines([server], group="train"), 4)
    assert received(again) == list(range(4, 20))
    assert server.acks == {"train": 20}
    assert server.commits == sorted(server.commits)


def test_a_checkpoint_may_be_what_is_committed(servers: list[LineServer]) -> None:
    servers[0].send([str(n).encode() for n in range(20)])
    limits = streams.LiveLimits(commit_every_s=1000)
    stream = lines(servers[:1], group="train", limits=limits)
    loader = fl.DataLoader(stream, 4)
    next(iter(loader))
    stream.commit(loader.state_dict())
    assert servers[0].acks == {"train": 4}
    loader.close()
    with pytest.raises(errors.ArgumentError, match="needs group="):
        lines(servers).commit(loader.state_dict())


def test_commits_are_at_most_so_frequent(servers: list[LineServer]) -> None:
    servers[0].send([str(n).encode() for n in range(100)])
    limits = streams.LiveLimits(commit_every_s=1000)
    received(fl.DataLoader(lines(servers[:1], group="train", limits=limits), 4))
    assert servers[0].commits in ([100], [4, 100])  # the first may be due at once


def with_a_key_each(batch: Any, keys: Any) -> Any:
    assert len(set(keys.tolist())) == len(batch)
    return batch


@pytest.mark.parametrize("hands", HANDS[::2], ids=NAMES[::2])
def test_messages_that_do_not_parse_go_to_the_quarantine(
    servers: list[LineServer], hands: dict[str, Any], tmp_path: Path
) -> None:
    servers[1].send([b"1", b"two", b"3", b"{", b"5"])
    quarantine = tmp_path / "bad.jsonl"
    policy = fl.ErrorPolicy("skip", quarantine=quarantine)
    device = fl.Delivery("cpu", transform=with_a_key_each)
    with fl.DataLoader(lines(servers, decode="json"), 2, on_error=policy, seed=0, device=device, **hands) as loader:
        assert received(loader) == [1, 3, 5]
        assert loader.stats().skipped == 2
    found = [json.loads(line) for line in quarantine.read_text().splitlines()]
    assert [(each["index"], each["content"]) for each in found] == [
        (f"{servers[1].address}@1", "dHdv"),
        (f"{servers[1].address}@3", "ew=="),
    ]


def test_a_message_that_does_not_parse_raises_until_something_is_done(servers: list[LineServer]) -> None:
    servers[0].send([b"1", b"2", b"three", b"4"])
    loader = fl.DataLoader(lines(servers[:1]), 4, seed=0)
    iterator = iter(loader)
    assert next(iterator).tolist() == [1, 2]
    for _ in range(2):
        with pytest.raises(ValueError, match="three") as raised:
            next(iterator)
        assert f"{servers[0].address}@2 cannot be decoded; on_error='skip'" in "".join(raised.value.__notes__)
    state = loader.state_dict()
    loader.close()
    resumed = fl.DataLoader(lines(servers[:1]), 4, seed=0, on_error="skip")
    resumed.load_state_dict(state)
    assert received(resumed) == [4]


def test_messages_may_be_too_large(servers: list[LineServer]) -> None:
    servers[0].send([b"1", b"2" * 2000])
    limits = streams.LiveLimits(message_nbytes=1000)
    with pytest.raises(errors.MessageTooLargeError, match="of 2,000 bytes is larger than LiveLimits"):
        received(fl.DataLoader(lines(servers[:1], limits=limits), 1))
    servers[0].send([b"3"])
    assert received(fl.DataLoader(lines(servers[:1], limits=limits), 1, on_error="skip")) == [1, 3]


def test_lines_that_never_end(servers: list[LineServer]) -> None:
    servers[0].send([b"2" * 300_000])
    limits = streams.LiveLimits(message_nbytes=1000)
    with pytest.raises(errors.MessageTooLargeError, match="line 0 has more than"):
        received(fl.DataLoader(lines(servers[:1], limits=limits), 1))


@pytest.mark.parametrize("hands", HANDS, ids=NAMES)
def test_an_epoch_may_end_after_a_number_of_messages(servers: list[LineServer], hands: dict[str, Any]) -> None:
    fill(servers, 0, 90)
    with fl.DataLoader(lines(servers, until=None, stop_after=25), 5, seed=0, **hands) as loader:
        seen = [received(loader) for _ in range(3)]
    assert [len(each) for each in seen] == [25, 25, 25]
    assert len({number for each in seen for number in each}) == 75


def test_an_epoch_that_is_resumed_ends_after_the_rest(servers: list[LineServer]) -> None:
    fill(servers, 0, 90)
    loader = fl.DataLoader(lines(servers, until=None, stop_after=25), 5, seed=0)
    part = received(loader, 2)
    resumed = fl.DataLoader(lines(servers, until=None, stop_after=25), 5, seed=0)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    loader.close()
    assert len(set(part + received(resumed))) == 25
    assert len(received(resumed)) == 25


@pytest.mark.parametrize("hands", HANDS[:2], ids=NAMES[:2])
def test_delivered_counts_the_batches_that_the_loop_has_received(
    servers: list[LineServer], hands: dict[str, Any]
) -> None:
    """Neither answers without messages, nor batches of earlier epochs, nor those of other ranks."""
    fill(servers[:1], 0, 12)
    rank = fl.RankPolicy((0, 2), uneven="stop")
    with fl.DataLoader(lines(servers), 4, seed=0, distributed=rank, **hands) as loader:
        for epoch in range(2):
            for number, _ in enumerate(loader, start=1):
                assert loader.delivered == loader.stats().position == number
                state = loader.state_dict()
            assert number == 3
            fill(servers[:1], 12, 24) if not epoch else None
    resumed = fl.DataLoader(lines(servers), 4, seed=0, distributed=rank)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.delivered == 3
    resumed.set_epoch(2)
    assert resumed.delivered == 0


def test_an_epoch_may_end_at_a_time(servers: list[LineServer]) -> None:
    fill(servers, 0, 30)
    soon = datetime.now(UTC) + timedelta(seconds=0.2)
    loader = fl.DataLoader(lines(servers, until=soon), 5, seed=0)
    first = received(loader)
    assert received(loader) == []
    later = fl.DataLoader(lines(servers), 5, seed=0)
    later.load_state_dict(loader.state_dict())
    assert sorted(first + received(later)) == list(range(30))


def test_random_values_are_fixed_by_the_place_of_a_message(servers: list[LineServer]) -> None:
    def drawing(message: bytes) -> list[int]:
        return [int(message), int(fl.sample_rng().integers(1 << 40))]

    fill(servers, 0, 30)
    runs = [list(fl.DataLoader(lines(servers, decode=drawing), size, seed=3)) for size in (2, 7)]
    drawn = [{int(row[0]): int(row[1]) for batch in run for row in zip(*batch, strict=True)} for run in runs]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0].values())) == 30


def test_a_lost_connection_loses_nothing(servers: list[LineServer]) -> None:
    fill(servers, 0, 30)
    loader = fl.DataLoader(lines(servers, until=None, stop_after=60), 5, seed=0)
    iterator = iter(loader)
    seen = [number for batch in islice(iterator, 4) for number in batch.tolist()]
    for server in servers:
        server.disconnect()
    fill(servers, 30, 60)
    seen += [number for batch in iterator for number in batch.tolist()]
    assert Counter(seen) == Counter(range(60))


def test_a_source_that_stays_away_is_named(servers: list[LineServer]) -> None:
    limits = streams.LiveLimits(patience_s=0.1)
    with line_server() as server:
        server.send([b"1"])
        loader = fl.DataLoader(lines([server], until=None, limits=limits), 1)
        iterator = iter(loader)
        next(iterator)
    with pytest.raises(errors.SourceUnavailableError, match=r"127.0.0.1:\d+ does not answer .*check servers="):
        next(iterator)
    loader.close()


def test_killed_workers_change_nothing(servers: list[LineServer]) -> None:
    fill(servers, 0, 90)
    stream = lines(servers, until=None, stop_after=150)
    recovery = fl.Recovery(deaths_per_epoch=100)
    with fl.DataLoader(stream, 4, seed=0, num_workers=2, worker_method="process", recovery=recovery) as loader:
        iterator, seen = iter(loader), list[int]()
        for step, batch in enumerate(iterator):
            seen += batch.tolist()
            if step in (3, 9, 14):
                os.kill(iterator._workers[step % 2].pid, signal.SIGKILL)
            if step == 10:
                fill(servers, 90, 150)
    assert Counter(seen) == Counter(range(150))


def test_torchs_loader_reads_each_message_once(servers: list[LineServer]) -> None:
    fill(servers, 0, 40)
    assert sorted(received(TorchDataLoader(lines(servers), batch_size=4))) == list(range(40))
    assert sorted(received(TorchDataLoader(lines(servers), batch_size=4, num_workers=2))) == list(range(40))


def test_steps_of_streams_take_messages(servers: list[LineServer]) -> None:
    fill(servers, 0, 30)
    made = streams.from_dataset(lines(servers)).filter(lambda number: number % 2).map(lambda number: number * 10)
    loader = fl.DataLoader(made, 4)
    for _ in range(2):  # each epoch begins at `start`
        assert sorted(received(loader)) == list(range(10, 300, 20))


@pytest.mark.parametrize("hands", HANDS, ids=NAMES)
def test_each_cut_within_the_steps_of_several_live_partitions_resumes(
    servers: list[LineServer], hands: dict[str, Any]
) -> None:
    fill(servers, 0, 40)

    def made() -> Any:
        live = streams.from_dataset(lines(servers), seed=3).map(lambda n, rng: n + rng.integers(0, 2) * 1000)
        others = streams.from_items([range(100, 106), range(200, 204)], iter)
        return streams.mix([live.shuffle(5), others], [2, 1], stop="each_once").shuffle(3)

    for turn, cut in enumerate((1, 4, 8)):
        whole = Counter(received(fl.DataLoader(made(), 3, seed=0)))
        assert whole.total() == 50 + 6 * turn
        with fl.DataLoader(made(), 3, seed=0, **hands) as loader:
            before = received(loader, cut)
            state = json.loads(json.dumps(loader.state_dict()))
        fill(servers, 40 + 6 * turn, 46 + 6 * turn)
        resumed = fl.DataLoader(made(), 2, seed=0)
        resumed.load_state_dict(state)
        seen = Counter(before + received(resumed))
        assert not whole - seen
        newer = seen - whole  # of partitions that were not open at the cut
        assert {number % 1000 for number in newer} <= set(range(40 + 6 * turn, 46 + 6 * turn))
        assert set(newer.values()) <= {1}
    for server in servers:
        server.drop(server.first + len(server.lines))
    resumed.load_state_dict(state)
    with pytest.raises(errors.OffsetLostError, match="out of retention"):
        received(resumed)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"until": None}, "SocketLines has no end here.*pass until='latest'"),
        ({"stop_after": 5}, "stop_after=5 has no effect on a stream with steps"),
    ],
)
def test_steps_need_an_end(servers: list[LineServer], more: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.ArgumentError, match=said):
        streams.from_dataset(lines(servers, **more))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: streams.SocketLines([]), "servers is empty"),
        (lambda: streams.SocketLines("a:1", group="a b"), "group must be one word.*got 'a b'"),
        (lambda: streams.SocketLines("a:1", group=""), "group must be one word"),
        (lambda: streams.SocketLines("a:1", start="now"), "start must be one of 'earliest', 'latest'; got 'now'"),
        (lambda: streams.SocketLines("a:1", max_wait_s=0), "max_wait_s must be above 0"),
        (lambda: streams.SocketLines("a:1", stop_after=0), "stop_after must be at least 1"),
        (lambda: streams.SocketLines("a:1", until="soon"), "until must be 'latest' or a datetime"),
        (lambda: streams.SocketLines("a:1", until=datetime(2030, 1, 1)), "has no time zone"),  # noqa: DTZ001
        (lambda: streams.SocketLines("a:1", lost="ignore"), "lost must be one of 'raise', 'skip'"),
        (lambda: streams.SocketLines("a:1", decode="xml"), "decode='xml': give a function, or one of bytes"),
        (lambda: streams.LiveLimits(buffer=0), "LiveLimits.buffer is 0, which is too small"),
        (lambda: streams.Redis([], server="redis://a"), "keys must be the names of streams"),
        (lambda: streams.NATS("s", servers="a", subjects="x"), "subjects must be a list of subjects"),
        (lambda: streams.SQLRows("x.db", "SELECT 1", key="id; DROP"), "key must be the name of a column"),
        (lambda: streams.SQLRows("x.db", "SELECT 1", partitions=0), "partitions must be at least 1"),
        (lambda: streams.SQLRows("x.db", "SELECT 1", settle_s=-1), "settle_s must not be negative"),
        (lambda: next(iter(fl.DataLoader(streams.SocketLines("nowhere")))), "is not the address of a server"),
        (lambda: next(iter(fl.DataLoader(streams.SocketLines("env:NO_SUCH")))), "variable NO_SUCH is not set"),
        (lambda: fl.DataLoader(streams.SocketLines("a:1"), drop_last=True), "drop_last=True would lose the messages"),
        (lambda: fl.DataLoader(streams.SocketLines("a:1"), seed=0).batch_at(0), "single batches cannot be built again"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(make: Any, said: str) -> None:
    with pytest.raises(errors.ArgumentError, match=said):
        make()


def test_fewer_partitions_than_ranks(servers: list[LineServer]) -> None:
    loader = fl.DataLoader(lines(servers), distributed=fl.RankPolicy((1, 4)))
    with pytest.raises(errors.ArgumentError, match="3 partitions, fewer than the 4 ranks: rank 3 would have no data"):
        iter(loader)


def test_messages_that_were_deleted_are_not_passed_over_in_silence(servers: list[LineServer]) -> None:
    servers[0].send([str(n).encode() for n in range(20)])
    loader = fl.DataLoader(lines(servers[:1]), 4, seed=0)
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    servers[0].drop(10)
    resumed = fl.DataLoader(lines(servers[:1]), 4, seed=0)
    resumed.load_state_dict(state)
    with pytest.raises(errors.OffsetLostError, match=r"\d+@3 is out of retention.*10.*20.*lost='skip'"):
        iter(resumed)
    assert resumed.state_dict() == state, "the loaded state stays"
    skipping = fl.DataLoader(lines(servers[:1], lost="skip"), 4, seed=0)
    skipping.load_state_dict(state)
    with pytest.warns(UserWarning, match="continuing with the oldest message"):
        assert received(skipping) == list(range(10, 20))


def nothing(_server: LineServer) -> None:
    pass


FAULTS: dict[str, tuple[list[bytes], Callable[[LineServer], None], dict[str, Any], type[Exception], str]] = {
    "out of retention": (
        [],
        lambda server: server.drop(9),
        {},
        errors.OffsetLostError,
        r"{server}@3 is out of retention.*lost='skip' continues",
    ),
    "too large": (
        [b"7" * 500],
        nothing,
        {"limits": streams.LiveLimits(message_nbytes=100)},
        errors.MessageTooLargeError,
        r"larger than LiveLimits.message_nbytes=100: raise the limit, or leave out.*{server}@10 ",
    ),
    "not parsed": ([b"?"], nothing, {}, ValueError, r"{server}@10 cannot be decoded; on_error='skip' leaves out"),
    "token": (
        [],
        lambda server: setattr(server, "token", "new"),
        {},
        errors.SourceAccessError,
        r"{server} refuses the credentials: access denied; check token=",
    ),
}


@pytest.mark.parametrize("hands", HANDS[::2], ids=NAMES[::2])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_names_rank_partition_place_and_remedy_and_nothing_is_lost(
    servers: list[LineServer], hands: dict[str, Any], fault: str
) -> None:
    messages, spoil, terms, kind, said = FAULTS[fault]
    fill(servers, 0, 30)
    servers[1].send(messages)
    here = {"distributed": fl.RankPolicy((1, 2), uneven="stop"), "seed": 0}
    more = {**hands, **here, "num_workers": int(bool(hands))}  # for the one partition of this rank
    with fl.DataLoader(lines(servers, **terms), 4, **here) as loader:
        seen = received(loader, 1)
        state = loader.state_dict()
    spoil(servers[1])
    with fl.DataLoader(lines(servers, **terms), 4, **more) as loader:
        loader.load_state_dict(state)
        with pytest.raises(kind) as raised:
            seen.extend(number for batch in loader for number in batch.tolist())
        state = loader.state_dict()
    text = " ".join((str(raised.value), *raised.value.__notes__))
    assert re.search(said.format(server=re.escape(servers[1].address)), text, re.DOTALL)
    assert re.search(r"partition 1 (of 3 )?\(epoch 0\)", text)
    assert "on rank 1 of 2" in text
    servers[1].token = ""
    is_lost = kind is errors.OffsetLostError
    warned = pytest.warns(UserWarning, match="continuing with the oldest message") if is_lost else nullcontext()
    with fl.DataLoader(lines(servers, lost="skip", **terms), 4, on_error="skip", **more) as loader, warned:
        loader.load_state_dict(state)
        seen += received(loader)
    assert sorted(seen) == [n for n in range(1, 30, 3) if not (is_lost and 12 < n < 28)]


def test_wrong_credentials_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with line_server(token="right") as server:
        server.send([b"1"])
        monkeypatch.setenv("LINE_TOKEN", "right")
        assert received(fl.DataLoader(lines([server], token="env:LINE_TOKEN"), 1)) == [1]
        with pytest.raises(errors.SourceAccessError, match="refuses the credentials: access denied; check token="):
            iter(fl.DataLoader(lines([server], token="wrong"), 1))


def test_a_state_of_another_stream_is_refused(servers: list[LineServer]) -> None:
    fill(servers, 0, 9)
    loader = fl.DataLoader(lines(servers), 2, seed=1)
    next(iter(loader))
    with pytest.raises(errors.StateError, match="belongs to another loader"):
        fl.DataLoader(lines(servers[:2]), 2, seed=1).load_state_dict(loader.state_dict())
    loader.close()


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [
        (lambda: streams.Kafka("t", servers="a:1"), "confluent_kafka", "kafka"),
        (lambda: streams.NATS("s", servers="a:1"), "nats", "nats"),
        (lambda: streams.Redis("k", server="redis://a"), "redis", "redis"),
    ],
)
def test_a_missing_client_is_named_with_its_extra(
    make: Any, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(errors.MissingExtraError, match=rf"pip install 'feedline\[{extra}\]'"):
        make().open_client()


def test_errors_show_no_passwords() -> None:
    limits = streams.LiveLimits(connect_s=0.5)
    for stream in (
        streams.Redis("key", server="redis://me:secret@127.0.0.1:1", limits=limits),
        streams.NATS("name", servers="nats://me:secret@127.0.0.1:1", limits=limits),
    ):
        with pytest.raises(errors.SourceUnavailableError, match=r"127\.0\.0\.1:1") as caught:
            next(iter(fl.DataLoader(stream)))
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("hands", [{}, {"num_workers": 1, "worker_method": "thread"}])
def test_a_loop_does_not_notice_that_an_earlier_one_closes(servers: list[LineServer], hands: dict[str, Any]) -> None:
    """As when the garbage collector closes a loop that an error has ended, while the next one waits."""
    server = servers[0]
    server.send([b"0", b"1"])
    stream = lines([server], until=None, stop_after=4, max_wait_s=0.3)
    former = iter(fl.DataLoader(stream, 1, seed=0, **hands))
    next(former)
    later = iter(fl.DataLoader(stream, 1, seed=0, **hands))
    seen = [int(next(later)), int(next(later))]
    closing = threading.Timer(0.1, former._shutdown_workers)  # type: ignore[attr-defined]
    sending = threading.Timer(0.5, server.send, [[b"2", b"3"]])
    closing.start()
    sending.start()
    seen += [int(batch) for batch in later]
    closing.join()
    sending.join()
    assert seen == [0, 1, 2, 3]
