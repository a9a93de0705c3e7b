"""Fixtures of the laws."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from laws_reference import KeptLoaders


@pytest.fixture(scope="module")
def kept() -> KeptLoaders:
    """Loaders whose workers live from example to example."""
    return KEPT


KEPT = KeptLoaders()


@pytest.fixture(autouse=True)
def _no_longer() -> Iterator[None]:
    """Close them after each test: every loader watches the workers of all others."""
    yield
    KEPT.close()
