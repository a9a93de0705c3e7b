"""Real servers, each started once per session, when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from azurite import Azure, azurite
from postgres import postgres


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
