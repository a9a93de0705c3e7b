"""librdkafka's mock cluster: brokers in this process that speak Kafka's protocol over TCP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Producer


@dataclass
class MockKafka:
    """Addresses of the brokers, and a producer."""

    servers: str
    producer: Any

    def send(self, topic: str, values: Sequence[bytes], partition: int) -> None:
        """Append messages, and wait until they are stored."""
        for value in values:
            self.producer.produce(topic, value, partition=partition)
            self.producer.poll(0)
        assert self.producer.flush(60) == 0


@contextmanager
def mock_kafka(partitions: int = 4) -> Iterator[MockKafka]:
    """A cluster that creates topics of 4 partitions on first use."""
    producer = Producer({"bootstrap.servers": "", "test.mock.num.brokers": 1, "linger.ms": 1, "log_level": 0})
    brokers = producer.list_topics(timeout=60).brokers.values()
    yield MockKafka(",".join(f"{each.host}:{each.port}" for each in brokers), producer)
    producer.flush(10)
