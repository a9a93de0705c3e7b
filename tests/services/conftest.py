"""Real servers, each started once per session, when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from azurite import Azure, azurite
from gcs import GCS, fake_gcs
from nats_server import nats_server
from postgres import postgres
from redis_server import redis_server


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azure]:
    """A server that speaks Azure's blob protocol."""
    with azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GCS]:
    """A server that speaks Google Cloud Storage's protocols."""
    with fake_gcs(tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits after throttled answers are short; others are the subject of tests without it."""
    monkeypatch.setattr("feedline.stores.retry._THROTTLED_S", 0.01)


@pytest.fixture(scope="session")
def redis_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Redis server."""
    with redis_server(tmp_path_factory.mktemp("redis")) as address:
        yield address


@pytest.fixture(scope="session")
def nats_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a NATS server with JetStream."""
    with nats_server(tmp_path_factory.mktemp("nats")) as address:
        yield address


@pytest.fixture(scope="session")
def kafka() -> Iterator[Any]:
    """Brokers of librdkafka's mock cluster, a `MockKafka`."""
    from kafka_cluster import mock_kafka  # only these tests need its client

    with mock_kafka() as cluster:
        yield cluster


# `postgres` would be the natural name of both the module and the fixture.
@pytest.fixture(scope="session", name="postgres")
def running_postgres() -> Iterator[str]:
    """The address of an empty PostgreSQL database."""
    with postgres() as address:
        yield address
