"""kill -9 of the consumer of a live stream at random moments: with the state, no message is lost or repeated.

`test_live_kills.py 50` makes 50 kills for each source, and prints its findings.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from diagonals import at_night
from kafka_cluster import mock_kafka
from line_server import line_server
from live_sources import SOURCES, Source
from nats_server import nats_server
from postgres import postgres
from preloaded import Preloaded
from redis_server import redis_server
from rounds import rounds

pytestmark = pytest.mark.stress

SCRIPT = Path(__file__).with_name("live_consumer.py")
WITHIN_S = 60.0
KILLS = rounds(2, 20)
EACH = 60
"""Messages sent for each kill."""


class LineSource(Source):
    def send_texts(self, messages: Sequence[tuple[int, bytes]]) -> None:
        for place, value in messages:
            self.address[place].send([value])


@contextmanager
def started(name: str, folder: Path) -> Iterator[Source]:
    with ExitStack() as stack:
        if name == "lines":
            yield LineSource([stack.enter_context(line_server()) for _ in range(3)], "killed")
            return
        server: Any = {
            "kafka": mock_kafka, "nats": lambda: nats_server(folder),
            "redis": lambda: redis_server(folder), "postgres": postgres,
        }  # fmt: skip
        source = SOURCES[name](stack.enter_context(server[name]()), "killed")
        source.send([])  # makes a table
        yield source


def numbers_in(file: Path) -> list[int]:
    *lines, _ = file.read_bytes().split(b"\n")
    return [number for line in lines for number in json.loads(line)["numbers"]]


def wait_for(file: Path, count: int) -> None:
    """Wait until this number of messages is in the file."""
    give_up_s = time.monotonic() + WITHIN_S
    while file.read_bytes().count(b"\n") < 1 or len(numbers_in(file)) < count:
        assert time.monotonic() < give_up_s, f"{len(numbers_in(file))} of {count} messages"
        time.sleep(0.005)


def killed(source: Source, name: str, kills: int, folder: Path, preloaded: Preloaded, workers: int) -> list[int]:
    """Numbers that consumers saved; all consumers except the last were killed."""
    file, draw = folder / "batches.jsonl", random.Random(kills)
    file.touch()
    address = {
        "kafka": lambda: source.address.servers,
        "lines": lambda: ",".join(server.address for server in source.address),
    }.get(name, lambda: source.address)()
    arguments = [str(file), name, source.name, address, str(workers)]
    sent = 0
    for _ in range(kills):
        source.send(range(sent, sent + EACH))
        sent += EACH
        consumer = preloaded.start_quietly(SCRIPT, folder / "consumer.log", *arguments)
        try:
            saved = len(numbers_in(file))
            wait_for(
                file, saved + draw.randrange(sent - saved)
            )  # often in the middle, sometimes before the first batch
            time.sleep(draw.random() * 0.02)
        finally:
            consumer.kill()
    consumer = preloaded.start_quietly(SCRIPT, folder / "consumer.log", *arguments)
    try:
        wait_for(file, sent)
    finally:
        consumer.kill()
    return numbers_in(file)


@pytest.mark.parametrize(
    ("name", "workers"),
    [("kafka", 0), ("nats", 0), ("redis", 1), ("lines", 1), *at_night(("postgres", 0))],
)
def test_nothing_is_lost_and_nothing_comes_twice(name: str, workers: int, preloaded: Preloaded, tmp_path: Path) -> None:
    with started(name, tmp_path) as source:
        found = killed(source, name, KILLS, tmp_path, preloaded, workers)
    assert Counter(found) == Counter(range(KILLS * EACH))


def main(kills: int) -> None:
    with Preloaded() as preloaded:
        for name in ("kafka", "nats", "redis", "postgres", "lines"):
            with tempfile.TemporaryDirectory() as folder, started(name, Path(folder)) as source:
                counts = Counter(killed(source, name, kills, Path(folder), preloaded, 0))
            lost = sum(number not in counts for number in range(kills * EACH))
            twice = sum(count > 1 for count in counts.values())
            print(f"{name}: {kills} kills, {kills * EACH} messages: {lost} lost, {twice} twice", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
