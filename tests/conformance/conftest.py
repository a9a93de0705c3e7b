"""The loaders that must behave the same: torch's own, and feedline's with the same arguments."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from torch_datasets import Gate, Meeting

Loader = type[torch.utils.data.DataLoader[Any]]

REFERENCE = pytest.param("torch", marks=pytest.mark.reference)
"""torch's own loader: it shows that a test demands no more than torch gives, and runs with `--reference` only."""

TORCH_NOISE = (
    # Its iterator's __del__ can meet workers that are already gone.
    "ignore::pytest.PytestUnraisableExceptionWarning",
    # It forks the test process, which has threads.
    "ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning",
)
"""Warnings that torch's own loader may issue; feedline may not."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out threads where there are no workers: the loader then never reads `worker_method`."""
    idle = {"make_loader": "feedline-threads", "num_workers": 0}
    left_out = [item for item in items if idle.items() <= _parameters(item).items()]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        dropped = set(left_out)
        items[:] = [item for item in items if item not in dropped]


def _parameters(item: pytest.Item) -> dict[str, Any]:
    """The parameters of a test case; a test without parameters has no `callspec`."""
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.fixture
def torch_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loader]:
    """torch's loader with a shorter wait; by default it waits up to five seconds for each busy worker at its end."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    for pardon in TORCH_NOISE:
        request.node.add_marker(pytest.mark.filterwarnings(pardon))
    yield torch.utils.data.DataLoader
    gc.collect()  # iterators that tracebacks hold end here, where their warnings are ignored, and not in the next test


@pytest.fixture
def feedline_class() -> Loader:
    """feedline's class, for tests that compare it with torch's within one test."""
    import feedline

    return feedline.DataLoader


@pytest.fixture(params=[REFERENCE, "feedline"])
def loader_class(request: pytest.FixtureRequest) -> Loader:
    """The class itself, for tests that need a class (subclasses, signatures, worker processes)."""
    return request.getfixturevalue(f"{request.param}_class")


@pytest.fixture(params=[REFERENCE, "feedline", "feedline-threads"])
def make_loader(request: pytest.FixtureRequest) -> Callable[..., torch.utils.data.DataLoader[Any]]:
    """A loader from torch's arguments, for laws that hold for every kind of worker."""
    if request.param == "feedline-threads":
        return functools.partial(request.getfixturevalue("feedline_class"), worker_method="thread")
    return request.getfixturevalue(f"{request.param}_class")


@pytest.fixture
def meeting(tmp_path: Path) -> Callable[[int], Meeting]:
    """`meeting(n)`: where `n` workers wait for each other, once."""

    def held(n: int) -> Meeting:
        place = Meeting(tmp_path / "meeting", n)
        place.host()
        return place

    return held


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """A closed gate."""
    return Gate(tmp_path / "gate").make()
