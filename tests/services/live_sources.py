"""The sources of live streams, with the same few operations: send, trim, and a stream that reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import adbc_driver_postgresql.dbapi
import nats
import redis
from kafka_cluster import MockKafka

from feedline import streams

PARTITIONS = 3


class Source:
    """Messages are JSON; number n goes to partition n modulo 3. `address` is that of the server."""

    keeps_groups = True
    unreachable = "127.0.0.1:9"

    def __init__(self, address: Any, name: str) -> None:
        self.address, self.name = address, name

    def send(self, numbers: Sequence[int]) -> None:
        self.send_texts([(number % PARTITIONS, json.dumps(number).encode()) for number in numbers])

    def send_texts(self, messages: Sequence[tuple[int, bytes]]) -> None:
        raise NotImplementedError

    def stream(self, **more: Any) -> Any:
        raise NotImplementedError


class KafkaSource(Source):
    address: MockKafka

    def send_texts(self, messages: Sequence[tuple[int, bytes]]) -> None:
        for partition, value in messages:
            self.address.producer.produce(self.name, value, partition=partition)
        assert self.address.producer.flush(60) == 0

    def stream(self, **more: Any) -> Any:
        return streams.Kafka(self.name, servers=more.pop("server", self.address.servers), **more)


class RedisSource(Source):
    unreachable = "redis://127.0.0.1:9"

    def keys(self) -> list[str]:
        return [f"{self.name}-{number}" for number in range(PARTITIONS)]

    def send_texts(self, messages: Sequence[tuple[int, bytes]]) -> None:
        with redis.Redis.from_url(self.address) as client, client.pipeline() as pipe:
            for partition, value in messages:
                pipe.xadd(self.keys()[partition], {"data": value})
            pipe.execute()

    def trim(self) -> None:
        with redis.Redis.from_url(self.address) as client:
            for key in self.keys():
                client.xtrim(key, maxlen=1, approximate=False)

    def stream(self, **more: Any) -> Any:
        return streams.Redis(self.keys(), server=more.pop("server", self.address), **more)


class NATSSource(Source):
    unreachable = "nats://127.0.0.1:9"

    def send_texts(self, messages: Sequence[tuple[int, bytes]]) -> None:
        async def send() -> None:
            connection = await nats.connect(self.address)
            jetstream = connection.jetstream()
            await jetstream.add_stream(name=self.name, subjects=[f"{self.name}.*"])
            for partition, value in messages:
                await jetstream.publish(f"{self.name}.{partition}", value)
            await connection.close()

        asyncio.run(send())

    def trim(self) -> None:
        async def purge() -> None:
            connection = await nats.connect(self.address)
            await connection.jetstream().purge_stream(self.name, keep=1)
            await connection.close()

        asyncio.run(purge())

    def stream(self, **more: Any) -> Any:
        subjects = [f"{self.name}.{number}" for number in range(PARTITIONS)]
        return streams.NATS(self.name, servers=more.pop("server", self.address), subjects=subjects, **more)


class PostgresSource(Source):
    keeps_groups = False
    unreachable = "postgresql://postgres@127.0.0.1:9/postgres"

    def run(self, *statements: str) -> None:
        with closing(adbc_driver_postgresql.dbapi.connect(self.address)) as connection:
            with closing(connection.cursor()) as cursor:
                for statement in statements:
                    cursor.execute(statement)
            connection.commit()

    def send_texts(self, messages: Sequence[tuple[int, bytes]]) -> None:
        self.run(f"CREATE TABLE IF NOT EXISTS {self.name} (id bigserial PRIMARY KEY, content text)")
        if messages:
            values = ", ".join(f"('{value.decode()}')" for _, value in messages)
            self.run(f"INSERT INTO {self.name} (content) VALUES {values}")

    def stream(self, **more: Any) -> Any:
        decode = {"json": lambda row: json.loads(row["content"])}.get(more.pop("decode", "json"))
        query = f"SELECT id, content FROM {self.name}"
        more = {"settle_s": 0.0, "every_s": 0.02, **more}
        return streams.SQLRows(more.pop("server", self.address), query, partitions=PARTITIONS, decode=decode, **more)


SOURCES = {"kafka": KafkaSource, "nats": NATSSource, "redis": RedisSource, "postgres": PostgresSource}
