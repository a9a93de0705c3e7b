"""Options, Hypothesis profiles and fixtures of the whole suite."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from debris import DebrisGuard

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile(
    "ci",
    max_examples=300,
    deadline=None,  # the machines of a CI are shared: a slow example tells nothing
    derandomize=True,  # a red run can be repeated
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so, and every process that a test interrupts would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reference",
        action="store_true",
        help="run the tests marked `reference`, and only those: torch's own leg of the conformance tests",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked `reference`, or with `--reference` all others."""
    wanted = config.getoption("--reference")
    left_out = [item for item in items if (item.get_closest_marker("reference") is not None) != wanted]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        dropped = set(left_out)
        items[:] = [item for item in items if item not in dropped]


@pytest.fixture
def no_debris() -> Iterator[DebrisGuard]:
    """Fails the test if it leaves a child process, thread, descriptor or name in /dev/shm; the nursery may stay."""
    guard = DebrisGuard()
    yield guard
    guard.check()
