"""Retries: what is retried and when, without a server and without waiting."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from web_servers import Handler, serving

from feedline import stores
from feedline.errors import ArgumentError, TransientError
from feedline.stores.base import ByteRange
from feedline.stores.obstore_client import WEB, Client
from feedline.stores.obstore_errors import translate_error
from feedline.stores.options import StoreOptions
from feedline.stores.partial import PartialRange
from feedline.stores.requests import FetchedRanges, Flight, Latencies, Requests, Transfers, spans_for
from feedline.stores.retry import Attempts, Retry
from feedline.stores.statuses import ErrorResponse, error_for


class FakeClock:
    """Time that passes only during waits."""

    def __init__(self) -> None:
        self.time, self.waits = 0.0, list[float]()

    def now(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.time += seconds


def failing(times: int, **how: Any) -> Callable[[TransientError | None], str]:
    left = [times]

    def attempt(last: TransientError | None) -> str:
        assert (last is None) == (left[0] == times)
        if left[0]:
            left[0] -= 1
            raise TransientError("reset", **how)
        return "data"

    return attempt


def test_transient_failures_are_retried_after_longer_and_longer_waits() -> None:
    clock, before = FakeClock(), stores.statistics()
    attempts = Attempts(Retry(first_wait_s=1, max_wait_s=6), clock, lambda: 1.0)
    assert attempts.run(failing(5), "x") == "data"
    assert clock.waits == [1, 2, 4, 6, 6]
    after = stores.statistics()
    assert after.retries - before.retries == 5
    assert after.waited_s - before.waited_s == pytest.approx(19)


@given(st.integers(1, 2000), st.floats(0, 1, exclude_max=True))
def test_waits_are_jittered_and_bounded(failed: int, draw: float) -> None:
    retry = Retry(first_wait_s=0.5, max_wait_s=8)
    assert 0 <= retry.wait_s(failed, draw) <= min(8, 0.5 * 2 ** min(failed - 1, 10))


def test_waiting_draws_nothing_from_the_users_generators() -> None:
    state = random.getstate()
    assert Attempts(Retry(), FakeClock()).run(failing(3), "object") == "data"
    assert random.getstate() == state


def test_attempts_end() -> None:
    with pytest.raises(
        stores.StoreUnavailableError, match=r"s3://b/k: 3 attempts failed .*: reset\. .*3 attempts, 120 s"
    ):
        Attempts(Retry(attempts=3), FakeClock()).run(failing(9), "s3://b/k")


def test_only_the_deadline_ends_attempts_unless_a_number_is_given() -> None:
    clock = FakeClock()
    attempts = Attempts(Retry(deadline_s=100, first_wait_s=1, max_wait_s=1), clock, lambda: 1.0)
    assert attempts.run(failing(99), "x") == "data"
    with pytest.raises(stores.StoreUnavailableError, match=r'101 attempts .*options=\{"retry": Retry\(deadline_s='):
        attempts.run(failing(10_000), "x")


def test_a_store_that_fails_for_long_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    attempts = Attempts(Retry(first_wait_s=2, max_wait_s=2), FakeClock(), lambda: 1.0)
    attempts.run(failing(3), "s3://b/short")
    attempts.run(failing(30), "s3://b/long")
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["s3://b/long"]


def test_after_a_throttled_answer_it_waits_a_second_at_least() -> None:
    for draw, waits in ((0.0, [1, 1, 1]), (0.5, [1.5, 1.5, 1.5])):
        clock = FakeClock()
        assert Attempts(Retry(), clock, lambda draw=draw: draw).run(failing(3, throttled=True), "x") == "data"
        assert clock.waits == waits


def test_the_deadline_holds_for_the_wait_after_a_throttled_answer_too() -> None:
    clock = FakeClock()
    with pytest.raises(stores.StoreUnavailableError, match="1 attempts failed"):
        Attempts(Retry(deadline_s=0.5), clock).run(failing(9, throttled=True), "x")
    assert clock.waits == []


def test_permanent_failures_are_not_retried() -> None:
    calls = list[int]()

    def denied(_: TransientError | None) -> None:
        calls.append(1)
        raise error_for(ErrorResponse(403, "AccessDenied"), "x")

    with pytest.raises(stores.AccessDeniedError):
        Attempts(Retry(), FakeClock()).run(denied, "x")
    assert len(calls) == 1


@pytest.mark.parametrize(
    "wrong",
    [{"attempts": 0}, {"deadline_s": 0}, {"first_wait_s": 2, "max_wait_s": 1}, {"hedge_quantile": 1}],
)
def test_impossible_policies_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match="Retry"):
        Retry(**wrong)


def test_obstores_words_are_read_and_not_quoted() -> None:
    secret = "AKIDSECRET"
    body = f"<Error><Code>InvalidAccessKeyId</Code><AWSAccessKeyId>{secret}</AWSAccessKeyId></Error>"
    texts = {
        f"Server returned non-2xx status code: 403 Forbidden: {body}": stores.AccessDeniedError,
        f"Object at location {secret} not found": stores.StoreError,
        f"Generic S3 error: https://host?sig={secret} HTTP error\nHttpError {{ kind: Interrupted, }}": TransientError,
        f"https://host?sig={secret} HTTP error: builder error kind: Request": ArgumentError,
        f"Operation not supported: Range request not supported by {secret}": stores.StoreError,
        f"Error performing PUT http://169.254.169.254/{secret} - no route": stores.AccessDeniedError,
        f"something else {secret}": stores.StoreError,
    }
    for text, kind in texts.items():
        error = translate_error(ValueError(text), "s3://b/k")
        assert isinstance(error, kind), text
        assert secret not in str(error)
    assert isinstance(translate_error(FileNotFoundError(), "x"), stores.ObjectNotFoundError)


RANGES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 80)).map(lambda r: (r[0], r[0] + r[1])), max_size=20)


@given(RANGES, st.integers(0, 40), st.integers(1, 120))
def test_ranges_keep_their_order_however_they_are_joined_or_split(
    ranges: list[tuple[int, int]], gap: int, largest: int
) -> None:
    content = random.Random(0).randbytes(400)
    spans = spans_for(ranges, Requests(gap_nbytes=gap, max_nbytes=largest))
    assert all(0 < span.nbytes <= largest for span in spans)
    assert all(left.stop <= right.start for left, right in itertools.pairwise(spans))
    fetched = FetchedRanges(spans, [memoryview(content[slice(*span)]) for span in spans])
    for start, stop in ranges:
        assert fetched.cut(start, stop) == content[start:stop]


def test_near_ranges_share_a_request_and_far_ones_do_not() -> None:
    requests = Requests(gap_nbytes=10, max_nbytes=100)
    assert spans_for([(50, 60), (0, 40), (71, 80)], requests) == [ByteRange(0, 60), ByteRange(71, 80)]
    assert spans_for([(0, 60), (60, 120)], requests) == [ByteRange(0, 60), ByteRange(60, 120)]
    assert spans_for([(0, 250)], requests) == [ByteRange(0, 84), ByteRange(84, 168), ByteRange(168, 250)]


def one_byte(flight: Flight) -> memoryview:
    return memoryview(bytes([flight.span.start]))


def test_transfers_give_results_in_order() -> None:
    spans = [ByteRange(at, at + 1) for at in range(100)]
    assert [bytes(data) for data in Transfers(4, None).run(one_byte, spans)] == [bytes([at]) for at in range(100)]


def test_the_first_failure_ends_a_transfer() -> None:
    started, over = list[int](), threading.Event()

    def fetch(flight: Flight) -> memoryview:
        started.append(flight.number)
        assert flight.number == 0 or over.wait(60)
        raise stores.ObjectNotFoundError("gone")

    with pytest.raises(stores.ObjectNotFoundError, match="gone"):
        Transfers(1, None).run(fetch, [ByteRange(at, at + 1) for at in range(1000)])
    over.set()
    assert len(started) <= 2


class StandingClock(FakeClock):
    """Time that a test moves; `looks` are questions for it since then."""

    def __init__(self) -> None:
        super().__init__()
        self.looks, self.asked = 0, threading.Condition()

    def now(self) -> float:
        with self.asked:
            self.looks += 1
            self.asked.notify_all()
            return self.time

    def move(self, seconds: float) -> None:
        with self.asked:
            self.looks, self.time = 0, self.time + seconds


def slow_until_hedged(second: Callable[[], memoryview], throttled: bool = False) -> memoryview:
    """One request that hangs until another for the same span has come, or would have come."""
    clock = StandingClock()
    transfers = Transfers(2, 0.95, clock)
    transfers.run(one_byte, [ByteRange(at, at + 1) for at in range(60)])
    calls, release = list[int](), threading.Event()

    def fetch(flight: Flight) -> memoryview:
        flight.throttled = throttled
        calls.append(1)
        if len(calls) == 1:
            clock.move(1.0)
            if throttled:
                with clock.asked:
                    assert clock.asked.wait_for(lambda: clock.looks >= 5, 60)  # the supervisor has decided once
            else:
                assert release.wait(60)
            return memoryview(b"first")
        try:
            return second()
        finally:
            release.set()

    return transfers.run(fetch, [ByteRange(0, 1)])[0]


def test_a_slow_request_is_sent_again_and_the_faster_answer_counts() -> None:
    before = stores.statistics()
    assert slow_until_hedged(lambda: memoryview(b"second")) in (b"first", b"second")
    assert stores.statistics().hedges == before.hedges + 1


def test_a_second_request_that_fails_does_no_harm() -> None:
    def fail() -> memoryview:
        raise stores.StoreError("no")

    assert slow_until_hedged(fail) == b"first"


def test_throttled_requests_are_not_hedged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feedline.stores.requests.WAKE_S", 0.01)
    before = stores.statistics()
    assert slow_until_hedged(lambda: memoryview(b"second"), throttled=True) == b"first"
    assert stores.statistics().hedges == before.hedges


def test_one_in_ten_may_be_sent_again() -> None:
    latencies = Latencies(0.95)
    assert latencies.slow_after_s(100) is None
    for _ in range(100):
        latencies.add(100, 1.0)
    assert latencies.slow_after_s(100) == 2.0
    for seconds in (5.0, 9.0) * 8:
        latencies.add(100, seconds)
    assert latencies.slow_after_s(100) == 9.0
    assert latencies.slow_after_s(100_000) is None
    assert [latencies.may_hedge() for _ in range(14)] == [True] * 12 + [False] * 2


class Odd(Handler):
    """/busy asks to wait; /short announces half of its range; the rest is complete."""

    def do_GET(self) -> None:
        if self.path == "/busy":
            self.answer(503, headers={"Retry-After": "3"})
            return
        known = {"ETag": '"v1"', "Last-Modified": "Sat, 21 Nov 2026 07:00:30 GMT", "Content-Range": "bytes 0-9/10"}
        self.answer(206, b"0123456789"[: 5 if self.path == "/short" else 10], known)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(Odd, None) as listening:
        yield listening.url


def test_an_answer_that_is_shorter_than_its_range_is_no_data(server: str) -> None:
    client, before = Client(WEB, server, StoreOptions(), 5), stores.statistics()
    part = PartialRange(ByteRange(0, 10))
    client.get("whole", part, "x")
    assert part.data() == b"0123456789"
    with pytest.raises(TransientError, match="cut short, 5 of 10 bytes"):
        client.get("short", PartialRange(ByteRange(0, 10)), "x")
    assert stores.statistics().truncated == before.truncated + 1


def test_a_throttled_answer_is_known_as_such_whatever_its_retry_after_says(server: str) -> None:
    """With less than a second left no attempt follows: the next one would have to wait that long."""
    store = stores.open_store(server, retry=Retry(deadline_s=0.9))
    before = stores.statistics()
    for ask in (lambda: store.read("busy", 0, 10), lambda: store.read("busy"), lambda: store.info("busy")):
        with pytest.raises(stores.StoreUnavailableError, match=r"busy.*: 1 attempts failed .* status 503\. Check"):
            ask()
    assert stores.statistics().throttled == before.throttled + 3
