"""Fixtures of the laws."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from laws_reference import KeptLoaders


@pytest.fixture(scope="module")
def kept() -> Iterator[KeptLoaders]:
    """Loaders whose workers live as long as the tests of a file."""
    loaders = KeptLoaders()
    yield loaders
    loaders.close()
