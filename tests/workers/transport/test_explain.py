"""The path of a part that cannot be pickled."""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch

from feedline.workers.transport import explain_unpicklable

LOCK = threading.Lock()


class Pair(NamedTuple):
    left: Any
    right: Any


class Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def method(self) -> None: ...


class Slotted:
    __slots__ = ("handle",)


class Chosen:
    def __getstate__(self) -> Any:
        return [1, LOCK]


class Listed(list[Any]):
    pass


class Keyed(dict[str, Any]):
    pass


@dataclasses.dataclass
class Record:
    source: Any


def identity(x: Any) -> Any:
    return x


def slotted(handle: Any) -> Slotted:
    it = Slotted()
    it.handle = handle
    return it


def object_array() -> np.ndarray[Any, Any]:
    array = np.empty((2, 2), object)
    array[1, 0] = LOCK
    return array


def labeled() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.owner = LOCK
    return tensor


@pytest.mark.parametrize(
    ("obj", "path"),
    [
        (LOCK, "obj"),
        ({"meta": [0, 1, 2, Plain(handle=LOCK)]}, "obj['meta'][3].handle"),
        ((1, (LOCK,)), "obj[1][0]"),
        ({"a": 1, LOCK: 2}, "obj.<key 1>"),
        (Pair(1, LOCK), "obj.right"),
        (Record([LOCK]), "obj.source[0]"),
        (slotted(LOCK), "obj.handle"),
        (Plain(fine=1, child=Plain(child=slotted(LOCK))), "obj.child.child.handle"),
        (Chosen(), "obj.<state>[1]"),
        (Listed([LOCK]), "obj[0]"),
        (Keyed(k=LOCK), "obj['k']"),
        (functools.partial(identity, 1, LOCK), "obj.args[1]"),
        (functools.partial(identity, x=LOCK), "obj.keywords['x']"),
        (functools.partial(LOCK.acquire), "obj.func.__self__"),
        (Plain(handle=LOCK).method, "obj.__self__.handle"),
        (object_array(), "obj[1, 0]"),
        (labeled(), "obj.owner"),
    ],
)
def test_path(obj: object, path: str) -> None:
    assert explain_unpicklable(obj) == f"{path} (type _thread.lock)"


def test_sets() -> None:
    assert explain_unpicklable({LOCK}).startswith("obj.<element <unlocked")


def test_functions_and_classes_by_value() -> None:
    handle = threading.Lock()

    def closure() -> object:
        return handle

    def with_default(x: object = handle, *, y: object = handle) -> object:
        return x, y

    class Holder:
        shared = handle

    def explained(obj: object) -> str:
        return explain_unpicklable(obj, "dataset", cloudpickle.dumps)

    assert explained(closure) == "dataset.<nonlocal handle> (type _thread.lock)"
    assert explained(with_default) == "dataset.<default 0> (type _thread.lock)"
    assert explained(Holder) == "dataset.shared (type _thread.lock)"
    assert explained({"f": [closure]}) == "dataset['f'][0].<nonlocal handle> (type _thread.lock)"


def test_a_lambda_is_its_own_reason() -> None:
    assert explain_unpicklable([len, lambda: 0]) == "obj[1] (type function)"


def test_a_cycle_does_not_hide_the_reason() -> None:
    outer, inner = Plain(), Plain()
    inner.outer = outer
    outer.inner = inner
    outer.handle = LOCK
    assert explain_unpicklable(outer) == "obj.handle (type _thread.lock)"


def test_endless_depth_ends() -> None:
    deep: list[Any] = [LOCK]
    for _ in range(100_000):
        deep = [deep]
    assert explain_unpicklable(deep).startswith("obj[0][0][0]")


def test_what_can_be_pickled_is_not_blamed_on_a_part() -> None:
    assert explain_unpicklable({"x": [1]}) == "obj (type dict)"
