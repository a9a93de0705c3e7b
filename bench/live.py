"""Messages of Kafka, NATS and Redis: feedline, and the bare client that decodes and collates the same batches.

The servers of NATS and Redis are real ones on loopback. For Kafka, it is librdkafka's mock cluster, in a
process of its own.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import confluent_kafka
import nats
import redis
from torch.utils.data import default_collate

import feedline as fl
from harness import Contest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "services"))

from nats_server import nats_server  # noqa: E402 - after the change of the path
from redis_server import redis_server  # noqa: E402

MESSAGES, BATCH = 40_000, 256
VALUES = [json.dumps({"id": n, "price": n / 3, "label": n % 7}).encode() for n in range(MESSAGES)]


def collated(values: list[bytes]) -> Any:
    return default_collate([json.loads(value) for value in values])


def rate_of(batches: Callable[[], Iterator[Any]]) -> Callable[[], float]:
    """Messages per second, from the first batch to the last."""

    def measure() -> float:
        count, began_s, ended_s = 0, 0.0, 0.0
        for batch in batches():
            ended_s = perf_counter()
            began_s = began_s or ended_s
            count += len(batch["id"]) if ended_s > began_s else 0
        return count / (ended_s - began_s)

    return measure


def loaded(make: Callable[[], Any], workers: int) -> Callable[[], Iterator[Any]]:
    def batches() -> Iterator[Any]:
        with fl.DataLoader(
            make(), BATCH, seed=0, num_workers=workers, worker_method="process" if workers else "auto"
        ) as loader:
            yield from loader

    return batches


KAFKA_SERVER = """
import sys
from confluent_kafka import Producer
import json
producer = Producer({"bootstrap.servers": "", "test.mock.num.brokers": 1, "linger.ms": 5, "log_level": 0})
for number in range(int(sys.argv[1])):
    value = json.dumps({"id": number, "price": number / 3, "label": number % 7})
    producer.produce("live", value.encode(), partition=number % 4)
    producer.poll(0)
producer.flush(60)
print(",".join(f"{each.host}:{each.port}" for each in producer.list_topics(timeout=30).brokers.values()), flush=True)
sys.stdin.read()
"""


@contextmanager
def kafka() -> Iterator[str]:
    command = [sys.executable, "-c", KAFKA_SERVER, str(4 * MESSAGES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.kill()


def bare_kafka(servers: str) -> Iterator[Any]:
    consumer = confluent_kafka.Consumer({"bootstrap.servers": servers, "group.id": "bare", "enable.auto.commit": False})
    consumer.assign([confluent_kafka.TopicPartition("live", number, 0) for number in range(4)])
    left = 4 * MESSAGES
    while left:
        messages = consumer.consume(min(BATCH, left), 1.0)
        values = [message.value() for message in messages if message.error() is None]
        left -= len(values)
        if values:
            yield collated(values)
    consumer.close()


def bare_redis(server: str) -> Iterator[Any]:
    with redis.Redis.from_url(server) as client:
        last, left = b"0-0", MESSAGES
        while left:
            found = client.xread({"live": last}, count=BATCH, block=1000)
            ((_, entries),) = found.items() if isinstance(found, dict) else found
            if entries and isinstance(entries[0], list):
                (entries,) = entries
            last, left = entries[-1][0], left - len(entries)
            yield collated([fields[b"data"] for _, fields in entries])


def bare_nats(server: str) -> Iterator[Any]:
    loop = asyncio.new_event_loop()
    connection = loop.run_until_complete(nats.connect(server))
    config = nats.js.api.ConsumerConfig(ack_policy=nats.js.api.AckPolicy.NONE)
    subscribing = connection.jetstream().pull_subscribe("live.0", stream="live", config=config)
    subscription = loop.run_until_complete(subscribing)
    left = MESSAGES
    while left:
        messages = loop.run_until_complete(subscription.fetch(min(BATCH, left), timeout=1.0))
        left -= len(messages)
        yield collated([message.data for message in messages])
    loop.run_until_complete(connection.close())
    loop.close()


def fill_redis(server: str) -> None:
    with redis.Redis.from_url(server) as client, client.pipeline(transaction=False) as pipe:
        for value in VALUES:
            pipe.xadd("live", {"data": value})
        pipe.execute()


def fill_nats(server: str) -> None:
    async def fill() -> None:
        connection = await nats.connect(server)
        jetstream = connection.jetstream()
        await jetstream.add_stream(name="live", subjects=["live.*"], storage="memory")
        for number, value in enumerate(VALUES):
            await connection.publish("live.0", value)
            if number % 1000 == 999:
                await connection.flush()
        while (await jetstream.stream_info("live")).state.messages < MESSAGES:  # noqa: ASYNC110 - the server has no events
            await asyncio.sleep(0.05)
        await connection.close()

    asyncio.run(fill())


def contest(name: str, bare: Callable[[], Iterator[Any]], make: Callable[[], Any]) -> None:
    race = Contest(f"messages of {name}", unit="messages/s", baseline="the bare client")
    race.measure("the bare client", rate_of(bare))
    race.measure("feedline", rate_of(loaded(make, 0)))
    race.measure("feedline, 1 worker", rate_of(loaded(make, 1)))
    race.run(rounds=5).publish("confluent-kafka", "nats-py", "redis")


def main() -> None:
    common = {"decode": "json", "until": "latest"}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        brokers = stack.enter_context(kafka())
        contest("Kafka", lambda: bare_kafka(brokers), lambda: fl.streams.Kafka("live", servers=brokers, **common))
        server = stack.enter_context(redis_server(folder))
        fill_redis(server)
        contest("Redis", lambda: bare_redis(server), lambda: fl.streams.Redis("live", server=server, **common))
        address = stack.enter_context(nats_server(folder))
        fill_nats(address)
        contest(
            "NATS",
            lambda: bare_nats(address),
            lambda: fl.streams.NATS("live", servers=address, subjects=["live.0"], **common),
        )


if __name__ == "__main__":
    main()
