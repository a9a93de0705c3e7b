"""check_pool passes feedline's pools and names the faults of others."""

from __future__ import annotations

from typing import Any

import pytest

from feedline.testing import check_pool
from feedline.workers import registry
from feedline.workers.threads import ThreadPool


@pytest.mark.parametrize("method", ["thread", "process"])
def test_feedlines_own_pools_pass(method: str) -> None:
    check_pool(method)


class Lingering(ThreadPool):
    def close(self) -> None:
        pass


class Late(ThreadPool):
    """Builds each request for the second time under the number of the one after it."""

    before: Any = None

    def submit(self, request: Any) -> Any:
        before, self.before = self.before, request
        return super().submit(request if before is None or before.number % 5 else before)


class Wrapper:
    """A builder that replaces errors by others."""

    def __init__(self, builder: Any, change: Any) -> None:
        self.builder, self.change = builder, change

    def __call__(self, request: Any, empty: Any) -> Any:
        try:
            return self.builder(request, empty)
        except ValueError as error:
            raise self.change(error) from None


class OtherType(ThreadPool):
    def __init__(self, builder: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(Wrapper(builder, lambda error: RuntimeError(str(error))), *args, **kwargs)


class OtherArguments(ThreadPool):
    def __init__(self, builder: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(Wrapper(builder, lambda error: type(error)(str(error))), *args, **kwargs)


class NoAddress(ThreadPool):
    def __init__(self, builder: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(Wrapper(builder, lambda error: type(error)(*error.args)), *args, **kwargs)


@pytest.mark.parametrize(
    ("pool", "complaint"),
    [
        (Lingering, r"'thread' workers still run as threads \["),
        (Late, "must equal those without workers, in epoch 0"),
        (OtherType, "must keep its type: BrokenSampleError.* became RuntimeError"),
        (OtherArguments, "must keep its arguments"),
        (NoAddress, "must keep the notes that give the sample's address"),
    ],
)
def test_what_is_wrong_with_a_pool_is_named(pool: Any, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ThreadPool", pool)
    with pytest.raises(AssertionError, match=complaint):
        check_pool("thread")
