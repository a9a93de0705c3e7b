"""Real servers, each started once per session, when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from azurite import Azure, azurite
from ceph import S3, radosgw
from fault_proxy import FaultProxy, fault_proxy
from nginx import nginx
from postgres import postgres


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A real S3 server, with keys that may do everything."""
    with radosgw(tmp_path_factory.mktemp("ceph")) as server:
        yield server


@pytest.fixture
def faulty_s3(s3: S3) -> Iterator[tuple[S3, FaultProxy]]:
    """The same server behind a proxy that is harmless until it is told otherwise."""
    with fault_proxy(s3.endpoint) as proxy:
        yield S3(proxy.endpoint(), s3.access_key_id, s3.secret_access_key, s3.config), proxy


@pytest.fixture(scope="session")
def web_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `web` serves."""
    return tmp_path_factory.mktemp("web")


@pytest.fixture(scope="session")
def web(web_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real web server that answers ranges."""
    with nginx(tmp_path_factory.mktemp("nginx"), web_root) as address:
        yield address


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azure]:
    """A server that speaks Azure's blob protocol."""
    with azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


# `postgres` would be the natural name of both the module and the fixture.
@pytest.fixture(scope="session", name="postgres")
def running_postgres() -> Iterator[str]:
    """The address of an empty PostgreSQL database."""
    with postgres() as address:
        yield address
