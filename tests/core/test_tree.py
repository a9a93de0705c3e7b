"""Every container of a batch is walked, and rebuilt with its type."""

from __future__ import annotations

from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from held_items import HeldItems
from hypothesis import given
from hypothesis import strategies as st

from feedline.core.tree import arrays, leaves, map_leaves


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Pair:
    image: Any
    label: Any
    number: int = field(default=7, init=False)


class Stubborn(Sequence[Any]):
    """A sequence that cannot be built from its items."""

    def __init__(self, first: Any, second: Any = None) -> None:
        if second is None:
            raise ValueError("two items are needed")
        self._items = first, second

    def __getitem__(self, place: Any) -> Any:
        return self._items[place]

    def __len__(self) -> int:
        return 2


class Doubled(list[Any]):
    """A list whose constructor changes the items."""

    def __init__(self, items: Any, unit: str) -> None:
        super().__init__(2 * item for item in items)
        self.unit = unit


class Halves(NamedTuple("Halves", [("x", Any), ("y", Any)])):
    """A named tuple whose constructor changes the items."""

    __slots__ = ()

    def __new__(cls, x: Any) -> Any:
        return super().__new__(cls, x / 2, x / 2)


@dataclass
class Scaled:
    """A dataclass whose constructor changes a field, and sets others."""

    x: Any
    scale: InitVar[float] = 2.0
    mask: Any = field(init=False, default=None)
    absent: Any = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.x = self.x / scale

    @cached_property
    def twice(self) -> Any:
        return 2 * self.x


class Locked(UserDict):
    """A mapping that cannot be built from its items."""

    def __init__(self, key: str, value: Any) -> None:
        super().__init__({key: value})


atoms = st.one_of(st.integers(), st.text(max_size=3), st.binary(max_size=3), st.none(), st.floats(allow_nan=False))
trees = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=4),
        st.builds(Point, inner, inner),
        st.builds(Pair, inner, inner),
    ),
)


@given(trees)
def test_mapping_the_identity_changes_nothing(tree: Any) -> None:
    assert map_leaves(lambda leaf: leaf, tree) == tree


@given(trees)
def test_leaves_come_in_the_order_of_the_map(tree: Any) -> None:
    seen: list[Any] = []
    map_leaves(seen.append, tree)
    assert list(leaves(tree)) == seen


@given(trees)
def test_leaves_are_not_containers(tree: Any) -> None:
    assert not any(isinstance(leaf, (list, tuple, dict, Pair)) for leaf in leaves(tree))


@pytest.mark.parametrize(
    "container",
    [
        [1, 2],
        (1, 2),
        Point(1, 2),
        {"a": 1, "b": 2},
        OrderedDict(a=1, b=2),
        UserDict(a=1, b=2),
        UserList([1, 2]),
        deque([1, 2]),
        Pair(1, 2),
    ],
    ids=lambda container: type(container).__name__,
)
def test_containers_keep_their_type(container: Any) -> None:
    negated = map_leaves(lambda leaf: -leaf, container)
    assert type(negated) is type(container)
    assert negated != container
    assert map_leaves(lambda leaf: -leaf, negated) == container


def test_containers_that_cannot_be_rebuilt_become_plain() -> None:
    assert map_leaves(str, Stubborn(1, 2)) == ["1", "2"]
    assert type(map_leaves(str, Stubborn(1, 2))) is list
    assert map_leaves(str, Locked("only", 1)) == {"only": "1"}


@pytest.mark.parametrize(
    "mapping",
    [defaultdict(list, a=1), Counter(a=1), ChainMap({"a": 1}), MappingProxyType({"a": 1})],
    ids=lambda mapping: type(mapping).__name__,
)
def test_odd_mappings_keep_their_items(mapping: Any) -> None:
    assert dict(map_leaves(lambda leaf: leaf + 1, mapping)) == {"a": 2}


def test_constructors_do_not_run_again() -> None:
    scaled = Scaled(4.0)
    scaled.mask, scaled.extra = 5.0, "kept"  # type: ignore[attr-defined]
    assert scaled.twice == 4.0
    negated = map_leaves(lambda leaf: -leaf, scaled)
    assert (type(negated), negated.x, negated.mask, negated.extra, negated.twice) == (Scaled, -2.0, -5.0, "kept", -4.0)
    assert (scaled.x, scaled.mask) == (2.0, 5.0)
    assert list(leaves(scaled)) == [2.0, 5.0]
    halves, doubled = (map_leaves(lambda leaf: -leaf, each) for each in (Halves(4.0), Doubled([1], "m")))
    assert (type(halves), halves.x, halves.y) == (Halves, -2.0, -2.0)
    assert (type(doubled), doubled, doubled.unit) == (Doubled, [-2], "m")


@pytest.mark.parametrize("holder", [dict, HeldItems], ids=["dict", "another mapping"])
def test_a_mapping_that_keeps_its_items_in_another_object_does_not_change(holder: Any) -> None:
    rows = HeldItems({"a": 1}, holder, "name")
    negated = map_leaves(lambda leaf: -leaf, rows)
    assert (type(negated), negated["a"], rows["a"]) == (HeldItems, -1, 1)
    assert negated.name == ("name" if holder is dict else "")


@pytest.mark.parametrize(
    "leaf", ["text", b"bytes", bytearray(b"x"), 1, None, range(3), {1, 2}, np.zeros(3), torch.zeros(3), Pair, object()]
)
def test_everything_else_is_a_leaf(leaf: Any) -> None:
    assert next(leaves(leaf)) is leaf
    assert map_leaves(lambda found: (found,), leaf)[0] is leaf


def test_arrays_are_found_in_every_container() -> None:
    first, second, third = torch.zeros(2), np.ones(3), torch.zeros(())
    assert list(map(id, arrays({"a": [first, "text"], "b": Pair(second, UserList([third, 1]))}))) == [
        *map(id, (first, second, third))
    ]


def test_errors_of_the_function_pass_through() -> None:
    def refuse(leaf: Any) -> None:
        raise TypeError(f"not {leaf}")

    with pytest.raises(TypeError, match="not 1"):
        map_leaves(refuse, {"a": [1]})
